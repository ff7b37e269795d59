"""A kept terminal: detached by keys, by a lost terminal and by death, and attached again; on real pseudo-terminals."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import cloche
from tests.harness.terminals import Terminal

pytestmark = [pytest.mark.user_soak, pytest.mark.usefixtures("settings_of_nobody_at_a_terminal")]
DRIVER = """
import asyncio, os, sys
from cloche.cli._kept_terminal import Detached, attach_agent_terminal, run_agent_terminal, tell_detached
from cloche.execution.sandbox import AsyncSandbox
async def main():
    async with AsyncSandbox.attach("box") as sandbox:
        if sys.argv[2:]:
            ended = await run_agent_terminal(sandbox, sys.argv[2:], {"X": "y"}, "/tmp", state=sys.argv[1])
        else:
            ended = await attach_agent_terminal(sandbox, state=sys.argv[1])
    return tell_detached(ended, "box") if isinstance(ended, Detached) else ended
sys.exit(asyncio.run(main()))
"""
# A program that draws anew when its terminal's size changes, and says what it gets.
PROGRAM = r"""
import os, signal, sys, tty
def draw(*_):
    size = os.get_terminal_size(0)
    os.write(1, b"\x1b[?1049h\x1b[?2004h\x1b[?1000hdrawn %dx%d\r\n" % (size.lines, size.columns))
signal.signal(signal.SIGWINCH, draw)
tty.setraw(0)
draw()
while data := os.read(0, 100):
    if data == b"q":
        os.write(1, b"\x1b[?1049l\x1b[?2004l\x1b[?1000l")
        sys.exit(7)
    os.write(1, b"got %r\r\n" % data)
"""


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[cloche.Sandbox]:
    """Give a sandbox that is kept under the name `box`, in a place of this test's own."""
    folder = tmp_path / "runtime"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    with cloche.Sandbox(name="box", keep="10m") as sandbox:
        sandbox.write_file("/tmp/program.py", PROGRAM)
        yield sandbox
        sandbox.kill()


def driver(state: Path, *words: str) -> Terminal:
    """Run a command in the sandbox on a new terminal, or attach to it without one."""
    return Terminal("-c", DRIVER, str(state), *words, program=sys.executable)


def test_keys_detach_and_another_terminal_comes_back(box: cloche.Sandbox, tmp_path: Path) -> None:
    """The keys alone detach; the next terminal is put into the program's modes, and is drawn on anew."""
    first = driver(tmp_path, "python3", "/tmp/program.py")
    first.see("drawn 50x200")
    first.type("hello")
    first.see("got b'hello'")
    first.type("\x10x")  # the first of the keys alone is the program's
    first.see(r"got b'\x10x'")
    first.type("\x1b[200~\x10\x11\x1b[201~")
    first.see(r"\x10\x11")
    first.type("\x10")
    first.type("\x11")
    first.see("detached; the agent goes on")
    assert b"\x1b[?1049l" in first.raw.split(b"got")[-1]  # this terminal is as it was
    assert first.leave() == 0

    second = driver(tmp_path)
    second.see("drawn 49x200")
    second.see("drawn 50x200")
    assert b"\x1b[?1000h" in second.raw.split(b"drawn")[0]
    second.type("q")
    assert second.leave() == 7
    assert [row.exit_code for row in box.processes()] == [7]


@pytest.mark.soak
def test_a_lost_terminal_leaves_the_program(box: cloche.Sandbox, tmp_path: Path) -> None:
    """A closed one, a killed command, another terminal that takes it over: the next one has all of it."""
    with driver(tmp_path, "python3", "/tmp/program.py") as second:
        second.see("drawn 50x200")
        second.resize(20, 60)
        os.kill(second.pid, signal.SIGWINCH)
        second.see("drawn 20x60")
    # its terminal is closed: it hung up

    third = driver(tmp_path)
    third.see("drawn 50x200")
    os.kill(third.pid, signal.SIGKILL)
    third.leave()

    fourth = driver(tmp_path)
    fourth.see("drawn 50x200")
    fifth = driver(tmp_path)
    fourth.see("from another terminal")
    assert fourth.leave() == 0
    fifth.see("drawn 50x200")
    fifth.type("q")
    assert fifth.leave() == 7
    assert [row.exit_code for row in box.processes()] == [7]


STOPS = """
import os, signal, tty
tty.setraw(0)
print("ready", end="\\r\\n", flush=True)
if os.read(0, 10) == b"\\x1a":
    os.kill(os.getpid(), signal.SIGSTOP)
    print("went on", end="\\r\\n")
"""


@pytest.mark.soak
def test_ctrl_z_does_not_stop_a_program_for_ever(box: cloche.Sandbox, tmp_path: Path) -> None:
    """A program that stops itself goes on, where no shell could continue this command."""
    at = driver(tmp_path, "python3", "-c", STOPS)
    at.see("ready")
    at.type("\x1a")
    at.see("suspended itself")
    at.see("went on")
    assert at.leave() == 0
