"""`cloche check`: grade a program by a file of cases, one JSON value a line."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from cloche.core.errors import InvalidRequest

from .app import root
from .options import argument, flag, json_option, option, sandbox_options
from .output import EXIT_FAILED, show

if TYPE_CHECKING:
    from cloche.config.options import SandboxOptions
    from cloche.core.grading import CheckVerdict

MAX_CASES_BYTES = 256 << 20
_EXIT_BY_OUTCOME = {"passed": 0, "failed": 1}


@root.command("check", no_args_is_help=True)
@argument("file", metavar="FILE|-", help="The program to check (- is stdin).")
@option("--cases", required=True, metavar="FILE", help="One case a line, in JSON; docs/grading.md lists their keys.")
@option("--language", metavar="NAME", help="The program's language. Default: by file name or first line, else python.")
@option("--entry-point", metavar="NAME", help="The function that HumanEval's `check(candidate)` gets.")
@flag("--stop-at-first", help="Run no case after the first wrong answer.")
@flag("--in-program", help="Run asserts beside the program, which can then forge their success.")
@sandbox_options()
@json_option()
def _check(
    file: str,
    cases: str,
    language: str | None,
    entry_point: str | None,
    stop_at_first: bool,
    in_program: bool,
    as_json: bool,
    options: SandboxOptions,
) -> int:
    """Check a program against cases that it never sees.

    Each case runs in a throwaway sandbox. Exit codes: 0 all cases passed, 1 a wrong answer, 125 Cloche or its backend
    failed, 2 usage error.
    """
    from cloche.sync import check

    from .run import detect_source, read_source

    source = read_source((file,), None, choices="a FILE, or - for stdin")
    verdict = check(
        source.code, read_case_lines(cases), language=language or detect_source(source), entry_point=entry_point,
        stop_at_first=stop_at_first, in_program=in_program, **options,
    )  # fmt: skip
    if as_json:
        print(json.dumps(verdict.as_dict()))
    else:
        _show(verdict)
    return _EXIT_BY_OUTCOME.get(verdict.outcome, EXIT_FAILED)


def read_case_lines(name: str) -> list[Any]:
    """Return the cases of a file of JSON lines. Raises InvalidRequest naming the line."""
    cases, size = list[Any](), 0
    try:
        with open(name, "rb") as opened:
            for number, line in enumerate(iter(lambda: opened.readline(MAX_CASES_BYTES + 1), b""), 1):
                size += len(line)
                if size > MAX_CASES_BYTES:  # also a pipe or a device, whose size nothing tells
                    raise InvalidRequest(
                        f"--cases: {name!r} has more than {MAX_CASES_BYTES >> 20} MiB; give the cases in several files"
                    )
                if line.strip():
                    cases.append(_read_line(line.decode(), number))
    except OSError as error:
        raise InvalidRequest(f"--cases: cannot read {name!r}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"--cases: {name!r} is not UTF-8: {error}") from error
    return cases


def _read_line(line: str, number: int) -> Any:  # noqa: ANN401 - any JSON
    try:
        return json.loads(line.rstrip("\r\n"))
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"--cases: line {number} is not JSON: {error.msg} at character {error.pos}") from None
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"--cases: line {number} is not JSON: {error}") from None


def _show(verdict: CheckVerdict) -> None:
    rows = [
        {"case": case.number, "outcome": case.outcome, "seconds": f"{case.duration:.3f}", "why": case.why}
        for case in verdict.cases
    ]
    show(rows, as_json=False)
    passed = sum(case.passed for case in verdict.cases)
    print(f"{verdict.outcome}: {passed} of {len(verdict.cases)} cases passed")
    if verdict.weak:
        print(f"weak: {verdict.weak}")
