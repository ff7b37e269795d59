"""What Cloche notes of an agent on a project: which ones they are, and with what settings its sandbox was opened.

The settings are kept as a keyed hash, values of secrets included: it tells whether they have changed, and nothing else.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping
from typing import Any

from cloche import hostfs
from cloche.core.record import asdict, dataclass

from .places import AgentPlace

ABOUT = "about.json"
MOST_BYTES = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """Describe an agent's sandbox: agent, project, time of opening (seconds since 1970), hash of its settings."""

    agent: str
    folder: str
    number: int = 0
    opened: float = 0.0
    key: str = ""
    settings: str = ""

    def has_settings(self, keywords: Mapping[str, Any]) -> bool:
        """Tell whether a sandbox with these keywords would be the same."""
        return self.settings == _hash(self.key, keywords)


def note(place: AgentPlace, keywords: Mapping[str, Any]) -> None:
    """Write it down for a sandbox that is opened with these keywords."""
    key = os.urandom(32).hex()
    about = About(
        agent=place.agent, folder=place.folder, number=place.number, opened=time.time(), key=key,
        settings=_hash(key, keywords),
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
            return About(**json.loads(file.read(MOST_BYTES).decode("utf-8", "surrogateescape")))
    except (OSError, ValueError, TypeError):
        return None


def _hash(key: str, keywords: Mapping[str, Any]) -> str:
    secrets = keywords.get("secrets") or ()
    names = [name.partition("@")[0].partition("=")[0] for name in secrets if isinstance(name, str)]
    values = [os.environ.get(name, "") for name in names]
    text = json.dumps([dict(sorted(keywords.items())), values], default=str)
    return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), key=bytes.fromhex(key), digest_size=32).hexdigest()
