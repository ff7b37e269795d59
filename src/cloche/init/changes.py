"""The files below a folder, with contents, as one stream: the upper layer of an overlay, or a copy of a host's folder.

The stream is made of frames: four bytes, the largest first, with the number of bytes that follow. With the top bit set
they are content, else one JSON object. There is a row for each path, folders before their entries:

    {"path", "kind": "file" | "directory" | "link" | "removed" | "unchanged" | "other", "mode", "mtime", "target",
     "opaque", "copied", "problem"}

A row of a file is followed by its content, in frames, and by an end: a content frame of no bytes, or
`{"problem": WORD}` if not all of it could be read. A row with a `problem` has no content and nothing below it.

The answer has a `mark`, a sum over inodes, modes, sizes and times of all that was looked at: if it is equal later,
nothing has changed in between. With `lists` there are only rows of files, with their `size` and without content.

In an overlay's upper layer a character device 0:0 is a whiteout, `user.overlay.opaque` with the value `y` on a folder
hides all below it in the lower layers, and `user.overlay.origin` marks files that were copied up. With a time `since`
the folder is a copy that was complete then: a file without a change after it is `unchanged`, and a folder `copied`.
With a time `base` the reader has the files of the upper layer as they were then: one without a change after it is
`unchanged`, too. A folder that may have been moved after it counts as new with all below it: rename(2) changes the
times of the moved folder and of the folders that it leaves and enters, and of nothing below.

Nothing but folders and regular files is opened, through no link and by the descriptor of the folder above.
"""

from __future__ import annotations

import errno
import json
import os
import stat

from .content import CHUNK, CONTENT_OUT, FOLDER, OPEN, natural, write_all
from .names import pack, unpack

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

CONTENT = 1 << 31
MOST_ENTRIES = 1_000_000
MOST_DEPTH = 100  # of folders; each holds two descriptors while it is looked through
MOST_PATH_BYTES = 4096
MOST_FOLDER_BYTES = MOST_PATH_BYTES - 256  # of the path of a folder that is looked into, whatever a name in it is
HELD_BYTES = 1 << 16
MOST_MARK = (1 << 64) - 1
OPAQUE, ORIGIN = "user.overlay.opaque", "user.overlay.origin"
GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO)


def changes(path: str, order: dict[str, Any]) -> dict[str, Any]:
    """Send the tree below a folder: `most` bytes of content in all and `entries` rows, without the paths of `skip`.

    A path with one of the `names` has a row, and is not entered. The answer counts rows, and names the exceeded bound.
    """
    top = os.open(path, FOLDER)
    try:
        return walk(top, order, CONTENT_OUT)
    finally:
        os.close(top)


def walk(top: int, order: dict[str, Any], into: int) -> dict[str, Any]:
    """Write the frames of the tree below an open folder to a descriptor, and return the answer."""
    sending = _Sending(order, into)
    sending.send(top)
    sending.flush()
    return {
        "count": sending.count, "too_many": sending.is_cut, "too_large": sending.too_large, "skipped": sending.skipped,
        "mark": f"{sending.mark:x}",
    }  # fmt: skip


class _Folder:
    """Hold one folder during the walk: whether it has changed since the copy, and may have been moved."""

    __slots__ = ("entries", "fd", "has_changed", "may_be_moved", "prefix")

    def __init__(self, fd: int, prefix: bytes, *, has_changed: bool, may_be_moved: bool):
        self.fd, self.prefix, self.has_changed, self.may_be_moved = fd, prefix, has_changed, may_be_moved
        self.entries = os.scandir(fd)

    def close(self) -> None:
        self.entries.close()
        os.close(self.fd)


class _Sending:
    def __init__(self, order: dict[str, Any], into: int):
        self.into = into
        self.since, base = natural(order, "since", None), natural(order, "base", None)
        self.is_copy = self.since is not None
        self.since = self.since if self.is_copy else base
        self.most = natural(order, "most", 0) or 0
        self.entries = natural(order, "entries", MOST_ENTRIES) or 0
        self.lists = bool(order.get("lists"))
        self.mark = 0
        self.skip = {unpack(packed) for packed in order.get("skip") or ()}
        self.names = {unpack(packed) for packed in order.get("names") or ()}
        self.count = self.too_large = self.skipped = 0
        self.is_cut = False
        self.device = -1
        self.held: list[bytes] = []
        self.held_bytes = 0

    def send(self, top: int) -> None:
        """Send rows for all that is below an open folder."""
        state = os.fstat(top)
        self.device = state.st_dev
        open_folders = [_Folder(os.dup(top), b"", has_changed=not self._is_old(state), may_be_moved=False)]
        try:
            while open_folders and not self.is_cut:
                folder = open_folders[-1]
                entry = next(folder.entries, None)
                if entry is None:
                    open_folders.pop().close()
                elif (below := self._send_entry(folder, os.fsencode(entry.name), len(open_folders))) is not None:
                    open_folders.append(below)
        finally:
            for folder in open_folders:
                folder.close()

    def _is_old(self, state: os.stat_result) -> bool:
        return self.since is not None and state.st_ctime_ns < self.since

    def _send_entry(self, folder: _Folder, name: bytes, depth: int) -> _Folder | None:
        """Send the row of one name; return the folder to enter, if it is one."""
        path = folder.prefix + name
        if path in self.skip:
            return None
        try:
            state = os.stat(name, dir_fd=folder.fd, follow_symlinks=False)
        except OSError as error:
            self.skipped += error.errno not in GONE
            return None
        if self.count >= self.entries:
            self.is_cut = True
            return None
        times = state.st_mtime_ns, state.st_ctime_ns
        self.mark = (self.mark + hash((state.st_ino, state.st_mode, state.st_size, *times))) & MOST_MARK
        kind = stat.S_IFMT(state.st_mode)
        row: dict[str, Any] = {"path": pack(path), "mode": stat.S_IMODE(state.st_mode), "mtime": int(state.st_mtime)}
        if kind == stat.S_IFDIR:
            return self._send_folder(folder, name, row, state, depth=depth)
        is_compared = kind == stat.S_IFREG or (kind == stat.S_IFLNK and self.is_copy)
        if is_compared and not self.lists and self._is_old(state) and not folder.may_be_moved:
            self._row({**row, "kind": "unchanged"})
        elif kind == stat.S_IFREG and self.lists:
            self._row({"path": row["path"], "kind": "file", "size": state.st_size})
        elif kind == stat.S_IFREG:
            self._send_file(folder, name, row)
        elif kind == stat.S_IFLNK:
            self._send_link(folder, name, row)
        elif kind == stat.S_IFCHR and state.st_rdev == 0 and not self.is_copy:
            self._row({**row, "kind": "removed"})
        else:
            self._row({**row, "kind": "other"})
        return None

    def _send_folder(
        self, folder: _Folder, name: bytes, row: dict[str, Any], state: os.stat_result, *, depth: int
    ) -> _Folder | None:
        row["kind"] = "directory"
        if name in self.names:
            self._row(row)
            return None
        is_mount = state.st_dev != self.device
        if is_mount or depth >= MOST_DEPTH or len(folder.prefix) + len(name) > MOST_FOLDER_BYTES:
            self._row({**row, "problem": "mount" if is_mount else "too_deep"})
            return None
        has_changed, fd = not self._is_old(state), -1
        may_be_moved = folder.may_be_moved or (has_changed and folder.has_changed)
        try:
            fd = os.open(name, FOLDER, dir_fd=folder.fd)
            below = _Folder(fd, folder.prefix + name + b"/", has_changed=has_changed, may_be_moved=may_be_moved)
        except OSError:
            if fd >= 0:
                os.close(fd)
            self._row({**row, "problem": "unreadable"})
            return None
        row["opaque"] = not self.is_copy and _attribute(fd, OPAQUE) == b"y"
        is_as_copied = not (has_changed or may_be_moved)
        row["copied"] = is_as_copied if self.is_copy else _attribute(fd, ORIGIN) is not None
        self._row(row)
        return below

    def _send_link(self, folder: _Folder, name: bytes, row: dict[str, Any]) -> None:
        try:
            target = os.fsencode(os.readlink(name, dir_fd=folder.fd))
        except OSError:
            self._row({**row, "kind": "link", "problem": "unreadable"})
        else:
            self._row({**row, "kind": "link", "target": pack(target)})

    def _send_file(self, folder: _Folder, name: bytes, row: dict[str, Any]) -> None:
        """Send a file, and note a problem if it has changed meanwhile, or exceeds the remaining bytes."""
        row["kind"] = "file"
        if name in self.names:
            self._row({**row, "problem": "unreadable"})
            return
        try:
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | OPEN, dir_fd=folder.fd)
        except OSError:
            self._row({**row, "problem": "unreadable"})
            return
        try:
            before = os.fstat(fd)
            if not stat.S_ISREG(before.st_mode):
                self._row({**row, "kind": "other"})
                return
            if before.st_size > self.most:
                self.too_large += 1
                self._row({**row, "problem": "too_large"})
                return
            row["copied"] = _attribute(fd, ORIGIN) is not None
            self._row(row)
            self._send_content(fd, before)
        finally:
            os.close(fd)

    def _send_content(self, fd: int, before: os.stat_result) -> None:
        size, problem = 0, ""
        try:
            while data := os.read(fd, CHUNK):
                if len(data) > self.most:
                    problem = "too_large"
                    self.too_large += 1
                    break
                self._frame(data, CONTENT)
                self.most -= len(data)
                size += len(data)
        except OSError:
            problem = "unreadable"
        after = os.fstat(fd)
        if not problem and (size != after.st_size or before.st_mtime_ns != after.st_mtime_ns):
            problem = "changed"
        if problem:
            self._frame(json.dumps({"problem": problem}).encode())
        else:
            self._frame(b"", CONTENT)

    def _row(self, row: dict[str, Any]) -> None:
        if self.lists and row["kind"] != "file":
            return
        self.count += 1
        self._frame(json.dumps(row, separators=(",", ":")).encode())

    def _frame(self, data: bytes, flag: int = 0) -> None:
        self.held += ((flag | len(data)).to_bytes(4, "big"), data)
        self.held_bytes += 4 + len(data)
        if self.held_bytes >= HELD_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write the held frames."""
        write_all(self.into, b"".join(self.held))
        self.held.clear()
        self.held_bytes = 0


def _attribute(fd: int, name: str) -> bytes | None:
    """Return an extended attribute of an open file; None if it, or the file system, lacks the attribute."""
    try:
        return os.getxattr(fd, name)
    except OSError:
        return None
