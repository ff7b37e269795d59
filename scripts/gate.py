"""Run all of `make test` beside each other, or the files whose path has AREA in it: `gate.py [AREA]`.

A place is a user, a Python and an environment; its workers (tests/harness/worker.py) each run one file of tests after
the other. There is one list of files over all places, longest first by the seconds of the last time, and so many run at
once as keep the processors busy. What failed gets a second look in the end, alone; what passes there is named in the
last lines and fails nothing; what was left behind (tests/harness/outcome.py) has no second look.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "gate"
# Seconds of each file, and of the tests in it that need an engine, by place: of the last run here, or as they are kept.
KEPT, LAST = ROOT / "scripts" / "gate_times.json", "times.json"
IS_ROOT, IN_CI = os.geteuid() == 0, os.environ.get("CI", "").lower() in {"true", "1"}
OTHER = "3.13"
ENGINES = ("docker", "gvisor", "machine")  # tests/harness/worker.py
NO_SUCH_PYTHON = 77  # of scripts/other_python.sh
SECOND_LOOKS = 10  # more failures than that are no accident
# Tests wait for half of their time; more of them at once cost more of the processors each, as these cache less.
AT_ONCE = int(os.environ.get("GATE_AT_ONCE") or 2 * (os.cpu_count() or 1) + 1)
EVERY_S, SLOWEST, DEFAULT_S = 10, 10, 1.0
# The longest that a test leaves something lying about which `cloche gc` is to remove, seen by those beside it.
LIES_ABOUT_S = "180"
PYTEST = ("-m", "pytest", "-p", "no:cacheprovider", "-q")
# What another Python may do otherwise: processes, signals, descriptors, the interpreter's own parts, connections.
# `make soak AREA=other-python` tries all units there.
FOR_OTHER = ("forkserver", "interpreter", "init", "jail", "keeper", "blocking", "core/test_record.py", "test_sync.py")
# The kernel's part, and that of pandas and matplotlib, which no Python changes.
FOR_ONE = ("jail/test_ending.py", "jail/test_metadata_calls.py", "interpreter/test_rich.py")
# With the packages of requirements/frameworks/ray.txt, in an environment of their own.
OF_RAY = ("tests/integration/test_ray.py",)
FOR_OTHER += ("test_connections.py", "records/test_database.py", "test_hostfs.py", "backends/test_live_session.py")


@dataclass
class Place:
    """Who runs tests, with what command up to pytest's words; `install` comes first."""

    name: str
    command: Sequence[str]
    files: Sequence[str]
    temporary: Path
    words: Sequence[str] = ("-m", "not soak")
    install: Sequence[str] = ()
    at_most: int = AT_ONCE


@dataclass
class Job:
    """Files, or tests, that one worker runs.

    `engine` may be there once only: of a file, those tests are run that need it, or those that need none. With "any" it
    is all of them.
    """

    place: Place
    tests: Sequence[str]
    seconds: float = DEFAULT_S
    engine: str = ""


@dataclass
class Account:
    """What came of it so far."""

    passed: int = 0
    failed: dict[tuple[str, str], str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    seconds: Counter[str] = field(default_factory=Counter)
    computed_s: dict[str, float] = field(default_factory=dict)
    times: dict[str, dict[str, list[Any]]] = field(default_factory=dict)


class Process:
    """Hold a command that runs; what it prints goes to a file."""

    def __init__(self, name: str, command: Sequence[str], *, kept: Sequence[int] = ()):
        self.log = WORK / f"{name}.log"
        with self.log.open("wb") as log:
            # A group of its own hears a Ctrl-C at the terminal once, from us.
            self._process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0, pass_fds=kept
            )
        self.code: int | None = None
        self.computed_s = 0.0

    def has_ended(self) -> bool:
        """Say whether it has, and note how."""
        if self.code is None:
            pid, status, used = os.wait4(self._process.pid, os.WNOHANG)
            if pid:
                self.code = self._process.returncode = os.waitstatus_to_exitcode(status)
                self.computed_s = used.ru_utime + used.ru_stime
        return self.code is not None

    def tell(self, number: int) -> None:
        """Send it a signal."""
        if not self.has_ended():
            os.killpg(self._process.pid, number)


class Worker(Process):
    """Hold a process that runs files of a place, one after the other."""

    def __init__(self, place: Place, number: int):
        self.place, self.job, self.begun, self.left = place, None, "", None
        self.began = 0.0
        self.engine = ""
        self.job: Job | None
        self.left: list[str] | None
        self.connection, theirs = socket.socketpair()
        folder = place.temporary / f"{place.name}-{number}"
        words = [*place.command, f"--jobs={theirs.fileno()}", f"--basetemp={folder}", *place.words, "tests"]
        with theirs:
            super().__init__(f"{place.name}-{number}", words, kept=[theirs.fileno()])
        self._rest = b""

    def give(self, job: Job) -> None:
        """Ask for a job."""
        self.job, self.began, self.begun = job, time.monotonic(), job.tests[0]
        self.engine = job.engine or self.engine
        with suppress(OSError):  # it has ended meanwhile, which is noted as that
            self.connection.sendall(json.dumps({"tests": list(job.tests), "engine": job.engine}).encode() + b"\n")

    def read(self) -> Iterator[dict[str, Any]]:
        """Return what it has said since; there must be something."""
        try:
            *lines, self._rest = (self._rest + self.connection.recv(1 << 20)).split(b"\n")
        except ConnectionError:
            return
        yield from map(json.loads, lines)

    def let_end(self) -> None:
        """Ask for nothing more."""
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)


class Gate:
    """Run jobs, and hold what came of them."""

    def __init__(self, jobs: Sequence[Job], at_once: int):
        # An engine's tests follow one another, so they count together.
        chains: Counter[tuple[str, str]] = Counter()
        for job in jobs:
            chains[job.place.name, job.engine or job.tests[0]] += job.seconds
        self.waiting = sorted(jobs, key=lambda job: -chains[job.place.name, job.engine or job.tests[0]])
        self._at_once, self.account = at_once, Account()
        self._parts = {(job.place.name, job.tests[0], job.engine) for job in jobs}
        self._installing: dict[str, Process] = {}
        self._beside: Sequence[Process] = ()
        self._left_out: set[str] = set()
        self._is_ready = {job.place.name: not job.place.install for job in jobs}
        self._workers: list[Worker] = []
        self._started: Counter[str] = Counter()
        self._selector = selectors.DefaultSelector()
        self._began = self._told = time.monotonic()
        self.total, self.done, self.stopped_by = len(self.waiting), 0, 0

    def run(self, beside: Sequence[Process] = ()) -> None:
        """Run all of it, beside processes of another kind."""
        self._beside = beside
        for place in {job.place.name: job.place for job in self.waiting if job.place.install}.values():
            self._installing[place.name] = Process(f"install-{place.name}", place.install)
        while (self.waiting or self._busy()) and not self.stopped_by:
            self._end_installations()
            self._hand_out()
            self._listen()
            self._tell_progress()
        for worker in self._workers:
            worker.let_end()
        self._told = 0.0
        while self._workers or self._installing or not all(process.has_ended() for process in beside):
            self._end_installations()
            self._listen()
            if not self.waiting:
                self._tell_progress()

    def stop(self, number: int, _: object) -> None:
        """Hand a signal to all that run; nothing is started any more."""
        self.stopped_by = number
        for process in (*self._workers, *self._installing.values(), *self._beside):
            process.tell(number)

    def _busy(self) -> list[Worker]:
        return [worker for worker in self._workers if worker.job]

    def _end_installations(self) -> None:
        for name, process in list(self._installing.items()):
            if process.has_ended():
                del self._installing[name]
                self._is_ready[name] = process.code == 0
                self.account.computed_s[process.log.stem] = process.computed_s
                if process.code:
                    self._leave_out(name, process)

    def _leave_out(self, name: str, process: Process) -> None:
        self.waiting = [job for job in self.waiting if job.place.name != name]
        if process.code == NO_SUCH_PYTHON and not IN_CI:
            say(f"no Python {OTHER} here (pyenv or your system's packages bring it): left out")
        else:
            tail = process.log.read_text(errors="replace")[-2000:]
            self.account.wrong.append(f"{name}: not installed, code {process.code}: {tail}")

    def _hand_out(self) -> None:
        """Give the longest that may begin to who may run it, while there is room."""
        for job in list(self.waiting):
            if len(self._busy()) + len(self._installing) >= self._at_once:
                return
            if self._is_ready[job.place.name] and (worker := self._worker_for(job)):
                self.waiting.remove(job)
                worker.give(job)

    def _worker_for(self, job: Job) -> Worker | None:
        of_place = [worker for worker in self._workers if worker.place is job.place]
        if job.engine:
            owners = [worker for worker in of_place if worker.engine == job.engine]
            if owners:
                return None if owners[0].job else owners[0]
        # Who has an engine is left to it while there is more for it.
        wanted = {other.engine for other in self.waiting if other.place is job.place}
        free = [worker for worker in of_place if not worker.job]
        if job.engine:
            free = [worker for worker in free if not worker.engine]
        else:
            free = [worker for worker in free if not worker.engine or worker.engine not in wanted]
        if free:
            return free[0]
        return self._start(job.place) if len(of_place) < job.place.at_most else None

    def _start(self, place: Place) -> Worker:
        self._started[place.name] += 1
        worker = Worker(place, self._started[place.name])
        self._selector.register(worker.connection, selectors.EVENT_READ, worker)
        self._workers.append(worker)
        return worker

    def _listen(self) -> None:
        """Read what workers say, and note who has ended."""
        for key, _ in self._selector.select(0.2):
            for line in key.data.read():
                self._note(key.data, line)
        for worker in list(self._workers):
            if worker.has_ended():
                for line in worker.read() if self._has_more(worker) else ():
                    self._note(worker, line)
                self._bury(worker)

    @staticmethod
    def _has_more(worker: Worker) -> bool:
        with selectors.DefaultSelector() as selector:
            selector.register(worker.connection, selectors.EVENT_READ)
            return bool(selector.select(0))

    def _bury(self, worker: Worker) -> None:
        self._workers.remove(worker)
        self._selector.unregister(worker.connection)
        worker.connection.close()
        before = self.account.computed_s.get(worker.place.name, 0.0)
        self.account.computed_s[worker.place.name] = before + worker.computed_s
        if (worker.left is None or worker.job) and not self.stopped_by:
            log = worker.log.read_text(errors="replace")[-4000:]
            why = f"its worker ended with code {worker.code} in {worker.begun}: {log}"
            for test in worker.job.tests if worker.job else ():
                self._fail(worker, test, why)
            if worker.job is None:
                self.account.wrong.append(f"{worker.place.name}: {why}")
            self.done += 1
        left = [f"{worker.place.name}: left behind: {line}" for line in worker.left or ()]
        self.account.wrong += [
            line for line in left if line not in self.account.wrong
        ]  # what has no owner, several find

    def _note(self, worker: Worker, line: dict[str, Any]) -> None:
        account = self.account
        match line:
            case {"begun": test}:
                worker.begun = test
            case {"passed": test, "part": part, "seconds": seconds}:
                account.passed += part == "call"
                account.seconds[f"{worker.place.name}: {test}"] += seconds
            case {"failed": test, "why": why}:
                self._fail(worker, test, why)
            case {"skipped": _, "why": why}:
                account.skipped[why] += why != "needs root" or not IS_ROOT  # which else has them itself
            case {"left": left}:
                worker.left = left
            case {"done": _, "used": used, "other": other} if worker.job:
                self._end_job(worker, worker.job, used, other)

    def _end_job(self, worker: Worker, job: Job, used: float, other: dict[str, list[str]]) -> None:
        worker.job, self.done = None, self.done + 1
        took = time.monotonic() - worker.began
        times = self.account.times.setdefault(job.place.name, {})
        key = part_of(job.tests[0].partition("::")[0], job.engine)
        before = times.get(key, [0, 0])
        times[key] = [round(before[0] + took, 1), round(before[1] + used, 1)]
        for engine, tests in other.items() if not job.engine else ():
            if (job.place.name, job.tests[0], engine) not in self._parts:
                self.waiting.insert(0, Job(job.place, tests, job.seconds, engine))
                self.total += 1

    def _fail(self, worker: Worker, test: str, why: str) -> None:
        self.account.failed[worker.place.name, test] = why
        say(f"FAILED {worker.place.name}: {test}\n{why}")

    def _tell_progress(self) -> None:
        now = time.monotonic()
        if now - self._told < EVERY_S:
            return
        self._told = now
        left = sum(job.seconds for job in self.waiting)
        left += sum(max(0.0, worker.job.seconds - (now - worker.began)) for worker in self._workers if worker.job)
        running = [f"{worker.place.name} {name_of(worker.begun)}" for worker in self._busy()]
        running += [f"installs {name}" for name in self._installing]
        if not self.waiting and not running:
            running = ["what is left behind is looked for, and the check goes on"]
        failed = len(self.account.failed)
        say(
            f"{now - self._began:.0f} s: {self.account.passed} passed, {failed} failed; "
            f"{self.done} of {self.total} files, about {left / self._at_once:.0f} s left; now {', '.join(running)}"
        )


def part_of(file: str, engine: str) -> str:
    """Return by what name the times of a file's tests of an engine are kept."""
    return f"{file} {engine}" if engine in ENGINES else file


def name_of(test: str) -> str:
    """Return a test's name without its folders and cases."""
    return test.partition("[")[0].rpartition("/")[2]


def say(text: str) -> None:
    """Print a line, at once."""
    print(f"gate: {text}", flush=True)


def here(python: str = sys.executable) -> list[str]:
    """Return the command of tests that run as this user, with a Python."""
    return [python, "scripts/adopt.py", python, *PYTEST]


def files_of(area: str) -> list[str]:
    """Return the files of tests whose path has these letters."""
    files = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py"))
    return [file for file in files if area in file and not file.startswith("tests/frameworks")]


def places(user: Path, temporary: Path, area: str) -> list[Place]:
    """Return all of `make test`; of an area what this user does with this Python."""
    files = files_of(area)
    units = [file for file in files if file.startswith("tests/unit/")]
    rest = [file for file in files if file not in (*units, *OF_RAY)]
    found = [Place("all", here(), rest, temporary), Place("units", here(), units, temporary, at_most=2)]
    if IS_ROOT and (of_ray := [file for file in files if file in OF_RAY]):  # a node's namespaces need root
        python = f"{ROOT}/build/frameworks/ray/bin/python"
        install = ["scripts/frameworks.sh", "ray", "build/frameworks/ray"]
        found.append(Place("ray", here(python), of_ray, temporary, install=install, at_most=1))
    if area:
        return found
    if IS_ROOT:
        marked = [file for file in rest if "tests/escape" in file or "both_users" in (ROOT / file).read_text()]
        marked += [file for file in units if "both_users" in (ROOT / file).read_text()]
        command = ["scripts/test_as_user.sh", str(user)]
        words = ("-m", "both_users and not (soak or user_soak)", "-q")
        found.append(Place("user", command, marked, user / "tmp", words, [*command, "--version"], at_most=3))
    other, install = f"build/python{OTHER}", ["scripts/other_python.sh", OTHER, f"build/python{OTHER}"]
    chosen = [file for file in units if file.startswith(tuple(f"tests/unit/{name}" for name in FOR_OTHER))]
    chosen = [file for file in chosen if not file.endswith(FOR_ONE)]
    chosen.append("tests/integration/test_public_api.py")
    python = here(f"{ROOT}/{other}/bin/python")
    found.append(Place(f"python{OTHER}", python, chosen, temporary, install=install, at_most=1))
    return found


def jobs_of(all_places: Sequence[Place]) -> list[Job]:
    """Return a job for each file, and one for each engine that tests of it are known to need."""
    known = [json.loads(path.read_text()) for path in (WORK / LAST, KEPT) if path.exists()]
    jobs = []
    for place in all_places:
        for file, engine in product(place.files, ("", *ENGINES)):
            key = part_of(file, engine)
            seconds = [times[place.name][key][0] for times in known if key in times.get(place.name, {})]
            if seconds or not engine:
                jobs.append(Job(place, [file], seconds[0] if seconds else DEFAULT_S, engine))
    return jobs


def look_again(account: Account, jobs: Sequence[Job]) -> list[str]:
    """Run what failed once more, alone, and return what passes then."""
    if not 0 < len(account.failed) <= SECOND_LOOKS:
        return []
    say("a second look, alone, at what failed")
    places = {job.place.name: replace(job.place, install=()) for job in jobs}
    again = run(Gate([Job(places[name], [test], engine="any") for name, test in account.failed], at_once=1))
    account.wrong += again.wrong
    account.passed += again.passed
    accident = [key for key in account.failed if key not in again.failed]
    for key in accident:
        del account.failed[key]
    return [f"{name}: {test}" for name, test in accident]


def run(gate: Gate, beside: Sequence[Process] = ()) -> Account:
    """Run a gate, which Ctrl-C stops."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, gate.stop)
    gate.run(beside)
    if gate.stopped_by:
        raise SystemExit(128 + gate.stopped_by)
    return gate.account


def judge(jobs: Sequence[Job], at_once: int = AT_ONCE, beside: Sequence[Process] = ()) -> int:
    """Run all, look again at what failed, and say what came of it in the last lines; return 0 when all is well."""
    began = time.monotonic()
    say(f"{len(jobs)} files of tests, about {sum(job.seconds for job in jobs) / at_once:.0f} s; {at_once} at once")
    account = run(Gate(jobs, at_once), beside)
    account.wrong += [f"{process.log.stem}:\n{process.log.read_text()}" for process in beside if process.code]
    accident = look_again(account, jobs)
    keep_times(account.times)
    print(f"\ngate: {time.monotonic() - began:.0f} s; the slowest:")
    for test, seconds in account.seconds.most_common(SLOWEST):
        print(f"  {seconds:6.1f} s  {test}")
    for name, seconds in [*account.computed_s.items(), *((process.log.stem, process.computed_s) for process in beside)]:
        print(f"gate: {name}: {seconds:.0f} s of processors")
    for why, number in sorted((+account.skipped).items()):
        print(f"skipped {number}: {why}")
    for line in [*account.wrong, *(f"{name}: {test}" for name, test in account.failed)]:
        print(f"FAILED {line}")
    failures = len(account.failed) + len(account.wrong)
    print(f"{account.passed} passed, {failures} failed")
    if accident:
        print("passed at the second look:", *accident, sep="\n  ")
    return int(bool(failures or not account.passed))


def keep_times(times: dict[str, dict[str, list[Any]]]) -> None:
    """Write down what each file took, one a line, beside what is known of others."""
    path = WORK / LAST
    kept = json.loads(path.read_text()) if path.exists() else {}
    of_places = []
    for name in sorted(kept | times):
        files = kept.get(name, {}) | times.get(name, {})
        rows = ",\n".join(f"  {json.dumps(file)}: {json.dumps(row)}" for file, row in sorted(files.items()))
        of_places.append(f"{json.dumps(name)}: {{\n{rows}\n}}")
    path.write_text("{\n" + ",\n".join(of_places) + "\n}\n")


@contextmanager
def at_work() -> Iterator[tuple[Path, Path]]:
    """Give two empty folders, of which an ordinary user's tests have one; set what all tests find."""
    WORK.mkdir(parents=True, exist_ok=True)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # each of thousands of processes would compile everything anew
    if IS_ROOT:
        uid = subprocess.run(["scripts/test_as_user.sh", "uid"], cwd=ROOT, capture_output=True, text=True, check=True)
        os.environ["TESTED_BESIDE"] = uid.stdout.strip()
    os.environ["TESTED_BESIDE_S"] = LIES_ABOUT_S
    user, temporary = tempfile.mkdtemp(prefix="test-as-user.", dir="/var/tmp"), tempfile.mkdtemp(prefix="gate.")
    try:
        yield Path(user), Path(temporary)
    finally:
        subprocess.run(["rm", "-rf", user, temporary], check=False)


def main(area: str = "") -> int:
    """Run everything, and the check beside it, or an area."""
    if area and not files_of(area):
        print(f"gate: no test's path has {area!r}", file=sys.stderr)
        return 2
    with at_work() as (user, temporary):
        jobs = jobs_of(places(user, temporary, area))
        return judge(jobs, beside=[] if area else [Process("check", ["nice", "scripts/check.sh", "beside-tests"])])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
