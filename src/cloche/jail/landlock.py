"""Landlock: the file system's second wall, and the first where mounts cannot be made.

Rights are given for trees below a path; everything else that the kernel knows to handle is refused. Newer kernels
add the scopes that keep abstract sockets and signals inside.
"""

from __future__ import annotations

import os

from .calls import ENOENT, make, perform_calls
from .syscalls import AT_FDCWD, call

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from .calls import Call

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
MAKE_CHAR, MAKE_BLOCK, IOCTL_DEV = 1 << 6, 1 << 11, 1 << 15
READ = EXECUTE | READ_FILE | READ_DIR
# How many rights each version of the interface handles (bits counted from 0).
_RIGHTS_BY_ABI = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
_FILE_RIGHTS = EXECUTE | WRITE_FILE | READ_FILE | 1 << 14 | IOCTL_DEV
SCOPE_ABSTRACT_UNIX_SOCKET, SCOPE_SIGNAL = 1, 2
CREATE_RULESET_VERSION = 1
RULE_PATH_BENEATH = 1


def abi() -> int:
    """Return the kernel's Landlock version, 0 where it has none."""
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


def opened_ahead(rules: Iterable[tuple[str, str]]) -> tuple[list[Call], dict[str, str]]:
    """Return the calls that open what no guest has for itself, and their registers by path: for many restrictions."""
    registers = {path: f"rule {path}" for path, kind in rules if kind != "write"}
    return [_opening(path, register) for path, register in registers.items()], registers


def restriction(rules: Iterable[tuple[str, str]], version: int, opened: Mapping[str, str] | None = None) -> list[Call]:
    """Return the calls of `restrict` for a kernel of `version`; `opened` names the registers of paths that are open."""
    handled = all_rights(version)
    rights = {
        "read": READ,
        "write": handled & ~(MAKE_CHAR | MAKE_BLOCK | IOCTL_DEV),
        "device": (READ_FILE | WRITE_FILE | IOCTL_DEV) & handled,
    }
    scoped = SCOPE_ABSTRACT_UNIX_SOCKET | SCOPE_SIGNAL if version >= 6 else 0
    attr = b"".join(n.to_bytes(8, "little") for n in (handled, 0, scoped))
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    return [
        make("landlock_create_ruleset", attr, size, 0, keep="ruleset"),
        *(one for path, kind in rules for one in _allowing(path, kind, rights[kind], (opened or {}).get(path, ""))),
        make("landlock_restrict_self", "ruleset", 0),
        make("close", "ruleset"),
    ]


def _allowing(path: str, kind: str, rights: int, register: str) -> list[Call]:
    """Add one rule; a path that does not exist needs none. What can be written to is always a folder."""
    if kind != "write" and not os.path.isdir(path):
        rights &= _FILE_RIGHTS
    named = (rights.to_bytes(8, "little"), register or "allowed")
    adding = make("landlock_add_rule", "ruleset", RULE_PATH_BENEATH, named, 0)
    return [adding] if register else [_opening(path, "allowed"), adding, make("close", "allowed")]


def _opening(path: str, register: str) -> Call:
    return make("openat", AT_FDCWD, os.fsencode(path), os.O_PATH | os.O_CLOEXEC, keep=register, excuse=(ENOENT,))
