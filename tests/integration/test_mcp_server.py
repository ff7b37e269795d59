"""What a server made by `create_server` offers and does, asked by a client in the same process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from mcp import Client, MCPError
from mcp_types import ElicitResult

from cloche.agent.approval import Asked, Decided, Decision, auto
from cloche.agent.queue import ApprovalQueue
from cloche.core.errors import InvalidRequest
from cloche.mcp.server import create_server
from tests.harness.mcp import MODES, User, images_of, run, text_of, yes

FILES = {"read_file", "list_files", "write_file", "edit_file"}
CODE = {"run_code", "run_python_code", "code_exec", "code_execute", "os_execute_sandboxed"}
SESSIONS = {"open_session", "close_session"}


@pytest.fixture(autouse=True)
def _settings_of_nobody(settings_of_nobody: None) -> None:
    """Keep the machine's own configuration out."""


@asynccontextmanager
async def client_of(mode: str = "legacy", user: User | None = None, **options: Any) -> AsyncIterator[Client]:
    """Give a client of a server that is made for it."""
    async with Client(create_server(**options), mode=mode, elicitation_callback=user) as client:
        yield client


@pytest.mark.parametrize(
    ("tier", "expected"),
    [(1, FILES), (2, FILES), (3, FILES | CODE), (4, FILES | CODE | {"os_execute"}), (None, FILES | CODE)],
)
def test_a_tier_has_its_tools(tier: int | None, expected: set[str]) -> None:
    """The tools are those of the tier; what runs on the host says that it reaches out."""

    async def work() -> None:
        async with client_of(tier=tier) as client:
            tools = (await client.list_tools()).tools
        assert {tool.name for tool in tools} == expected | SESSIONS
        reaching = {tool.name for tool in tools if tool.annotations and tool.annotations.open_world_hint}
        assert reaching == (CODE | {"os_execute"} if tier == 4 else set())

    run(work)


def test_an_operator_offers_some() -> None:
    """Only the tools that are named are there, under either spelling; one that the tier lacks is an error."""

    async def work() -> None:
        async with client_of(tools=["run_code", "code_execute"]) as client:
            names = {tool.name for tool in (await client.list_tools()).tools}
        assert names == {"run_code", "code_execute"} | SESSIONS

    run(work)
    with pytest.raises(InvalidRequest, match=r"tier 3 has no tool 'os\.execute'"):
        create_server(tools=["os.execute"])


@pytest.mark.parametrize("mode", MODES)
def test_calls_in_a_row_are_each_approved(mode: str) -> None:
    """An answer belongs to its call, also where client and server share a task."""
    user = User(says=yes)

    async def work() -> None:
        async with client_of(mode, user) as client:
            for number in range(3):
                said = await client.call_tool("run_code", {"code": f"print({number})"})
                assert text_of(said) == str(number)

    run(work)
    assert len(user.asked) == 3


@pytest.mark.parametrize("mode", MODES)
def test_calls_at_once_are_each_approved_for_themselves(mode: str) -> None:
    """Of many calls at once those that the user approves run, and no other."""

    def even(message: str) -> ElicitResult:
        number = int(message.partition("print(")[2].partition(")")[0])
        return ElicitResult(action="accept", content={"approve": number % 2 == 0})

    async def work() -> None:
        async with client_of(mode, User(says=even), is_single_client=True) as client:
            calls = (client.call_tool("run_code", {"code": f"print({number})"}) for number in range(8))
            for number, said in enumerate(await asyncio.gather(*calls)):
                assert said.is_error is bool(number % 2)
                assert (text_of(said) == str(number)) is not said.is_error

    run(work)


def test_an_answer_that_does_not_come_is_a_no() -> None:
    """A user who says nothing is waited for as long as the operator wants."""

    async def work() -> None:
        async with client_of("legacy", User(), patience_s=0.3) as client:
            said = await client.call_tool("run_code", {"code": "print(1)"})
        assert said.is_error
        assert text_of(said) == "ApprovalDenied: run_code was not approved by time-out: no answer within 0.3 s"

    run(work)


def test_an_operators_rule_decides() -> None:
    """With `auto` a client without elicitation runs HIGH calls, and never a CRITICAL one."""

    async def work() -> None:
        async with client_of(approve=auto("high"), tier=4, backend="local") as client:
            assert text_of(await client.call_tool("run_code", {"code": "print(1)"})) == "1"
            assert (await client.call_tool("os_execute", {"command": "true"})).is_error

    run(work)


def test_a_queue_decides(tmp_path: Path) -> None:
    """Another process may approve, whatever the client can do."""
    queue = ApprovalQueue(tmp_path / "queue.db")

    async def decide() -> None:
        while not (waiting := queue.waiting()):  # noqa: ASYNC110 - as another process has to
            await asyncio.sleep(0.02)
        queue.decide(waiting[0].number, Decision(is_approved=True, by="someone"))

    async def work() -> None:
        async with client_of(MODES[1], approve=queue) as client:
            said, _ = await asyncio.gather(client.call_tool("run_code", {"code": "print(1)"}), decide())
        assert text_of(said) == "1"

    run(work)


def test_every_question_and_decision_is_an_event() -> None:
    """So is the refusal of a client that cannot ask."""
    events: list[Asked | Decided] = []

    async def work() -> None:
        async with client_of("legacy", User(says=yes), on_event=events.append) as client:
            await client.call_tool("run_code", {"code": "print(1)"})
        async with client_of("legacy", on_event=events.append) as client:
            with pytest.raises(MCPError):
                await client.call_tool("run_code", {"code": "print(1)"})

    run(work)
    decisions = [event.decision for event in events if isinstance(event, Decided)]
    assert [(one.is_approved, one.by) for one in decisions] == [(True, "the user of 'mcp'"), (False, "default")]
    assert [type(event) for event in events] == [Asked, Decided, Asked, Decided]


def _call(code: str, check: Callable[[Any], None], **options: Any) -> None:
    async def work() -> None:
        async with client_of(approve=auto("high"), **options) as client:
            check(await client.call_tool("run_code", {"code": code}))

    run(work)


def test_a_program_that_fails_says_how() -> None:
    """The result is an error, with words for the model and data for the program around it."""

    def check(said: Any) -> None:
        assert said.is_error
        assert "ended with exit code 3" in text_of(said)
        told = said.structured_content
        assert (told["status"], told["exit_code"], told["stderr"]) == ("error", 3, "why\n")

    _call("import sys; print('why', file=sys.stderr); sys.exit(3)", check)


def test_a_time_limit_is_the_operators() -> None:
    """A model may ask for less and not for more."""

    def check(said: Any) -> None:
        assert said.structured_content["status"] == "timeout"
        assert said.structured_content["duration_s"] < 20

    _call("while True: pass", check, timeout=1)


@pytest.mark.parametrize(
    ("code", "value", "is_repr"),
    [
        ("[1, {'a': None}]", [1, {"a": None}], False),
        ("float('nan')", "nan", True),
        ("'\\ud800'", "'\\ud800'", True),
        ("list(range(10_000))", None, True),
        ("import functools\nfunctools.reduce(lambda inner, _: [inner], range(300), 1)", None, True),
        ("object", "<class 'object'>", True),
    ],
)
def test_a_value_is_what_json_can_hold(code: str, value: Any, is_repr: bool) -> None:
    """Anything else, and what is long, comes as bounded text."""

    def check(said: Any) -> None:
        told = said.structured_content
        assert not said.is_error
        if value is not None:
            assert told["value"] == value
        assert told["value_is_repr"] is is_repr
        assert len(str(told["value"])) < 10_000

    _call(code, check, interpreters=0)  # a session has looks of its own for some


def test_output_is_bounded_and_sendable() -> None:
    """Much output is cut in text and data, and bytes that are no text break nothing."""

    def check(said: Any) -> None:
        assert len(text_of(said)) < 10_000
        assert len(said.structured_content["stdout"]) < 10_000
        assert "characters left out" in text_of(said)
        assert images_of(said) == []

    _call("import sys; sys.stdout.buffer.write(b'\\xff\\x00' + b'x' * 50_000)", check)
