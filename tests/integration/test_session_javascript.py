"""What a live session of JavaScript promises, shown with its driver as a plain subprocess."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.harness.sessions import Driver

pytestmark = pytest.mark.toolchain


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
        ("display(1, 1n)", "TypeError", "at cell-1:1:1"),
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


def test_a_promise_that_nothing_holds_may_be_collected(javascript: Driver) -> None:
    """A run that waits for ever for what is garbage does not take the process with it."""
    javascript.run("await new Promise(() => {})", interrupt_after_s=0.05)
    ran = javascript.run("for (let i = 0; i < 300; i++) globalThis.big = new Array(100_000).fill({}); 1")
    assert (ran.value, ran.stderr) == (1, b"")


def test_an_interrupted_run_does_not_run_later(javascript: Driver) -> None:
    """A run that was waiting behind a busy callback when it was interrupted is over, and is not made up for."""
    javascript.run("let count = 0")
    javascript.send("setTimeout(() => { console.log('busy'); for (;;) {} }, 50)")
    if b"busy\n" not in javascript.await_end().stdout:  # else it was faster than we
        javascript.await_output(b"busy\n")
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
    many = javascript.run("for (let i = 0; i < 2000; i++) display(i)").displays
    assert (len(many), many[-1]) == (501, {"op": "cut"})
    large = javascript.run("for (let i = 0; i < 9; i++) display({ 'text/html': 'x'.repeat(5e6) })").displays
    assert (len(large), large[-1]) == (7, {"op": "cut"})


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
