"""Show the host's current files again in the views of its folders, while all other processes are stopped.

Theory of operation: overlayfs keeps the names that it has looked up, and a file that was written to inside is the upper
layer's for good. So a file that the host replaces, removes or adds may be unknown inside, and one that it changes stays
as it was written inside. Remounting makes the kernel forget every name that no process uses. Before that, files of the
upper layer that equal the host's, as the caller has found, are removed from it, unless they have changed since. A file
that a process uses stays: the process would continue with one that has no name. So does all below a folder that shows
nothing of the host's, if a process uses that: it would continue without the files.
"""

from __future__ import annotations

import posix
import stat

from .syscalls import MS_BIND, MS_NODEV, MS_NOEXEC, MS_NOSUID, MS_RDONLY, MS_REMOUNT, call

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

CHANGES = b"/.cloche-changes"  # where the upper layer is shown
OPAQUE = "user.overlay.opaque"
FOLDER = posix.O_RDONLY | posix.O_DIRECTORY | posix.O_NOFOLLOW | posix.O_CLOEXEC
SHOWN = MS_REMOUNT | MS_BIND | MS_NOSUID | MS_NODEV | MS_NOEXEC  # of that mount
ESCAPES = ((b"\\040", b" "), (b"\\011", b"\t"), (b"\\012", b"\n"), (b"\\134", b"\\"))  # of proc(5)
DELETED = b" (deleted)"
MOST_NAMES = 100_000  # of files that processes use: all others stand still meanwhile


def refresh(at: bytes, paths: Sequence[bytes], apart: Sequence[bytes], before_ns: int, pids: Sequence[int]) -> int:
    """Remove paths from the upper layer of the folder at `at`, and remount; return how many were kept.

    `apart` are folders of the upper layer that show nothing of the host's; from now on they do. Files that have
    changed at `before_ns` or later are kept. Raises OSError.
    """
    kept = 0
    if paths:
        used = _used(at, pids)
        hidden = [folder + b"/" for folder in apart if used is None or folder in used]
        gone = [path for path in paths if not (used is None or path in used or path.startswith(tuple(hidden)))]
        kept = len(paths) - _remove(gone, [folder for folder in apart if folder + b"/" not in hidden], before_ns)
    for target, is_read_only in _views():
        flags = MS_REMOUNT | MS_NOSUID | MS_NODEV | (MS_RDONLY if is_read_only else 0)
        call("mount", b"none", target, b"", flags, None)
    return kept


def _used(at: bytes, pids: Sequence[int]) -> set[bytes] | None:
    """Return the paths below a folder that processes use, and the folders above them; None if that is unknown."""
    used: set[bytes] = set()
    left_to_read = MOST_NAMES
    try:
        for pid in pids:
            for name in _names_of(pid):
                left_to_read -= 1
                if left_to_read < 0:
                    return None
                left = name.removesuffix(DELETED).removeprefix(at + b"/")
                while left and not left.startswith(b"/"):
                    used.add(left)
                    left = left.rpartition(b"/")[0]
    except PermissionError:  # of a program that may not be read
        return None
    return used


def _names_of(pid: int) -> Iterator[bytes]:
    """Yield the paths that a process has open, mapped, or as its working directory. Raises PermissionError."""
    try:
        for task in posix.listdir(f"/proc/{pid}/task"):
            folder = f"/proc/{pid}/task/{task}"
            yield posix.readlink(f"{folder}/cwd".encode())
            for fd in posix.listdir(f"{folder}/fd"):
                try:
                    yield posix.readlink(f"{folder}/fd/{fd}".encode())
                except FileNotFoundError:
                    continue
        with open(f"/proc/{pid}/maps", "rb") as file:
            for line in file:
                yield b"/" + line.rstrip(b"\n").partition(b" /")[2]
    except (FileNotFoundError, ProcessLookupError):
        return  # it has ended


def _remove(paths: Sequence[bytes], apart: Sequence[bytes], before_ns: int) -> int:
    """Remove what has not changed, the deepest first; return how many paths are gone."""
    upper = posix.open(CHANGES, FOLDER)
    call("mount", b"none", CHANGES, b"", SHOWN, None)  # for writing, while nothing else runs
    try:
        unchanged = [path for path in paths if _is_unchanged(upper, path, before_ns)]
        gone = sum(_is_removed(upper, path) for path in sorted(unchanged, reverse=True))
        for folder in apart:
            _show_below(upper, folder)
        return gone
    finally:
        call("mount", b"none", CHANGES, b"", SHOWN | MS_RDONLY, None)
        posix.close(upper)


def _is_unchanged(upper: int, path: bytes, before_ns: int) -> bool:
    """Return whether a path of the upper layer is as it was; a file with another name is left alone."""
    parent = _open(upper, path.rpartition(b"/")[0])
    if parent is None:
        return False
    try:
        state = posix.stat(path.rpartition(b"/")[2], dir_fd=parent, follow_symlinks=False)
    except OSError:
        return False
    finally:
        posix.close(parent)
    return state.st_ctime_ns < before_ns and (state.st_nlink == 1 or not stat.S_ISREG(state.st_mode))


def _is_removed(upper: int, path: bytes) -> bool:
    """Remove a path, and return whether that was possible: a folder is kept while it is not empty."""
    parent = _open(upper, path.rpartition(b"/")[0])
    if parent is None:
        return False
    name = path.rpartition(b"/")[2]
    try:
        if stat.S_ISDIR(posix.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
            posix.rmdir(name, dir_fd=parent)
        else:
            posix.unlink(name, dir_fd=parent)
    except OSError:
        return False
    finally:
        posix.close(parent)
    return True


def _show_below(upper: int, path: bytes) -> None:
    """Let a folder of the upper layer show the host's files, too."""
    folder = _open(upper, path)
    if folder is not None:
        try:
            posix.removexattr(folder, OPAQUE)
        except OSError:
            pass  # it did so already
        posix.close(folder)


def _open(upper: int, path: bytes) -> int | None:
    """Open a folder of the upper layer through no link; None if it is not one."""
    fd = posix.open(".", FOLDER, dir_fd=upper)
    for name in filter(None, path.split(b"/")):
        try:
            below = posix.open(name, FOLDER, dir_fd=fd)
        except OSError:
            return None
        finally:
            posix.close(fd)
        fd = below
    return fd


def _views() -> Iterator[tuple[bytes, bool]]:
    """Yield where the views are mounted, and whether each is read-only."""
    with open("/proc/self/mountinfo", "rb") as file:
        for line in file:
            place, _, kind = line.rstrip(b"\n").partition(b" - ")
            if kind.startswith(b"overlay "):
                target = place.split(b" ")[4]
                for escape, byte in ESCAPES:
                    target = target.replace(escape, byte)
                yield target, b"ro" in kind.split(b" ")[-1].split(b",")
