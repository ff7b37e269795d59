"""What a coding agent did is saved and restored: files, removals, modes, links, commits; real sandboxes, real ends."""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path

import pytest

from cloche.coding_agents.archives import Restored, Saver, archives, pending_archive, restore, save, settle
from cloche.coding_agents.places import AgentPlace
from cloche.execution.sandbox import AsyncSandbox
from cloche.keeper import registry
from cloche.keeper.attach import visit

pytestmark = pytest.mark.both_users
GIT = "git -c user.name=Ada -c user.email=ada@example.org"
WORK = f"""
echo A > a; chmod 700 a; rm b; rm -r d; mkdir d; echo z > d/z; ln -sfn c l
echo new > 'n\n'; rm c; mkdir c; echo 1 > c/1
mkdir node_modules; head -c 300000 /dev/zero > node_modules/big; mkfifo fifo; touch -d @1000000000 d/z
git add -A a d; {GIT} commit -q -m inside
"""
LOOK = """
stat -c '%n %a %F' a d d/* c c/* l; readlink l; cat a d/z; stat -c %Y d/z
git log --format=%s; git status --short; ls -A
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AgentPlace:
    """Give an agent's place, and a project with a repository."""
    for name in ("XDG_RUNTIME_DIR", "XDG_STATE_HOME"):
        (tmp_path / name).mkdir(mode=0o700)
        monkeypatch.setenv(name, str(tmp_path / name))
    project = tmp_path / "project"
    project.mkdir()
    script = f"""
        git init -q -b main; echo a > a; echo b > b; echo c > c; mkdir d; echo x > d/x; ln -s a l
        echo node_modules > .gitignore; git add -A; {GIT} commit -q -m outside
    """
    subprocess.run(["sh", "-ec", script], cwd=project, check=True)
    return AgentPlace(agent="claude", folder=str(project))


def new(place: AgentPlace) -> AsyncSandbox:
    """Return a sandbox of an agent's place."""
    return AsyncSandbox(name=place.sandbox, keep="10m", workspace=place.folder)


def test_everything_is_as_it_was_and_what_the_host_changed_is_a_conflict(place: AgentPlace) -> None:
    """Files, removals, modes, links, times and commits are there again; the host's changes are named and never lost."""

    async def both() -> tuple[str, str, Restored, dict[str, str]]:
        async with new(place) as sandbox:
            assert (await sandbox.exec(shell=WORK)).ok
            saved = await save(sandbox, place, reason="a test")
            assert saved is not None
            assert list(saved.left_out) == ["fifo"]
            assert await save(sandbox, place, reason="nothing new", last_mark=saved.mark) is None
            before = await sandbox.exec(shell=f"rm fifo; {LOOK}")
            await sandbox.kill()
        (Path(place.folder) / "b").write_text("the host's\n")
        (Path(place.folder) / "d" / "x").write_text("the host's\n")
        (Path(place.folder) / "kept").write_text("the host's\n")
        archive = pending_archive(place)
        assert archive is not None
        async with new(place) as sandbox:
            restored = await restore(sandbox, archive)
            after = await sandbox.exec(shell=LOOK)
            conflicts = {change.path: change.conflict for change in (await sandbox.diff()).conflicts}
            await sandbox.kill()
            return before.stdout, after.stdout, restored, conflicts

    before, after, restored, conflicts = asyncio.run(both())
    assert before.split("\n") == [line for line in after.split("\n") if line not in ("kept", "?? kept")]
    assert restored.changed_on_host == ("b", "d")
    assert set(conflicts) == {"b", "d/x"}
    assert (Path(place.folder) / "b").read_text() == "the host's\n"


def test_what_does_not_fit_is_named_and_old_archives_go(place: AgentPlace) -> None:
    """Beyond the bound what git ignores is left out; files are private, few are kept, a settled one is not pending."""

    async def saving() -> None:
        async with new(place) as sandbox:
            assert (await sandbox.exec(shell=WORK)).ok
            for _ in range(6):
                assert await save(sandbox, place, reason="a test", most_bytes=100_000)
            await sandbox.kill()

    asyncio.run(saving())
    kept = archives(place)
    assert [archive.number for archive in kept] == [6, 5, 4, 3]
    assert "git ignores it" in kept[0].left_out["node_modules"]
    assert {os.stat(archive.path).st_mode & 0o777 for archive in kept} == {0o600}
    assert pending_archive(place) == kept[0]
    settle(place)
    assert pending_archive(place) is None


def test_what_git_refreshes_is_no_work(place: AgentPlace) -> None:
    """An archive with git's index alone is not restored; one with a commit is."""

    async def saving() -> None:
        async with new(place) as sandbox:
            for script in ("touch a; git status", f"{GIT} commit -q --allow-empty -m empty"):
                assert (await sandbox.exec(shell=script)).ok
                saved = await save(sandbox, place, reason="a test")
                assert saved is not None
                assert bool(pending_archive(place)) == ("commit" in script)
            await sandbox.kill()

    asyncio.run(saving())


STEPS = (
    "mkdir -p m/deep; for i in 1 2 3; do head -c 70000 /dev/urandom > m/deep/$i; done; echo old > e; echo x > gone",
    "mv m moved; echo new > e; rm gone; chmod 600 moved/deep/1; head -c 70000 /dev/urandom > m",
    "mv moved/deep moved/other; mv moved/other/2 moved/other/4; cp e moved/other/2",
    "rm -r moved/other/4; mv moved m2; rm m; mv m2 m; ln -s e m/link",
    "true",
)
SUMS = "find . -path ./.git -prune -o -type f -exec sha256sum {} + -printf '%p %m\\n' -o -printf '%p %l %m\\n' | sort"


def test_what_was_saved_before_is_not_read_again_and_all_of_it_is_right(place: AgentPlace) -> None:
    """After each step of moves, edits and removals an archive holds the sandbox as it is, by one saver for all."""

    async def both() -> tuple[list[str], list[str]]:
        wanted, found, kept = [], [], []
        async with new(place) as sandbox:
            with Saver(place) as saver:
                for step in STEPS:
                    assert (await sandbox.exec(shell=step)).ok
                    kept.append(await saver.save(sandbox, reason="a step"))
                    wanted.append((await sandbox.exec(shell=SUMS)).stdout)
            await sandbox.kill()
        for archive in kept[1:]:
            if archive is not None:
                async with new(place) as sandbox:
                    await restore(sandbox, archive)
                    found.append((await sandbox.exec(shell=SUMS)).stdout)
                    await sandbox.kill()
        assert kept[-1] is None
        return wanted[1:-1], found

    wanted, found = asyncio.run(both())
    assert found == wanted


def test_what_cannot_be_read_is_named_each_time(place: AgentPlace) -> None:
    """A file that the agent may not read itself is no obstacle, and is saved when it may."""

    async def saving() -> list[list[str]]:
        named = []
        async with new(place) as sandbox:
            with Saver(place) as saver:
                for script in ("echo x > e; echo y > f; chmod 0 e", "echo more >> f", "echo more >> f", "chmod 644 e"):
                    assert (await sandbox.exec(shell=script)).ok
                    archive = await saver.save(sandbox, reason="a test")
                    assert archive is not None
                    named.append(list(archive.left_out))
            await sandbox.kill()
        return named

    assert asyncio.run(saving()) == [["e"], ["e"], ["e"], []]


def test_work_is_read_at_once_when_all_were_asked_to_end(place: AgentPlace) -> None:
    """A process that waits for orders inside gets the signal, too, and no order."""

    async def read() -> None:
        async with new(place) as sandbox:
            await sandbox.write_file("work", "x")
            for _ in range(15):
                await asyncio.to_thread(visit, registry.find(place.sandbox), "stop", grace_s=5.0, timeout_s=60)
                assert (await sandbox.diff()).changes
            await sandbox.kill()

    asyncio.run(read())


def test_names_do_not_make_an_archive_unreadable(place: AgentPlace) -> None:
    """A thousand of them that are left out, as long as they may be, of bytes that JSON writes with six each."""
    script = "import os\nfor _ in range(15): os.mkdir(b'\\1' * 250); os.chdir(b'\\1' * 250)\n"
    script += "for number in range(1000): os.mkfifo(b'\\1' * 200 + b'%d' % number)"

    async def saved() -> None:
        async with new(place) as sandbox:
            assert (await sandbox.exec(["python3", "-c", script])).ok
            archive = await save(sandbox, place, reason="a test")
            assert archive is not None
            assert archive.left_out_count == 1000
            await sandbox.kill()

    asyncio.run(saved())
    assert len(archives(place)) == 1


def test_a_shell_inside_never_sees_its_job_stopped(place: AgentPlace) -> None:
    """While changes are read all processes stand still, and no interactive shell takes the terminal from its job."""

    async def shown() -> bytes:
        async with new(place) as sandbox, await sandbox.terminal(["bash", "--norc", "-i"]) as shell:
            await shell.write("while :; do sleep 0.03; done\n")
            await shell.stdout.read()
            for _ in range(150):
                await sandbox.diff()
            await shell.write("\x03")
            await shell.write("exit\n")
            output = await shell.stdout.read_all(1 << 20)
            await sandbox.kill()
            return output

    assert b"Stopped" not in asyncio.run(shown())
