"""Capabilities, rlimits, Landlock and limits per user namespace, as system calls.

Capabilities: all are dropped, those of the bounding set too.

Rlimits: the kernel's limits per process, the second line behind control groups, and the first without them.

Landlock: the file system's second restriction, and the first where mounts cannot be made. Rights are granted for trees
below a path; all other accesses that the kernel can handle are refused. Newer kernels add the scopes that keep abstract
sockets and signals inside.

Limits per user namespace (`ucounts` in the kernel): how much of each resource that it counts per user one sandbox may
have. Usage in a user namespace is charged there, and to the owner of the namespace in each one above it. A limit of
`/proc/sys/user` belongs to the namespace of the process that opens the file, so a jail's own first process lowers its
own, while it has its capabilities; a process without capabilities cannot raise them. The limits of a namespace apply to
each id in it separately, and a guest has one.
"""

from __future__ import annotations

import functools
import os
import resource

from ..steps import EINVAL, ENOENT, make, perform_calls
from ..syscalls import (
    AT_FDCWD,
    PR_CAP_AMBIENT,
    PR_CAP_AMBIENT_CLEAR_ALL,
    PR_CAP_AMBIENT_RAISE,
    PR_CAPBSET_DROP,
    PR_SET_NO_NEW_PRIVS,
    call,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ..messages import Run, Spec
    from ..steps import Call, Step

_VERSION_3 = 0x20080522
LAST_CAPABILITY = 63
PR_SET_KEEPCAPS, CAP_DAC_READ_SEARCH = 8, 2


def prctl(option: int, *arguments: int) -> Call:
    """Return a call of prctl with its unused arguments set to 0, as most options demand."""
    return make("prctl", option, *arguments, *(0,) * (4 - len(arguments)))


def drop_all() -> list[Call]:
    """Drop every capability for good; the bounding set needs CAP_SETPCAP, which a namespace's creator has."""
    return [*drop_bounding(), *drop_own()]


def drop_bounding(*, but: int = 0) -> list[Call]:
    """Drop every capability that executing a file could grant, but those of a mask."""
    last, excuse = _last_capability()
    numbers = [number for number in range(last + 1) if not but >> number & 1]
    return [make("prctl", PR_CAPBSET_DROP, number, 0, 0, 0, excuse=excuse) for number in numbers]


def drop_own() -> list[Call]:
    """Drop every capability that the process has, or would hand on."""
    return [prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL), set_capabilities(0)]


# Root inside a sandbox has CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID, SETUID, SETPCAP, NET_BIND_SERVICE.
# That is the default of container runtimes without NET_RAW, SYS_CHROOT, MKNOD, AUDIT_WRITE and SETFCAP.
ROOT_INSIDE = 1 << 0 | 1 << 1 | 1 << 3 | 1 << 4 | 1 << 5 | 1 << 6 | 1 << 7 | 1 << 8 | 1 << 10


def keep_own(mask: int) -> list[Call]:
    """Keep some capabilities; executed programs have them only as root."""
    return [prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL), set_capabilities(mask)]


def keep_all(switch: list[Call]) -> list[Call]:
    """Switch from root to another id, and keep all capabilities."""
    last, _ = _last_capability()
    return [prctl(PR_SET_KEEPCAPS, 1), *switch, set_capabilities((1 << last + 1) - 1), prctl(PR_SET_KEEPCAPS, 0)]


@functools.cache
def _last_capability() -> tuple[int, tuple[int, ...]]:
    """Return the last capability of this kernel; if it does not report one, the last possible, and excused errors."""
    try:
        with open("/proc/sys/kernel/cap_last_cap", encoding="ascii") as file:
            return int(file.read()), ()
    except (OSError, ValueError):
        return LAST_CAPABILITY, (EINVAL,)


def set_capabilities(mask: int, *, inheritable: int = 0) -> Call:
    """Set the effective and permitted sets to `mask`."""
    low, high = mask & 0xFFFFFFFF, mask >> 32
    inherit_low, inherit_high = inheritable & 0xFFFFFFFF, inheritable >> 32
    header = _VERSION_3.to_bytes(4, "little") + (0).to_bytes(4, "little")
    fields = (low, low, inherit_low, high, high, inherit_high)
    return make("capset", header, b"".join(field.to_bytes(4, "little") for field in fields))


def forbid_new_privileges() -> Call:
    """Make set-user-id programs and file capabilities powerless from here on."""
    return prctl(PR_SET_NO_NEW_PRIVS, 1)


def keep_read_search(switch: list[Call]) -> list[Call]:
    """Switch to an ordinary id but keep the right to read root's files; Landlock then limits the trees.

    The one use is an interpreter below a private home where no mount can show it (level confined, as root).
    """
    mask = 1 << CAP_DAC_READ_SEARCH
    return [
        prctl(PR_SET_KEEPCAPS, 1),
        *switch,
        set_capabilities(mask, inheritable=mask),
        prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, CAP_DAC_READ_SEARCH),
    ]


# The kernel's numbers, the same on every machine Cloche runs on.
NUMBERS = {
    "fsize": 1,
    "data": 2,
    "core": 4,
    "nproc": 6,
    "nofile": 7,
    "memlock": 8,
    "sigpending": 11,
    "msgqueue": 12,
    "nice": 13,
    "rtprio": 14,
}


def set_limits(limits: Iterable[tuple[str, int]]) -> list[Call]:
    """Set each soft and hard limit, never above those of this process, which the helper inherits."""
    calls = []
    for name, amount in limits:
        _, hard = resource.getrlimit(NUMBERS[name])
        granted = amount if hard == resource.RLIM_INFINITY else min(amount, hard)
        calls.append(make("prlimit64", 0, NUMBERS[name], granted.to_bytes(8, "little") * 2, None))
    return calls


def raise_limit(name: str) -> list[Call]:
    """Raise a soft limit to the hard one."""
    _, hard = resource.getrlimit(NUMBERS[name])
    return [make("prlimit64", 0, NUMBERS[name], hard.to_bytes(8, "little", signed=hard < 0) * 2, None)]


EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
MAKE_CHAR, MAKE_BLOCK, IOCTL_DEV = 1 << 6, 1 << 11, 1 << 15
READ = EXECUTE | READ_FILE | READ_DIR
# How many rights each version of the interface handles (bits counted from 0).
_RIGHTS_BY_ABI = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
_FILE_RIGHTS = EXECUTE | WRITE_FILE | READ_FILE | 1 << 14 | IOCTL_DEV
SCOPE_ABSTRACT_UNIX_SOCKET, SCOPE_SIGNAL = 1, 2
SCOPED_SINCE = 6  # the version that has these
LENGTHS_SINCE, IOCTLS_SINCE = 3, 5  # those that ask for a right to shorten files, and to use ioctls of devices
CREATE_RULESET_VERSION = 1
RULE_PATH_BENEATH = 1


def abi() -> int:
    """Return the kernel's Landlock version, 0 for a kernel without it."""
    try:
        return call("landlock_create_ruleset", 0, 0, CREATE_RULESET_VERSION)
    except OSError:
        return 0


def all_rights(version: int) -> int:
    """Return every right that `version` can handle, as far as this table knows: rights younger than it stay open."""
    return (1 << _RIGHTS_BY_ABI[min(version, 5)]) - 1


def restrict(rules: Iterable[tuple[str, str]]) -> None:
    """Refuse this process every file access outside `rules`: pairs of path and `read`, `write` or `device`."""
    perform_calls(restriction(rules, abi()))


def opened_ahead(
    rules: Iterable[tuple[str, str]], *, has_all: bool = False, but: tuple[str, ...] = ()
) -> tuple[list[Call], dict[str, str]]:
    """Return the calls that open paths which all guests share, and their registers by path: for many restrictions.

    Where all guests have the same mounts, `has_all` includes writable ones, except for paths that begin with `but`.
    """
    shared = (path for path, kind in rules if (has_all or kind != "write") and not path.startswith(but))
    registers = {path: f"rule {path}" for path in shared}
    return [_opening(path, register) for path, register in registers.items()], registers


def open_rules(spec: Spec, run: Run, *, but: tuple[str, ...]) -> tuple[list[Step], dict[str, str]]:
    """Return the step that does so where one guest follows the other, none elsewhere, and the registers."""
    if not spec.is_ahead:
        return [], {}
    calls, registers = opened_ahead([*(spec.landlock or ()), *run.readable], has_all=True, but=but)
    return [("open_rules", "open what all guests may use, for their Landlock rules", calls)], registers


def restriction(
    rules: Iterable[tuple[str, str]],
    version: int,
    opened: Mapping[str, str] | None = None,
    *,
    is_scoped: bool = True,
) -> list[Call]:
    """Return the calls of `restrict` for a kernel of `version`; `opened` names the registers of paths that are open.

    One that `is_scoped` keeps signals and abstract sockets to itself, which the processes of one sandbox shall share.
    """
    handled = all_rights(version)
    rights = {
        "read": READ,
        "write": handled & ~(MAKE_CHAR | MAKE_BLOCK | IOCTL_DEV),
        "device": (READ_FILE | WRITE_FILE | IOCTL_DEV) & handled,
    }
    scoped = SCOPE_ABSTRACT_UNIX_SOCKET | SCOPE_SIGNAL if version >= SCOPED_SINCE and is_scoped else 0
    attr = b"".join(n.to_bytes(8, "little") for n in (handled, 0, scoped))
    size = 24 if version >= SCOPED_SINCE else 16 if version >= 4 else 8
    return [
        make("landlock_create_ruleset", attr, size, 0, keep="ruleset"),
        *(call for path, kind in rules for call in _allowing(path, kind, rights[kind], (opened or {}).get(path, ""))),
        make("landlock_restrict_self", "ruleset", 0),
        make("close", "ruleset"),
    ]


def _allowing(path: str, kind: str, rights: int, register: str) -> list[Call]:
    """Add one rule; a path that does not exist needs none. A writable path is always a folder.

    So is a path in the sandbox's own folder that the helper has yet to make.
    """
    is_folder = os.path.isdir(path) or not os.path.exists(os.path.dirname(path))
    if kind != "write" and not is_folder:
        rights &= _FILE_RIGHTS
    named = (rights.to_bytes(8, "little"), register or "allowed")
    adding = make("landlock_add_rule", "ruleset", RULE_PATH_BENEATH, named, 0)
    return [adding] if register else [_opening(path, "allowed"), adding, make("close", "allowed")]


def _opening(path: str, register: str) -> Call:
    return make("openat", AT_FDCWD, os.fsencode(path), os.O_PATH | os.O_CLOEXEC, keep=register, excuse=(ENOENT,))


FOLDER = "/proc/sys/user"
# A guest gets at most this share of the limit of a user of the host: guests of an ordinary user share one limit.
PART = 8
INOTIFY_INSTANCES, INOTIFY_WATCHES = 16, 8192
# Seccomp refuses the calls that make these; here they are refused once more.
NEVER = ("fanotify_groups", "fanotify_marks", "cgroup_namespaces", "time_namespaces")
# The first steps of a clone of a live session, besides mounts.
NESTED = ("user_namespaces", "pid_namespaces", "net_namespaces", "ipc_namespaces", "uts_namespaces")
MOST_NESTED = 1024


def amounts(*, is_forkable: bool, is_prefork: bool = False) -> dict[str, int]:
    """Return how much of each a sandbox may have, by the kernel's names."""
    # Each guest of a prefork jail has a mount namespace of its own, made before it gives its capabilities up.
    mounts = MOST_NESTED if is_forkable or is_prefork else 0
    return {
        **dict.fromkeys(NEVER, 0),
        **dict.fromkeys(NESTED, MOST_NESTED if is_forkable else 0),
        "mnt_namespaces": mounts,
        "inotify_instances": min(INOTIFY_INSTANCES, _share("inotify_instances")),
        "inotify_watches": min(INOTIFY_WATCHES, _share("inotify_watches")),
    }


def opening(limits: Mapping[str, int]) -> list[Call]:
    """Open the files of the limits while the host's /proc is mounted; limits unknown to the kernel are skipped."""
    flags = os.O_WRONLY | os.O_CLOEXEC
    return [
        make("openat", AT_FDCWD, os.fsencode(f"{FOLDER}/max_{name}"), flags, 0, keep=f"max {name}", excuse=(ENOENT,))
        for name in limits
    ]


def set_ucounts(limits: Mapping[str, int]) -> list[Call]:
    """Write the limits. A mount that is held while it is attached nowhere counts as a mount namespace, too."""
    calls = []
    for name, amount in limits.items():
        calls += [make("write", f"max {name}", str(amount).encode()), make("close", f"max {name}")]
    return calls


@functools.cache
def _share(name: str) -> int:
    """Return one guest's share of the limit of the caller's user."""
    try:
        with open(f"{FOLDER}/max_{name}", encoding="ascii") as file:
            return max(1, int(file.read()) // PART)
    except (OSError, ValueError):
        return max(INOTIFY_INSTANCES, INOTIFY_WATCHES)
