"""The guest-side drivers of live sessions, started as plain subprocesses: what holds for both, then each one's own."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.session_driver import END_OF_LINK, Driver

pytestmark = pytest.mark.toolchain

BOTH = ("javascript", "bash")
Open = Callable[..., Driver]


@pytest.fixture
def open_driver(tmp_path: Path) -> Iterator[Open]:
    """Return a function that starts a driver, which ends with the test, and ends well."""
    with ExitStack() as stack:
        yield lambda language, **settings: stack.enter_context(Driver(language, tmp_path, **settings))


@pytest.fixture
def javascript(open_driver: Open) -> Driver:
    """Open the driver of JavaScript."""
    return open_driver("javascript")


@pytest.fixture
def bash(open_driver: Open) -> Driver:
    """Open the driver of Bash."""
    return open_driver("bash")


# What both promise: the same claim in two languages.
PRINT = {"javascript": "console.log({})", "bash": "echo {}"}
SET_KEPT = {"javascript": "let kept = 41", "bash": "kept=41"}
SHOW_KEPT = {"javascript": "kept += 1; console.log(kept)", "bash": "kept=$((kept + 1)); echo $kept"}
INTERRUPTED = {"javascript": ("Interrupted", 1), "bash": ("KeyboardInterrupt", 130)}
RUNTIME = {"javascript": "Node.js v", "bash": "Bash "}
LOOPS = {
    "javascript": [
        "console.log('begun'); for (;;) {}",
        "console.log('begun'); await new Promise(() => {})",
        "await new Promise((r) => setTimeout(r, 1)); console.log('begun'); for (;;) {}",
        "setTimeout(() => { console.log('begun'); for (;;) {} }, 1); await new Promise(() => {})",
        "for (;;) console.log('begun')",
        "console.log('begun'); for (;;) display('x')",
        "console.log('begun'); for (;;) await 1",
        "console.log('begun'); for (;;) { try { for (;;) {} } catch { } finally { } }",
        "console.log('begun'); Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0)",
        "console.log('begun'); require('child_process').execSync('sleep 100', { stdio: 'ignore' })",
        "function f() { try { f() } catch { f() } }; console.log('begun'); f()",
    ],
    "bash": [
        "echo begun; while true; do :; done",
        "echo begun; sleep 100",
        "f() { while true; do g; done; }; g() { :; }; echo begun; f",
        "while true; do echo begun; done",
        "echo begun; (while true; do :; done)",
        "echo begun; while true; do x=$(echo a); done",
        "echo begun; yes | cat > /dev/null",
        "echo begun; sleep 100 & wait",
        "eval 'echo begun; for ((;;)); do (:); done'",
        "source /dev/stdin <<< 'echo begun; while :; do :; done; echo no'; echo no",
    ],
}


@pytest.mark.parametrize("language", BOTH)
def test_it_says_what_it_is_and_is_quiet(open_driver: Open, language: str) -> None:
    """The first word names the runtime, and nothing of the start shows in what a run prints."""
    driver = open_driver(language)
    ran = driver.run(PRINT[language].format("1"))
    assert driver.ready["op"] == "ready"
    assert driver.ready["runtime"].startswith(RUNTIME[language])
    assert (ran.stdout, ran.stderr, ran.exit_code, ran.displays) == (b"1\n", b"", 0, [])


@pytest.mark.parametrize("language", BOTH)
def test_three_hundred_runs(open_driver: Open, language: str) -> None:
    """Each run prints exactly its own, and what one sets the next one finds."""
    driver = open_driver(language)
    driver.run(SET_KEPT[language])
    for number in range(300):
        ran = driver.run(SHOW_KEPT[language])
        assert (ran.stdout, ran.stderr, ran.exit_code) == (b"%d\n" % (42 + number), b"", 0)


@pytest.mark.parametrize(("language", "loop"), [(language, loop) for language in BOTH for loop in LOOPS[language]])
def test_an_interrupt_ends_the_run_and_nothing_else(open_driver: Open, language: str, loop: str) -> None:
    """Whatever a run is doing, SIGINT ends it, and what was known before is known afterwards."""
    driver = open_driver(language)
    driver.run(SET_KEPT[language])
    begin = time.monotonic()
    ran = driver.run(loop, interrupt_at=b"begun\n")
    assert time.monotonic() - begin < 30
    assert (ran.error, ran.exit_code) == INTERRUPTED[language]
    after = driver.run(SHOW_KEPT[language])
    assert (after.stdout.splitlines()[-1], after.stderr, after.exit_code) == (b"42", b"", 0)


def test_many_interrupts_at_any_moment(open_driver: Open) -> None:
    """Interrupts that come early, late or again leave neither the stream nor the state in disorder.

    Bash has a race of its own there (docs/limitations/local.md); one interrupt at a time is tried above.
    """
    language = "javascript"
    driver = open_driver(language)
    driver.run(SET_KEPT[language])
    for number in range(30):
        loop = LOOPS[language][number % len(LOOPS[language])]
        ran = driver.run(loop, interrupt_after_s=(number % 5 + 1) / 100)
        assert (ran.error, ran.exit_code) == INTERRUPTED[language], loop
        after = driver.run(SHOW_KEPT[language])
        assert after.stdout.splitlines()[-1] == b"%d" % (42 + number), loop


@pytest.mark.parametrize("language", BOTH)
def test_an_interrupt_between_runs_is_ignored(open_driver: Open, language: str) -> None:
    """A SIGINT that comes too late ends neither the session nor the next run."""
    driver = open_driver(language)
    driver.run(SET_KEPT[language])
    for number in range(20):
        driver.interrupt()
        if number % 2:
            time.sleep(0.02)
        ran = driver.run(SHOW_KEPT[language])
        assert (ran.stdout, ran.exit_code) == (b"%d\n" % (42 + number), 0)


@pytest.mark.parametrize(
    ("language", "flood"),
    [
        ("javascript", "for (let i = 0; i < 50; i++) process.stdout.write('x'.repeat(100_000))"),
        ("javascript", "process.stderr.write('x'.repeat(5_000_000))"),
        ("bash", "head -c 5000000 /dev/zero | tr '\\0' x"),
        ("bash", "printf '%5000000s' '' | tr ' ' x >&2"),
    ],
)
def test_output_is_complete_before_the_end(open_driver: Open, language: str, flood: str) -> None:
    """Five megabytes are in the pipe when the run is over, and none follow."""
    driver = open_driver(language)
    ran = driver.run(flood)
    assert ran.stdout + ran.stderr == b"x" * 5_000_000
    after = driver.run(PRINT[language].format("1"))
    assert (after.stdout, after.stderr) == (b"1\n", b"")


@pytest.mark.parametrize(
    ("language", "code"),
    [
        ("javascript", "const text = `{}`; console.log(text.length)"),
        ("bash", "text='{}'; echo ${{#text}}"),
    ],
)
def test_a_megabyte_of_code(open_driver: Open, language: str, code: str) -> None:
    """Code may be long, and have many lines."""
    text = "line of text\n" * 80_000
    assert open_driver(language).run(code.format(text)).stdout == b"%d\n" % len(text)


@pytest.mark.parametrize(
    ("language", "code", "exit_code"),
    [
        ("javascript", "console.log(1); process.exit(3); console.log(2)", 3),
        ("javascript", "console.log(1); try { process.exit() } finally { console.log(2) }", 0),
        ("javascript", "console.log(1); await 1; process.exit(259)", 3),
        ("javascript", "console.log(1); setTimeout(() => process.exit(3), 1); await new Promise(() => {})", 3),
        ("bash", "echo 1; exit 3; echo 2", 3),
        ("bash", "echo 1; exit 259", 3),
        ("bash", "echo 1; false; exit", 1),
        ("bash", "f() { local kept=1; exit 4; }; echo 1; f; echo 2", 4),
        ("bash", "echo 1; if exit 5; then echo 2; fi", 5),
        ("bash", "source /dev/stdin <<< 'echo 1; exit 6\necho 2'\necho 2", 6),
        ("bash", "echo 1; builtin exit 7; echo 2", 7),
        ("bash", "echo 1; command exit 8; echo 2", 8),
        ("bash", "echo 1; return 9; echo 2", 9),
    ],
)
def test_exit_ends_the_run_alone(open_driver: Open, language: str, code: str, exit_code: int) -> None:
    """The session goes on after an exit, with all it knew."""
    driver = open_driver(language)
    driver.run(SET_KEPT[language])
    ran = driver.run(code)
    assert (ran.stdout, ran.stderr, ran.exit_code, ran.error) == (b"1\n", b"", exit_code, "")
    assert driver.run(SHOW_KEPT[language]).stdout == b"42\n"


@pytest.mark.parametrize(
    ("language", "code"),
    [("javascript", "require('fs').readFileSync(0).length"), ("bash", "read -r line || echo end; cat; wc -c")],
)
def test_standard_input_is_at_its_end(open_driver: Open, language: str, code: str) -> None:
    """What reads from standard input gets nothing, at once, and never the link."""
    ran = open_driver(language).run(code)
    assert ran.exit_code == 0
    assert ran.stdout == (b"" if language == "javascript" else b"end\n0\n")


def test_programs_inherit_nothing_of_bash(bash: Driver) -> None:
    """A program that a run starts has the three streams, and the folder that it lists."""
    assert bash.run("ls /proc/self/fd").stdout.split() == [b"0", b"1", b"2", b"3"]


@pytest.mark.parametrize(
    ("language", "code"),
    [
        ("javascript", "const { spawn } = require('child_process'); spawn('sleep', ['30']); 1"),
        ("bash", "sleep 30 &\n{ sleep 0.3; echo late; } &\necho $!"),
    ],
)
def test_background_work_does_not_hold_a_run(open_driver: Open, language: str, code: str) -> None:
    """A run is over while what it started goes on."""
    driver = open_driver(language)
    begin = time.monotonic()
    assert driver.run(code).exit_code == 0
    assert time.monotonic() - begin < 10
    if language == "bash":
        deadline = time.monotonic() + 30
        while b"late" not in driver.run("sleep 0.2").stdout:
            assert time.monotonic() < deadline


@pytest.mark.parametrize("language", BOTH)
def test_the_end_of_the_link_ends_a_driver_in_a_run(open_driver: Open, language: str) -> None:
    """A driver whose caller is gone ends with 0, once the run lets it or is interrupted."""
    driver = open_driver(language)
    driver.send(LOOPS[language][0])
    time.sleep(0.3)
    driver.link.close()
    deadline = time.monotonic() + 30
    while driver.process.poll() is None and time.monotonic() < deadline:
        driver.interrupt()
        time.sleep(0.1)
    assert driver.process.returncode == 0


# JavaScript's own promises.
@pytest.mark.parametrize(
    ("code", "value"),
    [
        ("1 + 1", 2),
        ("const a = 1; const b = 2\na + b", 3),
        ("null", None),
        ("'é😀'", "é😀"),
        ("({ a: [1, 2.5, 'x', null, true, { b: [] }] })", {"a": [1, 2.5, "x", None, True, {"b": []}]}),
        ("{ a: 1 }", {"a": 1}),
        ("{}", {}),
        ("{ const a = 1; a }", 1),
        ("await new Promise((r) => setTimeout(() => r(5), 5))", 5),
        ("(async () => 6)()", 6),
        ("for (let i = 0; i < 3; i++) i", 2),
        ("if (true) { 7 }", 7),
        ("1 // a comment", 1),
        ("import fs, { existsSync as e } from 'fs'\nfs.existsSync === e", True),
        ("import * as os from \"os\"; import 'path';\nos.EOL", "\n"),
        ("(await import('node:fs')).constants.R_OK", 4),
        ("const load = () => import('node:os'); (await load()).EOL", "\n"),
        ("`import('x') ${'import(1)'} ${`${1}import(2)`}`", "import('x') import(1) 1import(2)"),
        ("/import('x')/.source + 6 / 2 / 3 // import(1)", "import('x')1"),
        ("({ import: 1 }).import", 1),
        ("process.argv.length", 1),
        ("require.main === module && __dirname === process.cwd()", True),
        ("typeof fs.readFileSync + path.sep", "function/"),
    ],
)
def test_javascript_values(javascript: Driver, code: str, value: Any) -> None:
    """The value of the last expression, awaited when it is a promise, comes as JSON when JSON can say it."""
    ran = javascript.run(code)
    assert (ran.stderr, ran.done["exit_code"]) == (b"", 0)
    assert ran.value == value
    assert type(ran.value) is type(value)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("NaN", "NaN"),
        ("-0", "-0"),
        ("12n", "12n"),
        ("Symbol('a')", "Symbol(a)"),
        ("[1, , 3]", "[ 1, <1 empty item>, 3 ]"),
        ("({ a: undefined })", "{ a: undefined }"),
        ("new Map([[1, 2]])", "Map(1) { 1 => 2 }"),
        ("Buffer.from('abc')", "<Buffer 61 62 63>"),
        ("new Date(0)", "1970-01-01T00:00:00.000Z"),
        ("class A { #x = 1; y = 2 }; new A()", "A { y: 2 }"),
        ("const c = {}; c.c = c; c", "<ref *1> { c: [Circular *1] }"),
        ("'\\ud800'", "'\\ud800'"),
        ("({ toJSON() { return 1 } })", "{ toJSON: [Function: toJSON] }"),
        ("function f() {}\nf", "[Function: f]"),
        ("new Proxy({ a: 1 }, { get() { throw 1 } })", "{ a: 1 }"),
    ],
)
def test_javascript_values_that_json_cannot_say(javascript: Driver, code: str, text: str) -> None:
    """Any other value comes as Node.js shows it."""
    ran = javascript.run(code)
    assert ran.done["value_repr"] == text
    assert "value" not in ran.done


def test_no_value_is_no_value(javascript: Driver) -> None:
    """A run that ends in a statement, or in undefined, has neither value nor text."""
    for code in ("undefined", "let x = 1", "", "// nothing", "console.log()"):
        assert set(javascript.run(code).done) == {"op", "id", "exit_code"}


def test_long_values_are_cut(javascript: Driver) -> None:
    """A value that would not fit a frame comes as the beginning of its text."""
    ran = javascript.run("'x'.repeat(2_000_000)")
    assert "value" not in ran.done
    assert 10_000 < len(ran.done["value_repr"]) < 2_000_000
    assert javascript.run("throw new Error('x'.repeat(30_000_000))").error == "Error"


def test_javascript_names_outlive_their_run(javascript: Driver) -> None:
    """Every kind of declaration is there in the next run, and may be made again."""
    declarations = (
        "const c = {0}; let l = {0}; var v = {0}; function f() {{ return {0} }}; class K {{ x() {{ return {0} }} }}"
    )
    for number in (1, 2):
        assert javascript.run(declarations.format(number)).exit_code == 0
        assert javascript.run("[c, l, v, f(), new K().x()]").value == [number] * 5
    assert javascript.run("const fs = require('fs'); const path = 1; path").value == 1
    assert javascript.run("const broken = nothing()").error == "ReferenceError"
    assert javascript.run("const broken = 2; broken").value == 2


@pytest.mark.parametrize(
    ("code", "name", "traceback"),
    [
        ("\nthrow new TypeError('boo')", "TypeError", "Uncaught TypeError: boo\n    at cell-1:2:7"),
        ("await 1\nthrow new Error('late')", "Error", "Uncaught Error: late\n    at cell-1:2:7"),
        ("function g() {\n  null.x\n}\ng()", "TypeError", "at g (cell-1:2:8)\n    at cell-1:4:1"),
        ("Promise.reject(new RangeError('own'))", "RangeError", "Uncaught RangeError: own\n    at cell-1:1:16"),
        ("throw 5", "Error", "Uncaught 5"),
        ("throw { a: 1 }", "Error", "Uncaught { a: 1 }"),
        ("let x\nlet = = 1", "SyntaxError", "cell-1:2:7\nlet = = 1\n      ^\nUncaught SyntaxError: Unexpected"),
        ("f(1,", "SyntaxError", "cell-1:1:5\nf(1,\n    ^\nUncaught SyntaxError: "),
        ("JSON.parse('{')", "SyntaxError", "at JSON.parse (<anonymous>)\n    at cell-1:1:6"),
        ("throw new Proxy(Error, { get() { throw 1 }, getPrototypeOf() { throw 2 } })", "Error", "Uncaught"),
    ],
)
def test_javascript_errors(javascript: Driver, code: str, name: str, traceback: str) -> None:
    """An error names its place in the cell, on standard error and in the answer, and no frame of the driver's."""
    ran = javascript.run(code)
    assert (ran.exit_code, ran.error) == (1, name)
    assert traceback in ran.done["error"]["traceback"]
    assert ran.stderr.decode() == ran.done["error"]["traceback"] + "\n"
    assert "session.js" not in ran.stderr.decode()
    assert "node:inspector" not in ran.stderr.decode()
    assert javascript.run("1").value == 1


def test_what_nobody_catches_ends_nothing(javascript: Driver) -> None:
    """An error in a callback, or a rejection nobody handles, is printed; the run it falls into is no failure."""
    ran = javascript.run(
        "setTimeout(() => { throw new Error('one') }, 1); Promise.reject(new Error('two'));"
        "await new Promise((r) => setTimeout(r, 50)); 3"
    )
    assert ran.value == 3
    assert b"Uncaught Error: one\n    at Timeout._onTimeout (cell-1:1:26)" in ran.stderr
    assert b"Uncaught Error: two\n    at cell-1:1:65" in ran.stderr
    ran = javascript.run("process.removeAllListeners(); Promise.reject(new Error('three')); 4")
    assert (ran.value, b"Uncaught Error: three" in ran.stderr) == (4, True)
    said = javascript.run("setTimeout(() => { throw new Error('between') }, 1)").stderr
    deadline = time.monotonic() + 30
    while b"between" not in said:
        assert time.monotonic() < deadline
        said += javascript.run("await new Promise((r) => setTimeout(r, 10)); 5").stderr
    javascript.run("process.on('uncaughtException', (error) => console.log('mine', error.message))")
    ran = javascript.run("setTimeout(() => { throw new Error('x') }, 1); await new Promise((r) => setTimeout(r, 50))")
    assert (ran.stdout, ran.stderr) == (b"mine x\n", b"")


def test_a_promise_that_nothing_holds_may_be_collected(open_driver: Open) -> None:
    """A run that waits for ever for what is garbage does not take the process with it."""
    driver = open_driver("javascript")
    driver.run("await new Promise(() => {})", interrupt_after_s=0.05)
    ran = driver.run("for (let i = 0; i < 300; i++) globalThis.big = new Array(100_000).fill({}); 1")
    assert (ran.value, ran.stderr) == (1, b"")


def test_an_interrupted_run_does_not_run_later(javascript: Driver) -> None:
    """A run that was waiting behind a busy callback when it was interrupted is over, and is not made up for."""
    javascript.run("let count = 0; setTimeout(() => { for (;;) {} }, 50)")
    time.sleep(0.3)
    assert javascript.run("count += 1", interrupt_after_s=0.2).error == "Interrupted"
    assert javascript.run("count").value == 0


def test_display(javascript: Driver) -> None:
    """A MIME dict is shown as it is, bytes in base64; anything else as its text; in order, and before the end."""
    ran = javascript.run(
        "display({ 'text/html': '<b>é</b>', 'image/png': Buffer.from([1, 2, 255]), 'application/json': { a: [1] } });"
        "display([1, 2], { a: 1 }); display(); await 1; display('text'); 1"
    )
    assert [(one["op"], one["id"], one["data"], one["metadata"]) for one in ran.displays] == [
        ("display", 1, {"text/html": "<b>é</b>", "image/png": "AQL/", "application/json": '{"a":[1]}'}, {}),
        ("display", 1, {"text/plain": "[ 1, 2 ]"}, {"a": 1}),
        ("display", 1, {"text/plain": "undefined"}, {}),
        ("display", 1, {"text/plain": "'text'"}, {}),
    ]
    assert javascript.run("({ 'text/html': '<b>' })").done["data"] == {"text/html": "<b>"}
    assert javascript.run("display({ 'text/html': 'x'.repeat(2e7) })").error == "RangeError"
    assert len(javascript.run("for (let i = 0; i < 2000; i++) display(i)").displays) == 2000


def test_modules_are_those_of_the_working_directory(javascript: Driver, tmp_path: Path) -> None:
    """`require` and `import` look where the process is, also after it went elsewhere."""
    for folder, number in ((tmp_path, 1), (tmp_path / "below", 2)):
        folder.mkdir(exist_ok=True)
        (folder / "common.js").write_text(f"module.exports = {number}")
        (folder / "module.mjs").write_text(f"export default {number}; export const name = {number}")
        package = folder / "node_modules" / "package"
        package.mkdir(parents=True)
        (package / "package.json").write_text('{"name": "package", "exports": {"import": "./index.mjs"}}')
        (package / "index.mjs").write_text(f"export default {number}")
    code = (
        "import one, { name } from './module.mjs'\nimport two from 'package'\n"
        "[require('./common.js'), (await import('./module.mjs')).name, one, name, two]"
    )
    assert javascript.run(code).value == [1] * 5
    javascript.run("process.chdir('below')")
    assert javascript.run(code).value == [2] * 5


def test_the_console_is_in_order(javascript: Driver) -> None:
    """What a run prints and what its programs print comes in the order it was printed in."""
    ran = javascript.run(
        "const { execSync } = require('child_process'); const inherit = { stdio: 'inherit' };"
        "console.log('1'); execSync('echo 2', inherit); process.stdout.write('3\\n');"
        "execSync('node -e \"console.log(4)\"', inherit); console.log('5'); console.table([{ a: 1 }]);"
        "process.stdout.write('6', () => console.log('7')); await 1"
    )
    assert ran.stdout.decode().startswith("1\n2\n3\n4\n5\n┌")
    assert ran.stdout.decode().endswith("┘\n67\n")


# Bash's own promises.
def test_bash_keeps_what_a_shell_knows(bash: Driver, tmp_path: Path) -> None:
    """Variables, arrays, functions, aliases, options, traps, descriptors and the folder outlive their run."""
    bash.run(
        "x='a  b'; export y=2; declare -A map=([k]='v w'); list=(1 '2 3'); f() { echo \"f $1\"; }\n"
        "alias hey='echo hey'; set -u; shopt -s nullglob; mkdir below; cd below; exec 7>seven; umask 027\n"
        "declare -i n=1; trap 'echo usr' USR1"
    )
    ran = bash.run(
        'echo "$x"; sh -c \'echo $y\'; echo "${map[k]}|${list[1]}"; f z; hey; shopt nullglob; echo $-; pwd; umask\n'
        "echo seven >&7; cat seven; n+=4; echo $n; kill -USR1 $$"
    )
    assert ran.stdout.decode().split("\n") == [
        *("a  b", "2", "v w|2 3", "f z", "hey", "nullglob       \ton", ran.stdout.decode().split("\n")[6]),
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
        'echo "$x" ${map[k]}; bash -c f; hey; shopt nullglob; pwd; echo 7 >&7; cat "$HOME/seven"; echo $fixed'
    )
    assert ran.stdout == b"a\nb v w\nf\nhey\nnullglob       \ton\n/usr\n7\n3\n"
    assert bash.run("false").stderr == b"err\n"
    assert bash.run("while :; do :; done", interrupt_after_s=0.05).error == "KeyboardInterrupt"


def test_bash_traces_only_the_run(bash: Driver) -> None:
    """`set -x` shows nothing of the driver's, but for the evaluation's depth."""
    bash.run("set -x")
    assert bash.run("echo a").stderr.lstrip(b"+") == b" echo a\n"


def test_a_program_in_place_of_the_shell_ends_the_session(tmp_path: Path) -> None:
    """`exec` of a program is seen as the end of the link."""
    driver = Driver("bash", tmp_path)
    try:
        ran = driver.run("exec echo last")
        assert ran.done == END_OF_LINK
    finally:
        driver.kill()


def test_a_killed_shell_ends_the_session(tmp_path: Path) -> None:
    """A driver that was killed is seen as the end of the link, although its children go on."""
    driver = Driver("bash", tmp_path)
    try:
        ran = driver.run("sleep 30 & kill -KILL $$")
        assert ran.done == END_OF_LINK
        assert driver.process.wait(10) == -signal.SIGKILL
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
    driver.process.wait(10)
    assert "history" not in os.listdir(tmp_path)
