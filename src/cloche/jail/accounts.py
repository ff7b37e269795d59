"""The accounts of a sandbox, read from its own /etc, which guests may be able to write: nothing in it is trusted.

A process that takes an account's identity looks the account up itself, before it gives up its rights; pid 1 never reads
these files.
"""

from __future__ import annotations

import posix

MOST_BYTES = 1 << 20
MOST_GROUPS = 64
EINVAL, ENOENT = 22, 2
_REGULAR, _KIND = 0o100000, 0o170000
_FLAGS = posix.O_RDONLY | posix.O_CLOEXEC | posix.O_NONBLOCK | posix.O_NOCTTY


class Account:
    """Hold the /etc entries of a user."""

    def __init__(self, name: str, uid: int, gid: int, groups: list[int], home: str, shell: str):
        self.name, self.uid, self.gid, self.groups, self.home, self.shell = name, uid, gid, groups, home, shell


def find(name_or_uid: object) -> Account:
    """Return the account of a name, or of a uid as text or number. Raises OSError if it does not exist."""
    text = str(name_or_uid)
    for row in _rows("/etc/passwd", 7):
        if text in (row[0], row[2]):
            name, _, uid, gid, _, home, shell = row
            number = int(gid)
            more = [int(line[2]) for line in _rows("/etc/group", 4) if name in line[3].split(",")]
            groups = [number, *(group for group in more if group != number)]
            return Account(name, int(uid), number, groups[:MOST_GROUPS], home or "/", shell or "/bin/sh")
    raise OSError(ENOENT, f"there is no user {text!r} in /etc/passwd")


def _rows(path: str, fields: int) -> list[list[str]]:
    """Return the well-formed lines of such a file, with valid numbers. Raises OSError."""
    fd = posix.open(path, _FLAGS)
    try:
        if posix.fstat(fd).st_mode & _KIND != _REGULAR:
            raise OSError(EINVAL, f"{path} is not a regular file")
        data = posix.read(fd, MOST_BYTES)
    finally:
        posix.close(fd)
    rows = [line.split(":") for line in data.decode("utf-8", "replace").split("\n")]
    numbers = (2, 3) if fields == 7 else (2,)
    return [row for row in rows if len(row) == fields and all(_is_id(row[column]) for column in numbers)]


def _is_id(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 9
