"""Clone this process into a new jail, with all its memory: the guest's part of a fork and of a checkpoint.

The clone is pid 1 of new namespaces that are still empty. It releases everything that is its parent's, reports that,
and waits until the helper outside has given it ids, files and limits. Then it forks: the child goes on as the session,
and pid 1 waits for it, as the process that started the first interpreter does. Obstacles to a clone are found and named
before anything happens.

The checks here are a service to honest programs. That nothing is shared is checked again from outside.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_signal: Any = __import__("_signal")

READ_ONLY_TREES = ("/usr/", "/lib", "/opt/")
KINDS = {0o140000: "a socket", 0o010000: "a pipe", 0o060000: "a device"}
KIND, DIRECTORY, REGULAR, CHARACTER = 0o170000, 0o040000, 0o100000, 0o020000
ACCESS_MODE = 3
OWN_PATHS = ("/workspace", "/tmp", "/dev/shm")
TIMERS = {"ITIMER_REAL": "SIGALRM", "ITIMER_VIRTUAL": "SIGVTALRM", "ITIMER_PROF": "SIGPROF"}
CHUNK_BYTES = 1 << 16
STREAMS = 2  # of a clone: standard output and error; its ends, such as its link, follow


class OpenFile:
    """Remember a file that is open for reading, by its path and offset, to open it again in other mounts."""

    def __init__(self, fd: int, path: str):
        self.fd, self.path = fd, path
        import fcntl

        self.flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        self.is_inheritable = os.get_inheritable(fd)
        state = os.fstat(fd)
        self.at = os.lseek(fd, 0, 1) if state.st_mode & KIND == REGULAR else 0

    def open_again(self) -> None:
        """Open it under the same number; a file that is gone leaves the number closed."""
        try:
            fd = os.open(self.path, self.flags | os.O_CLOEXEC)
        except OSError as error:
            sys.stderr.write(f"cloche: {self.path} cannot be opened again after the fork: {error}\n")
            return
        if fd != self.fd:
            os.dup2(fd, self.fd, self.is_inheritable)
            os.close(fd)
        else:
            os.set_inheritable(fd, self.is_inheritable)
        if self.at:
            os.lseek(self.fd, self.at, 0)


def look_for_obstacles(ours: set[int], clones: set[int]) -> tuple[list[str], list[OpenFile]]:
    """Return the obstacles to a clone, in words, and the files that can be cloned.

    `ours` are descriptors of the session itself, and `clones` earlier ones, which are its children.
    """
    obstacles = [*_threads(), *running_children(clones), *_mappings(), *_timers()]
    files: list[OpenFile] = []
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        if fd <= 2 or fd in ours:
            continue
        try:
            obstacle = _judge(fd, files)
        except OSError:
            continue  # the descriptor of the listing itself
        if obstacle:
            obstacles.append(obstacle)
    return obstacles, files


def _judge(fd: int, files: list[OpenFile]) -> str:
    """Return the problem with an open descriptor; note it if it is a file that can be opened again."""
    path = os.readlink(f"/proc/self/fd/{fd}")
    kind = os.fstat(fd).st_mode & KIND
    if kind in (REGULAR, DIRECTORY, CHARACTER) and path.startswith("/"):
        file = OpenFile(fd, path)
        if path.endswith(" (deleted)"):
            return f"{path.removesuffix(' (deleted)')}, which was deleted and is still open"
        if file.flags & ACCESS_MODE != os.O_RDONLY and kind != CHARACTER:
            return f"{path}, which is open for writing"
        files.append(file)
        return ""
    return f"{KINDS.get(kind, path)} (descriptor {fd})"


def _threads() -> list[str]:
    count = len(os.listdir("/proc/self/task"))
    if count == 1:
        return []
    names = []
    if "threading" in sys.modules:
        threading = sys.modules["threading"]
        names = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    named = f" ({', '.join(names)})" if names else " of a library"
    return [f"{count - 1} running thread{'s' if count > 2 else ''}{named}"]


def _timers() -> list[str]:
    """Name running interval timers: a clone lacks them, and a stopped process gets their signals at its resumption.

    There are no others: a session's filter refuses `timer_create`, and a timer with a descriptor is found by that.
    """
    running = [name for name in TIMERS if _signal.getitimer(getattr(_signal, name))[0]]
    return [f"the interval timer {name}, which sends {TIMERS[name]}" for name in running]


def running_children(clones: set[int]) -> list[str]:
    """Name running children but clones; those that have ended are waited for."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return []
    pids = _read("/proc/thread-self/children").split()
    return [f"the running process {pid} ({_name(pid)})" for pid in pids if int(pid) not in clones]


def _name(pid: str) -> str:
    try:
        return _read(f"/proc/{pid}/comm").strip()
    except OSError:
        return "?"


def _mappings() -> list[str]:
    """Name memory that is shared with other processes, and mapped files of these mounts."""
    problems: list[str] = []
    maps = _read("/proc/self/maps")
    if _are_all_private(maps):
        return problems  # as is usual: then no single line needs to be looked at
    own = {_device(path) for path in OWN_PATHS}
    for line in maps.rstrip("\n").split("\n"):
        fields = line.split(maxsplit=5)
        name = fields[5].strip() if len(fields) > 5 else ""
        is_shared = fields[1][3] == "s" and not name.startswith(READ_ONLY_TREES)
        if is_shared or (name.startswith(OWN_PATHS) and fields[3] in own):
            is_file = name.startswith("/") and name != "/dev/zero (deleted)"  # so the kernel names anonymous memory
            problems.append(f"the mapped file {name}" if is_file else "shared memory")
    return list(dict.fromkeys(problems))


def _device(path: str) -> str:
    """Return a file system's number as /proc/self/maps has it: paths of the host have another number in `stat`."""
    number = os.stat(path).st_dev
    return f"{os.major(number):02x}:{os.minor(number):02x}"


def _are_all_private(maps: str) -> bool:
    """Tell whether no memory is shared and no file of these mounts is mapped, by the kernel's list."""
    lines = maps.rstrip("\n").split("\n")
    if {line.partition(" ")[2][3:4] for line in lines} != {"p"}:
        return False
    return not any(path.startswith(OWN_PATHS) for path in {line[line.find("/") :] for line in lines})


def _read(path: str) -> str:
    """Read a file of the kernel's, without the codecs that `open` may have to load first."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = bytearray()
        while piece := os.read(fd, CHUNK_BYTES):
            data += piece
    finally:
        os.close(fd)
    return data.decode("utf-8", "replace")


class Clone:
    """Hold the data for a clone of this process: its own streams, answers and link, and the files to open again.

    `ends` are the parent's answers and link, and those for the caller's functions; the clone's take over their numbers.
    """

    def __init__(self, ends: tuple[int, ...], fds: list[int], files: list[OpenFile]):
        self.ends, self.fds, self.files = ends, fds, files
        self.folder = _working_directory()
        random = sys.modules.get("random")
        self.random_state = random.getstate() if random is not None else None

    def release(self, give_up: Callable[[], None]) -> None:
        """Release, in the clone, all that is the parent's, and give up the capabilities that it was cloned with."""
        os.setsid()
        give_up()
        still_open = []
        for file in self.files:
            try:
                os.close(file.fd)
                still_open.append(file)
            except OSError:
                continue  # its last owner was garbage, and is gone since we looked
        self.files = still_open
        stdout, stderr, *ends = self.fds
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        for fd, number in zip(ends, self.ends, strict=True):
            os.dup2(fd, number, inheritable=False)
        for fd in self.fds:
            os.close(fd)
        os.closerange(0, 1)  # a shared standard input would be one open file for all clones
        os.chdir("/")

    def take_input(self) -> None:
        """Open an empty standard input that is its own."""
        fd = os.open("/dev/null", os.O_RDONLY)
        if fd:
            os.dup2(fd, 0)
            os.close(fd)
        os.set_inheritable(0, True)

    def finish_set_up(self, *, is_fork: bool, reseed: Callable[[], None]) -> None:
        """Finish set-up, in the process that goes on; random numbers go on too, unless this is a fork."""
        os.setsid()
        try:
            os.chdir(self.folder)
        except OSError:
            os.chdir(os.environ.get("HOME", "/workspace"))
        for file in self.files:
            file.open_again()
        if is_fork:
            reseed()
        elif self.random_state is not None:
            sys.modules["random"].setstate(self.random_state)


def _working_directory() -> str:
    try:
        return os.getcwd()
    except OSError:
        return "/workspace"


def wait_as_init(pid: int) -> int:
    """Be pid 1 until `pid` has ended; return its wait status."""
    for number in (_signal.SIGINT, _signal.SIGTERM, _signal.SIGHUP):
        _signal.signal(number, _signal.SIG_IGN)
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)
    while True:
        try:
            ended_pid, status = os.waitpid(-1, 0)
        except ChildProcessError:
            return 0
        except InterruptedError:
            continue
        if ended_pid == pid:
            return status
