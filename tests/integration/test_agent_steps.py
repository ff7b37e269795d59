"""What an agent changed step by step: from one archive to the next, without a look into the sandbox."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cloche.coding_agents import about, archives, steps
from cloche.coding_agents.places import AgentPlace
from cloche.coding_agents.steps import Step, note_step
from cloche.execution.sandbox import AsyncSandbox

pytestmark = pytest.mark.both_users
FIRST = "echo two >> a; rm -r d; mkdir new; printf 'x\\033[2J\\n' > new/x; head -c 5000 /dev/zero > big"
SECOND = "echo three >> a; echo y > new/y; rm new/x; ln -s a new/link; mkdir d; echo back > d/f; chmod 755 c"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AgentPlace:
    """Give an agent's place, and a project."""
    for name in ("XDG_RUNTIME_DIR", "XDG_STATE_HOME"):
        (tmp_path / name).mkdir(mode=0o700)
        monkeypatch.setenv(name, str(tmp_path / name))
    project = tmp_path / "project"
    (project / "d").mkdir(parents=True)
    for name in ("a", "c", "d/f"):
        (project / name).write_text("one\n")
    return AgentPlace(agent="claude", folder=str(project))


def told(step: Step) -> set[tuple[str, str]]:
    """Return what a step changed."""
    return {(file.what, file.path) for file in step.files}


def test_each_step_has_what_changed_since_the_last_one(place: AgentPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, with a patch, the newest kept; and printed without a command for the terminal."""
    monkeypatch.setattr(steps, "KEPT", 2)

    async def work() -> None:
        async with AsyncSandbox(name=place.sandbox, keep="5m", workspace=place.folder) as sandbox:
            try:
                for number, command in enumerate((FIRST, SECOND, "touch -c a", "echo four >> a")):
                    assert (await sandbox.exec(shell=command)).ok
                    archive = await archives.save(sandbox, place, reason=f"step {number}")
                    assert archive is not None
                    step = await asyncio.to_thread(note_step, place, archive)
                    assert (step is None) == (number == 2)
                    if number == 0:
                        assert step is not None
                        assert told(step) == {("modified", "a"), ("removed", "d"), ("added", "new/x"), ("added", "big")}
            finally:
                await sandbox.kill()

    asyncio.run(work())
    about.note(place, {}, None)
    second, last = steps.steps(place)
    assert told(second) == {
        ("modified", "a"), ("added", "new/y"), ("removed", "new/x"), ("added", "new/link"), ("added", "d/f"),
        ("modified", "c"),
    }  # fmt: skip
    assert "+three\n" in second.patch
    assert "+two\n" not in second.patch
    assert (told(last), last.reason) == ({("modified", "a")}, "step 3")
    assert os.stat(f"{place.saved}/steps/{last.number:08d}.json").st_mode & 0o777 == 0o600
    words = [sys.executable, "-m", "cloche", "agent", "review", "--steps", place.sandbox]
    shown = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert shown.index("(step 1)") < shown.index("-x\\x1b[2J") < shown.index("(step 3)")
