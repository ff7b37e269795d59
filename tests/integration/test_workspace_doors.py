"""A folder of the host as a workspace, by the command line, by an agent's tools, and by the service."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from cloche.agent.approval import ApprovalRequest, Decision
from cloche.agent.toolbox import Toolbox
from cloche.core.errors import InvalidRequest
from tests.harness.commands import imported
from tests.harness.service import serving
from tests.harness.terminals import Terminal

pytestmark = pytest.mark.usefixtures("settings_of_nobody", "own_places")
ADDS = "print(open('a.txt').read()); open('a.txt', 'a').write('two\\n'); open('Makefile', 'w').write('all:\\n')"


@pytest.fixture
def project() -> Iterator[Path]:
    """Make a folder with a file."""
    with tempfile.TemporaryDirectory(prefix="project-") as folder:
        root = Path(folder).resolve() / "project"
        root.mkdir()
        (root / "a.txt").write_text("one\n")
        yield root


def host_of(project: Path) -> dict[str, str]:
    """Return the host's files, with their text."""
    return {path.name: path.read_text() for path in project.iterdir()}


BEFORE, AFTER = {"a.txt": "one\n"}, {"a.txt": "one\ntwo\n", "Makefile": "all:\n"}


def test_the_command_line_shows_and_commits_what_a_named_sandbox_has_changed(project: Path) -> None:
    """`diff` ends with an id, `commit` wants a yes for what is dangerous, `discard` takes the rest back."""
    name = f"cli-{os.getpid()}"
    with imported() as program:

        def cloche(*words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
            done = subprocess.run(
                [program.folder / "cloche", *words],
                cwd=project,
                capture_output=True,
                text=True,
                stdin=subprocess.DEVNULL,
                check=False,
            )
            assert done.returncode == code, done.stderr
            return done

        dropped = cloche("run", "--workspace", ".", "-c", ADDS)
        assert (dropped.stdout, "2 changes to" in dropped.stderr) == ("one\n\n", True)
        cloche("sandbox", "create", name, "--workspace", ".")
        try:
            cloche(
                "exec",
                name,
                "--",
                "sh",
                "-c",
                "echo two >> a.txt; echo all: > Makefile; printf 'x\\033[2J' > $'e\\033'",
            )
            shown = cloche("diff", name).stdout
            assert "\033" not in shown
            assert "A Makefile   [needs its own confirmation" in shown
            wanted = shown.splitlines()[-1].removeprefix("id ")
            assert json.loads(cloche("diff", name, "--json").stdout)["id"] == wanted
            assert cloche("diff", name, "--patch").stdout.count("diff --git") == 3
            assert "it names: 'Makefile'; look at them" in cloche("commit", name, "--id", wanted, code=2).stderr
            assert host_of(project) == BEFORE
            cloche("commit", name, "--id", wanted, "--dangerous", "Makefile", "a.txt", "Makefile")
            assert host_of(project) == AFTER
            cloche("discard", name, "--yes")
            assert "nothing was changed" in cloche("diff", name).stdout
        finally:
            cloche("sandbox", "kill", name, "--yes")


def test_the_command_line_says_what_git_tracks_and_is_hidden(project: Path) -> None:
    """One line, when the sandbox is opened."""
    (project / ".env").write_text("KEY=1")
    for words in (("init", "-q"), ("add", ".")):
        subprocess.run(["git", *words], cwd=project, check=True)
    done = subprocess.run(
        [sys.executable, "-m", "cloche", "exec", "--workspace", ".", "true"],
        cwd=project, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stderr == "cloche: Tracked by git, and hidden from the sandbox: .env.\n"


def test_a_review_shows_the_changes_and_asks_for_dangerous_ones_once_more(project: Path) -> None:
    """Who says yes to all and no to the dangerous one has the others written."""
    with Terminal("--workspace", str(project), "--review", "-c", ADDS, verb="run") as terminal:
        assert "+two" in terminal.see("[f]ile by file:")
        terminal.type("y\r")
        terminal.see("Makefile is dangerous")
        terminal.type("n\r")
        terminal.see("wrote 1 path")
    assert host_of(project) == {"a.txt": "one\ntwo\n"}


def test_a_models_commit_is_what_its_approver_was_shown(project: Path) -> None:
    """The request has the diff, a dangerous change makes it critical, and its id stands for no other diff."""
    asked: list[ApprovalRequest] = []

    async def approve(request: ApprovalRequest) -> Decision:
        asked.append(request)
        return Decision(is_approved=True, by="test")

    async def main() -> None:
        async with Toolbox(approve=approve, workspace=project) as tools:

            async def call(name: str, **arguments: Any) -> str:
                answer = await tools.call(name, arguments)
                return answer.text

            await call("write_file", path="a.txt", content="one\ntwo\n")
            shown = (await call("show_changes")).splitlines()[0].removeprefix("id: ")
            assert "call show_changes first" in await call("commit_changes", id="0" * 64)
            await call("write_file", path="Makefile", content="all:\n")
            assert "since this diff was made" in await call("commit_changes", id=shown)
            assert host_of(project) == BEFORE
            later = (await call("show_changes")).splitlines()[0].removeprefix("id: ")
            assert "Wrote 2 paths" in await call("commit_changes", id=later)

    asyncio.run(main())
    assert [(one.tool, str(one.risk)) for one in asked] == [
        ("commit_changes", "high"), ("commit_changes", "critical"), ("commit_changes", "critical")
    ]  # fmt: skip
    assert "+two" in asked[0].changes
    assert "Makefile" not in asked[0].changes
    assert "+all:" in asked[1].changes
    assert any("DANGEROUS" in row for row in asked[1].rules["changes"])
    assert host_of(project) == AFTER


def test_tools_without_a_folder_have_none_of_it() -> None:
    """They are neither on offer nor can they be called."""
    tools = Toolbox()
    assert not {"show_changes", "commit_changes"} & {one.name for one in tools.tools}
    with pytest.raises(InvalidRequest, match="there is no tool 'show_changes'"):
        tools.risk("show_changes")


def test_the_service_gives_folders_below_its_roots_alone(project: Path, tmp_path: Path) -> None:
    """A folder elsewhere, or behind a link, is refused; so is a commit where the operator lets nobody write."""
    roots = {name: project.with_name(name) for name in ("readable", "writable")}
    for root in roots.values():
        (root / "project").mkdir(parents=True)
        (root / "project/a.txt").write_text("one\n")
    (roots["writable"] / "link").symlink_to(project)
    (tmp_path / "home").mkdir()
    words = ("--workspace-root", str(roots["readable"]), "--workspace-root", f"{roots['writable']}:rw", "--drain", "2s")
    with serving(tmp_path / "home", *words) as service, service.client(service.new_key("run", "read")) as client:

        def post(path: str, code: int = 200, **asked: Any) -> Mapping[str, Any]:
            answer = client.post(path, json=asked)
            assert answer.status_code == code, answer.text
            found: Mapping[str, Any] = answer.json()
            return found

        assert "is not below a folder" in post("/api/sandboxes", 403, workspace={"path": str(project)})["detail"]
        assert "link" in post("/api/sandboxes", 422, workspace={"path": f"{roots['writable']}/link"})["detail"]
        for name, code in (("readable", 403), ("writable", 200)):
            folder = roots[name] / "project"
            made = post("/api/sandboxes", 201, workspace={"path": str(folder)}, lifetime="5m")
            address = f"/api/sandboxes/{made['id']}"
            assert (
                post(f"{address}/exec", shell="echo two >> a.txt; echo all: > Makefile; pwd")["stdout"] == f"{folder}\n"
            )
            diff = client.get(f"{address}/diff").json()
            assert {(one["what"], one["path"]) for one in diff["changes"]} == {
                ("modified", "a.txt"),
                ("added", "Makefile"),
            }
            assert [one["paths"] for one in diff["questions"]] == [["Makefile"]]
            post(f"{address}/commit", 403 if name == "readable" else 422, id=diff["id"])
            post(f"{address}/commit", code, id=diff["id"], dangerous=["Makefile"])
            assert host_of(folder) == (AFTER if code == 200 else BEFORE)
            assert set(post(f"{address}/discard")["discarded"]) == (set() if code == 200 else {"a.txt", "Makefile"})
            assert client.delete(address).json()["state"] == "ended"
