"""Several sandboxes of one agent on one folder: what each has for itself, and how their changes are compared."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloche.coding_agents import forks
from cloche.coding_agents.compare import compare, conflicts_with
from cloche.coding_agents.launch import Launch, opened, prepare
from cloche.coding_agents.plan import AgentOptions, Program
from cloche.coding_agents.running import open_agents
from cloche.core.errors import WorkspaceConflict
from cloche.core.record import replace
from cloche.execution.sandbox import AsyncSandbox
from cloche.sync import Sandbox

pytestmark = pytest.mark.both_users
LEFT = """
printf kept > .claude/memory
ln -s /etc/passwd outside; ln -s .claude/memory inside; mkfifo pipe; mkdir .cache; echo big > .cache/file
ln -s / .claude/root
"""


def _launch(project: Path) -> Launch:
    options = AgentOptions(settings={"lifetime": 120, "keep": 120})
    tools = str(project.parent / "bin")  # read-only below the home folder, as an agent's own folder often is
    return prepare("claude", str(project), options, program=Program(words=("true",), toolchains=(tools,)))


async def _run(launch: Launch, command: str, told: list[str]) -> str:
    async with opened(launch, told.append) as sandbox:
        done = await sandbox.exec(["sh", "-c", command], cwd=launch.cwd)
        assert done.ok, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Launch]]:
    """Open an agent's sandbox and two forks on one project, with an own home and state, and end them."""
    top = tmp_path_factory.mktemp("forks")
    project = top / "home/project"
    project.mkdir(parents=True)
    (top / "home/bin").mkdir()
    for name in ("shared.txt", "first.txt", "equal.txt"):
        (project / name).write_text("".join(f"line {number}\n" for number in range(30)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(top / "home"))
        patch.setenv("XDG_STATE_HOME", str(top / "state"))
        first = _launch(project)
        asyncio.run(_run(first, f"mkdir -p ~/.claude; cd ~; {LEFT}", []))
        places = [forks.with_number(first.place, 0, is_new=True) for _ in range(2)]
        launches = [first, *(replace(first, place=place) for place in places)]
        try:
            for launch in launches[1:]:
                asyncio.run(_run(launch, "true", []))
            yield launches
        finally:
            for launch in launches:
                with Sandbox.attach(launch.place.sandbox) as sandbox:
                    sandbox.kill()


def test_a_fork_has_a_copy_of_the_home_folder_in_which_no_link_was_followed(launches: list[Launch]) -> None:
    """Files are copied, links stay links, pipes and caches are left out; the copies are apart from each other."""
    first, fork, _ = launches
    listed = asyncio.run(_run(fork, "cd ~; ls -A; readlink outside inside .claude/root; cat inside", []))
    assert {"outside", "inside", ".claude"} <= set(listed.split())
    assert not {"pipe", ".cache"} & set(listed.split())
    assert listed.splitlines()[-4:] == ["/etc/passwd", ".claude/memory", "/", "kept"]
    asyncio.run(_run(fork, "echo changed > ~/.claude/memory", []))
    assert asyncio.run(_run(first, "cat ~/.claude/memory", [])) == "kept"
    assert os.lstat(f"{fork.place.home}/outside").st_uid == os.lstat(fork.place.home).st_uid


def test_forks_have_numbers_and_changes_of_their_own(launches: list[Launch]) -> None:
    """Two forks are two more sandboxes with names of their own, and a change in one is not seen in another."""
    assert [launch.place.number for launch in launches] == [0, 1, 2]
    places = open_agents(launches[0].place.folder)
    assert {place.sandbox for place in places} == {launch.place.sandbox for launch in launches}
    asyncio.run(_run(launches[2], "echo own > own.txt", []))
    assert "own.txt" not in asyncio.run(_run(launches[1], "ls", []))
    asyncio.run(_run(launches[2], "rm own.txt", []))


def test_what_one_fork_commits_is_a_conflict_of_the_other(launches: list[Launch]) -> None:
    """A comparison has each file by who changed it, with lines side by side; a commit of one is told of the other."""
    one, other = launches[1:]
    asyncio.run(_run(one, "sed -i 's/line 3$/three/' shared.txt; echo 1 > first.txt; echo same > equal.txt", []))
    asyncio.run(_run(other, "sed -i 's/line 3$/tres/; s/line 20$/veinte/' shared.txt; echo same > equal.txt", []))
    names = (one.place.sandbox, other.place.sandbox)
    compared = asyncio.run(compare(*names))
    assert {file.path: file.whose for file in compared.files} == {
        "shared.txt": "both", "first.txt": "first", "equal.txt": "same",
    }  # fmt: skip
    (shared,) = compared.of("both")
    differing = [(pair.first, pair.second) for region in shared.pairs for pair in region if not pair.is_equal]
    assert differing == [("three\n", "tres\n"), ("line 20\n", "veinte\n")]

    async def committed() -> dict[str, tuple[str, ...]]:
        async with AsyncSandbox.attach(names[0]) as sandbox:
            done = await sandbox.commit(await sandbox.diff())
        return await conflicts_with(one.place.folder, done.written, by=names[0])

    assert asyncio.run(committed()) == {names[1]: ("shared.txt",)}
    with Sandbox.attach(names[1]) as sandbox, pytest.raises(WorkspaceConflict, match=r"shared\.txt"):
        sandbox.commit(sandbox.diff())
    assert "three" in Path(one.place.folder, "shared.txt").read_text()
