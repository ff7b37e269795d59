"""Runs of many kinds at once, some of them cancelled, killed or in forked children: each gets its own, and no more."""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import cloche
from cloche.backends.local.backend import LocalBackend
from cloche.core.errors import BackendUnavailable, OutcomeUnknown, StartFailed

pytestmark = [pytest.mark.soak, pytest.mark.both_users]
THREADS, SECONDS, PAUSE_S, CHILD_S = 6, 60.0, 0.4, 60
PROGRAM = """
import os, sys
mark, tmp = open("in").read(), os.environ["TMPDIR"]
print(mark, flush=True)
print(mark, file=sys.stderr, flush=True)
seen = set(os.listdir(".")) - {"cloche-main.py"}, os.listdir(tmp), os.environ["MARK"]
assert seen == ({"in"}, [], mark), seen
for name in ("out", tmp + "/left"): open(name, "w").write(mark)
"""
TAILS = {
    "value": "mark",
    "code": "raise SystemExit(7)",
    "sleeps": "import time\ntime.sleep(60)",
    "floods": "while True: print('x' * 1000)",
    "leaves": "if os.fork() == 0:\n    import time\n    os.setsid(); time.sleep(20); os._exit(0)\nmark",
    "dies": "os.kill(os.getpid(), 9)",
}


def options(kind: str, mark: str, level: str) -> dict[str, Any]:
    """Return how a program is run: with its mark in a file and in a variable."""
    found: dict[str, Any] = {"code": PROGRAM + TAILS[kind], "files": {"in": mark}, "env": {"MARK": mark}}
    limits = {"timeout": 0.3 if kind == "sleeps" else 60, "output_limit": 4096}
    return {**found, **limits, "level": level}


def check(result: cloche.Result, kind: str, mark: str, out: Path) -> None:
    """A result has marks of its own alone; where nobody has killed it, all of them."""
    said = {word for word in f"{result.stdout} {result.stderr}".split() if word.startswith("MK")}
    result.save_files(out) if result.save_files is not None else None
    saved = {path.name: path.read_text() for path in out.iterdir()} if out.exists() else {}
    assert said <= {mark}, said
    assert result.value in (None, mark)
    assert saved in ({}, {"out": ""}, {"out": mark}), saved
    assert "AssertionError" not in result.stderr, result.stderr
    if kind in ("value", "code", "leaves") and result.status not in ("signaled", "timeout"):
        assert (said, saved) == ({mark}, {"out": mark})
        assert (result.value, result.exit_code) == ((None, 7) if kind == "code" else (mark, 0))


class Storm:
    """Run programs from a thread in one way or the other, as a generator of random numbers says."""

    def __init__(self, level: str, folder: Path, number: int):
        self.level, self.folder, self.random = level, folder, random.Random(number)

    def go(self) -> None:
        """Do one thing."""
        self.random.choice([self.run, self.run, self.gather, self.fork])()

    def run(self) -> None:
        """Run one program."""
        kind, mark = self._next()
        check(cloche.run(**options(kind, mark, self.level)), kind, mark, self.folder / mark)

    def gather(self) -> None:
        """Run three in a loop, one of which is cancelled at some time."""

        async def work() -> None:
            chosen = [self._next() for _ in range(3)]
            tasks = [asyncio.ensure_future(cloche.arun(**options(*one, self.level))) for one in chosen]
            await asyncio.sleep(self.random.random() * self.random.choice([0.003, 0.03, 0.3]))
            tasks[0].cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            for (kind, mark), result in zip(chosen, ended, strict=True):
                if isinstance(result, cloche.Result):
                    check(result, kind, mark, self.folder / mark)
                elif not isinstance(result, asyncio.CancelledError | OutcomeUnknown | StartFailed | BackendUnavailable):
                    raise result

        asyncio.run(work())

    def fork(self) -> None:
        """Run one program in a child of this process."""
        import signal

        _, mark = self._next()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                signal.alarm(CHILD_S)
                check(cloche.run(**options("value", mark, self.level)), "value", mark, self.folder / mark)
                code = 0
            except (OutcomeUnknown, StartFailed, BackendUnavailable):
                code = 0
            finally:
                os._exit(code)
        status = os.waitpid(pid, 0)[1]
        assert status == 0 or os.WIFSIGNALED(status), status

    def _next(self) -> tuple[str, str]:
        return self.random.choice([*TAILS, "value"]), f"MK{self.random.getrandbits(64):016x}"


def below(pid: int) -> Iterator[int]:
    """Yield all descendants of a process."""
    with suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split():
                yield int(child)
                yield from below(int(child))


@pytest.mark.parametrize("level", ["jail", "confined"])
@pytest.mark.parametrize("kills", [False, True], ids=["whole", "killed"])
def test_each_result_is_of_its_own_run(level: str, kills: bool, tmp_path: Path) -> None:
    """Six threads for a minute; helpers, parents of guests and guests are killed at random where it `kills`."""
    for _ in range(3):
        cloche.run("1", level=level)
    asyncio.run(cloche.arun("1", level=level))  # nothing is imported any more, which no fork survives
    end, faults = time.monotonic() + SECONDS, list[BaseException]()

    def work(number: int) -> None:
        storm = Storm(level, tmp_path, number)
        while time.monotonic() < end and not faults:
            try:
                storm.go()
            except (OutcomeUnknown, StartFailed, BackendUnavailable) as error:  # the probe process may be killed, too
                if not kills:
                    faults.append(error)
            except BaseException as error:
                faults.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
    for one in threads:
        one.start()
    chosen = random.Random(THREADS)
    while any(one.is_alive() for one in threads):
        threads[0].join(PAUSE_S * chosen.random())
        if kills and (found := sorted(below(os.getpid()))):
            with suppress(OSError):
                os.kill(chosen.choice(found), 9)
    LocalBackend().collect_garbage()  # folders of helpers that were killed when their caller was gone
    assert faults == []
