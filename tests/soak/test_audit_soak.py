"""Ten thousand events from eight processes are one chain, and whatever is done to it is found by the command line."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cloche.audit.log import Audit
from cloche.audit.verify import Reading, verify
from tests.harness.audits import TAMPERINGS, cloche, cut_the_end, lines_of, rewrite, write_from_processes

pytestmark = pytest.mark.soak

WRITERS, EVENTS_EACH = 8, 1250
MORE_TRIES = 10  # of each kind of tampering, besides the one that the command line is asked about


def test_tampering_with_ten_thousand_events_is_found(tmp_path: Path) -> None:
    """A changed byte, a removed line, swapped and repeated lines, and with the head kept elsewhere a cut end."""
    folder = tmp_path / "log"
    write_from_processes(folder, writers=WRITERS, events=EVENTS_EACH)
    where = ("audit", "verify", "--folder", str(folder))
    head = cloche("audit", "head", "--folder", str(folder)).stdout.strip()
    assert head.startswith(f"{WRITERS * EVENTS_EACH}:")
    assert cloche(*where, "--head", head).returncode == 0
    told = [(line.fields()["writer"], line.fields()["number"]) for line in Reading(str(folder))]
    assert sorted(told) == [(writer, number) for writer in range(WRITERS) for number in range(EVENTS_EACH)]
    lines, dice = lines_of(folder), random.Random(0)
    for what, tamper in TAMPERINGS.items():
        rewrite(folder, tamper(lines, dice))
        found = cloche(*where)
        assert found.returncode == 1, f"{what}: {found.stdout}"
        assert "NOT whole" in found.stdout
        for _ in range(MORE_TRIES):
            rewrite(folder, tamper(lines, dice))
            assert not verify(str(folder)).is_whole, what
    kept = tmp_path / "heads.txt"
    kept.write_text(f"{head}\n")
    for cut in (lines[:-1], cut_the_end(lines, dice)):
        rewrite(folder, cut)
        found = cloche(*where, "--head-file", str(kept))
        assert (found.returncode, "its end was cut" in found.stdout) == (1, True)
    rewrite(folder, lines)
    assert cloche(*where, "--head-file", str(kept)).returncode == 0


def test_killed_writers_leave_a_whole_chain(tmp_path: Path) -> None:
    """Processes are killed while they write, again and again; every event that was confirmed is in the chain."""
    folder = tmp_path / "log"
    writer = (
        "import os, sys\nfrom cloche.audit.log import Audit\naudit = Audit(sys.argv[1], file_bytes=200_000)\n"
        'while True: os.write(1, f\'{audit.record("execution", status="ok").seq}\\n\'.encode())'
    )
    confirmed: list[int] = []
    dice = random.Random(1)
    for _ in range(6):
        words = [sys.executable, "-c", writer, str(folder)]
        running = [subprocess.Popen(words, stdout=subprocess.PIPE) for _ in range(4)]
        for process in running:
            assert process.stdout is not None
            confirmed.append(int(process.stdout.readline()))
        time.sleep(dice.uniform(0.05, 0.3))  # when they are killed is left to chance
        for process in running:
            process.send_signal(signal.SIGKILL)
        for process in running:
            text, _ = process.communicate()
            confirmed += [int(line) for line in text.splitlines(keepends=True) if line.endswith(b"\n")]
    Audit(str(folder)).record("execution", status="ok", pid=os.getpid())
    found = verify(str(folder))
    assert found.is_whole, found.faults[:5]
    numbers = {line.link.seq for line in Reading(str(folder))}
    assert found.dropped or set(confirmed) <= numbers
    assert {number for number in confirmed if number > found.dropped} <= numbers
