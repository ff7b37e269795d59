"""The system call filter: one table of what is allowed, assembled into classic BPF.

An allowlist in the spirit of the common container profile, minus everything a guest could use to build namespaces,
mount, trace, load code into the kernel, or reach another process's memory. What is not in the table answers EPERM;
what is newer than the table answers ENOSYS, so that a C library falls back instead of failing. What nobody calls by
chance is refused by the reaper, which counts it (see `notify`).

Theory of operation: numbers are sorted and merged into ranges, and a binary tree of comparisons finds the range of
a call in about eight steps. There is its answer, or a short block that looks at an argument. Only values in registers
are compared: what a pointer points to can change after the filter looked. The kernel tries a filter with every number
when it is installed, once for each run, so long ways through it would cost all programs time.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

from .syscall_table import ALLOWED, LAST_KNOWN, REPORTED
from .syscalls import FAREWELL, FORK_FLAGS, LASTING

BPF_LD_W_ABS, BPF_JEQ, BPF_JGE, BPF_JSET, BPF_AND, BPF_RET = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
KILL, ALLOW, ASK = 0x80000000, 0x7FFF0000, 0x7FC00000
EPERM, ENOSYS, EPROTONOSUPPORT, EAFNOSUPPORT = 1, 38, 93, 97
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32_BIT = 0x40000000
NR_OFFSET, ARCH_OFFSET = 0, 4

CLONE_NEW_ANY = 0x7E020080  # user, pid, net, ipc, uts, cgroup, mount, and time namespaces
SOCKET_FAMILIES = (1, 2, 10)  # unix, inet, inet6
AF_UNIX = 1
AF_NETLINK, NETLINK_ROUTE = 16, 0
SOCKET_PROTOCOLS = (0, 6, 17)  # the family's own, TCP, UDP; asking for another makes the host's kernel load its module
SOCKET_TYPES, SOCK_TYPE_MASK = (1, 2, 5), 0xF  # stream, dgram, seqpacket; the mask drops SOCK_CLOEXEC and its kind
# What reaches beyond the tree where no namespace stands behind the filter: System V IPC and message queues …
SHARED_WITHOUT_NAMESPACES = (
    "shmget", "shmat", "shmctl", "semget", "semop", "semctl", "semtimedop", "msgget", "msgsnd", "msgrcv", "msgctl",
    "mq_open", "mq_unlink",
    "inotify_init", "inotify_init1", "inotify_add_watch",  # … tells the names in folders that Landlock closes …
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
# What goes around the limits where no control group keeps them: segments that no process has attached are in no
# process's memory, and a process may leave the processors it was put on.
UNCOUNTED = ("shmget", "sched_setaffinity")
# TIOCSTI and TIOCLINUX type into a terminal, TIOCCONS and TIOCSETD redirect it.
REFUSED_IOCTLS = (0x5412, 0x541C, 0x541D, 0x5423)
# What file systems have in common is numbered by one letter. Some of it is done to the file system or to its user
# through any file that can be read: with FS_IOC_REMOVE_ENCRYPTION_KEY a guest could lock the caller's home. So of all
# that only flags may be read and set.
FILE_SYSTEM_KIND, KIND_MASK = 0x6600, 0xFF00
FLAG_IOCTLS = (0x80086601, 0x40086602)
# Interface ioctls are refused as a range, but for those that only ask.
SIOC_FIRST, SIOC_LAST = 0x8900, 0x89FF
SIOC_QUESTIONS = (0x8904, 0x8905, 0x8910, 0x8912, 0x8913, 0x8915, 0x8919, 0x891B, 0x891D, 0x8921, 0x8927, 0x8933)
PERSONALITIES = (0x0, 0x8, 0x20000, 0x20008, 0xFFFFFFFF)
# fcntl: locks of three kinds ask first (see `notify`). Leases, directory notices and delegations are refused, and so
# are hints on how long data lives: the kernel keeps them in the inode, for who owns it, through read-only mounts too.
LOCK_COMMANDS, REFUSED_COMMANDS = (5, 6, 7, 36, 37, 38), (1024, 1026, 1036, 1038, 1040)
# PR_SET_SECCOMP; PR_SET_MM, which rewrites what /proc says of a process; PR_SCHED_CORE, which takes a whole core.
PRCTL_REFUSED = (22, 35, 62)
# What could wake a stopped process: a signal that the kernel sends in its own name, later. A live session that was
# cloned is kept standing by SIGSTOP, so it must have no way to have itself sent SIGCONT.
SIGCONT, EXIT_SIGNAL_MASK, PR_SET_PDEATHSIG, F_SETSIG = 18, 0xFF, 1, 10
LATE_SIGNALS = ("timer_create", "mq_notify")
# From here on the options of IPv4 sockets belong to packet filters; of IPv6, these two do.
SOL_IP, SOL_IPV6, FIRST_FILTER_OPTION, FILTER_OPTIONS = 0, 41, 64, (64, 65)
# Whoever closes a socket last waits as long as this option says, and that need not be the guest: a socket on its way
# over another one is closed by who receives it without room or, on older kernels, by whoever collects what nobody will.
SOL_SOCKET, SO_LINGER = 1, 13

Instruction = tuple[int, int, int, int]
Block = list[Instruction]


def errno_action(code: int) -> int:
    """Return the filter's answer that makes a call fail with errno `code`."""
    return 0x00050000 | code


def build_filter(
    machine: str, *, confined: bool, counted: bool = True, nursed: bool = False, forkable: bool = False
) -> bytes:
    """Return the BPF program for `machine`, as the kernel takes it.

    `confined` is for where no namespaces stand behind the filter: then no socket can be created at all, except
    connected pairs, and nothing that other processes share. `counted` says that a control group keeps the limits.
    `nursed` is for a jail whose namespaces of network and IPC may be used again: its reaper is told of every socket and
    every object that could leave a trace there, and of an end by which a guest says farewell. `forkable` is for a
    session: a clone into new namespaces, by one exact word of flags, asks too. Raises KeyError for a machine without a
    table.
    """
    arch = AUDIT_ARCH[machine]
    names = ALLOWED[machine]
    special = _special_blocks(confined=confined, nursed=nursed) | (
        {} if counted else {name: [_deny(EPERM)] for name in UNCOUNTED}
    )
    if forkable:
        special |= _forkable_blocks(special)
    blocks = {number: special.get(name, [_ALLOWED]) for name, number in names.items()}
    blocks |= {number: [_ASKED] for number in REPORTED[machine]}
    head = [
        (BPF_LD_W_ABS, 0, 0, ARCH_OFFSET),
        (BPF_JEQ, 1, 0, arch),
        (BPF_RET, 0, 0, KILL),
        (BPF_LD_W_ABS, 0, 0, NR_OFFSET),
    ]
    if machine == "x86_64":
        head += [(BPF_JGE, 0, 1, X32_BIT), (BPF_RET, 0, 0, KILL)]
    ranges = _ranges(blocks, LAST_KNOWN[machine])
    return b"".join(struct.pack("<HBBI", *line) for line in [*head, *_tree(ranges)])


def _ranges(blocks: Mapping[int, Block], last: int) -> list[tuple[int, Block]]:
    """Return pairs that cover every number from 0 up: the first number, and the lines that answer."""
    ranges: list[tuple[int, Block]] = []
    for number in range(last + 1):
        block = blocks.get(number, [_deny(EPERM)])
        if not ranges or ranges[-1][1] != block:
            ranges.append((number, block))
    return [*ranges, (last + 1, [_deny(ENOSYS)])]


def _tree(ranges: Sequence[tuple[int, Block]]) -> Block:
    """Return comparisons that end in the lines of the range the loaded number falls into."""
    if len(ranges) == 1:
        return ranges[0][1]
    middle = len(ranges) // 2
    low, high = _tree(ranges[:middle]), _tree(ranges[middle:])
    if len(low) > 255:  # a jump reaches 255 lines; farther ones go through an unconditional jump
        return [(BPF_JGE, 0, 1, ranges[middle][0]), (0x05, 0, 0, len(low)), *low, *high]
    return [(BPF_JGE, len(low), 0, ranges[middle][0]), *low, *high]


def _special_blocks(*, confined: bool, nursed: bool) -> dict[str, Block]:
    """Return the calls whose answer depends on an argument, each with the lines that decide it."""
    blocks = {
        **({name: [_ASKED] for name in LASTING} if nursed else {}),
        **({"exit_group": [_upper_half(0), *_if_any((FAREWELL,), _ASKED), _ALLOWED]} if nursed else {}),
        "clone": [_argument(0), (BPF_JSET, 0, 1, CLONE_NEW_ANY), _ASKED, _ALLOWED],
        "clone3": [_deny(ENOSYS)],
        "memfd_create": [_deny(ENOSYS)],
        "socket": _socket_block(_ASKED if nursed else _ALLOWED),
        "socketpair": [_argument(0), *_if_any((AF_UNIX,), _ALLOWED), _deny(EAFNOSUPPORT)],  # another asks for modules
        "flock": [_ASKED],
        "fcntl": [
            _argument(1),
            *_if_any(LOCK_COMMANDS, _ASKED),
            *_if_any(REFUSED_COMMANDS, _deny(EPERM)),
            _ALLOWED,
        ],
        "ioctl": _ioctl_block(),
        "personality": [_argument(0), *_if_any(PERSONALITIES, _ALLOWED), _deny(EPERM)],
        "prctl": [_argument(0), *_if_any(PRCTL_REFUSED, _deny(EPERM)), _ALLOWED],
        "setsockopt": _socket_option_block(),
    }
    if confined:
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


def _forkable_blocks(special: Mapping[str, list[Instruction]]) -> dict[str, Block]:
    """Return what is different in a session that may be cloned.

    A clone has the capabilities of its own namespaces until it gives them up, and is looked at only then: so what
    they would open in the kernel is closed here, or asked for.
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
    """Allow a call whose first argument says what the second one names, for the caller alone."""
    whoever = [_argument(1), *_if_any((0,), _ALLOWED), _deny(EPERM)]
    return [_argument(0), (BPF_JEQ, 1, 0, kind), _deny(EPERM), *whoever]


def _socket_block(granted: Instruction, routes_granted: Instruction | None = None) -> Block:
    """Allow stream, datagram and packet-sequence sockets of three families, TCP or UDP, and netlink for routes only."""
    types = [_argument(1), (BPF_AND, 0, 0, SOCK_TYPE_MASK), *_if_any(SOCKET_TYPES, granted), _deny(EPERM)]
    last = len(SOCKET_PROTOCOLS)
    protocols = [
        _argument(2),
        *((BPF_JEQ, last - at, 0, protocol) for at, protocol in enumerate(SOCKET_PROTOCOLS)),
        _deny(EPROTONOSUPPORT),
        *types,
    ]
    routes = [_argument(2), *_if_any((NETLINK_ROUTE,), routes_granted or granted), _deny(EPERM)]
    behind = len(SOCKET_FAMILIES) + 1  # lines from the first family to the protocols: the others, netlink, refusal
    return [
        _argument(0),
        *((BPF_JEQ, behind - at, 0, family) for at, family in enumerate(SOCKET_FAMILIES)),
        (BPF_JEQ, len(protocols) + 1, 0, AF_NETLINK),
        _deny(EAFNOSUPPORT),
        *protocols,
        *routes,
    ]


def _socket_option_block() -> Block:
    """Leave SO_LINGER as it is, and say that it was set: servers set it, and few of them could do without success."""
    return [
        _argument(1),
        (BPF_JEQ, 0, 3, SOL_SOCKET),
        _argument(2),
        *_if_any((SO_LINGER,), _NOT_DONE),
        _ALLOWED,
    ]


def _ioctl_block() -> Block:
    """Refuse terminal injection, what is done to file systems, and every interface ioctl that is not a question."""
    return [
        _argument(1),
        *_if_any(REFUSED_IOCTLS, _deny(EPERM)),
        *_if_any((*SIOC_QUESTIONS, *FLAG_IOCTLS), _ALLOWED),
        (BPF_JGE, 0, 2, SIOC_FIRST),
        (BPF_JGE, 1, 0, SIOC_LAST + 1),
        _deny(EPERM),
        (BPF_AND, 0, 0, KIND_MASK),
        *_if_any((FILE_SYSTEM_KIND,), _deny(EPERM)),
        _ALLOWED,
    ]
