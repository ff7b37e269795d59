"""The watcher of an agent's sandbox: what it saves when, what survives which death, and its end with the sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import cloche
from cloche.coding_agents import archives
from cloche.coding_agents.launch import is_open
from cloche.coding_agents.places import AgentPlace
from cloche.coding_agents.watch import Watched, WatchSettings, is_watched, read_watched, start_watch
from cloche.execution.sandbox import AsyncSandbox
from cloche.keeper import registry
from cloche.keeper.attach import visit

pytestmark = pytest.mark.both_users
PATIENCE_S = 60
OPENED: list[cloche.Sandbox] = []
SETTINGS = WatchSettings(state_bytes=100 << 20, poll_s=0.05, idle_s=0.3, longest_s=1000)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AgentPlace]:
    """Give an agent's place on a project, and leave no sandbox of it behind."""
    for name in ("XDG_RUNTIME_DIR", "XDG_STATE_HOME"):
        (tmp_path / name).mkdir(mode=0o700)
        monkeypatch.setenv(name, str(tmp_path / name))
    (tmp_path / "project").mkdir()
    agent_place = AgentPlace(agent="claude", folder=str(tmp_path / "project"))
    os.makedirs(agent_place.home)
    yield agent_place
    if is_open(agent_place):
        with cloche.Sandbox.attach(agent_place.sandbox) as sandbox:
            sandbox.kill()
    for left in OPENED:
        left.close()
    OPENED.clear()
    until(lambda: not is_watched(agent_place))


def until(what: Callable[[], object]) -> None:
    """Wait until something is so."""
    deadline = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < deadline, "it does not come about"
        time.sleep(0.02)


def opened(place: AgentPlace, settings: WatchSettings = SETTINGS) -> tuple[cloche.Sandbox, int]:
    """Return the open sandbox of a place, watched, and the pid of its keeper."""
    sandbox = cloche.Sandbox(name=place.sandbox, keep="10m", workspace=place.folder).open()
    OPENED.append(sandbox)
    start_watch(place, settings)
    until(lambda: is_watched(place) and read_watched(place))
    return sandbox, int(visit(registry.find(place.sandbox), "info")["pid"])


def watched(place: AgentPlace) -> Watched:
    """Return what the watcher has noted."""
    noted = read_watched(place)
    assert noted is not None
    return noted


def restored(place: AgentPlace) -> str:
    """Return the content of `work` in a new sandbox that goes on from the last archive, and end it."""

    async def read() -> str:
        archive = archives.pending_archive(place)
        assert archive is not None
        async with AsyncSandbox(name=place.sandbox, keep="10m", workspace=place.folder) as sandbox:
            await archives.restore(sandbox, archive)
            content = await sandbox.read_file("work")
            await sandbox.kill()
            return content.decode()

    return asyncio.run(read())


def test_work_is_saved_when_idle_and_outlives_a_killed_tree(place: AgentPlace) -> None:
    """One save for each time of rest with changes; then SIGKILL for keeper and watcher, and no runtime folder."""
    sandbox, keeper = opened(place)
    sandbox.exec(shell="echo first > work")
    until(lambda: watched(place).saves == 1)
    sandbox.exec(["true"])  # after which it is idle again, with nothing new
    time.sleep(5 * SETTINGS.idle_s)
    assert watched(place).saves == 1
    sandbox.exec(shell="echo second > work")
    until(lambda: watched(place).saves == 2)
    for pid in (watched(place).pid, keeper):
        os.kill(pid, signal.SIGKILL)
    shutil.rmtree(os.environ["XDG_RUNTIME_DIR"], ignore_errors=True)
    os.mkdir(os.environ["XDG_RUNTIME_DIR"], 0o700)
    until(lambda: not is_watched(place))
    assert restored(place) == "second\n"


@pytest.mark.parametrize("ends", ["machine", "keeper", "kill"])
def test_an_end_that_is_asked_for_waits_for_the_last_save(place: AgentPlace, ends: str) -> None:
    """SIGTERM for all processes, as at a shutdown, for the keeper, and an end by its user: nothing is lost."""
    before = set(_descendants())
    sandbox, keeper = opened(place, WatchSettings(state_bytes=100 << 20))  # which is idle after a minute
    sandbox.start(["sh", "-c", "trap : TERM; while :; do sleep 0.1; done"], keep=True)
    sandbox.exec(shell="head -c 5000000 /dev/urandom > big; echo last > work")
    if ends == "kill":
        sandbox.kill()
    for pid in {"machine": set(_descendants()) - before, "keeper": {keeper}}.get(ends, set()):
        os.kill(pid, signal.SIGTERM)
    until(lambda: not is_open(place) and not is_watched(place))
    assert restored(place) == "last\n"


def _descendants() -> list[int]:
    """Return all processes below this one: keepers, helpers, watchers, first processes and guests."""
    shown = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    parents = {int(child): int(parent) for child, parent in map(str.split, shown.splitlines())}
    found = [os.getpid()]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return [pid for pid in found[1:] if os.path.exists(f"/proc/{pid}")]


def test_an_agent_whose_home_grows_too_large_is_stopped(place: AgentPlace) -> None:
    """Its work is saved, it is ended, and what to do is noted; a link and a hole count nothing."""
    sandbox, _ = opened(place, WatchSettings(state_bytes=1 << 20, poll_s=0.05, idle_s=0.3))
    home = Path(place.home)
    (home / "link").symlink_to("/usr")
    with (home / "hole").open("wb") as hole:
        hole.truncate(1 << 30)
    agent = sandbox.start(["sh", "-c", "echo work > work; while :; do :; done"], keep=True)
    (home / "little").write_bytes(b"x" * 1000)
    until(lambda: watched(place).state_bytes)
    assert sandbox.processes()[0].exit_code is None
    (home / "much").write_bytes(b"x" * (2 << 20))
    until(lambda: watched(place).stopped)
    assert "remove files in" in watched(place).stopped
    assert agent.wait().status == "signaled"
    assert archives.pending_archive(place) is not None


def test_a_process_that_outlives_its_command_does_not_fill_the_home(place: AgentPlace) -> None:
    """No process of the list has it: the work is saved, and the sandbox ends."""
    OPENED.append(sandbox := cloche.Sandbox(name=place.sandbox, keep="10m", workspace=place.folder).open())
    sandbox.exec(shell="echo work > work; setsid sh -c 'while :; do :; done' > /dev/null 2>&1 &")
    (Path(place.home) / "much").write_bytes(b"x" * (2 << 20))
    start_watch(place, WatchSettings(state_bytes=1 << 20, poll_s=0.05, idle_s=0.3))
    until(lambda: not is_open(place) and not is_watched(place))
    assert "remove files in" in watched(place).stopped
    assert restored(place) == "work\n"


@pytest.mark.soak
def test_a_storm_of_kills_loses_no_save(place: AgentPlace) -> None:
    """Keeper, watcher or both are killed at any moment, also in the midst of a save; each start has the last save."""
    chance, last = random.Random(54), ""
    for number in range(25):
        sandbox, keeper = opened(place, WatchSettings(state_bytes=100 << 20, poll_s=0.02, idle_s=0.02))
        if last:
            archive = archives.pending_archive(place)
            assert archive is not None
            asyncio.run(restore_into(place, archive))
            assert int(sandbox.read_file("work").decode()) >= int(last)
        for step in range(3):
            sandbox.write_file("work", f"{number}{step}")
            sandbox.exec(shell=f"head -c 3000000 /dev/urandom > big{step}")
            time.sleep(chance.random() * 0.3)
        last = content_of(place) or last
        for pid in {0: (keeper,), 1: (watched(place).pid,), 2: (watched(place).pid, keeper)}[number % 3]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if number % 3 == 1:
            os.kill(keeper, signal.SIGKILL)
        until(lambda: not is_open(place) and not is_watched(place))
        sandbox.close()
        OPENED.clear()
    assert not [name for name in os.listdir(place.saved) if not name.endswith((".saved", "steps"))][3:]


async def restore_into(place: AgentPlace, archive: archives.Archive) -> None:
    """Restore an archive in the sandbox that is open."""
    async with AsyncSandbox.attach(place.sandbox) as sandbox:
        await archives.restore(sandbox, archive)


def content_of(place: AgentPlace) -> str:
    """Return what the newest archive has in `work`, empty without one."""
    archive = archives.pending_archive(place)
    if archive is None:
        return ""
    snapshot, _ = archives.read_archive(archive)
    with contextlib.closing(snapshot):
        entry = snapshot.entries.get(b"work")
        return b"".join(snapshot.read(entry)).decode() if entry is not None else ""
