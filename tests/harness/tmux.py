"""A window of tmux, a terminal as people have it: keys are typed into it, and its screen is read."""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

PATIENCE_S, POLL_S = 60.0, 0.05
# The server's environment is that of its windows.
ENV = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "TERM": "xterm-256color"}


class Screen:
    """Start a program in a window, type, and wait until the screen shows something."""

    def __init__(
        self,
        socket: Path,
        words: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        columns: int = 100,
        rows: int = 30,
    ) -> None:
        self._tmux = ["tmux", "-S", str(socket), "-f", os.devnull]
        size = ("-x", str(columns), "-y", str(rows))
        settings = ("set", "-g", "default-terminal", "tmux-256color", ";", "set", "-g", "remain-on-exit", "on", ";")
        self._run(*settings, "new-session", "-d", *size, f"exec {shlex.join(words)}", env={**ENV, **(env or {})})

    def _run(self, *words: str, env: Mapping[str, str] = ENV) -> str:
        return subprocess.run(
            [*self._tmux, *words], env=env, check=True, capture_output=True, text=True, timeout=30
        ).stdout

    def type(self, *keys: str) -> None:
        """Press keys, by tmux's names for them, or type a text."""
        self._run("send-keys", "--", *keys)

    def shown(self, *, colours: bool = False) -> str:
        """Return the screen; with `colours`, with the terminal's sequences for them."""
        return self._run("capture-pane", "-p", *(["-e"] if colours else []))

    def see(self, *what: str, patience_s: float = PATIENCE_S) -> str:
        """Wait until the screen shows one of the texts; return all of it."""
        return self.wait(lambda shown: any(text in shown for text in what), str(what), patience_s)

    def wait(self, fits: Callable[[str], bool], what: str, patience_s: float = PATIENCE_S) -> str:
        """Wait until the screen fits; return it."""
        deadline = time.monotonic() + patience_s
        while not fits(shown := self.shown()):
            assert time.monotonic() < deadline, f"{what} is not on the screen:\n{shown}"
            time.sleep(POLL_S)
        return shown

    def exit_code(self, patience_s: float = PATIENCE_S) -> int:
        """Wait until the program has ended; return its exit code, or the number of the signal that ended it."""
        deadline = time.monotonic() + patience_s
        while len(state := self._run("display", "-p", "#{pane_dead_status} #{pane_dead_signal}").split()) != 1:
            assert time.monotonic() < deadline, f"it has not ended:\n{self.shown()}"
            time.sleep(POLL_S)
        return int(state[0])

    def resize(self, columns: int, rows: int) -> None:
        """Give the window another size."""
        self._run("resize-window", "-x", str(columns), "-y", str(rows))

    def close(self) -> None:
        """End it, and the programs in it."""
        self._run("kill-server")
