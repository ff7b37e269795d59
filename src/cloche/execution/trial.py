"""A commit tried before it is made: a command runs on the host's folder as it would be afterwards, in another sandbox.

That sandbox is thrown away. It has the limits, the level, the toolchains, the hidden paths and the home folder of the
first one (where packages are cached), and no network, no secrets and no functions of the caller. The changes are those
of one snapshot, read like those of a commit.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, cast

from cloche.core.changes import Change, Diff, InsideBranch
from cloche.core.errors import SandboxFileError
from cloche.core.loops import finish
from cloche.core.policy import Policy
from cloche.core.record import replace
from cloche.core.result import Result

from .commits import CommitChoice, choose, is_of_git, name_for, take_commits
from .git_inside import in_threads
from .host_folder import HostFolderOperations, stoppable
from .open_folder import FolderOptions, OpenFolder
from .prepare import Prepared
from .processes import ProcessOperations
from .run import OnOutput

if TYPE_CHECKING:
    from cloche.core.protocols import OpenLiveSandbox
    from cloche.workspace.snapshot import Snapshot

# What a trial has of the rules of the sandbox. Of everything else, the network first, it has none.
_SAME = (
    "read_only_root", "writable_paths", "user", "users", "account", "seccomp", "drop_capabilities", "languages",
    "toolchains", "toolchains_hidden", "toolchains_path", "layers", "home", "level", "runtime", "require_level",
    "require_controls", "best_effort", "accept_claimed", "accept_claimed_level", "warm", "preload", "package_managers",
)  # fmt: skip


class TrialOperations(ProcessOperations, HostFolderOperations):
    """Try the changes of a sandbox before they are written, and save them."""

    async def try_commit(
        self,
        shell: str,
        diff: Diff | str,
        *,
        paths: Collection[str] | None = None,
        theirs: Collection[str] = (),
        hunks: Mapping[str, Collection[str]] | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | str | None = None,  # noqa: ASYNC109 - it ends the command, not the call
        on_output: OnOutput | None = None,
    ) -> Result:
        """Run a line of shell on the folder as it would be after this commit, and write nothing.

        It runs in another sandbox, with this one's limits, toolchains and home folder on the host, and without a
        network. `paths`, `theirs` and `hunks` are as for `commit`; dangerous changes are part of it. `timeout` and
        `on_output` are as for `exec`. Raises the errors of `commit`.
        """
        open_folder = self._require_folder()
        async with self._trial(open_folder, env) as trial:
            async with self._chosen(open_folder, diff, paths, theirs, hunks) as (snapshot, _, changes):
                await _put(trial._require_live("try_commit"), trial._require_folder().folder.at, snapshot, changes)
            return await trial.exec(shell=shell, timeout=timeout, on_output=on_output)

    async def save_changes(self, target: str, diff: Diff | str | None = None) -> int:
        """Write the new contents of all changes as a tar archive to a new file of mode 0600; return its bytes.

        The member `changes.patch` has the diff, also of removed files. Raises OSError, FileExistsError among them.
        """
        from cloche.workspace.archive import save_changes

        async with self._chosen(self._require_folder(), diff, None, (), None) as (snapshot, whole, changes):
            return await finish(asyncio.to_thread(save_changes, snapshot, changes, whole.patch, target))

    async def commits_inside(self) -> tuple[InsideBranch, ...]:
        """Return the branches that were made or moved inside, with their new commits and the dangerous changes.

        Raises InvalidRequest for commits that git refuses, BackendUnavailable without git, WorkspaceFailed.
        """
        from cloche.workspace.git_commits import inside_branches

        open_folder = self._require_folder()
        async with self._snapshot(open_folder) as snapshot:
            return await stoppable(lambda check: inside_branches(open_folder.fd, snapshot, check))

    async def take_commits(
        self, source: str, branch: str, *, tip: str | None = None, as_user: bool = False
    ) -> Mapping[str, str]:
        """Make a new branch of the host's repository with the commits of a branch inside; return its reference.

        With `tip`, it is an error if the branch has moved since. Authors and messages stay; with `as_user`, commits are
        signed anew, by this user as their committer, if this user's git configuration has `commit.gpgSign`.
        """
        open_folder = self._require_folder()
        async with self._snapshot(open_folder) as snapshot:
            return await finish(
                asyncio.to_thread(
                    take_commits, open_folder, snapshot, source, branch, name_for(self._name), tip, as_user=as_user
                )
            )

    @asynccontextmanager
    async def _chosen(
        self,
        open_folder: OpenFolder,
        diff: Diff | str | None,
        paths: Collection[str] | None,
        theirs: Collection[str],
        hunks: Mapping[str, Collection[str]] | None,
    ) -> AsyncIterator[tuple[Snapshot, Diff, tuple[Change, ...]]]:
        expected_id = diff.id if isinstance(diff, Diff) else diff
        choice = CommitChoice(paths=paths, dangerous=True, ours=(), theirs=theirs, hunks=hunks or {})
        async with self._snapshot(open_folder) as taken:
            snapshot, whole, changes = await stoppable(
                lambda check: choose(open_folder, taken, expected_id, choice, check)
            )
            yield snapshot, whole, tuple(change for change in changes if not is_of_git(change))

    def _trial(
        self, open_folder: OpenFolder, env: Mapping[str, str] | None
    ) -> AbstractAsyncContextManager[TrialOperations]:
        from cloche.workspace.allowed import at_for

        folder = open_folder.folder
        kind: Any = type(self)  # an AsyncSandbox, which this module must not import
        trial = kind(env={**self._env, **(env or {})}, live=True, backend=self.backend, workspace=folder.path)
        trial._prepared = _apart(self._prepared)
        trial._folder_options = FolderOptions(
            path=folder.path, at=None if folder.copied_ns or at_for(folder.path) == folder.at else folder.at,
            disk_bytes=folder.disk_bytes, read=tuple(further.path for further in folder.read_only),
            hidden=folder.hidden,
        )  # fmt: skip
        return cast("AbstractAsyncContextManager[TrialOperations]", trial)


def _apart(prepared: Prepared) -> Prepared:
    """Return the rules for a sandbox that has the same programs and limits, and reaches nothing."""
    policy = Policy(**{name: getattr(prepared.policy, name) for name in _SAME})
    notes = {name: note for name, note in prepared.notes.items() if name != "workspace"}
    return replace(prepared, policy=policy, notes=notes, settings=replace(prepared.settings, toolchains=()))


async def _put(live: OpenLiveSandbox, folder: str, snapshot: Snapshot, changes: Sequence[Change]) -> None:
    """Make the changes in another sandbox's view of the same folder."""
    from cloche.workspace.archive import entries_of, pack_snapshot

    gone = {change.old_path if change.what == "renamed" else change.path for change in changes if _takes_away(change)}
    for path in sorted(gone, reverse=True):  # the contents of a folder before the folder
        with suppress(SandboxFileError):  # a folder stays with what else is in it
            await live.remove_path(f"{folder}/{path}")
    await live.unpack_path(folder, in_threads(pack_snapshot(snapshot, entries_of(snapshot, changes))))


def _takes_away(change: Change) -> bool:
    return change.what in ("removed", "renamed") or bool(change.old_kind)
