"""What a live session of Bash promises, shown with its driver as a plain subprocess."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness.sessions import END_OF_LINK, Driver

pytestmark = pytest.mark.toolchain
Open = Callable[..., Driver]

LOOPS_THAT_FORK = (
    "while :; do x=$(echo a); done",
    "while :; do (:); done",
    "while :; do /bin/true; done",
    "while :; do echo a | cat > /dev/null; done",
    "f() { local x; x=$(/bin/echo a); }; while :; do f; done",
)


def test_bash_keeps_what_a_shell_knows(bash: Driver, tmp_path: Path) -> None:
    """Variables, arrays, functions, aliases, options, traps, descriptors and the folder outlive their run."""
    bash.run(
        "x='a  b'; export y=2; declare -A map=([k]='v w'); list=(1 '2 3'); f() { echo \"f $1\"; }\n"
        "alias hey='echo hey'; set -u; shopt -s nullglob; mkdir below; cd below; exec 7>seven; umask 027\n"
        "declare -i n=1; trap 'echo usr' USR1"
    )
    ran = bash.run(
        'echo "$x"; sh -c \'echo $y\'; echo "${map[k]}|${list[1]}"; f z; hey\n'
        "shopt -q nullglob && echo nullglob; echo $-; pwd; umask\n"
        "echo seven >&7; cat seven; n+=4; echo $n; kill -USR1 $$"
    )
    assert ran.stdout.decode().split("\n") == [
        *("a  b", "2", "v w|2 3", "f z", "hey", "nullglob", ran.stdout.decode().split("\n")[6]),
        *(str(tmp_path / "below"), "0027", "seven", "5", "usr", ""),
    ]
    assert "u" in ran.stdout.decode().split("\n")[6]
    assert bash.run("(exit 9)").exit_code == 9
    assert bash.run("echo $?").stdout == b"9\n"


@pytest.mark.parametrize(
    ("code", "output"),
    [
        ("cat <<'EOF'\n$x `a` \\n \"'\nEOF\necho end", "$x `a` \\n \"'\nend\n"),
        ("cat <<EOF\n$((1 + 1))\nEOF", "2\n"),
        ('cat <<< "it\'s"', "it's\n"),
        ("echo 'single \"' \"double '\" $'ansi\\t' \\\\", "single \" double ' ansi\t \\\n"),
        ("echo 'é😀'; x=é; echo ${#x}", "é😀\n1\n"),
        ("if true\nthen\n  echo yes\nfi", "yes\n"),
        ("case x in\n  x) echo x ;;\nesac", "x\n"),
        ("echo a # comment", "a\n"),
        ("# comment alone", ""),
        ("", ""),
        ("\n\n", ""),
        ("echo a \\", "a\n"),
        ("echo a;", "a\n"),
        ("echo !x $'\\x21'", "!x !\n"),
        ("printf 'a\\tb\\n'", "a\tb\n"),
        ('main() { echo main; }\nif [[ "${BASH_SOURCE[0]}" == "$0" ]]; then main; fi', "main\n"),
        ("echo {1..3} !(x) | cut -c1-5", "1 2 3\n"),
        ('for i in 1 2; do echo $i; done | while read -r x; do echo "<$x>"; done', "<1>\n<2>\n"),
        ("cat <(echo sub)", "sub\n"),
        ("coproc { cat; }; echo hi >&${COPROC[1]}; read -r x <&${COPROC[0]}; echo $x", "hi\n"),
        ("exec 3<<< three; cat <&3", "three\n"),
    ],
)
def test_bash_code_of_all_kinds(bash: Driver, tmp_path: Path, code: str, output: str) -> None:
    """Code runs as it would from a file."""
    ran = bash.run(code)
    assert (ran.stdout.decode(), ran.stderr, ran.exit_code) == (output, b"", 0)


@pytest.mark.parametrize(
    ("code", "exit_code", "words"),
    [
        ("echo no; if then", 2, "line 1: syntax error near unexpected token `then'"),
        ("echo no\n\nfoo(", 2, "line 3: syntax error"),
        ("echo no; echo 'unclosed", 2, "unexpected EOF while looking for matching `''"),
        ("}", 2, "syntax error"),
        ("set -u; $nothing\necho no", 1, "nothing: unbound variable"),
        (': "${nothing:?is missing}"\necho no', 1, "nothing: is missing"),
        ("((1 / 0)) || $((1 / 0))\necho no", 1, "division by 0"),
        ("readonly fixed=1; fixed=2\necho no", 1, "fixed: readonly variable"),
        ("nosuchcommand", 127, "nosuchcommand: command not found"),
        ("cd /nowhere", 1, "cd: /nowhere: No such file or directory"),
        ("exit word", 2, "numeric argument required"),
        ("PROMPT_COMMAND=x", 1, "readonly variable"),
    ],
)
def test_bash_errors_end_the_run_alone(bash: Driver, code: str, exit_code: int, words: str) -> None:
    """What would end a script ends the run, before anything of it when it does not parse, and the session goes on."""
    bash.run("kept=41")
    ran = bash.run(code)
    assert (ran.exit_code, ran.stdout) == (exit_code, b"")
    assert words in ran.stderr.decode()
    assert bash.run("set +u; kept=$((kept + 1)); echo $kept").stdout == b"42\n"


def test_a_brace_too_many_is_an_error(bash: Driver) -> None:
    """Code that closes what it did not open is no success, although what came before has run."""
    ran = bash.run("echo yes; }")
    assert (ran.exit_code, ran.stdout) == (2, b"yes\n")
    assert b"syntax error" in ran.stderr


def test_programs_inherit_nothing_of_the_driver(bash: Driver) -> None:
    """A program that a run starts has the three streams, and the folder that it lists."""
    assert bash.run("ls /proc/self/fd").stdout.split() == [b"0", b"1", b"2", b"3"]


def test_a_hundred_interrupts_of_loops_that_fork(bash: Driver) -> None:
    """A shell that starts one program after the other keeps all it knows, whenever it is interrupted."""
    bash.run("kept=0")
    for number in range(100):
        loop = LOOPS_THAT_FORK[number % len(LOOPS_THAT_FORK)]
        ran = bash.run(loop, interrupt_after_s=(number % 10 + 1) / 400)
        assert (ran.error, ran.exit_code) == ("KeyboardInterrupt", 130), (number, loop)
        after = bash.run("kept=$((kept + 1)); echo $kept")
        assert (after.stdout, after.stderr, after.exit_code) == (b"%d\n" % (number + 1), b"", 0), (number, loop)


def test_bash_line_numbers_begin_anew(bash: Driver) -> None:
    """A run's first line is line 1, whatever ran before."""
    for _ in range(3):
        ran = bash.run("echo $LINENO\n\necho $LINENO; trap 'echo at $LINENO' ERR\nfalse\ntrap - ERR")
        assert ran.stdout == b"1\n3\nat 4\n"


@pytest.mark.parametrize(
    ("code", "output"),
    [
        ("false", ""),
        ("f() { false; echo no; }\nf\necho no", ""),
        ("(false; echo no); echo no", ""),
        ("set -o pipefail; false | cat; echo no", ""),
        ("x=$(false); echo no", ""),
        ("eval 'false\necho no'; echo no", ""),
        ("trap 'echo trapped' ERR; false; echo no", "trapped\n"),
        ("false || echo yes; if false; then :; fi; ! true; f() { false; echo yes; }; f || :; false", "yes\nyes\n"),
    ],
)
def test_set_e_ends_the_run_alone(bash: Driver, code: str, output: str) -> None:
    """With `set -e` the first failure ends the run with its code; the option and all else stay as they were."""
    bash.run("kept=41; set -e")
    ran = bash.run(code)
    assert (ran.stdout.decode(), ran.stderr, ran.exit_code) == (output, b"", 1)
    ran = bash.run("kept=$((kept + 1)); echo $kept; [[ $- == *e* ]] && echo e; trap - ERR")
    assert ran.stdout == b"42\ne\n"


def test_a_shell_that_had_to_start_anew_knows_the_same(bash: Driver) -> None:
    """What the session cannot prevent from ending the shell costs it no variable, function, option or descriptor."""
    bash.run(
        "x='a\nb'; declare -A map=([k]='v w'); f() { echo f; }; export -f f; alias hey='echo hey'; shopt -s nullglob"
    )
    bash.run("set -u; cd /usr; exec 7> \"$HOME/seven\"; trap 'echo err >&2' ERR; local_of_nobody=1; readonly fixed=3")
    for number in range(3):
        assert bash.run(f"builtin exit {number}").exit_code == number
    ran = bash.run(
        'echo "$x" ${map[k]}; bash -c f; hey; shopt -q nullglob && echo null; pwd\n'
        'echo 7 >&7; cat "$HOME/seven"; echo $fixed'
    )
    assert ran.stdout == b"a\nb v w\nf\nhey\nnull\n/usr\n7\n3\n"
    assert bash.run("false").stderr == b"err\n"
    assert bash.run("while :; do :; done", interrupt_after_s=0.05).error == "KeyboardInterrupt"


def test_bash_traces_only_the_run(bash: Driver) -> None:
    """`set -x` shows nothing of the driver's, but for the evaluation's depth."""
    bash.run("set -x")
    assert bash.run("echo a").stderr.lstrip(b"+") == b" echo a\n"


def test_a_program_in_place_of_the_shell_ends_the_session(tmp_path: Path) -> None:
    """`exec` of a program is seen as the end of the link, and what the program printed is there."""
    driver = Driver("bash", tmp_path)
    try:
        ran = driver.run("exec echo last")
        assert (ran.done, driver.process.wait(30)) == (END_OF_LINK, 0)
        assert driver.process.stdout is not None
        assert ran.stdout + (driver.process.stdout.read() or b"") == b"last\n"
    finally:
        driver.kill()


@pytest.mark.parametrize(("reads", "answers"), [(59, 60), (60, 59), (61, 60), (62, 61), (59, 62), (10, 11)])
def test_the_numbers_of_a_session_s_descriptors_do_not_matter(
    open_driver: Open, tmp_path: Path, reads: int, answers: int
) -> None:
    """A shell may be given any two descriptors, those that it takes for its own among them."""
    program = tmp_path / "bash-with-numbers"
    program.write_text(
        "#!/bin/bash\n"
        'exec {a}<&"$4" {b}>&"$5"\n'
        f'exec {reads + 100}<&"$a" {answers + 100}>&"$b"\n'
        f"exec {reads}<&{reads + 100} {answers}>&{answers + 100}\n"
        f'exec bash "$1" "$2" "$3" {reads} {answers} {reads + 100}<&- {answers + 100}>&-\n'
    )
    program.chmod(0o755)
    driver = open_driver("bash", program=str(program))
    assert driver.run("echo a").stdout == b"a\n"


def test_a_killed_shell_ends_the_session(tmp_path: Path) -> None:
    """A driver that was killed is seen as the end of the link, although its children go on."""
    driver = Driver("bash", tmp_path)
    try:
        ran = driver.run("sleep 30 & kill -KILL $$")
        assert ran.done == END_OF_LINK
        assert driver.process.wait(30) == -signal.SIGKILL
    finally:
        driver.kill()


def test_settings_of_an_interactive_shell_do_not_matter(open_driver: Open, tmp_path: Path) -> None:
    """Neither start-up files nor variables of the caller's change a session."""
    for name in (".bashrc", ".bash_profile", ".profile"):
        (tmp_path / name).write_text("echo noise; exit 1\n")
    driver = open_driver(
        "bash", env={"PS1": "ps1", "PS2": "ps2", "IGNOREEOF": "0", "HISTFILE": str(tmp_path / "history")}
    )
    ran = driver.run("echo a\necho b")
    assert (ran.stdout, ran.stderr) == (b"a\nb\n", b"")
    driver.link.close()
    driver.process.wait(30)
    assert "history" not in os.listdir(tmp_path)
