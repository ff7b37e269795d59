"""A workspace as its owner holds it: a mount that the next jail attaches, and what is known of the files in it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext

from cloche.core.errors import OutcomeUnknown
from cloche.core.languages import PROGRAM_FILES
from cloche.core.limits import Limits
from cloche.jail.spec import Run

from ..saving import Changes
from ..walking import MOST_S, Until, in_thread, time_for_files
from .collect import Collection, Known, collect, is_as_given, list_paths
from .keep import KeptCopies, keep_mount

SMALL_BYTES, SMALL_FILES, SMALL_S = 512 * 1024, 128, 0.02
Show = Callable[[int], None]
Halted = Callable[[], AbstractAsyncContextManager[None]]


class Workspace:
    """Hold a workspace. `folder` is where it is below level jail; at that level it is empty, and a mount is handed in.

    A mount can be attached once. Whoever attaches it hands back another one of the same files.
    """

    def __init__(self, limits: Limits, folder: str, show: Show | None = None):
        """Take `show` where the guest's id is one that we cannot be: what makes its files ours in a second mount."""
        self._max_bytes, self._folder, self._show = limits.disk_bytes, folder, show
        self._shown, self._is_shown = -1, False
        self._known: dict[bytes, Known] = {}
        self._program = ""  # the file of the last one, which lies there until the next run
        self.fd = -1
        self.has_owner = False  # a sandbox that lets go of it at its own end, or when it moves to another one
        self.has_node = False  # an interpreter that may go on in it

    def twin(self) -> Workspace:
        """Return the holder of a copy that is still to be made, of which the same is known."""
        found = Workspace.__new__(Workspace)
        found._max_bytes, found._folder, found._known = self._max_bytes, self._folder, dict(self._known)
        found._program, found._show = self._program, self._show
        found._shown, found._is_shown = -1, False
        found.fd, found.has_owner, found.has_node = -1, False, False
        return found

    def take(self, fds: Sequence[int]) -> None:
        """Hold the mount that came along in place of the one before; a folder is opened once.

        The mount by which we see the files comes with the first of each file system.
        """
        fresh, *shown = fds or (-1,)
        if fresh >= 0 and self._show is not None and not self._hold_shown(fresh, shown):
            os.close(fresh)  # of a guest that failed before there was anything in it
            self.drop()
            return
        if fresh < 0 and self.fd < 0 and self._folder:
            fresh = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        if fresh >= 0:
            self._drop_mount()
            self.fd = fresh

    def _hold_shown(self, fresh: int, shown: Sequence[int]) -> bool:
        """Tell whether we can see what is in a mount: by what came along, or by what we have of the same files."""
        if shown:
            self._drop_shown()
            self._shown = shown[0]
        return self._shown >= 0 and os.fstat(self._shown).st_dev == os.fstat(fresh).st_dev

    @property
    def seen(self) -> int:
        """Return what the files are to be looked at by. Raises OutcomeUnknown where they cannot be shown to us."""
        if self._show is None or self.fd < 0:
            return self.fd
        if not self._is_shown:
            try:
                self._show(self._shown)
            except OSError as error:
                raise OutcomeUnknown(
                    f"what ran has run, and its files cannot be seen: {error.strerror or error}"
                ) from error
            self._is_shown = True
        return self._shown

    def clear_for(self, run: Run) -> None:
        """Have a run that is about to be sent remove the program of the one before it, unless it replaces that."""
        before, self._program = self._program, next((path for path, _, _ in run.files if path in PROGRAM_FILES), "")
        if before != self._program:
            run.leftover = before

    def drop_unless_needed(self) -> None:
        """Let go of it when neither a sandbox nor an interpreter needs it."""
        if not (self.has_owner or self.has_node):
            self.drop()

    def drop(self) -> None:
        """Let go of it."""
        self._drop_mount()
        self._drop_shown()

    def _drop_mount(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _drop_shown(self) -> None:
        if self._shown >= 0:
            os.close(self._shown)
        self._shown, self._is_shown = -1, False

    def forget(self) -> None:
        """Let go of it and of what is known: another one takes its place."""
        self.drop()
        self._known.clear()

    def is_untouched(self) -> bool:
        """Tell, cheaply, that no file is there and none is known."""
        if self._folder or self.fd < 0 or self._known:
            return False
        state = os.fstatvfs(self.fd)
        return state.f_files - state.f_ffree <= 1

    async def collected(
        self, given: Mapping[str, bytes], *, timeout_s: float, halted: Halted = nullcontext, is_last: bool = False
    ) -> Changes:
        """Look at the files after what had `timeout_s`; after the last run nothing needs to be known.

        Where there are many, that is done in a thread, with what still runs there `halted`.
        """
        if is_last and not self._known and self._is_as_given(given):
            return Changes()
        if (few := self._collect_few(given)) is not None:
            return self._changes(few, self.seen)
        until, copies = Until(time_for_files(timeout_s)), KeptCopies() if self._folder else None
        fd, known = os.dup(self.seen), self._known  # of our own: a sandbox that is closed lets go of its own

        def look() -> Collection:
            return collect(fd, known, given, max_bytes=self._max_bytes, until=until, copies=copies)

        try:
            async with halted():
                found = await in_thread(until, look)
            return self._changes(found, fd, copies)
        finally:
            os.close(fd)

    def _changes(self, found: Collection, fd: int, copies: KeptCopies | None = None) -> Changes:
        """Take note of what was found, and keep what `Result.save` needs as long as the result lives."""
        self._known = dict(found.known)
        save = None
        if found.changed:
            save = keep_mount(fd, found.changed) if copies is None else copies.saver(found.changed)
        return Changes(records=found.changed, skipped=found.skipped, partial=found.partial, save=save)

    async def paths(self, path: str, *, halted: Halted) -> tuple[str, ...]:
        """Return the paths of the files below `path`. Raises SandboxFileTooLarge where there are too many."""
        until, fd = Until(MOST_S), os.dup(self.seen)
        try:
            async with halted():
                return await in_thread(until, lambda: list_paths(fd, path, until))
        finally:
            os.close(fd)

    def _is_as_given(self, given: Mapping[str, bytes]) -> bool:
        state = os.fstatvfs(self.fd)
        return not self._folder and is_as_given(self.fd, given, entries=state.f_files - state.f_ffree)

    def _collect_few(self, given: Mapping[str, bytes]) -> Collection | None:
        """Look at the files here and now, where that takes less time than handing the work to a thread; else None."""
        state = os.fstatvfs(self.fd)
        stored = (state.f_blocks - state.f_bfree) * state.f_frsize
        if self._folder or stored >= SMALL_BYTES or state.f_files - state.f_ffree >= SMALL_FILES:
            return None
        # What still runs may add to it meanwhile; and what takes no room may say to be of any size.
        found = collect(
            self.seen, self._known, given, max_bytes=SMALL_BYTES, until=Until(SMALL_S), max_entries=SMALL_FILES
        )
        return None if found.partial & {"time", "entries", "bytes"} else found

    def stored_bytes(self) -> int:
        """Return the bytes that are stored, found or not."""
        state = os.fstatvfs(self.fd)
        return (state.f_blocks - state.f_bfree) * state.f_frsize
