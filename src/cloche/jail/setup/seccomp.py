"""The system call filter: one table of allowed calls, assembled into classic BPF, and into docker's profile.

An allowlist in the spirit of the common container profile, minus everything a guest could use to build namespaces,
mount, trace, load code into the kernel, or reach another process's memory. A call outside of the table fails with
EPERM; a call newer than the table with ENOSYS, so that a C library falls back instead of failing. Calls that no program
makes by chance are refused by the reaper, which counts them (see `seccomp_notify`).

Absent on purpose, hence EPERM: everything that mounts, makes or enters namespaces, traces or reads another process,
loads code or keys into the kernel, sets clocks, swaps, reboots, `io_uring`, `io_setup` (the whole host has one supply
of its events), `userfaultfd`, `bpf`, `perf_event_open`, `fanotify`, `open_by_handle_at`, `seccomp`, `chroot` and
`modify_ldt`.

Theory of operation of the filter: numbers are sorted and merged into ranges, and a binary tree of comparisons finds the
range of a call in about eight steps. There is its answer, or a short block that checks an argument. Only values in
registers are compared: memory behind a pointer can change after the check. The kernel tries a filter with every number
when it is installed, once for each run, so long paths through it would cost all programs time.

`profile` is the same table for containers, in the format of docker's profiles. `backends/docker/seccomp.json` is its
text, for calling docker by hand; a test keeps the two equal. The table is shared, the rules on arguments are not: the
jail refuses four terminal ioctls and some of prctl and fcntl, containers two ioctls.
"""

from __future__ import annotations

import functools
import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from ..syscalls import ASK_IF_HEARD, CLONE_NEW_ANY, EXIT_NOTICE, FORK_FLAGS, LASTING, PR_SET_DUMPABLE
from .privileges import IOCTLS_SINCE, LENGTHS_SINCE
from .syscall_table import ALLOWED, LAST_KNOWN, REPORTED

BPF_LD_W_ABS, BPF_JEQ, BPF_JGE, BPF_JSET, BPF_AND, BPF_RET = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
KILL, ALLOW, ASK = 0x80000000, 0x7FFF0000, 0x7FC00000
EPERM, E2BIG, EACCES, ENOTTY, ENOSYS, EPROTONOSUPPORT, EOPNOTSUPP, EAFNOSUPPORT = 1, 7, 13, 25, 38, 93, 95, 97
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32_BIT = 0x40000000
NR_OFFSET, ARCH_OFFSET = 0, 4

SOCKET_FAMILIES = (1, 2, 10)  # unix, inet, inet6
AF_UNIX, AF_INET, AF_INET6, AF_NETLINK, NETLINK_ROUTE = 1, 2, 10, 16, 0
SOCKET_PROTOCOLS = (0, 6, 17)  # the family's own, TCP, UDP; asking for another makes the host's kernel load its module
SOCKET_TYPES, SOCK_TYPE_MASK = (1, 2, 5), 0xF  # stream, dgram, seqpacket; the mask drops SOCK_CLOEXEC and its kind
# Pairs of these are connected for good: whatever address a call names, they send to each other. One of a datagram pair
# (SOCK_RAW makes one, too) sends to any path or name.
CONNECTED_TYPES = (1, 5)
# Calls that reach other trees if there is no namespace behind the filter: System V IPC and message queues …
SHARED_WITHOUT_NAMESPACES = (
    "shmget", "shmat", "shmctl", "semget", "semop", "semctl", "semtimedop", "msgget", "msgsnd", "msgrcv", "msgctl",
    "mq_open", "mq_unlink",
    "inotify_init", "inotify_init1", "inotify_add_watch",  # … tells the names in folders that Landlock closes …
    "bind", "connect", "listen",  # … a pair's socket could take an abstract name, or be a name in a folder …
)  # fmt: skip
# … and calls that name another process; there they work on the caller alone (argument index of the pid). In a jail
# they work on all but pid 1: it may have the guest's id, and has yet to report how the guest ended.
SELF_ONLY = {
    "prlimit64": 0, "sched_setaffinity": 0, "sched_setscheduler": 0, "sched_setparam": 0, "sched_setattr": 0,
}  # fmt: skip
# Here 0 may mean all processes of the caller's user as well: by call, which first argument means one process. The
# second after it means a user.
SELF_ONLY_OF_KIND = {"setpriority": 0, "ioprio_set": 1}
INIT = 1
# Calls that evade the limits without control groups: segments that no process has attached are in no process's memory,
# and a process may leave its processors.
UNCOUNTED = ("shmget", "sched_setaffinity")
FORKS, SIGCHLD = ("clone", "fork", "vfork"), 17
# Calls that change metadata by a path, or by a descriptor that may be open for reading only: Landlock handles none.
METADATA = (
    "chmod", "fchmod", "fchmodat", "fchmodat2", "chown", "lchown", "fchown", "fchownat", "utime", "utimes", "futimesat",
    "utimensat",
)  # fmt: skip
# Extended attributes. The kernel keeps an access control list of a tmpfs in memory that no control group and no limit
# of that tmpfs counts, of 64 KiB for each file and 128 KiB for each folder: so a value has no more bytes than leave
# both lists of a folder as large as its inode. Where a folder of the host stands in for the tmpfs, nothing bounds how
# many attributes a file has, nor counts them as stored, and there are none.
SETS_ATTRIBUTE, SIZE_OF_ATTRIBUTE, MOST_ATTRIBUTE = ("setxattr", "lsetxattr", "fsetxattr"), 3, 512
ATTRIBUTES = (*SETS_ATTRIBUTE, "removexattr", "lremovexattr", "fremovexattr")
NETWORK_CALLS = ("socket", "connect", "bind")
# TIOCSTI and TIOCLINUX type into a terminal, TIOCCONS and TIOCSETD redirect it. FS_IOC_SETVERSION writes a number into
# an inode by any readable file: into the caller's, or into a folder that serves another run.
REFUSED_IOCTLS = (0x5412, 0x541C, 0x541D, 0x5423, 0x40087602)
# Common ioctls of file systems have one letter as their type. Some change the file system or its user's keys by any
# readable file: with FS_IOC_REMOVE_ENCRYPTION_KEY (fscrypt) a guest could lock the caller's home. So only flags may be
# read and set.
FILE_SYSTEM_KIND, KIND_MASK = 0x6600, 0xFF00
FLAG_IOCTLS = (0x80086601, 0x40086602)
# If the guest's uid is the caller's, flags may only be read, and neither XFS's attributes nor btrfs's properties of a
# subvolume may be set, which a file's owner could; the ioctls that share blocks have btrfs's type.
READ_FLAGS, ATTRIBUTE_KIND, BTRFS_KIND = FLAG_IOCTLS[:1], 0x5800, 0x9400
CLONE_IOCTLS = (0x40049409, 0x4020940D, 0xC0189436)
# Interface ioctls are refused as a range, except those that only read.
SIOC_FIRST, SIOC_LAST = 0x8900, 0x89FF
SOCKET_QUESTIONS = (0x8904, 0x8905)  # of the socket itself
SIOC_QUESTIONS = (0x8910, 0x8912, 0x8913, 0x8915, 0x8919, 0x891B, 0x891D, 0x8921, 0x8927, 0x8933)
PERSONALITIES = (0x0, 0x8, 0x20000, 0x20008, 0xFFFFFFFF)
# fcntl: locks of three kinds ask first (see `seccomp_notify`). Leases, directory notices and delegations are refused,
# and so are hints on how long data lives (F_SET_RW_HINT): the kernel keeps them in the inode, for its owner, through
# read-only mounts too.
LOCK_COMMANDS, REFUSED_COMMANDS = (5, 6, 7, 36, 37, 38), (1024, 1026, 1036, 1038, 1040)
OWNER_COMMANDS = (8, 15)  # F_SETOWN, F_SETOWN_EX: the receiver of a file's signals
# PR_SET_SECCOMP; PR_SET_MM, which rewrites what /proc says of a process; PR_SCHED_CORE, which takes a whole core.
PRCTL_REFUSED = (22, 35, 62)
# With this flag a send makes the connection itself (tcp(7)); and the argument of each call that has the flags.
MSG_FASTOPEN, FLAGS_OF_SENDING = 0x20000000, {"sendto": 3, "sendmsg": 2, "sendmmsg": 3}
# Calls that could wake a stopped process: they have the kernel send a signal later. A live session that was cloned is
# stopped by SIGSTOP, so it must have no way to arrange a SIGCONT to itself.
SIGCONT, EXIT_SIGNAL_MASK, PR_SET_PDEATHSIG, F_SETSIG = 18, 0xFF, 1, 10
LATE_SIGNALS = ("timer_create", "mq_notify")
# IPv4 socket options from this number on belong to packet filters (netfilter); of IPv6, these two do.
SOL_IP, SOL_IPV6, FIRST_FILTER_OPTION, FILTER_OPTIONS = 0, 41, 64, (64, 65)
# SO_LINGER: the last process to close a socket waits that long, and that need not be the guest: a socket in flight over
# another one is closed by a receiver without room or, on older kernels, by any process that collects garbage sockets.
SOL_SOCKET, SO_LINGER = 1, 13
# SO_SNDBUF and the like: without control groups socket buffers count nowhere, so their sizes keep the defaults.
BUFFER_SIZES = (7, 8)
# Filters of a socket's packets: the kernel compiles each, and all ordinary users share one limit of memory for that
# (net.core.bpf_jit_limit). At the limit only root can install a filter of system calls, as browsers and sandboxes do.
ATTACH_OPTIONS = (26, 50, 51, 52)  # SO_ATTACH_FILTER, _BPF, _REUSEPORT_CBPF, _REUSEPORT_EBPF

O_ACCMODE, O_TRUNC = 3, 0o1000

Instruction = tuple[int, int, int, int]
Block = list[Instruction]


def errno_action(code: int) -> int:
    """Return the filter's answer that makes a call fail with errno `code`."""
    return 0x00050000 | code


def build_filter(
    machine: str,
    *,
    confined: bool,
    counted: bool = True,
    prefork: bool = False,
    forkable: bool = False,
    users: bool = False,
    resident: bool = False,
    one_uid: bool = False,
    network: bool = False,
    landlock: int = IOCTLS_SINCE,
) -> bytes:
    """Return the BPF program for `machine`, as the kernel takes it. Raises KeyError for a machine without a table.

    - `confined` is for filters without namespaces: then no socket can be created at all, except pairs that stay
      connected, and no object that other processes share.
    - `one_uid`: the guest has its user's own uid; calls that change metadata notify.
    - `counted`: control groups count the guest's processes and memory. Without them the calls of `UNCOUNTED` are
      refused, sizes of socket buffers are not changed, and with `one_uid` each new process notifies, and each new
      handler of SIGCHLD.
    - `network`: sockets of TCP and UDP and their connections notify (`network_calls`).
    - `landlock` is its version, where it alone protects files: accesses that an old version does not handle are
      refused.
    - `prefork` is for a prefork jail, which reuses its namespaces of network and IPC: its pid 1 is notified of every
      socket and every object that could leave a trace there, and of a guest's exit notice.
    - `forkable` is for a session: a clone into new namespaces, with one exact set of flags, notifies too.
    - `resident` is for a live sandbox, whose pid 1 must be able to inspect each process; if it is `confined`,
      too, signals to others notify (`kill_calls`).
    - `users`: with several, a netlink socket for the audit log is an unknown protocol, as on a kernel without one: su
      and useradd fail where it is forbidden.
    """
    names = ALLOWED[machine]
    special = _special_blocks(confined=confined, prefork=prefork)
    special |= {} if counted else {name: [_deny(EPERM)] for name in UNCOUNTED}
    if one_uid:
        special |= {name: [_ASKED] for name in METADATA} | {"ioctl": _ioctl_block((), one_uid=True)}
    if one_uid and not counted:
        special |= {name: [*special.get(name, [_ALLOWED])[:-1], (BPF_RET, 0, 0, ASK_IF_HEARD)] for name in FORKS}
        special["rt_sigaction"] = [_argument(0), *_if_any((SIGCHLD,), (BPF_RET, 0, 0, ASK_IF_HEARD)), _ALLOWED]
    if network:
        special |= _connected_blocks()
    if not counted:
        sizes = [_argument(2), *_if_any(BUFFER_SIZES, _NOT_DONE)]
        special["setsockopt"] = [
            _argument(1), (BPF_JEQ, 0, len(sizes), SOL_SOCKET), *sizes, *special["setsockopt"]
        ]  # fmt: skip
    if confined:
        special |= _opening_blocks(landlock)
    if resident and confined:
        special["kill"] = [(BPF_RET, 0, 0, ASK_IF_HEARD)]
    if resident or confined:  # the caller is told that it was done
        hiding = [(BPF_JEQ, 0, 3, PR_SET_DUMPABLE), _argument(1), *_if_any((0,), _NOT_DONE)]
        special["prctl"] = [_argument(0), *hiding, *special["prctl"]]
    if forkable:
        special |= _forkable_blocks(special)
    if users:
        special["socket"] = _socket_block(_ALLOWED, no_netlink=EPROTONOSUPPORT)
    blocks = {number: special.get(name, [_ALLOWED]) for name, number in names.items()}
    return _program(machine, blocks | {number: [_ASKED] for number in REPORTED[machine]})


def _program(machine: str, blocks: Mapping[int, Block]) -> bytes:
    """Return the program that answers each number by its lines, with EPERM without any."""
    head = [
        (BPF_LD_W_ABS, 0, 0, ARCH_OFFSET),
        (BPF_JEQ, 1, 0, AUDIT_ARCH[machine]),
        (BPF_RET, 0, 0, KILL),
        (BPF_LD_W_ABS, 0, 0, NR_OFFSET),
    ]
    if machine == "x86_64":
        head += [(BPF_JGE, 0, 1, X32_BIT), (BPF_RET, 0, 0, KILL)]
    ranges = _ranges(blocks, LAST_KNOWN[machine])
    return b"".join(struct.pack("<HBBI", *line) for line in [*head, *_tree(ranges)])


# Calls of the egress process: it reads files, connects, and answers; system libraries that resolve names, too.
# The numbers are those of the table; calls that a machine lacks are left out.
OF_EGRESS = (
    "read", "write", "close", "stat", "fstat", "lstat", "newfstatat", "statx", "poll", "ppoll", "select", "pselect6",
    "lseek", "mmap", "mprotect", "munmap", "mremap", "madvise", "brk", "rt_sigaction", "rt_sigprocmask",
    "rt_sigreturn", "sigaltstack", "restart_syscall", "pread64", "readv", "writev", "access", "faccessat",
    "faccessat2", "pipe2", "sched_yield", "sched_getaffinity", "dup", "dup2", "dup3", "nanosleep", "clock_nanosleep",
    "clock_gettime", "clock_getres", "gettimeofday", "time", "getpid", "gettid", "getuid", "geteuid", "getgid",
    "getegid", "uname", "sysinfo", "getrlimit", "getrusage", "getcwd", "readlink", "readlinkat", "getdents64", "statfs",
    "fstatfs", "connect", "accept", "accept4", "bind", "sendto", "recvfrom", "sendmsg", "recvmsg", "sendmmsg",
    "recvmmsg", "shutdown", "getsockname", "getpeername", "setsockopt", "getsockopt", "ftruncate", "memfd_create",
    "exit", "exit_group", "futex", "set_tid_address", "set_robust_list", "rseq", "membarrier", "getrandom", "tgkill",
    "epoll_create1", "epoll_ctl", "epoll_wait", "epoll_pwait", "epoll_pwait2", "eventfd2",
)  # fmt: skip
CLONE_THREAD, OPENED_TO_WRITE = 0x10000, 0o3103  # O_WRONLY, O_RDWR, O_CREAT, O_TRUNC, O_APPEND
FD_IOCTLS = (0x541B, 0x5421, 0x5450, 0x5451)  # how much can be read, blocking, close-on-exec
PR_SET_NAME = 15


def egress_filter(machine: str) -> bytes:
    """Return a program for the egress process: it starts threads and no process, writes no file, has no Unix socket.

    Raises KeyError for a machine without a table.
    """
    names = ALLOWED[machine]
    routes = [_argument(2), *_if_any((NETLINK_ROUTE,), _ALLOWED), _deny(EPROTONOSUPPORT)]
    special: dict[str, Block] = {
        "clone": [_argument(0), (BPF_JSET, 0, 1, CLONE_NEW_ANY), _deny(EPERM), *_if_thread()],
        "clone3": [_deny(ENOSYS)],
        "socketpair": _pair_block(CONNECTED_TYPES),
        "open": [_argument(1), *_if_read_only()],
        "openat": [_argument(2), *_if_read_only()],
        "socket": [
            _argument(0), *_if_any((AF_INET, AF_INET6), _ALLOWED), (BPF_JEQ, 1, 0, AF_NETLINK),
            _deny(EAFNOSUPPORT), *routes,
        ],
        "fcntl": [_argument(1), *_if_any(REFUSED_COMMANDS, _deny(EPERM)), _ALLOWED],
        "ioctl": [_argument(1), *_if_any(FD_IOCTLS, _ALLOWED), _deny(ENOTTY)],
        "prctl": [_argument(0), *_if_any((PR_SET_NAME,), _ALLOWED), _deny(EPERM)],
        "prlimit64": [_argument(0), *_if_any((0,), _ALLOWED), _deny(EPERM)],
    }  # fmt: skip
    allowed_names = (name for name in (*OF_EGRESS, *special) if name in names)
    return _program(machine, {names[name]: special.get(name, [_ALLOWED]) for name in allowed_names})


def _if_thread() -> Block:
    return [(BPF_JSET, 0, 1, CLONE_THREAD), _ALLOWED, _deny(EPERM)]


def _if_read_only() -> Block:
    return [(BPF_JSET, 0, 1, OPENED_TO_WRITE), _deny(EPERM), _ALLOWED]


def first_process_filter(machine: str) -> bytes:
    """Return a program that refuses to limit or slow down a first process with the guest's id, and nothing else.

    For where a kernel of the guest's own is the wall. Raises KeyError for a machine without a table.
    """
    special = _special_blocks(confined=False, prefork=False)
    rows = [
        (BPF_LD_W_ABS, 0, 0, ARCH_OFFSET),
        (BPF_JEQ, 1, 0, AUDIT_ARCH[machine]),
        _deny(ENOSYS),
        (BPF_LD_W_ABS, 0, 0, NR_OFFSET),
        (BPF_JGE, 0, 1, X32_BIT),
        _deny(ENOSYS),
    ]
    for name in (*SELF_ONLY, *SELF_ONLY_OF_KIND):
        rows += [(BPF_JEQ, 0, len(special[name]), ALLOWED[machine][name]), *special[name]]
    return b"".join(struct.pack("<HBBI", *row) for row in [*rows, _ALLOWED])


def _ranges(blocks: Mapping[int, Block], last: int) -> list[tuple[int, Block]]:
    """Return pairs that cover every number from 0 up: the first number, and the lines that answer."""
    ranges: list[tuple[int, Block]] = []
    for number in range(last + 1):
        block = blocks.get(number, [_deny(EPERM)])
        if not ranges or ranges[-1][1] != block:
            ranges.append((number, block))
    return [*ranges, (last + 1, [_deny(ENOSYS)])]


def _tree(ranges: Sequence[tuple[int, Block]]) -> Block:
    """Return comparisons that end in the lines of the loaded number's range."""
    if len(ranges) == 1:
        return ranges[0][1]
    middle = len(ranges) // 2
    low, high = _tree(ranges[:middle]), _tree(ranges[middle:])
    if len(low) > 255:  # a jump reaches 255 lines; farther ones go through an unconditional jump
        return [(BPF_JGE, 0, 1, ranges[middle][0]), (0x05, 0, 0, len(low)), *low, *high]
    return [(BPF_JGE, len(low), 0, ranges[middle][0]), *low, *high]


def _special_blocks(*, confined: bool, prefork: bool) -> dict[str, Block]:
    """Return the calls whose answer depends on an argument, each with its lines."""
    blocks = {
        **({name: [_ASKED] for name in LASTING} if prefork else {}),
        **({"exit_group": [_upper_half(0), *_if_any((EXIT_NOTICE,), _ASKED), _ALLOWED]} if prefork else {}),
        "clone": [_argument(0), (BPF_JSET, 0, 1, CLONE_NEW_ANY), _ASKED, _ALLOWED],
        "clone3": [_deny(ENOSYS)],
        "memfd_create": [_deny(ENOSYS)],
        "socket": _socket_block(_ASKED if prefork else _ALLOWED),
        "socketpair": _pair_block(CONNECTED_TYPES if confined else None),
        "flock": [_ASKED],
        "fcntl": [
            _argument(1),
            *_if_any(LOCK_COMMANDS, _ASKED),
            *_if_any((*REFUSED_COMMANDS, *(OWNER_COMMANDS if confined else ())), _deny(EPERM)),
            _ALLOWED,
        ],
        "ioctl": _ioctl_block(() if confined else SIOC_QUESTIONS),
        "personality": [_argument(0), *_if_any(PERSONALITIES, _ALLOWED), _deny(EPERM)],
        "prctl": [_argument(0), *_if_any(PRCTL_REFUSED, _deny(EPERM)), _ALLOWED],
        "setsockopt": _socket_option_block(),
        **{
            name: [_argument(SIZE_OF_ATTRIBUTE), (BPF_JGE, 0, 1, MOST_ATTRIBUTE + 1), _deny(E2BIG), _ALLOWED]
            for name in SETS_ATTRIBUTE
        },
    }
    if confined:
        blocks |= {name: [_deny(EOPNOTSUPP)] for name in ATTRIBUTES}
        blocks |= {name: [_deny(EPERM)] for name in ("socket", *SHARED_WITHOUT_NAMESPACES)}
        blocks |= {
            name: [_argument(index), *_if_any((0,), _ALLOWED), _deny(EPERM)] for name, index in SELF_ONLY.items()
        }
        blocks |= {name: _self_block(kind) for name, kind in SELF_ONLY_OF_KIND.items()}
    else:
        but_init = _if_any((INIT,), _deny(EPERM))
        blocks |= {name: [_argument(index), *but_init, _ALLOWED] for name, index in SELF_ONLY.items()}
        blocks |= {
            name: [_argument(0), *_if_any((kind + 2,), _deny(EPERM)), _argument(1), *but_init, _ALLOWED]
            for name, kind in SELF_ONLY_OF_KIND.items()
        }
    return blocks


def _connected_blocks() -> dict[str, Block]:
    """Return the blocks that differ at level confined with a network: the reaper makes and connects its sockets.

    Options of the protocols are not changed, and setting them reports success.
    """
    return {
        "socket": _socket_block(_ASKED, families=(AF_INET, AF_INET6)),
        "connect": [_ASKED],
        "bind": [_ASKED],
        "setsockopt": [_argument(1), (BPF_JEQ, 1, 0, SOL_SOCKET), _NOT_DONE, *_socket_option_block()],
        **{
            name: [_argument(flags), (BPF_JSET, 0, 1, MSG_FASTOPEN), _deny(EPERM), _ALLOWED]
            for name, flags in FLAGS_OF_SENDING.items()
        },
    }


def _opening_blocks(landlock: int) -> dict[str, Block]:
    """Return the blocks for opening files where the filter has no namespaces behind it: for reading, or for writing.

    Landlock lets every process open any file for neither (mode 3); old versions then allow `ioctl` on devices, such as
    the terminals of the guest's user, and truncation. That takes no right of reading either.
    """
    can_shorten = landlock < LENGTHS_SINCE
    refused = (O_ACCMODE, O_ACCMODE | O_TRUNC, *([O_TRUNC] if can_shorten else []))
    by_flags = [(BPF_AND, 0, 0, O_TRUNC | O_ACCMODE), *_if_any(refused, _deny(EACCES)), _ALLOWED]
    return {
        "open": [_argument(1), *by_flags],
        "openat": [_argument(2), *by_flags],
        **({"openat2": [_deny(ENOSYS)]} if landlock < IOCTLS_SINCE else {}),  # whose flags are in memory
        **({"truncate": [_deny(EACCES)]} if can_shorten else {}),
    }


def _forkable_blocks(special: Mapping[str, list[Instruction]]) -> dict[str, Block]:
    """Return the blocks that differ in a session that may be cloned.

    A clone has all capabilities in its namespaces until it gives them up, and is checked only then: so kernel
    interfaces that they would open are refused here, or notify.
    """
    exit_signal = [(BPF_AND, 0, 0, EXIT_SIGNAL_MASK), *_if_any((SIGCONT,), _deny(EPERM))]
    late = [(BPF_JEQ, 0, 3, PR_SET_PDEATHSIG), _argument(1), *_if_any((SIGCONT,), _deny(EPERM))]
    options = [
        *special["setsockopt"][:-1],
        _argument(1),
        (BPF_JEQ, 0, 3, SOL_IP),
        _argument(2),
        (BPF_JGE, 0, 1, FIRST_FILTER_OPTION),
        _deny(EPERM),
        _argument(1),
        (BPF_JEQ, 0, 5, SOL_IPV6),
        _argument(2),
        *_if_any(FILTER_OPTIONS, _deny(EPERM)),
        _ALLOWED,
    ]
    return {
        "clone": [_argument(0), *_if_any((FORK_FLAGS,), _ASKED), *exit_signal, *special["clone"]],
        "fcntl": [_argument(1), *_if_any((F_SETSIG,), _deny(EPERM)), *special["fcntl"][1:]],
        "prctl": [_argument(0), *late, *special["prctl"]],
        "setsockopt": options,
        "socket": _socket_block(_ALLOWED, _ASKED),
        **{name: [_deny(EPERM)] for name in LATE_SIGNALS},
    }


def _argument(index: int) -> Instruction:
    """Load the low 32 bits of an argument; the kernel ignores the high ones in every call checked here."""
    return (BPF_LD_W_ABS, 0, 0, 16 + 8 * index)


def _upper_half(index: int) -> Instruction:
    """Load the high 32 bits of an argument that the kernel ignores."""
    return (BPF_LD_W_ABS, 0, 0, 16 + 8 * index + 4)


def _if_any(values: Sequence[int], answer: Instruction) -> Block:
    """Give `answer` when the loaded argument is one of `values`; else go on behind these lines."""
    return [line for value in values for line in ((BPF_JEQ, 0, 1, value), answer)]


def _deny(code: int) -> Instruction:
    return (BPF_RET, 0, 0, errno_action(code))


_ALLOWED: Instruction = (BPF_RET, 0, 0, ALLOW)
_ASKED: Instruction = (BPF_RET, 0, 0, ASK)
_NOT_DONE: Instruction = (BPF_RET, 0, 0, errno_action(0))  # and the caller is told that it was


def _self_block(kind: int) -> Block:
    """Allow a call for the caller alone: the first argument gives the kind of id that the second one is."""
    whoever = [_argument(1), *_if_any((0,), _ALLOWED), _deny(EPERM)]
    return [_argument(0), (BPF_JEQ, 1, 0, kind), _deny(EPERM), *whoever]


def _socket_block(
    granted: Instruction,
    routes_granted: Instruction | None = None,
    *,
    no_netlink: int = EPERM,
    families: Sequence[int] = SOCKET_FAMILIES,
) -> Block:
    """Allow stream, datagram and packet-sequence sockets of these families, TCP or UDP, and netlink for routes only.

    Other protocols of netlink are refused with the errno `no_netlink`, all of them where there is no family of Unix.
    """
    types = [_argument(1), (BPF_AND, 0, 0, SOCK_TYPE_MASK), *_if_any(SOCKET_TYPES, granted), _deny(EPERM)]
    last = len(SOCKET_PROTOCOLS)
    protocols = [
        _argument(2),
        *((BPF_JEQ, last - position, 0, protocol) for position, protocol in enumerate(SOCKET_PROTOCOLS)),
        _deny(EPROTONOSUPPORT),
        *types,
    ]
    routes = [_argument(2), *_if_any((NETLINK_ROUTE,), routes_granted or granted), _deny(no_netlink)]
    if AF_UNIX not in families:
        routes = [_deny(EAFNOSUPPORT)]
    behind = len(families) + 1  # lines from the first family to the protocols: the others, netlink, refusal
    return [
        _argument(0),
        *((BPF_JEQ, behind - position, 0, family) for position, family in enumerate(families)),
        (BPF_JEQ, len(protocols) + 1, 0, AF_NETLINK),
        _deny(EAFNOSUPPORT),
        *protocols,
        *routes,
    ]


def _pair_block(types: Sequence[int] | None) -> Block:
    """Allow pairs of unix sockets, of some types or of all; another family would ask for modules."""
    granted = [_ALLOWED]
    if types is not None:
        granted = [_argument(1), (BPF_AND, 0, 0, SOCK_TYPE_MASK), *_if_any(types, _ALLOWED), _deny(EPERM)]
    return [_argument(0), (BPF_JEQ, 1, 0, AF_UNIX), _deny(EAFNOSUPPORT), *granted]


def _socket_option_block() -> Block:
    """Leave SO_LINGER as it is, and say that it was set: servers set it, and few of them could do without success.

    Attach no filters.
    """
    options = [_argument(2), *_if_any((SO_LINGER,), _NOT_DONE), *_if_any(ATTACH_OPTIONS, _deny(EPERM))]
    return [_argument(1), (BPF_JEQ, 0, len(options), SOL_SOCKET), *options, _ALLOWED]


def answered_calls(
    machine: str, *, one_uid: bool, counted: bool = True, network: bool = False
) -> dict[str, dict[int, str]]:
    """Return the calls of such a filter that have an answerer: numbers and names, by module."""
    names_by_module = {
        "metadata_calls": METADATA if one_uid else (),
        "task_count": (*FORKS, "rt_sigaction") if one_uid and not counted else (),
        "network_calls": NETWORK_CALLS if network else (),
    }
    table = ALLOWED[machine]
    return {
        module: {table[name]: name for name in names if name in table}
        for module, names in names_by_module.items()
        if names
    }


def _ioctl_block(questions: Sequence[int], *, one_uid: bool = False) -> Block:
    """Refuse terminal injection, changes to file systems, and every interface ioctl but for some questions.

    Any socket answers them, a pair's too, about the network of its namespace.
    """
    allowed = (*SOCKET_QUESTIONS, *questions, *((*READ_FLAGS, *CLONE_IOCTLS) if one_uid else FLAG_IOCTLS))
    refused = (FILE_SYSTEM_KIND, *((ATTRIBUTE_KIND, BTRFS_KIND) if one_uid else ()))
    return [
        _argument(1),
        *_if_any(REFUSED_IOCTLS, _deny(EPERM)),
        *_if_any(allowed, _ALLOWED),
        (BPF_JGE, 0, 2, SIOC_FIRST),
        (BPF_JGE, 1, 0, SIOC_LAST + 1),
        _deny(EPERM),
        (BPF_AND, 0, 0, KIND_MASK),
        *_if_any(refused, _deny(EPERM)),
        _ALLOWED,
    ]


# Calls that a container's start makes behind the filter, or that a container may make and a jail may not.
BESIDES = (
    "capget", "capset", "close_range", "execve", "faccessat2", "getdents64", "memfd_create", "newfstatat", "openat2",
)  # fmt: skip
DECIDED_BY_ARGUMENTS = (
    "clone", "clone3", "ioctl", "personality", "setsockopt", "socket", "socketpair", *SELF_ONLY, *SELF_ONLY_OF_KIND,
    *SETS_ATTRIBUTE,
)  # fmt: skip
# The kernel reads a pid from these bits of a register; a pid has at most 22 (PID_MAX_LIMIT).
WORD, ID_BITS = 0xFFFFFFFF, 22
TIOCSTI, TIOCLINUX = 0x5412, 0x541C
# SO_LINGER: see the jail's filter above. Levels have numbers of so many bits, as have the options of
# SOL_SOCKET; a larger one is refused.
LEVEL_BITS, OPTION_BITS, ALL_BITS = 9, 7, (1 << 64) - 1


def profile() -> dict[str, Any]:
    """Return the profile as docker takes it; calls outside of it fail with EPERM."""
    names = {name for table in ALLOWED.values() for name in table} | set(BESIDES)
    plain = sorted(names - set(DECIDED_BY_ARGUMENTS))
    rules = [
        _allow(plain),
        _allow(["clone"], _oci_argument(0, CLONE_NEW_ANY, "SCMP_CMP_MASKED_EQ", 0)),
        {"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": ENOSYS},
        # The first process has the guest's id, and yet to report: as in a jail, no guest may limit it or slow it down.
        # To prlimit64 any thread names its whole process, and modules that were loaded ahead may have left some there.
        _allow(["prlimit64"], _oci_argument(0, WORD, "SCMP_CMP_MASKED_EQ", 0)),
        *(_allow([name for name in SELF_ONLY if name != "prlimit64"], condition) for condition in _any_id_but_1(0)),
        *(
            _allow([name], _oci_argument(0, WORD, "SCMP_CMP_MASKED_EQ", kind), condition)
            for name, process in SELF_ONLY_OF_KIND.items()
            for kind in (process, process + 1)  # of a process, and of a process group; not of a user
            for condition in _any_id_but_1(1)
        ),
        *(_allow(["personality"], _oci_argument(0, value, "SCMP_CMP_EQ")) for value in PERSONALITIES),
        *(
            _allow(
                ["socket"],
                _oci_argument(0, family, "SCMP_CMP_EQ"),
                _oci_argument(1, SOCK_TYPE_MASK, "SCMP_CMP_MASKED_EQ", kind),
                _oci_argument(2, protocol, "SCMP_CMP_EQ"),
            )
            for family in (AF_UNIX, AF_INET, AF_INET6)
            for kind in SOCKET_TYPES
            for protocol in SOCKET_PROTOCOLS
        ),
        _allow(["socket"], _oci_argument(0, AF_NETLINK, "SCMP_CMP_EQ"), _oci_argument(2, NETLINK_ROUTE, "SCMP_CMP_EQ")),
        _allow(["socketpair"], _oci_argument(0, AF_UNIX, "SCMP_CMP_EQ")),
        *(_allow(["setsockopt"], level) for level in _any_but((SOL_SOCKET,), 1, LEVEL_BITS)),
        *(
            _allow(["setsockopt"], _oci_argument(1, SOL_SOCKET, "SCMP_CMP_EQ"), option)
            for option in _any_but((SO_LINGER, *ATTACH_OPTIONS), 2, OPTION_BITS)
        ),
        {
            "names": ["setsockopt"],
            "action": "SCMP_ACT_ERRNO",
            "errnoRet": 0,
            "args": [_oci_argument(1, SOL_SOCKET, "SCMP_CMP_EQ"), _oci_argument(2, SO_LINGER, "SCMP_CMP_EQ")],
        },
        _allow(["ioctl"], _oci_argument(1, TIOCSTI, "SCMP_CMP_NE"), _oci_argument(1, TIOCLINUX, "SCMP_CMP_NE")),
        _allow([*SETS_ATTRIBUTE], _oci_argument(SIZE_OF_ATTRIBUTE, MOST_ATTRIBUTE, "SCMP_CMP_LE")),
        {
            "names": [*SETS_ATTRIBUTE],
            "action": "SCMP_ACT_ERRNO",
            "errnoRet": E2BIG,
            "args": [_oci_argument(SIZE_OF_ATTRIBUTE, MOST_ATTRIBUTE, "SCMP_CMP_GT")],
        },
    ]
    return {
        "defaultAction": "SCMP_ACT_ERRNO",
        "defaultErrnoRet": EPERM,
        "archMap": [
            {"architecture": "SCMP_ARCH_X86_64", "subArchitectures": []},
            {"architecture": "SCMP_ARCH_AARCH64", "subArchitectures": []},
        ],
        "syscalls": rules,
    }


@functools.cache
def profile_text() -> str:
    """Return the profile as JSON, one rule in a line."""
    document = profile()
    rules = ",\n  ".join(json.dumps(rule) for rule in document.pop("syscalls"))
    return f'{json.dumps(document)[:-1]}, "syscalls": [\n  {rules}\n]}}'


def _allow(names: list[str], *arguments: dict[str, Any]) -> dict[str, Any]:
    return {"names": names, "action": "SCMP_ACT_ALLOW", "args": list(arguments)}


def _any_but(values: Sequence[int], index: int, bits: int) -> list[dict[str, Any]]:
    """Return conditions; one of them holds for each number of so many bits except these values.

    "Not equal" would not do: it compares all 64 bits, and the kernel looks at 32.
    """
    conditions, halves = [], [(0, 1 << bits)]
    while halves:
        first, size = halves.pop()
        if not any(first <= value < first + size for value in values):
            conditions.append(_oci_argument(index, ALL_BITS & -size, "SCMP_CMP_MASKED_EQ", first))
        elif size > 1:
            halves += [(first, size // 2), (first + size // 2, size // 2)]
    return conditions


def _any_id_but_1(index: int) -> list[dict[str, Any]]:
    """Return conditions; one of them holds if the kernel takes an argument for the id of another process than 1."""
    is_even = _oci_argument(index, 1, "SCMP_CMP_MASKED_EQ", 0)
    return [is_even, *(_oci_argument(index, 1 << bit, "SCMP_CMP_MASKED_EQ", 1 << bit) for bit in range(1, ID_BITS))]


def _oci_argument(index: int, value: int, comparison: str, value_two: int = 0) -> dict[str, Any]:
    return {"index": index, "value": value, "valueTwo": value_two, "op": comparison}
