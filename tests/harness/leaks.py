"""What a run of ours could leave on the machine, and how to tell it from what others do meanwhile.

A process is ours when its chain of parents leads to this one, or to an orphan that began after the session
did and bears our mark: a cgroup or working directory with our name, new namespaces, or the command line of
a helper. A machine may be shared, so what has a living parent elsewhere never counts, and what vanishes while
we wait was not left. Names of folders carry the number of the process that made them, for the same reason. What is
another ordinary user's does not count either: `make test` runs as root and as one of them at the same time. Nor do
orphans that went to another adopter: `make soak` runs suites of one user beside each other, each below one of its own.
"""

import functools
import os
import re
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from cloche.backends.local.prefork import close_pools
from cloche.egress.client import end_process

MARK = "cloche"
DIRECTORY_PREFIX = "cloche-"
# The user beside whose tests root's run, and how long suites of root's own may leave something: see scripts/gate.py.
BESIDE = os.environ.get("TESTED_BESIDE", "")
BESIDE_S = float(os.environ.get("TESTED_BESIDE_S", "0"))
MADE_BY = re.compile(DIRECTORY_PREFIX + r"(?:[a-z]+-)?(\d+)-")


@dataclass(frozen=True)
class Process:
    """One line of /proc; the start time tells two users of one number apart."""

    pid: int
    parent: int
    started: int

    @classmethod
    def read(cls, pid: int) -> "Process | None":
        """Return the process, or None when it is gone or already dead and only waits to be reaped."""
        try:
            stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        except OSError:
            return None
        state, parent, *rest = stat[stat.rindex(")") + 2 :].split()
        return None if state in "ZX" else cls(pid, int(parent), int(rest[17]))

    def describe(self) -> str:
        """Return its number and command line."""
        command = _proc_text(self.pid, "cmdline") or _proc_text(self.pid, "comm")
        return f"process {self.pid}: {command[:200]}"

    def is_anothers(self) -> bool:
        """Say whether it runs in another user's name, or is gone."""
        rows = [line.split() for line in _proc_text(self.pid, "status").splitlines() if line.startswith("Uid:")]
        return not rows or _is_anothers(int(rows[0][1]))

    def is_marked(self, known_namespaces: frozenset[str]) -> bool:
        """Say whether its cgroup, working directory, namespaces or command line are of our making."""
        places = _proc_text(self.pid, "cgroup") + _proc_link(self.pid, "cwd")
        namespace = _proc_link(self.pid, "ns/mnt")
        command = _proc_text(self.pid, "cmdline")
        return (
            f"/{DIRECTORY_PREFIX}" in places
            or (namespace != "" and namespace not in known_namespaces)
            or (MARK in command and " -I " in command)
        )


def _is_anothers(uid: int) -> bool:
    return str(uid) == BESIDE if os.geteuid() == 0 else uid != os.getuid()


def _proc_text(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def _proc_link(pid: int, name: str) -> str:
    try:
        return os.readlink(f"/proc/{pid}/{name}")
    except OSError:
        return ""


def _processes() -> frozenset[Process]:
    read = (Process.read(int(entry)) for entry in os.listdir("/proc") if entry.isdigit())
    return frozenset(process for process in read if process)


@functools.cache
def adopter() -> int:
    """Measure who adopts orphans here: pid 1, or who asked for them: a service manager, or scripts/adopt.py."""
    child = subprocess.run(
        ["sh", "-c", "sleep 60 >/dev/null 2>&1 & echo $!"], capture_output=True, text=True, check=True
    ).stdout
    orphan = Process.read(int(child))
    assert orphan is not None
    os.kill(orphan.pid, 9)
    return orphan.parent


def is_of_this_suite(pid: int) -> bool:
    """Say whether a process lives below who adopts our orphans: other suites that run now may have another."""
    while pid not in (0, adopter()):
        process = Process.read(pid)
        pid = process.parent if process else 0
    return pid != 0


def _mounts() -> frozenset[str]:
    return frozenset(line for line in Path("/proc/self/mountinfo").read_text().splitlines() if MARK in line)


def _cgroups() -> frozenset[str]:
    return frozenset(
        os.path.join(folder, name)
        for folder, names, _ in os.walk("/sys/fs/cgroup")
        for name in names
        if name.startswith(DIRECTORY_PREFIX)
    )


def _temporary_directories() -> frozenset[str]:
    runtime = os.environ.get("XDG_RUNTIME_DIR", "/run")
    places = {tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm", "/run", runtime}
    return frozenset(
        str(entry)
        for place in places
        if os.access(place, os.R_OK | os.X_OK)
        for entry in Path(place).glob(f"{DIRECTORY_PREFIX}*")
    )


@dataclass(frozen=True)
class Snapshot:
    """What is on the machine at one moment."""

    adopter: int
    processes: frozenset[Process]
    namespaces: frozenset[str]
    mounts: frozenset[str]
    cgroups: frozenset[str]
    directories: frozenset[str]

    @classmethod
    def take(cls) -> "Snapshot":
        """Look at the machine now; what is kept warm for later runs is ended first."""
        close_pools()
        end_process()
        processes = _processes()
        namespaces = frozenset(_proc_link(process.pid, "ns/mnt") for process in processes)
        return cls(adopter(), processes, namespaces, _mounts(), _cgroups(), _temporary_directories())

    def leftovers(self) -> list[str]:
        """Return one line for everything of ours that is there now and was not then."""
        now = {process.pid: process for process in _processes()}
        known = {(process.pid, process.started) for process in self.processes}
        fresh = [process for process in now.values() if (process.pid, process.started) not in known]
        return sorted(
            [process.describe() for process in fresh if self._is_ours(process, now)]
            + [f"mount: {line}" for line in _mounts() - self.mounts]
            + [f"cgroup: {path}" for path in _cgroups() - self.cgroups if self._is_made_by_us(path, now)]
            + [
                f"directory: {path}"
                for path in _temporary_directories() - self.directories
                if self._is_made_by_us(path, now)
            ]
        )

    def _top(self, process: Process, now: dict[int, Process]) -> Process:
        while process.parent in now and process.parent not in {self.adopter, os.getpid()}:
            process = now[process.parent]
        return process

    def _is_ours(self, process: Process, now: dict[int, Process]) -> bool:
        top = self._top(process, now)
        if top.parent == os.getpid():
            return True
        return top.parent == self.adopter and top.is_marked(self.namespaces) and not top.is_anothers()

    def _is_made_by_us(self, path: str, now: dict[int, Process]) -> bool:
        try:
            if _is_anothers(os.lstat(path).st_uid):
                return False
        except OSError:
            return False  # gone by now
        maker = MADE_BY.match(os.path.basename(path))
        living = now.get(int(maker[1])) if maker else None
        return living is None or living.pid == os.getpid() or self._top(living, now).parent == os.getpid()


def wait_for_leftovers(before: Snapshot, *, patience_s: float) -> list[str]:
    """Return what stays for the whole of our patience: dying takes a moment, and others come and go."""
    return what_stays(before, for_s=max(patience_s, BESIDE_S))


def what_stays(before: Snapshot, *, for_s: float) -> list[str]:
    """Return what stays for so long, of which some may be another suite's."""
    close_pools()
    end_process()
    deadline = time.monotonic() + for_s
    left = before.leftovers()
    while left and time.monotonic() < deadline:
        time.sleep(0.1)
        left = [line for line in before.leftovers() if line in left]
    return left
