"""`cloche agent NAME` without arguments, for an agent whose sandbox lives: start it before everything is imported.

`start` has the sandbox start the agent's process with this terminal's size, and notes it as the kept one. The command
goes on as ever, and finds the process running: it attaches to it. In every other case nothing is started.
"""

from __future__ import annotations

import fcntl
import json
import os

from cloche.audit.writer import append
from cloche.coding_agents import about
from cloche.coding_agents.places import AgentPlace, project_folder
from cloche.core.errors import ClocheError
from cloche.init import wire
from cloche.keeper import registry

from ._fast_path import CHANNEL, LATE_S, READ_BYTES, audit_folder, connected, frame, is_configured, recorded_facts

TYPE_CHECKING = False
if TYPE_CHECKING:
    import _socket
    from typing import Any

TERMINAL_FILE, MOST_FILE_BYTES = "terminal.json", 1 << 16  # see `_kept_terminal`
LOCK = "start.lock"
MOST_CELLS = 1 << 12
FAILED = "the process was not started"
REASON = "it continues without the caller that started it"  # as `audit.recording` has it


def start(arguments: list[str]) -> None:
    """Start the agent that the arguments name, if nothing has to be decided, asked or written first."""
    if len(arguments) != 1 or not (os.isatty(0) and os.isatty(1)) or is_configured():
        return
    try:
        place = AgentPlace(agent=arguments[0], folder=project_folder(os.getcwd()))
        # Of two at once, the second one waits until the first has noted its process.
        with open(f"{place.state}/{LOCK}", "w", opener=_opened) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            _start(place)
    except (ClocheError, OSError, ValueError, KeyError):
        pass  # the full command reports the reason


def _start(place: AgentPlace) -> None:
    state = place.state
    noted = about.read(state)
    if noted is None or noted.start is None or not noted.has_state() or not _is_free(state):
        return
    if _asks(place):
        return
    found = registry.find(place.sandbox)
    if found.entry.get("version") != wire.VERSION:
        return
    folder, link = audit_folder(), connected(found)
    if link is None or folder is None:
        return
    facts = recorded_facts(found, "terminal", noted.start.command)
    if folder:
        append(folder, "start", facts)
    size = os.get_terminal_size(0)
    order = {
        "op": "start", "waits": True, "argv": list(noted.start.command), "cwd": os.path.realpath(os.getcwd()),
        "env": {**found.entry["environment"], **found.entry.get("folder_environment", {}), **noted.start.variables},
        "user": None, "timeout_s": None, "streams": [], "is_kept": True, "remove": [],
        "terminal": [min(size.lines or 24, MOST_CELLS), min(size.columns or 80, MOST_CELLS)],
    }  # fmt: skip
    link.sendall(frame(wire.OPEN, CHANNEL, order))
    process = _started(link)
    if folder:
        end = (
            {"status": "detached", "error": None, "reason": REASON} if process else {"status": "error", "error": FAILED}
        )
        append(folder, "execution", {**facts, "limits": found.entry["limits"], **end})
    if process:
        _note(state, process)


def _asks(place: AgentPlace) -> bool:
    """Tell whether the user is asked first: earlier sessions have changed what the agent obeys."""
    from cloche.coding_agents.kept_state import state_changes
    from cloche.coding_agents.table import TABLE

    row = TABLE.get(place.agent)
    kept = state_changes(place, row) if row is not None else None
    return kept is None or bool(kept.changes or kept.cut)


def _is_free(state: str) -> bool:
    """Tell whether no process is noted."""
    try:
        with open(f"{state}/{TERMINAL_FILE}", "rb") as file:
            return not json.loads(file.read(MOST_FILE_BYTES)).get("process")
    except FileNotFoundError:
        return True


def _started(link: _socket.socket) -> str:
    """Return the id of the process; empty if it was not started."""
    link.settimeout(LATE_S)
    frames = wire.FrameBuffer()
    while data := link.recv(READ_BYTES):
        for kind, channel, body in frames.feed(data):
            event: dict[str, Any] = json.loads(bytes(body)) if channel == CHANNEL and kind == wire.EVENT else {}
            if event.get("event") == "started":
                return str(event["id"])
            if channel == CHANNEL and kind == wire.CLOSE:
                return ""
    return ""


def _opened(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _note(state: str, process: str) -> None:
    temporary = f"{state}/{TERMINAL_FILE}.{os.getpid()}"
    with open(temporary, "w", opener=lambda path, flags: os.open(path, flags | os.O_EXCL, 0o600)) as file:
        json.dump({"process": process, "modes": ""}, file)
    os.replace(temporary, f"{state}/{TERMINAL_FILE}")
