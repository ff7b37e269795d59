"""A workspace as its owner holds it: a mount that the next jail attaches, and what is known of the files in it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence

from cloche.core.limits import Limits
from cloche.core.result import SaveFiles

from .collect import Collection, Known, collect, is_as_given
from .keep import keep_copies, keep_mount

SMALL_BYTES, SMALL_FILES = 256 * 1024, 32


class Workspace:
    """Hold a workspace. `folder` is where it is below level jail; at that level it is empty, and a mount is handed in.

    A mount can be attached once. Whoever attaches it hands back another one of the same files.
    """

    def __init__(self, limits: Limits, folder: str):
        self._max_bytes, self._folder = limits.disk_bytes, folder
        self._known: dict[str, Known] = {}
        self.fd = -1
        self.has_owner = False  # a sandbox that lets go of it at its own end, or when it moves to another one
        self.has_node = False  # an interpreter that may go on in it

    def twin(self) -> Workspace:
        """Return the holder of a copy that is still to be made, of which the same is known."""
        found = Workspace.__new__(Workspace)
        found._max_bytes, found._folder, found._known = self._max_bytes, self._folder, dict(self._known)
        found.fd, found.has_owner, found.has_node = -1, False, False
        return found

    def take(self, fds: Sequence[int]) -> None:
        """Hold the mount that came along in place of the one before; a folder is opened once."""
        fresh = fds[0] if fds else -1
        if fresh < 0 and self.fd < 0 and self._folder:
            fresh = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        if fresh >= 0:
            self.drop()
            self.fd = fresh

    def drop_unless_needed(self) -> None:
        """Let go of it when neither a sandbox nor an interpreter needs it."""
        if not (self.has_owner or self.has_node):
            self.drop()

    def drop(self) -> None:
        """Let go of it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

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

    async def collected(self, given: Mapping[str, bytes], *, is_last: bool = False) -> Collection:
        """Look at the files; in a thread when there are many. After the last run nothing needs to be known."""
        if is_last and not self._known and self._is_as_given(given):
            return Collection(known={}, changed=(), skipped=0)
        found = self._collect(given) if self._is_small() else await asyncio.to_thread(self._collect, given)
        self._known = dict(found.known)
        return found

    def _is_as_given(self, given: Mapping[str, bytes]) -> bool:
        state = os.fstatvfs(self.fd)
        return not self._folder and is_as_given(self.fd, given, entries=state.f_files - state.f_ffree)

    def _is_small(self) -> bool:
        """Tell whether hashing everything takes less time than handing the work to a thread."""
        state = os.fstatvfs(self.fd)
        return self.stored_bytes() < SMALL_BYTES and state.f_files - state.f_ffree < SMALL_FILES

    def stored_bytes(self) -> int:
        """Return the bytes that are stored, found or not."""
        state = os.fstatvfs(self.fd)
        return (state.f_blocks - state.f_bfree) * state.f_frsize

    def _collect(self, given: Mapping[str, bytes]) -> Collection:
        return collect(self.fd, self._known, given, max_bytes=self._max_bytes)

    def saver(self, found: Collection) -> SaveFiles | None:
        """Keep what `Result.save` needs as long as the result lives; None when there is nothing to save."""
        if not found.changed:
            return None
        keep = keep_copies if self._folder else keep_mount
        return keep(self.fd, found.changed)
