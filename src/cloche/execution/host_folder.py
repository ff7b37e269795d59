"""A folder of the host as a sandbox's workspace: opened as a view or a copy; compared, committed, discarded.

A run never writes to the host. What the sandbox has changed is taken as a snapshot while it stands still (`diff`), and
written by `commit` alone; `cloche.workspace` does either. Whatever blocks is done in threads.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from cloche import hostfs
from cloche.audit.log import Audit
from cloche.config.state import state_file
from cloche.core.changes import CHANGES, Change, Committed, Diff, HostFolder, SupportsChanges, SupportsHostFolder
from cloche.core.errors import BackendUnavailable, InvalidRequest, StartFailed, WorkspaceConflict, WorkspaceFailed
from cloche.core.escape import escape_name
from cloche.core.languages import is_program_file
from cloche.core.limits import parse_size
from cloche.core.loops import finish
from cloche.core.protocols import OpenLiveSandbox, OpenSandbox
from cloche.keeper.attach import Kept

from .naming import NameOperations

if TYPE_CHECKING:
    from cloche.workspace.hidden import Hidden
    from cloche.workspace.snapshot import Snapshot

log = logging.getLogger("cloche.workspace")
T = TypeVar("T")
WORKSPACE = "/workspace"
DISK_BYTES = 2 << 30
MASK_BYTES = 64 << 20  # of memory, at most, for what hides paths of a folder that cannot be written to
MOST_ENTRIES = 1_000_000
COMMITTED, KNOWN_S = "committed-", 30 * 24 * 3600.0  # what is noted of a sandbox's commits, and how long
MOST_MERGED_BYTES = 16 << 20
MOST_TOLD = 100  # hidden paths that a result lists
OVERLAY = "overlay"  # the step of a jail that mounts a view
TICK_S = 0.001
REALTIME_COARSE = 5  # the clock of linux/time.h by which file systems tell when a file changed


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderOptions:
    """Say which folder of the host is wanted, where inside, how much may be written, and what else is hidden.

    `read` are further folders, at their own paths, in which nothing can be written.
    """

    path: str
    read: tuple[str, ...] = ()
    at: str | None = None
    disk_bytes: int = DISK_BYTES
    hide: tuple[str, ...] = ()


def read_folder_options(
    workspace: str | PathLike[str] | None,
    *,
    at: str | None,
    disk: int | str | None,
    hide: Sequence[str] | None,
    read: Sequence[str | PathLike[str]] | None,
) -> FolderOptions | None:
    """Read the arguments of a sandbox; None where it gets no folder. Raises InvalidRequest."""
    if workspace is None:
        for word, value in (
            ("workspace_at", at),
            ("workspace_disk", disk),
            ("workspace_hide", hide),
            ("workspace_read", read),
        ):
            if value is not None:
                raise InvalidRequest(f"{word} is for a folder of the host; give it one: workspace=...")
        return None
    for word, value in (("workspace_hide", hide), ("workspace_read", read)):
        if isinstance(value, str | PathLike):
            raise InvalidRequest(f"{word}: {value!r} must be a list")
    disk_bytes = DISK_BYTES if disk is None else parse_size(disk, name="workspace_disk")
    further = tuple(os.fspath(one) for one in read or ())
    return FolderOptions(path=os.fspath(workspace), at=at, disk_bytes=disk_bytes, hide=tuple(hide or ()), read=further)


@dataclass(slots=True, kw_only=True)
class OpenFolder:
    """Hold the host's folder, by a descriptor, and how the sandbox was given it."""

    folder: HostFolder
    fd: int
    notes: Mapping[str, Any]
    further: tuple[OpenFolder, ...] = ()
    known: dict[str, tuple[int, int]] | None = None  # what a fork has committed; of others a file has it

    def add(self, further: OpenFolder) -> None:
        """Show a further folder, which cannot be changed. Raises InvalidRequest where one lies in the other."""
        self.further += (further,)
        for one in (self.folder, *self.folder.read_only):
            if f"{one.at}/".startswith(f"{further.folder.at}/") or f"{further.folder.at}/".startswith(f"{one.at}/"):
                raise InvalidRequest(
                    f"workspace_read: {escape_name(further.folder.path)} and {escape_name(one.path)} lie in "
                    "each other, or are the same; name folders apart"
                )
        self.folder = replace(self.folder, read_only=(*self.folder.read_only, further.folder))
        told = [*self.notes.get("read_only", ()), dict(further.notes)]
        self.notes = {**self.notes, "read_only": told}

    def close(self) -> None:
        """Let it go."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
        for one in self.further:
            one.close()


def _state() -> str:
    """Return the folder in which commits are noted. Raises InvalidRequest for a user without one."""
    found = state_file("workspaces")
    if found is None:
        raise InvalidRequest("workspace: this user has no home folder, where commits are noted; set XDG_STATE_HOME")
    return found


def _after_now() -> int:
    """Return a time in ns that no file has which was changed before: the kernel's clock of files moves in ticks."""
    before = now = time.clock_gettime_ns(REALTIME_COARSE)
    while now == before:
        time.sleep(TICK_S)
        now = time.clock_gettime_ns(REALTIME_COARSE)
    return now


def _open_new(options: FolderOptions) -> OpenFolder:
    """Look at a folder before it is shown: whether it may be, what an earlier commit left, and what is hidden."""
    from cloche.workspace.allowed import at_for, check_folder
    from cloche.workspace.hidden import find_hidden, mask_rows
    from cloche.workspace.recover import recover

    allowed = check_folder(options.path)
    try:
        if os.path.isdir(_state()):
            recover(allowed.fd, _state())
        hidden = find_hidden(allowed.fd, patterns=options.hide)
        mask = mask_rows(allowed.fd, hidden)
        state = os.fstat(allowed.fd)
        folder = HostFolder(
            path=allowed.path,
            # What has the path by then may be another folder; only root may reach the descriptor from a namespace.
            opened_as=f"/proc/{os.getpid()}/fd/{allowed.fd}" if os.geteuid() == 0 else "",
            at=at_for(allowed.path) if options.at is None else at_for(allowed.path, options.at),
            hidden=mask.whiteouts,
            masked_folders=tuple((one.path, one.mode, one.mtime_ns) for one in mask.folders),
            owner=(state.st_uid, state.st_gid),
            mode=state.st_mode & 0o777,
            identity=(state.st_dev, state.st_ino),
            disk_bytes=options.disk_bytes,
            opened_ns=_after_now(),
        )
    except BaseException:
        os.close(allowed.fd)
        raise
    found = OpenFolder(folder=folder, fd=allowed.fd, notes=_notes(folder, hidden))
    try:
        for path in options.read:
            found.add(_open_new(replace(options, path=path, at=None, read=(), disk_bytes=MASK_BYTES)))
    except BaseException:
        found.close()
        raise
    return found


def _notes(folder: HostFolder, hidden: Hidden) -> dict[str, Any]:
    """Return what results say of the folder."""
    notes: dict[str, Any] = {"path": folder.path, "at": folder.at, "hidden": list(hidden.paths[:MOST_TOLD])}
    if len(hidden.paths) > MOST_TOLD:
        notes["hidden_count"] = len(hidden.paths)
    if hidden.tracked:
        notes["hidden_but_tracked"] = list(hidden.tracked[:MOST_TOLD])
    if hidden.warnings:
        notes["warnings"] = list(hidden.warnings)
    return notes


def _open_again(folder: HostFolder) -> OpenFolder:
    """Open the folder of a sandbox that is kept. Raises InvalidRequest where another one has its place."""
    try:
        fd = os.open(folder.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise InvalidRequest(f"workspace: cannot open {folder.path!r}: {error.strerror}") from error
    state = os.fstat(fd)
    if (state.st_dev, state.st_ino) != folder.identity:
        os.close(fd)
        raise InvalidRequest(
            f"workspace: {folder.path!r} is not the folder any more that this sandbox was opened with; move it back"
        )
    return OpenFolder(folder=folder, fd=fd, notes={"path": folder.path, "at": folder.at, "hidden": list(folder.hidden)})


class HostFolderOperations(NameOperations):
    """Give a sandbox a folder of the host, tell what was changed in it, and write that to the host or take it back."""

    _kept: Kept | None
    _folder_options: FolderOptions | None
    _folder: OpenFolder | None
    _stack: AsyncExitStack

    @asynccontextmanager
    async def _opening_with_folder(self) -> AsyncIterator[OpenSandbox]:
        """Open the sandbox, with a view of the folder or, where there can be none, with a copy of it."""
        kept = self._kept.policy.host_folder if self._kept is not None else None
        if self._folder_options is None and kept is None:
            async with self._opening() as opened:
                yield opened
            return
        async with AsyncExitStack() as stack:
            if kept is not None:
                found = await _opened(lambda: _open_again(kept))
            else:
                options = cast("FolderOptions", self._folder_options)
                found = await _opened(lambda: _open_new(options))
            stack.callback(found.close)
            opened = await self._enter(stack, found, is_kept=kept is not None)
            self._folder = found
            stack.callback(setattr, self, "_folder", None)
            self._note(found)
            yield opened

    def _note(self, found: OpenFolder) -> None:
        notes = {name: value for name, value in self._prepared.notes.items() if name != "workspace"}
        self._prepared = replace(self._prepared, notes={**notes, "workspace": found.notes})

    async def _enter(self, stack: AsyncExitStack, found: OpenFolder, *, is_kept: bool) -> OpenSandbox:
        if is_kept:
            found.notes = {**found.notes, "how": "overlay"}
            return await stack.enter_async_context(self._opening())
        before = self._prepared
        why = await asyncio.to_thread(self._why_no_view)
        if not why:
            self._prepared = replace(before, policy=before.policy.with_changes(host_folder=found.folder))
            try:
                async with AsyncExitStack() as attempt:
                    opened = await attempt.enter_async_context(self._opening())
                    await cast("OpenLiveSandbox", opened).ask("clock")  # which starts it
                    stack.push_async_exit(attempt.pop_all())
            except StartFailed as error:
                if error.step != OVERLAY:
                    raise
                why, self._prepared = f"this kernel mounts no overlay of it for a sandbox: {error}", before
            else:
                found.notes = {**found.notes, "how": "overlay"}
                return opened
        return await self._enter_copy(stack, found, why)

    def _why_no_view(self) -> str:
        backend = self._prepared.backend
        if isinstance(backend, SupportsHostFolder):
            return backend.why_no_view(self.policy.level)
        return f"backend {backend.name!r} gives copies of a folder"

    async def _enter_copy(self, stack: AsyncExitStack, found: OpenFolder, why: str) -> OpenSandbox:
        """Open a sandbox whose /workspace is a copy of the folder."""
        from cloche.workspace.archive import pack, paths_below

        options = self._folder_options
        if self._terms is not None:
            raise BackendUnavailable(
                f"workspace: a sandbox with a name needs a view of the folder, and there is none: {why}.",
                remedy="Leave the name out.",
            )
        if options is not None and options.at not in (None, WORKSPACE):
            raise BackendUnavailable(f"workspace_at: a copy is at {WORKSPACE}, and {why}.", remedy="Leave it out.")
        if found.further:
            raise BackendUnavailable(f"workspace_read: copies have none, and {why}.", remedy="Leave it out.")
        folder, limits = found.folder, self._prepared.limits
        packed = await _finished(
            lambda: pack(found.fd, paths_below(found.fd, hidden=folder.hidden), max_bytes=folder.disk_bytes)
        )
        with packed.file:
            self._prepared = replace(
                self._prepared, limits=replace(limits, disk_bytes=limits.disk_bytes + folder.disk_bytes)
            )
            opened = await stack.enter_async_context(self._opening())
            live = self._checked(opened)
            await live.unpack_path(WORKSPACE, _in_threads(packed.pieces()))
            copied_ns = (await live.ask("clock")).get("ns")
        if not isinstance(copied_ns, int) or copied_ns <= 0:
            raise BackendUnavailable(f"workspace: backend {self.backend!r} does not tell the time of its files.")
        found.folder = replace(folder, at=WORKSPACE, copied_ns=copied_ns, left_out=packed.left_out)
        found.notes = {**found.notes, "at": WORKSPACE, "how": "copy", "why": why}
        return opened

    def _checked(self, opened: OpenSandbox) -> OpenLiveSandbox:
        if not isinstance(opened, SupportsChanges):
            raise BackendUnavailable(
                f"workspace: backend {self.backend!r} has no sandboxes here that tell what was changed in a folder.",
                remedy='Use "local", "docker", "gvisor" or "microvm".',
            )
        return cast("OpenLiveSandbox", opened)

    def _share_folder_of(self, other: HostFolderOperations) -> None:
        """Have the folder of another sandbox, beside which this one has a copy of all that is in its view."""
        found, self._folder = other._folder, None
        if found is None:
            return
        folder = replace(found.folder, at=WORKSPACE, copied_ns=1)  # all of it is compared, also what was changed before
        notes = {**found.notes, "at": WORKSPACE, "how": "copy"}
        self._folder = OpenFolder(folder=folder, fd=os.dup(found.fd), notes=notes, known=dict(_read_known(found)))
        self._stack.callback(self._folder.close)
        self._note(self._folder)

    def _require_folder(self) -> OpenFolder:
        self._require_open()
        if self._folder is None:
            raise InvalidRequest("this sandbox has no folder of the host; open it with workspace=PATH")
        return self._folder

    async def diff(self) -> Diff:
        """Return what the sandbox has changed in the host's folder, compared with what the host has now.

        All that runs inside stands still while it is looked at. `commit` with the diff, or with its `id`, writes
        exactly that. Raises InvalidRequest where the sandbox has no folder, SandboxFileError for too much.
        """
        found = self._require_folder()
        async with self._snapshot(found) as snapshot:
            return await _stoppable(lambda check: _compare(found, snapshot, check))

    async def changes(self) -> tuple[Change, ...]:
        """Return what the sandbox has changed, as data; see `diff`."""
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
        branch: str | None = None,
        author: str | None = None,
        message: str | None = None,
    ) -> Committed:
        """Write what the sandbox has changed to the host's folder, and return what was written.

        With a `diff`, or its id, exactly what that says is written, or nothing: where the sandbox has changed more
        since, that is an error. `paths` are those to be written, with all below them; others stay in the sandbox.
        Changes that are dangerous (`Diff.dangerous`) are written only where `dangerous` names their paths, or is true.
        Where the host has changed a file as well, `ours` has the paths that get the sandbox's version, `theirs` those
        that keep the host's, `merge` those of text files that get the changes of both to what git's HEAD has, in the
        sandbox as well; else, and where both have changed the same lines, nothing is written.

        With `branch` the changes become a commit on a new branch of the folder's git repository, with an `author`
        ("NAME <EMAIL>") and a `message`, and no file is written. Commits that were made inside become references below
        `refs/cloche/` in any case.

        No reader sees half a file, but one who reads while it is written may see some files new and some old. What is
        interrupted is completed or undone by the next call.

        Raises WorkspaceConflict, InvalidRequest, BackendUnavailable.
        """
        found = self._require_folder()
        wanted = diff.id if isinstance(diff, Diff) else diff
        async with self._snapshot(found) as snapshot:
            choice = Choice(paths=paths, dangerous=dangerous, ours=ours, theirs=theirs, merge=merge)
            onto = BranchOptions(name=branch, author=author, message=message) if branch is not None else None
            name = _name_for(self._name)
            done = await _stoppable(
                lambda check: _commit(found, snapshot, wanted, name, choice, onto, self.audit, check)
            )
        if merge and branch is None:  # the sandbox gets the host's side of it, too
            still = {one.path for one in await self.changes()}
            await self.discard([path for path in merge if path in still.intersection(done.written)])
        return done

    async def discard(self, paths: Collection[str] | None = None) -> tuple[str, ...]:
        """Give the sandbox the host's files back, and return the paths: of all that it changed, or of `paths`.

        Raises SandboxFileError for what its user may not write.
        """
        from cloche.workspace.archive import pack

        found = self._require_folder()
        live = self._require_live("discard")
        changes = _selected((await self.diff()).changes, paths)
        back = [one.old_path or one.path for one in changes if one.what != "added"]
        packed = await _finished(lambda: pack(found.fd, sorted(back), max_bytes=found.folder.disk_bytes))
        with packed.file:
            for one in sorted(changes, key=lambda one: one.path, reverse=True):
                if one.what != "removed" and (one.kind != "directory" or one.what == "added"):
                    await live.remove_path(f"{found.folder.at}/{one.path}", recursive=True)
            if back:
                await live.unpack_path(found.folder.at, _in_threads(packed.pieces()))
        return tuple(one.path for one in changes)

    @asynccontextmanager
    async def _snapshot(self, found: OpenFolder) -> AsyncIterator[Snapshot]:
        from cloche.workspace.snapshot import SnapshotReader

        live = self._checked(self._require_open())
        folder = found.folder
        said: dict[str, Any] = {}
        reader = SnapshotReader(
            tempfile.gettempdir(), most=folder.disk_bytes, entries=MOST_ENTRIES, is_whole=bool(folder.copied_ns)
        )
        try:
            stream = cast("SupportsChanges", live).changes_stream(
                folder.at if folder.copied_ns else CHANGES,
                since=folder.copied_ns or None,
                max_bytes=folder.disk_bytes,
                max_entries=MOST_ENTRIES,
                note_answer=said.update,
            )
            # All stands still until the stream is closed, so that is left to no collector.
            async with aclosing(cast("AsyncGenerator[bytes]", stream)) as pieces:
                async for piece in pieces:
                    await finish(asyncio.to_thread(reader.feed, piece))
            snapshot = reader.finish(said)
        except ValueError as error:
            raise InvalidRequest(f"workspace: what the sandbox says of its changes makes no sense: {error}") from error
        finally:
            reader.close()
        try:
            yield snapshot
        finally:
            snapshot.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Say which changes are written, and what is said yes to."""

    paths: Collection[str] | None
    dangerous: bool | Collection[str]
    ours: Collection[str]
    theirs: Collection[str]
    merge: Collection[str] = ()

    def check(self, diff: Diff) -> tuple[Change, ...]:
        """Return the changes to be written. Raises InvalidRequest for one that needs a yes of its own."""
        for name in ("paths", "ours", "theirs", "merge"):
            if isinstance(getattr(self, name), str):
                raise InvalidRequest(f"{name}: give a list of paths, not one text")
        theirs = set(self.theirs)
        chosen = tuple(one for one in _selected(diff.changes, self.paths) if one.path not in theirs)
        known = {one.path for one in diff.changes}
        unknown = sorted({*self.ours, *theirs, *self.merge} - known)
        if unknown:
            raise InvalidRequest(f"no change has the path {unknown[0]!r}; see the diff for those that there are")
        if self.dangerous is not True:
            agreed = set() if self.dangerous is False else set(self.dangerous)
            refused = [one for one in chosen if one.dangers and one.path not in agreed]
            if refused:
                told = "; ".join(f"{one.path!r} ({', '.join(one.dangers)})" for one in refused[:10])
                more = f" and {len(refused) - 10} more" if len(refused) > 10 else ""
                raise InvalidRequest(
                    f"nothing was written: these changes need a yes of their own: {told}{more}; look at them, then "
                    "name them (dangerous=[...], --dangerous PATH), or leave them out (paths=[...])"
                )
        return chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchOptions:
    """Say which branch changes become, and who has made the commit."""

    name: str
    author: str | None
    message: str | None


def _selected(changes: Sequence[Change], paths: Collection[str] | None) -> tuple[Change, ...]:
    """Return the changes at some paths, or below them. Raises InvalidRequest for a path without any."""
    if paths is None:
        return tuple(changes)
    if isinstance(paths, str):
        raise InvalidRequest("paths: give a list of paths, not one text")
    wanted = {path.rstrip("/"): False for path in paths}
    found = []
    for one in changes:
        hits = [path for path in _above(one.path) if path in wanted]
        for path in hits:
            wanted[path] = True
        if hits:
            found.append(one)
    missing = [path for path, is_met in wanted.items() if not is_met]
    if missing:
        raise InvalidRequest(f"paths: nothing was changed at {missing[0]!r}; see the diff for what was")
    needed = {above for one in found for above in _above(one.path)}
    parents = [one for one in changes if one.path in needed and one.kind == "directory" and one.what == "added"]
    kept = {one.path for one in (*found, *parents)}
    return tuple(one for one in changes if one.path in kept)


def _above(path: str) -> Iterator[str]:
    """Yield a path and those of the folders above it."""
    while path:
        yield path
        path = path.rpartition("/")[0]


def _name_for(name: str | None) -> str:
    return name if name is not None else f"sandbox-{os.urandom(4).hex()}"


def _compare(found: OpenFolder, snapshot: Snapshot, check: Callable[[], None]) -> Diff:
    from cloche.workspace.compare import make_diff

    folder = found.folder
    entries = {path: one for path, one in snapshot.entries.items() if not is_program_file(os.fsdecode(path))}
    snapshot = replace(snapshot, entries=entries)
    return make_diff(
        snapshot, found.fd, hidden={*folder.hidden, *folder.left_out}, opened_ns=folder.opened_ns,
        known=_read_known(found), check=check,
    )  # fmt: skip


def _commit(
    found: OpenFolder,
    snapshot: Snapshot,
    wanted: str | None,
    name: str,
    choice: Choice,
    branch: BranchOptions | None,
    audit: Audit | None,
    check: Callable[[], None],
) -> Committed:
    from cloche.workspace.commit import commit
    from cloche.workspace.git import commit_to_branch

    compared_ns = _after_now()
    diff = _compare(found, snapshot, check)
    check()  # from here on it is done to its end
    if snapshot.is_partial:
        raise InvalidRequest(
            "nothing was written: the sandbox has changed more than can be looked at; remove what it has made"
        )
    if wanted is not None and diff.id != wanted:
        raise InvalidRequest(
            "nothing was written: the sandbox, or the host, has changed since this diff was made; look at it anew"
        )
    chosen = choice.check(diff)
    if audit is not None:
        audit.record(
            "commit", folder=found.folder.path, sandbox=name, diff=diff.id, paths=len(chosen),
            dangerous=[one.path for one in chosen if one.dangers][:MOST_TOLD], branch=branch.name if branch else None,
        )  # fmt: skip
    refs, refused = _fetched(found, snapshot, name)
    if branch is not None:
        made = commit_to_branch(
            found.fd, snapshot, chosen, branch.name, author=branch.author or "Cloche <cloche@localhost>",
            message=branch.message or f"Changes of {name}",
        )  # fmt: skip
        return Committed(refs={**refs, **made}, left=refused)
    snapshot, chosen = _merged(found, snapshot, chosen, choice.merge)
    choose: dict[str, Literal["theirs", "ours"]] = dict.fromkeys((*choice.ours, *choice.merge), "ours")
    done = commit(
        found.fd, snapshot, chosen, state=_state(), owner=found.folder.owner, choose=choose,
        unchanged_since_ns=compared_ns,
    )  # fmt: skip
    _note_known(found, done.written)
    return replace(done, refs=refs, left={**done.left, **refused})


def _merged(
    found: OpenFolder, snapshot: Snapshot, changes: tuple[Change, ...], merge: Collection[str]
) -> tuple[Snapshot, tuple[Change, ...]]:
    """Return them with the changes of both sides in the files that are to be merged. Raises WorkspaceConflict."""
    if not merge:
        return snapshot, changes
    from cloche.workspace.git import base_of, merge_text

    wanted, refused, done = set(merge), {}, []
    entries = dict(snapshot.entries)
    for one in changes:
        entry = entries.get(os.fsencode(one.path))
        if one.path not in wanted or not one.conflict or entry is None:
            done.append(one)
            continue
        base, theirs = base_of(found.fd, one.path), _text_of(found.fd, one.path)
        text = None
        if base is not None and theirs is not None and one.kind == "file" and one.size <= MOST_MERGED_BYTES:
            text = merge_text(base, b"".join(snapshot.read(entry)), theirs)
        if text is None:
            refused[one.path] = "cannot be merged: " + (
                "git has no text of it" if base is None or theirs is None else "both have changed the same lines"
            )
            continue
        entry, sha256 = snapshot.add(entry, text)
        entries[entry.path] = entry
        done.append(replace(one, size=len(text), sha256=sha256))
    if refused:
        told = "; ".join(f"{escape_name(path)} {why}" for path, why in list(refused.items())[:10])
        raise WorkspaceConflict(f"nothing was written: {told}", paths=refused)
    return replace(snapshot, entries=entries), tuple(done)


def _text_of(folder: int, path: str) -> bytes | None:
    """Return a file of the host's that is to be merged; None where it is none, or is too large."""
    *above, name = path.split("/")
    try:
        with hostfs.descended(folder, above) as at:
            fd, _ = hostfs.open_regular(name, at)
            with open(fd, "rb") as file:
                data = file.read(MOST_MERGED_BYTES + 1)
    except OSError:
        return None
    return data if len(data) <= MOST_MERGED_BYTES else None


def _fetched(found: OpenFolder, snapshot: Snapshot, name: str) -> tuple[Mapping[str, str], dict[str, str]]:
    """Return the references that were made of the guest's commits, and why there are none of those that git refuses."""
    from cloche.workspace.git import fetch_commits

    if b".git" not in snapshot.entries:
        return {}, {}
    try:
        return fetch_commits(found.fd, snapshot, name), {}
    except (InvalidRequest, BackendUnavailable, WorkspaceFailed) as error:
        return {}, {".git": f"commits that were made inside are not fetched: {error}"}


def recovered() -> list[str]:
    """Complete or undo what interrupted commits left, in all folders; return a sentence for each.

    What was noted of sandboxes that have long ended is removed.
    """
    from cloche.workspace.recover import recover_all

    state = state_file("workspaces")
    if state is None or not os.path.isdir(state):
        return []
    for entry in os.scandir(state):
        if entry.name.startswith(COMMITTED) and entry.stat(follow_symlinks=False).st_mtime < time.time() - KNOWN_S:
            os.unlink(entry.path)
    return recover_all(state)


# What a sandbox has committed has changed on the host since it was opened, and is no conflict for that.


def _known_file(folder: HostFolder) -> str:
    return os.path.join(_state(), f"{COMMITTED}{folder.opened_ns}-{folder.identity[0]}-{folder.identity[1]}.json")


def _read_known(found: OpenFolder) -> dict[str, tuple[int, int]]:
    """Return, by path, inode and change time of what this sandbox has committed."""
    if found.known is not None:
        return found.known
    try:
        with open(_known_file(found.folder), "rb") as file:
            return {str(path): (int(row[0]), int(row[1])) for path, row in json.load(file).items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        log.warning("what was committed before is not known, so it may count as a conflict: %s", error)
        return {}


def _note_known(found: OpenFolder, written: Sequence[str]) -> None:
    known = _read_known(found)
    for path in written:
        *above, name = path.split("/")
        try:
            with hostfs.descended(found.fd, above) as at:
                state = hostfs.look(name, at)
        except OSError:
            state = None
        known[path] = (state.st_ino, state.st_ctime_ns) if state is not None else (0, 0)
    if found.known is not None:
        return
    try:
        folder, name = os.path.split(_known_file(found.folder))
        at = hostfs.open_folder(folder)
        try:
            hostfs.replace(at, name, json.dumps(known).encode(), mode=0o600, kept=0o600)
        finally:
            os.close(at)
    except OSError as error:
        log.warning("what was committed cannot be noted, so it will count as a conflict: %s", error)


async def _opened(opening: Callable[[], OpenFolder]) -> OpenFolder:
    """Open in a thread; what that opens after nobody waits for it any more is closed."""
    work = asyncio.ensure_future(asyncio.to_thread(opening))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        work.add_done_callback(_close_opened)
        raise


def _close_opened(work: asyncio.Future[OpenFolder]) -> None:
    if not work.cancelled() and work.exception() is None:
        work.result().close()


async def _finished(work: Callable[[], T]) -> T:
    """Do in a thread what uses descriptors of ours; also who is cancelled waits for its end.

    A thread cannot be cancelled, and a descriptor that is closed below it may be another folder's by its next call.
    """
    return await finish(asyncio.to_thread(work))


async def _stoppable(work: Callable[[Callable[[], None]], T]) -> T:
    """Do likewise what calls a function now and then, by which it is ended where nobody waits for it any more."""
    is_over = False

    def check() -> None:
        if is_over:
            raise _NobodyWaits

    doing = asyncio.ensure_future(asyncio.to_thread(work, check))
    try:
        return await asyncio.shield(doing)
    except asyncio.CancelledError:
        is_over = True
        with suppress(Exception):  # also what it fails with is nobody's
            await finish(doing)
        raise


class _NobodyWaits(Exception):
    """End a work in a thread."""


async def _in_threads(pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    while piece := await finish(asyncio.to_thread(next, pieces, b"")):
        yield piece
