"""What pid 1 of a live sandbox reads of its processes: the mark of the tree that each belongs to, parents, jobs.

A process may end at any moment: then there is nothing to be read.
"""

from __future__ import annotations

import posix

MARK = "/proc/self/ns/uts"
HIDDEN = -1  # as in `init.tree`: the mark of a process whose program has no read permission


def mark_of(pid: int | str) -> int:
    """Return the mark of a process: HIDDEN for one that cannot be inspected, 0 for one that has ended."""
    try:
        return posix.stat(f"/proc/{pid}/ns/uts").st_ino
    except PermissionError:
        return HIDDEN
    except OSError:  # it has gone, or its first thread alone
        return _mark_of_threads(pid)


def _mark_of_threads(pid: int | str) -> int:
    try:
        threads = posix.listdir(f"/proc/{pid}/task")
    except OSError:
        return 0
    for thread in threads:
        try:
            return posix.stat(f"/proc/{pid}/task/{thread}/ns/uts").st_ino
        except PermissionError:
            return HIDDEN
        except OSError:
            continue  # this one has ended
    return 0


def parent_of(pid: int) -> int:
    """Return the parent of a process, 0 for one that is gone."""
    try:
        return int(read_whole(f"/proc/{pid}/stat").rpartition(b")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return 0


def _stat_of(pid: int) -> list[bytes]:
    """Return the fields of /proc/PID/stat from the state on; empty for a process that is gone."""
    try:
        return read_whole(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    except OSError:
        return []


def state_of(pid: int) -> bytes:
    """Return the letter of a process's state, empty for one that is gone."""
    return b"".join(_stat_of(pid)[:1])


def jobs_of(pid: int) -> tuple[int, int, int, int]:
    """Return parent, process group, session and terminal of a process; zeros for one that is gone."""
    fields = _stat_of(pid)
    return (int(fields[1]), int(fields[2]), int(fields[3]), int(fields[4])) if len(fields) > 4 else (0, 0, 0, 0)


def read_whole(path: str) -> bytes:
    """Return the content of a file of /proc."""
    fd = posix.open(path, posix.O_RDONLY | posix.O_CLOEXEC)
    try:
        return b"".join(iter(lambda: posix.read(fd, 1 << 16), b""))
    finally:
        posix.close(fd)
