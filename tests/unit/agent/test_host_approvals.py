"""A notification on the user's desktop about a host that is asked for."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from cloche.agent import host_approvals


def test_a_notification_is_shown_where_there_is_a_desktop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a program of the system, and by none of PATH; without a session bus nothing is started."""
    heard, elsewhere = tmp_path / "heard", tmp_path / "elsewhere"
    started: list[list[str]] = []
    monkeypatch.setattr(subprocess, "Popen", lambda words, **_: started.append(words))
    for folder in (heard, elsewhere):
        folder.mkdir()
        (folder / "notify-send").write_text("#!/bin/sh\n")
        (folder / "notify-send").chmod(0o755)
    monkeypatch.setenv("PATH", str(elsewhere))
    monkeypatch.setattr(host_approvals, "PROGRAMS", str(tmp_path / "none"))
    monkeypatch.setenv("DBUS_SESSION_BUS_ADDRESS", "unix:path=/run/user/1000/bus")
    host_approvals.notify("title", "text")
    assert started == []
    monkeypatch.setattr(host_approvals, "PROGRAMS", str(heard))
    host_approvals.notify("title", "text")
    assert [(words[0], words[-3:]) for words in started] == [(f"{heard}/notify-send", ["--", "title", "text"])]
    monkeypatch.delenv("DBUS_SESSION_BUS_ADDRESS")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    host_approvals.notify("title", "text")
    assert len(started) == 1
