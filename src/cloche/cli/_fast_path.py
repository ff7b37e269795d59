"""`cloche exec` and `sandbox exec` with `[--cwd DIR] NAME -- COMMAND`, as fast as a shell, with hardly any imports.

`run_named` does the same as the full `exec` command for these arguments only, in a sandbox without a network, without a
terminal and without configuration. In every other case it returns None before anything is started or recorded, and the
full command runs. An ordinary end with an exit code is reported here; `_rare_ends` reports every other end with the
modules of the full command. `tests/integration/test_fast_path.py` compares both.
"""

from __future__ import annotations

import os
import stat
import sys
from time import monotonic

from cloche.audit.chain import sha256_of
from cloche.audit.writer import append
from cloche.core.errors import ClocheError
from cloche.hostfs import own_folder
from cloche.init import wire
from cloche.keeper import plain_json, registry

TYPE_CHECKING = False
if TYPE_CHECKING:
    import _socket
    from collections.abc import Sequence
    from types import FrameType
    from typing import Any

_signal: Any = __import__("_signal")
MOST_BYTES_OF_WORDS = 1 << 16
MOST_EVENT_BYTES, MOST_PARTS = 1 << 16, 40_000  # larger events go through guest_json, with at most MOST_PARTS values
MOST_EVENTS, MOST_DOTENV_BYTES = 16, 1 << 16
READ_BYTES = 1 << 18
START_S, LATE_S, MOST_S = 60.0, 10.0, 1e18
CHANNEL, KILL_CHANNEL = 1, 2
NOT_FOUND = 127
# Variables and files that configure Cloche: with any of them the full command runs.
OURS, AUDIT = ("CLOCHE_", "SANDBOX_"), "CLOCHE_AUDIT"
USER_FILES = ("config.json", "cloche.yaml", "config.yaml")
CHECKOUT_FILES = ("config.yaml", "cloche.yaml")
# If the output of a failed command has one of these, `advise` looks for advice on it.
ADVISED = (b"ptrace", b"ensurepip")


def run_named(arguments: list[str]) -> FastRun | None:
    """Run `NAME -- COMMAND` and return the run; None if the fast path does not apply and nothing was started."""
    cwd, arguments = (
        (arguments[1], arguments[2:]) if arguments[:1] == ["--cwd"] and arguments[1:] else ("/workspace", arguments)
    )
    name, command = arguments[0] if arguments else "", arguments[2:]
    if arguments[1:2] != ["--"] or not command or not command[0] or not cwd or not registry.is_name(name):
        return None
    if sum(map(len, command)) > MOST_BYTES_OF_WORDS or os.isatty(1) or os.isatty(2) or is_configured():
        return None
    folder = audit_folder()
    if folder is None:
        return None
    try:
        sandbox = registry.find(name)
        environment = _environment_of(sandbox)
        link = None if environment is None else connected(sandbox)
    except (ClocheError, OSError, ValueError):
        return None  # the full command reports the reason
    if link is None or environment is None:
        return None
    _end_orderly()
    return FastRun(sandbox, link, command, environment, cwd, folder).run()


def is_configured() -> bool:
    """Return whether the environment or a file may change the configuration; see `config.sources`."""
    if any(name.startswith(OURS) and name != AUDIT for name in os.environ):
        return True
    home, folder = os.environ.get("HOME", ""), own_folder("XDG_CONFIG_HOME", ".config")
    if not os.path.isabs(home) or folder is None:
        return True
    paths = [f"{home}/.cloche/config.json", *(f"{folder}/{name}" for name in USER_FILES), *CHECKOUT_FILES]
    return any(map(os.path.lexists, paths)) or _may_configure(".env")


def _may_configure(path: str) -> bool:
    """Return whether a `.env` may hold a variable of Cloche's; most projects have a `.env` for themselves."""
    if not os.path.lexists(path):
        return False
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            data = os.read(file, MOST_DOTENV_BYTES) if stat.S_ISREG(os.fstat(file).st_mode) else b""
        finally:
            os.close(file)
    except OSError:
        return True
    return not 0 < len(data) < MOST_DOTENV_BYTES or any(
        prefix.encode() in data for prefix in (*OURS, "E2B_", "DAYTONA_")
    )


def audit_folder() -> str | None:
    """Return the folder of the audit log, empty if it is off; None if the full command must decide."""
    setting = os.environ.get(AUDIT, "on")
    if setting == "off":
        return ""
    if setting == "on":
        return own_folder("XDG_STATE_HOME", ".local/state")
    return os.path.normpath(setting) if os.path.isabs(setting) else None


def recorded_facts(found: registry.Found, what: str, command: Sequence[str]) -> dict[str, Any]:
    """Return what both records of a command have in the audit log."""
    return {
        "door": "cli", "uid": os.getuid(), "pid": os.getpid(), "run": os.urandom(8).hex(), "what": what,
        "backend": "local", "language": "bash", "argv_sha256": sha256_of("\0".join(command)),
        "network": found.entry["policy"]["network"],
    }  # fmt: skip


def _environment_of(sandbox: registry.Found) -> dict[str, str] | None:
    """Return the environment of commands; None if it must be measured again or the sandbox needs the full command."""
    entry = sandbox.entry
    policy = entry.get("policy", {})
    if entry.get("version") != wire.VERSION or entry.get("backend") != "local" or policy.get("network") != "off":
        return None
    if "bash" not in policy["languages"] or any(map(os.path.exists, entry.get("environment_until", ("/",)))):
        return None
    return {**entry["environment"], **entry.get("folder_environment", {})}


def connected(sandbox: registry.Found) -> _socket.socket | None:
    """Return a connection to the keeper of a name; None if the greeting is another sandbox's or another version's."""
    link = sandbox.reach()
    link.sendall(frame(wire.HELLO, 0, {"version": wire.VERSION}))
    link.settimeout(LATE_S)
    frames = wire.FrameBuffer()
    while data := link.recv(READ_BYTES):
        for kind, _, body in frames.feed(data):
            greeting = plain_json.read(body) if kind == wire.HELLO else {}
            facts = greeting.get("keeper") or {}
            is_it = facts.get("name") == sandbox.name and facts.get("boot") == registry.boot_id()
            link.settimeout(None)
            return link if is_it and greeting.get("version") == wire.VERSION else None
    return None


def frame(kind: int, channel: int, body: dict[str, Any]) -> bytes:
    """Return a frame with a JSON body."""
    return wire.frame(kind, channel, plain_json.write(body))


def _end_orderly() -> None:
    """Handle SIGTERM and SIGHUP like Ctrl-C: the command is killed and waited for. Ignored signals stay ignored."""

    def end(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    for number in (_signal.SIGTERM, _signal.SIGHUP):
        if _signal.getsignal(number) is _signal.SIG_DFL:
            _signal.signal(number, end)


class _Failed(Exception):
    """Report that init or the keeper refused the operation with `error`, or that the connection was lost (None)."""

    def __init__(self, message: str, error: dict[str, Any] | None = None):
        super().__init__(message)
        self.error = error


class FastRun:
    """Run one command: the request, and its result so far."""

    def __init__(
        self, found: registry.Found, link: _socket.socket, command: list[str], environment: dict[str, str], cwd: str,
        folder: str,
    ):  # fmt: skip
        self.found, self.link, self.folder = found, link, folder
        self.command, self.environment = command, environment
        self.cwd = cwd if cwd.startswith("/") else f"/workspace/{cwd}"
        self.limits: dict[str, Any] = found.entry["limits"]
        self.timeout_s: float = self.limits["timeout_s"]
        self.frames = wire.FrameBuffer()
        self.credit = wire.Credit()
        self.kept: dict[int, Any] = {wire.STDOUT: [], wire.STDERR: []}  # pieces; a HeadTail above the limit of output
        self.sizes = {wire.STDOUT: 0, wire.STDERR: 0}
        self.is_flooded = False
        self.events: list[dict[str, Any]] = []  # `started`, then `ended`
        self.is_closed = self.has_waited = False
        # The result: an exit code, or an error; all are None if `_rare_ends` must report the end.
        self.code: int | None = None
        self.failure: _Failed | None = None
        self.stopped: BaseException | None = None
        self.ends_at = self.look_at = monotonic() + START_S  # when it is due; when to check next
        self.began_at = 0.0
        self.facts: dict[str, Any] = {}

    def run(self) -> FastRun | None:
        """Run the command to its end; return None if nothing was started."""
        if self.folder and not self._record_start():
            return None
        self.began_at = monotonic()
        order = {
            "op": "start", "waits": True, "argv": self.command, "env": self.environment, "cwd": self.cwd,
            "user": None, "timeout_s": self.timeout_s, "streams": [wire.STDOUT, wire.STDERR], "terminal": None,
            "is_kept": False, "remove": [],
        }  # fmt: skip
        try:
            self._send(frame(wire.OPEN, CHANNEL, order))
            while not self.is_closed:
                self._take_next()
        except _Failed as failure:
            self.failure = failure
        except BaseException as error:  # Ctrl-C, a signal, a closed output pipe
            self._stop()
            self.stopped = error
        else:
            code = self._plain_code(self.events[1])
            if code is not None and (not self.folder or self._record_end(self.events[1], code)):
                self.code = code
                tell_unread_input()
        return self

    # The wire.

    def _send(self, data: bytes) -> None:
        try:
            self.link.sendall(data)
        except OSError as error:
            raise _Failed(f"the sandbox has ended: the connection is lost: {error}") from error

    def _receive(self) -> bytes:
        """Return the next bytes; empty if none arrive in time."""
        left_s = self.look_at + LATE_S - monotonic()
        if left_s <= 0:
            self._check_time()
        self.link.settimeout(max(0.01, left_s))
        try:
            data = self.link.recv(READ_BYTES)
        except TimeoutError:
            return b""
        except OSError as error:
            raise _Failed(f"the sandbox has ended: the connection is lost: {error}") from error
        if not data:
            raise _Failed("the sandbox has ended: the connection was closed from inside")
        return data

    def _take_next(self) -> None:
        """Process the next frames, and pass output on."""
        try:
            for kind, channel, body in self.frames.feed(self._receive()):
                if channel == CHANNEL:
                    self._take(kind, body)
        except ValueError as error:  # WireError, or invalid JSON
            raise _Failed(f"the sandbox has ended: it broke the protocol: {error}") from error

    def _take(self, kind: int, body: bytes) -> None:
        if kind == wire.DATA:
            stream, data = wire.read_data(body)
            self.credit.note_received(stream, len(data))
            if stream not in self.kept:
                raise wire.WireError(f"stream {stream} has no content")
            self._pass_on(stream, bytes(data))
            granted = self.credit.note_consumed(stream, len(data))
            if granted:
                self._send(wire.grant_frame(CHANNEL, stream, granted))
        elif kind == wire.EVENT:
            self._take_event(_read(body))
        elif kind == wire.CLOSE:
            self.is_closed = True
            error = _read(body).get("error")
            if len(self.events) < 2 or isinstance(error, dict):
                details = error if isinstance(error, dict) else {"kind": "closed", "message": "the operation has ended"}
                raise _Failed(str(details.get("message", "")), details)
        elif kind not in (wire.END, wire.WINDOW):
            raise wire.WireError(f"a frame of kind {kind} from a sandbox")

    def _take_event(self, event: dict[str, Any]) -> None:
        is_waiting = not self.has_waited and not self.events and event.get("event") == "waiting"  # for a free place
        self.ends_at = self.look_at = monotonic() + self.timeout_s + (START_S if is_waiting else 0.0)
        self.has_waited = True
        if not is_waiting:
            self.events.append(event)
        if len(self.events) > MOST_EVENTS:
            raise wire.WireError("too many events of one operation")

    def _pass_on(self, stream: int, data: bytes) -> None:
        """Keep the part of the output that a result keeps, and write all of it; kill the command at the flood limit."""
        self.sizes[stream] += len(data)
        buffer = self.kept[stream]
        if isinstance(buffer, list) and self.sizes[stream] > self.limits["output_bytes"]:
            from cloche.core.events import HeadTail

            pieces, buffer = buffer, HeadTail(self.limits["output_bytes"])
            for piece in pieces:
                buffer.add(piece)
            self.kept[stream] = buffer
        (buffer.append if isinstance(buffer, list) else buffer.add)(data)
        if self.is_flooded:
            return
        began_at = monotonic()
        _write(stream, data)
        waited_s = monotonic() - began_at  # time spent on a slow reader of our output does not count
        self.ends_at, self.look_at = self.ends_at + waited_s, self.look_at + waited_s
        if self.sizes[stream] > self.limits["flood_bytes"]:
            self.is_flooded = True
            self._kill("output_limit")

    def _kill(self, cause: str) -> None:
        self._send(frame(wire.ASK, CHANNEL, {"do": "kill", "cause": cause}))
        if self.events:  # if it has ended already, its children
            self._send(frame(wire.OPEN, KILL_CHANNEL, {"op": "kill", "id": self.events[0].get("id", "")}))

    def _stop(self) -> None:
        """Kill the command and wait for its end; drop further output."""
        until = monotonic() + LATE_S
        self.is_flooded = True
        try:
            self._kill("cancelled")
            while not self.is_closed and monotonic() < until:
                self._take_next()
        except (_Failed, ClocheError, OSError):
            pass  # it is gone

    def _check_time(self) -> None:
        """Raise _Failed if the sandbox has not reported the end long after it was due."""
        if not self.events:
            raise _Failed("the sandbox did not answer, and was closed; the process may have run")
        from cloche.keeper.attach import visit

        paused_s = float(visit(self.found, "info").get("paused_s") or 0.0)
        self.look_at = monotonic()
        if self.look_at >= self.ends_at + paused_s + LATE_S:
            raise _Failed("the sandbox has ended: it did not end a process after its time-out")

    # The result.

    def _plain_code(self, ended: dict[str, Any]) -> int | None:
        """Return the exit code of a command that ended by itself, if there is nothing else to report; else None."""
        status = ended.get("status")
        if not isinstance(status, int) or not os.WIFEXITED(status & 0xFFFF) or ended.get("cause") or self.is_flooded:
            return None
        code = os.WEXITSTATUS(status & 0xFFFF)
        if code == NOT_FOUND or any(map(ended.get, ("dropped", "pids_hits", "denied", "is_full"))):
            return None
        output = b"".join(map(_joined, self.kept.values())).lower() if code else b""
        return None if any(phrase in output for phrase in ADVISED) else code

    def _record_start(self) -> bool:
        """Write the start event; return False if it cannot be written: then nothing may run."""
        self.facts = recorded_facts(self.found, "exec", self.command)
        try:
            append(self.folder, "start", self.facts)
        except ClocheError:
            return False
        return True

    def _record_end(self, ended: dict[str, Any], code: int) -> bool:
        enforcement = self.found.entry["enforcement"]
        try:
            append(
                self.folder, "execution",
                {
                    **self.facts, "limits": self.limits, "status": "error" if code else "ok", "exit_code": code,
                    "duration_s": _seconds(ended.get("usage")),
                    "level": enforcement["level"],
                    "enforcement": {name: row["state"] for name, row in enforcement["controls"].items()},
                    "stdout_bytes": len(_joined(self.kept[wire.STDOUT])),
                    "stderr_bytes": len(_joined(self.kept[wire.STDERR])),
                    "is_truncated": any(not isinstance(pieces, list) for pieces in self.kept.values()), "files": 0,
                },
            )  # fmt: skip
        except ClocheError:
            return False
        return True


def _seconds(usage: object) -> float:
    """Return the wall time that the sandbox reports, 0 if it is not a plausible number."""
    wall_s = usage.get("wall_s") if isinstance(usage, dict) else None
    return round(float(wall_s), 6) if isinstance(wall_s, int | float) and abs(wall_s) < MOST_S else 0.0


def _joined(pieces: Any) -> bytes:  # noqa: ANN401 - a list, or HeadTail, which is not imported
    return b"".join(pieces) if isinstance(pieces, list) else pieces.joined()


def _write(fd: int, data: bytes) -> None:
    unwritten = memoryview(data)
    while unwritten:
        try:
            unwritten = unwritten[os.write(fd, unwritten) :]
        except BlockingIOError:  # the descriptor's other owner made it non-blocking
            import select

            select.select([], [fd], [])


def _read(body: bytes) -> dict[str, Any]:
    """Return a JSON object that a guest may have written. Raises ValueError (WireError is a subclass)."""
    if len(body) <= MOST_EVENT_BYTES:
        try:
            return plain_json.read(body)
        except ValueError:
            pass
    from cloche.core.guest_json import decode

    document, _ = decode(body.decode("utf-8", "replace"), MOST_PARTS, mends_text=True)
    if not isinstance(document, dict):
        raise ValueError("a frame holds no JSON object")
    return document


def tell_unread_input() -> None:
    """Warn if standard input is a file or pipe that still holds data: commands get it with -i only."""
    if _has_unread_input():
        sys.stderr.write("cloche: standard input was not passed on; -i does that\n")
        sys.stderr.flush()


def _has_unread_input() -> bool:
    try:
        facts = os.fstat(0)
        if stat.S_ISREG(facts.st_mode):
            return facts.st_size > os.lseek(0, 0, os.SEEK_CUR)
        if not stat.S_ISFIFO(facts.st_mode):
            return False
        import fcntl
        import termios

        return any(fcntl.ioctl(0, termios.FIONREAD, bytes(4)))
    except OSError:  # it is closed
        return False
