"""Where the audit log is for users whose state folder cannot be written: no home, another's, a read-only one."""

from __future__ import annotations

import logging
import os
import stat
import time
from pathlib import Path

import pytest

from cloche.audit import log
from cloche.audit.log import DAY_S, _first_folder, audit_for, folder_for, switch_on
from cloche.audit.writer import NAME
from cloche.config.settings import Settings
from cloche.core.errors import AuditFailed

ON_BY_DEFAULT = Settings()


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a folder with `runtime` and `temporary`, and a home that is a file: not even root can write below it."""
    (tmp_path / "home").write_bytes(b"")
    for name in ("runtime", "temporary"):
        (tmp_path / name).mkdir(0o700)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("cloche.audit.log._front_end", None)
    log._first_folder.cache_clear()
    return tmp_path


@pytest.mark.both_users
def test_the_log_goes_to_the_first_folder_that_can_be_had_and_that_is_said_once(
    places: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """State folder, runtime folder, temporary folder; the last two are the user's alone, with mode 0700."""
    uid = os.geteuid()
    monkeypatch.setenv("XDG_STATE_HOME", str(places / "state"))
    assert folder_for(ON_BY_DEFAULT) == str(places / "state" / "cloche")
    monkeypatch.delenv("XDG_STATE_HOME")
    assert not caplog.records
    switch_on("cli")
    for expected in (places / "runtime" / "cloche" / "audit", places / "temporary" / f"cloche-{uid}"):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "cloche.audit"):
            for _ in range(2):
                audit = audit_for(ON_BY_DEFAULT)
                assert audit is not None
                audit.record("start")
        assert audit.folder == str(expected)
        assert stat.S_IMODE(expected.stat().st_mode) == 0o700
        (said,) = caplog.messages
        assert said.startswith(f"the audit log is in {expected}, because {places}/home/.local/state/cloche cannot be ")
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(places / "home"))


@pytest.mark.both_users
@pytest.mark.parametrize(("age_s", "count"), [(0, 0), (2 * DAY_S, 1)])
def test_another_process_says_it_once_a_day(
    places: Path, caplog: pytest.LogCaptureFixture, age_s: float, count: int
) -> None:
    """A log that was written to within a day was told of."""
    switch_on("cli")
    audit = audit_for(ON_BY_DEFAULT)
    assert audit is not None
    audit.record("start")
    written = time.time() - age_s
    os.utime(Path(audit.folder) / NAME, (written, written))
    _first_folder.cache_clear()
    caplog.clear()
    assert folder_for(ON_BY_DEFAULT) == audit.folder
    assert len(caplog.messages) == count


@pytest.mark.both_users
def test_a_log_that_the_operator_demanded_stops_runs(places: Path) -> None:
    """Nothing goes to another folder than the one that was asked for."""
    for settings in (Settings(audit=True), Settings(audit=True, audit_folder=f"{places}/home/log")):
        audit = audit_for(settings)
        assert audit is not None
        with pytest.raises(AuditFailed, match=f"the audit log {places}/home/.* cannot be written"):
            audit.record("start")


@pytest.mark.both_users
@pytest.mark.parametrize("squatted", ["open", "link", "file", "open above"])
def test_a_folder_that_is_not_the_users_alone_is_not_taken(
    places: Path, monkeypatch: pytest.MonkeyPatch, squatted: str
) -> None:
    """Whoever makes that name first in a shared folder, or may replace it, gets no log; nothing runs."""
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    own = places / "temporary" / f"cloche-{os.geteuid()}"
    assert folder_for(ON_BY_DEFAULT) == str(own)
    log._first_folder.cache_clear()
    if squatted == "open":
        own.mkdir()
        own.chmod(0o755)
    elif squatted == "link":
        own.symlink_to(places / "runtime")
    elif squatted == "file":
        own.write_bytes(b"")
    else:
        own.parent.chmod(0o777)
    with pytest.raises(AuditFailed, match=r"home/\.local/state/cloche/audit.jsonl cannot be written"):
        folder_for(ON_BY_DEFAULT)
