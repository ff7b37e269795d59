"""A window of tmux, a terminal as people have it: keys are typed into it, and its screen is read."""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

PATIENCE_S, POLL_S = 60.0, 0.05
ENDED = "the program has ended with "
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
        # The shell waits for the program: tmux does not always notice the end of its own child at once.
        command = f'{shlex.join(words)}; echo "{ENDED}$?"; exec cat'
        settings = ("set", "-g", "default-terminal", "tmux-256color", ";")
        self._run(*settings, "new-session", "-d", *size, command, env={**ENV, **(env or {})})

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

    def all(self) -> str:
        """Return all lines that were shown, those above the screen too."""
        return self._run("capture-pane", "-p", "-S", "-")

    def see(self, *what: str, patience_s: float = PATIENCE_S) -> str:
        """Wait until the screen shows one of the texts; return all of it."""
        return self.wait(lambda shown: any(text in shown for text in what), str(what), patience_s)

    def wait(self, fits: Callable[[str], bool], what: str, patience_s: float = PATIENCE_S) -> str:
        """Wait until the screen fits; return it."""
        deadline = time.monotonic() + patience_s
        while not fits(shown := self.shown()):
            assert time.monotonic() < deadline, f"{what} is not on the screen:\n{self.all()}"
            assert ENDED not in shown, f"{what} was not shown:\n{self.all()}"
            time.sleep(POLL_S)
        return shown

    def exit_code(self, patience_s: float = PATIENCE_S) -> int:
        """Wait until the program has ended; return its exit code as a shell has it."""
        shown = self.wait(lambda shown: ENDED in shown, "its end", patience_s)
        return int(shown.rpartition(ENDED)[2].split()[0])

    def resize(self, columns: int, rows: int) -> None:
        """Give the window another size."""
        self._run("resize-window", "-x", str(columns), "-y", str(rows))

    def close(self) -> None:
        """End it, and the programs in it."""
        self._run("kill-server")
