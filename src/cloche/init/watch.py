"""Watching a folder, or a file, for changes, by inotify: each change is one line of JSON.

The kernel queues a bounded number of changes; changes that it drops, and folders beyond `MOST_FOLDERS`, are reported as
lost. Lines are `{"event", "path", "type"}`, where `path` is relative to the watched folder; `moved` has `target`
besides. First comes `watching`: every later change is reported. A file is watched by its name, even if another file
gets that name; its path is empty. The last line is `over`: the folder is gone.

With `is_exact` nothing is put together: `written` is a change of content, `attributes` one of mode, owner or metadata,
`moved` without `target` a move out of the folder. A file that appears complete, because it was written without a name,
has these changes reported after its creation, under its name. With `describes` a line has the facts of the file.

For each byte on stream 0, a line `synced` follows all changes that were made before the byte was sent.
"""

from __future__ import annotations

import errno
import json
import os
import select
import stat
import struct

from .content import CONTENT_IN, CONTENT_OUT, Refusal, is_unfinished, write_all
from .facts import Accounts, row_of
from .folders import MOST_DEPTH
from .names import pack_path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

MOST_FOLDERS = 4096
MOST_UNNAMED = 1024  # files without a name whose changes are remembered
MOST_TOLD = 10_000  # entries of new folders that were found by looking, whose creation the kernel may yet tell
DESCRIBED = ("created", "written", "attributes", "moved")  # after which the file is there
TOGETHER_MS = 20  # within which the two halves of a move come
MOST_LINES = 1000  # that are sent together
READ_BYTES = 1 << 16
EVENT = struct.Struct("=iIII")
IN_MODIFY, IN_ATTRIB, IN_CLOSE_WRITE, IN_MOVED_FROM, IN_MOVED_TO = 2, 4, 8, 0x40, 0x80
IN_CREATE, IN_DELETE, IN_DELETE_SELF, IN_MOVE_SELF = 0x100, 0x200, 0x400, 0x800
IN_UNMOUNT, IN_Q_OVERFLOW, IN_IGNORED, IN_ONLYDIR, IN_DONT_FOLLOW, IN_ISDIR = (
    0x2000, 0x4000, 0x8000, 0x1000000, 0x2000000, 0x40000000,
)  # fmt: skip
CHANGED = IN_MODIFY | IN_ATTRIB | IN_CLOSE_WRITE
WANTED = CHANGED | IN_MOVED_FROM | IN_MOVED_TO | IN_CREATE | IN_DELETE | IN_DELETE_SELF | IN_MOVE_SELF
OVER = IN_DELETE_SELF | IN_MOVE_SELF | IN_UNMOUNT


def watch(path: str, order: dict[str, Any]) -> dict[str, Any]:
    """Report changes until the watched path is gone, or the client has left."""
    kind = _ExactWatch if order.get("is_exact") else _Watch
    kind(path, order).run()
    return {}


def load_inotify() -> tuple[Callable[..., int], Callable[..., int], Callable[..., int]]:
    """Return three functions of the C library, which raise OSError. Raises Refusal if it lacks them."""
    try:
        ctypes: Any = __import__("_ctypes")  # `ctypes` itself takes longer to import
        integer = type("_Int", (ctypes._SimpleCData,), {"_type_": "i"})
        unsigned = type("_Unsigned", (ctypes._SimpleCData,), {"_type_": "I"})
        text = type("_Text", (ctypes._SimpleCData,), {"_type_": "z"})
        return (
            _function(ctypes, "inotify_init1", integer, integer),
            _function(ctypes, "inotify_add_watch", integer, integer, text, unsigned),
            _function(ctypes, "inotify_rm_watch", integer, integer, integer),
        )
    except (ImportError, OSError) as error:
        raise Refusal("unsupported", f"this system cannot watch files: {error}", "") from error


def _function(ctypes: Any, name: str, result: type, *arguments: type) -> Callable[..., int]:
    flags = ctypes.FUNCFLAG_CDECL | ctypes.FUNCFLAG_USE_ERRNO
    kind = type(name, (ctypes.CFuncPtr,), {"_flags_": flags, "_argtypes_": arguments, "_restype_": result})
    function = kind(ctypes.dlsym(ctypes.dlopen(None, 0), name))

    def checked(*values: object) -> int:
        result = int(function(*values))
        if result < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return result

    return checked


class _Watch:
    """Hold the watched folders, by the kernel's watch descriptors, and the changes to report."""

    wanted, gone = WANTED, "removed"

    def __init__(self, path: str, order: dict[str, Any]):
        self.top, self.is_recursive = path, bool(order.get("recursive"))
        self.only = ""  # the name of the file that is watched, where it is one
        init, self.add, self.drop = load_inotify()
        self.fd = init(os.O_CLOEXEC | os.O_NONBLOCK)
        self.names: dict[int, str] = {}  # each with a slash behind it; empty for the top
        self.numbers: dict[str, int] = {}
        self.told: set[str] = set()
        self.moved: tuple[int, str, bool] | None = None  # the first half of a move: cookie, path, whether a folder
        self.lines: list[bytes] = []
        self.last: tuple[str, str] | None = None
        self.has_lost = self.is_over = False

    def run(self) -> None:
        """Watch until the end."""
        is_folder = stat.S_ISDIR(os.stat(self.top).st_mode)
        if not is_folder:
            self.top, self.only = os.path.split(os.path.realpath(self.top))
        self._watch("", 0)
        self._tell(
            "watching", "", is_folder=is_folder, target=self.top
        )  # before any `lost`; all is sent when all is watched
        if is_folder and self.is_recursive:
            self._look_into("", 1, tells=False)
        self._flush()
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        poll.register(CONTENT_IN, select.POLLIN)
        while not self.is_over:
            ready = [fd for fd, _ in poll.poll(TOGETHER_MS if self.moved else None)]
            if CONTENT_IN in ready:
                self._sync(poll)
            elif ready:
                self._take(os.read(self.fd, READ_BYTES))
            else:
                self._end_move()
            if not self.moved or self.is_over:
                self._flush()

    def _sync(self, poll: select.poll) -> None:
        """Report all changes until now, and that this was done."""
        requests = os.read(CONTENT_IN, READ_BYTES)
        if not requests:
            poll.unregister(CONTENT_IN)
        try:
            while requests and not self.is_over:
                self._take(os.read(self.fd, READ_BYTES))
                if len(self.lines) > MOST_LINES:
                    self._flush()
        except BlockingIOError:
            self._end_move()
        for _ in requests:
            self._tell("synced", "")
            self.last = None

    def _watch(self, name: str, depth: int) -> bool:
        """Watch one folder; beyond the bounds, report the loss."""
        if len(self.names) >= MOST_FOLDERS or depth > MOST_DEPTH:
            self._lose()
            return False
        flags = self.wanted | (IN_ONLYDIR | IN_DONT_FOLLOW if name else 0)
        try:
            number = self.add(self.fd, os.fsencode(f"{self.top}/{name}" if name else self.top), flags)
        except OSError as error:
            if not name:
                raise OSError(error.errno, error.strerror, self.top) from error
            if error.errno in (errno.ENOSPC, errno.EACCES, errno.ENAMETOOLONG):
                self._lose()
            return False
        self.names[number], self.numbers[name] = name, number
        return True

    def _lose(self) -> None:
        if not self.has_lost:
            self.has_lost = True
            self._tell("lost", "")

    def _look_into(self, name: str, depth: int, *, tells: bool) -> None:
        """Watch the folders below one, and report the entries from before the watch."""
        pending = [(name, depth)]
        while pending:
            name, depth = pending.pop()
            try:
                with os.scandir(f"{self.top}/{name}") as entries:
                    for entry in entries:
                        is_folder = entry.is_dir(follow_symlinks=False)
                        path = name + entry.name
                        if is_unfinished(entry.name):
                            continue
                        if tells and path not in self.told:
                            self._note(path)
                            self._tell("created", path, is_folder=is_folder)
                        if is_folder and self._watch(f"{path}/", depth):
                            pending.append((f"{path}/", depth + 1))
            except OSError:
                continue  # it has gone, or is closed to us: then its entries are, too

    def _note(self, path: str) -> None:
        if len(self.told) >= MOST_TOLD:
            self.told.clear()
        self.told.add(path)

    def _take(self, data: bytes) -> None:
        offset = 0
        while offset < len(data) and not self.is_over:
            number, mask, cookie, length = EVENT.unpack_from(data, offset)
            offset += EVENT.size + length
            name = os.fsdecode(data[offset - length : offset].partition(b"\0")[0])
            if mask & IN_Q_OVERFLOW:
                self._end_move()
                self._tell("lost", "")
            elif number in self.names:
                self._take_one(number, mask, cookie, name)

    def _take_one(self, number: int, mask: int, cookie: int, name: str) -> None:
        folder, is_folder = self.names[number], bool(mask & IN_ISDIR)
        path = folder + name
        if self.moved and not (mask & IN_MOVED_TO and self.moved[0] == cookie):
            self._end_move()
        if mask & IN_IGNORED:
            self.names.pop(number)
            self.numbers.pop(folder, None)
        elif mask & OVER and not folder:
            self._tell("over", "", is_folder=True)
            self.is_over = True
        elif mask & IN_MOVED_FROM and not self.only:
            self.moved = cookie, path, is_folder
        elif mask & IN_MOVED_TO and self.moved:
            self._finish_move(self.moved[1], path, is_folder=is_folder)
        elif self.only:
            self._take_file(mask, name)
        elif self._is_ours(path, name):
            self._note_unnamed(mask, name)  # a file of ours is reported when it has its name
        elif mask & (IN_CREATE | IN_MOVED_TO):
            self._created(path, is_folder=is_folder)
        elif mask & IN_DELETE:
            self.told.discard(path)
            self._tell("removed", path, is_folder=is_folder)
        elif mask & CHANGED and (name or not folder):
            self._changed(mask, path, is_folder=is_folder)

    def _changed(self, mask: int, path: str, *, is_folder: bool) -> None:
        self._tell("changed", path, is_folder=is_folder)

    def _note_unnamed(self, mask: int, name: str) -> None: ...

    def _is_ours(self, path: str, name: str) -> bool:
        """Tell whether `files` is writing this file: it has no name, or a temporary one."""
        is_unnamed = name[:1] == "#" and name[1:].isdigit()
        return is_unfinished(name) or (is_unnamed and not os.path.lexists(f"{self.top}/{path}"))

    def _take_file(self, mask: int, name: str) -> None:
        if name == self.only:
            event = "created" if mask & (IN_CREATE | IN_MOVED_TO) else "changed" if mask & CHANGED else "removed"
            self._tell(event, "")

    def _created(self, path: str, *, is_folder: bool) -> None:
        if path in self.told:
            self.told.discard(path)
        else:
            self._tell("created", path, is_folder=is_folder)
        if is_folder and self.is_recursive and f"{path}/" not in self.numbers:
            depth = path.count("/") + 1
            if self._watch(f"{path}/", depth):
                self._look_into(f"{path}/", depth + 1, tells=True)

    def _finish_move(self, path: str, target: str, *, is_folder: bool) -> None:
        self.moved = None
        if is_unfinished(path.rpartition("/")[2]):
            if is_folder:
                self._created(target, is_folder=True)
            else:
                self._tell("changed", target)
            return
        self._tell("moved", path, is_folder=is_folder, target=target)
        if not is_folder:
            return
        for name in self._below(f"{path}/"):
            number = self.numbers.pop(name)
            self.names[number] = f"{target}/{name[len(path) + 1 :]}"
            self.numbers[self.names[number]] = number

    def _end_move(self) -> None:
        """Report a move out of the watched tree."""
        if self.moved is None:
            return
        (_, path, is_folder), self.moved = self.moved, None
        self._tell(self.gone, path, is_folder=is_folder)
        for name in self._below(f"{path}/") if is_folder else ():
            number = self.numbers.pop(name)
            self.names.pop(number)
            try:
                self.drop(self.fd, number)
            except OSError:
                pass  # the kernel has dropped it already

    def _below(self, prefix: str) -> list[str]:
        return [name for name in self.numbers if name.startswith(prefix)]

    def _tell(self, event: str, path: str, *, is_folder: bool = False, target: str | None = None) -> None:
        if event in ("changed", "written", "attributes") and self.last == (event, path):
            return
        self.last = event, path
        row: dict[str, Any] = {"event": event, "path": pack_path(path), "type": "directory" if is_folder else "file"}
        if target is not None:
            row["target"] = pack_path(target)
        row.update(self._described(event, path if target is None else target))
        self.lines.append(json.dumps(row).encode() + b"\n")

    def _described(self, event: str, path: str) -> dict[str, Any]:
        return {}

    def _flush(self) -> None:
        """Send the pending changes. Equal changes between two calls are sent once."""
        if self.lines:
            lines, self.lines = b"".join(self.lines), []
            write_all(CONTENT_OUT, lines)
        self.last = None


class _ExactWatch(_Watch):
    """Report each change by itself."""

    wanted, gone = WANTED & ~IN_CLOSE_WRITE, "moved"

    def __init__(self, path: str, order: dict[str, Any]):
        super().__init__(path, order)
        self.describes, self.accounts = bool(order.get("describes")), Accounts()
        self.unnamed: dict[str, int] = {}  # what has happened to a file without a name, by its number

    def _changed(self, mask: int, path: str, *, is_folder: bool) -> None:
        if mask & IN_ATTRIB:
            self._tell("attributes", path, is_folder=is_folder)
        if mask & IN_MODIFY:
            self._tell("written", path, is_folder=is_folder)

    def _note_unnamed(self, mask: int, name: str) -> None:
        if name[:1] == "#":
            if len(self.unnamed) >= MOST_UNNAMED:
                self.unnamed.clear()
            self.unnamed[name[1:]] = self.unnamed.get(name[1:], 0) | mask

    def _created(self, path: str, *, is_folder: bool) -> None:
        super()._created(path, is_folder=is_folder)
        if not is_folder:
            self._changed(self._noted(path), path, is_folder=False)

    def _noted(self, path: str) -> int:
        """Return what had happened to a file before it got its name."""
        try:
            return self.unnamed.pop(str(os.lstat(f"{self.top}/{path}").st_ino), 0) if self.unnamed else 0
        except OSError:
            return 0

    def _finish_move(self, path: str, target: str, *, is_folder: bool) -> None:
        if is_folder or not is_unfinished(path.rpartition("/")[2]):
            super()._finish_move(path, target, is_folder=is_folder)
            return
        self.moved = None
        self._changed(self._noted(target) or IN_ATTRIB | IN_MODIFY, target, is_folder=False)

    def _described(self, event: str, path: str) -> dict[str, Any]:
        if not self.describes or event not in DESCRIBED:
            return {}
        whole = f"{self.top}/{path}"
        try:
            state = os.lstat(whole)
        except OSError:
            return {}  # it has gone meanwhile
        return {"entry": {**row_of(whole, os.path.basename(path), state, self.accounts), "path": pack_path(whole)}}
