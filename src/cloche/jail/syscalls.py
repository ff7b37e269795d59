"""One function per system call, with the kernel's own name.

`_ctypes` is used directly because importing `ctypes` costs a cold run three milliseconds; sockets, polling and
waiting are here too because `_socket`, `select` and `resource` would cost one more, and `posix` stands for `os` for
the same reason. Every call keeps the GIL, so that no other thread can run between a raw clone and the interpreter's
own fork bookkeeping; so in a process with threads they must not be calls that wait.
"""

from __future__ import annotations

import posix

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

# Numbers by machine; tests compare them with the kernel's headers. Only x86-64 is tested by running.
NUMBERS: dict[str, dict[str, int]] = {
    "x86_64": {
        "write": 1, "close": 3, "mmap": 9, "ioctl": 16, "dup3": 292, "socket": 41, "sendmsg": 46, "recvmsg": 47,
        "bind": 49, "listen": 50, "socketpair": 53, "setsockopt": 54, "clone": 56, "wait4": 61, "chdir": 80,
        "fchmod": 91, "umask": 95, "setsid": 112,
        "setgroups": 116, "setresuid": 117, "setresgid": 119, "capset": 126, "pivot_root": 155, "prctl": 157,
        "mount": 165, "umount2": 166, "sethostname": 170, "sched_setaffinity": 203, "openat": 257, "mkdirat": 258,
        "mknodat": 259, "fchownat": 260, "unlinkat": 263, "symlinkat": 266, "ppoll": 271, "unshare": 272,
        "timerfd_create": 283, "timerfd_settime": 286, "prlimit64": 302, "setns": 308, "getcpu": 309, "seccomp": 317,
        "open_tree": 428,
        "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "clone3": 435, "close_range": 436,
        "openat2": 437, "mount_setattr": 442, "landlock_create_ruleset": 444, "landlock_add_rule": 445,
        "landlock_restrict_self": 446,
        "waitid": 247, "process_madvise": 440, "shmget": 29, "semget": 64, "msgget": 68, "mq_open": 240,
        "utimensat": 280,
        "exit_group": 231, "sched_setscheduler": 144, "set_robust_list": 273, "get_robust_list": 274, "setfsuid": 122,
        "capget": 125, "fcntl": 72, "flock": 73, "connect": 42, "accept4": 288, "getsockname": 51, "getpeername": 52,
        "kill": 62, "pwrite64": 18,
    },
    "aarch64": {
        "write": 64, "close": 57, "mmap": 222, "ioctl": 29, "dup3": 24, "socket": 198, "sendmsg": 211, "recvmsg": 212,
        "bind": 200, "listen": 201, "socketpair": 199, "setsockopt": 208, "clone": 220, "wait4": 260, "chdir": 49,
        "fchmod": 52, "umask": 166,
        "setsid": 157, "setgroups": 159, "setresuid": 147, "setresgid": 149, "capset": 91, "pivot_root": 41,
        "prctl": 167, "mount": 40, "umount2": 39, "sethostname": 161, "sched_setaffinity": 122, "openat": 56,
        "mkdirat": 34, "mknodat": 33, "fchownat": 54, "unlinkat": 35, "symlinkat": 36, "ppoll": 73,
        "timerfd_create": 85, "timerfd_settime": 86, "unshare": 97, "prlimit64": 261, "getcpu": 168, "setns": 268,
        "seccomp": 277,
        "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "clone3": 435,
        "openat2": 437, "close_range": 436, "mount_setattr": 442, "landlock_create_ruleset": 444,
        "landlock_add_rule": 445,
        "landlock_restrict_self": 446, "waitid": 95, "process_madvise": 440, "shmget": 194, "semget": 190,
        "msgget": 186, "mq_open": 180, "utimensat": 88,
        "exit_group": 94, "sched_setscheduler": 119, "set_robust_list": 99,
        "get_robust_list": 100, "setfsuid": 151, "capget": 90, "fcntl": 25, "flock": 32, "kill": 129,
        "connect": 203, "accept4": 242, "getsockname": 204, "getpeername": 205, "pwrite64": 68,
    },
}  # fmt: skip

# Calls that make or open a System V IPC object or a message queue, which outlive their maker (sysvipc(7)).
LASTING = ("shmget", "semget", "msgget", "mq_open")

# The upper half of the exit code in a guest's early exit notice; the filter notifies pid 1 of its prefork jail.
# The kernel takes the exit code from the lower half of the register (exit_group is declared with an int).
EXIT_NOTICE = 0x6C656176

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
CLONE_INTO_CGROUP, CLONE_ARGS_BYTES, SIGCHLD = 0x200000000, 88, 17
# The only flags with which a live session may be cloned into a jail of its own.
FORK_FLAGS = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | SIGCHLD
CLONE_NEW_ANY = 0x7E020080  # user, pid, net, ipc, uts, cgroup, mount, and time namespaces
# A filter's answer: notify if there is a listener, else allow. The kernel ignores the low 16 bits (SECCOMP_RET_DATA) of
# such an answer, so they can mark it: see seccomp(2).
ASK_IF_HEARD = 0x7FC00001
FSOPEN_CLOEXEC = FSMOUNT_CLOEXEC = 1
FSCONFIG_SET_STRING, FSCONFIG_CMD_CREATE = 1, 6

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2
OPEN_TREE_CLONE = 1
OPEN_TREE_CLOEXEC = posix.O_CLOEXEC
MOVE_MOUNT_F_EMPTY_PATH, MOVE_MOUNT_T_EMPTY_PATH = 4, 0x40
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV, MOUNT_ATTR_NOEXEC = 1, 2, 4, 8
MOUNT_ATTR_IDMAP = 0x00100000

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 4, 24, 38
PR_SET_CHILD_SUBREAPER, PR_CAP_AMBIENT = 36, 47
PR_CAP_AMBIENT_RAISE, PR_CAP_AMBIENT_CLEAR_ALL = 2, 4

AF_UNIX, SOCK_SEQPACKET, SOCK_DGRAM = 1, 5, 2
MSG_NOSIGNAL, MSG_CMSG_CLOEXEC = 0x4000, 0x40000000
POLLIN = 1
WNOHANG, WEXITED, WNOWAIT = 1, 4, 0x01000000
P_ALL, SCHED_BATCH = 0, 3
MOST_PROCESSORS = 4  # among which a blind choice of another one is a good one
PROT_READ, MAP_PRIVATE = 1, 2
# Of `struct cmsghdr`: its size, and level and type (SOL_SOCKET, SCM_RIGHTS); of `struct msghdr`, one field's offset.
_CMSG_HEADER, _SCM_RIGHTS, _CONTROL_LENGTH_AT = 16, bytes((1, 0, 0, 0, 1, 0, 0, 0)), 40

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


MACHINE = posix.uname().machine
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
        raise OSError(code, f"{name}: {posix.strerror(code)}")
    return result


def attempt(name: str, *args: int | bytes | None) -> int:
    """Make a system call that may fail; return its result, or its errno as a negative number."""
    result: int = _syscall(_NUMBER[name], *args, *(0,) * (6 - len(args)))
    return result if result >= 0 else -_ctypes.get_errno()


def address_of(data: bytes) -> bytes:
    """Return where `data` lies in memory, as the kernel reads a pointer; the caller keeps `data` alive."""
    return bytes(_Pointer(data))


def prctl(option: int, *args: int | bytes) -> int:
    return call("prctl", option, *args)


def unshare(flags: int) -> None:
    call("unshare", flags)


def close_range(first: int, last: int = 0xFFFFFFFF) -> None:
    call("close_range", first, last, 0)


def clone(flags: int, group_fd: int = -1) -> int:
    """Fork into new namespaces and, with the open folder of a control group of version 2, into that group.

    Returns 0 in the child, its pid in the parent. A raw clone skips the C library's fork handlers, so the child must
    only ever become a process that forks once more with `os.fork()` before it runs anything of a guest's (the
    library's idea of the thread id is stale here).
    """
    _before_fork()
    pid = -1
    try:
        if group_fd < 0:
            pid = call("clone", flags | SIGCHLD, 0, 0, 0, 0)
        else:
            pid = call("clone3", _clone_args(flags, group_fd), CLONE_ARGS_BYTES)
    finally:
        if pid == 0:
            _after_fork_child()
        else:
            _after_fork_parent()
    return pid


def _clone_args(flags: int, group_fd: int) -> bytes:
    """Return the kernel's `struct clone_args`: flags, the signal at the end, and the group."""
    arguments = bytearray(CLONE_ARGS_BYTES)
    for offset, value in ((0, flags | CLONE_INTO_CGROUP), (32, SIGCHLD), (80, group_fd)):
        arguments[offset : offset + 8] = value.to_bytes(8, "little")
    return bytes(arguments)


def run_beside(pid: int, allowed: set[int]) -> None:
    """Move a new child to another processor than ours; it may run on all that are `allowed`.

    The kernel often leaves it on its parent's, where it waits until the parent sleeps while the other one is idle. A
    process that the child forks before our next message may inherit a mask that is half changed, and must get the right
    one. Where that is not possible, or there are many processors to choose from, the choice is the kernel's.
    """
    if not 1 < len(allowed) <= MOST_PROCESSORS:
        return
    processor = fresh(4)
    try:
        call("getcpu", processor, None, None)
        posix.sched_setaffinity(pid, allowed - {read_uint(processor, 0)})
        posix.sched_setaffinity(pid, allowed)
    except OSError:
        return


def run_anywhere(allowed: set[int]) -> None:
    """Undo a parent's unfinished `run_beside`: after a change of identity it may not have the right to.

    Root that may not change priorities, as in a plain container, loses it between its two calls where it is slow.
    """
    if not 1 < len(allowed) <= MOST_PROCESSORS:
        return
    try:
        posix.sched_setaffinity(0, allowed)
    except OSError:  # none of them is ours any more: the kernel has chosen others
        return


def map_file(fd: int, size: int) -> memoryview:
    """Return the `size` bytes of a sealed file, in memory that stays until the process ends."""
    address = call("mmap", None, size, PROT_READ, MAP_PRIVATE, fd, 0)
    letter = type("_Letter", (_ctypes._SimpleCData,), {"_type_": "c"})
    letters: Any = type("_Letters", (_ctypes.Array,), {"_type_": letter, "_length_": size})
    return memoryview(letters.from_address(address))


def fresh(size: int) -> bytes:
    """Return `size` zero bytes without another reference, for the kernel to write into."""
    return bytes(bytearray(size))


def read_uint(data: bytes, offset: int, size: int = 4) -> int:
    """Read an unsigned integer of the kernel's, `at` bytes from the start."""
    return int.from_bytes(data[offset : offset + size], "little")


def socketpair() -> tuple[int, int]:
    """Return the two ends of a connected socket that keeps messages apart; children may inherit neither."""
    pair = fresh(8)
    call("socketpair", AF_UNIX, SOCK_SEQPACKET | posix.O_CLOEXEC, 0, pair)
    return read_uint(pair, 0), read_uint(pair, 4)


def sendmsg(fd: int, data: bytes, fds: Sequence[int] = ()) -> None:
    """Send one message with descriptors; raises OSError when the other end is gone."""
    control = b""
    if fds:
        packed = b"".join(fd.to_bytes(4, "little") for fd in fds)
        control = (_CMSG_HEADER + len(packed)).to_bytes(8, "little") + _SCM_RIGHTS + packed
        control += bytes(-len(control) % 8)
    header, _vector = _message(data, control)
    _again("sendmsg", fd, header, MSG_NOSIGNAL)


def recvmsg(fd: int, size: int, most_fds: int) -> tuple[bytes, list[int]]:
    """Receive one message of at most `size` bytes with its descriptors; empty when the other end is gone."""
    data, control = fresh(size), fresh(_CMSG_HEADER + 4 * most_fds + 8)
    header, _vector = _message(data, control)
    received = _again("recvmsg", fd, header, MSG_CMSG_CLOEXEC)
    filled = read_uint(header, _CONTROL_LENGTH_AT, 8)
    fds, offset = [], 0
    while offset + _CMSG_HEADER <= filled:
        length = read_uint(control, offset, 8)
        if control[offset + 8 : offset + _CMSG_HEADER] == _SCM_RIGHTS:
            fds += [read_uint(control, start) for start in range(offset + _CMSG_HEADER, offset + length, 4)]
        offset += max(_CMSG_HEADER, length + -length % 8)
    return data[:received], fds


def ppoll(fds: Sequence[int], timeout_s: float | None) -> list[tuple[int, int]]:
    """Wait until a descriptor can be read or has ended; return those with their events. None waits for ever."""
    table = b"".join(fd.to_bytes(4, "little") + POLLIN.to_bytes(4, "little") for fd in fds)
    table = bytes(bytearray(table))  # the kernel writes into it
    span = None
    if timeout_s is not None:
        nanoseconds = max(0, int(timeout_s * 1e9))
        span = (nanoseconds // 10**9).to_bytes(8, "little") + (nanoseconds % 10**9).to_bytes(8, "little")
    try:
        call("ppoll", table, len(fds), span)
    except InterruptedError:
        return []
    return [(fd, events) for index, fd in enumerate(fds) if (events := read_uint(table, 8 * index + 6, 2))]


def wait4(pid: int, options: int) -> tuple[int, int, tuple[float, float, int]]:
    """Return pid, wait status and usage (user and system seconds, largest resident KiB); pid 0 for none yet."""
    status, usage = fresh(4), fresh(144)
    reaped_pid = _again("wait4", pid, status, options, usage)
    seconds = [read_uint(usage, offset, 8) + read_uint(usage, offset + 8, 8) / 1e6 for offset in (0, 16)]
    return reaped_pid, read_uint(status, 0), (seconds[0], seconds[1], read_uint(usage, 32, 8))


def _again(name: str, *args: int | bytes | None) -> int:
    """Repeat the call after an interruption by a signal (EINTR), such as SIGCHLD."""
    while True:
        try:
            return call(name, *args)
        except InterruptedError:
            continue


def _message(data: bytes, control: bytes) -> tuple[bytes, bytes]:
    """Return a `struct msghdr` for one buffer, and its vector: the caller keeps all four alive during the call."""
    vector = address_of(data) + len(data).to_bytes(8, "little")
    header = bytes(16) + address_of(vector) + (1).to_bytes(8, "little")
    return header + address_of(control) + len(control).to_bytes(8, "little") + bytes(8), vector
