"""The folders of the host that replace mounts of /workspace and /tmp, and the remains of a killed helper.

`WorkFolder` makes, measures and removes the folders.

`clear_remains` does the work of a helper that was killed: remove its folders and groups outside of the namespaces. Its
reaper and guest die with it, and a process namespace ends all other processes. Without one, the guest's background
processes are found by its control group; without that as well, they are out of reach.
"""

from __future__ import annotations

import os
import time
from time import monotonic, sleep

from .cgroups import Cgroup
from .syscalls import attempt, call, fresh

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .messages import Spec

CHECK_EVERY = 5
ENAMETOOLONG = 36
BEYOND_MEASURE = 1 << 62
RENEWAL_S = 10.0
MOST_ROUNDS = 200_000  # one removes a level of every tree; more than a disk limit's inodes allow
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
LOCK_SH, LOCK_NB = 1, 4
EAGAIN, ENOENT = 11, 2
MOST_TRIES = 100
STARTUP = "startup"
SPARE = "-spare"  # ending of a folder's name that waits to be used again
# FS_IOC_GETFLAGS, FS_IOC_GETVERSION, FS_IOC_FSGETXATTR: of the last one's answer, what XFS keeps for new files, too
QUESTIONS = (0x80086601, 0x80087601, 0x801C581F)
PASSABLE = 0o711  # a known name below can be opened, and no other user can list them
READABLE = 0o755  # the guest may have an id of its own


class WorkFolder:
    """Make, measure and remove one sandbox's folders. `owner` is the guest's uid when it differs from ours."""

    __slots__ = ("_excused", "_held", "_last", "_new", "_stored", "_tick", "folder", "owner", "tmp", "workspace")

    def __init__(self, folder: str, workspace: str, tmp: str, owner: int | None):
        self.folder, self.workspace, self.tmp, self.owner = folder, workspace, tmp, owner
        self._tick, self._last, self._held = 0, False, -1
        self._stored = self._excused = (0, 0)
        self._new: list[tuple[int, ...]] = []  # the attributes of its folders when they were made

    def create(
        self, modules: str = "", startup: dict[str, str] | None = None, before: WorkFolder | None = None
    ) -> None:
        """Make the folders, readable by the guest alone. An existing folder is an error: it belongs to another sandbox.

        A link to `modules` lies beside them: Node looks in every folder above a program for its packages. So does a
        folder with the files `startup` for interpreters of Python, which the guest can only read: that of the folder
        `before`, if there is one, which is not used any more.
        """
        os.mkdir(self.folder, 0o700)
        for _ in range(MOST_TRIES):
            if self.hold():
                break
            sleep(0.01)  # `cloche gc` has taken it for one that was left, and removes it
            try:
                os.mkdir(self.folder, 0o700)
            except FileExistsError:
                pass
        if self.owner is not None:
            os.chmod(self.folder, PASSABLE)
        for path in (self.workspace, self.tmp):
            self._make(path)
        if modules:
            os.symlink(modules, f"{self.folder}/node_modules")
        if startup and before is not None:
            self.take_startup(before)
        elif startup:
            self._write_startup(startup)

    def take_startup(self, before: WorkFolder) -> None:
        """Take the files `startup` from a folder that is not used any more."""
        os.rename(f"{before.folder}/{STARTUP}", f"{self.folder}/{STARTUP}")

    def _write_startup(self, startup: dict[str, str]) -> None:
        os.mkdir(f"{self.folder}/{STARTUP}")
        os.chmod(f"{self.folder}/{STARTUP}", READABLE)  # whatever the mask is
        for name, text in startup.items():
            with open(f"{self.folder}/{STARTUP}/{name}", "w") as file:
                file.write(text)
                os.fchmod(file.fileno(), 0o644)

    def hold(self) -> bool:
        """Lock the folder until it is removed, so that no other helper takes it for abandoned; False if it has gone.

        Where a file system knows no locks (some of clusters), no helper can take it for abandoned either.
        """
        try:
            held = os.open(self.folder, _DIRECTORY)
        except FileNotFoundError:
            return False
        self._held = held
        try:
            call("flock", held, LOCK_SH | LOCK_NB)
            if os.path.samestat(os.fstat(held), os.lstat(self.folder)):
                return True
        except OSError as error:
            if error.errno not in (EAGAIN, ENOENT):
                return True
        self._let_go()
        return False

    def _let_go(self) -> None:
        if self._held >= 0:
            os.close(self._held)
            self._held = -1

    def _make(self, path: str) -> None:
        os.mkdir(path, 0o700)
        if self.owner is not None:
            os.chown(path, self.owner, self.owner)

    def rename(self, folder: str) -> None:
        """Give it another, unused name. Raises OSError."""
        os.rename(self.folder, folder)
        prefix_length = len(self.folder)
        self.workspace, self.tmp, self.folder = (
            folder + self.workspace[prefix_length:],
            folder + self.tmp[prefix_length:],
            folder,
        )

    @property
    def entries(self) -> int:
        """Return how many files and folders there were when it was looked at last."""
        return self._stored[1]

    def renew_tmp(self) -> None:
        """Empty /tmp between runs: only the workspace lives on. The next run may remove files beyond the limit."""
        self._excused, self._last = self._stored, False
        _remove(self.tmp, monotonic() + RENEWAL_S)
        self._make(self.tmp)

    def excuse(self) -> None:
        """Exempt the present files from the limit: others than their makers will remove them."""
        self._excused, self._last = self._stored, False

    def is_over(self, size_bytes: int, inodes: int, *, is_fresh: bool) -> bool:
        """Tell whether more is stored than allowed; walking costs, so only every few calls look unless `is_fresh`."""
        self._tick += 1
        if is_fresh or self._tick % CHECK_EVERY == 1:
            most_bytes, most_inodes = max(size_bytes, self._excused[0]), max(inodes, self._excused[1])
            self._stored = stored, count = _measure((self.workspace, self.tmp), most_inodes)
            self._last = stored > most_bytes or count > most_inodes
        return self._last

    def note_new(self) -> None:
        """Note what the empty folders are like: the kernel has more to do for new folders than for old ones."""
        self._new = []
        for path in (self.workspace, self.tmp):
            fd = os.open(path, _DIRECTORY)
            self._new.append(_attributes(fd))
            os.close(fd)

    def renew(self, place: str) -> bool:
        """Empty it, and rename it as a spare for the one at `place`; False unless nothing tells it from a new one.

        No process of the run before is left. What a guest can leave at an empty folder is its mode and times, which are
        set, and its flags and size, which must be as they were.
        """
        if not self._new:
            return False
        self._tick, self._last, self._stored, self._excused = 0, False, (0, 0), (0, 0)
        deadline = monotonic() + RENEWAL_S
        for path, attributes in zip((self.workspace, self.tmp), self._new, strict=True):
            fd = _open_unlocked(path)
            try:
                _empty_folder(fd, deadline)
                os.utime(fd)
                if os.listdir(fd) or _attributes(fd) != attributes:  # files may be left where the time was over
                    return False
            finally:
                os.close(fd)
        self.rename(f"{place}{SPARE}")
        return True

    def remove(self) -> None:
        """Remove everything, never following a link."""
        _remove(self.folder)
        self._let_go()


def _measure(roots: tuple[str, ...], max_files: int) -> tuple[int, int]:
    """Return bytes stored and number of files below `roots`, however deep: the guest decides how deep.

    It may move folders about meanwhile, so each is counted once; the count ends above `max_files`. Of each folder its
    own name is kept, not its path: a few of the longest would fill the memory.
    """
    used = count = 0
    folders: list[tuple[int, bytes]] = [(-1, os.fsencode(root)) for root in roots]  # and which one each is in
    pending = list(range(len(folders)))
    visited: set[int] = set()
    while pending and count <= max_files:
        index = pending.pop()
        try:
            with os.scandir(_path_of(folders, index)) as entries:
                for entry in entries:
                    used += _stored_bytes(entry)
                    count += 1
                    if count > max_files:
                        break
                    if entry.is_dir(follow_symlinks=False) and entry.inode() not in visited:
                        visited.add(entry.inode())
                        pending.append(len(folders))
                        folders.append((index, entry.name))
        except OSError as error:
            if error.errno == ENAMETOOLONG:  # it cannot be listed, so it counts as more than any limit
                return BEYOND_MEASURE, count
    return used, count


def _path_of(folders: list[tuple[int, bytes]], index: int) -> bytes:
    names = []
    while index >= 0:
        index, name = folders[index]
        names.append(name)
    return b"/".join(reversed(names))


def _stored_bytes(entry: os.DirEntry[bytes]) -> int:
    try:
        return entry.stat(follow_symlinks=False).st_blocks * 512
    except FileNotFoundError:
        return 0  # it went away while we looked


def _remove(path: str, deadline: float | None = None) -> None:
    """Remove a folder with all that is in it, following no link, in bounded memory and descriptors.

    Raises OSError when the deadline has come first: a live session may fill it faster than it is emptied.

    Where a folder holds folders, these are moved up beside it first: however deep a guest built, nothing here recurses.
    """
    folder_fd = _open_unlocked(path)
    try:
        _empty_folder(folder_fd, deadline)
    finally:
        os.close(folder_fd)
    os.rmdir(path)


def _empty_folder(folder_fd: int, deadline: float | None) -> None:
    for _ in range(MOST_ROUNDS):
        names = os.listdir(folder_fd)
        if not names or (deadline is not None and monotonic() > deadline):
            return
        for name in names:
            _remove_one(name, folder_fd)


def _attributes(folder_fd: int) -> tuple[int, ...]:
    """Return what a process with a folder's id can change at it, except its times; one with entries has more links."""
    state = os.fstat(folder_fd)
    own = (state.st_mode, state.st_uid, state.st_gid, state.st_nlink, state.st_size, state.st_blocks)
    return (*own, *(_answer(folder_fd, question) for question in QUESTIONS))


def _answer(fd: int, question: int) -> int:
    """Return what an ioctl of file systems answers, as a number; -1 where it is not supported."""
    answer = fresh(question >> 16 & 0x3FFF)
    return int.from_bytes(answer, "little") if attempt("ioctl", fd, question, answer) >= 0 else -1


def _remove_one(name: str, folder_fd: int) -> None:
    """Remove an entry of `folder_fd`: a file, or a folder, after moving its own folders up into `folder_fd`."""
    try:
        os.unlink(name, dir_fd=folder_fd)
        return
    except IsADirectoryError:
        child_fd = _open_unlocked(name, folder_fd)
    try:
        for inner in os.listdir(child_fd):
            try:
                os.unlink(inner, dir_fd=child_fd)
            except IsADirectoryError:
                os.close(_open_unlocked(inner, child_fd))  # a folder moves only when its owner may write to it
                os.rename(inner, f"{os.urandom(12).hex()}", src_dir_fd=child_fd, dst_dir_fd=folder_fd)
    finally:
        os.close(child_fd)
    os.rmdir(name, dir_fd=folder_fd)


def open_as_owner(path: str) -> int:
    """Open a folder even if the guest has removed the rights of its owner, which may be our user."""
    try:
        return os.open(path, _DIRECTORY)
    except PermissionError:
        return _open_unlocked(path)


def _open_unlocked(name: str, folder_fd: int | None = None) -> int:
    """Open a folder, and restore its owner's rights, which the guest may have removed. No link is followed."""
    folder = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder_fd)
    try:
        os.chmod(f"/proc/self/fd/{folder}", 0o700)
        return os.open(".", _DIRECTORY, dir_fd=folder)
    finally:
        os.close(folder)


SIGKILL = 9
KILL_TIMEOUT_S = 5.0


def clear_remains(spec: Spec) -> None:
    """Kill the remaining processes in the sandbox's control group, then remove the group and the folders."""
    if spec.cgroup is not None:
        cgroup = Cgroup(spec.cgroup["version"], spec.cgroup["folders"])
        _empty(cgroup)
        cgroup.remove()
    for folder in (spec.folder, f"{spec.folder}{SPARE}") if spec.folder else ():
        try:
            WorkFolder(folder, folder, folder, None).remove()
        except FileNotFoundError:
            pass  # the helper never came to make it


def _empty(cgroup: Cgroup) -> None:
    deadline = time.monotonic() + KILL_TIMEOUT_S
    cgroup.lift_quota()
    while (pids := cgroup.members()) and time.monotonic() < deadline:
        for pid in pids:
            try:
                os.kill(pid, SIGKILL)
            except ProcessLookupError:
                pass  # it ended while we looked
        time.sleep(0.002)
