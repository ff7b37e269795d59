"""`cloche exec NAME -- COMMAND` takes a short way of its own, which does what the whole command does."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import cloche as library
from cloche.cli import _fast_path
from cloche.config.sources import ConfigPaths, _watched_files

pytestmark = [pytest.mark.user_soak, pytest.mark.usefixtures("settings_of_nobody_at_a_terminal", "cloche_on_path")]
WHOLE = "On"  # what CLOCHE_AUDIT may be, and the short way does not read
OWN = ("seq", "time", "pid", "run", "prev", "hash", "duration_s")  # of each event
READY = "echo ready; sleep 97"


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have names, and a log, of this test's own."""
    folder = tmp_path / "runtime"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    monkeypatch.delenv("CLOCHE_AUDIT", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def box(tmp_path: Path) -> Iterator[library.Sandbox]:
    """Give a sandbox that is kept under the name `box`, with a folder of the host."""
    folder = tmp_path / "project"
    folder.mkdir()
    with library.Sandbox(name="box", keep="10m", timeout=3, workspace=folder) as sandbox:
        yield sandbox
        sandbox.kill()


def start(*words: str, way: str, command: str = "exec", **streams: Any) -> subprocess.Popen[bytes]:
    """Start the command, by one of the two ways, with the modules that it imports on its standard error."""
    program = [sys.executable, "-X", "importtime", "-c", "from cloche.cli import main; main()", *command.split()]
    env = {**os.environ, "CLOCHE_AUDIT": way}
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, **streams}
    return subprocess.Popen([*program, *words], env=env, stderr=subprocess.PIPE, **streams)


def told_by(process: subprocess.Popen[bytes]) -> tuple[Any, ...]:
    """Return what it has printed and its exit code, without figures of time; and whether it needed click."""
    stdout, stderr = process.communicate(timeout=100)
    lines = stderr.decode().splitlines(keepends=True)
    imported = [line for line in lines if line.startswith("import time:")]
    said = "".join(line for line in lines if line not in imported)
    return stdout, re.sub(r"[0-9.]+ s\)", "N s)", said), process.returncode, any("click" in line for line in imported)


def events() -> list[dict[str, Any]]:
    """Return the events of the log, without what no two have alike."""
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    path = Path(state) / "cloche" / "audit.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [{name: value for name, value in json.loads(line).items() if name not in OWN} for line in lines]


def both(*words: str, act: Any = None, **streams: Any) -> tuple[Any, ...]:
    """Run a command by both ways, compare what they say and record, and return what the short one has said.

    `act` is called with the process while it runs.
    """
    told = []
    for way in ("on", WHOLE):
        before = len(events())
        process = start(*words, way=way, **streams)
        if act is not None:
            act(process)
        *found, is_whole = told_by(process)
        told.append((*found, events()[before:]))
        rare = found[2] not in (0, 3)
        assert is_whole == (way == WHOLE or rare), found
    assert told[0] == told[1]
    return told[0]


def test_how_commands_end_is_told_as_by_the_whole_command(box: library.Sandbox) -> None:
    """Output, messages, exit codes and the events of the log are the same, also where it does not end well."""
    box.write_file("/tmp/many", "x" * 200_000)
    assert both("box", "--", "sh", "-c", "echo out; echo err >&2; cd; pwd; exit 3")[1:3] == ("err\n", 3)
    environment = both("box", "--", "env", "-u", "CLOCHE_OUTPUT", "env")[0]
    assert b"GIT_CONFIG_COUNT=2\n" in environment
    assert both("box", "--", "printf", r"\377\0\n", "--", "ä")[0] == b"\xff\0\n"
    for words, code in ((("true",), 0), (("no-such-program",), 127), (("sh", "-c", "kill -9 $$"), 137)):
        assert both("box", "--", *words)[2] == code
    assert "timeout" in both("box", "--", "sh", "-c", "echo begun; sleep 20")[1]
    assert both("--cwd", "/etc", "box", "--", "pwd")[0] == b"/etc\n"
    assert both("box", "--", "sh", "-c", "echo a; exit 3", command="sandbox exec")[0] == b"a\n"
    assert both("--cwd", "none", "box", "--", "pwd")[2] == 125
    advised = both("box", "--", "sh", "-c", "echo ptrace: Operation not permitted >&2; exit 1")
    assert "gvisor" in advised[1]


def test_long_output_passes_through_and_is_recorded_alike(box: library.Sandbox) -> None:
    """More than results keep is written whole; a flood is ended."""
    box.write_file("/tmp/many", "x" * 200_000)
    assert len(both("box", "--", "cat", "/tmp/many", "/tmp/many")[0]) == 400_000


def test_who_stops_it_leaves_nothing_running(box: library.Sandbox) -> None:
    """Ctrl-C, SIGTERM, SIGHUP, and nobody who reads: the command is killed before the exit code is there."""

    def ready(process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"

    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)):

        def act(process: subprocess.Popen[bytes], number: int = number) -> None:
            ready(process)
            process.send_signal(number)

        assert both("box", "--timeout", "90s", "--", "sh", "-c", READY, act=act)[2] == code
        assert not [one for one in box.processes() if one.status is None]

    def leave(process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        process.stdout.read(1)
        process.stdout.close()

    assert both("box", "--timeout", "90s", "--", "yes", act=leave)[2] == 141
    with open("/dev/full", "wb") as full:
        assert "cannot pass the output on" in both("box", "--timeout", "90s", "--", "yes", stdout=full)[1]
    assert not [one for one in box.processes() if one.status is None]


def test_what_cannot_be_started_or_is_lost_is_told_alike(box: library.Sandbox) -> None:
    """A paused sandbox, and one that ends while a command runs in it."""
    box.pause()
    assert "paused" in both("box", "--", "true")[1]
    box.resume()
    assert b"standard input" not in both("box", "--", "true")[1].encode()
    with subprocess.Popen(["printf", "words"], stdout=subprocess.PIPE) as given:
        given.wait()
        process = start("box", "--", "true", way="on", stdin=given.stdout)
        assert told_by(process)[1] == "cloche: standard input was not passed on; -i does that\n"
    process = start("box", "--", "sh", "-c", READY, way="on")
    assert process.stdout is not None
    process.stdout.readline()
    box.kill()
    _, said, code, _ = told_by(process)
    assert (code, "the sandbox has ended" in said) == (125, True)


@pytest.mark.parametrize(
    "words",
    [
        "",
        "box",
        "box --",
        "box true",
        "-- box",
        "box -- ''",
        "-i box -- true",
        "Box -- true",
        "--cwd",
        "--cwd x",
        "--cwd -- true",
    ],
)
def test_other_words_are_the_whole_commands(words: str) -> None:
    """Nothing is looked for, or done, where the words are not the usual ones."""
    assert _fast_path.run_named([one.strip("'") for one in words.split()]) is None


def test_whatever_may_configure_leads_to_the_whole_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file that settings are read from, and each variable; a `.env` of the project's own does not."""
    for name in [name for name in os.environ if name.startswith(_fast_path.OURS)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    assert not _fast_path.is_configured()
    files = _watched_files((), os.getcwd(), ConfigPaths(environ=os.environ))
    assert len(files) >= 7
    for path in map(Path, files):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("CLOCHE_TIMEOUT=1\n")
        assert _fast_path.is_configured(), path
        path.unlink()
    Path(".env").write_text("DATABASE=x\n")
    assert not _fast_path.is_configured()
    monkeypatch.setenv("CLOCHE_TIMEOUT", "1")
    assert _fast_path.is_configured()
