"""Give a live sandbox a folder of Cloche's state as its home folder, for writing: `give_home`.

Everything else that a sandbox sees of the host is read-only, or a view. This folder is the guest's: what it writes
there stays when the sandbox has ended, and nothing on the host may trust it.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Collection, Iterator
from itertools import islice
from typing import TYPE_CHECKING

from cloche import hostfs
from cloche.config.state import state_file
from cloche.core.changes import HomeFolder, SupportsHostFolder
from cloche.core.errors import BackendUnavailable, InvalidRequest
from cloche.core.loops import finish
from cloche.core.record import replace

from .sandbox import AsyncSandbox

if TYPE_CHECKING:
    from cloche.core.policy import Policy
    from cloche.workspace.archive import Packed

# Of the files on the host, if root gives the folder: an id that no user and no other guest has.
ROOTS_OWNER = 1_899_999_999
# Folders of the sandbox's own system, where no home folder can be.
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/etc", "/proc", "/sys", "/dev", "/run", "/workspace", "/.venv")


def why_no_home(sandbox: AsyncSandbox) -> str:
    """Return the reason why a sandbox can have no such home folder; empty if it can."""
    backend = sandbox._prepared.backend
    if not isinstance(backend, SupportsHostFolder):
        return f"backend {backend.name!r} has no home folder on the host"
    return backend.why_no_view(sandbox.policy.level)


def give_home(sandbox: AsyncSandbox, path: str, inside: str) -> None:
    """Make `path`, a folder below Cloche's state, the home folder of a sandbox that is not open yet, at `inside`.

    The folder is made if it is missing. Raises InvalidRequest for a wrong path, BackendUnavailable if this host cannot.
    """
    if why := why_no_home(sandbox):
        raise BackendUnavailable(
            f"home: a coding agent needs a view of the project, which is not possible here: {why}.",
            remedy="cloche doctor says why; a container needs the profile of cloche doctor --container-profile.",
        )
    top = state_file("agents")
    if top is None or not os.path.normpath(path).startswith(f"{top}/"):
        raise InvalidRequest(f"home: {path!r} is not below {top}")
    if not os.path.isabs(inside) or inside == "/" or inside.startswith(tuple(f"{name}/" for name in _SYSTEM)):
        raise InvalidRequest(f"home: {inside!r} cannot be a home folder inside")
    owner = _make_folder(path)
    home = HomeFolder(path=os.path.realpath(path), at=os.path.normpath(inside), owner=owner)
    sandbox._prepared = replace(sandbox._prepared, policy=sandbox.policy.with_changes(home=home))


async def fill_home(
    sandbox: AsyncSandbox, source: str, *, without: Collection[str], max_files: int, max_bytes: int
) -> tuple[str, ...]:
    """Copy another sandbox's home folder into that of a sandbox that has just been opened; return what is left out.

    It is read on the host by descriptors, without following a link, and written inside by the guest. `without` are
    paths that are not copied, nor are the places of mounts. Raises InvalidRequest for more files or bytes.
    """
    from .git_inside import in_threads

    live, home = sandbox._require_live("fill_home"), sandbox.policy.home
    if home is None:
        raise InvalidRequest("home: this sandbox has no home folder on the host")
    without = [*without, *_mounts_below(sandbox.policy, home.at)]
    try:
        packed = await finish(asyncio.to_thread(lambda: _pack(source, without, max_files, max_bytes)))
    except FileNotFoundError:  # the other one has not been started yet
        return ()
    with packed.file:
        await live.unpack_path(home.at, in_threads(packed.pieces()))
    return packed.left_out


def _mounts_below(policy: Policy, home: str) -> Iterator[str]:
    """Yield what is mounted below a home folder, mostly read-only, by paths relative to it."""
    folder = policy.host_folder
    folders = [folder, *folder.read_only] if folder else []
    mounts = [*policy.toolchains, *policy.layers, *(shown.at for shown in folders)]
    return (path.removeprefix(f"{home}/") for path in mounts if path.startswith(f"{home}/"))


def _pack(source: str, without: Collection[str], max_files: int, max_bytes: int) -> Packed:
    from cloche.workspace.archive import pack, paths_below

    folder = hostfs.open_folder(source)
    try:
        paths = list(islice(paths_below(folder, hidden=without), max_files + 1))
        if len(paths) > max_files:
            raise InvalidRequest(f"home: {source} has more than {max_files} files")
        return pack(folder, paths, max_bytes=max_bytes)
    finally:
        os.close(folder)


def _make_folder(path: str) -> tuple[int, int]:
    """Make the folder and those above it; return the uid and gid that own its files."""
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    uid = os.geteuid()
    owner = (ROOTS_OWNER, ROOTS_OWNER) if uid == 0 else (uid, os.getegid())
    try:
        os.mkdir(path, 0o700)
        if uid == 0:
            os.chown(path, *owner, follow_symlinks=False)
    except FileExistsError:
        status = os.lstat(path)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != owner[0]:
            raise InvalidRequest(f"home: {path} is not a folder that Cloche made; remove it") from None
    return owner
