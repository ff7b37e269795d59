"""The protocol of SandboxFusion: how long a request may wait, what it gets, which words an end has; large answers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from cloche.config.settings import load_settings
from cloche.core.limits import MIB
from cloche.core.result import Result, Status, Usage
from cloche.server.routes.sandbox_fusion import fusion_options
from cloche.server.sandbox_fusion import CodeRequest, FusionAnswer, is_compiled, language_of, limits_of
from cloche.server.service import Service, ServiceOptions
from cloche.wire.bodies import validated
from cloche.wire.shares import Budget

REQUEST = {"code": "1", "language": "python", "compile_timeout": 10, "run_timeout": 20}


def test_a_request_waits_as_long_as_its_answer_is_in_time() -> None:
    """Verl waits for both time limits and 10 s; of these 2 s are spare, and the limits that apply are its own."""
    request = validated(CodeRequest, REQUEST)
    assert request.most_wait_s(is_compiled=False) == 10 + 20 + 10 - 2 - 20
    assert request.most_wait_s(is_compiled=True) == 10 - 2


@pytest.mark.parametrize(
    ("memory_mb", "got", "notes"),
    [(None, 256, 0), (-1, 256, 0), (0, 256, 0), (100, 100, 0), (1, 16, 0), (512, 512, 0), (1e300, 512, 1)],
)
def test_a_request_gets_what_it_asks_for_up_to_the_ceiling(memory_mb: float | None, got: int, notes: int) -> None:
    """Of memory and time; what is lowered is said."""
    settings = load_settings({})
    ceilings = {"memory_bytes": 512 * MIB, "timeout_s": 60.0}
    object.__setattr__(settings, "ceilings", ceilings)
    limits = limits_of(settings, memory_mb=memory_mb, seconds={"run_timeout": 70, "compile_timeout": 60})
    assert limits.memory_bytes == got * MIB
    assert limits.seconds == {"run_timeout": 60, "compile_timeout": 60}
    assert len(limits.notes) == notes + 1


def _words(**parts: Any) -> tuple[str, Any]:
    told = json.loads(FusionAnswer(**parts).encode())
    row = told["run_result"] or told["compile_result"]
    return told["status"], (row["status"], row["return_code"])


def test_the_words_of_each_end() -> None:
    """Never their word for a failure of the service."""
    ok, failed = (
        Result("", "", 0, 1.0, usage=Usage(cpu_user_s=0.1)),
        Result("", "", 137, 1.0, status=Status.OUT_OF_MEMORY),
    )
    late = Result("part", "", -1, 1.0, timed_out=True)
    assert _words(ran=ok) == ("Success", ("Finished", 0))
    assert _words(ran=failed) == ("Failed", ("Finished", 137))
    assert _words(ran=late) == ("Failed", ("TimeLimitExceeded", None))
    assert _words(compiled=failed) == ("Failed", ("Finished", 137))
    assert _words(compiled=ok, ran=failed) == ("Failed", ("Finished", 137))
    assert json.loads(FusionAnswer(ran=ok).encode())["run_result"]["cpu_time"] == 0.1
    assert FusionAnswer(ran=Result("\udcff", "", 0, 1.0)).encode()


def test_their_names_of_languages() -> None:
    """Those that Cloche has, and C++, which is compiled by commands."""
    names = ("python", "nodejs", "typescript", "bash", "ruby", "go", "rust", "csharp", "cpp")
    languages = [language for name in names if (language := language_of(name)) is not None]
    assert len(languages) == len(names)
    assert [language.name for language in languages if is_compiled(language)] == ["go", "rust", "csharp", "cpp"]
    assert all(language_of(name) is None for name in ("", "javascript", "java", "Python", "python2"))


@pytest.mark.parametrize(("options", "output"), [({}, 8 * MIB), ({"output_limit": "1m"}, MIB)])
def test_the_mode_has_limits_of_its_own_where_the_operator_set_none(options: dict[str, Any], output: int) -> None:
    """An argument of the service counts more."""

    class Stored(Service):
        def __init__(self) -> None:
            self.options = ServiceOptions(options=options)  # type: ignore[arg-type]

        async def use_stored(self) -> None:
            pass

    limits = load_settings(asyncio.run(fusion_options(Stored()))).limits
    assert (limits.output_bytes, limits.memory_bytes, limits.cpus) == (output, 1024 * MIB, 1.0)


def test_large_answers_take_turns() -> None:
    """One larger than all the memory is taken alone, and who is cancelled is passed over."""

    async def main() -> None:
        budget, order = Budget(10), list[int]()

        async def take(count: int) -> None:
            await budget.take(count)
            order.append(count)

        await take(50)
        tasks = [asyncio.ensure_future(take(count)) for count in (6, 4, 3)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        await asyncio.sleep(0)
        budget.give_back(50)
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (order, budget.held) == ([50, 6, 3], 9)

    asyncio.run(main())
