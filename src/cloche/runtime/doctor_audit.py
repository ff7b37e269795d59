"""Where the audit log is, whether an event can be written, and whether the end of its chain is sound.

Nothing is written for it: all that writing takes is tried but the writing. Of a long log only the end is read, so that
this takes no longer for a longer one; `cloche audit verify` reads all of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cloche.core.errors import AuditFailed, ClocheError

from .audit import default_folder
from .audit_file import check_writable
from .audit_reading import Reading
from .settings import load_settings

MOST_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditState:
    """Say how the log is.

    `is_on` is that of the command line, None where the configuration does not say, `origin` what says so. `problem` is
    why no event can be written, empty where one can. `events` have been read, those before `first` have not; `fault` is
    the first thing that is wrong with them.
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
        """Tell whether nothing runs, since the log is on and cannot be written."""
        return self.is_on is True and bool(self.problem)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON."""
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
    """Look at the log that a run of the command line would write to."""
    try:
        settings = load_settings({})
    except ClocheError as error:
        return AuditState(is_on=None, problem=f"the configuration cannot be used: {error}")
    is_on, origin = settings.audit is not False, settings.origins.get("audit", "default")
    try:
        folder = settings.audit_folder or default_folder()
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
