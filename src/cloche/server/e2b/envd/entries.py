"""Files as E2B's messages describe them, their errors, and with whose rights a request works on them.

E2B's envd is root: it reads and writes everything, and gives what it creates to the request's user. Here an operation
has the user's own rights first, which is what nearly all need, and root's where those are not enough and there is root.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from datetime import UTC, datetime
from typing import Any, TypeVar, cast

from cloche.core.errors import SandboxFileError, SandboxFileRefused
from cloche.core.processes import FileInfo, FileRights

from ..calls import Call
from ..defaults import ACCOUNT
from ..errors import E2BError

ROOT = "root"
MOST_USER = 256  # characters
NO_SPACE = "not enough disk space available"
_TYPES = {"file": "FILE_TYPE_FILE", "directory": "FILE_TYPE_DIRECTORY", "link": "FILE_TYPE_SYMLINK"}
# By the kind of an error of a file: status, and Connect's code where the status does not decide it.
_STATUS: Mapping[str, tuple[int, str | None]] = {
    "not_found": (404, None), "is_directory": (400, None), "not_directory": (400, None), "not_regular": (400, None),
    "permission": (403, None), "exists": (409, None), "not_empty": (400, "failed_precondition"),
    "too_large": (400, "out_of_range"), "full": (507, "internal"), "loop": (400, "failed_precondition"),
    "name_too_long": (400, None), "busy": (409, "aborted"), "invalid": (400, None), "timeout": (504, None),
    "unsupported": (400, None), "pids": (503, None), "user": (401, None),
}  # fmt: skip
T = TypeVar("T")
Work = Callable[[FileRights], Awaitable[Any]]


def rights_of(name: str) -> tuple[FileRights, ...]:
    """Return the rights to try in turn, of a user by name; of the sandbox's own user by the default name or none."""
    if name == ROOT:
        return (FileRights(user=ROOT, at_home=True),)
    own = FileRights(user=None if name in ("", ACCOUNT) else name, at_home=True)
    return own, FileRights(user=ROOT, owner=name or ACCOUNT, at_home=True)


async def with_rights(rights: Sequence[FileRights], work: Work, can_repeat: Callable[[], bool] = lambda: True) -> Any:  # noqa: ANN401 - what the work returns
    """Return what work returns with the first rights that are enough. Raises its first error."""
    first, *more = rights
    try:
        return await work(first)
    except SandboxFileRefused as error:
        if error.kind != "permission" or not more or not can_repeat():
            raise
        try:
            return await work(more[0])
        except SandboxFileError as second:
            raise (error if second.kind == "user" else second) from error


async def enter_with_rights(
    stack: AsyncExitStack, name: str, begin: Callable[[FileRights], AbstractAsyncContextManager[T]]
) -> T:
    """Return what a block yields with the first rights that are enough. Raises its first error."""
    return cast("T", await with_rights(rights_of(name), lambda rights: stack.enter_async_context(begin(rights))))


def basic_user(call: Call) -> str:
    """Return the user's name in the header `Authorization`; empty for none. Raises E2BError (401)."""
    kind, _, text = call.request.headers.get("authorization", "").partition(" ")
    if kind.lower() != "basic":
        return ""
    try:
        name = base64.b64decode(text.strip(), validate=True).decode().partition(":")[0]
    except (binascii.Error, ValueError) as error:
        raise E2BError(401, "the header Authorization is no name of a user in base64") from error
    return checked_user(name)


def checked_user(name: str) -> str:
    """Return a user's name. Raises E2BError (401) for one that no account can have."""
    if len(name) > MOST_USER or not name.isprintable() or ":" in name:
        raise E2BError(401, f"invalid username: {name[:40]!r}")
    return name


def file_error(error: SandboxFileError, message: str = "") -> E2BError:
    """Return an error of a file as E2B's, with a message of its own or the error's."""
    status, code = _STATUS.get(error.kind, (500, None))
    message = NO_SPACE if error.kind == "full" else message
    return E2BError(status, printable(message or str(error)), connect=code)


def unknown_user(name: str) -> str:
    """Return what is said of a user whom the sandbox does not have."""
    return f"error looking up user '{name}': user: unknown user {name}"


def printable(text: str) -> str:
    """Return text that JSON in UTF-8 can hold: names of files may be any bytes."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def as_entry(info: FileInfo) -> dict[str, Any]:
    """Return the message `EntryInfo`. A link has the type and the mode of what it leads to."""
    is_link = info.type == "link"
    entry = {
        "name": printable(info.name.rpartition("/")[2] or info.name), "path": printable(info.path),
        "type": _TYPES.get((info.leads_to if is_link else info.type) or "", "FILE_TYPE_UNSPECIFIED"),
        "size": str(info.size), "mode": (info.target_mode if is_link else info.mode) & 0o777,
        "permissions": permissions(info), "owner": printable(info.owner), "group": printable(info.group),
        "modifiedTime": timestamp(info.mtime),
    }  # fmt: skip
    if is_link:
        entry["symlinkTarget"] = printable(info.real or info.path)
    if info.metadata:
        entry["metadata"] = dict(info.metadata)
    return entry


def permissions(info: FileInfo) -> str:
    """Return type and permission bits as Go writes them (`fs.FileMode.String`): `-rw-r--r--`, `dtrwxrwxrwx`."""
    letters = {"directory": "d", "link": "L", "other": "?"}.get(info.type, "")
    bits = ((0o4000, "u"), (0o2000, "g"), (0o1000, "t"))
    letters += "".join(letter for bit, letter in bits if info.mode & bit)
    return (letters or "-") + "".join(
        letter if info.mode & (0o400 >> place) else "-" for place, letter in enumerate("rwxrwxrwx")
    )


def timestamp(seconds: float) -> str:
    """Return a moment as `google.protobuf.Timestamp` in JSON. One that has no year of four digits is the nearest."""
    bounded = min(max(seconds, -62_135_596_800.0), 253_402_300_799.0)
    return datetime.fromtimestamp(bounded, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ").rjust(27, "0")
