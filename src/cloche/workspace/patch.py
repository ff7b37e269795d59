"""Write changes as a patch for `git apply`: unified diffs of text, modes, renames and links.

A binary or too long file has a line with its sizes in place of a diff; `git apply` skips such lines. Permissions that
git cannot express, since it only records whether a file is executable, have such a line too. Names are quoted as git
quotes them. File contents are not escaped: the caller escapes a patch that it prints.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from ..core.changes import Change
from ..core.record import dataclass, field
from .host_files import HostTree
from .lines import Work, changed_regions, hunks
from .snapshot import LOOKED_AT_BYTES, Snapshot

MOST_PATCH_BYTES = 4 << 20
MOST_FILE_BYTES = 4 << 20  # of one text
MOST_LINES = 250_000  # of one text: each line is a string object
MOST_ALL_LINES = 3_000_000
MOST_READ_BYTES = 64 << 20  # of all texts
MOST_STEPS = 2_000_000  # of line comparison in one patch
LINK_MODE = "120000"
GIT_MODES = frozenset({0o644, 0o755})
_ESCAPES = {7: "\\a", 8: "\\b", 9: "\\t", 10: "\\n", 11: "\\v", 12: "\\f", 13: "\\r", 34: '\\"', 92: "\\\\"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """A patch, whether it was cut, and by path whether the files that were read for it are text."""

    text: str = ""
    is_cut: bool = False
    is_text: Mapping[str, bool] = field(default_factory=dict)


def make_patch(
    changes: Iterable[Change],
    snapshot: Snapshot,
    tree: HostTree,
    *,
    max_bytes: int = MOST_PATCH_BYTES,
    work: Work | None = None,
    check: Callable[[], None] = lambda: None,
) -> Patch:
    """Return the changes as a patch of at most `max_bytes`; changes that do not fit are left out."""
    making = _Making(snapshot, tree, max_bytes, work or Work(MOST_STEPS))
    for change in changes:
        if min(making.left_bytes, making.left_to_read, making.left_lines) <= 0:
            making.is_cut = True
            break
        check()
        making.add(change)
    return Patch(text="".join(making.sections), is_cut=making.is_cut, is_text=making.is_text)


class _TooLong(Exception):
    """Report a text that exceeds a limit."""


class _Making:
    def __init__(self, snapshot: Snapshot, tree: HostTree, max_bytes: int, work: Work):
        self.snapshot, self.tree, self.left_bytes, self.work = snapshot, tree, max_bytes, work
        self.left_to_read, self.left_lines = MOST_READ_BYTES, MOST_ALL_LINES
        self.sections: list[str] = []
        self.is_cut = False
        self.is_text: dict[str, bool] = {}

    def add(self, change: Change) -> None:
        section = "".join(self._section(change))
        size = len(section.encode())
        if size > self.left_bytes:
            section = f"Not shown, for it is too long: {_name('b/', change.path)}\n"
            size = len(section)
            self.is_cut = True
        if size <= self.left_bytes:
            self.sections.append(section)
            self.left_bytes -= size

    def _section(self, change: Change) -> Iterator[str]:
        yield from _permissions(change)
        if change.what in ("renamed", "mode"):
            yield from _head(change)
            return
        has_new = change.what != "removed" and change.kind != "directory"
        old_kind = change.kind if change.what == "removed" else change.old_kind or change.kind
        has_old = change.what != "added" and old_kind != "directory"
        if not has_new and not has_old:
            return
        try:
            old = self._old(change, old_kind) if has_old else b""
            new = self._new(change) if has_new else b""
            self._count_lines(old.count(b"\n"), new.count(b"\n"))
        except _TooLong:
            self.is_cut = True
            yield _note(change, has_old=has_old, has_new=has_new, label="Long files")
            return
        except OSError:
            self.is_cut = True
            yield f"Not shown, for it cannot be read: {_name('b/', change.path)}\n"
            return
        old_text, new_text = as_text(old), as_text(new)
        self.is_text[change.path] = old_text is not None and new_text is not None
        if old_text is None or new_text is None:
            yield _note(change, has_old=has_old, has_new=has_new, label="Binary files")
        elif has_old and has_new and change.old_kind:  # git represents a change of type as a removal and an addition
            yield from self._diff(change, old_text, "", old_mode=_mode(old_kind, change.old_mode))
            yield from self._diff(change, "", new_text, new_mode=_mode(change.kind, change.mode))
        else:
            old_mode = _mode(old_kind, change.old_mode) if has_old else ""
            new_mode = _mode(change.kind, change.mode) if has_new else ""
            yield from self._diff(change, old_text, new_text, old_mode=old_mode, new_mode=new_mode)

    def _diff(self, change: Change, old: str, new: str, *, old_mode: str = "", new_mode: str = "") -> Iterator[str]:
        yield section_head(change)
        if not old_mode:
            yield f"new file mode {new_mode}\n"
        elif not new_mode:
            yield f"deleted file mode {old_mode}\n"
        elif old_mode != new_mode:
            yield f"old mode {old_mode}\nnew mode {new_mode}\n"
        old_lines, new_lines = text_lines(old), text_lines(new)
        shown = hunks(old_lines, new_lines, changed_regions(old_lines, new_lines, self.work))
        if shown:
            yield f"--- {_named_line('a/', change.path) if old_mode else '/dev/null'}\n"
            yield f"+++ {_named_line('b/', change.path) if new_mode else '/dev/null'}\n"
            yield from shown

    def _count_lines(self, *counts: int) -> None:
        if max(counts) > MOST_LINES or sum(counts) > self.left_lines:
            raise _TooLong
        self.left_lines -= sum(counts)

    def _old(self, change: Change, kind: str) -> bytes:
        if kind == "link":
            return os.fsencode(change.old_target)
        return self._read(self.tree.read(os.fsencode(change.path)), change.old_size)

    def _new(self, change: Change) -> bytes:
        if change.kind == "link":
            return os.fsencode(change.target)
        return self._read(self.snapshot.read(self.snapshot.entries[os.fsencode(change.path)]), change.size)

    def _read(self, pieces: Iterator[bytes], size: int) -> bytes:
        """Return a content; of a binary file only the first piece."""
        if size > MOST_FILE_BYTES:
            head = next(pieces, b"")
            self.left_to_read -= len(head)
            if b"\0" in head[:LOOKED_AT_BYTES]:
                return head
            raise _TooLong
        content: list[bytes] = []
        total = 0
        for piece in pieces:
            content.append(piece)
            total += len(piece)
            self.left_to_read -= len(piece)
            if b"\0" in content[0][:LOOKED_AT_BYTES]:
                break
            if total > MOST_FILE_BYTES:
                raise _TooLong
        return b"".join(content)


def section_head(change: Change) -> str:
    """Return the line with which the diff of a change begins."""
    return f"diff --git {_name('a/', change.old_path or change.path)} {_name('b/', change.path)}\n"


def _head(change: Change) -> Iterator[str]:
    """Yield the header of a change that leaves the content unchanged."""
    if change.what == "renamed" or (change.kind == "file" and (change.mode ^ change.old_mode) & 0o100):
        yield section_head(change)
        old_mode, new_mode = _mode("file", change.old_mode), _mode("file", change.mode)
        if old_mode != new_mode:
            yield f"old mode {old_mode}\nnew mode {new_mode}\n"
    if change.what == "renamed":
        yield "similarity index 100%\n"
        yield f"rename from {_name('', change.old_path)}\nrename to {_name('', change.path)}\n"


def _permissions(change: Change) -> Iterator[str]:
    """Yield a line for permissions that git cannot express."""
    if change.kind == "link" or change.what == "removed":
        return
    if change.what == "added" or change.old_kind:
        if change.mode not in GIT_MODES:
            yield f"Permissions of {_name('b/', change.path)}: {change.mode:o}\n"
    elif change.mode != change.old_mode and (change.kind == "directory" or {change.mode, change.old_mode} - GIT_MODES):
        yield f"Permissions of {_name('b/', change.path)}: {change.old_mode:o} to {change.mode:o}\n"


def _note(change: Change, *, has_old: bool, has_new: bool, label: str) -> str:
    old = _name("a/", change.path) if has_old else "/dev/null"
    new = _name("b/", change.path) if has_new else "/dev/null"
    sizes = [f"{size} bytes" for size, is_there in ((change.old_size, has_old), (change.size, has_new)) if is_there]
    return f"{label} {old} and {new} differ ({', '.join(sizes)})\n"


def _mode(kind: str, mode: int) -> str:
    return LINK_MODE if kind == "link" else "100755" if mode & 0o100 else "100644"


def as_text(content: bytes) -> str | None:
    """Return UTF-8 text; None for content that git would treat as binary, or that is not UTF-8."""
    if b"\0" in content[:LOOKED_AT_BYTES]:
        return None
    try:
        return content.decode()
    except UnicodeDecodeError:
        return None


def text_lines(text: str) -> Sequence[str]:
    """Return the lines of a text as git splits them, each with its line feed."""
    *lines, last = text.split("\n")
    return [f"{line}\n" for line in lines] + ([last] if last else [])


def _named_line(prefix: str, path: str) -> str:
    """Return a name for a `---` or `+++` line. Git reads the name up to a tab, so one follows a name with blanks."""
    name = _name(prefix, path)
    return f"{name}\t" if " " in name and not name.startswith('"') else name


def _name(prefix: str, path: str) -> str:
    """Return a name, C-quoted if it has control characters, quotes, backslashes or invalid UTF-8."""
    name = os.fsencode(path)
    try:
        name.decode()
        is_utf8 = True
    except UnicodeDecodeError:
        is_utf8 = False
    if is_utf8 and not any(byte < 32 or byte in (34, 92, 127) for byte in name) and path == path.strip():
        return prefix + path
    quoted = "".join(_ESCAPES.get(byte) or (chr(byte) if 32 <= byte < 127 else f"\\{byte:03o}") for byte in name)
    return f'"{prefix}{quoted}"'
