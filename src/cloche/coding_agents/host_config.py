"""Change the configuration of an agent on the host: as a difference that the user sees first, and can be undone.

What a file was before is kept in Cloche's state, so that undoing restores it to the byte, as long as nobody has changed
it since; else only what Cloche has added is taken out. Files of a project may be anything: none is reached through a
link that leads out of it.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence

from cloche import hostfs
from cloche.core.errors import InvalidRequest
from cloche.core.escape import escape, escape_name
from cloche.core.record import dataclass

from .places import agents_folder

MOST_BYTES = 4 << 20
RECORDS, MOST_RECORD_BYTES = "host-files.json", 32 << 20

Change = Callable[[str, str], str]  # of a file's text, "" for none; and its path, for errors


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEdit:
    """Hold a file's text before and after; None is no file."""

    path: str
    before: str | None
    after: str | None


def edited(path: str, change: Change, *, below: str = "") -> FileEdit:
    """Return what a change makes of a file; an empty result is no file. Raises InvalidRequest.

    With `below` the file is one of a project, and must lie in that folder.
    """
    real = os.path.realpath(path)
    if below and not real.startswith(f"{os.path.realpath(below)}/"):
        raise InvalidRequest(f"{escape_name(path)}: leads out of the project, to {escape_name(real)}; remove that link")
    before = _read(real)
    after = change(before or "", escape_name(path))
    return FileEdit(path=real, before=before, after=after if after.strip() else None)


def undone(path: str, change: Change, *, below: str = "") -> FileEdit:
    """Return the edit that takes out what Cloche has written: the former text, else what `change` leaves."""
    edit = edited(path, change, below=below)
    record = _records().get(edit.path)
    if record is not None and edit.before is not None and record["after"] == _hash(edit.before):
        return FileEdit(path=edit.path, before=edit.before, after=record["before"])
    return edit


def differences(edits: Iterable[FileEdit]) -> Iterator[str]:
    """Yield the lines of unified diffs, for a terminal."""
    for edit in edits:
        before, after = ((text or "").splitlines() for text in (edit.before, edit.after))
        names = ("/dev/null" if edit.before is None else edit.path, "/dev/null" if edit.after is None else edit.path)
        yield from map(escape, difflib.unified_diff(before, after, *names, lineterm=""))


def write(edits: Sequence[FileEdit], *, is_undo: bool = False) -> None:
    """Write the files. Raises InvalidRequest if one has changed since it was read, OSError."""
    records = _records()
    for edit in edits:
        if _read(edit.path) != edit.before:
            raise InvalidRequest(
                f"{escape_name(edit.path)}: has changed meanwhile; nothing more was written; try again"
            )
        if is_undo:
            records.pop(edit.path, None)
        else:
            former = records.get(edit.path)
            is_ours = former is not None and edit.before is not None and former["after"] == _hash(edit.before)
            before = former["before"] if former is not None and is_ours else edit.before
            records[edit.path] = {"before": before, "after": _hash(edit.after or "")}
        _keep(records)
        _write(edit)


def _write(edit: FileEdit) -> None:
    if edit.after is None:
        os.unlink(edit.path)
        return
    os.makedirs(os.path.dirname(edit.path), mode=0o700, exist_ok=True)
    folder = hostfs.open_folder(os.path.dirname(edit.path))
    try:
        state = hostfs.look(os.path.basename(edit.path), folder)
        mode = stat.S_IMODE(state.st_mode) if state is not None else 0o600
        data = edit.after.encode("utf-8", "surrogateescape")
        hostfs.replace(folder, os.path.basename(edit.path), data, mode=mode, permissions=mode)
    finally:
        os.close(folder)


def _read(path: str, most_bytes: int = MOST_BYTES) -> str | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InvalidRequest(f"{escape_name(path)}: cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise InvalidRequest(f"{escape_name(path)}: is no regular file")
    with open(fd, "rb") as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise InvalidRequest(f"{escape_name(path)}: has more than {most_bytes} bytes; is it the right file?")
    return data.decode("utf-8", "surrogateescape")


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def _records() -> dict[str, dict[str, str | None]]:
    text = _read(f"{agents_folder()}/{RECORDS}", MOST_RECORD_BYTES)
    try:
        records: dict[str, dict[str, str | None]] = json.loads(text or "{}")
    except ValueError:
        return {}
    return records


def _keep(records: dict[str, dict[str, str | None]]) -> None:
    os.makedirs(agents_folder(), mode=0o700, exist_ok=True)
    folder = hostfs.open_folder(agents_folder())
    try:
        hostfs.replace(folder, RECORDS, json.dumps(records).encode(), mode=0o600, permissions=0o600)
    finally:
        os.close(folder)
