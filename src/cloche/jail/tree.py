"""Process trees seen from outside: who belongs to one, what it uses, and how to end it.

Without a process namespace the tree is whatever descends from the helper, which is its subreaper: a process whose
parent dies comes back to the helper, so nobody can leave.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = os.sysconf("SC_PAGE_SIZE")
SIGSTOP, SIGKILL = 19, 9


def descendants(root: int) -> list[int]:
    """Return every live descendant of `root`, parents first."""
    return [pid for below in descend(root) for pid in below]


def descend(root: int) -> Iterator[list[int]]:
    """Yield the descendants of `root` by whose children they are, thread by thread: the walk may be ended anywhere."""
    queue = [root]
    while queue:
        for below in _children(queue.pop()):
            queue += below
            yield below


def children(pid: int) -> list[int]:
    """Return the live children of a process, oldest first, and the dead that nobody has waited for."""
    return [child for below in _children(pid) for child in below]


def _children(pid: int) -> Iterator[list[int]]:
    """Yield the children of each thread."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return
    for thread in threads:
        text = _read(f"/proc/{pid}/task/{thread}/children")
        yield [int(word) for word in text.split()]


def count_tasks(pids: list[int]) -> int:
    """Return the number of threads in `pids`; that is what a limit on processes counts."""
    return sum(_threads(pid) for pid in pids)


def _threads(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return 0


def resident_bytes(pids: list[int]) -> int:
    """Return the sum of resident memory, pages shared between processes counted in each."""
    total = 0
    for pid in pids:
        words = _read(f"/proc/{pid}/statm").split()
        total += int(words[1]) * PAGE if len(words) > 2 else 0
    return total


def private_bytes(pids: list[int]) -> int:
    """Return the sum of each process's share of its anonymous and shared memory; slower, and fair to forks."""
    return sum(_share(pid) for pid in pids)


def _share(pid: int) -> int:
    text = _read(f"/proc/{pid}/smaps_rollup")
    if not text:  # a process may hide this by making itself undumpable: then all that is resident counts
        return resident_bytes([pid])
    rows = (line.split() for line in text.splitlines()[1:])
    amounts = {row[0]: int(row[1]) * 1024 for row in rows if len(row) >= 2 and row[1].isdigit()}
    return amounts.get("Pss_Anon:", 0) + amounts.get("Pss_Shmem:", 0)


def kill_descendants(root: int) -> None:
    """Kill everything below `root` and wait until nothing is left. Stopped first, so that a fork bomb stands still."""
    while True:
        pids = descendants(root)
        for signal in (SIGSTOP, SIGKILL):
            for pid in pids:
                _signal(pid, signal)
        if not _reap_all():
            return


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        pass  # gone already, or a zombie of another identity; the next round looks again


def _reap_all() -> bool:
    """Wait for one child and take all that are dead; False when there are no children."""
    try:
        os.waitpid(-1, 0)
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


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
