"""A folder of the host as a sandbox's workspace: opened as a view or a copy; compared, committed, discarded.

A run never writes to the host. `diff` takes a snapshot of the sandbox's changes while its processes are frozen, and
only `commit` writes them. Blocking work is done in threads (`open_folder`, `commits`).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar, cast

from cloche.core.changes import (
    CHANGES,
    Change,
    Committed,
    Diff,
    HostFolder,
    Shared,
    SupportsChanges,
    SupportsGrantedDisk,
    SupportsHostFolder,
)
from cloche.core.errors import BackendUnavailable, InvalidRequest, StartFailed
from cloche.core.events import Progress, report_progress
from cloche.core.limits import Limits
from cloche.core.loops import finish
from cloche.core.protocols import OpenLiveSandbox, OpenSandbox
from cloche.core.record import replace
from cloche.init.names import pack_text
from cloche.keeper.attach import Kept

from .commits import (
    BranchOptions,
    CommitChoice,
    above_of,
    compare,
    is_of_git,
    name_for,
    note_shared,
    read_committed,
    selected,
    write_changes,
)
from .git_credentials import credential_config
from .git_inside import WORKSPACE, give_git, in_threads, prepare_git, variables_for
from .naming import NameOperations
from .open_folder import FolderOptions, OpenFolder, open_again, open_new
from .sharing import share_changes, still_ignored

if TYPE_CHECKING:
    from cloche.core.policy import Policy
    from cloche.workspace.snapshot import Snapshot

T = TypeVar("T")
MOST_ENTRIES = 1_000_000
_MODE_OF_FOLDER = ("directory", "mode")  # the only change of a folder that keeps its contents
TAKING, READING = "copying the changes", "reading the changes"
COMPARING = "comparing the changes with the host's folder"
LONG_BYTES = 4 << 20
OVERLAY = "overlay"  # the jail's step that mounts the view


class HostFolderOperations(NameOperations):
    """Give a sandbox a folder of the host, show the changes made in it, and write them to the host or discard them."""

    _existing: Kept | None
    _folder_options: FolderOptions | None
    _folder: OpenFolder | None
    _stack: AsyncExitStack

    @asynccontextmanager
    async def _opening_with_folder(self) -> AsyncIterator[OpenSandbox]:
        """Open the sandbox with a view of the folder, or with a copy if no view is possible."""
        host_folder = self._existing.policy.host_folder if self._existing is not None else None
        if self._folder_options is None and host_folder is None:
            async with self._opening() as opened:
                yield opened
            return
        async with AsyncExitStack() as stack:
            if host_folder is not None:
                open_folder = await _opened(lambda: open_again(host_folder))
            else:
                options = cast("FolderOptions", self._folder_options)
                open_folder = await _opened(lambda: open_new(options))
                _add_credentials(open_folder, self.policy)
            stack.callback(open_folder.close)
            opened = await self._enter(stack, open_folder, is_kept=host_folder is not None)
            self._folder = open_folder
            stack.callback(setattr, self, "_folder", None)
            stack.callback(setattr, self, "_env", self._env)
            self._env = {**variables_for(open_folder.folder, opened), **self._env}
            if host_folder is None and (
                warnings := await prepare_git(cast("OpenLiveSandbox", opened), open_folder.folder)
            ):
                open_folder.notes = {
                    **open_folder.notes,
                    "warnings": [*open_folder.notes.get("warnings", ()), *warnings],
                }
            self._note(open_folder)
            yield opened

    def _note(self, open_folder: OpenFolder) -> None:
        notes = {name: value for name, value in self._prepared.notes.items() if name != "workspace"}
        self._prepared = replace(self._prepared, notes={**notes, "workspace": open_folder.notes})

    async def _enter(self, stack: AsyncExitStack, open_folder: OpenFolder, *, is_kept: bool) -> OpenSandbox:
        if is_kept:
            open_folder.notes = {**open_folder.notes, "how": "overlay"}
            return await stack.enter_async_context(self._opening())
        before = self._prepared
        why = await asyncio.to_thread(self._why_no_view)
        if not why:
            self._prepared = replace(before, policy=before.policy.with_changes(host_folder=open_folder.folder))
            try:
                async with AsyncExitStack() as attempt:
                    opened = await attempt.enter_async_context(self._opening())
                    await cast("OpenLiveSandbox", opened).ask("clock")  # the first request starts the sandbox
                    await give_git(cast("OpenLiveSandbox", opened), open_folder, is_copy=False)
                    stack.push_async_exit(attempt.pop_all())
            except StartFailed as error:
                if error.step != OVERLAY:
                    raise
                why, self._prepared = f"this kernel cannot mount an overlay of it for a sandbox: {error}", before
            else:
                open_folder.notes = {**open_folder.notes, "how": "overlay"}
                return opened
        return await self._enter_copy(stack, open_folder, why)

    def _why_no_view(self) -> str:
        backend = self._prepared.backend
        if isinstance(backend, SupportsHostFolder):
            return backend.why_no_view(self.policy.level)
        return f"backend {backend.name!r} gives copies of a folder"

    async def _enter_copy(self, stack: AsyncExitStack, open_folder: OpenFolder, why: str) -> OpenSandbox:
        """Open a sandbox whose /workspace is a copy of the folder."""
        from cloche.workspace.archive import pack, paths_below

        options = self._folder_options
        if self._terms is not None:
            raise BackendUnavailable(
                f"workspace: a sandbox with a name needs a view of the folder, which is not possible here: {why}.",
                remedy="Leave the name out, or use a copy in a sandbox without a name.",
            )
        if options is not None and options.at not in (None, WORKSPACE):
            raise BackendUnavailable(f"workspace_at: a copy is at {WORKSPACE}, and {why}.", remedy="Leave it out.")
        if open_folder.further:
            raise BackendUnavailable(f"workspace_read: copies do not support it, and {why}.", remedy="Leave it out.")
        folder, limits = self._bounds_of_copy(open_folder.folder)
        hidden = folder.hidden if folder.git is None else (*folder.hidden, ".git")
        packed = await _finished(
            lambda: pack(open_folder.fd, paths_below(open_folder.fd, hidden=hidden), max_bytes=folder.disk_bytes)
        )
        with packed.file:
            self._prepared = replace(self._prepared, limits=limits)
            opened = await stack.enter_async_context(self._opening())
            live = self._checked(opened)
            await live.unpack_path(WORKSPACE, in_threads(packed.pieces()))
            await give_git(live, open_folder, is_copy=True)
            copied_ns = (await live.ask("clock")).get("ns")
        if not isinstance(copied_ns, int) or copied_ns <= 0:
            raise BackendUnavailable(f"workspace: backend {self.backend!r} does not report the times of its files.")
        open_folder.folder = replace(folder, at=WORKSPACE, copied_ns=copied_ns, left_out=packed.left_out)
        open_folder.notes = {**open_folder.notes, "at": WORKSPACE, "how": "copy", "why": why}
        return opened

    def _bounds_of_copy(self, folder: HostFolder) -> tuple[HostFolder, Limits]:
        """Return the folder with the bytes that a copy of it may have, and the limits of a sandbox with the copy.

        The disk grows by these bytes. Where others grant the disk, the copy has to fit into it.
        """
        limits, backend = self._prepared.limits, self._prepared.backend
        if isinstance(backend, SupportsGrantedDisk) and backend.is_disk_granted:
            return replace(folder, disk_bytes=min(folder.disk_bytes, limits.disk_bytes)), limits
        return folder, replace(limits, disk_bytes=limits.disk_bytes + folder.disk_bytes)

    def _checked(self, opened: OpenSandbox) -> OpenLiveSandbox:
        if not isinstance(opened, SupportsChanges):
            raise BackendUnavailable(
                f"workspace: backend {self.backend!r} cannot report changes to a folder here.",
                remedy='Use "local", "docker", "gvisor", "microvm" or "cloche".',
            )
        return cast("OpenLiveSandbox", opened)

    def _share_folder_of(self, source: HostFolderOperations) -> None:
        """Use the host folder of another sandbox, of whose view this one has a complete copy."""
        open_folder, self._folder = source._folder, None
        if open_folder is None:
            return
        folder = replace(
            open_folder.folder, at=WORKSPACE, copied_ns=1
        )  # compares everything, including earlier changes
        notes = {**open_folder.notes, "at": WORKSPACE, "how": "copy"}
        self._folder = OpenFolder(
            folder=folder, fd=os.dup(open_folder.fd), notes=notes, committed=dict(read_committed(open_folder))
        )
        self._stack.callback(self._folder.close)
        self._note(self._folder)

    def _require_folder(self) -> OpenFolder:
        self._require_open()
        if self._folder is None:
            raise InvalidRequest("this sandbox has no folder of the host; open it with workspace=PATH")
        return self._folder

    async def diff(self) -> Diff:
        """Return the sandbox's changes in the host's folder, compared with the host's current files.

        All processes inside are frozen while the changes are read. `commit` with the diff, or with its `id`, writes
        exactly these changes. Raises InvalidRequest if the sandbox has no folder, SandboxFileError for too many
        changes.
        """
        open_folder = self._require_folder()
        async with self._snapshot(open_folder) as snapshot:
            return await stoppable(lambda check: compare(open_folder, snapshot, check))

    async def changes(self) -> Sequence[Change]:
        """Return the sandbox's changes as data; see `diff`."""
        return (await self.diff()).changes

    async def commit(
        self,
        diff: Diff | str | None = None,
        *,
        paths: Collection[str] | None = None,
        dangerous: bool | Collection[str] = (),
        ours: Collection[str] = (),
        theirs: Collection[str] = (),
        merge: Collection[str] = (),
        hunks: Mapping[str, Collection[str]] | None = None,
        branch: str | None = None,
        author: str | None = None,
        message: str | None = None,
        as_user: bool = False,
    ) -> Committed:
        """Write the sandbox's changes to the host's folder; return the paths that were written.

        With a `diff`, or its id, exactly those changes are written; if the sandbox or the host has changed since, it is
        an error. `paths` selects changes at or below these paths; the others stay in the sandbox. Dangerous changes
        (`Diff.dangerous`) are written only if `dangerous` lists their paths, or is True. If the host has changed a file
        as well, the change is a conflict: list its path in `ours` to write the sandbox's version, in `theirs` to keep
        the host's, or in `merge` to merge both into a text file, based on git's HEAD, in the sandbox too. If a conflict
        is not resolved, or both sides changed the same lines, nothing is written.

        `hunks` has, by path, the ids of those hunks of a modified text file that are written alone
        (`cloche.workspace.hunks.file_diffs`); the others stay in the sandbox, as does a change of its permissions.

        With `branch`, the changes become a commit on a new branch of the folder's git repository, with an `author`
        ("NAME <EMAIL>") and a `message`, and no file is written. With `as_user`, the author is that of this user's git
        configuration, and the commit is signed if that has `commit.gpgSign`. Commits made inside always become
        references below `refs/cloche/`.

        A reader never sees a partial file, but a concurrent reader may see some files new and some old. An interrupted
        commit is completed or undone by the next call.

        Raises WorkspaceConflict, InvalidRequest, BackendUnavailable.
        """
        open_folder = self._require_folder()
        expected_id = diff.id if isinstance(diff, Diff) else diff
        async with self._snapshot(open_folder) as snapshot:
            choice = CommitChoice(
                paths=paths, dangerous=dangerous, ours=ours, theirs=theirs, merge=merge, hunks=hunks or {}
            )
            onto = (
                BranchOptions(name=branch, author=author, message=message, as_user=as_user)
                if branch is not None
                else None
            )
            name = name_for(self._name)
            committed = await stoppable(
                lambda check: write_changes(open_folder, snapshot, expected_id, name, choice, onto, self.audit, check)
            )
        if merge and branch is None:  # the sandbox gets the merged text too
            still = {change.path for change in await self.changes()}
            await self.discard([path for path in merge if path in still.intersection(committed.written)])
        return committed

    async def discard(self, paths: Collection[str] | None = None) -> tuple[str, ...]:
        """Restore the host's files in the sandbox: all changes, or those at `paths`. Return the paths.

        Raises SandboxFileError for files that the sandbox's user may not write.
        """
        return await self._discard_of(await self.diff(), paths)

    async def _discard_of(self, diff: Diff, paths: Collection[str] | None = None) -> tuple[str, ...]:
        """Restore the host's files at the paths of a diff that was just made; see `discard`."""
        from cloche.workspace.archive import pack

        open_folder = self._require_folder()
        live = self._require_live("discard")
        found_changes = selected(diff.changes, paths, with_folders=False)
        changes = [change for change in found_changes if not is_of_git(change)]
        back = [change.old_path or change.path for change in changes if change.what != "added"]
        packed = await _finished(lambda: pack(open_folder.fd, sorted(back), max_bytes=open_folder.folder.disk_bytes))
        with packed.file:
            created = {
                change.path
                for change in changes
                if change.what != "removed" and (change.kind, change.what) != _MODE_OF_FOLDER
            }
            for path in sorted(created):
                _, *folders = above_of(path)
                if created.isdisjoint(folders):  # otherwise it is removed with its folder
                    await live.remove_path(f"{open_folder.folder.at}/{path}", recursive=True)
            if back:
                await live.unpack_path(open_folder.folder.at, in_threads(packed.pieces()))
        return tuple(change.path for change in changes)

    async def share(self) -> Shared:
        """Make the view and the host's folder one: write harmless changes, then show the host's current files inside.

        Dangerous changes and conflicts stay in the sandbox, and are returned; so do files that a process inside uses.
        Afterwards programs inside see what the host has replaced, added and removed meanwhile. For sandboxes with a
        view (backend `local`). Raises InvalidRequest, and SandboxFileError for too many changes.
        """
        open_folder, live = self._require_folder(), self._require_live("share")
        if open_folder.folder.copied_ns:
            raise InvalidRequest("share: this sandbox works on a copy of the folder, and only a view can be shared")
        before = (await live.ask("clock")).get("ns")
        skipped = await _finished(lambda: still_ignored(open_folder))
        async with self._snapshot(open_folder, skip=skipped) as snapshot:
            name = name_for(self._name)
            plan = await stoppable(lambda check: share_changes(open_folder, snapshot, skipped, name, self.audit, check))
        for paths, apart in plan.requests:
            await live.ask("refresh", at=pack_text(open_folder.folder.at), before_ns=before, paths=paths, apart=apart)
        if plan.shared.is_git_renewed:
            await prepare_git(live, open_folder.folder)
        if not isinstance(before, int):
            raise InvalidRequest("share: the sandbox does not report the time")
        await _finished(lambda: note_shared(open_folder, before, plan.kept, plan.branch, plan.ignored))
        return plan.shared

    @asynccontextmanager
    async def _snapshot(self, open_folder: OpenFolder, *, skip: Sequence[str] = ()) -> AsyncIterator[Snapshot]:
        """Yield the sandbox's changes at this moment, less the paths of `skip`."""
        import tempfile

        from cloche.workspace.snapshot import SnapshotReader

        live = self._checked(self._require_open())
        folder = open_folder.folder
        answer: dict[str, Any] = {}
        reader = SnapshotReader(
            tempfile.gettempdir(), max_bytes=folder.disk_bytes, entries=MOST_ENTRIES, is_whole=bool(folder.copied_ns)
        )
        try:
            stream = cast("SupportsChanges", live).changes_stream(
                folder.at if folder.copied_ns else CHANGES,
                since=folder.copied_ns or None,
                max_bytes=folder.disk_bytes,
                max_entries=MOST_ENTRIES,
                skip=skip,
                note_answer=answer.update,
            )
            # The sandbox is frozen until the stream is closed, so closing is not left to the garbage collector.
            async with aclosing(cast("AsyncGenerator[bytes]", stream)) as pieces:
                async for piece in pieces:
                    await finish(asyncio.to_thread(reader.feed, piece))
                    _report(TAKING, reader.stored_bytes)
            snapshot = await stoppable(lambda check: reader.finish(answer, _noting(reader.stored_bytes, check)))
        except ValueError as error:
            raise InvalidRequest(f"workspace: the sandbox's report of its changes is invalid: {error}") from error
        finally:
            reader.close()
            report_progress(Progress(what=TAKING, is_over=True))
        _report(COMPARING, 0, reader.stored_bytes)
        try:
            yield snapshot
        finally:
            snapshot.close()
            report_progress(Progress(what=COMPARING, is_over=True))


def _add_credentials(open_folder: OpenFolder, policy: Policy) -> None:
    """Have git inside use the secrets of its hosts."""
    if policy.secrets is not None:
        config = open_folder.folder.git_config + credential_config(policy.secrets.hosts_by_name)
        open_folder.folder = replace(open_folder.folder, git_config=config)


async def _opened(opening: Callable[[], OpenFolder]) -> OpenFolder:
    """Open in a thread. If the caller is cancelled, the folder is closed once it has been opened."""
    work = asyncio.ensure_future(asyncio.to_thread(opening))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        work.add_done_callback(_close_opened)
        raise


def _report(label: str, done_bytes: int, total: int = 0) -> None:
    """Report progress for transfers of LONG_BYTES or more."""
    if max(done_bytes, total) >= LONG_BYTES:
        report_progress(Progress(what=label, done=done_bytes, total=total))


def _noting(total: int, check: Callable[[], None]) -> Callable[[int], None]:
    """Return a callback for the number of bytes read."""

    def note(done_bytes: int) -> None:
        check()
        _report(READING, done_bytes, total)

    return note


def _close_opened(work: asyncio.Future[OpenFolder]) -> None:
    if not work.cancelled() and work.exception() is None:
        work.result().close()


async def _finished(work: Callable[[], T]) -> T:
    """Run work on our descriptors in a thread, and wait for its end even if cancelled.

    A thread cannot be cancelled, and a descriptor closed under it may refer to another folder by its next call.
    """
    return await finish(asyncio.to_thread(work))


async def stoppable(work: Callable[[Callable[[], None]], T]) -> T:
    """Run work in a thread that calls a `check` function now and then. Cancellation makes `check` raise, and waits for
    the end.
    """
    is_over = False

    def check() -> None:
        if is_over:
            raise _NobodyWaits

    doing = asyncio.ensure_future(asyncio.to_thread(work, check))
    try:
        return await asyncio.shield(doing)
    except asyncio.CancelledError:
        is_over = True
        with suppress(Exception):  # the caller was cancelled, so no one handles its error
            await finish(doing)
        raise


class _NobodyWaits(Exception):
    """Stop work in a thread whose caller was cancelled."""
