"""Readers of /proc: the processes of a tree, their usage, whether they have ended.

Process trees are seen from outside. Without a process namespace the tree is all descendants of the helper, which is
their subreaper: a process whose parent dies becomes the helper's child, so none can leave.

`ProcessStats`, `Sockets` and `count_unreachable` are for the moment when a guest ends: whether all its processes and
sockets have ended, its usage, and its attempts to reach a network.

`Death` is for killed processes that the kernel has not finished: whether they can still do anything. A dying process
gives up its memory before it is gone, which takes seconds where much is mapped. Its last effects come before that: the
kernel marks the process, then writes into memory that others share (robust futexes), detaches the process from its
memory, and only then frees the memory. So a process that is marked and has no memory runs no program, is in no call,
and writes nothing any more.
"""

from __future__ import annotations

import os
import posix

from .syscalls import call, fresh, ppoll

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from .cgroups import Cgroup

PAGE = os.sysconf("SC_PAGE_SIZE")
MOST_WALKS = 4  # to count a tree in which processes end meanwhile
MOST_WALKED_BYTES = 8 << 30  # of one process, files that it maps included: the kernel's walk takes a fifth of a second


def descendants(root: int) -> list[int]:
    """Return every live descendant of `root`, parents first."""
    return [pid for below in descend(root) for pid in below]


def descend(root: int) -> Iterator[list[int]]:
    """Yield the descendants of `root` from the lists of children, thread by thread: the walk may be ended anywhere."""
    queue = [root]
    while queue:
        for below in _children(queue.pop()):
            queue += below
            yield below


def children(pid: int) -> list[int]:
    """Return the live children of a process, oldest first, and the dead ones that were not waited for."""
    return [child for below in _children(pid) for child in below]


def _children(pid: int) -> Iterator[list[int]]:
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return
    for thread in threads:
        text = _read(f"/proc/{pid}/task/{thread}/children")
        yield [int(number) for number in text.split()]


def count_tasks(pids: list[int]) -> int:
    """Return the number of threads in `pids`, which is the number that a limit on processes counts."""
    return sum(len(_thread_ids(pid)) for pid in pids)


def count_tasks_below(root: int, max_tasks: int) -> tuple[int, bool]:
    """Return the number of threads in all descendants of `root`, and whether that is all of them.

    A process whose parent ends during the walk may move to a part of the tree that was walked already. So the walk is
    repeated while it finds newly dead processes; the largest count is returned. It ends at `max_tasks`.
    """
    count, known_dead = 0, set[int]()
    for _ in range(MOST_WALKS):
        walk_count, dead = _count_once(root, max_tasks)
        count = max(count, walk_count)
        if count >= max_tasks or dead <= known_dead:
            return count, True
        known_dead |= dead
    return count, False


def _count_once(root: int, max_tasks: int) -> tuple[int, set[int]]:
    """Return the number of threads that a walk down from `root` finds, and the dead threads whose children it read."""
    count, dead, queue = 0, set[int](), [root]
    visited = {root}
    while queue:
        pid = queue.pop()
        threads = _thread_ids(pid)
        count += len(threads) if pid != root else 0
        if count >= max_tasks:
            break
        for thread in threads:
            below = {int(child) for child in _read(f"/proc/{pid}/task/{thread}/children").split()} - visited
            visited |= below
            queue += below
        dead.update(thread for thread in threads or [pid] if state_of(thread) in "ZX")
    return count, dead


def _thread_ids(pid: int) -> list[int]:
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []


def resident_bytes(pids: list[int]) -> int:
    """Return the sum of resident memory, pages shared between processes counted in each."""
    total = 0
    for pid in pids:
        fields = _read(f"{_with_memory(pid)}/statm").split()
        total += int(fields[1]) * PAGE if len(fields) > 2 else 0
    return total


def _with_memory(pid: int) -> str:
    """Return the folder of a process, or of another thread if the first has ended: an ended thread has no memory."""
    folder = f"/proc/{pid}"
    if not _read(f"{folder}/statm").startswith("0 0 0"):
        return folder
    try:
        threads = os.listdir(f"{folder}/task")
    except OSError:
        return folder
    alive = (f"{folder}/task/{thread}" for thread in threads if int(thread) != pid)
    return next((task_folder for task_folder in alive if not _read(f"{task_folder}/statm").startswith("0 0 0")), folder)


def own_bytes(pids: list[int]) -> int:
    """Return the sum of anonymous and shared memory, pages shared between processes counted in each."""
    return sum(_kib(_read(f"{_with_memory(pid)}/status"), "RssAnon:", "RssShmem:") for pid in pids)


def private_bytes(pids: list[int]) -> int:
    """Return the sum of each process's share of its anonymous and shared memory; slower, and fair to forks.

    A process may prevent this by making itself undumpable: then its shared memory counts in full.
    """
    shares = ((pid, share_of(pid)) for pid in pids)
    return sum(own_bytes([pid]) if share is None else share for pid, share in shares)


def share_of(pid: int) -> int | None:
    """Return a process's share of its anonymous and shared memory; None where it may not be read, or takes too long."""
    folder = _with_memory(pid)
    if _kib(_read(f"{folder}/status"), "VmRSS:") > MOST_WALKED_BYTES:
        return None
    text = _read(f"{folder}/smaps_rollup")
    return _kib(text, "Pss_Anon:", "Pss_Shmem:") if text else None


def has_memory(pid: int) -> bool:
    """Tell whether a process is still there, with memory."""
    text = _read(f"{_with_memory(pid)}/statm")
    return bool(text) and not text.startswith("0 0 0")


def _kib(text: str, *names: str) -> int:
    """Return the sum of the rows of these names, which the kernel gives in KiB, in bytes."""
    rows = (line.split() for line in text.splitlines())
    return sum(int(row[1]) * 1024 for row in rows if len(row) == 3 and row[0] in names and row[1].isdigit())


def _read(path: str) -> str:
    """Read a small file of /proc; empty when its process is gone."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        data = bytearray()
        while piece := os.read(fd, 65536):  # the kernel may hand out a page at a time
            data += piece
        return data.decode("utf-8", "replace")
    except OSError:
        return ""
    finally:
        os.close(fd)


MANY_TICKS_S = 0.1  # of processor time: with less, the kernel's own division into two is one by chance
_MOST_BYTES = 1 << 14
_USER, _SYSTEM = 11, 12  # in a line of /proc/PID/stat, counted from the state


class ProcessStats:
    """Keep open the files with a guest's statistics: its time, its memory, its first program.

    `last_pid` is the result of `open_last_pid`, to be kept open as long.
    """

    def __init__(self, pid: int, last_pid: int):
        self._pid, self._last_pid = pid, last_pid
        self._time, self._memory, self._program = (
            _open(f"/proc/{pid}/{name}") for name in ("schedstat", "status", "environ")
        )

    def close(self) -> None:
        """Let go of everything."""
        for fd in (self._time, self._memory, self._program):
            if fd >= 0:
                posix.close(fd)

    def at_exit_notice(self) -> tuple[float, float, int] | None:
        """Return a guest's usage if its exit notice is the end of all its processes, None if it may not be.

        The usage is user and system seconds, and the largest memory in KiB. The guest is held in its last call, which
        does not return, so if no process or thread was made after it none is left. At its end the kernel writes nothing
        to memory if the guest has no list of robust futexes. Its largest memory is that of one program: `execve` resets
        it.
        """
        try:
            if int(posix.pread(self._last_pid, 32, 0)) != self._pid:
                return None
            futexes = fresh(8)
            call("get_robust_list", self._pid, futexes, fresh(8))
            if any(futexes) or not posix.pread(self._program, 1, 0):
                return None
            seconds = int(posix.pread(self._time, 64, 0).partition(b" ")[0]) / 1e9
            most_kib = int(posix.pread(self._memory, 1 << 13, 0).partition(b"\nVmHWM:")[2].split(None, 1)[0])
            share = _user_share(self._pid) if seconds > MANY_TICKS_S else 1.0
        except (OSError, ValueError, IndexError):
            return None  # a kernel that keeps none of this
        return (seconds * share, seconds * (1 - share), most_kib) if seconds > 0 and most_kib > 0 else None


class Sockets:
    """Tell whether a network namespace holds any sockets beside those open now, which stay as long as this process.

    A socket may last without a process that holds it: two that were sent over each other wait for the kernel's garbage
    collection, listed in /proc/net/unix by their names. The kernel counts a socket, of any family and with a name or
    without, until it is freed. So if no process is left to make another, a count of none is final.
    """

    def __init__(self, path: str = "/proc/net/sockstat"):
        self._count = _open(path)
        self._ours = self._now()

    def are_all_gone(self) -> bool:
        """Tell whether only our own sockets are left; False if the kernel does not report it."""
        return self._ours >= 0 and self._now() == self._ours

    def _now(self) -> int:
        try:
            return int(posix.pread(self._count, 64, 0).partition(b"sockets: used ")[2].split(None, 1)[0])
        except (OSError, ValueError, IndexError):
            return -1


def open_last_pid() -> int:
    """Open the file with the last pid of this process namespace; -1 if the kernel has no such file."""
    return _open("/proc/sys/kernel/ns_last_pid")


def _user_share(pid: int) -> float:
    """Return the user share of a process's time, as far as ticks tell."""
    file = posix.open(f"/proc/{pid}/stat", posix.O_RDONLY | posix.O_CLOEXEC)
    try:
        rows = posix.read(file, 1 << 12).rpartition(b")")[2].split()
    finally:
        posix.close(file)
    user, system = int(rows[_USER]), int(rows[_SYSTEM])
    return user / (user + system) if user + system else 1.0


def _open(path: str) -> int:
    try:
        return posix.open(path, posix.O_RDONLY | posix.O_CLOEXEC)
    except OSError:
        return -1


def count_unreachable() -> int:
    """Return how many outside addresses programs tried to reach, since this network namespace was made.

    A namespace with nothing but a loopback device has no route to other addresses, and the kernel counts the dropped
    packets: a connection, a datagram, a query to a name server. 0 if the kernel has no such counter.
    """
    return _in_table(_rows_of("/proc/net/snmp")) + _in_list(_rows_of("/proc/net/snmp6"))


def _in_table(rows: list[bytes]) -> int:
    """Find the figure of IPv4, in a row of names above a row of figures."""
    names, figures = ([row.split() for row in rows if row.startswith(b"Ip:")] + [[], []])[:2]
    return int(dict(zip(names, figures, strict=False)).get(b"OutNoRoutes", 0))


def _in_list(rows: list[bytes]) -> int:
    return sum(int(row.split()[1]) for row in rows if row.startswith(b"Ip6OutNoRoutes"))


def _rows_of(path: str) -> list[bytes]:
    try:
        fd = posix.open(path, posix.O_RDONLY | posix.O_CLOEXEC)
    except OSError:
        return []
    try:
        return posix.read(fd, _MOST_BYTES).split(b"\n")
    finally:
        posix.close(fd)


def state_of(pid: int) -> str:
    """Return the letter of its first thread's state; X for a process that does not exist."""
    return (text_of(f"/proc/{pid}/stat").rpartition(")")[2].split() or ["X"])[0]


def states_of(pid: int) -> list[str]:
    """Return the state of every thread: a process whose first one has ended looks dead, and may be running."""
    return list(each_state_of(pid))


def each_state_of(pid: int) -> Iterator[str]:
    """Yield the state of one thread after the other."""
    try:
        threads = posix.listdir(f"/proc/{pid}/task")
    except OSError:
        return
    for thread in threads:
        yield state_of(int(thread))


def is_dead(pid: int) -> bool:
    """Tell whether no thread of it will run again."""
    return all(state in "ZX" for state in states_of(pid))


def descriptors(pid: int) -> list[str]:
    """Return the kernel's names of its open files."""
    return [posix.readlink(f"/proc/{pid}/fd/{name}") for name in posix.listdir(f"/proc/{pid}/fd")]


def text_of(path: str) -> str:
    """Return the whole text of a file in /proc; empty if its process has ended, or on a read error."""
    try:
        fd = posix.open(path, posix.O_RDONLY | posix.O_CLOEXEC)
    except OSError:
        return ""
    data = bytearray()
    try:
        while piece := posix.read(fd, 1 << 16):
            data += piece
    except OSError:
        return ""
    finally:
        posix.close(fd)
    return data.decode("utf-8", "replace")


FIRST_WAIT_S, POLL_S = 0.1, 0.02  # for the kernel to be through, and between looks after that
PF_EXITING = 4
TICKS_PER_S = posix.sysconf("SC_CLK_TCK")
_FLAGS, _TIMES, _MEMORY = 6, slice(11, 15), 20  # in a line of /proc/PID/stat, counted from the state


class Death:
    """Wait for the death of a reaper that is about to be killed; `spent` is the usage of it and its dead until then."""

    def __init__(self, reaper: int, cgroup: Cgroup):
        self._reaper, self._cgroup = reaper, cgroup
        user, system, user_below, system_below = (int(ticks) for ticks in _stat(reaper)[_TIMES] or (0, 0, 0, 0))
        most_kib = (text_of(f"/proc/{reaper}/status").partition("\nVmHWM:")[2].split(None, 1) or ["0"])[0]
        self.spent = (user + user_below) / TICKS_PER_S, (system + system_below) / TICKS_PER_S, int(most_kib)

    def wait(self) -> bool:
        """Return True when it has ended with all processes below it.

        False if the kernel takes long, and no process in the group can do anything any more.
        """
        ended, wait_s = posix.pidfd_open(self._reaper), FIRST_WAIT_S
        try:
            while not ppoll((ended,), wait_s):
                if is_done(self._cgroup):
                    return False
                wait_s = POLL_S
            return True
        finally:
            posix.close(ended)


def is_done(cgroup: Cgroup) -> bool:
    """Tell whether no process in a group can do anything any more.

    Read twice: during the first reading, a process may have forked and ended. The second reading must find only
    processes that the first found to be past that.
    """
    first = cgroup.tasks()
    return all(_is_past_work(task) for task in first) and set(cgroup.tasks()) <= set(first)


def _is_past_work(task: int) -> bool:
    rows = _stat(task)
    return not rows or rows[0] in "ZX" or (int(rows[_FLAGS]) & PF_EXITING > 0 and rows[_MEMORY] == "0")


def _stat(task: int) -> list[str]:
    return text_of(f"/proc/{task}/stat").rpartition(")")[2].split()
