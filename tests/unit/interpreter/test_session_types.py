"""TypeScript in sessions of JavaScript: what `session_types.js` makes of it, evaluated by Node."""

from __future__ import annotations

import json
import shutil
import subprocess
from importlib import resources

import pytest

# Each: the code, and what the JavaScript that comes of it evaluates to, as text.
CELLS = (
    ("const x: number = 5; x + 1", "6"),
    ("interface P { name: string; age?: number }\nlet p: P = {name: 'A'}; p.name as string", "A"),
    ("type A<T> = { [K in keyof T]: T[K] } | null;\nlet a: A<{b: string}> = {b: 'x'}; a!.b", "x"),
    ("function f<T extends object>(x: T, ...r: Array<Array<number>>): T { return x }\nf<{a:number}>({a:1}).a", "1"),
    ("enum C { Red, Green = 5, Blue = Green << 1 }\n[C.Red, C.Blue, C[5]].join()", "0,10,Green"),
    (
        (
            "class P {\n  private x: number = 1; readonly y?: string; declare z: number\n"
            "  constructor(public name: string, private age = 3) {}\n  get(): number { return this.x + this.age } }\n"
            "const q = new P('n'); q.get() + q.name"
        ),
        "4n",
    ),
    (
        (
            "abstract class S { abstract area(): number; toString(): string { return `${this.area()}` } }\n"
            "class Q extends S implements Object { constructor(private w: number) { super() }\n"
            "  area(): number { return this.w ** 2 } }\nString(new Q(3))"
        ),
        "9",
    ),
    ("const g = <T,>(x: T): T => x; g(3)", "3"),
    ("const t = true ? (a: number): number => a : null; t(4)", "4"),
    ("const u = true ? (1) : 2; u", "1"),
    ("(x => (x as string[]).map((s: string) => s.length))(['ab'])[0]", "2"),
    ("let m: Map<string, Array<number>> = new Map<string, Array<number>>(); m.set('a', [1]); m.get('a')!.length", "1"),
    ("function o(a: string): void;\nfunction o(a: number): void;\nfunction o(a: any) { return a }\no(1)", "1"),
    ("import type { X } from './x'\nlet q = 1 < 2 && 3 > 2; q", "true"),
    ("export const e = 3;\nexport default function foo(): number { return e }\nfoo()", "3"),
    ("let r = /a<b>/.test('a<b>'); const a1 = 8, b1 = 2; r && a1 / b1 / 2", "2"),
    ("`x${[1, 2].map((i: number) => `n${`${i}'` as string}`).join()}`", "xn1',n2'"),
    ("function isS(x: unknown): x is string { return typeof x === 'string' }\nisS('a')", "true"),
    ("let { p, q: [qq] }: { p: number; q: number[] } = { p: 1, q: [2] }; p + qq", "3"),
    ("try { throw new Error('x') } catch (e: unknown) { var msg = (e as Error).message }\nmsg", "x"),
    ("const fn = function <T>(this: any, a: T): T { return a }; fn(<number>(5 as any))", "5"),
)
EVALUATES = """
const vm = require('vm');
const { source, cells } = JSON.parse(require('fs').readFileSync(0, 'utf8'));
const erase = vm.runInThisContext(`${source}\\nwithoutTypes`);
const lines = (text) => text.split('\\n').length;
console.log(JSON.stringify(cells.map((cell) => {
  const written = erase(cell);
  return [String(vm.runInNewContext(written)), lines(written) === lines(cell)];
})));
"""


def _evaluated(cells: list[str], program: str = EVALUATES) -> list[list[object]]:
    node = shutil.which("node")
    if node is None:
        pytest.skip("missing: node")
    source = resources.files("cloche.interpreter").joinpath("session_types.js").read_text()
    done = subprocess.run(
        [node, "-e", program], input=json.dumps({"source": source, "cells": cells}), capture_output=True, text=True,
        timeout=60, check=True,
    )  # fmt: skip
    answers: list[list[object]] = json.loads(done.stdout)
    return answers


def test_types_are_taken_out_of_typescript_and_the_lines_stay() -> None:
    """Each cell evaluates to its value, and has as many lines as before."""
    assert _evaluated([code for code, _ in CELLS]) == [[value, True] for _, value in CELLS]


def test_javascript_stays_as_it_is() -> None:
    """The drivers' own code, which has templates, regular expressions and classes, is not changed at all."""
    folder = resources.files("cloche.interpreter")
    texts = [folder.joinpath(name).read_text() for name in ("session.js", "session_types.js")]
    program = EVALUATES.replace("String(vm.runInNewContext(written))", "written === cell")
    assert _evaluated(texts, program) == [[True, True]] * 2


@pytest.mark.parametrize(
    "code", ["(a = " * 60 + "1" + ")" * 60, "let a = 0, b = 0, c = 0; " + "a ? (b) : c => " * 60 + "1; 1"]
)
def test_the_time_does_not_double_with_each_nested_bracket(code: str) -> None:
    """What may be an arrow function is tried once at each place."""
    assert _evaluated([code])[0][1] is True
