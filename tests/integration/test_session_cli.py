"""`cloche session` as a script that pipes cells in meets it; test_session_prompt.py has the terminal."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest

from tests.harness.terminals import COMMAND, Terminal

FIGURE = "import matplotlib.pyplot as plt; plt.plot([1, 2]); None"

pytestmark = pytest.mark.usefixtures("settings_of_nobody_at_a_terminal", "cloche_on_path")


def piped(text: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Pipe cells in."""
    return subprocess.run(
        ["cloche", "session", *words], input=text, capture_output=True, text=True, check=False, timeout=60
    )


def test_piped_cells_run_in_order() -> None:
    """Cells share their state; output and values come as they are, and nothing else is on stdout."""
    done = piped("x = 20\n# %% the next one\nprint('out')\nx + 1\n# %%\n\n# %%\nimport sys; sys.stderr.write('err');")
    assert (done.returncode, done.stdout, done.stderr) == (0, "out\n21\n", "err")
    done = piped("print('a', end='')\n# %%\nprint('b', end='')\n# %%\n'c'")
    assert (done.returncode, done.stdout, done.stderr) == (0, "ab\n'c'\n", "")
    done = piped("def f():\n    return 1\n\nprint(f())")
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")
    assert piped("").returncode == 0


def test_the_first_failing_cell_is_the_last() -> None:
    """Its exit code is the command's: the same numbers as those of run."""
    done = piped("print(1)\n# %%\nraise SystemExit(7)\n# %%\nprint(2)")
    assert (done.returncode, done.stdout) == (7, "1\n")
    done = piped("1/0\n# %%\nprint(2)")
    assert (done.returncode, done.stdout) == (1, "")
    assert "ZeroDivisionError" in done.stderr
    done = piped("while True: pass", "--timeout", "1")
    assert done.returncode == 124
    assert "cloche: timeout" in done.stderr
    done = piped("import os; os._exit(3)\n# %%\n1")
    assert done.returncode == 3
    assert "its state is lost" in done.stderr


def test_a_refused_connection_is_explained() -> None:
    """As in `cloche run`: with the reason, and what would allow it."""
    cell = "import socket\ntry: socket.gethostbyname('b.example')\nexcept OSError: pass"
    done = piped(cell, "--network-allow", "a.example")
    assert (
        'cloche: network: b.example is not allowed; the rules are a.example; allow it with network_allow "b.exam'
        in (done.stderr)
    )


def test_piped_cells_as_json() -> None:
    """One line per cell holds its whole result."""
    done = piped("x = 20\n# %%\nprint('out')\nx + 1\n# %%\n1/0\n# %%\n5", "--json")
    first, second, third = (json.loads(line) for line in done.stdout.splitlines())
    assert done.returncode == 1
    assert (first["status"], first["value"]) == ("ok", None)
    assert (second["stdout"], second["value"], second["meta"]["state"]) == ("out\n", 21, "kept")
    assert third["meta"]["error"]["name"] == "ZeroDivisionError"


def test_bash_keeps_its_state_too() -> None:
    """Cells of another language share their state as well."""
    done = piped("x=20; cd /tmp\n# %%\necho $((x + 1)) $PWD; false\n# %%\necho never", "--language", "bash")
    assert (done.returncode, done.stdout) == (1, "21 /tmp\n")


def test_options_are_those_of_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files, variables, limits and requirements go in, files and images come out."""
    monkeypatch.setenv("PASSED", "p")
    (tmp_path / "in.csv").write_text("1,2")
    code = f"import os; open('got', 'w').write(open('data/x.csv').read() + os.environ['PASSED'])\n# %%\n{FIGURE}"
    done = piped(code, "--file", "in.csv:data/x.csv", "--env", "PASSED", "--out", "results", "--require", "jail")
    assert done.returncode == 0
    assert (tmp_path / "results" / "got").read_text() == "1,2p"
    assert (tmp_path / "results" / "cell-2.png").exists()
    done = piped("print(1)", "--no-sandbox")
    assert (done.returncode, done.stdout) == (0, "1\n")
    assert "no sandbox" in done.stderr


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--nonsense"], 2),
        (["--language", "cobol"], 2),
        (["--language", "ruby"], 125),
        (["--idle-timeout", "soon"], 2),
        (["--memory", "lots"], 2),
        (["--require", "vm"], 125),
        (["--backend", "docker"], 125),
    ],
)
def test_what_cannot_be_is_one_line(words: list[str], code: int) -> None:
    """The caller's mistakes exit with 2, what cannot be had with 125; nothing ran."""
    done = piped("print(1)", *words)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr
    assert "Traceback" not in done.stderr


def test_ctrl_c_ends_piped_cells() -> None:
    """Without a prompt an interrupt ends the whole command, with everything killed."""
    with subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as running:
        assert running.stdin is not None
        assert running.stdout is not None
        running.stdin.write(b"import time; print('up', flush=True); time.sleep(600)\n# %%\nprint('never')")
        running.stdin.close()
        assert running.stdout.readline() == b"up\n"
        running.send_signal(signal.SIGINT)
        assert running.wait(30) == 130
        assert running.stdout.read() == b""


def test_json_is_for_pipes() -> None:
    """At a terminal --json is a mistake that is said, not a prompt that prints nothing."""
    at = Terminal("--json")
    at.see("--json is for cells from a pipe")
    assert at.leave() == 2
    with at:
        pass
