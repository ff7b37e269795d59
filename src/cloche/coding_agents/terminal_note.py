"""Which process has an agent's terminal, and which modes it has set there: what another terminal is attached with.

terminal.json    in the agent's folder of state (`AgentPlace.state`), written by the command that carries the terminal
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from cloche import hostfs
from cloche.core.errors import InvalidRequest

TERMINAL_FILE, MOST_FILE_BYTES = "terminal.json", 1 << 16


class TerminalNote:
    """Keep in a folder which process has the agent's terminal, and the modes that it has set there."""

    def __init__(self, state: str):
        self._state = state
        self._kept: Mapping[str, Any] = {}

    def read(self) -> Mapping[str, Any]:
        """Return what was kept; empty without a file, or with a damaged one."""
        try:
            with open(f"{self._state}/{TERMINAL_FILE}", "rb") as file:
                document = json.loads(file.read(MOST_FILE_BYTES))
        except (OSError, ValueError):
            return {}
        return document if isinstance(document, dict) else {}

    def process(self) -> str:
        """Return the id of the process. Raises InvalidRequest."""
        self._kept = self.read()
        if not self._kept.get("process"):
            raise InvalidRequest("no agent's terminal is kept here; start the agent: cloche agent NAME")
        return str(self._kept["process"])

    def modes(self) -> bytes:
        """Return the sequences that set the recorded modes."""
        with suppress(ValueError):
            return bytes.fromhex(str(self._kept.get("modes") or ""))
        return b""

    def keep(self, document: Mapping[str, Any]) -> None:
        """Keep this, completely or not at all; without room it is as if the program had set no modes."""
        if document == self._kept:
            return
        self._kept = document
        with suppress(OSError):
            os.makedirs(self._state, mode=0o700, exist_ok=True)
            fd = hostfs.open_folder(self._state)
            try:
                hostfs.replace(fd, TERMINAL_FILE, json.dumps(document).encode(), mode=0o600)
            finally:
                os.close(fd)

    def keep_modes(self, modes: bytes) -> None:
        """Keep these modes for the process."""
        self.keep({**self._kept, "modes": modes.hex()})


LOST = "lost"  # no process has this id


def process_of(state: str) -> str:
    """Return the id of the process that has the agent's terminal; empty if it has ended, LOST if its sandbox has."""
    return str(TerminalNote(state).read().get("process") or "")


def mark_lost(state: str) -> None:
    """Note that the sandbox has ended with the agent, if it ran: another sandbox has other processes by its ids."""
    note = TerminalNote(state)
    if note.read().get("process"):
        note.keep({"process": LOST, "modes": ""})
