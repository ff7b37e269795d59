"""What Cloche notes of an agent on a project: which ones they are, and with what settings its sandbox was opened.

The settings are kept as a keyed hash, values of secrets included: it tells whether they have changed, and nothing else.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable, Mapping
from typing import Any

from cloche import hostfs
from cloche.core.record import asdict, dataclass

from .places import AgentPlace

ABOUT = "about.json"
# Variables of the user's on which each start depends.
ALWAYS = ("PATH", "VIRTUAL_ENV", "HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME")
MOST_BYTES = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Hold a start of an agent without options of the command line: its command, and its variables inside.

    `depends_on` are the names of the user's variables that it depends on.
    """

    command: tuple[str, ...]
    variables: Mapping[str, str]
    depends_on: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """Describe an agent's sandbox: agent, project, time of opening (seconds since 1970), hash of its settings.

    `start` is there if it was opened without options; `state` is then a hash of what the start depends on.
    """

    agent: str
    folder: str
    number: int = 0
    opened: float = 0.0
    key: str = ""
    settings: str = ""
    start: Start | None = None
    state: str = ""

    def has_settings(self, keywords: Mapping[str, Any]) -> bool:
        """Tell whether a sandbox with these keywords would be the same."""
        return self.settings == _hash(self.key, [dict(sorted(keywords.items())), _values(_names(keywords))])

    def has_state(self) -> bool:
        """Tell whether nothing has changed on which the start depends: variables, the program, this version."""
        return self.start is not None and self.state == _hash(self.key, _state(self.start))


def note(place: AgentPlace, keywords: Mapping[str, Any], start: Start | None, *, opened: float | None = None) -> None:
    """Write it down for a sandbox that was opened with these keywords, by default now."""
    key = os.urandom(32).hex()
    about = About(
        agent=place.agent, folder=place.folder, number=place.number, key=key,
        opened=time.time() if opened is None else opened,
        settings=_hash(key, [dict(sorted(keywords.items())), _values(_names(keywords))]),
        start=start, state=_hash(key, _state(start)) if start is not None else "",
    )  # fmt: skip
    os.makedirs(place.state, mode=0o700, exist_ok=True)
    folder_fd = hostfs.open_folder(place.state)
    try:
        data = json.dumps(asdict(about)).encode("utf-8", "surrogateescape")
        hostfs.replace(folder_fd, ABOUT, data, mode=0o600, permissions=0o600)
    finally:
        os.close(folder_fd)


def read(state: str) -> About | None:
    """Return what is noted in an agent's folder of state; None if nothing is, or it cannot be read."""
    try:
        with open(f"{state}/{ABOUT}", "rb") as file:
            document = json.loads(file.read(MOST_BYTES).decode("utf-8", "surrogateescape"))
        if (start := document.get("start")) is not None:
            named = {name: tuple(start[name]) for name in ("command", "depends_on")}
            document["start"] = Start(**{**start, **named})
        return About(**document)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _names(keywords: Mapping[str, Any]) -> list[str]:
    secrets = keywords.get("secrets") or ()
    return [name.partition("@")[0].partition("=")[0] for name in secrets if isinstance(name, str)]


def _values(names: Iterable[str]) -> list[str]:
    return [os.environ.get(name, "") for name in names]


def _state(start: Start) -> list[Any]:
    rows = f"{os.path.dirname(__file__)}/table.py"  # new with each version
    return [_values((*ALWAYS, *start.depends_on)), _facts(start.command[0]), _facts(rows)]


def _facts(path: str) -> list[int]:
    try:
        status = os.stat(path)
    except OSError:
        return []
    return [status.st_ino, status.st_mtime_ns, status.st_size]


def _hash(key: str, document: object) -> str:
    text = json.dumps(document, default=str)
    return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), key=bytes.fromhex(key), digest_size=32).hexdigest()
