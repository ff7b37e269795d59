"""What came of a run in a container, put together."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cloche.core.enforcement import Enforcement
from cloche.core.levels import Control, State
from cloche.core.limits import Limits
from cloche.core.outcome import KillCause, Observed, decide
from cloche.core.request import InputFile
from cloche.core.result import FileRecord, Result, Usage

from ..noting import noted
from ..results import make_result, run_notes
from ..saving import Changes
from ..walking import REASONS, Until, in_thread
from .archive import MAX_FILES, MAX_PATH_CHARS, Place, Spool, keep, unpack
from .container import Container
from .program import Program
from .running import Running

log = logging.getLogger("cloche.containers")
ASK_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """Hold how a run ended, and what it used."""

    observed: Observed
    usage: Usage


class Workspace:
    """Remember the files of a workspace by their hashes, with paths as bytes: as text these may take four times that.

    Number and bytes are bounded. What is forgotten, the oldest first, is at worst reported as changed once more.
    """

    def __init__(self) -> None:
        self._known: dict[bytes, str] = {}

    def note(self, files: Sequence[InputFile]) -> None:
        """Take note of files that the caller wrote."""
        self._known |= {_key(file.path): hashlib.sha256(file.data).hexdigest() for file in files}

    async def changes(self, spool: Spool, given: Mapping[str, str], answer: Mapping[str, Any], until: Until) -> Changes:
        """Return what a run changed, by what it handed back."""
        return await in_thread(until, lambda: self._changes(spool, given, answer, until))

    def _changes(self, spool: Spool, given: Mapping[str, str], answer: Mapping[str, Any], until: Until) -> Changes:
        before = self._known | {_key(path): sha256 for path, sha256 in given.items()}
        gone = spool.take_names(answer.get("gone_bytes"))
        places, left_out = unpack(spool, until)
        changed = [path for path, place in places.items() if before.get(_key(path)) != place.sha256]
        if answer.get("is_whole") and not until.has_ended:
            before = {}
        for path in gone:
            before.pop(_key(path), None)
        self._known = _bounded(places, before)
        records = tuple(
            FileRecord(path=path, size=places[path].size, sha256=places[path].sha256) for path in sorted(changed)
        )
        skipped, partial = answer.get("skipped"), answer.get("partial")
        told = {one for one in partial if isinstance(one, str)} if isinstance(partial, list) else set[str]()
        return Changes(
            records=records,
            skipped=left_out + (skipped if isinstance(skipped, int) else 0),
            partial=REASONS & (told | {"time"} if until.has_ended else told),
            save=keep(spool, places, records),
        )


def _key(path: str) -> bytes:
    return path.encode("utf-8", "surrogatepass")


def _bounded(places: Mapping[str, Place], before: dict[bytes, str]) -> dict[bytes, str]:
    """Return what is remembered, the latest last: what was found now, and of what was known `before` what has room."""
    found = {_key(path): place.sha256 for path, place in places.items()}
    room = MAX_PATH_CHARS - sum(map(len, found))
    kept: list[tuple[bytes, str]] = []
    for path, sha256 in reversed(before.items()):
        if path in found:
            continue
        room -= len(path)
        if room < 0 or len(found) + len(kept) >= MAX_FILES:
            break
        kept.append((path, sha256))
    return dict(reversed(kept)) | found


async def observed_end(
    container: Container[Any], report: Mapping[str, Any] | None, cause: KillCause | None, timeout_s: float = 0.0
) -> End | None:
    """Return how a run ended that had so long; None when the container went away and nobody knows why.

    Who was kept from hearing of an end took it for a time-out: then what the first process reports counts.
    """
    if report is not None:
        if cause is KillCause.TIMEOUT and not report.get("cause") and report["wall_s"] <= timeout_s:
            cause = None
        return reported_end(report, cause)
    if container.is_given_up:
        return None
    if cause is not None:
        return End(observed=Observed(cause=cause), usage=Usage())
    with noted(log, "nobody said in time what a container died of", TimeoutError):
        async with asyncio.timeout(ASK_S):  # a daemon on its way out may never answer
            observed = await asyncio.to_thread(container.end_by_guest)
            if observed is not None:
                return End(observed=observed, usage=Usage())
    return None


def reported_end(report: Mapping[str, Any], cause: KillCause | None = None) -> End:
    """Return what the first process says of an end."""
    return End(observed=_observed(report, cause), usage=_usage(report))


def _observed(report: Mapping[str, Any], cause: KillCause | None) -> Observed:
    status = int(report["wait_status"])
    signal = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    own = {"out_of_memory": KillCause.OUT_OF_MEMORY, "timeout": KillCause.TIMEOUT}
    causes = [one for one in (cause, own.get(str(report.get("cause")))) if one is not None]
    return Observed(
        exit_code=os.WEXITSTATUS(status) if signal is None else None,
        signal=signal,
        cause=min(causes, key=list(KillCause).index, default=None),
        oom_kills=max(0, int(report.get("oom_kills") or 0)),
        pids_hits=max(0, int(report.get("pids_hits") or 0)),
        workspace_full=bool(report.get("full")),
        denied=max(0, int(report.get("unreachable") or 0)),
    )


def _usage(report: Mapping[str, Any]) -> Usage:
    peak = report.get("peak_bytes")
    return Usage(
        wall_s=float(report["wall_s"]),
        cpu_user_s=_number(report.get("cpu_user_s")),
        cpu_system_s=_number(report.get("cpu_system_s")),
        peak_memory_bytes=int(peak) if isinstance(peak, int) else None,
    )


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def result_of(
    end: End,
    running: Running,
    found: Changes,
    *,
    program: Program,
    limits: Limits,
    enforcement: Enforcement,
    notes: Mapping[str, Any],
) -> Result:
    """Put a result together; `notes` is what the backend has to say in `meta`."""
    told = running.told()
    seen = end.observed.with_refusal(told.refused)
    if enforcement[Control.NETWORK].state is not State.ENFORCED:
        seen = replace(seen, denied=0)  # what was not reached, no policy kept it from
    common = run_notes(program.engine, program.version, limits, enforcement, end.usage.wall_s)
    return make_result(
        decide(seen),
        stdout=running.outputs.kept("stdout"),
        stderr=running.outputs.kept("stderr"),
        is_truncated=running.outputs.is_truncated,
        value=told.value,
        value_is_repr=told.is_repr,
        outputs=told.outputs,
        usage=end.usage,
        enforcement=enforcement,
        found=found,
        meta={**common, **notes, **told.notes()},
    )
