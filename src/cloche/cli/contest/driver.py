"""The process that a peer's library lives in, spoken to line by line."""

from __future__ import annotations

import json
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from .turns import Turn

ANSWER_S = 60.0
CLOSING_S = 30.0


class PeerFailed(Exception):
    """Report a peer's own words about why it did not run."""


class Driver:
    """Start a driver program and give it orders; the stack that it is given ends it."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], stack: ExitStack) -> None:
        self._words = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - the stack closes it
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-peer-"))
        self._link, theirs = socket.socketpair()
        stack.callback(self._link.close)
        self._answers = stack.enter_context(self._link.makefile("rb"))
        with theirs:
            self._process = subprocess.Popen(
                command, stdin=theirs.fileno(), stdout=theirs.fileno(), stderr=self._words, env=dict(env), cwd=folder
            )
        stack.callback(self._close)

    def wait_until_set_up(self) -> None:
        """Wait for the first answer. Raises PeerFailed with the peer's own words."""
        self._answer(ANSWER_S)

    def turn(self) -> Turn:
        """Let it run once; the time is its own measurement."""
        said = self._ask("turn", ANSWER_S)
        return Turn(said["ms"], said["output"].encode())

    def burst(self, runs: int, threads: int, limit_s: float) -> tuple[int, float]:
        """Let it run from several threads of its own; return runs and seconds."""
        said = self._ask(f"burst {runs} {threads} {limit_s}", limit_s + ANSWER_S)
        return said["runs"], said["seconds"]

    def _ask(self, order: str, patience_s: float) -> dict[str, Any]:
        try:
            self._link.sendall(f"{order}\n".encode())
        except OSError:
            raise PeerFailed(self._last_words()) from None
        return self._answer(patience_s)

    def _answer(self, patience_s: float) -> dict[str, Any]:
        self._link.settimeout(patience_s)
        try:
            line = self._answers.readline()
        except TimeoutError:
            raise PeerFailed(f"no answer within {patience_s:.0f} s") from None
        if not line:
            raise PeerFailed(self._last_words())
        said: dict[str, Any] = json.loads(line)
        if "error" in said:
            raise PeerFailed(said["error"])
        return said

    def _last_words(self) -> str:
        self._words.seek(0)
        return self._words.read().decode(errors="replace").strip()[-300:] or "ended without a word"

    def _close(self) -> None:
        """Hang up, which is the order to end; a driver that does not is killed."""
        self._link.shutdown(socket.SHUT_WR)
        try:
            self._process.wait(CLOSING_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
