"""What is printed comes as it is printed, and is not lost with the process: see docs/limitations/local.md."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import cloche
from cloche.backends.layout import startup_text
from cloche.backends.toolchain import languages_here
from cloche.config.options import SandboxOptions

pytestmark = pytest.mark.user_soak

# How a program ends that cannot flush what it has printed.
ENDS = {
    "time-out": ("while True: pass", "timeout"),
    "exit": ("import os; os._exit(0)", "ok"),
    "abort": ("import os; os.abort()", "signaled"),
    "crash": ("import ctypes; ctypes.string_at(0)", "signaled"),
    "memory": ("kept = []\nwhile True: kept.append(bytes(1 << 20))", "out_of_memory"),
}
ASKING = "print('a', 1)\nprint('answered', input())"
BUFFERS = "python3 -c 'import sys; print(sys.stdout.line_buffering)'"


@pytest.fixture(scope="module")
def sandbox() -> Iterator[cloche.Sandbox]:
    """Open a live sandbox, for all tests."""
    with cloche.Sandbox(timeout=60, memory="256m") as opened:
        yield opened


@pytest.mark.parametrize(("end", "status"), ENDS.values(), ids=ENDS.keys())
def test_no_line_is_lost_with_a_run(end: str, status: str) -> None:
    """All 3,000 lines that were printed before a violent end are in the result, whatever a block of a pipe holds."""
    timeout = 2 if status == "timeout" else 60
    result = cloche.run(f"for i in range(3000): print(i)\n{end}", timeout=timeout, memory="128m")
    told = {status, "error"} if status == "out_of_memory" else {status}  # without a control group: MemoryError
    assert (result.status in told, result.truncated) == (True, False), result.status
    assert result.stdout == "".join(f"{number}\n" for number in range(3000))


SPIN = {
    "bash": "echo one; while :; do :; done",
    "csharp": 'class P { static void Main() { System.Console.WriteLine("one"); while (true); } }',
    "go": 'package main\nimport "fmt"\nfunc main() { fmt.Println("one"); for {} }',
    "javascript": "console.log('one'); for (;;);",
    "ruby": "puts 'one'; loop {}",
    "rust": 'fn main() { println!("one"); loop {} }',
    "typescript": "console.log('one'); for (;;);",
}


@pytest.mark.soak
@pytest.mark.parametrize("language", languages_here())
def test_no_line_is_lost_in_any_language(language: str) -> None:
    """A program of any language that is killed at its time-out has its line in the result."""
    limits: SandboxOptions = {"languages": [language], "memory": "512m", "pids": 128, "timeout": 30}
    chunks: list[bytes] = []
    sandbox = cloche.Sandbox(live=False, **limits)
    with sandbox:
        result = sandbox.run(SPIN.get(language, "print('one')\nwhile True: pass"), language=language,
                             on_output=lambda _, data: chunks.append(data))  # fmt: skip
    assert (result.status, result.stdout, b"".join(chunks)) == ("timeout", "one\n", b"one\n")


@pytest.mark.parametrize("end", [ENDS["exit"][0], ENDS["crash"][0]], ids=["exit", "crash"])
@pytest.mark.parametrize("live", [True, False], ids=["shared", "apart"])
def test_no_line_is_lost_with_a_session(end: str, *, live: bool) -> None:
    """A cell that ends its interpreter has what it printed in its result."""
    with cloche.Sandbox(live=live) as opened, opened.session() as session:
        result = session.run(f"for i in range(3000): print(i)\n{end}")
    assert result.stdout == "".join(f"{number}\n" for number in range(3000))


@pytest.mark.parametrize(
    "argv",
    [["python3", "-c", ASKING], ["/usr/bin/python3", "-c", ASKING], ["sh", "-c", f'python3 -c "{ASKING}"; exit']],
    ids=["own", "system", "shell"],
)
def test_a_line_comes_before_its_answer(sandbox: cloche.Sandbox, argv: list[str]) -> None:
    """An interpreter that a command starts writes each line whole, while it waits for an answer on standard input."""
    with sandbox.start(argv) as process:
        assert process.stdout.read() == b"a 1\n"
        process.write(b"yes\n")
        assert process.stdout.read() == b"answered yes\n"


@pytest.mark.parametrize("kind", ["run", "exec"])
def test_on_output_is_called_as_lines_are_printed(sandbox: cloche.Sandbox, kind: str) -> None:
    """A line comes from a program that waits, as long as its time-out, for a file which is made when the line came."""
    code = "import os, time\nprint('up')\nwhile not os.path.exists('/workspace/go'): time.sleep(0.01)"
    came = threading.Event()

    def answer() -> None:
        if came.wait(60):
            sandbox.write_file("go", b"")

    thread = threading.Thread(target=answer)
    thread.start()
    take = lambda *_: came.set()  # noqa: E731 - called with the stream and the text
    result = (
        sandbox.run(code, on_output=take) if kind == "run" else sandbox.exec(["python3", "-c", code], on_output=take)
    )
    came.set()
    thread.join()
    sandbox.exec(["rm", "-f", "go"])
    assert result.ok


def test_pipes_and_files_of_the_guest_stay_block_buffered(sandbox: cloche.Sandbox) -> None:
    """What its programs write to each other, or to files, is no output of the run."""
    script = f"{BUFFERS}; {BUFFERS} >&2; {BUFFERS} | cat; {BUFFERS} > f; cat f"
    result = sandbox.exec(["sh", "-c", script])
    assert (result.stdout, result.stderr) == ("True\nFalse\nFalse\n", "True\n")


def test_interpreters_of_every_kind_of_run_know_its_output() -> None:
    """So do those that throwaway runs start, of Python and of Bash, and a session's, in a fork as well."""
    start = f"import subprocess; subprocess.run({BUFFERS!r}, shell=True)"
    assert cloche.run(start).stdout == cloche.run(BUFFERS, language="bash").stdout == "True\n"
    with cloche.Sandbox(live=False) as opened, opened.session() as session:
        [fork] = session.fork(1)
        with fork:
            assert [one.run(f"!{BUFFERS}").stdout for one in (session, fork)] == ["True\n", "True\n"]


def test_our_start_up_file_hides_none(tmp_path: Path) -> None:
    """An interpreter runs the `sitecustomize` that it would have run, and finds neither ours nor its folder."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for folder, text in ((ours, startup_text()), (theirs, "print('theirs')\n")):
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(text)
    program = "import sys; print(sys.modules.get('sitecustomize'), sys.path, sys.stdout.line_buffering)"

    def run(*folders: Path) -> str:
        env = {"PYTHONPATH": os.pathsep.join(map(str, folders)), "PYTHONDONTWRITEBYTECODE": "1"}
        words = [sys.executable, "-c", program]
        return subprocess.run(words, env=env, capture_output=True, text=True, check=True).stdout

    assert run(ours, theirs) == run(theirs)
    assert run(theirs).startswith("theirs\n")
    assert run(ours) == run()


def test_a_given_path_of_modules_comes_after_our_start_up_file(sandbox: cloche.Sandbox) -> None:
    """A PYTHONPATH of the caller's hides neither our start-up file nor what lies there."""
    env = {"PYTHONPATH": "/workspace/modules"}
    program = "import sys; print(sys.path[1], sys.stdout.line_buffering)"
    expected = "/workspace/modules True\n"
    assert sandbox.exec(["python3", "-c", program], env=env).stdout == expected
    assert sandbox.run(program, env=env).stdout == expected
    assert cloche.run(program, env=env).stdout == expected
