"""Sandboxes with a name on the command line: work in one, copy, look, and end them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import cloche as library
from cloche.keeper import registry
from cloche.keeper.attach import visit
from tests.harness.terminals import Terminal

pytestmark = [pytest.mark.both_users, pytest.mark.usefixtures("settings_of_nobody_at_a_terminal", "cloche_on_path")]


def cloche(*words: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Run the command line with pipes."""
    return subprocess.run(["cloche", *words], input=stdin, capture_output=True, timeout=100, check=False)


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have names of this test's own."""
    folder = tmp_path / "runtime"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))


@pytest.fixture
def box() -> Iterator[library.Sandbox]:
    """Give a sandbox that is kept under the name `box`."""
    with library.Sandbox(name="box", keep="10m") as sandbox:
        yield sandbox
        sandbox.kill()


def test_programs_and_cells_work_in_the_sandbox_of_a_name(box: library.Sandbox) -> None:
    """`--in` finds what is there, with the command's own time-out, variables and files."""
    box.write_file("/tmp/note", "here ")
    Path("given").write_text("given")
    code = "import os; print(open('/tmp/note').read() + os.environ['X'], open('given').read()); raise SystemExit(7)"
    done = cloche("run", "--in", "box", "--env", "X=y", "--file", "given", "-c", code)
    assert (done.stdout, done.stderr, done.returncode) == (b"here y given\n", b"", 7)
    done = cloche("session", "--in", "box", "--timeout", "500ms", stdin=b"x = 1\n# %%\nwhile x: pass\n")
    assert (done.returncode, b"KeyboardInterrupt" in done.stderr) == (124, True)
    done = cloche("session", "--in", "box", stdin=b"open('/tmp/note').read()\n")
    assert done.stdout == b"'here '\n"
    for words in (("run", "--in", "other", "-c", "1"), ("session", "--in", "other")):
        done = cloche(*words)
        assert (done.returncode, b"called 'other'" in done.stderr) == (2, True)
    done = cloche("run", "--in", "box", "--memory", "1g", "-c", "1")
    assert (done.returncode, done.stderr[:38]) == (2, b"cloche: --memory is for a new sandbox,")


def test_files_are_copied_in_and_out(box: library.Sandbox) -> None:
    """What is copied into a folder that is there keeps its name; else the target is its name."""
    Path("folder").mkdir()
    Path("folder/file").write_text("content")
    assert cloche("sandbox", "cp", "folder", "box:").returncode == 0
    assert box.read_file("folder/file") == b"content"
    assert cloche("sandbox", "cp", "folder/file", "box:/tmp/other").returncode == 0
    assert cloche("sandbox", "cp", "box:/tmp/other", ".").returncode == 0
    assert Path("other").read_text() == "content"
    assert cloche("sandbox", "cp", "box:folder", "new").returncode == 0
    assert Path("new/file").read_text() == "content"
    Path("folder/outside").symlink_to("/etc/passwd")
    assert b"left out 1: " in cloche("sandbox", "cp", "folder", "box:").stderr
    assert cloche("sandbox", "cp", "box:/tmp/other", "-").returncode == 2
    done = cloche("sandbox", "cp", "folder", "new")
    assert (done.returncode, b"NAME:PATH" in done.stderr) == (2, True)


def test_what_one_is_can_be_looked_at(box: library.Sandbox) -> None:
    """`ps` and `sandbox list` show the same, `inspect` all that is known of one."""
    assert b" 10m 0s " in cloche("ps").stdout
    (row,), (same,) = (json.loads(cloche(*words, "--json").stdout) for words in (("ps",), ("sandbox", "list")))
    assert (row["name"], row["state"], row["backend"], row.keys()) == ("box", "running", "local", same.keys())
    facts = json.loads(cloche("sandbox", "inspect", "box", "--json").stdout)
    assert (facts["name"], facts["state"], facts["enforcement"]["level"]) == ("box", "running", "jail")
    assert facts["limits"]["memory_bytes"] == box.limits.memory_bytes


def test_who_listens_is_listed(box: library.Sandbox) -> None:
    """`ports` shows where a server is, for `forward`."""
    assert json.loads(cloche("sandbox", "ports", "box", "--json").stdout) == []
    server = "import socket, time; held = socket.create_server(('127.0.0.1', 8123)); print('up', flush=True)"
    with box.start(["python3", "-c", f"{server}; time.sleep(1000)"]) as process:
        assert next(iter(process.stdout)) == b"up\n"
        rows = json.loads(cloche("sandbox", "ports", "box", "--json").stdout)
    assert rows == [{"port": 8123, "address": "127.0.0.1"}]


@pytest.mark.usefixtures("box")
def test_a_name_in_place_of_a_command_is_explained() -> None:
    """As with docker's, `exec box ls` is what one writes; a verb of `sandbox` is found without its group."""
    done = cloche("exec", "box", "ls")
    assert (done.returncode, b"write: cloche exec box -- COMMAND" in done.stderr) == (127, True)
    assert b"name of a sandbox" not in cloche("exec", "nosuch").stderr
    assert b"'sandbox create'" in cloche("create", "other").stderr


def test_stop_asks_all_to_end_and_ends_the_sandbox() -> None:
    """A process has the time to say goodbye, also one that stands still; the name is free afterwards."""
    with library.Sandbox(name="box", keep="10m") as sandbox:
        process = sandbox.start(["sh", "-c", "trap 'echo bye; exit 7' TERM; echo up; while :; do sleep 0.1; done"])
        assert process.stdout.read() == b"up\n"
        sandbox.pause()
        done = cloche("sandbox", "stop", "box", "--yes")
        assert (done.stdout, done.stderr, done.returncode) == (b"box\n", b"", 0)
        assert process.stdout.read() == b"bye\n"
    assert cloche("ps").stdout == b"there are no named sandboxes\n"


def test_files_can_be_read_after_the_processes_were_asked_to_end(box: library.Sandbox) -> None:
    """No guest that waited, and has the signal still to come, is given the operation."""
    box.write_file("/tmp/work", "done")
    box.exec(["sh", "-c", "sleep 0.3; kill -STOP -1"])  # what is stopped ends by SIGTERM once it goes on
    visit(registry.find("box"), "stop", grace_s=5.0)
    assert box.read_file("/tmp/work") == b"done"


def test_the_next_one_is_ended_where_one_is_gone() -> None:
    """What cannot be ended is said, and makes the exit code; without a yes, and a terminal, nothing is ended."""
    for name in ("one", "two"):
        with library.Sandbox(name=name, keep="10m"):
            pass
    done = cloche("sandbox", "kill", "one", "two")
    assert (done.stdout, done.returncode, done.stderr.count(b"so one goes on; --yes answers it")) == (b"", 2, 1)
    done = cloche("sandbox", "kill", "--yes", "gone", "one", "gone-too", "two")
    assert (done.stdout, done.returncode) == (b"one\ntwo\n", 2)
    assert [line.split("'")[1] for line in done.stderr.decode().splitlines()] == ["gone", "gone-too"]


@pytest.mark.parametrize("verb", ["kill", "rm", "stop"])
def test_changes_that_are_not_committed_are_asked_about(verb: str) -> None:
    """Without a terminal that is an error, unless --force is given; what is committed is not asked about."""
    Path("project").mkdir()
    with library.Sandbox(name="box", keep="10m", workspace="project") as sandbox:
        sandbox.write_file("new", "1")
    done = cloche("sandbox", verb, "box")
    assert (done.returncode, done.stdout) == (2, b"")
    assert b"1 uncommitted change to " in done.stderr
    assert b"cloche commit box writes them, --force ends it" in done.stderr
    if verb == "kill":
        with Terminal("kill", "box", verb="sandbox") as terminal:
            terminal.see("End it anyway? [y/N]: ")
            terminal.type("n\r")
            terminal.see("box goes on")
        assert cloche("commit", "box").returncode == 0
        assert Path("project/new").read_text() == "1"
    done = cloche("sandbox", verb, "box", "--force" if verb != "kill" else "--yes")
    assert (done.stdout, done.stderr, done.returncode) == (b"box\n", b"", 0)
