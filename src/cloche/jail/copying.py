"""Copy a tree of files, by descriptors alone: the names in it are a guest's, and it may have meant them.

Folders, regular files with their holes, links and fifos are copied, with modes and times. Sockets and devices are
left out, and of what is mounted there only the mount point is made. The target is a file system with a size, which
bounds it all.
"""

from __future__ import annotations

import posix

FOLDER = posix.O_RDONLY | posix.O_DIRECTORY | posix.O_NOFOLLOW | posix.O_CLOEXEC
FILE = posix.O_RDONLY | posix.O_NOFOLLOW | posix.O_CLOEXEC | posix.O_NONBLOCK
NEW_FILE = posix.O_WRONLY | posix.O_CREAT | posix.O_EXCL | posix.O_NOFOLLOW | posix.O_CLOEXEC
KIND, DIRECTORY, REGULAR, LINK, FIFO = 0o170000, 0o040000, 0o100000, 0o120000, 0o010000
MODES = 0o7777
MAX_DEPTH, ELOOP, ENXIO = 200, 40, 6
CHUNK_BYTES = 1 << 24
SEEK_DATA, SEEK_HOLE = 3, 4


def copy_tree(source: int, target: int, depth: int = 0) -> None:
    """Copy everything below folder `source` into the empty folder `target`. Raises OSError."""
    device = posix.fstat(source).st_dev
    if depth > MAX_DEPTH:
        raise OSError(ELOOP, f"folders are nested more than {MAX_DEPTH} deep")
    for name in posix.listdir(source):
        state = posix.stat(name, dir_fd=source, follow_symlinks=False)
        kind = state.st_mode & KIND
        if state.st_dev != device:  # mounted
            if kind == DIRECTORY:
                posix.mkdir(name, 0o755, dir_fd=target)
            else:
                posix.close(posix.open(name, NEW_FILE, 0o600, dir_fd=target))
            continue
        if kind == DIRECTORY:
            _copy_folder(name, source, target, depth)
        elif kind == REGULAR:
            _copy_file(name, source, target)
        elif kind == LINK:
            posix.symlink(posix.readlink(name, dir_fd=source), name, dir_fd=target)
            continue
        elif kind == FIFO:
            posix.mkfifo(name, 0o600, dir_fd=target)
        else:
            continue
        posix.chmod(name, state.st_mode & MODES, dir_fd=target)
        posix.utime(name, ns=(state.st_atime_ns, state.st_mtime_ns), dir_fd=target, follow_symlinks=False)


def _copy_folder(name: str, source: int, target: int, depth: int) -> None:
    posix.mkdir(name, 0o700, dir_fd=target)
    ours = theirs = -1
    try:
        ours, theirs = posix.open(name, FOLDER, dir_fd=source), posix.open(name, FOLDER, dir_fd=target)
        copy_tree(ours, theirs, depth + 1)
    finally:
        _close(ours, theirs)


def _copy_file(name: str, source: int, target: int) -> None:
    ours = theirs = -1
    try:
        ours, theirs = posix.open(name, FILE, dir_fd=source), posix.open(name, NEW_FILE, 0o600, dir_fd=target)
        size = posix.fstat(ours).st_size
        posix.ftruncate(theirs, size)
        at = 0
        while at < size:
            try:
                at = posix.lseek(ours, at, SEEK_DATA)
            except OSError as error:
                if error.errno == ENXIO:  # nothing but a hole is left
                    return
                raise
            end = posix.lseek(ours, at, SEEK_HOLE)
            posix.lseek(theirs, at, 0)
            while at < end:
                sent = posix.sendfile(theirs, ours, at, min(CHUNK_BYTES, end - at))
                if sent == 0:
                    return
                at += sent
    finally:
        _close(ours, theirs)


def _close(*fds: int) -> None:
    for fd in fds:
        if fd >= 0:
            posix.close(fd)
