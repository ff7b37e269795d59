"""What it costs that lines are written as they are printed, and how soon they come.

The same program without it, block by block as it was until then and as a plain process has it, is what the lines are
compared to. The plain process has an environment of its own: with PYTHONUNBUFFERED of a shell it would be slower.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import cloche
from cloche.bench.harness import BenchmarkFailed, Case, Measurement, timed
from cloche.bench.scenarios import PLAIN, Cases, Scenario, library_call, output_of
from cloche.config.options import SandboxOptions
from cloche.core.result import Status

from .setting import Setting

IN_BLOCKS, BY_LINES = "cloche, warm, in blocks", "cloche, warm, line by line"
ANSWERED_LINE = "a line that waits for its answer"
COUNTS = (100, 1_000, 10_000)
MANY = 1_000_000
OUTPUT_BYTES = 1 << 20  # all of the lines are kept, and looked at
MANY_S = 120.0
CLEAN = {"PATH": os.defpath, "LANG": "C.UTF-8"}
BLOCKS = "import sys; sys.stdout.reconfigure(line_buffering=False)"
ASKING = "while True:\n    print('line')\n    input()\n"


def _code(count: int) -> str:
    return f"for number in range({count}): print('line', number)"


def _expected(count: int) -> bytes:
    return b"".join(b"line %d\n" % number for number in range(count))


def _lines(count: int, _: Setting, __: ExitStack) -> Cases:
    """Enter who prints so many lines: a plain process, and a warm run in both ways."""
    code, expected = _code(count), _expected(count)
    yield Case(
        name=PLAIN,
        call="subprocess.run([python, '-I', '-c', CODE], capture_output=True, env=CLEAN)",
        measure=timed(partial(output_of, [sys.executable, "-I", "-c", code], CLEAN)),
        expected=expected,
    )
    options: SandboxOptions = {"output_limit": OUTPUT_BYTES}
    in_blocks = f"{BLOCKS}\n{code}"
    yield library_call(IN_BLOCKS, f"cloche.run({BLOCKS!r}, then CODE)", in_blocks, expected, options)
    yield library_call(BY_LINES, "cloche.run(CODE)", code, expected, options)


def _many_lines(_: Setting, __: ExitStack) -> Cases:
    """Enter who prints a million lines, by the processor time that guest and caller took."""
    code = _code(MANY)
    yield Case(
        name=PLAIN, call="the same by subprocess.run: processor time", measure=partial(_plain_time, code), expected=b""
    )
    for name, text in ((IN_BLOCKS, f"{BLOCKS}\n{code}"), (BY_LINES, code)):
        yield Case(name=name, call=f"cloche.run of {MANY:,} lines: processor time", measure=partial(_time, text),
                   expected=b"")  # fmt: skip


def _plain_time(code: str) -> Measurement:
    with subprocess.Popen([sys.executable, "-I", "-c", code], env=CLEAN, stdout=subprocess.PIPE) as running:
        begun, stdout = time.process_time(), running.stdout
        while stdout is not None and stdout.read(1 << 16):
            pass
        own_s = time.process_time() - begun
        _, _, used = os.wait4(running.pid, 0)
        running.returncode = 0
    return Measurement((used.ru_utime + used.ru_stime + own_s) * 1000, b"")


def _time(code: str) -> Measurement:
    begun = time.process_time()
    result = cloche.run(code, timeout=MANY_S, warm=True)
    own_s = time.process_time() - begun
    if result.status is not Status.OK:
        raise BenchmarkFailed(f"Cloche reports {result.status}: {result.stderr[:200]}")
    return Measurement(((result.usage.cpu_user_s or 0) + (result.usage.cpu_system_s or 0) + own_s) * 1000, b"")


def _answered(_: Setting, stack: ExitStack) -> Cases:
    """Enter a program that prints a line, and waits for an answer before it prints another one."""
    yield Case(
        name=PLAIN,
        call="a plain process with `python -u`",
        measure=_plain_turn(stack),
        expected=b"line\n",
    )
    sandbox = stack.enter_context(cloche.Sandbox(live=True))
    process = stack.enter_context(sandbox.start(["python3", "-c", ASKING]))
    if process.stdout.read() != b"line\n":
        raise BenchmarkFailed("the program does not print its first line")

    def turn() -> Measurement:
        begun = time.perf_counter()
        process.write(b"\n")
        said = process.stdout.read()
        return Measurement((time.perf_counter() - begun) * 1000, said)

    yield Case(name=ANSWERED_LINE, call="start(['python3', …]): from an answer to the next line", measure=turn,
               expected=b"line\n")  # fmt: skip


def _plain_turn(stack: ExitStack) -> Callable[[], Measurement]:
    words = [sys.executable, "-I", "-u", "-c", ASKING]
    running = stack.enter_context(
        subprocess.Popen(words, env=CLEAN, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    )
    stdin, stdout = running.stdin, running.stdout
    if stdin is None or stdout is None:
        raise BenchmarkFailed("a plain process has no pipes")
    stdout.readline()

    def turn() -> Measurement:
        begun = time.perf_counter()
        stdin.write(b"\n")
        stdin.flush()
        said = stdout.readline()
        return Measurement((time.perf_counter() - begun) * 1000, said)

    return turn


OUTPUT_EVENTS = (
    *(
        Scenario(
            name=f"lines {count}", title=f"{count:,} lines", enter=partial(_lines, count), reference=IN_BLOCKS,
            share=0.5, least=5,
        )
        for count in COUNTS
    ),
    Scenario(
        name="lines million", title=f"{MANY:,} lines, processor time", enter=_many_lines, reference=IN_BLOCKS,
        share=0.03, least=1,
    ),
    Scenario(name="answered", title="a line, its answer, the next line", enter=_answered),
)  # fmt: skip
