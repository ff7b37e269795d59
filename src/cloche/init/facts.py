"""Facts of files: type, mode, owner and metadata, as operations on files show and set them.

Names come from the sandbox's own /etc, which guests may be able to write: they are shown, and never a reason to trust.
Metadata are extended attributes below `PREFIX` (xattr(7)), which most file systems have, and tmpfs since Linux 6.6.
"""

from __future__ import annotations

import errno
import os
import stat

from .content import Refusal
from .names import pack_path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

PREFIX = "user.e2b."  # the name that E2B gives them
TYPES = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "link"}
MOST_ACCOUNT_BYTES = 1 << 20
MOST_METADATA_BYTES = 4096  # of one file: names with the prefix, and values
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS)
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY


class Accounts:
    """Look up names, ids and home folders. Each file is read once, when it is first needed."""

    def __init__(self) -> None:
        self._rows: dict[str, list[list[str]]] = {}

    def owner(self, uid: int) -> str:
        """Return the name of a user, or the number as text."""
        return self._name("/etc/passwd", uid)

    def group(self, gid: int) -> str:
        """Return the name of a group, or the number as text."""
        return self._name("/etc/group", gid)

    def find(self, name_or_uid: str | int) -> tuple[int, int, str]:
        """Return uid, gid and home of a user. Raises Refusal."""
        text = str(name_or_uid)
        for row in self._read("/etc/passwd"):
            if len(row) == 7 and text in (row[0], row[2]) and row[2].isdigit() and row[3].isdigit():
                return int(row[2]), int(row[3]), row[5] or "/"
        raise Refusal("user", f"there is no user {text!r} in /etc/passwd", "")

    def home(self, name: str | None) -> str:
        """Return the home folder of a user, by default of this process's. Raises Refusal for a name without account."""
        if name is not None:
            return self.find(name)[2]
        try:
            return self.find(os.geteuid())[2]
        except Refusal:
            return os.environ.get("HOME", "/")

    def _name(self, path: str, number: int) -> str:
        text = str(number)
        return next((row[0] for row in self._read(path) if len(row) > 3 and row[2] == text), text)

    def _read(self, path: str) -> list[list[str]]:
        rows = self._rows.get(path)
        if rows is None:
            rows = self._rows[path] = [line.split(":") for line in text_of(path).split("\n")]
        return rows


def text_of(path: str) -> str:
    """Return the beginning of a regular file; empty where there is none."""
    try:
        fd = os.open(path, _FLAGS)
    except OSError:
        return ""
    try:
        is_regular = stat.S_ISREG(os.fstat(fd).st_mode)
        return os.read(fd, MOST_ACCOUNT_BYTES).decode("utf-8", "replace") if is_regular else ""
    except OSError:
        return ""
    finally:
        os.close(fd)


def metadata_of(file: str | int) -> dict[str, str]:
    """Return the metadata of a file, or of a link's target: those that are UTF-8, up to MOST_METADATA_BYTES."""
    metadata: dict[str, str] = {}
    try:
        names = [name for name in os.listxattr(file) if name.startswith(PREFIX)]
    except OSError:
        return metadata
    left = MOST_METADATA_BYTES
    for name in sorted(names):
        try:
            value = os.getxattr(file, name)
            left -= len(os.fsencode(name)) + len(value)
            if left >= 0:
                name.encode()
                metadata[name.removeprefix(PREFIX)] = value.decode()
        except (OSError, UnicodeError):
            continue  # it has gone, or is no text
    return metadata


def set_metadata(fd: int, metadata: Mapping[str, str]) -> None:
    """Replace the metadata of an open file. Raises Refusal where its file system has none."""
    try:
        for name in os.listxattr(fd):
            if name.startswith(PREFIX) and name.removeprefix(PREFIX) not in metadata:
                os.removexattr(fd, name)
        for key, value in metadata.items():
            os.setxattr(fd, PREFIX + key, value.encode())
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        if metadata:
            raise Refusal("unsupported", "the file system of this folder keeps no metadata", "") from error


def row_of(path: str, name: str, state: os.stat_result, accounts: Accounts) -> dict[str, Any]:
    """Return the facts of a file; of a link its own, and what it leads to."""
    row: dict[str, Any] = {
        "name": pack_path(name), "type": _type(state), "size": state.st_size, "mode": stat.S_IMODE(state.st_mode),
        "mtime": state.st_mtime, "uid": state.st_uid, "gid": state.st_gid,
        "owner": accounts.owner(state.st_uid), "group": accounts.group(state.st_gid),
    }  # fmt: skip
    if stat.S_ISLNK(state.st_mode):
        row.update(_target_of(path))
    elif stat.S_ISREG(state.st_mode) or stat.S_ISDIR(state.st_mode):
        metadata = metadata_of(path)
        if metadata:
            row["metadata"] = metadata
    return row


def _target_of(path: str) -> dict[str, Any]:
    facts: dict[str, Any] = {"target": "", "leads_to": ""}
    try:
        facts["target"] = pack_path(os.readlink(path))
        real = os.path.realpath(path, strict=True)
        state = os.stat(real)
        facts |= {"real": pack_path(real), "leads_to": _type(state), "target_mode": stat.S_IMODE(state.st_mode)}
    except OSError:
        pass
    return facts


def _type(state: os.stat_result) -> str:
    return TYPES.get(stat.S_IFMT(state.st_mode), "other")
