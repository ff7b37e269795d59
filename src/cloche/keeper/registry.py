"""The names of kept sandboxes, in a private folder: locks, sockets, and their descriptions.

Theory of operation: a name belongs to the process that holds the lock (flock(2)) of `NAME.lock`. A caller locks an open
file and passes its descriptor to the keeper. The kernel releases the lock when the keeper ends for any reason. Beside
it are `NAME.sock`, where the keeper listens, and `NAME.json`. A process holds the folder's lock while it creates or
removes files. The keeper removes its own files while it holds the name, the lock's file last.

The folder is opened once, without following a link, and refused unless it belongs to this user and no one else can
access it. Sockets are reached through its descriptor. A name is unique for a user, so every candidate folder is
searched.
"""

from __future__ import annotations

import _socket
import fcntl
import os
import stat
from contextlib import contextmanager, suppress

from cloche import hostfs
from cloche.core.errors import BackendUnavailable, InvalidRequest
from cloche.core.record import dataclass, field

from . import plain_json

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator, Mapping
    from typing import Any

SYSTEM = "/run/cloche"  # where root makes a folder for each user
SOCKET, ENTRY, LOCK = ".sock", ".json", ".lock"
MOST_NAMES = 4096
KEEPER = b"\nkeeper.process.main("  # in the command line of one, see `jail.setup.launch`
MOST_ENTRY_BYTES = 1 << 18
BACKLOG = 64
SPARE = "_spare-"  # how the names of spare sandboxes begin, which callers can neither give nor list
MOST_CHARS, _FIRST = 63, "abcdefghijklmnopqrstuvwxyz0123456789"
_OTHERS, _OTHERS_WRITE = 0o077, 0o022


def is_name(name: object) -> bool:
    """Tell whether a name is valid."""
    return isinstance(name, str) and 0 < len(name) <= MOST_CHARS and name[0] != "-" and not name.strip(f"{_FIRST}-")


def _is_stem(name: object) -> bool:
    """Tell whether a name may have files: a caller's, or that of a spare sandbox."""
    return isinstance(name, str) and is_name(name.removeprefix(SPARE))


def check_name(name: object) -> str:
    """Return a valid name. Raises InvalidRequest."""
    if not isinstance(name, str) or not is_name(name):
        raise InvalidRequest(
            f"name: {name!r} is not valid; use 1 to 63 of a-z, 0-9 and -, and begin with a letter or a digit"
        )
    return name


def _check_stem(name: object) -> None:
    if not _is_stem(name):
        check_name(name)


def boot_id() -> str:
    """Return the host's boot id, empty if unknown."""
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimed:
    """Hold a claimed name: the descriptors of its folder and lock, and the future listening socket.

    Without a socket, the keeper of a spare sandbox replaces the lock with its own.
    """

    name: str
    folder: int
    lock: int
    listening: socket.socket | None

    def describe(self, entry: Mapping[str, Any]) -> None:
        """Write the sandbox's description for attaching. Raises OSError."""
        hostfs.replace(self.folder, self.name + ENTRY, plain_json.write(entry), mode=0o600, permissions=0o600)

    def release(self) -> None:
        """Close these descriptors. The keeper's copies still hold the name."""
        if self.listening is not None:
            self.listening.close()
        os.close(self.lock)
        os.close(self.folder)

    def give_up(self) -> None:
        """Release the name, since no sandbox was opened."""
        lock_status = hostfs.look(self.name + LOCK, self.folder)
        if lock_status is not None and os.path.samestat(lock_status, os.fstat(self.lock)):
            for suffix in (SOCKET, ENTRY, LOCK):
                _unlink(self.name + suffix, self.folder)
        self.release()


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Hold a name in use: its folder and description, which is empty while the sandbox is created or ended."""

    name: str
    path: str
    entry: Mapping[str, Any] = field(default_factory=dict)

    def connect(self) -> socket.socket:
        """Return a connection to its keeper, whose user must be this one. Raises OSError."""
        import socket

        return socket.socket(fileno=self.reach().detach())

    def reach(self) -> _socket.socket:
        """Return the connection as `connect` does, without importing `socket`."""
        folder = _open(self.path)
        link = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
        try:
            link.connect(_through(folder, self.name + SOCKET))
            uid = int.from_bytes(link.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, 12)[4:8], "little")
            if uid != os.geteuid():
                raise PermissionError(f"{self.path}/{self.name}{SOCKET} is served by user {uid}")
        except BaseException:
            link.close()
            raise
        finally:
            os.close(folder)
        return link


def claim(name: str, *, listens: bool = True) -> Claimed:
    """Claim a name. Raises InvalidRequest if it is in use, BackendUnavailable without a usable folder.

    One that does not listen is for the keeper of a spare sandbox.
    """
    _check_stem(name)
    for path in places():
        if is_taken(name, path):
            raise _taken(name)
    folder = _open(make_place())
    try:
        with _locked(folder):
            return _claim_in(folder, name, listens=listens)
    except BaseException:
        os.close(folder)
        raise


def _taken(name: str) -> InvalidRequest:
    return InvalidRequest(
        f"name: a sandbox of yours is called {name!r} already; attach to it, end it (cloche sandbox kill {name}), "
        "or choose another name"
    )


def _claim_in(folder: int, name: str, *, listens: bool) -> Claimed:
    lock = _take_lock(folder, name)
    if lock is None:
        raise _taken(name)
    for suffix in (SOCKET, ENTRY):  # of a keeper that was killed
        _unlink(name + suffix, folder)
    try:
        listening = _listen(folder, name) if listens else None
    except BaseException:
        os.close(lock)
        raise
    return Claimed(name=name, folder=folder, lock=lock, listening=listening)


def _listen(folder: int, name: str) -> socket.socket:
    import socket

    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        os.fchmod(listening.fileno(), 0o600)
        listening.bind(_through(folder, name + SOCKET))
        listening.listen(BACKLOG)
        listening.setblocking(False)
    except BaseException:
        listening.close()
        raise
    return listening


def _take_lock(folder: int, name: str) -> int | None:
    """Return the descriptor of a name's lock, None if another process holds it. The folder's lock must be held."""
    while True:
        try:
            lock, state = hostfs.open_regular(name + LOCK, folder, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise BackendUnavailable(
                f"name: {name}{LOCK} is not a lock file of this user: {error}. Remove what is there."
            ) from error
        try:
            if state.st_uid != os.geteuid():
                raise BackendUnavailable(f"name: {name}{LOCK} is another user's. Remove what is there.")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                return None
            lock_status = hostfs.look(name + LOCK, folder)
            if lock_status is not None and os.path.samestat(lock_status, os.fstat(lock)):
                return lock
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)  # its keeper has just ended, and removed it


def is_taken(name: str, path: str) -> bool:
    """Tell whether a live sandbox has a name in a folder."""
    with _opened(path) as folder, _locked(folder):
        if hostfs.look(name + LOCK, folder) is None:
            return False
        lock = _take_lock(folder, name)
        if lock is None:
            return True
        os.close(lock)
        return False


def find(name: str) -> Found:
    """Return the sandbox with a name. Raises InvalidRequest for an unknown name."""
    _check_stem(name)
    for path in places():
        if is_taken(name, path):
            return _read(name, path)
    raise InvalidRequest(f"name: no sandbox of yours is called {name!r}; cloche sandbox list shows the live ones")


def found() -> list[Found]:
    """Return all live sandboxes, by name; spare ones are left out."""
    rows = [_read(name, path) for path in places() for name in _names(path) if is_name(name) and is_taken(name, path)]
    return sorted(rows, key=lambda row: row.name)


def clear() -> list[str]:
    """Remove the files of keepers that were killed; return the paths."""
    removed = []
    for path in places():
        for name in _names(path):
            with _opened(path) as folder, _locked(folder):
                lock = _take_lock(folder, name)
                if lock is None:
                    continue
                removed_names = [name + suffix for suffix in (SOCKET, ENTRY, LOCK) if _unlink(name + suffix, folder)]
                os.close(lock)
            removed += [f"{path}/{name}" for name in removed_names]
    return removed


def holders(name: str) -> list[int]:
    """Return the pids of the keeper of a name, as far as /proc is readable. Other processes may open its lock, too."""
    entries = []
    for path in places():
        with _opened(path) as folder:
            state = hostfs.look(name + LOCK, folder)
        if state is not None:
            entries += [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _has_open(pid, state)]
    return entries


def _has_open(pid: int, state: os.stat_result) -> bool:
    folder = f"/proc/{pid}/fd"
    with suppress(OSError):
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            if KEEPER not in file.read():
                return False
        for fd in os.listdir(folder):
            with suppress(OSError):
                if os.path.samestat(os.stat(f"{folder}/{fd}"), state):
                    return True
    return False


def _names(path: str) -> list[str]:
    """Return the names with any file in a folder, at most `MOST_NAMES`.

    A name whose lock is not a regular file of this user is left out: no sandbox has it, and none can get it until that
    file is removed.
    """
    with _opened(path) as folder:
        stems = {stem for stem, suffix in map(os.path.splitext, os.listdir(folder)) if suffix in (SOCKET, ENTRY, LOCK)}
        names = sorted(stem for stem in stems if _is_stem(stem))[:MOST_NAMES]
        return [name for name in names if _may_be_lock(hostfs.look(name + LOCK, folder))]


def _may_be_lock(state: os.stat_result | None) -> bool:
    return state is None or (stat.S_ISREG(state.st_mode) and state.st_uid == os.geteuid())


def _read(name: str, path: str) -> Found:
    with _opened(path) as folder, suppress(OSError, ValueError):
        fd, state = hostfs.open_regular(name + ENTRY, folder)
        with open(fd, "rb") as file:
            entry = plain_json.read(file.read(MOST_ENTRY_BYTES + 1)) if state.st_uid == os.geteuid() else None
        if isinstance(entry, dict):
            return Found(name=name, path=path, entry=entry)
    return Found(name=name, path=path)


# Places.


def places() -> list[str]:
    """Return the existing folders for names that belong to this user."""
    return [path for above, name in _candidates() if _is_ours(above) and os.path.lexists(path := f"{above}/{name}")]


def make_place() -> str:
    """Create and return the first usable folder for names. Raises BackendUnavailable."""
    for above, name in _candidates():
        if above == SYSTEM and os.geteuid() == 0:
            with suppress(OSError):
                os.mkdir(SYSTEM, 0o700)
        elif above not in (SYSTEM, os.environ.get("XDG_RUNTIME_DIR")):
            with suppress(OSError):
                os.makedirs(above, mode=0o700, exist_ok=True)
        path = f"{above}/{name}"
        if not _is_ours(above) or (above == SYSTEM and os.geteuid() != 0 and not os.path.isdir(path)):
            continue  # root has made none for us there
        folder = hostfs.open_folder(above, follows_link=True)
        try:
            hostfs.make_folder(name, folder, 0o700)
        finally:
            os.close(folder)
        os.close(_open(path))
        return path
    raise BackendUnavailable(
        "there is no folder for the sockets of sandboxes with a name: XDG_RUNTIME_DIR is not set, and this user has "
        "no private state folder or temporary folder.",
        remedy="Set XDG_RUNTIME_DIR to a folder of yours with mode 0700.",
    )


def _candidates() -> Iterator[tuple[str, str]]:
    """Yield the candidate folders in order: a parent that must exist, and the name inside it."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(runtime):
        yield runtime, "cloche"
    yield SYSTEM, str(os.geteuid())
    state = hostfs.own_folder("XDG_STATE_HOME", ".local/state")
    if state is not None:
        yield state, "run"
    if state is None or not _is_ours(state):  # else there is no need, and finding this one takes longer
        with suppress(BackendUnavailable):
            yield hostfs.own_temporary_folder(), "run"


def _is_ours(path: str) -> bool:
    """Tell whether only this user (or root, in its own folder) can create names in a folder."""
    try:
        state = os.stat(path)
        if os.path.basename(path) == f"cloche-{os.geteuid()}":  # others may have put a link there, or replace it
            state, above = os.lstat(path), os.stat(os.path.dirname(path))
            is_open = above.st_mode & _OTHERS_WRITE and not above.st_mode & stat.S_ISVTX
            if is_open or above.st_uid not in (0, os.geteuid()):
                return False
    except OSError:
        return False
    owners = {os.geteuid(), 0} if path == SYSTEM else {os.geteuid()}
    return stat.S_ISDIR(state.st_mode) and state.st_uid in owners and not state.st_mode & _OTHERS_WRITE


def _open(path: str) -> int:
    """Return a descriptor of a folder for names. Raises BackendUnavailable unless it is private."""
    try:
        folder = hostfs.open_folder(path)
    except OSError as error:
        raise BackendUnavailable(f"{path} cannot be used: {error.strerror}.", remedy="Remove what is there.") from error
    state = os.fstat(folder)
    if state.st_uid != os.geteuid() or state.st_mode & _OTHERS:
        os.close(folder)
        raise BackendUnavailable(
            f"{path} holds the sockets of sandboxes, and must be yours alone, with mode 0700.",
            remedy="Remove what is there.",
        )
    return folder


@contextmanager
def _opened(path: str) -> Iterator[int]:
    folder = _open(path)
    try:
        yield folder
    finally:
        os.close(folder)


@contextmanager
def _locked(folder: int) -> Iterator[None]:
    """Hold the lock of a folder, which no process holds for longer than a few system calls."""
    held = hostfs.open_folder(".", folder)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)


def _through(folder: int, name: str) -> str:
    """Return a path to a name in an open folder that fits into a socket address."""
    return f"/proc/self/fd/{folder}/{name}"


def _unlink(name: str, folder: int) -> bool:
    try:
        os.unlink(name, dir_fd=folder)
    except OSError:
        return False
    return True
