"""`cloche.check` as its users call it: problems, wrong programs, languages, threads, loops, failures of a backend."""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner

import cloche
from cloche.cli import check as cli_check
from cloche.cli.app import root
from cloche.core.enforcement import Level
from cloche.core.errors import InvalidRequest, StartFailed
from cloche.core.result import Result
from cloche.testing.fake import FakeBackend

HUMAN_EVAL = '''
from typing import List

def has_close_elements(numbers: List[float], threshold: float) -> bool:
    """ Check if in given list of numbers, are any two numbers closer to each other than given threshold. """
    ordered = sorted(numbers)
    return any(b - a < threshold for a, b in zip(ordered, ordered[1:]))

if __name__ == "__main__":
    print(input())
'''
HUMAN_EVAL_TEST = """

METADATA = {"author": "x", "dataset": "test"}


def check(candidate):
    assert candidate([1.0, 2.0, 3.9, 4.0, 5.0, 2.2], 0.3) == True
    assert candidate([1.0, 2.0, 3.9, 4.0, 5.0, 2.2], 0.05) == False, "second"
    assert True, "This prints if this assert fails 1 (good for debugging!)"
    assert not candidate([1.0, 2.0, 5.9, 4.0, 5.0], 0.8)

"""


def test_a_problem_with_a_check_function() -> None:
    """A right program passes each assert by itself, a wrong one fails the ones that it should."""
    verdict = cloche.check(HUMAN_EVAL, HUMAN_EVAL_TEST, entry_point="has_close_elements")
    assert verdict.passed
    assert [case.output for case in verdict.cases] == ["True", "False", "False"]
    wrong = HUMAN_EVAL.replace("b - a < threshold", "b - a < 0.3")
    verdict = cloche.check(wrong, HUMAN_EVAL_TEST, entry_point="has_close_elements")
    assert [case.outcome for case in verdict.cases] == ["passed", "failed", "passed"]
    assert verdict.score == pytest.approx(2 / 3)


def test_a_problem_with_a_list_of_asserts() -> None:
    """Classes, derived types, generators and values of all kinds are compared as asserts compare them."""
    program = """
import collections
Point = collections.namedtuple("Point", "x y")
class Solution:
    def count(self, text):
        return collections.Counter(text)
def pair(): return Point(1, 2.5)
def numbers(n): yield from range(n)
def kinds():
    return [None, True, -7, 2**100, -0.0, float("inf"), "é\\ud800", b"\\xff", (1,), {2}, frozenset({3}), {"a": [1]}]
def nothing(x): x.append(1)
"""
    kinds = [None, True, -7, 2**100, -0.0, math.inf, "é\ud800", b"\xff", (1,), {2}, frozenset({3}), {"a": [1]}]
    tests = [
        "assert Solution().count('aab') == {'a': 2, 'b': 1}", "assert pair() == (1, 2.5) and pair().x == 1",
        "assert Solution().count('aab').keys() == {'a', 'b'}", "assert Solution().count('a').items() == {('a', 1)}",
        "assert list(numbers(3)) == [0, 1, 2]", "assert nothing([]) is None", "assert sum(numbers(5)) == 10",
        {"call": "kinds", "result": kinds},
        {"call": "pair", "result": (1, 2.5000001), "tolerance": 1e-3},
    ]  # fmt: skip
    verdict = cloche.check(program, tests)
    assert verdict.passed, verdict.why


def test_a_contest_problem_in_several_languages() -> None:
    """Standard input and output work for every language; the exit code counts."""
    cases = [{"stdin": "3 4\n", "stdout": "7"}, {"stdin": "-1 1\n", "stdout": "0\n"}]
    assert cloche.check("print(sum(map(int, input().split())))", cases).passed
    assert cloche.check("read a b; echo $((a + b))", cases, language="bash").passed
    verdict = cloche.check("read a b; echo $((a + b)); exit 3", cases, language="bash", stop_at_first=True)
    assert [case.outcome for case in verdict.cases] == ["failed", "not_run"]
    assert verdict.why == "case 1: the program ended with exit code 3"
    verdict = cloche.check("raise SystemExit('\\x1b[2J\\x9b')", cases)
    assert verdict.why == r"case 1: the program ended with exit code 1: \x1b[2J\x9b"
    with pytest.raises(cloche.InvalidRequest, match="for Python"):
        cloche.check("", "assert f(1) == 2", language="bash")


def test_reasons_name_the_program_s_failure() -> None:
    """The last line of the traceback, the time-out, and the missing result are told."""
    reasons = {
        "def f(:": "SyntaxError", "def g(): pass": "NameError: name 'f' is not defined",
        "def f(x): return object()": "type object", "def f(x): return f(x)": "RecursionError",
        "def f(x): raise ValueError('no')": "ValueError: no", "import sys; sys.exit('bye')": "SystemExit('bye')",
    }  # fmt: skip
    for program, reason in reasons.items():
        assert reason in cloche.check(program, [{"call": "f", "args": [1], "result": 1}]).why
    slow = cloche.check("while True: pass", [{"stdout": "", "timeout": "300ms"}])
    assert (slow.outcome, slow.cases[0].status) == ("failed", "timeout")


def test_a_long_answer_is_compared_in_whole() -> None:
    """Megabytes of output and of a result are no cut answer."""
    numbers = "\n".join(map(str, range(200_000)))
    verdict = cloche.check("for n in range(200_000): print(n)", [{"stdout": numbers, "compare": "exact"}], cpus=2)
    assert verdict.passed
    verdict = cloche.check(
        "def f(): return list(range(50_000))", [{"call": "f", "result": list(range(50_000))}], cpus=2
    )
    assert verdict.passed
    assert len(verdict.cases[0].output) < 5000


def test_it_is_called_from_threads_and_loops() -> None:
    """Several threads and a running loop may check at once."""
    passed: list[bool] = []
    threads = [
        threading.Thread(target=lambda: passed.append(cloche.check("def f(): return 1", "assert f() == 1").passed))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()

    async def in_loop() -> list[bool]:
        checks = [cloche.acheck("def f(): return 1", f"assert f() == {n}") for n in (1, 2)]
        return [verdict.passed for verdict in await asyncio.gather(*checks)] + [
            cloche.check("def f(): return 1", "assert f() == 1").passed
        ]

    assert asyncio.run(in_loop()) == [True, False, True]
    for thread in threads:
        thread.join()
    assert passed == [True] * 3


def test_a_failure_of_the_backend_is_no_wrong_answer() -> None:
    """The verdict is undecided and has no score, and the cases after it are not run."""
    backend = FakeBackend([Result("", "", 0, 0.0), StartFailed("no memory for a sandbox")])
    verdict = cloche.check("", [{"stdout": ""}] * 3, backend=backend)
    assert [case.outcome for case in verdict.cases] == ["passed", "undecided", "not_run"]
    assert (verdict.outcome, verdict.score, verdict.passed) == ("undecided", None, False)
    assert "no memory for a sandbox" in verdict.why
    unavailable = cloche.check("", [{"stdout": ""}], backend=FakeBackend(level=Level.CONFINED), require="jail")
    assert unavailable.outcome == "undecided"


def test_what_is_expected_is_in_no_request() -> None:
    """Neither code nor input, environment and files of a run hold it; a weak level is told."""
    backend = FakeBackend([Result("", "", 0, 0.0)] * 3, level=Level.PROCESS)
    cases = [
        {"call": "f", "args": [1], "result": "secret"},
        {"stdin": "1", "stdout": "secret"},
        "assert f(2) == 'secret'",
    ]
    verdict = cloche.check("def f(n): pass", cases, backend=backend)
    assert len(backend.requests) == 3
    for request in backend.requests:
        assert "secret" not in f"{request.code!r} {request.stdin!r} {request.argv} {request.env} {request.files}"
    assert verdict.weak.startswith("level process: ")


def test_the_command_says_what_failed(tmp_path: Path) -> None:
    """Exit codes tell passes, wrong answers and wrong usage apart."""
    program, cases = tmp_path / "f.py", tmp_path / "cases.jsonl"
    program.write_text("def f(): return 1")

    def run(*rows: object, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        cases.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        command = [sys.executable, "-m", "cloche", "check", str(program), "--cases", str(cases), *options]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)

    assert run("assert f() == 1").returncode == 0
    wrong = run("assert f() == 1", {"call": "f", "result": 2}, options=("--json",))
    assert wrong.returncode == 1
    assert json.loads(wrong.stdout)["score"] == 0.5
    unusable = run({"call": "f"})
    assert unusable.returncode == 2
    assert 'case 1: it has no "result"' in unusable.stderr


def test_a_file_of_cases_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a device, of which nothing tells the size; a missing program is no reason to offer an option of `run`."""
    monkeypatch.setattr(cli_check, "MAX_CASES_BYTES", 1 << 20)
    with pytest.raises(InvalidRequest, match="more than 1 MiB"):
        cli_check.read_case_lines("/dev/zero")
    ended = CliRunner().invoke(root, ["check", "none.py", "--cases", "none.jsonl"])
    assert (ended.exit_code, ended.output.strip().endswith("give a FILE, or - for stdin")) == (2, True), ended.output
