"""Calls that change metadata of files, made by the reaper in the place of a guest that has its user's own uid.

Landlock does not handle them: where guest and caller are one user, the kernel alone would let a guest change mode,
times and owner of all its user's files, by a path or by a descriptor that was opened for reading. So the filter
notifies of all of them (`setup/seccomp`), and they are made here for files below the sandbox's own folders; for others
the answer is EACCES. The filter refuses extended attributes, flags of inodes (`FS_IOC_SETFLAGS` and its like), and
calls newer than its table.

The change is made through one descriptor of the file (O_PATH, so that neither FIFO nor device is opened):

- A path is opened below a descriptor of an own folder by `openat2` with RESOLVE_BENEATH and RESOLVE_NO_MAGICLINKS. The
  own folder, and the path below it, follow from the text of the path and, for a relative one, from the guest's working
  directory: no concurrent change of these can make it open a file outside. Where the kernel finds that a link or `..`
  leads out of the folder, the path is walked once more, name by name, for it may lead back in. Nothing outside is
  looked up: there `..` removes the name before it, as if that were no link.
- A descriptor of the guest's is opened once more, and its path, by the kernel's answer, must be below an own folder. A
  guest cannot bring an outside file there: Landlock refuses to rename or link it.
"""

from __future__ import annotations

import posix

from .answered_calls import AT_CWD
from .syscalls import AT_EMPTY_PATH, AT_FDCWD, call

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from .answered_calls import Answerer, HeldCall
    from .messages import Spec

    Change = Callable[[bytes, HeldCall, int], object]

RESOLVE_NO_MAGICLINKS, RESOLVE_NO_SYMLINKS, RESOLVE_BENEATH = 2, 4, 8
HOW_BYTES = 24
AT_SYMLINK_NOFOLLOW = 0x100
# How C libraries change the file that a link is, where the kernel has no call for it: by a descriptor of O_PATH.
OF_DESCRIPTORS, MOST_DIGITS = (b"/proc/self/fd", b"/proc/thread-self/fd", b"/dev/fd"), 10
S_IFMT, S_IFLNK = 0o170000, 0o120000
SAME = 0xFFFFFFFF  # in place of an id that is not to be changed
WORD, MICROSECONDS = 8, 1_000_000
MOST_LINKS, MOST_NAMES, RETRIES = 40, 256, 8  # of a path that is walked name by name; after a renaming
ENOENT, EAGAIN, EACCES, EFAULT, EXDEV, EINVAL, ELOOP = 2, 11, 13, 14, 18, 22, 40


def answerers(spec: Spec, names: Mapping[int, str]) -> dict[int, Answerer]:
    """Return the answerers of these calls, by number, for guests of this sandbox."""
    own = OwnFolders([spec.workspace, spec.tmp])
    return {number: _answerer(own, name) for number, name in names.items()}


class OwnFolders:
    """Open files below a guest's own folders, safely under concurrent changes of the paths."""

    def __init__(self, folders: Sequence[str]):
        self._names: dict[bytes, int] = {}  # as the guest is told, and as the kernel says
        for folder in folders:
            held = posix.open(folder, posix.O_PATH | posix.O_DIRECTORY | posix.O_CLOEXEC)
            self._names |= {folder.encode("utf-8", "surrogateescape"): held, _path_of(held): held}

    def open(self, path: bytes, *, follows: bool) -> int:
        """Return a descriptor (O_PATH) of the file at an absolute path. Raises OSError: EACCES for one outside."""
        try:
            return self._open(path, RESOLVE_BENEATH | RESOLVE_NO_MAGICLINKS, follows=follows)
        except OSError as error:
            if error.errno not in (EXDEV, EACCES, EAGAIN):
                raise
        return self._walk(path, follows=follows)

    def check(self, held: int) -> None:
        """Raise OSError unless this open file lies below an own folder, or did when it was removed."""
        if self._below(_path_of(held)) is None:
            raise OSError(EACCES, "not below the sandbox's own folders")

    def _below(self, path: bytes) -> tuple[int, bytes] | None:
        """Return the own folder that a path begins with, and the relative path."""
        for name, held in self._names.items():
            if path == name or path.startswith(name + b"/"):
                return held, path[len(name) :].lstrip(b"/") or b"."
        return None

    def _open(self, path: bytes, resolve: int, *, follows: bool) -> int:
        own_folder = self._below(path)
        if own_folder is None:
            raise OSError(EACCES, "not below the sandbox's own folders")
        flags = posix.O_PATH | posix.O_CLOEXEC | (0 if follows else posix.O_NOFOLLOW)
        how = flags.to_bytes(8, "little") + bytes(8) + resolve.to_bytes(8, "little")
        for _ in range(RETRIES):
            try:
                return call("openat2", own_folder[0], own_folder[1], how, HOW_BYTES)
            except OSError as error:  # openat2(2): EAGAIN for `..` during a rename anywhere
                if error.errno != EAGAIN:
                    raise
        raise OSError(EAGAIN, "too much is being renamed")

    def _walk(self, path: bytes, *, follows: bool) -> int:
        """Resolve a path name by name, and open the result; all opened files are below an own folder."""
        follows = follows or path.endswith(b"/")
        resolved, to_do, links, names = b"", _names_of(path), 0, 0
        while to_do:
            names += 1
            if names > MOST_NAMES:
                raise OSError(ELOOP, "too many names")
            name = to_do.pop()
            if name == b"..":
                resolved = resolved.rpartition(b"/")[0]
                continue
            target = self._link(resolved + b"/" + name) if to_do or follows else b""
            if target:
                links += 1
                if links > MOST_LINKS:
                    raise OSError(ELOOP, "too many links")
                resolved = b"" if target.startswith(b"/") else resolved
                to_do += _names_of(target)
            else:
                resolved += b"/" + name
        return self._open(resolved, RESOLVE_BENEATH | RESOLVE_NO_MAGICLINKS | RESOLVE_NO_SYMLINKS, follows=False)

    def _link(self, path: bytes) -> bytes:
        """Return the target of a link below an own folder; empty if it is no link, or is outside."""
        own_folder = self._below(path)
        if own_folder is None or own_folder[1] == b".":
            return b""
        held = self._open(path, RESOLVE_BENEATH | RESOLVE_NO_MAGICLINKS | RESOLVE_NO_SYMLINKS, follows=False)
        try:
            if posix.fstat(held).st_mode & S_IFMT != S_IFLNK:
                return b""
            return posix.readlink(b"", dir_fd=held)
        finally:
            posix.close(held)


def _names_of(path: bytes) -> list[bytes]:
    """Return the names in a path, the last one first."""
    return [name for name in reversed(path.split(b"/")) if name not in (b"", b".")]


def _path_of(held: int) -> bytes:
    """Return the kernel's path of an open file."""
    return posix.readlink(b"/proc/self/fd/%d" % held)


def _answerer(own: OwnFolders, name: str) -> Answerer:
    row = CALLS[name]

    def answer(held_call: HeldCall) -> int:
        held = open_file(own, held_call, row)
        try:
            row.change(b"/proc/self/fd/%d" % held, held_call, row.first_value)
        finally:
            posix.close(held)
        return 0

    return answer


def open_file(own: OwnFolders, held_call: HeldCall, row: CallRow) -> int:
    """Return a descriptor (O_PATH) of the file that a call is for, below an own folder."""
    flags = held_call.argument(row.flags) if row.flags else 0
    if flags & ~(AT_SYMLINK_NOFOLLOW | AT_EMPTY_PATH):
        raise OSError(EINVAL, "a flag that nobody knows")
    directory = held_call.argument(row.directory) if row.directory >= 0 else AT_CWD
    address = held_call.arguments[row.path] if row.path >= 0 else 0
    has_path = address or not (row.is_optional or flags & AT_EMPTY_PATH)
    path = held_call.text(address) if has_path else b""
    if not path:
        if has_path and not flags & AT_EMPTY_PATH:
            raise OSError(ENOENT, "an empty path")
        if directory != AT_CWD:
            return _open_descriptor(own, held_call, directory)
        if row.is_optional and not flags & AT_EMPTY_PATH:
            raise OSError(EFAULT, "neither path nor descriptor")
    folder, _, number = path.rpartition(b"/")
    if folder in OF_DESCRIPTORS and number.isdigit() and row.follows and not flags & AT_SYMLINK_NOFOLLOW:
        return _open_descriptor(own, held_call, int(number[:MOST_DIGITS]))
    if not path.startswith(b"/"):
        path = held_call.directory(directory) + b"/" + path
    return own.open(path, follows=row.follows and not flags & AT_SYMLINK_NOFOLLOW)


def _open_descriptor(own: OwnFolders, held_call: HeldCall, number: int) -> int:
    held = held_call.open_descriptor(number)
    try:
        own.check(held)
    except OSError:
        posix.close(held)
        raise
    return held


def _change_mode(file: bytes, held_call: HeldCall, index: int) -> None:
    posix.chmod(file, held_call.argument(index) & 0o7777)


def _change_owner(file: bytes, held_call: HeldCall, index: int) -> None:
    user, group = (
        -1 if new_id == SAME else new_id for new_id in (held_call.argument(index), held_call.argument(index + 1))
    )
    posix.chown(file, user, group)


def _change_times(file: bytes, times: bytes | None) -> None:
    call("utimensat", AT_FDCWD, file, times, 0)


def _in_nanoseconds(file: bytes, held_call: HeldCall, index: int) -> None:
    address = held_call.arguments[index]
    _change_times(file, held_call.copy(address, 4 * WORD) if address else None)


def _in_microseconds(file: bytes, held_call: HeldCall, index: int) -> None:
    address = held_call.arguments[index]
    if not address:
        return _change_times(file, None)
    numbers = _numbers(held_call.copy(address, 4 * WORD))
    if not all(0 <= number < MICROSECONDS for number in numbers[1::2]):
        raise OSError(EINVAL, "not a part of a second")
    return _change_times(file, _packed(numbers[0], numbers[1] * 1000, numbers[2], numbers[3] * 1000))


def _in_seconds(file: bytes, held_call: HeldCall, index: int) -> None:
    address = held_call.arguments[index]
    if not address:
        return _change_times(file, None)
    accessed, changed = _numbers(held_call.copy(address, 2 * WORD))
    return _change_times(file, _packed(accessed, 0, changed, 0))


def _numbers(data: bytes) -> list[int]:
    return [int.from_bytes(data[offset : offset + WORD], "little", signed=True) for offset in range(0, len(data), WORD)]


def _packed(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(WORD, "little", signed=True) for number in numbers)


class CallRow:
    """Name the arguments of a call that identify the file (-1 for none); `first_value` is the first of the change."""

    def __init__(
        self,
        first_value: int,
        change: Change,
        *,
        directory: int = -1,
        path: int = -1,
        flags: int = 0,
        follows: bool = True,
        is_optional: bool = False,
    ):
        self.first_value, self.change = first_value, change
        self.directory, self.path, self.flags = directory, path, flags
        self.follows = follows
        self.is_optional = is_optional  # without a path the call is for a descriptor


CALLS: dict[str, CallRow] = {
    "chmod": CallRow(1, _change_mode, path=0),
    "fchmod": CallRow(1, _change_mode, directory=0, is_optional=True),
    "fchmodat": CallRow(2, _change_mode, directory=0, path=1),
    "fchmodat2": CallRow(2, _change_mode, directory=0, path=1, flags=3),
    "chown": CallRow(1, _change_owner, path=0),
    "lchown": CallRow(1, _change_owner, path=0, follows=False),
    "fchown": CallRow(1, _change_owner, directory=0, is_optional=True),
    "fchownat": CallRow(2, _change_owner, directory=0, path=1, flags=4),
    "utime": CallRow(1, _in_seconds, path=0),
    "utimes": CallRow(1, _in_microseconds, path=0),
    "futimesat": CallRow(2, _in_microseconds, directory=0, path=1, is_optional=True),
    "utimensat": CallRow(2, _in_nanoseconds, directory=0, path=1, flags=3, is_optional=True),
}
