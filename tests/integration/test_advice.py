"""A failure whose cause is the sandbox, and whose message misleads, comes with advice."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import cloche

pytestmark = [pytest.mark.both_users, pytest.mark.usefixtures("settings_of_nobody")]
MISLEADING = {
    "a file in /tmp": ("open('/tmp/a', 'w')", "$TMPDIR"),
    "a file that the caller wrote to /tmp": ("open('/tmp/page.txt')", "$TMPDIR"),
    "the workspace by its name": ("import os; os.listdir('/workspace')", "working directory"),
    "by a shell": ("import os; exit(os.system('echo > /tmp/a') >> 8)", "$TMPDIR"),
    "shared memory": ("open('/dev/shm/a', 'w')", "/dev/shm"),
    "a server": ("import socket; socket.create_server(('127.0.0.1', 0))", "fork"),
    "a manager": ("import multiprocessing; multiprocessing.Manager()", "fork"),
    "a terminal": ("import os; os.openpty()", "terminal"),
    "a child's own process": (
        "import subprocess, sys; subprocess.run(['cat', '/proc/self/stat'], check=True)",
        "/proc",
    ),
}
NOT_OURS = {
    "the host's": "open('/etc/shadow')",
    "a name below its own": "open('missing')",
    "its own folder, by its path": "import os; open(os.path.abspath('missing'))",
    "its own temporary one": "import tempfile; open(tempfile.gettempdir() + '/missing')",
}


@pytest.mark.parametrize("name", MISLEADING)
def test_level_confined_says_what_helps(name: str) -> None:
    """What is the sandbox's own at level `jail` is the host's there; a result has the way round in its `meta`."""
    code, word = MISLEADING[name]
    result = cloche.run(code, level="confined", timeout=60)
    assert not result.ok
    assert word in result.meta["advice"], result.stderr


@pytest.mark.parametrize("name", NOT_OURS)
def test_what_does_not_mislead_has_no_advice(name: str) -> None:
    """The same words about another file are the program's own failure."""
    result = cloche.run(NOT_OURS[name], level="confined", timeout=60)
    assert (result.ok, result.meta.get("advice")) == (False, None), result.stderr


def test_a_user_without_a_name_has_one() -> None:
    """Of programs that ask who they are, Python's at least are told: the id of a guest has no name on the host."""
    assert cloche.run("import getpass; print(getpass.getuser())", level="confined", timeout=60).stdout == "sandbox\n"


def cloche_says(*words: str, **environment: str) -> tuple[int, str]:
    """Return the exit code and the last line on stderr of the command."""
    given = {**os.environ, **environment}
    command = [sys.executable, "-m", "cloche", *words]
    nothing = subprocess.DEVNULL  # that of the tests may be anything
    done = subprocess.run(command, stdin=nothing, capture_output=True, text=True, timeout=60, check=False, env=given)
    return done.returncode, (done.stderr.splitlines() or [""])[-1]


def test_a_line_for_a_shell_is_no_program() -> None:
    """On the command line and in a result."""
    assert "one program" in cloche.run(None, argv=["ls -l"]).meta["advice"]
    code, said = cloche_says("exec", "--", "ls -l")
    assert (code, "'ls -l' was taken as the name of one program" in said) == (127, True), said


def test_a_limit_is_told_with_what_raises_it() -> None:
    """The options are those of the command itself."""
    for option, code, amount in (
        ("--memory", "raise MemoryError", "64m"),
        ("--disk", "open('a', 'wb').write(bytes(50 << 20))", "16m"),
        ("--timeout", "while True: pass", "500ms"),
    ):
        said = cloche_says("run", option, amount, "-c", code)[1]
        assert option in said, said


def test_ctrl_c_while_modules_are_loaded_is_no_traceback(tmp_path: Path) -> None:
    """The command ends as it does later on, and says nothing."""
    (tmp_path / "click.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nwhile True: pass")
    assert cloche_says("run", "-c", "1", PYTHONPATH=str(tmp_path)) == (130, "")


def test_a_module_that_is_missing_is_said_with_the_options_that_bring_it() -> None:
    """On the command line: where packages, and modules of the user's own, come from."""
    code, said = cloche_says("run", "-c", "import no_such_module.below")
    assert (code, "no_such_module is not in the sandbox: --packages" in said) == (1, True), said


def test_a_host_that_is_not_reached_is_said_with_the_option_that_allows_it() -> None:
    """The network is off unless somebody asks for it, and libraries tell of names that cannot be resolved."""
    code, said = cloche_says("run", "-c", "import socket; socket.gethostbyname('api.example.com')")
    assert (code, "no host but those of --network-allow HOST" in said) == (1, True), said
