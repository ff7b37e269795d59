"""`cloche doctor` says where the audit log is, whether it can be written, and whether its chain is sound."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from cloche.audit import verify, writer
from cloche.audit.log import Audit
from cloche.audit.verify import AuditState, examine_audit
from cloche.cli.system import audit_lines
from tests.harness.audits import lines_of, rewrite


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the folder that is configured, not there yet."""
    monkeypatch.setenv("CLOCHE_AUDIT", str(tmp_path / "state" / "log"))
    return tmp_path / "state" / "log"


def told(state: AuditState) -> str:
    """Return what is printed."""
    return "\n".join(audit_lines(state))


def test_a_log_that_is_not_there_yet_can_be_written(folder: Path) -> None:
    """And is not made by looking."""
    state = examine_audit()
    assert (state.folder, state.problem, state.fault, state.stops_runs) == (str(folder), "", "", False)
    assert not folder.parent.exists()
    assert told(state).splitlines()[1:] == ["audit log: can be written", "audit log: no events yet"]


def test_a_log_is_sound_until_somebody_changes_it(folder: Path) -> None:
    """A changed line in the midst is a fault; one at the end also stops all writing."""
    audit = Audit(str(folder))
    for _ in range(5):
        audit.record("execution", status="ok")
    state = examine_audit()
    assert (state.events, state.first, state.fault, state.problem) == (5, 1, "", "")
    assert "sound, 5 events" in told(state)
    lines = lines_of(folder)
    for place, stops in ((1, False), (4, True)):
        rewrite(folder, [line.replace(b'"ok"', b'"no"') if at == place else line for at, line in enumerate(lines)])
        state = examine_audit()
        assert ("was changed" in state.fault, state.stops_runs) == (True, stops)
        assert "NOT sound" in told(state)
    assert "NOT writable" in told(state)


def test_of_a_long_log_the_end_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As much for a longer one, over several files; that it is the end, and what reads all, is said."""
    audit = Audit(str(folder), file_bytes=2000)
    for number in range(60):
        audit.record("execution", number=number, note="x" * (number % 7))
    monkeypatch.setattr(verify, "MOST_BYTES", 5000)
    state = examine_audit()
    assert state.fault == ""
    assert 5 < state.events < 5000 // 200
    assert state.first > 1
    assert "cloche audit verify reads all" in told(state)
    rewrite(folder, lines_of(folder)[1:])
    assert "are missing before" in examine_audit().fault
    for most in range(1, 700, 23):  # wherever in a line it begins
        monkeypatch.setattr(verify, "MOST_BYTES", most)
        assert examine_audit().fault == ""


def test_why_it_cannot_be_written_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loose permissions, a link in its place, no room: each with its reason, and runs stop where the log is on."""
    Audit(str(folder)).record("start")
    folder.chmod(0o770)
    assert "cannot be written: others may write to the folder" in examine_audit().problem
    folder.chmod(0o700)
    (folder / "audit.jsonl").rename(folder / "elsewhere")
    (folder / "audit.jsonl").symlink_to("elsewhere")
    assert "symbolic link" in examine_audit().problem
    (folder / "audit.jsonl").unlink()
    monkeypatch.setattr(writer.os, "statvfs", lambda _: SimpleNamespace(f_bavail=0))
    state = examine_audit()
    assert os.strerror(errno.ENOSPC) in state.problem
    assert state.stops_runs


def test_a_log_that_is_off_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told all the same, and so is a configuration that cannot be read."""
    monkeypatch.setenv("CLOCHE_AUDIT", "off")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert told(examine_audit()).startswith("audit log: off (environment CLOCHE_AUDIT)")
    assert not AuditState(is_on=False, origin="", problem="some").stops_runs
    monkeypatch.setenv("CLOCHE_AUDIT", "nowhere")
    state = examine_audit()
    assert ("CLOCHE_AUDIT" in state.problem, state.stops_runs) == (True, False)
    assert told(state).startswith("audit log: unknown: the configuration cannot be used: ")
