"""User namespaces: the guest's id outside, and mounts that show files under other ids.

Outside ids: never uid 0, which even without capabilities owns /proc/sys. Root gives each live sandbox its own outside
id from a high range. It is claimed by a lock on one byte of a file that only root can open: no other user of the host
can take an id first, and the kernel releases the lock with the last descriptor that holds it, so nothing can leak. An
ordinary user can give one of their subordinate ids, if they have a range of them (see `subordinate_ids`), else their
own alone.

Id-mapped mounts show files that only root may read as if the sandbox's outside id owned them. The kernel takes the
mapping from a user namespace; a child that does nothing but exist lends us one.
"""

from __future__ import annotations

import posix

from .syscalls import (
    AT_EMPTY_PATH,
    AT_FDCWD,
    AT_RECURSIVE,
    CLONE_NEWUSER,
    MOUNT_ATTR_IDMAP,
    OPEN_TREE_CLOEXEC,
    OPEN_TREE_CLONE,
    PR_SET_DUMPABLE,
    call,
    clone,
    fresh,
    prctl,
    read_uint,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

EPERM, ENOENT, EAGAIN, EACCES, EROFS, EADDRINUSE = 1, 2, 11, 13, 30, 98
# Folders where only root can make names. The second is for containers and services with a read-only /run.
LOCK_FOLDERS = ("/run", "/dev")
FOLDER, FILE = "cloche", "ids"
_NO_LINK = posix.O_NOFOLLOW | posix.O_CLOEXEC
_KIND, _IS_FOLDER, _IS_FILE = 0o170000, 0o040000, 0o100000
_OTHERS_WRITE, _OTHERS = 0o022, 0o077
F_OFD_SETLK, F_WRLCK = 37, 1
UNCHANGED = 0xFFFFFFFF
_CAPABILITIES = (0x20080522).to_bytes(4, "little") + bytes(4)  # version 3, of the calling process
_CAPABILITY_SETS_BYTES = 24
# DAC_OVERRIDE, KILL, SETGID, SETUID, SYS_PTRACE, SYS_ADMIN: root needs them to inspect and end processes in a namespace
# that it does not own.
OVER_OTHERS = 1 << 1 | 1 << 5 | 1 << 6 | 1 << 7 | 1 << 19 | 1 << 21


class Claim:
    """Hold an outside id that no other live sandbox on this host has; `held` is the descriptor that does it."""

    __slots__ = ("held", "outside_id")

    def __init__(self, outside_id: int, held: int):
        self.outside_id, self.held = outside_id, held

    def share(self) -> Claim:
        """Return a hold of the same id that lasts by itself."""
        return Claim(self.outside_id, posix.dup(self.held))

    def forget(self) -> None:
        """Close this process's own descriptor; a forked child must not keep the id claimed."""
        if self.held >= 0:
            posix.close(self.held)
            self.held = -1


def claim_outside_id(first: int, count: int, folders: Sequence[str] = LOCK_FOLDERS) -> Claim:
    """Claim a free id of the range, starting at one that depends on this process's pid.

    Raises OSError when all are in use, or no folder is root's alone.
    """
    start = posix.getpid() * 7919
    held = _open_locks(folders)
    try:
        for offset in range(count):
            outside_id = first + (start + offset) % count
            if _is_locked_by_us(held, outside_id):
                return Claim(outside_id, held)
    except BaseException:
        posix.close(held)
        raise
    posix.close(held)
    raise OSError(EADDRINUSE, f"all {count} outside ids from {first} are in use")


def _is_locked_by_us(held: int, outside_id: int) -> bool:
    """Lock one byte; the lock is the open file's, and so its copies' in other processes, and ends with the last."""
    # Of `struct flock`: kind (from the start of the file), first byte, bytes, nobody's pid.
    fields = (F_WRLCK, outside_id, 1, 0)
    try:
        call("fcntl", held, F_OFD_SETLK, b"".join(value.to_bytes(8, "little") for value in fields))
    except OSError as error:
        if error.errno in (EAGAIN, EACCES):
            return False
        raise
    return True


def _open_locks(folders: Sequence[str]) -> int:
    """Open the file of locks in the first folder that is root's alone. Raises OSError with the obstacle."""
    reasons = []
    for folder in folders:
        try:
            state = _look_at(folder)
            if state.st_uid != posix.geteuid() or state.st_mode & _OTHERS_WRITE:
                reasons.append(f"others may write to {folder}")
                continue
            return _open_in(f"{folder}/{FOLDER}")
        except OSError as error:
            if error.errno not in (EROFS, ENOENT, EACCES):
                raise
            reasons.append(f"{folder}: {error.strerror}")
    raise OSError(EROFS, f"no folder for the locks of outside ids: {', '.join(reasons)}")


def _look_at(folder: str) -> posix.stat_result:
    """Return the state of a folder, made anew if the parent folder is ours: a cache may be removed at any time."""
    try:
        return posix.stat(folder)
    except FileNotFoundError:
        if posix.stat(folder.rpartition("/")[0]).st_uid != posix.geteuid():
            raise
    try:
        posix.mkdir(folder, 0o700)
    except FileExistsError:
        pass
    return posix.stat(folder)


def _open_in(folder: str) -> int:
    """Open the file of locks in a folder, and make both where they are missing. Raises OSError."""
    try:
        posix.mkdir(folder, 0o700)
    except FileExistsError:
        pass
    folder_fd = posix.open(folder, posix.O_RDONLY | posix.O_DIRECTORY | _NO_LINK)
    try:
        _refuse_others(folder_fd, _IS_FOLDER, _OTHERS_WRITE, folder)
        file = posix.open(FILE, posix.O_RDWR | posix.O_CREAT | posix.O_NONBLOCK | _NO_LINK, 0o600, dir_fd=folder_fd)
    finally:
        posix.close(folder_fd)
    try:
        _refuse_others(file, _IS_FILE, _OTHERS, f"{folder}/{FILE}")
    except BaseException:
        posix.close(file)
        raise
    return file


def _refuse_others(fd: int, kind: int, others_bits: int, path: str) -> None:
    """Refuse a file or folder that is not ours alone.

    A user who can write to the folder can put another file there, and one who can open the file can lock it.
    """
    state = posix.fstat(fd)
    if state.st_mode & _KIND != kind or state.st_uid != posix.geteuid() or state.st_mode & others_bits:
        verb = "written to" if kind == _IS_FOLDER else "opened"
        raise OSError(EPERM, f"{path} must belong to root and be {verb} only by root: remove it")


def become_owner(outside_id: int) -> bool:
    """Let the user namespace that this process makes next be owned by `outside_id`, and not by root.

    The kernel charges usage in a user namespace to its owner outside, too: with root as the owner of all, one guest
    could use up the amounts of root's own programs. Files are still opened, and control groups entered, as root: the
    effective id alone decides who owns. `become_root` undoes it, but not in a child that was cloned into it. False
    where root, as in a plain container, has power over others' namespaces by owning them alone.
    """
    held = fresh(_CAPABILITY_SETS_BYTES)
    call("capget", _CAPABILITIES, held)
    if read_uint(held, 0) & OVER_OTHERS != OVER_OTHERS:
        return False
    call("setresuid", UNCHANGED, outside_id, outside_id)
    try:
        call("setfsuid", 0)
        call("capset", _CAPABILITIES, held)  # some hosts let nobody without them make a user namespace
    except BaseException:
        become_root()
        raise
    return True


def become_root() -> None:
    """Undo `become_owner`; the kernel gives the capabilities back by itself."""
    call("setresuid", UNCHANGED, 0, 0)


def become_helper(*, is_owner: bool) -> None:
    """Restore our id from before the reaper was made: the helper lives on, and no other process may inspect it."""
    if is_owner:
        become_root()
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


def write_maps(
    pid: int,
    *,
    inside_id: int,
    outside_uid: int,
    outside_gid: int,
    privileged: bool,
    init_id: int | None = None,
    inside_gid: int | None = None,
) -> None:
    """Map one id of process `pid`'s new user namespace; without privilege only the writer's own id can be mapped.

    `init_id` is the outside id of a second one, 0 inside, which no guest ever has. `inside_gid` is the group where it
    is not the same number.
    """
    if not privileged:
        _write(f"/proc/{pid}/setgroups", "deny")
    second = "" if init_id is None else f"\n0 {init_id} 1"
    group = inside_id if inside_gid is None else inside_gid
    _write(f"/proc/{pid}/gid_map", f"{group} {outside_gid} 1{second}")
    _write(f"/proc/{pid}/uid_map", f"{inside_id} {outside_uid} 1{second}")


def write_range(pid: int, first: int, count: int) -> None:
    """Map the ids 0 to `count` - 1 of process `pid`'s new user namespace to a range of outside ids."""
    for name in ("gid_map", "uid_map"):
        _write(f"/proc/{pid}/{name}", f"0 {first} {count}")


def _write(path: str, text: str) -> None:
    fd = posix.open(path, posix.O_WRONLY | posix.O_CLOEXEC)
    try:
        posix.write(fd, text.encode())
    finally:
        posix.close(fd)


MOUNT_ATTR_BYTES = 32
ROOTS = (0, 0)  # uid and gid


def open_idmapped(
    sources: list[str], outside_id: int, owners: dict[str, tuple[int, int]] | None = None
) -> dict[str, int]:
    """Return a detached mount of each source that shows root's files as those of `outside_id`; needs real root.

    A source in `owners` shows the files of that uid and gid instead; there no mount below is included.
    """
    namespaces: dict[tuple[int, int], int] = {}
    mount_by_source = {}
    try:
        for source in sources:
            owner = (owners or {}).get(source)
            if (owner or ROOTS) not in namespaces:
                namespaces[owner or ROOTS] = mapping_namespace(*(owner or ROOTS), outside_id)
            flags = OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | (AT_RECURSIVE if owner is None else 0)
            fd = call("open_tree", AT_FDCWD, source.encode("utf-8", "surrogateescape"), flags)
            map_ids(fd, namespaces[owner or ROOTS], is_recursive=owner is None)
            mount_by_source[source] = fd
    finally:
        for namespace in namespaces.values():
            posix.close(namespace)
    return mount_by_source


def map_ids(mount: int, namespace: int, *, is_recursive: bool) -> None:
    """Have a detached mount show ids as a user namespace maps them."""
    attr = b"".join(n.to_bytes(8, "little") for n in (MOUNT_ATTR_IDMAP, 0, 0, namespace))
    flags = AT_EMPTY_PATH | (AT_RECURSIVE if is_recursive else 0)
    call("mount_setattr", mount, b"", flags, attr, MOUNT_ATTR_BYTES)


def mapping_namespace(uid: int, gid: int, outside_id: int) -> int:
    """Return a user namespace that maps `uid` and `gid` to `outside_id`."""
    hold, release = posix.pipe()
    pid = clone(CLONE_NEWUSER)
    if pid == 0:
        posix.close(release)
        posix.read(hold, 1)
        posix._exit(0)
    posix.close(hold)
    try:
        write_maps(pid, inside_id=uid, inside_gid=gid, outside_uid=outside_id, outside_gid=outside_id, privileged=True)
        return posix.open(f"/proc/{pid}/ns/user", posix.O_RDONLY | posix.O_CLOEXEC)
    finally:
        posix.close(release)
        posix.waitpid(pid, 0)
