"""The home folder of a live sandbox that is a folder of the host, shown for writing.

A guest writes there, and the next sandbox mounts other folders below it: the project, toolchains. So the mount points
are made outside, before the jail is built and while no guest is there, and no link on the way is followed. For root,
the files belong to an id that nobody else has, and a mount shows them as the guest's own.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress

from cloche.core.changes import HomeFolder
from cloche.core.errors import BackendUnavailable, StartFailed
from cloche.core.escape import escape_name
from cloche.jail.messages import Run, Spec
from cloche.jail.steps import private_register
from cloche.jail.syscalls import MOUNT_ATTR_NODEV, MOUNT_ATTR_NOSUID

from .. import layout
from ..host import Host

_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
MOVED = ".cloche-moved-"  # after the name of what was where a mount point must be, before a random number


def rows(home: HomeFolder | None, host: Host) -> Iterator[layout.Row]:
    """Yield the mount of the folder."""
    if home is not None:
        register = private_register(home.path) if host.owns_ids else ""
        yield ("bind", home.path, home.at.lstrip("/"), MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV, register)


def show(run: Run, spec: Spec, home: HomeFolder, host: Host) -> None:
    """Make the mount points of everything that is shown below, and have root's mount show the guest's id.

    Raises BackendUnavailable without id-mapped mounts, StartFailed if a mount point cannot be made.
    """
    if host.owns_ids:
        if host.idmapped:
            raise BackendUnavailable(f"home: this host does not support id-mapped mounts: {host.idmapped}")
        run.private = [*run.private, home.path]
        run.owners = {**run.owners, home.path: home.owner}
    targets = [f"/{row[2]}" for row in spec.mounts if row[0] == "overlay"]
    files = {path for path in run.binds if not os.path.isdir(path)}
    for target in (*targets, *run.binds):
        if layout.is_below(target, home.at) and target != home.at:
            try:
                _make_mount_point(home, target[len(home.at) + 1 :].split("/"), is_file=target in files)
            except OSError as error:
                raise StartFailed(
                    f"home: {escape_name(target)} cannot be made below {escape_name(home.path)}: {error.strerror}",
                    step="home",
                ) from error


def _make_mount_point(home: HomeFolder, names: Sequence[str], *, is_file: bool) -> None:
    fd = os.open(home.path, _FOLDER)
    try:
        for name in names[:-1] if is_file else names:
            inner = _open_folder(home, fd, name)
            os.close(fd)
            fd = inner
        if is_file and not _is_file(fd, names[-1]):
            _make_way(fd, names[-1])
            os.close(os.open(names[-1], os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644, dir_fd=fd))
    finally:
        os.close(fd)


def _open_folder(home: HomeFolder, parent: int, name: str) -> int:
    """Open a folder, made if it is missing; anything else in its place is renamed."""
    with suppress(OSError):
        return os.open(name, _FOLDER, dir_fd=parent)
    _make_way(parent, name)
    os.mkdir(name, 0o755, dir_fd=parent)
    fd = os.open(name, _FOLDER, dir_fd=parent)
    if os.geteuid() == 0:
        os.chown(name, *home.owner, dir_fd=parent, follow_symlinks=False)
    return fd


def _is_file(parent: int, name: str) -> bool:
    try:
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    except OSError:
        return False
    try:
        return stat.S_ISREG(os.fstat(fd).st_mode)
    finally:
        os.close(fd)


def _make_way(parent: int, name: str) -> None:
    with suppress(FileNotFoundError):
        aside = f"{name[:40]}{MOVED}{os.urandom(8).hex()}"  # which the guest can neither have made nor know
        os.rename(name, aside, src_dir_fd=parent, dst_dir_fd=parent)
