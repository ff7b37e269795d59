"""What tests of the audit log share: many events from many processes, and what somebody may do to them."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

Tampering = Callable[[list[bytes], random.Random], list[bytes]]

_WRITER = """
import sys
from cloche.audit.log import Audit
audit = Audit(sys.argv[1], file_bytes=int(sys.argv[4]))
for number in range(int(sys.argv[3])):
    audit.record("execution", writer=int(sys.argv[2]), number=number, status="ok", code_sha256="ab" * 32)
"""
# Writes half of a line, as a machine does that loses its power, and is gone.
_KILLED_WRITER = """
import os, signal, sys
from cloche.audit.log import Audit
real = os.write
def write(file, data):
    real(file, data[: int(len(data) * float(sys.argv[2]))])
    os.kill(os.getpid(), signal.SIGKILL)
os.write = write
Audit(sys.argv[1]).record("execution", status="ok")
"""


def write_from_processes(folder: Path, *, writers: int, events: int, file_bytes: int = 1 << 30) -> None:
    """Let processes write at once, each so many events."""
    commands = [[str(folder), str(number), str(events), str(file_bytes)] for number in range(writers)]
    running = [subprocess.Popen([sys.executable, "-c", _WRITER, *arguments]) for arguments in commands]
    assert [process.wait(300) for process in running] == [0] * writers


def be_killed_while_writing(folder: Path, *, written: float = 0.5) -> None:
    """Leave the given part of an event's line, as a process does that dies in the middle of its write."""
    done = subprocess.run([sys.executable, "-c", _KILLED_WRITER, str(folder), str(written)], check=False)
    assert done.returncode == -signal.SIGKILL


def change_a_byte(lines: list[bytes], dice: random.Random) -> list[bytes]:
    """Change one bit of one byte anywhere, newlines among them."""
    whole = bytearray(b"".join(lines))
    whole[dice.randrange(len(whole))] ^= 1 << dice.randrange(8)
    return [bytes(whole)]


def remove_a_line(lines: list[bytes], dice: random.Random) -> list[bytes]:
    """Take out one line that is not the last."""
    place = dice.randrange(len(lines) - 1)
    return lines[:place] + lines[place + 1 :]


def swap_two_lines(lines: list[bytes], dice: random.Random) -> list[bytes]:
    """Let two lines change places."""
    one, other = dice.sample(range(len(lines)), 2)
    changed = list(lines)
    changed[one], changed[other] = lines[other], lines[one]
    return changed


def repeat_a_line(lines: list[bytes], dice: random.Random) -> list[bytes]:
    """Put one line in a second time."""
    place = dice.randrange(len(lines))
    return [*lines[: place + 1], *lines[place:]]


def cut_the_end(lines: list[bytes], dice: random.Random) -> list[bytes]:
    """Take away some of the last lines."""
    return lines[: -dice.randrange(1, len(lines))]


TAMPERINGS: Mapping[str, Tampering] = {
    "a changed byte": change_a_byte,
    "a removed line": remove_a_line,
    "swapped lines": swap_two_lines,
    "a repeated line": repeat_a_line,
}


def cloche(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Call the command line."""
    return subprocess.run(
        [sys.executable, "-m", "cloche", *words],
        env={**os.environ, **environ},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def rewrite(folder: Path, lines: Sequence[bytes]) -> None:
    """Put other content into the log's file."""
    (folder / "audit.jsonl").write_bytes(b"".join(lines))


def lines_of(folder: Path) -> list[bytes]:
    """Return the lines of the log's file, each with its newline."""
    return (folder / "audit.jsonl").read_bytes().splitlines(keepends=True)
