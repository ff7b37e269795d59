"""Folder trees: walked, made, removed, and copied to another file system.

Other processes may change them meanwhile: an entry that has gone, or a folder that cannot be read, is left out and
counted.
"""

from __future__ import annotations

import errno
import os
import stat

from .content import FOLDER, OPEN, Refusal, beside, failure, not_regular, pass_on

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

MOST_DEPTH = 64  # of folders below the one that is walked
PASSED_OVER = (errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)


class Walk:
    """Yield each entry below a folder with its name from there: parents first, in the order of names, `most` of them.

    Through no link. `skipped` counts the folders that were not looked into.
    """

    def __init__(self, top: str, *, max_entries: int, depth: int = MOST_DEPTH):
        self.top, self.left, self.depth = top, max_entries, depth
        self.skipped = 0

    def __iter__(self) -> Iterator[tuple[str, os.DirEntry[str]]]:
        top = os.open(self.top, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        return self._below("", self.depth, top)

    def _below(self, prefix: str, depth: int, folder: int) -> Iterator[tuple[str, os.DirEntry[str]]]:
        """Yield what is in an open folder, and below it; close it."""
        try:
            for entry in self._entries(folder):
                name = prefix + entry.name
                yield name, entry
                if not entry.is_dir(follow_symlinks=False):
                    continue
                if depth > 1:
                    try:
                        yield from self._below(f"{name}/", depth - 1, os.open(entry.name, FOLDER, dir_fd=folder))
                    except OSError as error:
                        if error.errno not in PASSED_OVER:
                            raise
                        self.skipped += 1
                elif self.depth > 1:
                    self.skipped += 1
        finally:
            os.close(folder)

    def _entries(self, folder: int) -> list[os.DirEntry[str]]:
        listed = []
        with os.scandir(folder) as entries:
            for entry in entries:
                self.left -= 1
                if self.left < 0:
                    raise Refusal("too_large", "it has more entries than the requested maximum", self.top)
                listed.append(entry)
        listed.sort(key=lambda entry: entry.name)
        return listed


def make_folders(path: str) -> list[str]:
    """Make a folder, with those above it, and return the made ones. A folder that is there, or a link to one, is no
    error.
    """
    missing: list[str] = []
    made: list[str] = []
    while True:
        try:
            os.mkdir(path)
            made.append(path)
            break
        except FileNotFoundError:
            missing.append(path)
            path = os.path.dirname(path.rstrip("/"))
            if not path:
                raise
        except FileExistsError:
            if not os.path.isdir(path):
                raise failure(errno.ENOTDIR, path) from None
            break
    for folder in reversed(missing):
        try:
            os.mkdir(folder)
            made.append(folder)
        except FileExistsError:
            pass  # another process has made it meanwhile, or its name ends with a dot
    return made


def remove_tree(path: str) -> None:
    """Remove a folder with all that is in it, however deep, through no link. Changes this process's own folder."""
    try:
        os.rmdir(path)
        return
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    levels = [_Emptied(path)]
    try:
        while levels[-1].folders or len(levels) > 1:
            if levels[-1].folders:
                levels.append(_Emptied(levels[-1].folders[-1]))
                continue
            levels.pop()
            os.chdir("..")
            if levels[-1].identity != _identity("."):
                raise OSError(errno.EBUSY, "a folder was moved away while its content was removed")
            os.rmdir(levels[-1].folders.pop())
    except OSError as error:
        names = [level.folders[-1] for level in levels if level.folders]
        raise OSError(error.errno, error.strerror, "/".join([path, *names])) from error
    os.rmdir(path)


class _Emptied:
    """Enter a folder, and remove its entries but folders, whose names are kept."""

    def __init__(self, path: str):
        fd = os.open(path, FOLDER)
        try:
            os.fchdir(fd)
        finally:
            os.close(fd)
        self.identity = _identity(".")
        self.folders: list[str] = []
        with os.scandir(".") as entries:
            for entry in list(entries):
                if entry.is_dir(follow_symlinks=False):
                    self.folders.append(entry.name)
                    continue
                try:
                    os.unlink(entry.name)
                except FileNotFoundError:
                    pass  # another process has removed it


def _identity(path: str) -> tuple[int, int]:
    state = os.stat(path)
    return state.st_dev, state.st_ino


def move_across(path: str, target: str, max_entries: int) -> None:
    """Move to another file system: copy beside the target, rename, and remove the originals.

    Nothing is copied if it could not be removed.
    """
    _check_removable(os.path.dirname(path.rstrip("/")) or "/")
    copied = beside(os.path.dirname(target.rstrip("/")))
    try:
        _copy_tree(path, copied, max_entries)
        os.rename(copied, target)
    except BaseException:
        remove(copied)
        raise
    remove(path)


def _check_removable(folder: str) -> None:
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK, effective_ids=True):
        raise failure(errno.EACCES, folder)


def remove(path: str) -> None:
    """Remove a path, of any kind, if it exists."""
    try:
        if stat.S_ISDIR(os.lstat(path).st_mode):
            remove_tree(path)
        else:
            os.unlink(path)
    except FileNotFoundError:
        pass


def _copy_tree(path: str, target: str, max_entries: int) -> None:
    _copy(path, target)
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        return
    made_folders = [("", os.lstat(path))]
    walk = Walk(path, max_entries=max_entries)
    for name, entry in walk:
        _copy(f"{path}/{name}", f"{target}/{name}")
        if entry.is_dir(follow_symlinks=False):
            made_folders.append((f"/{name}", entry.stat(follow_symlinks=False)))
    if walk.skipped:
        raise Refusal("too_large", "there are folders in it that are too deep to be copied", path)
    for name, state in reversed(made_folders):
        os.chmod(target + name, stat.S_IMODE(state.st_mode))
        os.utime(target + name, ns=(state.st_atime_ns, state.st_mtime_ns))


def _copy(path: str, target: str) -> None:
    state = os.lstat(path)
    kind = stat.S_IFMT(state.st_mode)
    if kind == stat.S_IFLNK:
        os.symlink(os.readlink(path), target)
    elif kind == stat.S_IFDIR:
        _check_removable(path)
        os.mkdir(target, 0o700)
    elif kind == stat.S_IFIFO:
        os.mkfifo(target, stat.S_IMODE(state.st_mode))
    elif kind == stat.S_IFREG:
        _copy_file(path, target, state)
    else:
        raise not_regular(path)


def _copy_file(path: str, target: str, state: os.stat_result) -> None:
    source = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | OPEN)
    try:
        target_fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            pass_on(source, target_fd)
            os.fchmod(target_fd, stat.S_IMODE(state.st_mode))
            os.utime(target_fd, ns=(state.st_atime_ns, state.st_mtime_ns))
        finally:
            os.close(target_fd)
    finally:
        os.close(source)
