"""`cloche exec -it` and `cloche shell` in tmux, a terminal as people have it: what is on its screen is read."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.processes import wait_for_word

pytestmark = [pytest.mark.soak, pytest.mark.both_users]
PATIENCE_S = 60
CLOCHE = f"{shlex.quote(sys.executable)} -m cloche"


class Screen:
    """Type into a tmux window, and read what it shows."""

    def __init__(self, socket: Path) -> None:
        self._tmux = ["tmux", "-S", str(socket), "-f", os.devnull]
        self._run("new-session", "-d", "-x", "100", "-y", "30", "env PS1='host> ' sh")

    def _run(self, *words: str) -> str:
        return subprocess.run([*self._tmux, *words], check=True, capture_output=True, text=True, timeout=30).stdout

    def type(self, *keys: str) -> None:
        """Press keys, by tmux's names for them."""
        self._run("send-keys", "--", *keys)

    def see(self, what: str) -> str:
        """Wait until the screen shows something; return all of it."""
        deadline = time.monotonic() + PATIENCE_S
        while what not in (shown := self._run("capture-pane", "-p")):
            assert time.monotonic() < deadline, f"{what!r} is not on the screen:\n{shown}"
            time.sleep(0.05)
        return shown

    def resize(self, columns: int, rows: int) -> None:
        """Give the window another size."""
        self._run("resize-window", "-x", str(columns), "-y", str(rows))

    def close(self) -> None:
        """End it, and the programs in it."""
        self._run("kill-server")


@pytest.fixture
def screen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Screen]:
    """Give a window with a shell of this machine in it, and nobody's settings."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    if shutil.which("tmux") is None:
        pytest.skip("missing: tmux (make setup-system)")
    found = Screen(tmp_path / "socket")
    try:
        yield found
    finally:
        found.close()


def test_a_shell_in_a_window(screen: Screen) -> None:
    """Lines are edited, programs of the whole screen draw, sizes follow, Ctrl-Z stays inside; then all is as before.

    Thousands of lines of output come whole and in order.
    """
    screen.type(f"{CLOCHE} shell --env PS1='box> '", "Enter")
    screen.see("box>")
    screen.type("echo wrng", "Left", "Left", "o", "Enter")
    screen.see("\nwrong")
    screen.type("clear; stty size", "Enter")
    screen.see("30 100")
    screen.resize(120, 40)
    screen.type("clear; stty size", "Enter")
    screen.see("40 120")
    screen.type("clear; seq 3000 | tail -n 35; echo en''d", "Enter")
    shown = screen.see("\nend")
    assert [line for line in shown.splitlines() if line.isdigit()] == [str(n) for n in range(2966, 3001)]
    screen.type("clear; seq 500 | less", "Enter")
    screen.see("\n39")
    screen.type("G")
    screen.see("\n500")
    screen.type("q")
    screen.type("clear; sleep 95001", "Enter")
    wait_for_word("95001")
    screen.type("C-z")
    screen.see("Stopped")
    screen.type("kill %1; clear; echo ba''ck", "Enter")
    screen.see("\nback")
    screen.type("C-d")
    screen.see("\nhost>")
    screen.type("clear; stty size; echo here", "Enter")
    screen.see("\nhere")
    wait_for_word("95001", is_there=False)


def test_many_shells_one_after_the_other(screen: Screen) -> None:
    """Twenty of them leave the terminal as it was, whatever ended each."""
    screen.type("stty -g > before", "Enter")
    for number in range(20):
        screen.type(f"clear; {CLOCHE} exec -it -- sh -c 'stty raw; exit {number}'; echo co''de $?", "Enter")
        screen.see(f"code {number}\n")
    screen.type("clear; stty -g | cmp - before && echo sa''me", "Enter")
    screen.see("same")
