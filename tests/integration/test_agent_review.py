"""The review of changes: written in part, tried first, discarded with a copy; no wrong key loses anything."""

from __future__ import annotations

import asyncio
import os
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import cloche
from cloche.cli._agent_review import review
from cloche.coding_agents.discard import save_and_discard
from cloche.coding_agents.review import ReviewEnd
from cloche.core.errors import InvalidRequest
from cloche.execution.sandbox import AsyncSandbox
from cloche.workspace.hunks import file_diffs
from tests.harness.terminals import Terminal

pytestmark = [pytest.mark.both_users, pytest.mark.usefixtures("settings_of_nobody", "own_places")]
LINES = [f"line {number}\n" for number in range(40)]
AGENT = """
sed -i 's/line 3$/LINE 3/; s/line 30$/LINE 30/' a.txt; chmod 700 a.txt; echo 'all:' > Makefile; mkdir d; mv c.txt d/c
rm b.txt; printf 'x\\033]0;approved\\007\\n' > "$(printf 'n\\033[2J')"; head -c 3000 /dev/zero > bin; ln -s c d/link
"""
PART = "".join("LINE 30\n" if line == "line 30\n" else line for line in LINES)


@pytest.fixture
def project() -> Iterator[Path]:
    """Make a folder with some files, two of which are hidden."""
    with tempfile.TemporaryDirectory(prefix="project-") as folder:
        root = Path(folder).resolve() / "project"
        root.mkdir()
        for name, text in (("a.txt", "".join(LINES)), ("b.txt", "b\n"), ("c.txt", "c\n"), (".env", "K=1\n")):
            (root / name).write_text(text)
        (root / "hidden").write_text("secret\n")
        yield root


def files_of(project: Path) -> set[str]:
    """Return the host's files and folders."""
    return {str(path.relative_to(project)) for path in project.rglob("*")}


BEFORE = {"a.txt", "b.txt", "c.txt", ".env", "hidden"}


def answering(*answers: str | type[BaseException]) -> tuple[Callable[[str], str], list[str]]:
    """Return a function that gives answers in turn, and the questions that it was asked."""
    left, asked = list(answers), []

    def read(question: str) -> str:
        asked.append(question)
        answer = left.pop(0)
        if isinstance(answer, str):
            return answer
        raise answer

    return read, asked


def reviewed(
    project: Path, *reviews: Sequence[str | type[BaseException]], check: str | None = None, branch: str | None = None
) -> tuple[list[ReviewEnd], list[list[str]], list[str]]:
    """Change the folder in a sandbox, and review it; return the ends, the questions, and the paths that stay."""

    async def main() -> tuple[list[ReviewEnd], list[list[str]], list[str]]:
        ends, questions = [], []
        async with AsyncSandbox(workspace=project, workspace_hide=["hidden"]) as sandbox:
            await sandbox.exec(shell=AGENT)
            for answers in reviews:
                read, asked = answering(*answers)
                ends.append(await review(sandbox, folder=str(project), check=check, branch=branch, read=read))
                questions.append(asked)
            return ends, questions, [change.path for change in (await sandbox.diff()).changes]

    return asyncio.run(main())


def test_a_part_of_a_file_is_written_and_the_rest_stays_a_change(project: Path) -> None:
    """One of two hunks, without the new permissions; what was compared before is not written again."""
    with cloche.Sandbox(workspace=project) as sandbox:
        sandbox.exec(shell=AGENT)
        diff = sandbox.diff()
        first, second = file_diffs(diff)["a.txt"].hunks
        with pytest.raises(InvalidRequest, match="has not these hunks"):
            sandbox.commit(diff, paths=["a.txt"], dangerous=["a.txt"], hunks={"a.txt": ["0" * 16]})
        with pytest.raises(InvalidRequest, match="need their own confirmation"):
            sandbox.commit(diff, paths=["a.txt"], hunks={"a.txt": [second.id]})
        with pytest.raises(InvalidRequest, match="only as a whole"):
            sandbox.commit(diff, paths=["b.txt"], hunks={"b.txt": []})
        assert sandbox.commit(diff, paths=["a.txt"], dangerous=True, hunks={"a.txt": [second.id]}).written == ("a.txt",)
        assert (project / "a.txt").read_text() == PART
        assert (project / "a.txt").stat().st_mode & 0o777 == 0o644
        later = sandbox.diff()
        rest = file_diffs(later)["a.txt"].hunks
        assert [(hunk.old, hunk.new) for hunk in rest] == [(first.old, first.new)]
        assert not later.conflicts
        sandbox.commit(later, paths=["a.txt"], dangerous=True)
        assert "LINE 3\n" in (project / "a.txt").read_text()


def test_a_check_sees_the_folder_as_it_would_be_and_nothing_else(project: Path) -> None:
    """Chosen changes alone, hidden files stay hidden, no network, and what the check writes is nowhere."""
    options: dict[str, Any] = {"network": "allowlist", "network_allow": ["example.org"]}
    with cloche.Sandbox(workspace=project, workspace_hide=["hidden"], **options) as sandbox:
        served = "grep -c 198.18 /etc/resolv.conf"  # the resolver of the network from outside
        assert sandbox.exec(shell=f"{AGENT}{served}").stdout == "1\n"
        diff = sandbox.diff()
        hunk = file_diffs(diff)["a.txt"].hunks[1]
        tried = sandbox.try_commit(
            "find . -type f -o -type l | sort; stat -c %a a.txt; cat a.txt d/c; readlink d/link; pwd;"
            f"echo no > a.txt; echo no > new; cat hidden .env; {served}",
            diff, paths=["a.txt", "d", "b.txt"], theirs=[], hunks={"a.txt": [hunk.id]},
        )  # fmt: skip
        assert tried.stdout == f"./a.txt\n./d/c\n./d/link\n644\n{PART}c\nc\n{project}\n0\n"
        assert sandbox.diff().id == diff.id
    assert files_of(project) == BEFORE


def test_keys_that_mean_nothing_and_every_end_keep_all_changes(project: Path) -> None:
    """Letters that are no key, Enter, the end of input and Ctrl-C, at each question."""
    answers = [["x", "yes", "D!", ""], [EOFError], [KeyboardInterrupt], ["f", "y", EOFError], ["h", "y", EOFError],
               ["a", "y", EOFError], ["b", EOFError], ["disc", "k"], ["a", KeyboardInterrupt]]  # fmt: skip
    ends, _, left = reviewed(project, *answers)
    assert [end.how for end in ends] == ["kept"] * len(answers)
    assert files_of(project) == BEFORE
    assert len(left) == 8


def test_a_failing_check_asks_again_and_writes_nothing_by_itself(project: Path) -> None:
    """A no goes back to the choice; a passing one writes without a further question."""
    grep = "! grep -q 'LINE 3$' a.txt"
    (first, second), questions, left = reviewed(
        project, ["a", "y", "y", "n", ""], ["h", "n", "y", *"nnnnnn", "y"], check=grep
    )
    assert (first.how, second.how) == ("kept", "committed")
    assert "not passed" in questions[0][3]
    assert (project / "a.txt").read_text() == PART
    assert files_of(project) == BEFORE
    assert {"a.txt", "b.txt"} < set(left)


def test_what_comes_after_the_archive_is_not_discarded(project: Path, tmp_path: Path) -> None:
    """An agent that still runs may go on between the two; then nothing is discarded."""

    async def discarded() -> bytes:
        async with AsyncSandbox(workspace=str(project), live=True) as sandbox:
            await sandbox.write_file("first", "1")
            diff, save = await sandbox.diff(), sandbox.save_changes

            async def save_and_go_on(target: str, diff_id: str) -> int:
                size = await save(target, diff_id)
                await sandbox.write_file("second", "2")
                return size

            sandbox.save_changes = save_and_go_on  # type: ignore[method-assign, assignment]
            with pytest.raises(InvalidRequest, match="nothing was discarded"):
                await save_and_discard(sandbox, diff.id, str(tmp_path))
            return await sandbox.read_file("first") + await sandbox.read_file("second")

    assert asyncio.run(discarded()) == b"12"


def test_discarded_changes_are_saved_first(project: Path) -> None:
    """The archive has each new file with its content, the patch, and no one else may read it."""
    (end,), _, left = reviewed(project, ["discard"])
    assert (end.how, left) == ("discarded", [])
    assert os.stat(end.saved).st_mode & 0o777 == 0o600
    with tarfile.open(end.saved) as archive:
        assert {"files/Makefile", "files/bin", "files/d/link"} < set(archive.getnames())
        text = archive.extractfile("changes.patch")
        assert text is not None
        assert b"-b\n" in text.read()


def test_on_a_terminal_nothing_of_the_guest_is_a_command_to_it(project: Path) -> None:
    """Names and contents come escaped, in the summary, in the pager and by hunk; what was typed before is dropped."""
    name = f"review-{os.getpid()}"
    with cloche.Sandbox(workspace=project, name=name, keep="5m") as sandbox:
        sandbox.exec(shell=AGENT)
    try:
        os.environ["PAGER"] = "cat - "
        with Terminal("review", name, verb="agent") as terminal:
            terminal.type("a\ry\ry\r")  # as a terminal answers a program of the guest: no answer to a later question
            summary = terminal.see("[?]: ")
            assert summary.index("Makefile") < summary.index("b.txt")
            terminal.type("d\r")
            assert "+x\\x1b]0;approved\\x07" in terminal.see("[?]: ")
            terminal.type("h\r")
            terminal.see("[s]kip the rest: ")
            terminal.type("\x03")
            while not terminal.shows("keeps its changes", patience_s=5):  # it may come just before `input` reads
                terminal.type("\x03")
            assert not any(code in terminal.raw for code in (b"\x1b]0", b"\x1b[2J"))
            assert terminal.leave() == 0
        assert files_of(project) == BEFORE
    finally:
        with cloche.Sandbox.attach(name) as sandbox:
            sandbox.kill()
