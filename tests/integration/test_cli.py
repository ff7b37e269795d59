"""The `cloche` command, as a shell sees it: streams, exit codes, one-line errors."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("settings_of_nobody", "cloche_on_path")

_PIPES: Any = {"stdin": subprocess.DEVNULL, "capture_output": True, "timeout": 30}
COMMAND = [sys.executable, "-m", "cloche"]


@pytest.fixture(autouse=True)
def _no_docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nobody's daemon change an answer."""
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none")


def cloche(*words: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Run the command with pipes for all three streams."""
    return subprocess.run(["cloche", *words], input=stdin, capture_output=True, check=False, timeout=60)


def write(path: Path, text: str) -> str:
    """Create a file and return its name."""
    path.write_text(text)
    return str(path)


@pytest.mark.both_users
def test_a_file_runs_with_its_arguments(tmp_path: Path) -> None:
    """Words after -- are the program's, whatever they look like."""
    script = write(tmp_path / "s.py", "import sys; print(sys.argv[1:])")
    done = cloche("run", script, "--", "a", "--json", "-c")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"['a', '--json', '-c']\n", b"")


def test_code_runs_with_its_arguments() -> None:
    """With -c every word is an argument."""
    assert cloche("run", "-c", "import sys; print(sys.argv[1:])", "--", "x", "-").stdout == b"['x', '-']\n"


def test_files_that_may_be_missing_are_said() -> None:
    """With the reasons, on standard error, and what to do."""
    done = cloche("run", "-c", "import os; os.makedirs('d/' * 70)")
    assert (done.returncode, done.stdout) == (0, b"")
    assert done.stderr == (
        b"cloche: files may be missing (depth): the search for them is limited; write fewer files, or one archive\n"
    )


def test_code_comes_from_stdin() -> None:
    """`-` reads the code; the program's own stdin is then empty."""
    assert cloche("run", "-", stdin=b"import sys; print(repr(sys.stdin.read()))").stdout == b"''\n"


def test_stdin_is_the_programs() -> None:
    """What is piped in arrives byte for byte."""
    data = bytes(range(256)) * 1000
    done = cloche("run", "-c", "import sys; sys.stdout.buffer.write(sys.stdin.buffer.read())", stdin=data)
    assert done.stdout == data


def test_a_signal_is_named() -> None:
    """Which one ended the program is what its author needs to know."""
    done = cloche("run", "-c", "import os; os.kill(os.getpid(), 11)")
    assert done.returncode == 139
    assert b"signaled: the code ended by a signal, Segmentation fault" in done.stderr


def test_the_alias_does_the_same() -> None:
    """`cloche sandbox run` is `cloche run`."""
    assert cloche("sandbox", "run", "-c", "print(1)").stdout == b"1\n"


def test_the_language_is_told_by_name_or_first_line(tmp_path: Path) -> None:
    """A suffix or a shebang is enough; neither is an error that names the option."""
    assert cloche("run", write(tmp_path / "s.sh", "echo $((1 + 1))")).stdout == b"2\n"
    assert cloche("run", write(tmp_path / "tool", "#!/usr/bin/env bash\necho hi")).stdout == b"hi\n"
    done = cloche("run", write(tmp_path / "notes", "print(1)"))
    assert done.returncode == 2
    assert b"--language" in done.stderr
    assert cloche("run", "--language", "python", str(tmp_path / "notes")).stdout == b"1\n"


def test_both_streams_and_the_exit_code_pass_through() -> None:
    """Bytes are untouched in pipes, and the program's own code is the command's."""
    code = "import os, sys; os.write(1, b'\\x1b[31m\\xff'); os.write(2, b'\\x00e'); sys.exit(7)"
    done = cloche("run", "-c", code)
    assert (done.returncode, done.stdout, done.stderr) == (7, b"\x1b[31m\xff", b"\x00e")


def test_output_streams_while_the_code_runs() -> None:
    """The first line can be read long before the program ends."""
    code = "import time; print('a', flush=True); time.sleep(60)"
    with subprocess.Popen([*COMMAND, "run", "-c", code], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == b"a\n"
        assert running.poll() is None
        running.terminate()


def test_a_timeout_is_124() -> None:
    """The time limit has its own exit code and one line on stderr."""
    done = cloche("run", "--timeout", "10", "-c", "import time\nprint('x', flush=True)\ntime.sleep(60)")
    assert (done.returncode, done.stdout) == (124, b"x\n")
    assert done.stderr.startswith(b"cloche: timeout")


def test_out_of_memory_is_137() -> None:
    """The memory limit has its own exit code."""
    done = cloche("run", "--memory", "64m", "-c", "x = bytearray(1 << 30); x[::4096] = b'1' * len(x[::4096])")
    assert done.returncode in (137, 1)  # 1: the allocation was refused and the MemoryError not caught
    if done.returncode == 1:
        assert b"MemoryError" in done.stderr


def test_a_signal_is_128_and_its_number() -> None:
    """A program that kills itself looks like it does in a shell."""
    assert cloche("run", "-c", "import os; os.abort()").returncode == 128 + signal.SIGABRT


@pytest.mark.parametrize(
    "words",
    [
        ["run", "--nonsense"],
        ["run", "no-such-file.py"],
        ["run", "--memory", "lots", "-c", "1"],
        ["run", "--language", "cobol", "-c", "1"],
        ["run", "--preset", "huge", "-c", "1"],
        ["run", "--file", "/no/such/file", "-c", "1"],
        ["run", "--env", "NO_SUCH_VARIABLE_HERE", "-c", "1"],
        ["run", "--no-sandbox", "--backend", "local", "-c", "1"],
        ["run", "--backend", "chroot", "-c", "1"],
        ["config", "show", "--config", "/no/such/file"],
        ["nonsense"],
    ],
)
def test_wrong_usage_is_2(words: list[str]) -> None:
    """The caller's mistakes exit with 2 and no traceback."""
    done = cloche(*words)
    assert done.returncode == 2
    assert done.stderr
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize("verb", ["doctor", "backends"])
def test_tables_that_are_piped_are_no_wider_than_a_page(verb: str) -> None:
    """What is longer, sentences and paths, follows in lines that are not broken."""
    lines = cloche(verb).stdout.decode().splitlines()
    rows = [line for line in lines if line.startswith(" ")]
    sentences = [line for line in lines if line.partition(": ")[2]]
    assert max(map(len, rows)) <= 100
    if verb == "doctor":
        assert any(line == f"python: program: {os.path.abspath(sys.executable)}" for line in sentences)
    else:
        assert any(re.fullmatch(r"e2b: remedy: .+\.", line) for line in sentences)


@pytest.mark.parametrize("words", [["rum"], ["skill", "chek"]])
def test_a_verb_that_is_near_is_suggested_once(words: list[str]) -> None:
    """Whichever of the libraries below does it."""
    assert cloche(*words).stderr.count(b"Did you mean") == 1


@pytest.mark.parametrize(
    "words",
    [
        ["--backend", "docker"],
        ["--require", "vm"],
        ["--require", "memory,vm"],
        ["--require", "memory", "--require", "gvisor"],
        ["--tier", "1"],
        ["--language", "csharp"],
    ],
)
def test_what_cloche_cannot_or_may_not_do_is_125(words: list[str]) -> None:
    """One line says which and what to do; nothing ran."""
    done = cloche("run", *words, "-c", "print(1)")
    assert (done.returncode, done.stdout) == (125, b"")
    assert done.stderr.startswith(b"cloche: ")
    assert done.stderr.count(b"\n") == 1


def test_an_error_has_its_traceback_in_debug() -> None:
    """--sandbox-debug shows where an error came from."""
    done = cloche("run", "--sandbox-debug", "--require", "vm", "-c", "1")
    assert done.returncode == 125
    assert b"Traceback" in done.stderr


def test_json_is_the_whole_result() -> None:
    """Nothing else is on stdout, and the exit code is still the program's."""
    done = cloche("run", "--json", "-c", "print('x'); raise SystemExit(3)")
    told = json.loads(done.stdout)
    assert (done.returncode, told["exit_code"], told["stdout"], told["status"]) == (3, 3, "x\n", "error")
    assert told["enforcement"]["controls"].keys() >= {"filesystem", "network", "memory"}


def test_json_tells_errors_too() -> None:
    """A program that reads JSON gets JSON when nothing could run."""
    done = cloche("run", "--json", "--backend", "docker", "-c", "1")
    assert json.loads(done.stdout)["error"]["type"] == "BackendUnavailable"


def test_files_go_in_and_out(tmp_path: Path) -> None:
    """--file copies in, under another name if told so; --out receives what was made."""
    write(tmp_path / "in.csv", "1,2\n")
    code = "d = open('data/x.csv').read(); open('sum.txt', 'w').write(str(sum(map(int, d.split(',')))))"
    done = cloche("run", "--file", "in.csv:data/x.csv", "--out", "out", "-c", code)
    assert (done.returncode, done.stderr) == (0, b"")
    assert (tmp_path / "out" / "sum.txt").read_text() == "3"


def test_variables_are_given_or_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """K=V sets, K passes on, and nothing else of the caller's environment arrives."""
    monkeypatch.setenv("PASSED", "p")
    monkeypatch.setenv("SECRET_TOKEN", "s")
    code = "import os; print(os.environ['SET'], os.environ['PASSED'], 'SECRET_TOKEN' in os.environ)"
    assert cloche("run", "--env", "SET=a=b", "--env", "PASSED", "-c", code).stdout == b"a=b p False\n"


def test_no_sandbox_says_so() -> None:
    """Running without isolation is told on stderr, every time."""
    done = cloche("run", "--no-sandbox", "-c", "print(1)")
    assert (done.returncode, done.stdout) == (0, b"1\n")
    assert b"no sandbox" in done.stderr


def test_what_runs_without_a_sandbox_is_read_first(tmp_path: Path) -> None:
    """A program that reaches for the host is refused, before any of it runs; --screen says otherwise (R2b)."""
    (file := tmp_path / "p.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nimport shutil\nprint('ran')\n")
    refused = cloche("run", "--no-sandbox", str(file))
    assert (refused.returncode, refused.stdout) == (125, b"")
    assert b"line 2: import of shutil" in refused.stderr
    assert b"--screen off" in refused.stderr
    assert not (tmp_path / "ran").exists()
    done = cloche("run", "--no-sandbox", "--screen", "warn", str(file))
    assert (done.returncode, done.stdout) == (0, b"ran\n")
    assert b"screen: line 2: import of shutil" in done.stderr
    assert cloche("session", "--no-sandbox", stdin=b"import shutil\n").returncode == 125
    assert cloche("run", "-c", "import shutil").returncode == 0


def test_debug_prints_the_plan_with_timings() -> None:
    """Each step of the set-up has a name and a time, and so has each that the program takes before it is its own."""
    done = cloche("run", "--sandbox-debug", "-c", "print(1)")
    assert done.stdout == b"1\n"
    assert done.stderr.count(b" ms ") >= 5
    lines = done.stderr.decode().splitlines()
    names = [line.split(" ms ")[1].split(":")[0].strip() for line in lines if " ms " in line and "cloche." not in line]
    assert names.index("pivot_root") < names.index("landlock") < names.index("seccomp") == len(names) - 1


def test_escapes_are_harmless_on_a_terminal() -> None:
    """On a terminal the guest cannot move the cursor or change the title."""
    code = "print('\\x1b]0;owned\\x07ok\\x9b2J')"
    assert b"\x1b" not in (shown := _in_terminal("run", "-c", code))
    assert b"\\x1b]0;owned\\x07ok\\x9b2J" in shown


def test_ctrl_c_is_130_and_leaves_nothing() -> None:
    """An interrupt kills the tree before the command ends."""
    marker = f"cli-marker-{time.monotonic_ns()}"
    code = (
        "import subprocess, sys; print('up', flush=True);"
        f"subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)', {marker!r}])"
    )
    running = subprocess.Popen([*COMMAND, "run", "-c", code], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    assert running.stdout is not None
    assert running.stdout.readline() == b"up\n"
    running.send_signal(signal.SIGINT)
    assert running.wait(60) == 130
    running.stdout.close()
    found = subprocess.run(["ps", "axww", "-o", "args"], capture_output=True, check=True).stdout
    assert marker.encode() not in found


def test_a_terminated_command_leaves_orderly() -> None:
    """SIGTERM kills the tree and exits with 143."""
    code = "import time; print('up', flush=True); time.sleep(60)"
    running = subprocess.Popen([*COMMAND, "run", "-c", code], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    assert running.stdout is not None
    assert running.stdout.readline() == b"up\n"
    running.terminate()
    assert running.wait(60) == 143
    running.stdout.close()


def test_a_reader_that_leaves_ends_the_run() -> None:
    """`cloche run … | head -1` stops a program that prints without end, quietly."""
    script = f"{' '.join(COMMAND)} run -c 'while True: print(1)' </dev/null | head -1"
    done = subprocess.run(["sh", "-c", script], capture_output=True, check=False, timeout=30)
    assert (done.stdout, done.stderr) == (b"1\n", b"")


def test_output_that_cannot_be_written_is_125() -> None:
    """A full disk is told as that; a closed stdout is nobody's descriptor."""
    full = subprocess.run(["sh", "-c", f"{' '.join(COMMAND)} run -c 'print(1)' >/dev/full"], check=False, **_PIPES)
    assert (full.returncode, full.stderr.count(b"No space left")) == (125, 1)
    closed = subprocess.run(["sh", "-c", f"{' '.join(COMMAND)} run -c 'print(1)' >&-"], check=False, **_PIPES)
    assert (closed.returncode, closed.stderr) == (0, b"")
    listing = subprocess.run(["sh", "-c", f"{' '.join(COMMAND)} presets >&-"], check=False, **_PIPES)
    assert (listing.returncode, listing.stderr) == (0, b"")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["languages"], ["python", "typescript", "csharp"]),
        (["presets"], ["standard", "minimal", "locked-down", "network-open", "network-allowlist"]),
        (["backends"], ["local", "docker", "subprocess", "e2b"]),
        (["config", "show"], ["timeout", "memory", "network"]),
        (["doctor"], ["filesystem", "memory", "syscalls"]),
    ],
)
def test_tables_are_for_people_and_for_programs(words: list[str], expected: list[str]) -> None:
    """Every listing has a table and valid JSON with the same content."""
    table, as_json = cloche(*words), cloche(*words, "--json")
    assert (table.returncode, as_json.returncode) == (0, 0)
    json.loads(as_json.stdout)
    for word in expected:
        assert word.encode() in table.stdout
        assert word.encode() in as_json.stdout


def test_config_show_names_origins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A value from a file is shown with that file."""
    path = write(tmp_path / "mine.yaml", "sandbox:\n  memory_limit: 300m\n")
    rows = json.loads(cloche("config", "show", "--config", path, "--json").stdout)
    row = next(row for row in rows if row["key"] == "memory")
    assert path in row["origin"]
    assert "300" in row["value"]


def test_the_version_is_printed() -> None:
    """--version needs no command."""
    done = cloche("--version")
    assert (done.returncode, done.stdout.split()[0]) == (0, b"cloche")


def test_running_imports_no_tables() -> None:
    """`cloche run` does not pay for what it does not need."""
    script = (
        "import atexit, sys; unneeded = sys.argv[1:]; sys.argv = ['cloche', 'run', '-c', '1', '--tier', '1']\n"
        "atexit.register(lambda: print([name for name in unneeded if name in sys.modules]))\n"
        "from cloche.cli import main\n"
        "main()"
    )
    unneeded = ["rich", "yaml", "importlib.metadata", "importlib.resources", "secrets", "cloche.core.fixing"]
    unneeded += ["dataclasses", "tarfile", "tempfile", "cloche.sync", "cloche.execution.sandbox"]
    command = [sys.executable, "-c", script, *unneeded, "cloche.backends.local.session", "cloche.cli.session"]
    done = subprocess.run(command, capture_output=True, check=False, timeout=60)
    assert done.stdout == b"[]\n"


def _in_terminal(*words: str) -> bytes:
    """Run the command on a pseudo-terminal and return what a person would see."""
    ours, theirs = pty.openpty()
    running = subprocess.Popen([*COMMAND, *words], stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    shown = b""
    while select.select([ours], [], [], 30)[0]:
        try:
            chunk = os.read(ours, 65536)
        except OSError:  # the terminal's other end is closed
            break
        shown += chunk
    os.close(ours)
    running.wait(60)
    return shown
