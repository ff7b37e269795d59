"""Run the tests of `make test`, or of an area of `make soak`, in lanes beside each other: they mostly wait.

A lane is one session of pytest, or of pytest-xdist with some workers, each below an adopter of its own (adopt.py). What
the first lane prints is shown as it comes, what the others print when all have ended. What failed gets a second look
then: alone, one test after the other. What passes there is named in the last lines and fails nothing; what was left
behind (tests/harness/outcome.py) has no second look. Arguments: `test`, or `soak` and an area.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "gate"
IS_ROOT, IN_CI = os.geteuid() == 0, os.environ.get("CI", "").lower() in {"true", "1"}
OTHER = "3.13"
YOUNGER = (
    "3.14",
    "3.14t",
    "3.15",
    "3.15t",
)  # also without the lock of the interpreter: in the soak, where they are here
NO_SUCH_PYTHON = 77  # of scripts/other_python.sh
SECOND_LOOKS = 10  # more failures than that are no accident
AT_ONCE = 3  # in the soak; `make test` runs all of its lanes beside each other
# The longest that a test leaves something lying about which `cloche gc` is to remove, seen by those beside it.
LIES_ABOUT_S = "180"
PYTEST = ("-m", "pytest", "-p", "no:cacheprovider")
# What does not depend on the Python that runs it: the project's own scripts and text, and other languages' compilers.
FOR_ONE_PYTHON = ("test_adopt.py", "test_gate.py", "test_layering.py", "backends/test_toolchain.py")
# What does by the standard library's plainest parts; `make soak AREA=other-python` tries it there too.
PLAIN = ("agent", "audit", "autofix", "config", "mcp", "records", "server", "skills")
LOCAL = "soak and not container and not machine"
SERVICE = tuple(sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_service*.py")))
SERVICE += ("tests/integration/test_docs.py",)
LONG = ("--timeout", "1800")
REMOTE = tuple(sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests/integration").glob("test_remote*.py")))
REMOTE += tuple(f"tests/conformance/test_{name}.py" for name in ("cloche", "daytona", "e2b"))
WORKSPACE = tuple(sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").glob("[is]*/test_workspace*.py")))
# Where it matters whether a signal's handler may raise in the main thread, as that of a test's time-out does.
SIGNALS = ("tests/unit/test_sync.py", "tests/integration/test_sessions.py", "tests/integration/test_crossings.py")
AREAS: dict[str, tuple[str, ...]] = {
    "machines": (*LONG, "-m", "soak and machine"),
    "containers": (*LONG, "-m", "soak and container and not machine"),
    "escape": (*LONG, "-m", LOCAL, "tests/escape"),
    "sessions": (
        *LONG,
        "-m",
        LOCAL,
        "-k",
        "session and not service",
        "--ignore=tests/escape",
        *(f"--ignore={path}" for path in (*REMOTE, *WORKSPACE)),
    ),
    "local": (
        *LONG,
        "-m",
        LOCAL,
        "-k",
        "not session and not keeper and not service",
        "--ignore=tests/escape",
        *(f"--ignore={path}" for path in (*REMOTE, *WORKSPACE)),
    ),
    "remote": (*LONG, "-m", LOCAL, *REMOTE),
    "service": (*LONG, "-m", LOCAL, *SERVICE),
    "keeper": (*LONG, "-m", LOCAL, "tests/integration/test_keeper.py"),
    "workspace": (*LONG, "-m", LOCAL, *WORKSPACE),
    "signals": ("--timeout", "0", "-m", "not soak", *SIGNALS),
}
ALL_AREAS = (*AREAS, "other-python", "frameworks")
# The suites that frameworks publish, each in an environment of its own; what pytest is told beside, and the tests.
FRAMEWORKS: dict[str, tuple[str, ...]] = {
    "inspect_ai": ("tests/frameworks/test_inspect_ai.py",),
    "deepagents06": ("tests/frameworks/test_deepagents.py",),
    "deepagents07": ("tests/frameworks/test_deepagents.py",),
    "deepagents_code": ("tests/frameworks/test_deepagents_code.py",),
    "pydantic_ai": ("-o", "asyncio_mode=strict", "tests/frameworks/test_pydantic_ai.py"),
}
# What notebooks use: libraries that show things, and Jupyter.
NOTEBOOKS = {"notebooks": ("tests/frameworks/test_nbconvert.py",)}
# The packages of E2B and Daytona at the lower bounds of their extras.
OLDER = {"remote_older": tuple(path for path in REMOTE if "cloche" not in path)}


class Account(NamedTuple):
    """How many tests passed, which failed, and what else is wrong."""

    passed: int = 0
    failed: Sequence[str] = ()
    wrong: Sequence[str] = ()


class Lane:
    """Tests and who runs them: `command` up to pytest's own words, `python` for the workers, if it has any."""

    def __init__(
        self, name: str, command: Sequence[str], folder: Path, tests: Sequence[str], spread: Sequence[str] = ()
    ):
        self.name, self._command, self._tests = name, command, (*spread, *tests)
        self._outcome, self.log = folder / "outcome", WORK / f"{name}.log"
        self.seconds = self.computed_s = 0.0

    def start(self, tests: Sequence[str] = (), *, is_shown: bool) -> None:
        """Start all of it, or only these tests, alone."""
        self._outcome.unlink(missing_ok=True)
        self.code: int | None = None
        self._began = time.monotonic()
        with self.log.open("wb") as log:
            output = None if is_shown else log
            # A group of its own hears a Ctrl-C at the terminal once, from us.
            self._process = subprocess.Popen(
                [*self._command, *self._words(tests or self._tests)],
                cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output, process_group=0,
            )  # fmt: skip

    def _words(self, tests: Sequence[str]) -> list[str]:
        """Return what follows the command, to run these tests."""
        return ["-q", f"--outcome={self._outcome}", *tests]

    def has_ended(self) -> bool:
        """Say whether it has, and note how."""
        if self.code is None:
            pid, status, used = os.wait4(self._process.pid, os.WNOHANG)
            if pid:
                self.code = self._process.returncode = os.waitstatus_to_exitcode(status)
                self.seconds += time.monotonic() - self._began
                self.computed_s += used.ru_utime + used.ru_stime
        return self.code is not None

    def read(self) -> Account:
        """Return what came of its tests."""
        if self.code == NO_SUCH_PYTHON:
            return Account(wrong=[f"no Python {OTHER} here"])
        if self.code not in (0, 1) or not self._outcome.exists():
            return Account(wrong=[f"exit code {self.code}, and no account of the tests; see {self.log}"])
        found = json.loads(self._outcome.read_text())
        wrong = [f"left behind: {line}" for line in found["left"]]
        unsaid = self.code == 1 and not found["failed"] and not wrong
        return Account(found["passed"], found["failed"], ["exit code 1"] if unsaid else wrong)

    def tell(self, number: int) -> None:
        """Send it a signal."""
        os.killpg(self._process.pid, number)


class Check(Lane):
    """What `make check` does, beside the tests, which mostly wait; they go first."""

    def __init__(self) -> None:
        super().__init__("check", ["nice", "scripts/check.sh"], folder("check"), ())

    def _words(self, tests: Sequence[str]) -> list[str]:
        return list(tests)

    def read(self) -> Account:
        """Say whether all is as it should be."""
        return Account(wrong=["what `make check` says is not so"] if self.code else [])


def here(python: str = sys.executable) -> list[str]:
    """Return the command of a lane that runs as this user, with a Python."""
    return [python, "scripts/adopt.py", python, *PYTEST]


def marked(name: str) -> list[str]:
    """Return the files that speak of a mark: to read all others takes each worker seconds."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(path.relative_to(ROOT)) for path in files if name in path.read_text() and "escape" not in path.parts]


def spread(python: str, workers: int) -> list[str]:
    """Return the words that have so many workers share the tests, each below an adopter of its own."""
    return [
        "--max-worker-restart=0",  # the tests of one that died would be waited for without an end
        "--dist",
        "loadgroup",
        "--tx",
        f"{workers}*popen//python={shlex.join([python, 'scripts/adopt.py', python])}",
    ]


def gate_lanes(user: Path) -> list[Lane]:
    """Return all of `make test`: everything, what depends on the user, another Python, and style and types.

    The units compute more than they wait, and all workers read all that is theirs: so units have one process, and no
    worker of the others reads them.
    """
    words = ["-m", "not soak", "--durations=25"]
    lanes = [
        Lane("all", here(), folder("all"), [*words, "--ignore=tests/unit"], spread(sys.executable, 5)),
        Lane("units", here(), folder("units"), [*words, "tests/unit"]),
    ]
    if IS_ROOT:
        words = ["-m", "both_users and not soak", "--durations=10", *marked("both_users"), "tests/escape"]
        command = ["scripts/test_as_user.sh", str(user)]
        lanes.append(Lane("user", command, user / "home", words, spread(str(user / "venv/bin/python"), 2)))
    return [*lanes, other_python((*FOR_ONE_PYTHON, *PLAIN)), Check()]


def other_python(left_out: Sequence[str], version: str = OTHER) -> Lane:
    """Return what another Python may do otherwise: the units, but for some."""
    other = f"build/python{version}"
    install = ["bash", "-c", 'scripts/other_python.sh "$1" "$2" && exec "${@:3}"', "install", version, other]
    ignored = [f"--ignore=tests/unit/{name}" for name in left_out]
    words = ["-m", "not soak", *ignored, "tests/unit", "tests/integration/test_public_api.py"]
    return Lane(f"python{version}", [*install, *here(f"{ROOT}/{other}/bin/python")], folder(f"python{version}"), words)


def soak_lanes(user: Path, area: str) -> list[Lane]:
    """Return an area, or all; the ordinary user repeats the escapes."""
    lanes = [Lane(name, here(), folder(name), words) for name, words in AREAS.items() if area in ("", name)]
    if IS_ROOT and area in ("", "escape"):
        command = ["scripts/test_as_user.sh", str(user)]
        lanes.append(Lane("user", command, user / "home", [*LONG, "-m", "soak and both_users"]))
    if area in ("", "other-python"):
        younger = [version for version in YOUNGER if shutil.which(f"python{version}")]
        lanes += [other_python(FOR_ONE_PYTHON, version) for version in (OTHER, *younger)]
    of_areas = {"frameworks": FRAMEWORKS, "remote": OLDER, "sessions": NOTEBOOKS}
    with_packages = {name: tests for key, rows in of_areas.items() if area in ("", key) for name, tests in rows.items()}
    return [*lanes, *framework_lanes(user, with_packages)]


def framework_lanes(user: Path, suites: Mapping[str, Sequence[str]]) -> list[Lane]:
    """Return suites in environments with packages of their own, of this user and of an ordinary one."""
    lanes = []
    user.chmod(0o755)
    for name, tests in suites.items():
        # Their own warnings are theirs to mend.
        words = [*LONG, "-o", "filterwarnings=default", *tests]
        target = f"build/frameworks/{name}"
        install = ["bash", "-c", 'scripts/frameworks.sh "$1" "$2" && exec "${@:3}"', "install", name, target]
        lanes.append(Lane(name, [*install, *here(f"{ROOT}/{target}/bin/python")], folder(name), words))
        if IS_ROOT and name in FRAMEWORKS:  # the servers of the others need root
            command = ["env", f"FRAMEWORK={name}", "scripts/test_as_user.sh", str(user / name)]
            (user / name).mkdir()
            lanes.append(Lane(f"{name}-user", command, user / name / "home", ["-k", "not well_typed", *words]))
    return lanes


def folder(name: str) -> Path:
    """Return an empty folder of a lane's own."""
    path = WORK / name
    path.mkdir(parents=True, exist_ok=True)
    return path


stopped_by = 0
running: list[Lane] = []


def stop(number: int, _: object) -> None:
    """Hand a signal to all that run; nothing is started any more."""
    global stopped_by
    stopped_by = number
    for lane in running:
        if not lane.has_ended():
            lane.tell(number)


def run(lanes: Sequence[Lane], tests: Sequence[str] = (), at_once: int = AT_ONCE) -> None:
    """Run lanes, some at once, or only these tests of one; then show what was not shown, that of failures last."""
    waiting = list(lanes)
    while running or (waiting and not stopped_by):
        while waiting and len(running) < at_once and not stopped_by:
            running.append(waiting.pop(0))
            running[-1].start(tests, is_shown=running[-1] is lanes[0])
        for lane in [lane for lane in running if lane.has_ended()]:
            running.remove(lane)
            if lane.code:
                print(f"\ngate: {lane.name} has ended with code {lane.code}; see {lane.log}", flush=True)
        time.sleep(0.1)
    for lane in sorted(lanes[1:], key=lambda lane: lane.code != 0):
        print(f"\n===== {lane.name} =====\n{lane.log.read_text(errors='replace')}", flush=True)


def judge(lanes: list[Lane], at_once: int = AT_ONCE) -> int:
    """Run all, look again at what failed, and say what came of it in the last lines; return 0 when all is well."""
    run(lanes, at_once=at_once)
    if not IN_CI and any(lane.code == NO_SUCH_PYTHON for lane in lanes):
        print(f"gate: no Python {OTHER} here (pyenv or your system's packages bring it): left out")
        lanes = [lane for lane in lanes if lane.code != NO_SUCH_PYTHON]
    accounts = {lane.name: lane.read() for lane in lanes}
    passed = sum(account.passed for account in accounts.values())
    wrong = [f"{name}: {line}" for name, account in accounts.items() for line in account.wrong]
    failed = {f"{lane.name}: {test}" for lane in lanes for test in accounts[lane.name].failed}
    doubtful = set(failed) if len(failed) <= SECOND_LOOKS else set()
    for lane in lanes if doubtful else ():
        if tests := accounts[lane.name].failed:
            print(f"\n===== a second look, alone: {lane.name} =====", flush=True)
            run([lane], tests)
            again = lane.read()
            wrong += [f"{lane.name}: {line}" for line in again.wrong]
            failed -= {f"{lane.name}: {test}" for test in tests if test not in again.failed}
    print()
    for lane in lanes:
        print(f"gate: {lane.name}: {lane.seconds:.0f} s, of processors {lane.computed_s:.0f} s")
    for line in [*wrong, *sorted(failed)]:
        print(f"FAILED {line}")
    print(f"{passed + len(doubtful - failed)} passed, {len(failed) + len(wrong)} failed")
    if doubtful - failed:
        print("passed at the second look:", *sorted(doubtful - failed), sep="\n  ")
    return 128 + stopped_by if stopped_by else bool(failed or wrong or not passed)


def main(target: str = "", area: str = "") -> int:
    """Run a target's lanes."""
    if target not in {"test", "soak"} or area not in {"", *ALL_AREAS}:
        print(f"usage: gate.py test, or gate.py soak [{' | '.join(ALL_AREAS)}]", file=sys.stderr)
        return 2
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # each of thousands of processes would compile everything anew
    if IS_ROOT:
        beside = subprocess.run(
            ["scripts/test_as_user.sh", "uid"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        os.environ["TESTED_BESIDE"] = beside.stdout.strip()
    os.environ["TESTED_BESIDE_S"] = LIES_ABOUT_S
    user = Path(tempfile.mkdtemp(prefix="test-as-user.", dir="/var/tmp"))
    try:
        lanes = gate_lanes(user) if target == "test" else soak_lanes(user, area)
        return judge(lanes, len(lanes) if target == "test" else AT_ONCE)
    finally:
        shutil.rmtree(user, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
