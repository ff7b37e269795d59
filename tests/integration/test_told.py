"""What a guest tells of its value costs its caller bounded time and memory, whatever it tells."""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Coroutine
from typing import Any

import pytest

import cloche
from cloche.sync import Session

pytestmark = pytest.mark.usefixtures("settings_of_nobody")

# Find where the value, or a session's answers, go to, and write there what no value is.
SAY = """
import os, stat
def is_there(fd):
    try: return stat.S_IFMT(os.fstat(fd).st_mode) in (stat.S_IFIFO, stat.S_IFSOCK)
    except OSError: return False
def say(data):
    view = memoryview(data)
    while view:
        for fd in filter(is_there, range(3, 1024)):
            try: view = view[os.write(fd, view):]
            except OSError: continue
            break
        else: os._exit(7)
def frame(body): return len(body).to_bytes(4, "big") + body
def output(body): return frame(b'{"op":"display","data":{"text/html":"x"},"metadata":{"a":' + body + b'}}')
"""
HOSTILE = {
    "tiny frames": "frame(b'{}') * 1_000_000",
    "one giant frame": "frame(b'{\"a\":\"' + b'x' * (20 << 20) + b'\"}')",
    "millions of lists": "output(b'[' + b'[],' * 3_000_000 + b'[]]')",
    "many lists in many frames": "output(b'[' + b'[],' * 1000 + b'[]]') * 400",
    "long numbers": "output(b'[' + b','.join([b'9' * 4300] * 2000) + b']')",
    "numbers that are hard to read": "output(b'[' + b'2.25073858507201136e-308,' * 39_000 + rb'\"\\ud800\"]')",
    "escapes alone": r"output(b'\"' + rb'\n' * (4 << 20) + b'\"')",
    "half characters": r"output(b'\"' + rb'\ud800' * (1 << 20) + b'\"')",
}
OF_A_CELL = ("tiny frames", "millions of lists", "half characters", "numbers that are hard to read")
LONGEST_GAP_S = 1.0  # which an idle machine keeps some fifty times over; before there was a bound it was up to 16 s
LONGEST_GAP_OF_ONE_S = 0.25  # for a single large text that is read, some 0.03 s of it


def with_watch(work: Coroutine[Any, Any, cloche.Result]) -> tuple[cloche.Result, float]:
    """Return a result, and for how long at most the event loop's thread worked without coming to anything else."""

    async def scenario() -> tuple[cloche.Result, float]:
        await cloche.arun("1")  # so that all is loaded
        running, longest, before = asyncio.ensure_future(work), 0.0, time.thread_time()
        while not running.done():
            await asyncio.sleep(0.001)
            longest, before = max(longest, time.thread_time() - before), time.thread_time()
        return await running, longest

    return asyncio.run(scenario())


async def _cell(code: str) -> cloche.Result:
    async with cloche.AsyncSandbox(live=False, memory="512m", cpus=1, timeout=60) as sandbox:
        session = await sandbox.session()
        return await session.run(code)


@pytest.mark.both_users
@pytest.mark.parametrize("name", HOSTILE)
def test_a_run_that_tells_too_much(name: str) -> None:
    """It ends as one of too much output, with the reason, keeps nothing of it, and holds nobody up."""
    result, gap_s = with_watch(cloche.arun(f"{SAY}say(b'F' + {HOSTILE[name]})", memory="512m", cpus=1, timeout=60))
    assert (result.status, result.exit_code, result.value, result.outputs) == ("output_limit", 137, None, ())
    assert "than" in result.meta["refused"]
    assert gap_s < LONGEST_GAP_S


@pytest.mark.both_users
@pytest.mark.parametrize("name", OF_A_CELL)
def test_a_cell_that_tells_too_much(name: str) -> None:
    """It ends its session as one of too much output, with the reason, and holds nobody up."""
    result, gap_s = with_watch(_cell(f"{SAY}say({HOSTILE[name]})"))
    assert (result.status, result.meta["state"], result.value) == ("output_limit", "lost", None)
    assert "more than one cell may send" in result.meta["refused"]
    assert gap_s < LONGEST_GAP_S


# The dearest text that is accepted: one half of a character makes all of it take twice the memory, and be looked at.
PAGE_CHARS = 9 * 2**20 - 99
HALF = f"""frame(b'{{"op":"display","data":{{"text/html":"' + b'x' * {PAGE_CHARS} + rb'\\ud83d"}}}}')"""


def test_half_a_character_in_a_large_text() -> None:
    """It is replaced, and reading the text costs about what it costs without it."""
    result, gap_s = with_watch(cloche.arun(f"{SAY}say(b'F' + {HALF})", memory="512m", cpus=1, timeout=60))
    assert result.ok
    assert result.outputs[0].data["text/html"] == "x" * PAGE_CHARS + "\ufffd"
    assert gap_s < LONGEST_GAP_OF_ONE_S


HONEST = {  # a cell, and of how many outputs
    "many types": ("class A:\n def _repr_mimebundle_(self, **_): return {f'x/{n}': 'a' for n in range(200)}\nA()", 1),
    "no plain text": ("class A:\n def _repr_mimebundle_(self, **_): return {'text/plain': None, 'a/b': 'c'}\nA()", 1),
    "large metadata": ("for n in range(3): display(n, metadata={'a': [0] * 20000})", 3),
    "commas, and a large value": ("for n in range(499): display('a,' * 25)\n[0] * 29000", 500),
    "deep metadata": ("a = []\nfor n in range(300): a = [a]\ndisplay(1, metadata={'a': a})", 1),
    "no number in metadata": ("display(1, metadata={'a': float('nan')})", 1),
    "a long number in metadata": (
        "import sys\nsys.set_int_max_str_digits(0)\ndisplay(1, metadata={'a': 10**5000})", 1),
    "as many escapes as are read": (
        "class A:\n def _repr_html_(self): return '\\n' * 925_000\n def __repr__(self): return '\\n' * 60_000\nA()", 1),
    "two threads that show pages": (
        ("import threading\nclass A:\n def _repr_html_(self): return 'x' * 300_000\n"
        "def show():\n for _ in range(12): display(A())\n"
        "both = [threading.Thread(target=show) for _ in range(2)]\n"
        "for one in both: one.start()\nfor one in both: one.join()"), 24),
    "much metadata, and a large value": ("for n in range(100): display(n, metadata={'a': [0] * 900})\n[0] * 29000", 27),
}  # fmt: skip


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_cell_keeps_its_session(name: str, session: Session) -> None:
    """What our driver tells, the caller reads, whatever a program shows; what is left out is said."""
    code, outputs = HONEST[name]
    result = session.run(code)
    assert (result.ok, len(result.outputs), "outputs_cut" in result.meta) == (True, outputs, outputs == 27)
    assert session.run("1 + 1").value == 2


def test_an_interrupt_tears_no_output(session: Session) -> None:
    """A cell that shows page after page is interrupted between two of them, and its session goes on."""
    code = "class A:\n def _repr_html_(self): return 'x' * 1_000_000\nwhile True: display(A())"
    for _ in range(5):
        assert session.run(code, timeout=0.1).status == "timeout"
    assert session.run("1 + 1").value == 2


def test_a_value_that_no_driver_of_ours_would_send() -> None:
    """A cell that speaks for itself has no larger value than a run, and what is left out is said."""
    done = """frame(b'{"op":"done","id":1,"exit_code":0,"value":"' + b'x' * (8 << 20) + b'"}')"""
    result = asyncio.run(_cell(f"{SAY}say({done})"))
    assert (result.ok, result.value, result.meta["outputs_cut"]) == (True, None, True)


def test_deep_metadata_of_a_value() -> None:
    """It is left out; the value and how it looks are there."""
    code = "a = []\nfor n in range(300): a = [a]\n"
    code += "class A:\n def _repr_mimebundle_(self, **_): return {'text/html': 'b'}, {'a': a}\nA()"
    result = cloche.run(code)
    assert (result.ok, result.value_is_repr, [one.metadata for one in result.outputs]) == (True, True, [{}])


@pytest.mark.parametrize(
    "code",
    [
        "for (let n = 0; n < 2; n++) display(n, {a: Array(30000).fill(0)}); 1",
        "let a = []; for (let n = 0; n < 300; n++) a = [a]; display(1, {a}); display(2); 1",
    ],
)
def test_metadata_of_javascript(code: str) -> None:
    """What the caller would not read is left out, and the session goes on."""
    with cloche.Sandbox(live=False) as sandbox:
        session = sandbox.session("javascript")
        result = session.run(code)
        assert (result.ok, result.value, [one.metadata for one in result.outputs]) == (True, 1, [{}, {}])
        assert session.run("1 + 1").value == 2


@pytest.mark.parametrize(
    ("code", "is_ok"),
    [
        ("throw new Error('x'.repeat(300000))", False),
        ("throw new Error('\\n\"'.repeat(200000))", False),
        ("throw new Error('\\ud800'.repeat(80000))", False),
        ("display({'text/html': '\\ud800'.repeat(70000)}); 'x'.repeat(70000)", True),
        ("display(1, {a: 'x'.repeat(400000)})", True),
    ],
)
def test_long_words_of_javascript(code: str, is_ok: bool) -> None:
    """However long an error, a text, a value or metadata: what the caller would not read is cut before."""
    with cloche.Sandbox(live=False) as sandbox:
        session = sandbox.session("javascript")
        result = session.run(code)
        assert (result.ok, result.meta["state"], len(result.outputs)) == (is_ok, "kept", int(is_ok))
        assert session.run("1 + 1").value == 2


@pytest.mark.parametrize(
    "told",
    ["NaN", "-Infinity", "[1e999]", '{"a":"\\\\ud800"}', "9" * 5000, "[" * 300 + "]" * 300, "{", ""],
    ids=lambda told: told[:8],
)
def test_what_calls_itself_json_and_is_none(told: str) -> None:
    """The value is then the text, as a repr is; whoever prints the result as JSON prints JSON."""
    result = cloche.run(f"{SAY}say(b'J' + b'{told}')")
    assert (result.ok, result.value, result.value_is_repr) == (True, told.replace("\\\\", "\\"), True)
    json.dumps(result.as_dict(), allow_nan=False, ensure_ascii=False).encode()


@pytest.mark.parametrize("code", ["float('nan')", "[1e999]", "'\\ud800'", "{'\\udfff': 1}", "10**5000", "2**53"])
def test_what_json_cannot_hold_comes_as_a_repr(code: str, session: Session) -> None:
    """In a run of its own as in a cell, for values of a program that means no harm."""
    code = f"import sys\nsys.set_int_max_str_digits(0)\n{code}"
    for result in (cloche.run(code), session.run(code)):
        assert (result.ok, result.value_is_repr, isinstance(result.value, str)) == (True, True, True)
        json.dumps(result.as_dict(), allow_nan=False, ensure_ascii=False).encode()


def test_the_command_line_prints_json() -> None:
    """`cloche run --json` prints strict JSON of a value that is none."""
    command = [sys.executable, "-m", "cloche", "run", "--json", "-c", f"{SAY}say(b'JNaN')"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout

    def refuse(word: str) -> None:
        raise ValueError(word)

    assert json.loads(printed, parse_constant=refuse)["value"] == "NaN"


PAGE = "'<td class=\"a,b\">[1]</td>\\n' * 100_000"


def test_large_outputs_of_a_well_behaved_program(session: Session) -> None:
    """Pages and pictures of some MiB come through whole, with whatever their text looks like."""
    code = f"class Page:\n def _repr_html_(self): return {PAGE}\n def _repr_png_(self): return b'x' * (3 << 20)\nPage()"
    for result in (cloche.run(code), session.run(code)):
        (output,) = result.outputs
        assert (output.data["text/html"], len(output.data["image/png"])) == (eval(PAGE), 3 << 20)


def test_many_outputs_are_cut(session: Session) -> None:
    """A cell may show more than is kept: what is left out is said, and the session goes on."""
    result = session.run("for n in range(3000): display(n)")
    assert (result.ok, len(result.outputs), result.meta["outputs_cut"]) == (True, 500, True)
    again = session.run("display(1)")
    assert (len(again.outputs), "outputs_cut" in again.meta) == (1, False)
    large = session.run("from IPython.display import HTML\nfor n in range(9): display(HTML('x' * (5 << 20)))")
    assert (large.ok, len(large.outputs), large.meta["outputs_cut"]) == (True, 5, True)
