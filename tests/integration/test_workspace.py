"""A folder of the host as a sandbox's workspace, from opening to commit, by whoever runs the tests."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import cloche
from cloche.backends.local import LocalBackend
from cloche.core.changes import Diff
from cloche.core.errors import BackendUnavailable, InvalidRequest, WorkspaceConflict
from cloche.execution.sandbox import AsyncSandbox
from cloche.workspace.compare import TOO_DEEP

pytestmark = [pytest.mark.both_users, pytest.mark.usefixtures("own_places")]
PATIENCE_S = 60
FILES = {"a.txt": "one\n", "src/b.py": "b = 1\n", "old.txt": "to be moved\n" * 3, "gone/x/f": "f\n", ".env": "KEY=1\n"}
AGENT = """
echo two >> a.txt; echo new > src/new.py; mv old.txt young.txt; rm -r gone; ln -s b.py src/link; chmod 755 src/b.py
"""
OPENS = """
import os, signal, sys, time, cloche
with cloche.Sandbox(name=sys.argv[1], keep="5m", workspace=sys.argv[2]) as sandbox:
    assert sandbox.exec(["sh", "-c", "echo mine >> a.txt"]).ok
    print("there", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def project() -> Iterator[Path]:
    """Make a folder with some files, one of which is hidden."""
    with tempfile.TemporaryDirectory(prefix="project-") as folder:
        root = Path(folder).resolve() / "project"
        for path, text in FILES.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text)
        yield root


def told(diff: Diff) -> set[tuple[str, str]]:
    """Return what was changed, by path."""
    return {(one.what, one.path) for one in diff.changes}


def host_of(project: Path) -> dict[str, str]:
    """Return the host's files, with their text."""
    return {str(path.relative_to(project)): path.read_text() for path in project.rglob("*") if path.is_file()}


AGENTS_CHANGES = {
    ("modified", "a.txt"), ("added", "src/new.py"), ("renamed", "young.txt"), ("removed", "gone"),
    ("removed", "gone/x"), ("removed", "gone/x/f"), ("added", "src/link"), ("mode", "src/b.py"),
}  # fmt: skip


def test_a_run_works_at_the_folders_own_path_and_writes_nothing_to_the_host(project: Path) -> None:
    """What is written inside is seen inside alone, and the diff has all of it."""
    with cloche.Sandbox(workspace=project) as sandbox:
        shown = sandbox.exec(["sh", "-c", f"pwd; readlink /workspace; {AGENT} cat a.txt; ls -A src"])
        assert shown.stdout.split() == [str(project), str(project), "one", "two", "b.py", "link", "new.py"]
        assert shown.meta["workspace"]["how"] == "overlay"
        assert told(sandbox.diff()) == AGENTS_CHANGES
    assert host_of(project) == FILES


def test_a_commit_writes_exactly_what_the_diff_showed(project: Path) -> None:
    """With the diff's id all of it is on the host, owned as the folder is, and is no change any more."""
    with cloche.Sandbox(workspace=project) as sandbox:
        assert sandbox.exec(["sh", "-c", AGENT]).ok
        diff = sandbox.diff()
        assert [one.path for one in diff.dangerous] == ["src/b.py"]
        with pytest.raises(InvalidRequest, match=r"executable.*src/b.py"):
            sandbox.commit(diff)
        assert host_of(project) == FILES
        assert set(sandbox.commit(diff.id, dangerous=["src/b.py"]).written) == {path for _, path in AGENTS_CHANGES}
        assert sandbox.diff().changes == ()
    host = host_of(project)
    assert host.pop("young.txt") == FILES["old.txt"]
    assert host == {
        "a.txt": "one\ntwo\n", "src/b.py": "b = 1\n", "src/new.py": "new\n", "src/link": "b = 1\n", ".env": "KEY=1\n"
    }  # fmt: skip
    assert (project / "src/new.py").stat().st_uid == project.stat().st_uid
    assert (project / "src/b.py").stat().st_mode & 0o777 == 0o755


def test_what_changes_after_a_diff_is_not_committed_with_its_id(project: Path) -> None:
    """A guest that goes on after it was looked at has nothing of that written."""
    with cloche.Sandbox(workspace=project) as sandbox:
        sandbox.write_file("a.txt", "seen\n")
        seen = sandbox.diff()
        sandbox.write_file("a.txt", "not seen\n")
        with pytest.raises(InvalidRequest, match="since this diff was made"):
            sandbox.commit(seen)
        assert host_of(project) == FILES


def test_a_second_commit_of_a_file_is_no_conflict_and_one_of_the_hosts_is(project: Path) -> None:
    """What this sandbox wrote itself is known; what somebody else wrote is named; one chooses, and is told of it."""
    with cloche.Sandbox(workspace=project) as sandbox:
        for text in ("first\n", "second\n"):
            sandbox.write_file("a.txt", text)
            assert sandbox.commit().written == ("a.txt",)
        sandbox.write_file("a.txt", "third\n")
        sandbox.write_file("b.txt", "b\n")
        (project / "a.txt").write_text("the host's\n")
        with pytest.raises(WorkspaceConflict, match=r"a\.txt"):
            sandbox.commit()
        done = sandbox.commit(theirs=["a.txt"])
        assert (done.written, done.left) == (("b.txt",), {"a.txt": "the host's version was kept"})
        assert (project / "a.txt").read_text() == "the host's\n"
        assert sandbox.commit(ours=["a.txt"]).written == ("a.txt",)
        assert (project / "a.txt").read_text() == "third\n"


LONG = """
import os
for name, depth in (("d" * 200, 40), ("e", 300)):
    here = os.open(".", os.O_RDONLY)
    for _ in range(depth):
        os.mkdir(name, dir_fd=here)
        above, here = here, os.open(name, os.O_RDONLY, dir_fd=here)
        os.close(above)
        os.close(os.open("file", os.O_WRONLY | os.O_CREAT, 0o644, dir_fd=here))
    os.close(here)
"""


def test_what_is_too_long_or_too_deep_blocks_nothing_else(project: Path) -> None:
    """A chain of each is cut where it is named; what is above it and beside it is written."""
    with cloche.Sandbox(workspace=project) as sandbox:
        sandbox.write_file("a.txt", "new\n")
        assert sandbox.exec(["python3", "-c", LONG]).ok
        done = sandbox.commit()
        assert {"a.txt", "e/e/e/file"} <= set(done.written)
        assert {(path[:2], why) for path, why in done.left.items()} == {("dd", TOO_DEEP), ("e/", TOO_DEEP)}
        assert sandbox.commit().written == ()


def test_what_is_discarded_takes_nothing_else_with_it(project: Path) -> None:
    """A file of a new folder goes alone; a file that became a folder is a file again."""
    with cloche.Sandbox(workspace=project) as sandbox:
        assert sandbox.exec(
            ["sh", "-c", "mkdir new && touch new/a new/b && rm a.txt && mkdir a.txt && touch a.txt/x"]
        ).ok
        assert sandbox.discard(paths=["new/a"]) == ("new/a",)
        assert set(sandbox.discard(paths=["a.txt"])) == {"a.txt", "a.txt/x"}
        assert [one.path for one in sandbox.diff().changes] == ["new", "new/b"]
        assert sandbox.read_file("a.txt") == FILES["a.txt"].encode()


def test_some_paths_are_committed_and_others_discarded(project: Path) -> None:
    """What is left out stays inside; what is discarded is as the host has it now."""
    with cloche.Sandbox(workspace=project) as sandbox:
        assert sandbox.exec(["sh", "-c", AGENT]).ok
        assert set(sandbox.commit(paths=["a.txt", "gone"]).written) == {"a.txt", "gone", "gone/x", "gone/x/f"}
        (project / "src/b.py").write_text("b = 2\n")
        assert set(sandbox.discard(["src", "young.txt"])) == {"src/new.py", "src/link", "src/b.py", "young.txt"}
        assert sandbox.diff().changes == ()
        inside = sandbox.exec(["sh", "-c", "cat src/b.py old.txt; ls -A src"]).stdout
        assert inside == "b = 2\n" + FILES["old.txt"] + "b.py\n"


def test_hidden_files_are_not_there_and_never_written(project: Path) -> None:
    """A guest finds none, and what it makes under such a name is left out with the reason."""
    with cloche.Sandbox(workspace=project, workspace_hide=["src/"]) as sandbox:
        seen = sandbox.exec(["sh", "-c", "ls -A; cat .env; echo KEY=2 > .env; mkdir src; echo x > src/b.py"])
        assert set(seen.stdout.split()) == {"a.txt", "old.txt", "gone"}
        assert sorted(seen.meta["workspace"]["hidden"]) == [".env", "src"]
        diff = sandbox.diff()
        assert diff.changes == ()
        assert {one.path for one in diff.left_out} >= {".env", "src"}
        assert sandbox.commit(diff).written == ()
    assert host_of(project) == FILES


def test_a_guest_stands_still_while_its_changes_are_read(project: Path) -> None:
    """Two files that it writes one after the other are never further apart than one round."""
    writes = "n=0; while :; do n=$((n+1)); for f in one two; do echo $n > .t; mv .t $f; done; done"
    with cloche.Sandbox(workspace=project, timeout="120s") as sandbox, sandbox.start(["sh", "-c", writes]):
        rounds = 0
        while rounds < 5:
            found = dict(re.findall(r"\+\+\+ b/(one|two)\n@@ .*\n\+(\d+)", sandbox.diff().patch))
            if len(found) < 2:
                continue  # it has just begun
            rounds += 1
            assert int(found["one"]) - int(found["two"]) in (0, 1)
        before = sandbox.read_file("one")
        deadline = time.monotonic() + PATIENCE_S
        while sandbox.read_file("one") == before:  # it goes on
            assert time.monotonic() < deadline


def test_a_sandbox_with_a_name_keeps_its_changes_when_its_caller_is_killed(project: Path) -> None:
    """Whoever comes back by the name finds them, and may commit them."""
    name = f"workspace-{os.getpid()}"
    with subprocess.Popen(
        [sys.executable, "-c", OPENS, name, str(project)], stdout=subprocess.PIPE, text=True
    ) as caller:
        assert caller.stdout is not None
        assert caller.stdout.readline() == "there\n"
        caller.send_signal(signal.SIGKILL)
        caller.wait()
    with cloche.Sandbox.attach(name) as sandbox:
        try:
            diff = sandbox.diff()
            assert told(diff) == {("modified", "a.txt")}
            assert sandbox.commit(diff).written == ("a.txt",)
        finally:
            sandbox.kill()
    assert (project / "a.txt").read_text() == "one\nmine\n"


def test_a_folder_that_is_another_by_now_is_refused_to_who_comes_back(project: Path) -> None:
    """Nothing is written to what has the folder's path, but is not that folder."""
    name = f"workspace-{os.getpid()}-other"
    with cloche.Sandbox(name=name, keep="1m", workspace=project) as sandbox:
        sandbox.write_file("a.txt", "x")
        project.rename(project.with_name("moved"))
        project.mkdir()
        try:
            with pytest.raises(InvalidRequest, match="no longer the folder"), cloche.Sandbox.attach(name):
                pass
        finally:
            sandbox.kill()


def test_further_folders_are_there_and_cannot_be_written_to(project: Path) -> None:
    """They are at their own paths, without what is hidden, also where the host itself would let them be written."""
    other = project.with_name("other")
    other.mkdir()
    (other / "data").write_text("d")
    (other / ".env").write_text("KEY=1")
    (other / "made outside").write_text("x")  # which works
    with cloche.Sandbox(workspace=project, workspace_read=[other]) as sandbox:
        seen = sandbox.exec(["sh", "-c", f"ls -A {other}; touch {other}/made; rm {other}/data"])
        assert seen.stdout.splitlines() == ["data", "made outside"]
        assert seen.stderr.count("Read-only file system") == 2
    with pytest.raises(InvalidRequest, match="lie in each other"):
        cloche.Sandbox(workspace=project, workspace_read=[project / "src"]).__enter__()


def test_where_there_is_no_view_there_is_a_copy_that_says_so(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same changes have the same id in a copy, and are committed as well."""
    with cloche.Sandbox(workspace=project) as sandbox:
        assert sandbox.exec(["sh", "-c", AGENT]).ok
        seen = sandbox.diff()
    monkeypatch.setattr(LocalBackend, "why_no_view", lambda *_: "this is a test")
    with cloche.Sandbox(workspace=project) as sandbox:
        done = sandbox.exec(["sh", "-c", f"pwd; {AGENT}"])
        assert done.stdout == "/workspace\n"
        assert done.meta["workspace"]["how"] == "copy"
        assert done.meta["workspace"]["why"] == "this is a test"
        diff = sandbox.diff()
        assert (told(diff), diff.id) == (AGENTS_CHANGES, seen.id)
        sandbox.discard(["young.txt"])
        assert sandbox.commit(dangerous=True).written
        assert sandbox.diff().changes == ()
    assert host_of(project)["old.txt"] == FILES["old.txt"]
    with pytest.raises(BackendUnavailable, match="a sandbox with a name needs a view"):
        cloche.Sandbox(workspace=project, name=f"copy-{os.getpid()}", keep="1m").__enter__()


def test_more_than_may_be_written_is_an_error_inside_and_the_rest_is_kept(project: Path) -> None:
    """The layer's own limit holds, whatever the sandbox's disk may take."""
    with cloche.Sandbox(workspace=project, workspace_disk="1m", disk="64m") as sandbox:
        filled = sandbox.exec(["sh", "-c", "head -c 4000000 /dev/zero > big"])
        assert "No space left on device" in filled.stderr
        sandbox.remove("big")
        sandbox.write_file("small", "s")
        assert told(sandbox.diff()) == {("added", "small")}


async def test_a_diff_that_is_cancelled_leaves_the_sandbox_running(project: Path) -> None:
    """What stood still for it goes on."""
    async with AsyncSandbox(workspace=project) as sandbox:
        assert (await sandbox.exec(["sh", "-c", "for i in $(seq 2000); do echo $i > f$i; done"])).ok
        for _ in range(5):
            looking = asyncio.ensure_future(sandbox.diff())
            await asyncio.sleep(0.01)
            looking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await looking
        assert (await sandbox.exec(["true"])).ok
        assert len(await sandbox.changes()) == 2000


def test_forks_have_changes_of_their_own_of_which_one_may_be_committed(project: Path) -> None:
    """Each begins with what the view had; what one commits is not taken back by another, nor known to it as its own."""
    with cloche.Sandbox(workspace=project) as sandbox:
        sandbox.write_file("a.txt", "before\n")
        session = sandbox.session(checkpoints=True)
        session.checkpoint("begin")
        first, second = session.fork(2)
        first.run("open('first', 'w').write('1'); import os; os.remove('old.txt')")
        second.run("open('second', 'w').write('2')")
        assert told(first.sandbox.diff()) == {("modified", "a.txt"), ("added", "first"), ("removed", "old.txt")}
        assert told(second.sandbox.diff()) == {("modified", "a.txt"), ("added", "second")}
        assert set(first.sandbox.commit().written) == {"a.txt", "first", "old.txt"}
        assert host_of(project).keys() == {"a.txt", "first", "src/b.py", "gone/x/f", ".env"}
        diff = second.sandbox.diff()
        assert told(diff) == {("added", "second"), ("added", "old.txt")}
        first.close()
        second.close()
        session.run("open('later', 'w').write('3')")
        session.rollback("begin")
        assert ("added", "later") not in told(session.sandbox.diff())


def test_a_conflict_in_text_is_merged_where_git_has_the_base(project: Path) -> None:
    """Both sides have the changes of both; where they are to the same lines, nothing is written."""
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@localhost"]
    (project / "a.txt").write_text("".join(f"line {n}\n" for n in range(9)))
    for words in (["init", "-q"], ["add", "a.txt"], ["commit", "-q", "-m", "one"]):
        subprocess.run([*git, *words], cwd=project, check=True)
    base = (project / "a.txt").read_text()
    with cloche.Sandbox(workspace=project) as sandbox:
        sandbox.write_file("a.txt", base.replace("line 8", "inside"))
        (project / "a.txt").write_text(base.replace("line 0", "outside"))
        assert sandbox.commit(merge=["a.txt"]).written == ("a.txt",)
        both = base.replace("line 0", "outside").replace("line 8", "inside")
        assert ((project / "a.txt").read_text(), sandbox.read_file("a.txt")) == (both, both.encode())
        sandbox.write_file("a.txt", both.replace("line 4", "inside"))
        (project / "a.txt").write_text(both.replace("line 4", "outside"))
        with pytest.raises(WorkspaceConflict, match="the same lines"):
            sandbox.commit(merge=["a.txt"])
        assert "line 4" not in (project / "a.txt").read_text()
        assert "inside" in (project / "a.txt").read_text()
