"""Call what changes metadata behind the filter that an ordinary user's guest has at level confined, or with none.

    asking.py LINK WHERE KIND OWN OUTSIDE TRIES

The descriptor on which the filter asks is sent over LINK (WHERE is `inside`). KIND says what: `ways`, each call on
files of OWN and OUTSIDE, `flags`, those of their inodes, or a race between a call on a file of OWN and a thread that
puts one of OUTSIDE there.
Printed as JSON: what worked, or how so many tries ended.
"""

import collections
import ctypes
import itertools
import json
import os
import sys
import threading
from pathlib import Path

from cloche.jail import messages, seccomp_notify
from cloche.jail.setup import privileges, seccomp, syscall_table
from cloche.jail.steps import perform_calls

LIBC = ctypes.CDLL(None, use_errno=True)
NUMBERS = syscall_table.ALLOWED[os.uname().machine]
AT_FDCWD, RENAME_EXCHANGE, CHANGED = -100, 2, 0o640


def call(name: str, *arguments: object) -> str:
    """Make a system call by its number; return how it ended: `done`, or the name of the errno."""
    words = [ctypes.c_long(one) if isinstance(one, int) else one for one in arguments]
    if LIBC.syscall(NUMBERS[name], *words) >= 0:
        return "done"
    import errno

    return errno.errorcode[ctypes.get_errno()]


def ways(path: bytes) -> dict[str, str]:
    """Make each call once on one file, which is opened to be read; by descriptor, name below a directory, and path."""
    times, old = bytes(32), bytes(16)
    folder, name = os.path.split(path)
    fd, directory = os.open(path, os.O_RDONLY), os.open(folder, os.O_RDONLY)
    user, group = os.stat(path).st_uid, os.stat(path).st_gid
    attribute = (b"user.cloche", b"1", 1, 0)
    rows: dict[str, tuple[str, *tuple[object, ...]]] = {
        "chmod": ("chmod", path, CHANGED),
        "fchmod": ("fchmod", fd, CHANGED),
        "fchmodat": ("fchmodat", directory, name, CHANGED),
        "fchmodat2": ("fchmodat2", directory, name, CHANGED, 0x100),
        "fchmodat2 of a descriptor": ("fchmodat2", fd, b"", CHANGED, 0x1000),
        "chmod by /proc": ("chmod", b"/proc/self/fd/%d" % fd, CHANGED),
        "chown": ("chown", path, user, group),
        "lchown": ("lchown", path, user, group),
        "fchown": ("fchown", fd, user, group),
        "fchownat": ("fchownat", directory, name, user, group, 0),
        "fchownat of a descriptor": ("fchownat", fd, b"", user, group, 0x1000),
        "utime": ("utime", path, old),
        "utimes": ("utimes", path, times),
        "futimesat": ("futimesat", directory, name, times),
        "futimesat of a descriptor": ("futimesat", fd, None, times),
        "utimensat": ("utimensat", directory, name, times, 0),
        "utimensat now": ("utimensat", directory, name, None, 0),
        "utimensat of a descriptor": ("utimensat", fd, None, times, 0),
        "setxattr": ("setxattr", path, *attribute),
        "removexattr": ("removexattr", path, b"user.cloche"),
        "lsetxattr": ("lsetxattr", path, *attribute),
        "lremovexattr": ("lremovexattr", path, b"user.cloche"),
        "fsetxattr": ("fsetxattr", fd, *attribute),
        "fremovexattr": ("fremovexattr", fd, b"user.cloche"),
    }
    return {what: call(*row) for what, row in rows.items() if row[0] in NUMBERS}


def flags(path: bytes) -> dict[str, str]:
    """Set flags and attributes of an inode to what they are, where the file system has some."""
    fd, found = os.open(path, os.O_RDONLY), ctypes.create_string_buffer(32)
    ends = {}
    for what, read, write in (("flags", 0x80086601, 0x40086602), ("attributes", 0x801C581F, 0x401C5820)):
        call("ioctl", fd, read, found)
        ends[what] = call("ioctl", fd, write, found)
    return ends


def race(kind: str, own: Path, outside: Path, tries: int) -> dict[str, int]:
    """Change the mode of a file of `own` again and again, while a thread puts one of `outside` into its place.

    Return how often the call ended how; the first `hit` ends all.
    """
    target, victim = own / "file", outside / "file"
    ask, swap = RACES[kind](target, victim)
    ended = threading.Event()

    def swapping() -> None:
        for turn in itertools.count():
            swap(turn % 2)
            if ended.is_set():
                return

    thread = threading.Thread(target=swapping)
    thread.start()
    ends: collections.Counter[str] = collections.Counter()
    try:
        for _ in range(tries):
            ends[ask()] += 1
            if victim.stat().st_mode & 0o777 == CHANGED:
                ends["hit"] = 1
                break
        return ends
    finally:
        ended.set()
        thread.join()


def by_path(target: Path, victim: Path):  # noqa: ANN201
    """Swap the path in memory."""
    texts = [bytes(target) + b"\0", bytes(victim) + b"\0"]
    buffer = ctypes.create_string_buffer(max(map(len, texts)))
    buffer.value = texts[0][:-1]
    return lambda: call("chmod", buffer, CHANGED), lambda turn: ctypes.memmove(buffer, texts[turn], len(texts[turn]))


def by_link(target: Path, victim: Path):  # noqa: ANN201
    """Swap a directory for a link to one outside."""
    folder, link = target.parent / "folder", target.parent / "link"
    folder.mkdir()
    (folder / "file").touch()
    link.symlink_to(victim.parent)
    names = [bytes(folder), bytes(link)]
    swap = lambda _turn: call("renameat2", AT_FDCWD, names[0], AT_FDCWD, names[1], RENAME_EXCHANGE)  # noqa: E731
    return lambda: call("chmod", bytes(folder / "file"), CHANGED), swap


def by_descriptor(target: Path, victim: Path):  # noqa: ANN201
    """Swap what a descriptor stands for."""
    files = [os.open(one, os.O_RDONLY) for one in (target, victim)]
    number = os.dup(files[0])
    return lambda: call("fchmod", number, CHANGED), lambda turn: os.dup2(files[turn], number)


def by_directory(target: Path, victim: Path):  # noqa: ANN201
    """Swap the working directory."""
    folders = [os.open(one.parent, os.O_RDONLY) for one in (target, victim)]
    os.fchdir(folders[0])
    return lambda: call("chmod", b"file", CHANGED), lambda turn: os.fchdir(folders[turn])


RACES = {"path": by_path, "link": by_link, "descriptor": by_descriptor, "directory": by_directory}


def main() -> None:
    """Install the filter, or none, and make the calls."""
    link, where, kind, own, outside, tries = sys.argv[1:]
    if where == "inside":
        perform_calls([privileges.forbid_new_privileges()])
        program = seccomp.build_filter(os.uname().machine, confined=True, one_uid=True)
        listener, _ = seccomp_notify.install(program, holds=True)
        messages.send(int(link), "listener", {}, [listener])
        os.close(listener)
    os.close(int(link))
    sys.setswitchinterval(1e-5)
    if kind in ("ways", "flags"):
        way = ways if kind == "ways" else flags
        print(json.dumps([way(os.fsencode(f"{folder}/file")) for folder in (own, outside)]))
    else:
        print(json.dumps(race(kind, Path(own), Path(outside), int(tries))))


main()
