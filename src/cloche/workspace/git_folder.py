"""Find the repository of a worktree or submodule, whose `.git` is a file that contains a path.

Theory of operation: that file may have any origin and name any path. The path is accepted only if it is a git directory
of the same owner that points back to the folder. A worktree's directory lies in `worktrees` of the common directory and
has the `.git` file's path in `gitdir`; a submodule's configuration has the folder's path in `core.worktree`. A checkout
writes neither of these. Everything is compared by device and inode of open folders.

In the sandbox, a worktree's own files (HEAD, the index) are laid over the common directory, so that `.git` there is an
ordinary repository.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from cloche import hostfs
from cloche.core.errors import InvalidRequest
from cloche.core.escape import escape_name
from cloche.core.record import dataclass, replace

from .hidden import Hidden, Mask, find_hidden_in_git, mask_rows

MOST_POINTER_BYTES, MOST_CONFIG_BYTES, PATIENCE_S = 8192, 1 << 20, 5.0
# Names in a common directory that all worktrees share (gitrepository-layout(5)); others are the main worktree's.
SHARED = frozenset(
    {"config", "description", "info", "lfs", "logs", "objects", "packed-refs", "refs", "rr-cache", "shallow"}
)
# Paths below the shared names that belong to a single worktree.
OF_ONE = ("info/sparse-checkout", "logs/HEAD", "refs/bisect", "refs/rewritten", "refs/worktree")
# Names in a worktree's own directory that locate it, or are not shown.
PLACES = ("commondir", "gitdir", "locked", "hooks", "modules")
_POINTS = b"gitdir: "
_VARIABLES = {
    "HOME": "/nonexistent", "LC_ALL": "C", "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_DIR": "/nonexistent",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class GitFolder:
    """Descriptors of the common git directory (`fd`: objects, branches) and of the one with HEAD (`own`); the caller
    closes both.

    `path` is the path of the common directory, and `name` the path of `own` relative to it: "." if they are the same.
    """

    path: str
    fd: int
    own: int
    name: str

    @property
    def is_shared(self) -> bool:
        """Tell whether the common directory may serve several worktrees."""
        return self.name != "."

    @property
    def identity(self) -> tuple[int, int]:
        """Return device and inode of the common directory."""
        facts = os.fstat(self.fd)
        return facts.st_dev, facts.st_ino

    def close(self) -> None:
        """Close both descriptors."""
        os.close(self.own)
        os.close(self.fd)

    def variables(self) -> dict[str, str]:
        """Return the GIT_* variables for a git that works in the common directory."""
        return {"GIT_DIR": self.name, **({"GIT_COMMON_DIR": "."} if self.is_shared else {})}

    def owner(self) -> tuple[int, int]:
        """Return uid and gid of the common directory's owner."""
        facts = os.fstat(self.fd)
        return facts.st_uid, facts.st_gid


@contextmanager
def git_folder(folder: int) -> Iterator[GitFolder | None]:
    """Hold open the result of `find_git_folder`."""
    git_directory = find_git_folder(folder)
    try:
        yield git_directory
    finally:
        if git_directory is not None:
            git_directory.close()


def find_git_folder(folder: int) -> GitFolder | None:
    """Return the git directory that the `.git` file of an open folder names; None if there is no such file, or it names
    a path inside the folder.

    Raises InvalidRequest if that git directory does not belong to the folder.
    """
    try:
        folder_path = os.readlink(f"/proc/self/fd/{folder}")
        pointer, file = _pointer(folder)
        if pointer is None:
            return None
        own = _open(os.path.join(folder_path, pointer))
    except OSError as error:
        raise _refused(f"what it names cannot be opened: {error.strerror}") from error
    try:
        path = os.readlink(f"/proc/self/fd/{own}")
        if f"{path}/".startswith(f"{folder_path.rstrip('/')}/"):
            os.close(own)
            return None
        git_directory = _of_worktree(own, path, file) or _of_submodule(own, path, folder)
        _check(git_directory, folder)
        return git_directory
    except OSError as error:
        os.close(own)
        raise _refused(f"what it names cannot be read: {error.strerror}") from error
    except BaseException:
        os.close(own)
        raise


def _refused(why: str) -> InvalidRequest:
    return InvalidRequest(f"Git does not work inside, as .git is a file, and {why}.")


def _open(path: str) -> int:
    return hostfs.open_folder(path, follows_link=True)


def _pointer(folder: int) -> tuple[str | None, os.stat_result]:
    """Return the path in a folder's `.git` file, None if it is no regular file. Raises OSError, InvalidRequest."""
    facts = hostfs.look(".git", folder)
    if facts is None or not stat.S_ISREG(facts.st_mode):
        return None, os.fstat(folder)
    text, facts = _text(".git", folder)
    if not text.startswith(_POINTS):
        raise _refused("names no directory")
    return _path(text[len(_POINTS) :]), facts


def named_outside(folder: int, subfolders: Sequence[str]) -> list[str]:
    """Return the subfolders of an open folder whose `.git` is a file that names a path outside of that folder."""
    top, outside = os.readlink(f"/proc/self/fd/{folder}"), []
    for subfolder in filter(None, subfolders):
        try:
            with hostfs.descended(folder, subfolder.split("/")) as subfolder_fd:
                pointer, _ = _pointer(subfolder_fd)
        except (OSError, InvalidRequest):
            continue
        if pointer is not None:
            named = os.path.normpath(os.path.join(top, subfolder, pointer))
            outside += [] if f"{named}/".startswith(f"{top.rstrip('/')}/") else [subfolder]
    return outside


def _path(text: bytes) -> str:
    if b"\0" in text:
        raise _refused("what it names is not a path")
    return os.fsdecode(text.rstrip(b"\r\n"))


def _text(name: str, dir_fd: int, max_bytes: int = MOST_POINTER_BYTES) -> tuple[bytes, os.stat_result]:
    fd, facts = hostfs.open_regular(name, dir_fd)
    with open(fd, "rb", buffering=0) as file:
        return file.read(max_bytes) or b"", facts


def _of_worktree(own: int, path: str, file: os.stat_result) -> GitFolder | None:
    """Return the directories of a worktree that points back to this `.git` file; None if `own` is no worktree's
    directory.
    """
    if hostfs.look("commondir", own) is None:
        return None
    common, above = os.path.dirname(os.path.dirname(path)), os.path.basename(os.path.dirname(path))
    says = os.path.join(path, _path(_text("commondir", own)[0]))
    back = os.path.join(path, _path(_text("gitdir", own)[0]))
    if above != "worktrees" or not os.path.samestat(os.stat(says), os.stat(common)):
        raise _refused(f"{escape_name(path)} is in no repository's list of worktrees")
    if not os.path.samestat(os.stat(back, follow_symlinks=False), file):
        raise _refused(f"{escape_name(path)} is of another worktree; git worktree repair mends one that was moved")
    return GitFolder(path=common, fd=_open(common), own=own, name=os.path.relpath(path, common))


def _of_submodule(own: int, path: str, folder: int) -> GitFolder:
    back = config_value(own, "core.worktree")
    try:
        is_back = bool(back) and os.path.samestat(os.stat(os.path.join(path, back)), os.fstat(folder))
    except OSError:
        is_back = False
    if not is_back:
        raise _refused(f"{escape_name(path)} is not the repository of this folder")
    return GitFolder(path=path, fd=os.dup(own), own=own, name=".")


def _check(git_directory: GitFolder, folder: int) -> None:
    """Refuse a path that is no git directory, or that has another owner. Raises InvalidRequest, OSError."""
    try:
        if not os.path.samestat(os.stat(git_directory.path), os.fstat(git_directory.fd)):
            raise _refused("what it names has changed meanwhile")
        kinds = (
            (git_directory.own, "HEAD", stat.S_ISREG),
            (git_directory.fd, "objects", stat.S_ISDIR),
            (git_directory.fd, "refs", stat.S_ISDIR),
        )
        for dir_fd, name, is_kind in kinds:
            facts = hostfs.look(name, dir_fd)
            if facts is None or not is_kind(facts.st_mode):
                raise _refused(f"{escape_name(git_directory.path)} is not a git directory")
        owner = os.fstat(folder).st_uid
        if {os.fstat(git_directory.fd).st_uid, os.fstat(git_directory.own).st_uid} != {owner} or os.geteuid() not in (
            0,
            owner,
        ):
            raise _refused(f"{escape_name(git_directory.path)} is another user's")
    except BaseException:
        os.close(git_directory.fd)
        raise


def hidden_of(git_directory: GitFolder) -> tuple[Hidden, Mask]:
    """Return the hidden paths of the common directory, each beginning with `.git`, and the mask of an overlay layer for
    them.

    Of a directory with several worktrees, only the files that all worktrees share are shown.
    """
    hidden = find_hidden_in_git(git_directory.fd)
    unshared = set(os.listdir(git_directory.fd)) - SHARED - {"hooks"} if git_directory.is_shared else set[str]()
    shown_paths = tuple(path for path in hidden.paths if path.split("/")[1] not in unshared)
    own_paths = {path for path in OF_ONE if git_directory.is_shared and _is_there(git_directory.fd, path)}
    paths = {path.removeprefix(".git/") for path in shown_paths} | unshared | own_paths
    return replace(hidden, paths=shown_paths), mask_rows(git_directory.fd, Hidden(paths=tuple(sorted(paths))))


def _is_there(folder: int, path: str) -> bool:
    *above, name = path.split("/")
    try:
        with hostfs.descended(folder, above) as parent_fd:
            return hostfs.look(name, parent_fd) is not None
    except OSError:
        return False


def own_config(git_directory: GitFolder) -> bytes | None:
    """Return `config` rewritten for a repository beside its `.git`; None if it needs no change.

    Raises OSError, InvalidRequest.
    """
    if not (config_value(git_directory.fd, "core.worktree") or config_value(git_directory.fd, "core.bare") == "true"):
        return None
    import tempfile

    text, _ = _text("config", git_directory.fd, MOST_CONFIG_BYTES + 1)
    if len(text) > MOST_CONFIG_BYTES:
        raise _refused("its configuration is too large")
    with tempfile.TemporaryDirectory(prefix="cloche-git-", dir=hostfs.temporary_folder()) as folder:
        with open(os.path.join(folder, "config"), "wb") as file:
            file.write(text)
        config_fd = _open(folder)
        try:
            _git(config_fd, "--unset-all", "core.worktree")
            _git(config_fd, "core.bare", "false")
            return _text("config", config_fd, 2 * MOST_CONFIG_BYTES)[0]
        finally:
            os.close(config_fd)


def config_value(dir_fd: int, key: str) -> str:
    """Return a value of the file `config` in an open folder, ignoring includes; empty if it is not set."""
    with suppress(OSError, subprocess.SubprocessError):
        fd, _ = hostfs.open_regular("config", dir_fd)
        os.close(fd)
        return os.fsdecode(_git(dir_fd, "--get", key).rstrip(b"\n"))
    return ""


def _git(dir_fd: int, *arguments: str) -> bytes:
    program = shutil.which("git")
    if program is None:
        return b""
    completed = subprocess.run(
        [program, "--no-pager", "config", "--file", "config", "--no-includes", *arguments],
        cwd=f"/proc/{os.getpid()}/fd/{dir_fd}",
        env={**_VARIABLES, "PATH": os.environ.get("PATH", os.defpath)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        timeout=PATIENCE_S,
        check=False,
    )
    return completed.stdout
