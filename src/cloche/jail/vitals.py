"""What is looked at when a guest ends: whether that is the end of all that is its, what it used and tried to reach."""

from __future__ import annotations

import posix

from .syscalls import call, fresh

MANY_TICKS_S = 0.1  # of processor time: with less, the kernel's own division into two is one by chance
_MOST_BYTES = 1 << 14
_USER, _SYSTEM = 11, 12  # in a line of /proc/PID/stat, counted from the state


class Vitals:
    """Keep open what tells of one guest: its time, its memory, its first program.

    `last_pid` is what `open_last_pid` has returned, to be kept open as long.
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

    def at_last_word(self) -> tuple[float, float, int] | None:
        """Return what a guest used whose farewell is the end of all that is its, None where it may not be.

        Seconds of its own and of the kernel, and the largest memory in KiB. It is held in its last call, from which it
        does not return, and where no process or thread was made after it none is left. What the kernel writes for it
        when it is gone (its robust futexes) is none where it keeps no list of any. Its largest memory is that of one
        program: after `execve` the first one's is forgotten.
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
    """Tell whether a network namespace holds any sockets but those that are there now, which stay as long as we do.

    A socket may last without a process that holds it: two that were sent over each other wait for the kernel's garbage
    collection, listed in /proc/net/unix by the names that they were given. The kernel counts one until it is freed, of
    whatever family and with a name or without. Where no process is left to make another, none is as good as never any.
    """

    def __init__(self, path: str = "/proc/net/sockstat"):
        self._count = _open(path)
        self._ours = self._now()

    def are_all_gone(self) -> bool:
        """Tell whether nobody else's is left; where the kernel does not say, that is in doubt."""
        return self._ours >= 0 and self._now() == self._ours

    def _now(self) -> int:
        try:
            return int(posix.pread(self._count, 64, 0).partition(b"sockets: used ")[2].split(None, 1)[0])
        except (OSError, ValueError, IndexError):
            return -1


def open_last_pid() -> int:
    """Open what tells which process or thread of this process namespace was made last; -1 where nothing does."""
    return _open("/proc/sys/kernel/ns_last_pid")


def _user_share(pid: int) -> float:
    """Return which part of a process's time was its own and not the kernel's, as far as ticks tell."""
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
    """Return how often a program wanted to reach what lies outside, since this network namespace was made.

    One with nothing but a loopback device has no route to anywhere else, and the kernel counts what ends there: a
    connection, a datagram, a name that a server would have to be asked for. 0 where it does not say.
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
