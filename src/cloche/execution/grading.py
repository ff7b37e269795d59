"""Check a program against cases, each in a throwaway sandbox of its own: `cloche.check`.

Theory of operation: a case is one run, so nothing of an earlier one is left. For standard input the program itself
runs, and its end is what the supervisor saw. For a call, `interpreter/graded_call` runs inside with the program and the
arguments; the values that it sends are read by `core/literal`. Expected answers stay in this process: they are in no
argument, file or message of a run, and reasons do not repeat them. An answer that is long is judged in a thread.
"""

from __future__ import annotations

import asyncio
import functools
import marshal
from collections.abc import Callable, Iterable, Mapping
from importlib.util import MAGIC_NUMBER
from types import CodeType
from typing import Any, Unpack

from cloche.config.options import SandboxOptions
from cloche.config.settings import list_options_in_signature
from cloche.core.enforcement import Level
from cloche.core.errors import (
    AuditFailed,
    BackendUnavailable,
    InternalError,
    InvalidRequest,
    OutcomeUnknown,
    StartFailed,
)
from cloche.core.escape import escape, utf8_safe
from cloche.core.grading import (
    MAX_OUTPUT_CHARS,
    MAX_WHY_CHARS,
    WEAK_TESTS,
    CallCase,
    Case,
    CaseResult,
    CheckVerdict,
    Outcome,
    StdinCase,
    conclude,
    read_cases,
    shown_values,
)
from cloche.core.languages import language_named
from cloche.core.limits import MIB
from cloche.core.literal import NotLiteral, read_values
from cloche.core.loops import become_task, check_event_loop
from cloche.core.record import replace
from cloche.core.result import Result, Status

from .prepare import Prepared
from .run import PreparedRequest, prepare_program, prepare_request, run_once

OUTPUT_BYTES = 8 * MIB  # kept of each stream, unless the caller says otherwise: a cut answer would be a wrong one
SHORT_ANSWER_BYTES = 4096  # judged without a thread, with what is expected
WEAK_LEVEL = "level {level}: the program could read this process, which has the expected answers"
# Failures of Cloche, its backend or its host: they say nothing about the program.
INFRASTRUCTURE = (BackendUnavailable, StartFailed, OutcomeUnknown, InternalError, AuditFailed)


@list_options_in_signature
async def acheck(
    code: str,
    cases: str | Iterable[str | Mapping[str, Any]],
    *,
    language: str = "python",
    entry_point: str | None = None,
    stop_at_first: bool = False,
    in_program: bool = False,
    **options: Unpack[SandboxOptions],
) -> CheckVerdict:
    """Check a program against cases that it never sees, and return the verdict.

    A case is a mapping or text. `{"stdin": ..., "stdout": ...}` runs the program, which must end with exit code 0;
    `compare` is "tokens" (the default: words), "exact" (but for line feeds at the end) or "floats", with `tolerance`.
    `{"call": "add", "args": [1, 2], "result": 3}` calls a function of a Python program, also with `kwargs`; `tolerance`
    is for floats. Text has asserts such as `assert add(1, 2) == 3`, one case each, which are taken apart into calls and
    comparisons; `{"assert": ...}` is the same. HumanEval's `def check(candidate)` needs `entry_point`, the function's
    name. Every case may have a `timeout`.

    Each case runs in a sandbox of its own. Expected answers never enter it, and results come out as plain data: None,
    numbers, text, bytes, lists, tuples, sets, dictionaries. An assert that cannot be taken apart is an error; with
    `in_program`, asserts run beside the program, which can forge their success, and the verdict's `weak` says so. A
    failure of Cloche or its backend makes the verdict "undecided". With `stop_at_first` the cases after the first wrong
    answer are not run; an undecided case always ends the check. 8 MiB of output are kept unless `output_limit` says
    otherwise. The other keywords are those of `SandboxOptions`; `timeout` is for one case. Cancelling kills the run.

    Raises InvalidRequest (also for no cases), PolicyDenied.
    """
    check_event_loop()
    if not isinstance(code, str):
        raise InvalidRequest(f"code: give text, not {type(code).__name__}")
    read = read_cases(cases, entry_point=entry_point, in_program=in_program)
    if language_named(language).name != "python" and any(isinstance(case, CallCase) for case in read):
        raise InvalidRequest(f"cases: calls and asserts are for Python; give stdin and stdout for {language}")
    if options.get("output_limit") is None:
        options["output_limit"] = OUTPUT_BYTES
    await become_task()
    grading = _Grading(code, language, options, stop_at_first=stop_at_first)
    return await grading.check(read)


class _Grading:
    """Run the cases of one program, one after the other."""

    def __init__(self, code: str, language: str, options: SandboxOptions, *, stop_at_first: bool) -> None:
        self._code, self._language, self._options = code, language, options
        self._stop_at_first = stop_at_first
        self._prepared: Prepared | None = None
        self._template: PreparedRequest | None = None  # the checked program, without its input
        self._weak = ""

    async def check(self, cases: tuple[Case, ...]) -> CheckVerdict:
        results: list[CaseResult] = []
        ends_with: tuple[Outcome, ...] = ("undecided", "failed") if self._stop_at_first else ("undecided",)
        for number, case in enumerate(cases, 1):
            if results and results[-1].outcome in (*ends_with, "not_run"):
                results.append(CaseResult(number=number, outcome="not_run"))
            else:
                results.append(await self._check_one(number, case))
        return conclude(results, self._weak)

    async def _check_one(self, number: int, case: Case) -> CaseResult:
        try:
            result = await self._run(case)
        except INFRASTRUCTURE as error:
            return CaseResult(number=number, outcome="undecided", why=_cut(f"{type(error).__name__}: {error}"))
        self._note_weakness(case, result)
        size = len(result.stdout_bytes) + (len(case.expected) if isinstance(case, StdinCase) else 0)
        why, output = await _judged(functools.partial(self._judge, case, result), size)
        return CaseResult(
            number=number, outcome="failed" if why else "passed", output=utf8_safe(output), why=_cut(why),
            status=str(result.status), duration=result.duration,
        )  # fmt: skip

    async def _run(self, case: Case) -> Result:
        if self._prepared is None or self._template is None:
            self._prepared = await prepare_program(self._code, self._language, None, **self._options)
            self._template = await prepare_request(
                self._prepared, self._code, language=self._language, argv=(), stdin=b"", env=None, files=None
            )
        if isinstance(case, StdinCase):
            changes: dict[str, Any] = {"stdin": case.stdin}
        else:
            changes = {"code": guest_code(self._code, case)}
        request = replace(self._template.request, timeout_s=case.timeout_s, **changes)
        return await run_once(self._prepared, replace(self._template, request=request))

    def _note_weakness(self, case: Case, result: Result) -> None:
        if isinstance(case, CallCase) and not case.calls:
            self._weak = WEAK_TESTS
        elif result.enforcement.level < Level.CONFINED:
            self._weak = self._weak or WEAK_LEVEL.format(level=result.enforcement.level)

    def _judge(self, case: Case, result: Result) -> tuple[str, str]:
        """Return why a run's answer is wrong, empty if it is right, and the answer's text."""
        answer = result.stdout_bytes
        is_cut = self._prepared is not None and len(answer) > self._prepared.limits.output_bytes
        if isinstance(case, StdinCase):
            output = result.stdout[:MAX_OUTPUT_CHARS]
            why = _bad_end(result) or ("standard output is longer than output_limit" if is_cut else case.judge(answer))
            return why, output
        if not result.ok or not answer:
            return _bad_end(result) or f"the program ended before its result{_last_line(result)}", ""
        try:
            values = read_values(answer)
        except NotLiteral as error:
            return ("the result is longer than output_limit" if is_cut else str(error)), ""
        return case.judge(values), shown_values(values) if values else ""


async def _judged(judge: Callable[[], tuple[str, str]], size: int) -> tuple[str, str]:
    return judge() if size <= SHORT_ANSWER_BYTES else await asyncio.to_thread(judge)


def _bad_end(result: Result) -> str:
    """Return why a run is no answer: it did not end by itself with exit code 0."""
    if result.ok:
        return ""
    if result.status is Status.ERROR:
        return f"the program ended with exit code {result.exit_code}{_last_line(result)}"
    return f"the program's run ended as {result.status} (exit code {result.exit_code}){_last_line(result)}"


def _last_line(result: Result) -> str:
    lines = result.stderr[-MAX_WHY_CHARS:].strip().splitlines()
    return f": {escape(lines[-1])}" if lines else ""


def _cut(why: str) -> str:
    return utf8_safe(why if len(why) <= MAX_WHY_CHARS else f"{why[:MAX_WHY_CHARS]}...")


def guest_code(program: str, case: CallCase) -> str:
    """Return the code that makes a case's calls inside.

    It is in ASCII and does not contain `__future__`: `interpreter/oneshot` compiles that in a tenth of the time.
    """
    arguments = (program, case.setup, list(case.calls), _guest_text("graded_ends"))
    call = f"run({', '.join(map(ascii, arguments))})\n"
    return _guest_program() + call.replace("__future__", "_\\x5ffuture__")


@functools.cache
def _guest_program() -> str:
    """Return code that defines `run`. Compiling it inside would take as long as half a run: bytecode goes along."""
    source = _guest_text("graded_call")
    bytecode = marshal.dumps(_without_lines(compile(source, "graded_call.py", "exec", dont_inherit=True, optimize=2)))
    return (
        "import marshal, sys\n"
        f"if sys.modules['_frozen_importlib_external'].MAGIC_NUMBER == {MAGIC_NUMBER!r}:\n"
        f"    exec(marshal.loads({bytecode!r}))\n"
        f"else:\n    exec({source!a})\n"
    ).replace("__future__", "_\\x5ffuture__")


@functools.cache
def _guest_text(name: str) -> str:
    import importlib.resources  # with `tempfile` and `random`, which a first sandbox does without

    return importlib.resources.files("cloche.interpreter").joinpath(f"{name}.py").read_text("utf-8")


def _without_lines(code: CodeType) -> CodeType:
    """Return code without line numbers, which no traceback shows."""
    constants = tuple(_without_lines(value) if isinstance(value, CodeType) else value for value in code.co_consts)
    return code.replace(co_linetable=b"", co_consts=constants)
