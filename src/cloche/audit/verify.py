"""Read the log, and find tampering: changed bytes, and missing, swapped or forged lines.

Theory of operation: the files are opened and measured while the lock prevents writing, and read up to those sizes, so
later appends do no harm. Each line is checked by itself (its hash) and against the previous one (`prev`, `seq`). After
a fault, checking resumes at the next intact line, so that one fault is reported once. Bytes that are no line count as
the remnant of a crash if the next event is a `recovery` with exactly their length and hash.

`examine_audit` is for `cloche doctor`: where the log is, whether an event can be written, and whether the end of the
chain is intact. It checks everything that writing needs, and writes nothing. Of a long log it reads only the end, so
that its duration is bounded; `cloche audit verify` reads everything.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import Any

from cloche.config.settings import load_settings
from cloche.core.errors import AuditFailed, ClocheError, InvalidRequest
from cloche.core.record import dataclass, field

from . import artifacts
from .artifacts import ArtifactState
from .chain import FIRST, MOST_LINE_BYTES, RECOVERY, REMOVAL, ROTATION, ChainLink, Line, is_beginning, read_line
from .log import folder_for
from .writer import (
    LOCK_TIMEOUT_S,
    NAME,
    check_writable,
    failure,
    full_files,
    is_current_file,
    lock,
    opened_file,
    opened_folder,
)

MOST_BYTES = 4 * 1024 * 1024  # of the log that `examine_audit` reads
MOST_FAULTS = 1000  # faults that are listed; all are counted
_HEAD = re.compile(r"(?:([0-9]{1,19}):)?([0-9a-f]{64})")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainFault:
    """A fault, with its file and line (counted from 1); the line is None if something is missing."""

    file: str
    line: int | None
    what: str

    def __str__(self) -> str:
        return f"{self.file}{'' if self.line is None else f', line {self.line}'}: {self.what}"


@dataclass(slots=True, kw_only=True)
class VerifyReport:
    """The findings of a reading.

    `interrupted` counts writes that a crash cut off and a `recovery` event reports; with `is_cut_off` the last write
    was cut off, and the next event will report it. `dropped` counts events of files that were dropped because there
    were too many, `removed` counts artifacts that are gone and reported as removed.
    """

    events: int = 0
    first: ChainLink | None = None
    last: ChainLink | None = None
    first_time: str = ""
    last_time: str = ""
    interrupted: int = 0
    is_cut_off: bool = False
    dropped: int = 0
    removed: int = 0
    faults: list[ChainFault] = field(default_factory=list)
    fault_count: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        return self.fault_count == 0

    @property
    def is_good(self) -> bool:
        """Tell whether there is a log, and it is whole."""
        return self.is_whole and self.events > 0

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, as `cloche audit verify --json` prints it."""
        return {
            "is_whole": self.is_good,
            "events": self.events,
            "first": str(self.first) if self.first else None,
            "head": str(self.last) if self.last else None,
            "first_time": self.first_time or None,
            "last_time": self.last_time or None,
            "interrupted_writes": self.interrupted,
            "is_cut_off": self.is_cut_off,
            "dropped": self.dropped,
            "removed": self.removed,
            "notes": self.notes,
            "fault_count": self.fault_count,
            "faults": [{"file": fault.file, "line": fault.line, "what": fault.what} for fault in self.faults],
        }

    def add(self, file: str, line: int | None, description: str) -> None:
        """Add a fault."""
        self.fault_count += 1
        if len(self.faults) < MOST_FAULTS:
            self.faults.append(ChainFault(file=file, line=line, what=description))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedHead:
    """A head that was stored elsewhere; `seq` is None if only the hash was stored."""

    seq: int | None
    hash: str


def read_heads(text: str, *, name: str) -> list[ExpectedHead]:
    """Return the heads in a text, one per line: `NUMBER:HASH` as printed by `cloche audit head`, or the hash alone.

    Raises InvalidRequest.
    """
    heads = []
    for line in text.splitlines():
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _HEAD.fullmatch(line.split()[-1].lower())
        if match is None:
            raise InvalidRequest(f"{name}: {line[:100]!r} is not a head; `cloche audit head` prints one")
        heads.append(ExpectedHead(seq=int(match[1]) if match[1] else None, hash=match[2]))
    if not heads:
        raise InvalidRequest(f"{name}: it has no head; `cloche audit head` prints one")
    return heads


@dataclass(slots=True)
class _Unparsed:
    """Bytes that are no line: the remnant of an interrupted write, or tampering."""

    file: str
    first_line: int
    count: int = 0
    size: int = 0
    digest: hashlib._Hash = field(default_factory=hashlib.sha256)
    newline: bytes = b""  # the last newline, which the next writer has added

    def add(self, raw: bytes) -> None:
        self.count += 1
        text = raw.removesuffix(b"\n")
        self.digest.update(self.newline + text)
        self.size += len(self.newline) + len(text)
        self.newline = raw[len(text) :]


class Reading:
    """Iterate over the events of a log, oldest first; `report` is complete after the iteration.

    `heads` are searched for during the iteration; with `checks_artifacts` the artifacts are checked too. `file` is a
    single file to read instead of a folder, for example an export. Of more than `most_bytes` only the end is read; then
    lines are counted from there, and missing earlier events are not detected. `is_part` tells whether only a part was
    read.
    """

    def __init__(
        self,
        folder: str,
        *,
        heads: Sequence[ExpectedHead] = (),
        checks_artifacts: bool = False,
        file: str | None = None,
        most_bytes: int | None = None,
    ) -> None:
        self.report = VerifyReport()
        self._folder, self._file, self._checks_artifacts = folder, file, checks_artifacts
        self._heads = {head.hash: head for head in heads}
        self._most_bytes = most_bytes
        self.is_part = file is not None
        self._missing: dict[str, list[tuple[str, int, str]]] = {}  # by hash, until a `removal` event names it
        self._last: ChainLink | None = None
        self._unparsed: _Unparsed | None = None
        self._oldest = 1

    def __iter__(self) -> Iterator[Line]:
        return self.lines()

    def lines(self) -> Generator[Line]:
        """Yield the events. Closing the generator closes the files."""
        with ExitStack() as stack:
            for name, opened, start, size in self._from(self._sources(stack)):
                yield from self._lines(name, opened, start, size)
        self._report_unparsed()
        self._conclude()

    def _from(self, sources: Sequence[tuple[str, int, int]]) -> Iterator[tuple[str, int, int, int]]:
        """Yield name, descriptor, start and end of the part to read of each file."""
        skipped = max(0, sum(size for _, _, size in sources) - self._most_bytes) if self._most_bytes is not None else 0
        self.is_part = self.is_part or skipped > 0
        for name, opened, size in sources:
            start = min(skipped, size)
            skipped -= start
            if start < size:
                yield name, opened, start, size

    def _sources(self, stack: ExitStack) -> list[tuple[str, int, int]]:
        try:
            if self._file is not None:
                opened = os.open(self._file, os.O_RDONLY | os.O_CLOEXEC)
                stack.callback(os.close, opened)
                return [(self._file, opened, os.fstat(opened).st_size)]
            return list(self._opened(stack))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise failure(self._file or self._folder, error.strerror or str(error), is_read=True) from error

    def _opened(self, stack: ExitStack) -> Iterator[tuple[str, int, int]]:
        folder_fd = stack.enter_context(opened_folder(self._folder, create=False))
        growing = self._growing(stack, folder_fd)
        for _, name in full_files(folder_fd):
            file = stack.enter_context(opened_file(folder_fd, name, self._folder))
            yield name, file, os.fstat(file).st_size
        if growing is not None:
            yield NAME, growing, os.fstat(growing).st_size
            fcntl.flock(growing, fcntl.LOCK_UN)

    def _growing(self, stack: ExitStack, folder_fd: int) -> int | None:
        """Open the current file and hold its lock; if it was rotated meanwhile, open the new one."""
        until = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            with ExitStack() as trial, suppress(FileNotFoundError):
                file = trial.enter_context(opened_file(folder_fd, NAME, self._folder))
                lock(file, until, f"{self._folder}/{NAME}", how=fcntl.LOCK_SH, is_read=True)
                if is_current_file(folder_fd, os.fstat(file)):
                    stack.enter_context(trial.pop_all())
                    return file
                continue
            return None

    def _lines(self, name: str, opened: int, start: int, size: int) -> Iterator[Line]:
        with os.fdopen(os.dup(opened), "rb") as file:
            file.seek(start)
            number, size = 0, size - start
            if start:  # `start` may be within a line
                size -= len(file.readline(min(size, MOST_LINE_BYTES + 1)))
            while size > 0 and (raw := file.readline(min(size, MOST_LINE_BYTES + 1))):
                number, size = number + 1, size - len(raw)
                line = read_line(raw[:-1] if raw.endswith(b"\n") else raw)
                if line is not None and line.is_event():
                    self._take(name, number, line)
                    yield line
                elif size or raw.endswith(b"\n") or self._unparsed or not is_beginning(raw, self._last or FIRST):
                    self._unparsed = self._unparsed or _Unparsed(name, number)
                    self._unparsed.add(raw)
                else:
                    self.report.is_cut_off = True

    def _take(self, name: str, number: int, line: Line) -> None:
        """Check an intact line against the lines before it."""
        last, seq = self._last, line.link.seq
        has_gap = self._unparsed is not None and not self._is_recovery(line)
        bad = self._report_unparsed() if has_gap else 0
        self._unparsed = None
        expected = (last or FIRST).seq + 1
        if last is None and not bad:
            if seq == 1 and line.prev != FIRST.hash:
                self.report.add(name, number, "event 1 refers to an earlier event")
        elif seq > expected + bad:
            missing = f"event {expected}" if seq == expected + 1 else f"events {expected} to {seq - 1}"
            self.report.add(name, number, f"{missing} are missing before event {seq}: removed, or moved")
        elif seq < expected and last is not None:
            self.report.add(name, number, f"event {seq} comes after event {last.seq}: swapped, or repeated")
        elif not bad and line.prev != (last or FIRST).hash:
            self.report.add(name, number, f"event {seq} does not match the event before it, which was replaced")
        self._last = line.link
        self._note(name, number, line)

    def _is_recovery(self, line: Line) -> bool:
        last, unparsed = self._last or FIRST, self._unparsed
        if unparsed is None or line.prev != last.hash or line.link.seq != last.seq + 1:
            return False
        fields = line.fields()
        if fields["kind"] != RECOVERY or fields.get("left_bytes") != unparsed.size:
            return False
        is_same = bool(fields.get("left_sha256") == unparsed.digest.hexdigest())
        self.report.interrupted += is_same
        return is_same

    def _report_unparsed(self) -> int:
        """Report bytes that are no line and that no event explains; return their number of lines."""
        unparsed, self._unparsed = self._unparsed, None
        if unparsed is None:
            return 0
        for offset in range(unparsed.count):
            self.report.add(unparsed.file, unparsed.first_line + offset, "this line was changed after it was written")
        return unparsed.count

    def _note(self, name: str, number: int, line: Line) -> None:
        report, text = self.report, line.raw
        report.events += 1
        report.first = report.first or line.link
        report.last = line.link
        start = text.index(b'"time":"') + 8
        report.last_time = text[start : start + 27].decode("ascii", "replace")
        report.first_time = report.first_time or report.last_time
        self._heads.pop(line.link.hash, None)
        if b'"kind":"%b"' % ROTATION.encode() in text:
            oldest = line.fields().get("oldest_seq")
            self._oldest = max(self._oldest, oldest if isinstance(oldest, int) else 1)
        if self._checks_artifacts and b'_artifact_sha256":"' in text:
            self._check_artifacts(name, number, line)
        if self._missing and b'"kind":"%b"' % REMOVAL.encode() in text:
            named = line.fields().get("artifacts")
            for digest in named if isinstance(named, list) else ():
                report.removed += self._missing.pop(str(digest), None) is not None

    def _check_artifacts(self, name: str, number: int, line: Line) -> None:
        fields = line.fields()
        for kind, digest in fields.items():
            is_kept = kind.endswith("_artifact_sha256") and re.fullmatch("[0-9a-f]{64}", str(digest))
            # `execution` repeats the hash of `start`; the code may have been pruned during the run.
            if not is_kept or (fields["kind"] == "execution" and kind == "code_artifact_sha256"):
                continue
            subject = f"event {line.link.seq}: the stored {kind} ({digest})"
            try:
                state = artifacts.state_of(self._folder, digest)
                if state is ArtifactState.CHANGED:
                    self.report.add(name, number, f"{subject} was changed")
                elif state is ArtifactState.MISSING:
                    self._missing.setdefault(digest, []).append((name, number, subject))
            except AuditFailed as error:
                self.report.add(name, number, f"{subject} is damaged: {error}")

    def _conclude(self) -> None:
        report = self.report
        for name, number, subject in (entry for entries in self._missing.values() for entry in entries):
            report.add(name, number, f"{subject} is missing, and no later event says that it was removed")
        first = report.first.seq if report.first else 1
        if first > 1 and self.is_part:
            report.notes.append(f"it begins with event {first}")
        elif first > self._oldest:
            report.add(NAME, None, f"events 1 to {first - 1} are missing, and no event says that they were dropped")
        elif first > 1:
            report.dropped = first - 1
        last = report.last.seq if report.last else 0
        for head in self._heads.values():
            if head.seq is not None and head.seq < first and report.dropped:
                report.notes.append(f"head {head.seq} is older than the stored events, so it cannot be checked")
            else:
                subject = f"head {head.hash}" if head.seq is None else f"head {head.seq}:{head.hash}"
                ending = f"the log ends with event {last}" if last else "there are no events"
                report.add(
                    self._file or NAME,
                    None,
                    f"{subject} is not in the log, {ending}: its end was cut, or it was rewritten",
                )


def verify(folder: str, *, heads: Sequence[ExpectedHead] = (), file: str | None = None) -> VerifyReport:
    """Read a whole log and return the findings. Raises AuditFailed if it cannot be read."""
    reading = Reading(folder, heads=heads, checks_artifacts=file is None, file=file)
    for _ in reading:
        pass
    return reading.report


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditState:
    """The state of the log.

    `is_on` is the command line's setting, None if the configuration is invalid, and `origin` its source. `problem` says
    why no event can be written; it is empty if one can. `events` were read, those before `first` were not; `fault` is
    the first fault in them.
    """

    is_on: bool | None
    origin: str = ""
    folder: str = ""
    problem: str = ""
    events: int = 0
    first: int = 0
    last_time: str = ""
    fault: str = ""

    @property
    def stops_runs(self) -> bool:
        """Tell whether no code can run, because auditing is on and the log cannot be written."""
        return self.is_on is True and bool(self.problem)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "on": self.is_on,
            "origin": self.origin or None,
            "folder": self.folder or None,
            "writable": not self.problem,
            "problem": self.problem or None,
            "events_read": self.events,
            "first_event_read": self.first or None,
            "last_time": self.last_time or None,
            "sound": not self.fault,
            "fault": self.fault or None,
        }


def examine_audit() -> AuditState:
    """Examine the log of the command line."""
    try:
        settings = load_settings({})
    except ClocheError as error:
        return AuditState(is_on=None, problem=f"the configuration cannot be used: {error}")
    is_on, origin = settings.audit is not False, settings.origins.get("audit", "default")
    try:
        folder = folder_for(settings)
    except AuditFailed as error:
        return AuditState(is_on=is_on, origin=origin, problem=str(error))
    return _state_of(folder, is_on=is_on, origin=origin)


def _state_of(folder: str, *, is_on: bool, origin: str) -> AuditState:
    problem = fault = ""
    try:
        check_writable(folder)
    except AuditFailed as error:
        problem = str(error)
    reading = Reading(folder, most_bytes=MOST_BYTES)
    try:
        for _ in reading:
            pass
    except AuditFailed as error:
        fault = str(error)
    report = reading.report
    if report.faults:
        fault = f"{report.faults[0].file}: {report.faults[0].what}"
    return AuditState(
        is_on=is_on,
        origin=origin,
        folder=folder,
        problem=problem,
        events=report.events,
        first=report.first.seq if report.first else 0,
        last_time=report.last_time,
        fault=fault,
    )
