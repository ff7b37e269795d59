"""What a clone of a live session could have kept of its parent, and what it does: seen from outside, in /proc.

What is checked is asked of processes that stand still. A process names itself as it likes, so that no line of these
files may be ended by anything but the kernel's own ends of lines.
"""

from __future__ import annotations

import posix

from . import tree

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SYSTEM = ("/usr/", "/lib", "/opt/")  # read-only mounts, of which a shared mapping tells nobody anything
OWN_PLACES = ("/workspace", "/tmp", "/dev/shm")
POWERS = ("CapInh:", "CapPrm:", "CapEff:", "CapBnd:", "CapAmb:")


class FamilyError(Exception):
    """Say why a clone cannot be, in words for the caller."""


def check_is_apart(pid: int) -> None:
    """Check that a clone leads a session of its own, which it cannot undo: else kill(0, …) reaches who is in it too."""
    if posix.getpgid(pid) != pid or posix.getsid(pid) != pid:
        raise FamilyError("the clone is in a process group with others")


def check_rest(pid: int, bound: Sequence[str] = ()) -> None:
    """Check what a clone could keep beside descriptors: folders, its program's file, memory, company, powers.

    `bound` are the paths of the host that are shown in its places, read-only: what is mapped of these is nobody's.
    """
    if posix.readlink(f"/proc/{pid}/cwd") != "/" or posix.readlink(f"/proc/{pid}/root") != "/":
        raise FamilyError("the clone has kept its parent's working directory")
    if len(posix.listdir(f"/proc/{pid}/task")) != 1:
        raise FamilyError("the clone has threads")
    if tree.children(pid):
        raise FamilyError("the clone has started a process")
    program = posix.readlink(f"/proc/{pid}/exe")
    if program.startswith(OWN_PLACES) and not _is_bound(pid, program, _device(f"/proc/{pid}/exe"), bound):
        raise FamilyError("the clone runs a file of its parent's")
    powers = [line.split()[1] for line in text_of(f"/proc/{pid}/status").split("\n") if line.startswith(POWERS)]
    if len(powers) != len(POWERS) or any(int(power, 16) for power in powers):
        raise FamilyError("the clone has kept capabilities")
    maps = text_of(f"/proc/{pid}/maps")
    if not maps:
        raise FamilyError("the clone's memory cannot be looked at")
    if _are_all_private(maps):
        return  # as is usual: then no single line needs to be looked at
    for line in maps.rstrip("\n").split("\n"):
        words = line.split(maxsplit=5)
        name = words[5] if len(words) > 5 else ""
        if words[1][3] == "s" and not name.startswith(SYSTEM):
            raise FamilyError(f"the clone shares memory with its parent: {name or 'an anonymous mapping'}")
        if name.startswith(OWN_PLACES) and not _is_bound(pid, name, words[3], bound):
            raise FamilyError(f"the clone has a file of its parent's mapped: {name}")


def _is_bound(pid: int, name: str, device: str, bound: Sequence[str]) -> bool:
    """Tell whether a file is one of the host's: by its name, and since it is on none of the places' file systems."""
    is_below = any(name == path or name.startswith(f"{path}/") for path in bound)
    return is_below and device not in {_device(f"/proc/{pid}/root{place}") for place in OWN_PLACES}


def _device(path: str) -> str:
    """Return the number of a file's file system as the list of mappings has it."""
    number = posix.stat(path).st_dev
    return f"{posix.major(number):02x}:{posix.minor(number):02x}"


def _are_all_private(maps: str) -> bool:
    """Tell whether no memory is shared and none is of a home's file, as the kernel lists it."""
    lines = maps.rstrip("\n").split("\n")
    if {line.partition(" ")[2][3:4] for line in lines} != {"p"}:
        return False
    return not any(path.startswith(OWN_PLACES) for path in {line[line.find("/") :] for line in lines})


def number_inside(pid: int) -> int:
    """Return the number that pid 1 of the first node knows a process by."""
    for line in text_of(f"/proc/{pid}/status").split("\n"):
        if line.startswith("NSpid:"):
            return int(line.split()[2])
    raise FamilyError("the kernel does not tell process numbers of namespaces")


def state_of(pid: int) -> str:
    """Return the letter of its first thread's state; X for what is not there."""
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
    """Name what it has open, as the kernel does."""
    return [posix.readlink(f"/proc/{pid}/fd/{name}") for name in posix.listdir(f"/proc/{pid}/fd")]


def text_of(path: str) -> str:
    """Return all that a file in /proc says; what has ended, or cannot be read to its end, says nothing."""
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
