"""`cloche exec` and `cloche shell`: with pipes, and with a real pseudo-terminal as a person has it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import cloche as library
from tests.harness.processes import children, wait_for_word
from tests.harness.terminals import Terminal

pytestmark = [pytest.mark.user_soak, pytest.mark.usefixtures("settings_of_nobody_at_a_terminal", "cloche_on_path")]
PROMPT = "ready> "
LONG_S = 100


def cloche(*words: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Run the command line with pipes."""
    return subprocess.run(["cloche", *words], input=stdin, capture_output=True, timeout=LONG_S, check=False)


# With pipes.


def test_output_and_exit_code_pass_through() -> None:
    """Options of the command are its own; both streams and the code are as they were."""
    done = cloche("exec", "--env", "X=y", "--cwd", "/tmp", "sh", "-c", 'pwd; echo "$X $1" >&2; exit 7', "sh", "-t")
    assert (done.stdout, done.stderr, done.returncode) == (b"/tmp\n", b"y -t\n", 7)


def test_input_is_passed_on_as_it_comes() -> None:
    """With -i a command reads what is piped in, more than any pipe holds; without, nothing. Output is unchanged."""
    data = os.urandom(1 << 20)
    assert cloche("exec", "-i", "--", "cat", stdin=data).stdout == data
    unread = cloche("exec", "--", "cat", stdin=b"data")
    assert (unread.stdout, b"-i does that" in unread.stderr) == (b"", True)
    assert b"-i" not in cloche("exec", "--", "cat", stdin=b"").stderr
    done = cloche("shell", "--timeout", "60", stdin=b"echo in $0\nexit 6\n")
    assert (done.stdout, done.returncode) == (b"in bash\n", 6)


def test_a_file_may_be_the_input(tmp_path: os.PathLike[str]) -> None:
    """Standard input may be a file, and so may the output."""
    with open(os.path.join(tmp_path, "in"), "wb+") as given, open(os.path.join(tmp_path, "out"), "wb+") as got:
        given.write(b"x" * 300_000)
        given.seek(0)
        words = [sys.executable, "-m", "cloche", "exec", "-i", "--", "tr", "x", "y"]
        assert subprocess.run(words, stdin=given, stdout=got, timeout=LONG_S, check=False).returncode == 0
        got.seek(0)
        assert got.read() == b"y" * 300_000


def test_what_stops_a_command_is_said() -> None:
    """A time-out has its exit code; -t without a terminal, and a name, are wrong usage."""
    done = cloche("exec", "-i", "--timeout", "300ms", "--", "sleep", "91001")
    assert (done.returncode, b"timeout" in done.stderr) == (124, True)
    done = cloche("exec", "-it", "--", "sh")
    assert (done.returncode, b"-t" in done.stderr) == (2, True)
    done = cloche("exec", "box", "--", "sh")
    assert (done.returncode, b"'box'" in done.stderr, b"cloche sandbox list" in done.stderr) == (2, True, True)
    assert b"cloche exec -- box -- ..." in done.stderr


def test_a_signal_ends_the_command_first() -> None:
    """SIGTERM ends cloche, when what ran is dead."""
    words = [sys.executable, "-m", "cloche", "exec", "-i", "--", "sh", "-c", "sleep 91002; true"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        wait_for_word("91002")
        process.send_signal(signal.SIGTERM)
        _, told = process.communicate(timeout=LONG_S)
    assert (process.returncode, told) == (143, b"")
    wait_for_word("91002", is_there=False)


@pytest.mark.root
def test_a_command_may_have_another_user() -> None:
    """With --user the sandbox has several, and the command is the one that was named."""
    assert cloche("exec", "--user", "root", "--", "id", "-un").stdout == b"root\n"


# With a name.


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[library.Sandbox]:
    """Give a sandbox that is kept under the name `box`, in a place of this test's own."""
    folder = tmp_path / "runtime"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    with library.Sandbox(name="box", keep="10m") as sandbox:
        yield sandbox
        sandbox.kill()


def test_a_command_runs_in_the_sandbox_of_a_name(box: library.Sandbox) -> None:
    """It finds what is there, what it leaves behind goes on, and only a word before `--` is a name."""
    script = 'echo "$X" > note; pwd; sleep 91006 >/dev/null 2>&1 & exit 7'
    done = cloche("exec", "--env", "X=y", "--cwd", "/tmp", "box", "--", "sh", "-c", script)
    assert (done.stdout, done.stderr, done.returncode) == (b"/tmp\n", b"", 7)
    assert box.exec(["cat", "/tmp/note"]).stdout == "y\n"
    assert cloche("exec", "-i", "box", "--", "tr", "a-z", "A-Z", stdin=b"data").stdout == b"DATA"
    assert cloche("shell", "box", stdin=b"cat /tmp/note; exit 6\n").stdout == b"y\n"
    assert cloche("exec", "--timeout", "300ms", "box", "--", "sleep", "91007").returncode == 124
    assert cloche("exec", "-i", "--timeout", "300ms", "box", "--", "sleep", "91007").returncode == 124
    assert [one.command[-1] for one in box.processes() if one.status is None] == []
    wait_for_word("91006")
    assert cloche("exec", "--", "cat", "/tmp/note").returncode == 1
    assert cloche("exec", "--", "box", "--", "true").returncode == 127


def test_what_is_said_of_a_sandbox_is_refused_with_a_name(box: library.Sandbox) -> None:
    """The option is named, with what to do; so is a name that nobody has, and a user in a sandbox with one."""
    for words in (("exec", "--memory", "64m", "box", "--", "true"), ("shell", "--memory", "64m", box.name or "")):
        done = cloche(*words)
        assert (done.returncode, done.stdout) == (2, b"")
        assert done.stderr.startswith(b"cloche: --memory is for a new sandbox")
    done = cloche("shell", "other")
    assert (done.returncode, b"'other'" in done.stderr, b"cloche sandbox list" in done.stderr) == (2, True, True)
    done = cloche("exec", "--user", "root", "box", "--", "id")
    assert (done.returncode, b"one user" in done.stderr) == (2, True)


# With a terminal.


@pytest.fixture
def shell() -> Iterator[Terminal]:
    """Give a shell with a prompt of ours."""
    with Terminal("-it", "--env", f"PS1={PROMPT}", "--", "sh", verb="exec") as terminal:
        terminal.see(PROMPT)
        yield terminal


def test_a_shell_has_this_terminal(shell: Terminal) -> None:
    """Its size is ours, also when that changes; Ctrl-C goes inside; its exit code is ours."""
    shell.type("stty size; echo $TERM\r")
    shell.see("50 200\nxterm\n")
    shell.resize(33, 99)
    shell.type("while [ \"$(stty size)\" != '33 99' ]; do :; done; echo re''sized\r")
    shell.see("resized\n")
    shell.type("echo be''gun; sleep 91003\r")
    shell.see("begun\n")
    wait_for_word("91003")
    shell.type("\x03")
    shell.see(PROMPT)
    shell.type("exit 7\r")
    assert shell.leave() == 7


def test_the_terminal_is_put_back() -> None:
    """After the command, and after a signal that ends cloche, the terminal is as it was."""
    script = f"""
    old=$(stty -g)
    {sys.executable} -m cloche exec -it -- sh -c 'exit 3'
    echo "first $? $([ "$old" = "$(stty -g)" ] && echo same)"
    {sys.executable} -m cloche exec -it -- sh -c 'echo begun; sleep 91004; true'
    echo "second $? $([ "$old" = "$(stty -g)" ] && echo same)"
    """
    with Terminal("-c", script, program="/bin/bash") as terminal:
        terminal.see("first 3 same\n")
        terminal.see("begun")
        os.kill(next(pid for pid in children(terminal.pid)), signal.SIGTERM)
        terminal.see("second 143 same\n")
    wait_for_word("91004", is_there=False)


def test_a_terminal_that_goes_takes_the_command_along() -> None:
    """When the terminal is closed, all that ran in the sandbox is killed."""
    with Terminal(verb="shell") as terminal:
        terminal.see("$ ")
        terminal.type("sleep 91005\r")
        wait_for_word("91005")
    wait_for_word("91005", is_there=False)


def test_a_terminal_in_the_sandbox_of_a_name(box: library.Sandbox) -> None:
    """It is left with what it wrote there, and with a shell of its own; a terminal that goes ends its own command."""
    box.write_file("note", "before\n")
    with Terminal("-it", "--env", f"PS1={PROMPT}", "box", "--", "sh", verb="exec") as terminal:
        terminal.see(PROMPT)
        with Terminal("box", "--env", f"PS1={PROMPT}", verb="shell") as other:
            other.see(PROMPT)
            other.type("cat note; tty; sleep 91008\r")
            other.see("before\n/dev/pts/")
            wait_for_word("91008")
            terminal.type("stty size; echo after > note; pgrep -f '[s]leep 91008' >/dev/null && echo to''gether\r")
            terminal.see("50 200\n")
            terminal.see("together\n")
        wait_for_word("91008", is_there=False)
        terminal.type("sleep 91009 >/dev/null 2>&1 & exit 7\r")
        assert terminal.leave() == 7
    assert box.read_file("note") == b"after\n"
    assert box.exec(["pgrep", "-f", "[s]leep 91009"]).ok


def test_both_commands_are_listed() -> None:
    """The root's help names them, and their own helps say what -it is for."""
    listed = cloche("--help").stdout.decode()
    assert re.search(r"^ +exec +Run a command in a throwaway sandbox", listed, re.MULTILINE)
    assert re.search(r"^ +shell +Open a shell in a throwaway sandbox", listed, re.MULTILINE)


def test_a_terminal_is_left_without_modes_and_late_answers() -> None:
    """Modes are set back, an answer that comes after the end is swallowed, and the clipboard is the caller's."""
    words = r"""printf '\033[?1049h\033[?2004h\033]52;c;eA==\007shown\033[c'"""
    script = f"""{sys.executable} -m cloche exec -it -- sh -c "{words}"; echo over; read line; echo "got:$line:" """
    with Terminal("-c", script, program="/bin/bash") as terminal:
        terminal.see("shown")
        while terminal.raw.count(b"\x1b[c") < 2:  # the program's question, and that of `cloche` at the end
            terminal.see("\x1b[c")
        terminal.type("\x1b[?62;1c\x1b[?62;1c")
        terminal.see("over\n")
        assert b"\x1b[?2004l\x1b[?1049l" in terminal.raw
        assert b"]52" not in terminal.raw
        terminal.type("hello\r")
        terminal.see("got:hello:")
