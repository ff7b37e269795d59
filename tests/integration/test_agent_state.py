"""What an agent leaves in its home folder is shown before its next session, on the terminal where that is started."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import pytest

import cloche
from cloche.coding_agents.places import AgentPlace
from cloche.core.errors import InvalidRequest
from tests.harness.terminals import Terminal

pytestmark = pytest.mark.usefixtures("settings_of_nobody_at_a_terminal")
PROGRAM = """#!/bin/sh
echo started; cat ~/.mine.md ~/.bashrc 2>/dev/null; echo "alias git=evil" >> ~/.bashrc; echo obey >> ~/.mine.md
"""
CONFIG = """
agents:
  mine: {program: mine-agent, state_to_review: [.mine.md], copied: {.mine.md: []}}
"""


def test_the_next_session_begins_after_the_user_has_seen_what_the_last_one_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Restored, it begins as the first one did; what Cloche copies is no change."""
    home, project, programs = tmp_path / "home", tmp_path / "project", tmp_path / "bin"
    for folder in (home, project, programs, tmp_path / "config/cloche", tmp_path / "runtime"):
        folder.mkdir(parents=True)
    (tmp_path / "runtime").chmod(0o700)
    (home / ".mine.md").write_text("mine\n")
    (programs / "mine-agent").write_text(PROGRAM)
    (programs / "mine-agent").chmod(0o755)
    (tmp_path / "config/cloche/config.yaml").write_text(CONFIG)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.chdir(project)
    place = AgentPlace(agent="mine", folder=str(project))
    try:
        first = Terminal("mine", verb="agent")
        assert "obey" not in first.see("nothing was changed")
        assert first.leave() == 0
        second = Terminal("mine", verb="agent")
        assert "+alias git=evil" in second.see("[q]uit: ")
        second.type("what\r")
        second.see("r  restore: put the accepted version back")
        second.type("r\r")
        second.see("started")
        shown = second.see("nothing was changed")
        assert "obey" not in shown
        assert "evil" not in shown
        second.leave()
    finally:
        with suppress(InvalidRequest), cloche.Sandbox.attach(place.sandbox) as sandbox:
            sandbox.kill()


@pytest.mark.soak
def test_of_two_starts_at_once_in_an_open_sandbox_one_starts_the_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one attaches to it: no agent runs that is on no terminal, and that none can attach to."""
    for folder in ("home", "project", "bin", "runtime"):
        (tmp_path / folder).mkdir(mode=0o700)
    (tmp_path / "bin/claude").write_text("#!/bin/sh\necho started; read line\n")
    (tmp_path / "bin/claude").chmod(0o755)
    for name, value in {"HOME": "home", "XDG_RUNTIME_DIR": "runtime"}.items():
        monkeypatch.setenv(name, str(tmp_path / value))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path / "project")
    place = AgentPlace(agent="claude", folder=str(tmp_path / "project"))
    try:
        first = Terminal("claude", verb="agent")
        first.see("started")
        first.type("\r")
        first.see("nothing was changed")
        first.leave()
        both = [Terminal("claude", verb="agent") for _ in range(2)]
        deadline = time.monotonic() + 60
        while not any("from another terminal" in terminal.text for terminal in both):
            assert time.monotonic() < deadline
            for terminal in both:
                terminal.shows("from another terminal", patience_s=0.1)
        with cloche.Sandbox.attach(place.sandbox) as sandbox:
            running = [process for process in sandbox.processes() if process.exit_code is None]
        assert ["bin/claude" in process.command for process in running] == [True]
    finally:
        with suppress(InvalidRequest), cloche.Sandbox.attach(place.sandbox) as sandbox:
            sandbox.kill()
