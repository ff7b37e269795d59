"""The system call profile that containers get: the jail's table, in the words of docker's profiles.

`docker/seccomp.json` is the same text, for whoever calls docker by hand; a test keeps the two equal.
"""

from __future__ import annotations

import functools
import json
from typing import Any

from cloche.jail.seccomp import SELF_ONLY, SELF_ONLY_OF_KIND, SO_LINGER, SOL_SOCKET
from cloche.jail.syscall_table import ALLOWED

EPERM, ENOSYS = 1, 38
CLONE_NEW_ANY = 0x7E020080
AF_UNIX, AF_INET, AF_INET6, AF_NETLINK, NETLINK_ROUTE = 1, 2, 10, 16, 0
# Streams, datagrams, packets in sequence; TCP and UDP. Any other makes the host load a module.
SOCK_TYPE_MASK, SOCKET_TYPES, SOCKET_PROTOCOLS = 0xF, (1, 2, 5), (0, 6, 17)
# What the container's own start needs behind the filter, or what a container may do where a jail may not.
BESIDES = (
    "capget", "capset", "close_range", "execve", "faccessat2", "getdents64", "memfd_create", "newfstatat", "openat2",
)  # fmt: skip
DECIDED_BY_ARGUMENTS = (
    "clone", "clone3", "ioctl", "personality", "setsockopt", "socket", "socketpair", *SELF_ONLY, *SELF_ONLY_OF_KIND,
)  # fmt: skip
PERSONALITIES = (0, 8, 0x20000, 0x20008, 0xFFFFFFFF)
WORD, ID_BITS = 0xFFFFFFFF, 22  # of a register, what the kernel takes a process id from, and where an id may have bits
TIOCSTI, TIOCLINUX = 0x5412, 0x541C
# Why SO_LINGER is left as it is, says the jail's filter. Levels have numbers of so many bits, as have the options of
# SOL_SOCKET; a larger one is refused.
LEVEL_BITS, OPTION_BITS, ALL_BITS = 9, 7, (1 << 64) - 1


def profile() -> dict[str, Any]:
    """Return the profile as docker takes it; what it does not name is refused with EPERM."""
    names = {name for table in ALLOWED.values() for name in table} | set(BESIDES)
    plain = sorted(names - set(DECIDED_BY_ARGUMENTS))
    rules = [
        _allow(plain),
        _allow(["clone"], _argument(0, CLONE_NEW_ANY, "SCMP_CMP_MASKED_EQ", 0)),
        {"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": ENOSYS},
        # The first process has the guest's id, and yet to report: as in a jail, nobody limits it or slows it down.
        # To prlimit64 any thread names its whole process, and modules that were loaded ahead may have left some there.
        _allow(["prlimit64"], _argument(0, WORD, "SCMP_CMP_MASKED_EQ", 0)),
        *(_allow([name for name in SELF_ONLY if name != "prlimit64"], other) for other in _any_id_but_1(0)),
        *(
            _allow([name], _argument(0, WORD, "SCMP_CMP_MASKED_EQ", kind), other)
            for name, process in SELF_ONLY_OF_KIND.items()
            for kind in (process, process + 1)  # of a process, and of a process group; not of a user
            for other in _any_id_but_1(1)
        ),
        *(_allow(["personality"], _argument(0, value, "SCMP_CMP_EQ")) for value in PERSONALITIES),
        *(
            _allow(
                ["socket"],
                _argument(0, family, "SCMP_CMP_EQ"),
                _argument(1, SOCK_TYPE_MASK, "SCMP_CMP_MASKED_EQ", kind),
                _argument(2, protocol, "SCMP_CMP_EQ"),
            )
            for family in (AF_UNIX, AF_INET, AF_INET6)
            for kind in SOCKET_TYPES
            for protocol in SOCKET_PROTOCOLS
        ),
        _allow(["socket"], _argument(0, AF_NETLINK, "SCMP_CMP_EQ"), _argument(2, NETLINK_ROUTE, "SCMP_CMP_EQ")),
        _allow(["socketpair"], _argument(0, AF_UNIX, "SCMP_CMP_EQ")),
        *(_allow(["setsockopt"], level) for level in _any_but(SOL_SOCKET, 1, LEVEL_BITS)),
        *(
            _allow(["setsockopt"], _argument(1, SOL_SOCKET, "SCMP_CMP_EQ"), option)
            for option in _any_but(SO_LINGER, 2, OPTION_BITS)
        ),
        {
            "names": ["setsockopt"],
            "action": "SCMP_ACT_ERRNO",
            "errnoRet": 0,
            "args": [_argument(1, SOL_SOCKET, "SCMP_CMP_EQ"), _argument(2, SO_LINGER, "SCMP_CMP_EQ")],
        },
        _allow(["ioctl"], _argument(1, TIOCSTI, "SCMP_CMP_NE"), _argument(1, TIOCLINUX, "SCMP_CMP_NE")),
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
    found = profile()
    rules = ",\n  ".join(json.dumps(rule) for rule in found.pop("syscalls"))
    return f'{json.dumps(found)[:-1]}, "syscalls": [\n  {rules}\n]}}'


def _allow(names: list[str], *arguments: dict[str, Any]) -> dict[str, Any]:
    return {"names": names, "action": "SCMP_ACT_ALLOW", "args": list(arguments)}


def _any_but(value: int, index: int, bits: int) -> list[dict[str, Any]]:
    """Return conditions of which one holds where an argument is another number of so many bits.

    To ask for what is not equal would not do: all 64 bits are compared, and the kernel looks at 32.
    """
    masks = [(bit, ALL_BITS >> bit << bit) for bit in range(bits)]
    return [_argument(index, mask, "SCMP_CMP_MASKED_EQ", value & mask ^ 1 << bit) for bit, mask in masks]


def _any_id_but_1(index: int) -> list[dict[str, Any]]:
    """Return conditions of which one holds where the kernel takes an argument for the id of another than process 1."""
    is_even = _argument(index, 1, "SCMP_CMP_MASKED_EQ", 0)
    return [is_even, *(_argument(index, 1 << bit, "SCMP_CMP_MASKED_EQ", 1 << bit) for bit in range(1, ID_BITS))]


def _argument(index: int, value: int, comparison: str, value_two: int = 0) -> dict[str, Any]:
    return {"index": index, "value": value, "valueTwo": value_two, "op": comparison}
