"""Run the suites of `make test` or `make soak` beside each other, for most of the time of each is spent waiting.

A lane is a row of suites, one after the other, each in a tree of processes of its own (`adopt.py`). What the first one
prints is shown as it comes; what the others print goes to build/suites/ and is shown when all have ended, before an
account of all. Arguments: `test` or `soak`, and names of suites if only some are to be run.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOGS = ROOT / "build" / "suites"
# A cache of pytest's that several suites wrote at once would be of no use.
PYTEST = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider")
SOAK = ("--timeout", "1800")
APART = ("escape", "unit", "integration")  # what is tested in suites of their own, beside all other tests
# Where it matters whether a signal's handler may raise in the main thread, as that of a test's time-out does.
WITHOUT_ALARM = ("tests/unit/test_sync.py", "tests/integration/test_sessions.py", "tests/integration/test_crossings.py")
ENGINE = "(container or machine)"
# All that leaves something of gVisor's lying about, and what looks for that, is in one lane.
LANES: dict[str, tuple[dict[str, Sequence[str]], ...]] = {
    "test": (
        {"root": (*PYTEST, "-m", f"not soak and not {ENGINE}", "tests/integration")},
        {"engines": (*PYTEST, "-m", f"not soak and {ENGINE}")},
        {
            "escape-and-unit": (*PYTEST, "-m", f"not soak and not {ENGINE}", "tests/escape", "tests/unit"),
            "others": (*PYTEST, "-m", f"not soak and not {ENGINE}", *(f"--ignore=tests/{name}" for name in APART)),
        },
        {"user": ("scripts/test_as_user.sh",)},
    ),
    # An emulated machine has the processors for itself but for containers, which mostly wait.
    "soak": (
        {
            "root": (*PYTEST, *SOAK, "-m", f"soak and not {ENGINE}", "--ignore=tests/escape"),
            "machines": (*PYTEST, *SOAK, "-m", "soak and machine"),
        },
        {"containers": (*PYTEST, *SOAK, "-m", "soak and container and not machine")},
        {
            "without-alarm": ("timeout", "600", *PYTEST, "--timeout", "0", *WITHOUT_ALARM, "-m", "not soak"),
            "escape": (*PYTEST, *SOAK, "-m", f"soak and not {ENGINE}", "tests/escape"),
            "user": ("scripts/test_as_user.sh", "soak"),
        },
    ),
}
# The longest that a test leaves something lying about which `cloche gc` is to remove.
LIES_ABOUT_S = 180


class Suite:
    """One that runs, or has ended with a code after so many seconds, of which it computed some."""

    def __init__(self, name: str, command: Sequence[str], env: dict[str, str], *, is_shown: bool):
        self.name, self.log = name, LOGS / f"{name}.log"
        self.code: int | None = None
        self.seconds = self.computed_s = 0.0
        self._began = time.monotonic()
        with self.log.open("wb") as log:
            output = None if is_shown else log
            # A group of its own hears a Ctrl-C at the terminal once, from us.
            self._process = subprocess.Popen(
                [sys.executable, str(ROOT / "scripts" / "adopt.py"), *command],
                cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, process_group=0,
            )  # fmt: skip

    def has_ended(self) -> bool:
        """Say whether it has, and note how."""
        if self.code is None:
            pid, status, used = os.wait4(self._process.pid, os.WNOHANG)
            if pid:
                self.code = self._process.returncode = os.waitstatus_to_exitcode(status)
                self.seconds, self.computed_s = time.monotonic() - self._began, used.ru_utime + used.ru_stime
        return self.code is not None

    def tell(self, number: int) -> None:
        """Send it a signal."""
        self._process.send_signal(number)

    def account(self) -> str:
        """Say in a line how it ended."""
        outcome = "passed" if self.code == 0 else f"FAILED ({self.code})"
        return f"suites: {self.name:<16} {outcome:<14} {self.seconds:6.0f} s, of processors {self.computed_s:6.0f} s"


def run(lanes: list[list[tuple[str, Sequence[str]]]]) -> list[Suite]:
    """Run every suite of every lane, whatever came of those before; return them in the order of their ends."""
    beside = subprocess.run(["scripts/test_as_user.sh", "uid"], cwd=ROOT, capture_output=True, text=True, check=True)
    env = {**os.environ, "TESTED_BESIDE": beside.stdout.strip(), "TESTED_BESIDE_S": str(LIES_ABOUT_S)}
    shown = next(name for lane in lanes for name, _ in lane)
    ended: list[Suite] = []
    running: dict[int, Suite] = {}

    def stop(number: int, _: object) -> None:
        for lane in lanes:
            lane.clear()
        for suite in running.values():
            suite.tell(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    while True:
        for place, lane in enumerate(lanes):
            if place in running and running[place].has_ended():
                ended.append(running.pop(place))
            if place not in running and lane:
                name, command = lane.pop(0)
                running[place] = Suite(name, command, env, is_shown=name == shown)
        if not running:
            return ended
        time.sleep(0.2)


def show(suites: list[Suite]) -> None:
    """Print what was not shown yet, that of failures last, then the account."""
    for suite in sorted(suites, key=lambda suite: suite.code != 0):
        text = suite.log.read_text(errors="replace")
        if text:
            print(f"\n===== {suite.name} ({suite.log.relative_to(ROOT)}) =====\n{text}")
    for suite in suites:
        print(suite.account())


def main(target: str = "", *names: str) -> int:
    """Run the suites of a target, or those of these names; return 0 when every one passed."""
    if target not in LANES:
        print(f"suites: say which: {' or '.join(LANES)}", file=sys.stderr)
        return 2
    known = [name for lane in LANES[target] for name in lane]
    if unknown := set(names) - set(known):
        print(f"suites: unknown: {', '.join(sorted(unknown))}; known are {', '.join(known)}", file=sys.stderr)
        return 2
    LOGS.mkdir(parents=True, exist_ok=True)
    lanes = [[(name, command) for name, command in lane.items() if name in (names or known)] for lane in LANES[target]]
    count = sum(map(len, lanes))
    suites = run(lanes)
    show(suites)
    return 0 if len(suites) == count and all(suite.code == 0 for suite in suites) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
