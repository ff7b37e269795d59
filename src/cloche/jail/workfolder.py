"""The folders of the host that stand in for /workspace and /tmp where no mount can be made."""

from __future__ import annotations

import os

CHECK_EVERY = 5
PASSABLE = 0o711  # whoever knows a name below may go there; nobody may look around


class WorkFolder:
    """Make, measure and remove one sandbox's folders. `owner` is the guest's uid when it differs from ours."""

    __slots__ = ("_excused", "_last", "_stored", "_tick", "folder", "owner", "tmp", "workspace")

    def __init__(self, folder: str, workspace: str, tmp: str, owner: int | None):
        self.folder, self.workspace, self.tmp, self.owner = folder, workspace, tmp, owner
        self._tick, self._last = 0, False
        self._stored = self._excused = (0, 0)

    def create(self) -> None:
        """Make the folders, readable by the guest alone. An existing folder is an error: somebody else's."""
        os.mkdir(self.folder, 0o700)
        if self.owner is not None:
            os.chmod(self.folder, PASSABLE)
        for path in (self.workspace, self.tmp):
            self._make(path)

    def _make(self, path: str) -> None:
        os.mkdir(path, 0o700)
        if self.owner is not None:
            os.chown(path, self.owner, self.owner)

    def renew_tmp(self) -> None:
        """Empty /tmp between runs: only the workspace lives on. What overfills it may be cleared up by the next run."""
        self._excused, self._last = self._stored, False
        _remove_below(self.tmp)
        os.rmdir(self.tmp)
        self._make(self.tmp)

    def is_over(self, size_bytes: int, inodes: int, *, is_fresh: bool) -> bool:
        """Tell whether more is stored than allowed; walking costs, so only every few calls look unless `is_fresh`."""
        self._tick += 1
        if is_fresh or self._tick % CHECK_EVERY == 1:
            self._stored = _measure((self.workspace, self.tmp))
            most = zip((size_bytes, inodes), self._excused, strict=True)
            self._last = any(now > max(pair) for now, pair in zip(self._stored, most, strict=True))
        return self._last

    def remove(self) -> None:
        """Remove everything, never following a link."""
        _remove_below(self.folder)
        os.rmdir(self.folder)


def _measure(places: tuple[str, ...]) -> tuple[int, int]:
    """Return bytes stored and number of files below `places`."""
    used = count = 0
    for place in places:
        for folder, folders, files in os.walk(place):
            for name in folders + files:
                try:
                    state = os.lstat(f"{folder}/{name}")
                except OSError:
                    continue
                used += state.st_blocks * 512
                count += 1
    return used, count


def _remove_below(path: str, dir_fd: int | None = None) -> None:
    """Empty a directory by descriptors, so that a swapped link leads nowhere."""
    here = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)
    try:
        for name in os.listdir(here):
            try:
                os.unlink(name, dir_fd=here)
            except IsADirectoryError:
                os.chmod(name, 0o700, dir_fd=here)
                _remove_below(name, here)
                os.rmdir(name, dir_fd=here)
    finally:
        os.close(here)
