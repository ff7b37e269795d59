"""`cloche run --fix`, as a shell and a terminal see it."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness.models import ESCAPES, KEY, MODEL, Handler, Scripted, block, serving
from tests.harness.processes import wait_for_word

pytestmark = pytest.mark.usefixtures("settings_of_nobody", "no_variables")

RUN = [sys.executable, "-m", "cloche", "run"]
Command = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def command(configured: Callable[[Scripted], None]) -> Command:
    """Return a function that runs `cloche run` with a server named in its environment."""

    def call(server: Scripted, *words: str) -> subprocess.CompletedProcess[str]:
        configured(server)
        done = [*RUN, *words]
        return subprocess.run(done, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=60)

    return call


@pytest.fixture
def configured(monkeypatch: pytest.MonkeyPatch) -> Callable[[Scripted], None]:
    """Return a function that names a server in the environment."""

    def name(server: Scripted) -> None:
        monkeypatch.setenv("CLOCHE_AUTOFIX_BASE_URL", server.base_url)
        monkeypatch.setenv("CLOCHE_AUTOFIX_MODEL", MODEL)
        monkeypatch.setenv("CLOCHE_AUTOFIX_API_KEY", KEY)

    return name


def test_a_terminal_shows_the_rounds_and_obeys_no_answer(configured: Callable[[Scripted], None]) -> None:
    """At a terminal each round is a line; what a model or its program writes is shown, not obeyed."""
    noisy = f"raise RuntimeError({ESCAPES!r})  # {ESCAPES}\n"
    with serving([block(noisy), block(f"print({ESCAPES!r})\n")]) as server:
        configured(server)
        leader, follower = pty.openpty()
        with subprocess.Popen([*RUN, "-c", "1 / 0", "--fix"], stdin=follower, stdout=follower, stderr=follower) as run:
            os.close(follower)
            shown = b""
            with contextlib.suppress(OSError):  # how a terminal says that everybody left
                while piece := os.read(leader, 1 << 16):
                    shown += piece
            os.close(leader)
            assert run.wait(60) == 0
    text = shown.decode()
    assert "round 1 of 4: asking" in text
    assert "round 1: exit code 1: RuntimeError" in text
    assert "round 2: it works" in text
    assert "\\x1b]0;owned" in text
    assert not [code for code in ("\x1b]0;", "\x1b[2J", "\x07", "\u202e") if code in text]


def test_an_interrupt_ends_the_waiting(configured: Callable[[Scripted], None]) -> None:
    """Ctrl-C while a model is asked ends the command at once, in order, and loses nothing that was printed."""
    asked, left = threading.Event(), threading.Event()

    def wait(_: Handler) -> None:
        asked.set()
        left.wait(60)

    with serving([wait]) as server:
        configured(server)
        words = [*RUN, "-c", "print('so far'); 1 / 0", "--fix"]
        with subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
            assert asked.wait(60)
            run.send_signal(signal.SIGINT)
            printed, said = run.communicate(timeout=60)
            left.set()
    assert (run.returncode, printed) == (130, b"so far\n")
    assert b"ZeroDivisionError: division by zero" in said.splitlines()
    assert said.count(b"Traceback (most recent") == 1  # the program's own


def test_an_interrupt_of_a_rounds_program_prints_what_that_has_printed(
    configured: Callable[[Scripted], None], tmp_path: Path
) -> None:
    """Not what the one before printed; --json prints nothing that could be taken for a result."""
    for words, expected in (([], b"running\n"), (["--json"], b"")):
        nap = f"6{time.monotonic_ns() % 10**9}.5"
        code = f"import os\nprint('running', flush=True)\nos.execvp('sleep', ['sleep', '{nap}'])\n"
        with serving([block(code)]) as server:
            configured(server)
            done = [*RUN, "-c", "print('before'); 1 / 0", "--fix", *words]
            with subprocess.Popen([*done, "--sandbox-debug"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
                assert run.stderr is not None
                plans = 0
                while plans < 2:  # of the first program and of the round's
                    line = run.stderr.readline()
                    assert line, "it ended by itself"
                    plans += b"  1 " in line and b" ms  " in line
                wait_for_word(nap)
                time.sleep(1)  # until it has been heard, too
                run.send_signal(signal.SIGINT)
                printed, _ = run.communicate(timeout=60)
        assert (run.returncode, printed) == (130, expected)


def test_the_command_repairs_and_says_what_changed(command: Command, tmp_path: Path) -> None:
    """The output is the last program's alone, and stderr names the host, how it ended and the difference."""
    with serving([block("print('b')\nraise SystemExit(5)\n"), block(f"print('c')  # {ESCAPES}\n")]) as server:
        done = command(server, "-c", "print('a')\n1 / 0\n", "--fix", "--max-fix", "6", "--save-fix", "mended.py")
    assert (done.returncode, done.stdout) == (0, "c\n")
    assert f"--fix sends its code and output to {MODEL} at {server.host}" in done.stderr
    assert "fixed after 2 rounds" in done.stderr
    assert (tmp_path / "mended.py").read_text() == f"print('c')  # {ESCAPES}\n"
    assert "-1 / 0\n" in done.stderr
    assert "+print('c')" in done.stderr
    assert not set(ESCAPES) & set("\x1b\x07\u202e") & set(done.stderr)
    assert KEY not in done.stderr


def test_the_command_fails_as_the_last_program_does(command: Command, tmp_path: Path) -> None:
    """The exit code is the last program's; --json holds every round, and stdout nothing else."""
    with serving([block("raise SystemExit(5)\n"), "I give up."]) as server:
        done = command(server, "-c", "1 / 0", "--fix", "--json", "--save-fix", "mended.py")
    told = json.loads(done.stdout)
    assert (done.returncode, told["exit_code"]) == (5, 5)
    assert (told["fix"]["stop"], len(told["fix"]["rounds"])) == ("no_code", 2)
    assert told["fix"]["host"] == server.host
    assert not (tmp_path / "mended.py").exists()


def test_without_the_flag_nothing_is_sent(command: Command) -> None:
    """Auto-fix is off, whatever is configured; --max-fix alone does not turn it on."""
    with serving([block("print(42)\n")]) as server:
        assert command(server, "-c", "1 / 0").returncode == 1
        alone = command(server, "-c", "1 / 0", "--max-fix", "3")
        unsafe = command(server, "-c", "1 / 0", "--fix", "--no-sandbox")
        assert server.asked == []
    assert (alone.returncode, unsafe.returncode) == (2, 2)
    assert "--fix" in alone.stderr
    assert "needs a sandbox" in unsafe.stderr
