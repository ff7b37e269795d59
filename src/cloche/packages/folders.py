"""Folders of the store, and their locks. Every live sandbox needs them, so this module imports little.

A lock is `flock` on the folder itself. A folder without a lock below `making` or `growing` was left by a process that
was killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat

from cloche.core.errors import BackendUnavailable
from cloche.hostfs import may_search_all, own_folder

PARTS = ("site", "bin", "data")  # of a layer: what is imported, what is on PATH, and the rest
MODULES = "node_modules"  # of a layer of npm's, beside its "bin"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def default_folder() -> str:
    """Return the folder of the store in this user's data. Raises BackendUnavailable if it cannot be determined."""
    data_folder = own_folder("XDG_DATA_HOME", ".local/share")
    if data_folder is None:
        from platformdirs import user_data_dir

        data_folder = user_data_dir("cloche", appauthor=False)
    return os.path.join(data_folder, "packages")


def agents_store() -> str:
    """Return the folder of the installed coding agents, a store beside that of packages. Raises BackendUnavailable."""
    return os.path.join(os.path.dirname(default_folder()), "agents")


def made_folder(store: str, name: str) -> str:
    """Return a folder of the store, made where it is not there. Raises BackendUnavailable where it is not ours."""
    folder = os.path.join(store, name)
    # The guests of a plain container's root are other users, and it cannot let them in but by the mode.
    mode = 0o711 if os.geteuid() == 0 and not may_search_all() else 0o700
    try:
        os.makedirs(os.path.dirname(store), exist_ok=True)
        for path in (store, folder):
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, mode)
            if mode & ~os.stat(path).st_mode:
                os.chmod(path, mode)
    except OSError as error:
        raise BackendUnavailable(
            f"packages: cannot make {folder}: {error.strerror}.", remedy="Set XDG_DATA_HOME to a folder of yours."
        ) from error
    if not is_own(store):
        raise BackendUnavailable(
            f"packages: {store} is writable by another user.",
            remedy="Make this user its only writer (chown, chmod go-w), or set XDG_DATA_HOME.",
        )
    return folder


def is_own(store: str) -> bool:
    """Tell whether only this user can write to the store."""
    try:
        facts = os.stat(store)
    except OSError:
        return False
    return facts.st_uid == os.geteuid() and not stat.S_IMODE(facts.st_mode) & 0o022


def make_shown(folder: str) -> None:
    """Make a folder that any guest can read, for every umask: the guest may be another user."""
    os.mkdir(folder)
    os.chmod(folder, 0o755)  # noqa: S103 - what is above it is this user's alone


class Growing:
    """Hold a new empty folder of one live sandbox; layers can be added to it.

    It is shared with the keeper of a sandbox that has one. Raises BackendUnavailable and OSError.
    """

    def __init__(self, store: str) -> None:
        sweep(store)
        fd = None
        while fd is None:  # else somebody's sweep came before our lock
            self.folder = os.path.join(made_folder(store, "growing"), new_name())
            make_shown(self.folder)
            fd = lock_folder(self.folder, fcntl.LOCK_SH)
        self._fd = fd
        for name in PARTS:
            make_shown(os.path.join(self.folder, name))

    def close(self) -> None:
        """Release it, and remove it unless another process holds it."""
        os.close(self._fd)
        remove_unheld(self.folder)


def sweep(store: str) -> list[str]:
    """Remove the folders of killed processes, and return the paths."""
    folders = [os.path.join(store, kind) for kind in ("making", "growing")]
    paths = [os.path.join(folder, name) for folder in folders for name in names_in(folder)]
    return [path for path in paths if remove_unheld(path)]


def lock_folder(folder: str, how: int) -> int | None:
    """Return a descriptor that holds the lock of a folder; None where it is gone, or others hold it."""
    try:
        fd = os.open(folder, _FOLDER)
    except OSError:
        return None
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
        if os.fstat(fd).st_nlink and os.path.samestat(os.fstat(fd), os.stat(folder)):
            return fd
    except OSError:
        pass
    os.close(fd)
    return None


def remove_unheld(folder: str) -> bool:
    """Remove a folder without a lock, and tell whether it was removed."""
    fd = lock_folder(folder, fcntl.LOCK_EX)
    if fd is None:
        return False
    try:
        remove_tree(folder)
    finally:
        os.close(fd)
    return True


def remove_tree(folder: str) -> None:
    """Remove a folder of the store whose folders are read-only; a missing one is no error."""
    for path, _, _ in os.walk(folder):
        with contextlib.suppress(OSError):
            os.chmod(path, 0o700)
    import shutil

    shutil.rmtree(folder, ignore_errors=True)


def new_name() -> str:
    """Return a name that nothing has."""
    return os.urandom(6).hex()


def names_in(folder: str) -> list[str]:
    """Return the names in a folder; none where there is no such folder."""
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []
