"""Remove artifacts beside the log, by age and by size, oldest first, and never without an event that names them.

Theory of operation: the `removal` event is written first. So a crash leaves at worst a file that the log calls removed,
and the next pruning removes it. Only this user's own regular files whose name is a hash are touched, each by its name
in an open folder: symbolic links are not followed, and files with several hard links are not removed. Artifacts of the
last minute stay, since the event that names them may not be written yet (see `artifacts`).

A process that stores an artifact starts pruning at most once an hour: in a thread, with a time limit, a few files per
lock, and folders in random order. If the time runs out, pruning continues a minute later. The files seen until then are
a random sample, because hashes are spread evenly over all folders. So they may use the same share of the allowed size,
plus three standard deviations.
"""

from __future__ import annotations

import fcntl
import logging
import math
import os
import random
import re
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, Protocol

from cloche.core.errors import AuditFailed
from cloche.core.record import dataclass, field

from .artifacts import FOLDER
from .chain import MOST_ITEMS, REMOVAL
from .writer import LOCK_TIMEOUT_S, failure, lock, opened_below, opened_file, opened_folder

YOUNG_S = 60.0
MOST_ODD = 20  # paths listed in a report
UNFINISHED_S = 24 * 3600.0  # an older temporary file belongs to an interrupted write
CHECK_EVERY_S = 60.0  # between checks whether pruning is due
STAMP = f"{FOLDER}.pruned"  # beside the log; its mtime is the time of the last pruning
PRUNE_EVERY_S = 3600.0
COMPLETE, INCOMPLETE = 1, 2  # size of the stamp: all artifacts were examined, or not
TIME_BUDGET_S = 1.0
SCAN_BUDGET_S = 0.5  # of TIME_BUDGET_S; the rest is for removing
MOST_SEEN = 50_000
FILES_PER_LOCK = 64
log = logging.getLogger("cloche.audit")
THREAD = "cloche-audit-prune"
_SUBFOLDER = re.compile(r"[0-9a-f]{2}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_UNFINISHED = re.compile(r"\.[0-9a-f]{64}\.[0-9a-f]{12}")


class Log(Protocol):
    """The log that records removals."""

    folder: str

    def record(self, kind: str, **fields: Any) -> object:  # noqa: ANN401 - JSON
        """Write one event. Raises AuditFailed."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """One file: its hash, when it was last stored, and its size."""

    time_ns: int
    digest: str
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneBounds:
    """Limits of one pruning: a deadline (monotonic clock), the files examined, and the files removed per lock."""

    until: float
    most_seen: int = MOST_SEEN
    at_once: int = FILES_PER_LOCK


@dataclass(slots=True, kw_only=True)
class Pruned:
    """The files that were removed and that are left; `odd` lists files that are no artifacts."""

    removed: int = 0
    removed_bytes: int = 0
    left: int = 0
    left_bytes: int = 0
    odd: list[str] = field(default_factory=list)  # at most MOST_ODD
    share: float = 1.0  # of all folders examined
    is_cut: bool = False  # whether it ended early


def start_pruning(audit: Log, *, most_age_s: float | None, most_bytes: int | None) -> None:
    """Prune in a thread if it is due. The interpreter waits for the thread at exit."""

    def work() -> None:
        try:
            prune_when_due(audit, most_age_s=most_age_s, most_bytes=most_bytes)
        except (AuditFailed, OSError) as error:
            log.warning("stored code and output beside the audit log are not pruned: %s", error)

    try:
        threading.Thread(target=work, name=THREAD, daemon=False).start()
    except RuntimeError as error:  # too many threads, or the interpreter is shutting down
        log.debug("stored code and output beside the audit log will be pruned later: %s", error)


def prune_when_due(
    audit: Log, *, most_age_s: float | None, most_bytes: int | None, bounds: PruneBounds | None = None
) -> Pruned | None:
    """Prune within limits, unless a process has done so in the last hour, or is doing so. Raises AuditFailed."""
    flags = os.O_RDWR | os.O_CREAT
    with (
        opened_folder(audit.folder, create=False) as folder_fd,
        opened_file(folder_fd, STAMP, audit.folder, flags=flags) as stamp,
    ):
        try:
            fcntl.flock(stamp, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        facts = os.fstat(stamp)
        wait_s = {COMPLETE: PRUNE_EVERY_S, INCOMPLETE: CHECK_EVERY_S}.get(facts.st_size, 0.0)
        if 0 <= time.time() - facts.st_mtime < wait_s:
            return None
        bounds = bounds or PruneBounds(until=time.monotonic() + TIME_BUDGET_S)
        pruned = prune(audit, most_age_s=most_age_s, most_bytes=most_bytes, bounds=bounds)
        os.ftruncate(stamp, INCOMPLETE if pruned.is_cut else COMPLETE)
        os.utime(stamp)
        return pruned


def prune(
    audit: Log,
    *,
    most_age_s: float | None = None,
    most_bytes: int | None = None,
    is_trial: bool = False,
    bounds: PruneBounds | None = None,
) -> Pruned:
    """Remove artifacts above that age, then the oldest until the remaining ones fit; the event is written first.

    With `is_trial` nothing is removed; `bounds` end it early. Raises AuditFailed; nothing is ever removed without an
    event.
    """
    pruned = Pruned()
    path = f"{audit.folder}/{FOLDER}"
    try:
        with opened_folder(audit.folder, create=False), opened_folder(path, create=False) as folder_fd:
            all_of_them = _artifacts(folder_fd, path, pruned, is_trial=is_trial, is_shuffled=bounds is not None)
            artifacts = sorted(_within(bounds, all_of_them, pruned), key=lambda artifact: artifact.time_ns)
            most_bytes = _share(most_bytes, artifacts, pruned.share)
            chosen = chosen_of(artifacts, now_s=time.time(), most_age_s=most_age_s, most_bytes=most_bytes)
            pruned.left, pruned.left_bytes = len(artifacts), sum(artifact.size for artifact in artifacts)
            batches = iter(chosen)
            while batch := list(islice(batches, bounds.at_once if bounds else MOST_ITEMS)):
                removed = batch if is_trial else _remove(audit, folder_fd, path, batch)
                size = sum(artifact.size for artifact in removed)
                pruned.removed, pruned.removed_bytes = pruned.removed + len(removed), pruned.removed_bytes + size
                pruned.left, pruned.left_bytes = pruned.left - len(removed), pruned.left_bytes - size
                if bounds is not None and time.monotonic() > bounds.until:
                    pruned.is_cut = True
                    break
    except FileNotFoundError:
        return pruned
    except OSError as error:
        raise failure(path, error.strerror or str(error)) from error
    return pruned


def chosen_of(
    artifacts: Sequence[Artifact], *, now_s: float, most_age_s: float | None, most_bytes: int | None
) -> list[Artifact]:
    """Return the artifacts to remove; `artifacts` are sorted, oldest first. Pure."""
    remaining_bytes = sum(artifact.size for artifact in artifacts)
    young_ns, old_ns = (now_s - YOUNG_S) * 1e9, (now_s - (most_age_s or 0.0)) * 1e9
    chosen = []
    for artifact in artifacts:
        is_old = most_age_s is not None and artifact.time_ns < old_ns
        is_too_much = most_bytes is not None and remaining_bytes > most_bytes
        if artifact.time_ns >= young_ns or not (is_old or is_too_much):
            break
        chosen.append(artifact)
        remaining_bytes -= artifact.size
    return chosen


def _share(most_bytes: int | None, artifacts: Sequence[Artifact], share: float) -> int | None:
    """Return the size allowed for a sample that is this share of all files."""
    if most_bytes is None or share == 1.0:
        return most_bytes
    return int(most_bytes * share + 3 * math.hypot(*(artifact.size for artifact in artifacts)))


def _within(bounds: PruneBounds | None, artifacts: Iterator[Artifact], pruned: Pruned) -> Iterator[Artifact]:
    for number, artifact in enumerate(artifacts):
        if bounds is not None and (
            number >= bounds.most_seen or time.monotonic() > bounds.until - TIME_BUDGET_S + SCAN_BUDGET_S
        ):
            pruned.is_cut = True
            return
        yield artifact


def _artifacts(folder_fd: int, path: str, pruned: Pruned, *, is_trial: bool, is_shuffled: bool) -> Iterator[Artifact]:
    names = sorted(os.listdir(folder_fd))
    for number, name in enumerate(random.sample(names, len(names)) if is_shuffled else names, 1):
        pruned.share = number / len(names)
        if not _SUBFOLDER.fullmatch(name):
            _note(pruned, f"{path}/{name}")
            continue
        try:
            with opened_below(folder_fd, name, path) as below:
                yield from _artifacts_in(below, f"{path}/{name}", pruned, is_trial=is_trial)
        except (OSError, AuditFailed):  # a link, or a folder that others may write to
            _note(pruned, f"{path}/{name}")


def _note(pruned: Pruned, path: str) -> None:
    if len(pruned.odd) < MOST_ODD:
        pruned.odd.append(path)


def _artifacts_in(below: int, path: str, pruned: Pruned, *, is_trial: bool) -> Iterator[Artifact]:
    for name in os.listdir(below):
        with suppress(FileNotFoundError):
            facts = os.stat(name, dir_fd=below, follow_symlinks=False)
            is_ours = stat.S_ISREG(facts.st_mode) and facts.st_uid == os.geteuid() and facts.st_nlink == 1
            if is_ours and _DIGEST.fullmatch(name) and name.startswith(path[-2:]):
                yield Artifact(time_ns=facts.st_mtime_ns, digest=name, size=facts.st_size)
            elif is_ours and _UNFINISHED.fullmatch(name):
                if facts.st_mtime < time.time() - UNFINISHED_S and not is_trial:
                    os.unlink(name, dir_fd=below)  # no event names it
            else:
                _note(pruned, f"{path}/{name}")


def _remove(audit: Log, folder_fd: int, path: str, batch: Sequence[Artifact]) -> list[Artifact]:
    """Remove the artifacts that were not stored again in the meantime."""
    lock(folder_fd, time.monotonic() + LOCK_TIMEOUT_S, path)
    try:
        to_remove = [artifact for artifact in batch if _is_as_it_was(folder_fd, path, artifact)]
        if to_remove:
            size = sum(artifact.size for artifact in to_remove)
            audit.record(
                REMOVAL, artifacts=[artifact.digest for artifact in to_remove], count=len(to_remove), bytes=size
            )
        for artifact in to_remove:
            with opened_below(folder_fd, artifact.digest[:2], path) as below:
                os.unlink(artifact.digest, dir_fd=below)
        return to_remove
    finally:
        fcntl.flock(folder_fd, fcntl.LOCK_UN)


def _is_as_it_was(folder_fd: int, path: str, artifact: Artifact) -> bool:
    try:
        with opened_below(folder_fd, artifact.digest[:2], path) as below:
            facts = os.stat(artifact.digest, dir_fd=below, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return stat.S_ISREG(facts.st_mode) and facts.st_mtime_ns == artifact.time_ns
