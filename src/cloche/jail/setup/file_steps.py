"""How the input files of a run come to be, compiled to calls: following no link that an earlier run may have left."""

from __future__ import annotations

import os

from ..messages import Run, Spec
from ..steps import AUTHORITY, EACCES, EEXIST, EISDIR, ENOENT, EPERM, EROFS, make
from ..syscalls import AT_FDCWD

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..steps import Call, Step

_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_NOT_REMOVED = (ENOENT, EPERM, EACCES, EISDIR, EROFS)
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def compile_files(spec: Spec, run: Run, *, is_first: bool = False, is_by_guest: bool = False) -> list[Step]:
    """Return the steps that write the input files. Earlier runs may have left links: none is followed.

    If the run `is_first`, in an empty workspace, there is nothing to replace. Steps that are `is_by_guest`, with mask
    0, change no mode.
    """
    folder = _FOLDER & ~os.O_NOFOLLOW
    calls = [make("openat", AT_FDCWD, os.fsencode(spec.workspace), folder, keep="root")]
    if run.leftover:  # unless an earlier guest made something else of it, or locked the folder
        calls.append(make("unlinkat", "root", os.fsencode(run.leftover), 0, excuse=_NOT_REMOVED))
    for path, mode, data in run.files:
        calls += _file("root", path, mode, data, is_new=is_first, is_by_guest=is_by_guest)
    calls.append(make("close", "root"))
    # In a jail, whose /tmp is new, an existing folder is above a shown path of the host.
    excuse = (EEXIST,) if spec.level == "jail" else ()
    calls += [make("mkdirat", AT_FDCWD, os.fsencode(folder), 0o700, excuse=excuse) for folder in run.folders]
    for path, text in run.generated.items():
        calls += [
            make("openat", AT_FDCWD, os.fsencode(path), _NEW_FILE, 0o644, keep="file"),
            make("write", "file", text.encode()),
            make("close", "file"),
        ]
    if run.authority:
        calls.append(make("pwrite64", AUTHORITY, run.authority, len(run.authority), 0))
    return [("files", f"write {len(run.files)} files into {spec.workspace}", calls)]


def _file(root: str, path: str, mode: int, data: bytes, *, is_new: bool, is_by_guest: bool) -> list[Call]:
    """Create or replace a file below the directory in register `root`, making folders, following no link."""
    key = root, path, mode, is_new, is_by_guest
    cached = _files.get(key)
    if cached is None:
        if len(_files) >= MOST_FILES:
            _files.clear()
        cached = _files[key] = _around_content(root, path, mode, is_new=is_new, is_by_guest=is_by_guest)
    before, after = cached
    return [*before, *([make("write", "file", data)] if data else []), *after]


MOST_FILES = 64
_files: dict[tuple[str, str, int, bool, bool], tuple[list[Call], list[Call]]] = {}  # the calls of usual names


def _around_content(
    root: str, path: str, mode: int, *, is_new: bool, is_by_guest: bool
) -> tuple[list[Call], list[Call]]:
    """Return the calls before and after the one that writes the content; a call that fails takes its time."""
    *folders, name = path.split("/")
    parent, calls = root, []
    for depth, folder in enumerate(folders):
        folder_register = f"folder {depth}"
        calls.append(make("mkdirat", parent, os.fsencode(folder), 0o755, excuse=(EEXIST,)))
        calls.append(make("openat", parent, os.fsencode(folder), _FOLDER, 0, keep=folder_register))
        parent = folder_register
    if not is_new:
        calls.append(make("unlinkat", parent, os.fsencode(name), 0, excuse=(ENOENT,)))
    calls.append(make("openat", parent, os.fsencode(name), _NEW_FILE, mode if is_by_guest else 0o600, keep="file"))
    closing = [make("close", f"folder {depth}") for depth in range(len(folders))]
    return calls, [*([] if is_by_guest else [make("fchmod", "file", mode)]), make("close", "file"), *closing]
