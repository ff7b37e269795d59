"""One function per system call, with the kernel's own name.

`_ctypes` is used directly because importing `ctypes` costs a cold run three milliseconds. Every call keeps the GIL,
so that no other thread can run between a raw clone and the interpreter's own fork bookkeeping.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# Numbers by machine: x86-64 is tested; aarch64 follows the kernel's generic table and is untested.
NUMBERS: dict[str, dict[str, int]] = {
    "x86_64": {
        "clone": 56, "clone3": 435, "capset": 126, "prctl": 157, "pivot_root": 155,
        "mount": 165, "umount2": 166,
        "sethostname": 170, "seccomp": 317, "unshare": 272, "setns": 308, "open_tree": 428, "move_mount": 429,
        "close_range": 436, "mount_setattr": 442, "landlock_create_ruleset": 444,
        "landlock_add_rule": 445, "landlock_restrict_self": 446,
        "prlimit64": 302, "ioctl": 16,
    },
    "aarch64": {
        "clone": 220, "clone3": 435, "capset": 91, "prctl": 167, "pivot_root": 41,
        "mount": 40, "umount2": 39,
        "sethostname": 161, "seccomp": 277, "unshare": 97, "setns": 268, "open_tree": 428, "move_mount": 429,
        "close_range": 436, "mount_setattr": 442, "landlock_create_ruleset": 444,
        "landlock_add_rule": 445, "landlock_restrict_self": 446,
        "prlimit64": 261, "ioctl": 29,
    },
}  # fmt: skip

AT_FDCWD = -100
AT_EMPTY_PATH = 0x1000
AT_RECURSIVE = 0x8000

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2
OPEN_TREE_CLONE = 1
OPEN_TREE_CLOEXEC = os.O_CLOEXEC
MOVE_MOUNT_F_EMPTY_PATH = 4
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV, MOUNT_ATTR_NOEXEC = 1, 2, 4, 8
MOUNT_ATTR_IDMAP = 0x00100000

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 4, 24, 38
PR_SET_CHILD_SUBREAPER, PR_CAP_AMBIENT = 36, 47
PR_CAP_AMBIENT_RAISE, PR_CAP_AMBIENT_CLEAR_ALL = 2, 4


_ctypes: Any = __import__("_ctypes")  # private to CPython, so no type checker knows all of it
_KEEPS_GIL = _ctypes.FUNCFLAG_CDECL | _ctypes.FUNCFLAG_PYTHONAPI
# An int, bytes or None as one machine word; a C long; a pointer to bytes.
_Word = type("_Word", (_ctypes._SimpleCData,), {"_type_": "P"})
_Long = type("_Long", (_ctypes._SimpleCData,), {"_type_": "l"})
_Pointer = type("_Pointer", (_ctypes._SimpleCData,), {"_type_": "z"})
_Syscall = type(
    "_Syscall",
    (_ctypes.CFuncPtr,),
    {"_flags_": _KEEPS_GIL | _ctypes.FUNCFLAG_USE_ERRNO, "_argtypes_": (_Word,) * 7, "_restype_": _Long},
)
# One of CPython's own functions of no arguments and no result.
_Hook = type("_Hook", (_ctypes.CFuncPtr,), {"_flags_": _KEEPS_GIL, "_restype_": None})
_SELF = _ctypes.dlopen(None, 0)


def _symbol(name: str) -> int:
    address: int = _ctypes.dlsym(_SELF, name)
    return address


MACHINE = os.uname().machine
_NUMBER = NUMBERS.get(MACHINE, {})
_syscall: Any = _Syscall(_symbol("syscall"))
_before_fork: Any = _Hook(_symbol("PyOS_BeforeFork"))
_after_fork_child: Any = _Hook(_symbol("PyOS_AfterFork_Child"))
_after_fork_parent: Any = _Hook(_symbol("PyOS_AfterFork_Parent"))


def call(name: str, *args: int | bytes | None) -> int:
    """Make system call `name`, or raise OSError with the kernel's errno. Unset arguments are 0."""
    number = _NUMBER.get(name)
    if number is None:
        raise OSError(38, f"{name}: no number known on {MACHINE}")
    result: int = _syscall(number, *args, *(0,) * (6 - len(args)))
    if result < 0:
        code = _ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return result


def address_of(data: bytes) -> bytes:
    """Return where `data` lies in memory, as the kernel reads a pointer; the caller keeps `data` alive."""
    return bytes(_Pointer(data))


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    call("mount", os.fsencode(source), os.fsencode(target), kind.encode(), flags, data.encode() or None)


def umount2(target: str, flags: int) -> None:
    call("umount2", os.fsencode(target), flags)


def pivot_root(new_root: str, put_old: str) -> None:
    call("pivot_root", os.fsencode(new_root), os.fsencode(put_old))


def open_tree(path: str, *, recursive: bool) -> int:
    """Return a descriptor of a detached copy of the mount at `path`."""
    flags = OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | (AT_RECURSIVE if recursive else 0)
    return call("open_tree", AT_FDCWD, os.fsencode(path), flags)


def move_mount(tree_fd: int, target: str) -> None:
    """Attach a detached mount at `target`."""
    call("move_mount", tree_fd, b"", AT_FDCWD, os.fsencode(target), MOVE_MOUNT_F_EMPTY_PATH)


def mount_setattr(tree_fd: int, *, attr_set: int, userns_fd: int = 0, recursive: bool = True) -> None:
    """Set attributes of the mount behind `tree_fd`, and of all below it when `recursive`."""
    attr = b"".join(n.to_bytes(8, "little") for n in (attr_set, 0, 0, userns_fd))
    flags = AT_EMPTY_PATH | (AT_RECURSIVE if recursive else 0)
    call("mount_setattr", tree_fd, b"", flags, attr, len(attr))


def prctl(option: int, *args: int | bytes) -> int:
    return call("prctl", option, *args)


def unshare(flags: int) -> None:
    call("unshare", flags)


def setns(fd: int, kind: int) -> None:
    call("setns", fd, kind)


def sethostname(name: bytes) -> None:
    call("sethostname", name, len(name))


def close_range(first: int, last: int = 0xFFFFFFFF) -> None:
    call("close_range", first, last, 0)


def clone(flags: int) -> int:
    """Fork into new namespaces: 0 in the child, its pid in the parent.

    A raw clone skips the C library's fork handlers, so the child must only ever become a process that forks once
    more with `os.fork()` before it runs anything of a guest's (the library's idea of the thread id is stale here).
    """
    _before_fork()
    pid = -1
    try:
        pid = call("clone", flags | 17, 0, 0, 0, 0)  # 17 is SIGCHLD
    finally:
        if pid == 0:
            _after_fork_child()
        else:
            _after_fork_parent()
    return pid
