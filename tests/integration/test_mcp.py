"""The MCP server as a user starts it, spoken to by the protocol package's own client at both of its eras."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest
from mcp import MCPError
from mcp_types import MISSING_REQUIRED_CLIENT_CAPABILITY, ElicitResult, InputRequiredResult

from tests.harness.mcp import (
    MODES,
    Place,
    User,
    accept,
    http_server,
    images_of,
    no,
    run,
    text_of,
    token_file,
    until,
    yes,
)
from tests.harness.processes import seen
from tests.harness.texts import blocks

TOKEN = "a-token-of-the-tests-0123456789"
OTHER_TOKEN = "another-token-of-the-tests-0123456789"
# Code that tools run is HIGH here, in a sandbox; os_execute on the host is CRITICAL.
TIER_4 = ("--tier", "4", "--backend", "local")
FIGURE = """\
import matplotlib.pyplot as plt
plt.plot([1, 2, 4])
plt.show()
"""


@pytest.fixture(scope="module")
def over_http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Give a server that several clients use."""
    home = tmp_path_factory.mktemp("mcp")
    with http_server([*TIER_4, "--token-file", token_file(home, TOKEN, OTHER_TOKEN)], home) as (_, url):
        yield Place(url=url, token=TOKEN)


# Over standard streams each test starts servers of its own: one does in `make test`, all do in the soak.
BY_EACH_TRANSPORT = pytest.mark.parametrize(
    "place", [pytest.param("stdio", marks=pytest.mark.soak), "http"], indirect=True
)


@pytest.fixture(params=["stdio", "http"])
def place(request: pytest.FixtureRequest, over_http: Place, tmp_path: Path) -> Place:
    """Give a server by each transport."""
    return over_http if request.param == "http" else Place(args=TIER_4, home=tmp_path)


@pytest.fixture(params=MODES)
def hosted(request: pytest.FixtureRequest, over_http: Place) -> Callable[..., Any]:
    """Give a way to open clients over HTTP at each revision."""
    return partial(over_http.client, request.param)


def at_both(work: Callable[[str], Awaitable[None]]) -> None:
    """Do something at both revisions, at the same time: most of it is waiting for processes."""

    async def noted(mode: str) -> None:
        try:
            await work(mode)
        except BaseException as error:
            error.add_note(f"at revision {mode}")
            raise

    run(lambda: asyncio.gather(*map(noted, MODES)))


def test_a_client_runs_code_and_its_user_decides(place: Place) -> None:
    """A HIGH call runs when its user approves, and not otherwise; the result is text, data and a figure."""

    async def work(mode: str) -> None:
        user = User(says=yes)
        async with place.client(mode, user) as client:
            ran = await client.call_tool("run_code", {"code": "print('out')\n6 * 7"})
            assert not ran.is_error
            assert text_of(ran) == "out\n[value]\n42"
            told: dict[str, Any] = ran.structured_content or {}
            assert (told["status"], told["exit_code"], told["stdout"], told["value"]) == ("ok", 0, "out\n", 42)
            assert (told["backend"], told["level"]) == ("local", "jail")
            assert "print('out')\n6 * 7" in user.asked[0]
            assert "high" in user.asked[0]

            drawn = await client.call_tool("run_python_code", {"code": FIGURE})
            assert base64.b64decode(images_of(drawn)[0].data).startswith(b"\x89PNG\r\n")

            for refusal in (no, accept(approve=False), accept(), accept(approve="yes")):
                user.says = refusal
                denied = await client.call_tool("run_code", {"code": "print('not to be seen')"})
                assert denied.is_error
                assert text_of(denied).startswith("ApprovalDenied: run_code was not approved by the user of 'mcp'")

    at_both(work)


@BY_EACH_TRANSPORT
def test_a_critical_call_is_approved_and_confirmed_every_time(place: Place, tmp_path: Path) -> None:
    """On the host nothing runs before both questions were answered with yes; no answer holds for the next call."""

    async def work(mode: str) -> None:
        user = User(says=yes)
        async with place.client(mode, user) as client:
            call = {"command": f"echo once >> {tmp_path}/{mode}"}
            for count in (1, 2):
                done = await client.call_tool("os_execute", call)
                assert not done.is_error, text_of(done)
                assert len(user.asked) == 2 * count
            assert user.asked[0].startswith("Approve os.execute (critical, on the host)")
            assert user.asked[1].startswith("Confirm once more")
            assert (tmp_path / mode).read_text() == "once\nonce\n"

            user.says = accept(approve=True, remember=True)  # to the second question that is no answer
            assert (await client.call_tool("os_execute", call)).is_error
            user.says = no
            assert (await client.call_tool("os_execute", call)).is_error
            assert (tmp_path / mode).read_text() == "once\nonce\n"

    at_both(work)


@BY_EACH_TRANSPORT
def test_a_client_that_cannot_ask_is_refused(place: Place, tmp_path: Path) -> None:
    """Without elicitation neither HIGH nor CRITICAL runs, and the error says what is missing; LOW does."""

    async def work(mode: str) -> None:
        async with place.client(mode) as client:
            calls = {"run_code": {"code": "print(1)"}, "os_execute": {"command": f"touch {tmp_path}/{mode}"}}
            for name, arguments in calls.items():
                with pytest.raises(MCPError, match="cannot ask its user") as caught:
                    await client.call_tool(name, arguments)
                assert caught.value.error.code == MISSING_REQUIRED_CLIENT_CAPABILITY
            assert not (tmp_path / mode).exists()
            session = (await client.call_tool("open_session", {})).structured_content or {}
            listed = await client.call_tool("list_files", {"session": session["session"]})
            assert text_of(listed) == "There are no files."

    at_both(work)


@BY_EACH_TRANSPORT
def test_a_cancelled_call_kills_its_code(place: Place) -> None:
    """What a call runs, in a sandbox or on the host, is there while it runs and gone when the client gives it up."""

    async def work(mode: str) -> None:
        async with place.client(mode, User(says=yes)) as client:
            for tool in ("os_execute_sandboxed", "os_execute"):
                word = f"4{time.monotonic_ns() % 10**9}.5"
                call = asyncio.ensure_future(client.call_tool(tool, {"command": f"sleep {word} & wait"}))
                assert await until(lambda word=word: seen(word)), call
                call.cancel()
                await asyncio.wait({call})
                assert await until(lambda word=word: not seen(word))
            after = await client.call_tool("run_python_code", {"code": "print('still here')"})
            assert text_of(after) == "still here"

    at_both(work)


def test_progress_is_told_while_code_runs(over_http: Place) -> None:
    """The seconds go up, towards what the call may take."""
    told: list[tuple[float, float | None, str | None]] = []

    async def hear(progress: float, total: float | None, message: str | None) -> None:
        told.append((progress, total, message))

    async def work() -> None:
        async with over_http.client(MODES[1], User(says=yes)) as client:
            code = "import time; time.sleep(4)"
            await client.call_tool("run_code", {"code": code, "timeout": 20}, progress_callback=hear)

    run(work)
    assert len(told) >= 2
    assert [progress for progress, *_ in told] == sorted({progress for progress, *_ in told})
    assert {total for _, total, _ in told} == {20.0}


@pytest.mark.soak  # a server of its own
def test_the_operators_secrets_are_placeholders_and_are_shown_to_who_approves(tmp_path: Path) -> None:
    """The question has name and hosts; neither that nor an answer has the value."""
    (tmp_path / "value").write_text("sk-proj-0123456789abcdefghij")
    secret = f"OPENAI_API_KEY=file:{tmp_path}/value@api.openai.com"
    place, user = Place(args=(*TIER_4, "--secret", secret), home=tmp_path), User(says=yes)

    async def work() -> None:
        async with place.client("legacy", user) as client:
            ran = await client.call_tool("run_code", {"code": "import os; print(os.environ['OPENAI_API_KEY'])"})
            assert text_of(ran).startswith("sk-proj-")
            assert "0123456789abcdefghij" not in f"{ran} {user.asked}"
            assert "OPENAI_API_KEY" in user.asked[0]
            assert "api.openai.com" in user.asked[0]

    run(work)


def test_no_argument_widens_the_sandbox(hosted: Callable[..., Any]) -> None:
    """Options of the sandbox are no arguments of a tool: named they are refused, and nobody is asked."""
    user = User(says=yes)

    async def work() -> None:
        async with hosted(user) as client:
            for name, value in {
                "memory": "8g", "network": "open", "tier": 4, "backend": "none", "level": "none", "env": {}, "cpus": 4,
                "approve": True, "best_effort": ["network"], "_meta": {}, "session_id": "x",
            }.items():  # fmt: skip
                said = await client.call_tool("run_code", {"code": "print('ran')", name: value})
                assert said.is_error
                assert f"there is no argument {name!r}" in text_of(said)
            odd = await client.call_tool("run_code", {"code": "print('ran')", "session": 3})
            assert "session must be of type string" in text_of(odd)
            for tool in (await client.list_tools()).tools:
                if not tool.name.endswith("_session"):
                    assert tool.input_schema["additionalProperties"] is False
        assert user.asked == []

    run(work)


def test_tools_say_what_they_are(hosted: Callable[..., Any]) -> None:
    """Every tool has a title, hints that are all set, and schemas of what goes in and comes out."""

    async def work() -> None:
        async with hosted() as client:
            tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert set(tools) == {
            "run_code", "run_python_code", "code_exec", "code_execute", "os_execute_sandboxed", "os_execute",
            "read_file", "list_files", "write_file", "edit_file", "open_session", "close_session",
        }  # fmt: skip
        for tool in tools.values():
            hints = tool.annotations
            assert hints is not None
            assert tool.title == hints.title
            assert tool.title
            assert None not in (hints.read_only_hint, hints.destructive_hint, hints.idempotent_hint)
            assert hints.open_world_hint is (tool.name == "os_execute")
            assert hints.read_only_hint is (tool.name in ("read_file", "list_files"))
            assert tool.output_schema is not None
        assert "exit_code" in (tools["run_code"].output_schema or {})["properties"]

    run(work)


def test_files_belong_to_a_client(hosted: partial[Any], over_http: Place) -> None:
    """Files stay between the calls of one session, and no other client comes near them, with whatever token."""

    async def work() -> None:
        user = User(says=yes)
        async with hosted(user) as client, hosted(User(says=yes)) as other:
            is_stateless = client.protocol_version == "2026-07-28"
            opened = (await client.call_tool("open_session", {})).structured_content or {}
            mine = {"session": opened["session"]}
            for place in (mine, {}):
                await client.call_tool("run_code", {"code": "open('kept', 'w').write('here')", **place})
            assert text_of(await client.call_tool("read_file", {"path": "kept", **mine})) == "here"

            at_home = await client.call_tool("read_file", {"path": "kept"})
            assert at_home.is_error is is_stateless  # there, a call without a session has nothing to come back to
            assert ("open_session" if is_stateless else "here") in text_of(at_home)
            elsewhere = await other.call_tool("run_code", {"code": "import os; print(os.path.exists('kept'))"})
            assert text_of(elsewhere) == "False"

            thief = replace(over_http, token=OTHER_TOKEN)
            async with thief.client(str(hosted.args[0]), User(says=yes)) as third:
                for call in (
                    third.call_tool("read_file", {"path": "kept", **mine}),
                    third.call_tool("close_session", mine),
                ):
                    stolen = await call
                    assert stolen.is_error
                    assert "this session does not exist" in text_of(stolen)

            assert not (await client.call_tool("close_session", mine)).is_error
            gone = await client.call_tool("read_file", {"path": "kept", **mine})
            assert "this session does not exist" in text_of(gone)

    run(work)


def test_a_high_call_may_be_remembered_in_a_session(hosted: Callable[..., Any]) -> None:
    """The same code is not asked for again, other code is; what changed is shown."""

    async def work() -> None:
        user = User(says=accept(approve=True, remember=True))
        async with hosted(user) as client:
            opened = (await client.call_tool("open_session", {})).structured_content or {}
            place = {"session": opened["session"]}
            for _ in range(3):
                said = await client.call_tool("run_code", {"code": "print('same')", **place})
                assert text_of(said) == "same"
            assert len(user.asked) == 1
            await client.call_tool("run_code", {"code": "print('other')", **place})
            assert len(user.asked) == 2
            assert "-code: print('same')\n+code: print('other')" in user.asked[1]

    run(work)


def test_an_approval_is_good_for_one_call(over_http: Place, tmp_path: Path) -> None:
    """Where the client brings the answers, bringing them twice, or for another call, runs nothing."""

    async def work() -> None:
        async with over_http.client("2026-07-28", User(says=yes)) as client:
            session = client.session
            call = {"command": f"echo ran >> {tmp_path}/mark"}
            state, answers = None, None
            for content in ({"approve": True}, {"confirm": True}):
                asked = await session.call_tool(
                    "os_execute", call, input_responses=answers, request_state=state, allow_input_required=True
                )
                assert isinstance(asked, InputRequiredResult)
                state = asked.request_state
                answers = {key: ElicitResult(action="accept", content=content) for key in asked.input_requests or {}}

            async def bring(arguments: dict[str, Any]) -> Any:
                return await session.call_tool(
                    "os_execute", arguments, input_responses=answers, request_state=state, allow_input_required=True
                )

            with pytest.raises(MCPError, match="Invalid or expired requestState"):
                await bring({"command": f"echo other >> {tmp_path}/mark"})
            assert not (tmp_path / "mark").exists()
            assert not (await bring(call)).is_error
            again = await bring(call)
            assert again.is_error
            assert "already used" in text_of(again)
            assert (tmp_path / "mark").read_text() == "ran\n"

    run(work)


HELLO = {
    "jsonrpc": "2.0", "id": 1, "method": "initialize",
    "params": {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}},
}  # fmt: skip
ACCEPT = {"accept": "application/json, text/event-stream"}


def test_http_has_a_door_keeper(over_http: Place) -> None:
    """Without a token, with a wrong one, under another name or from another origin nobody gets in."""
    token = {"authorization": f"Bearer {TOKEN}"}
    cases: list[tuple[dict[str, str], int]] = [
        ({}, 401),
        ({"authorization": "Bearer"}, 401),
        ({"authorization": f"Basic {TOKEN}"}, 401),
        ({"authorization": f"Bearer {TOKEN}x"}, 401),
        ({"authorization": f"Bearer {TOKEN[:-1]}"}, 401),
        ({**token, "host": "evil.example"}, 421),
        ({**token, "origin": "http://evil.example"}, 403),
        ({**token, "origin": "null"}, 403),
        ({**token, "origin": "http://localhost:3000"}, 200),
        (token, 200),
    ]
    with httpx2.Client(timeout=60) as client:
        for headers, status in cases:
            with client.stream("POST", over_http.url, json=HELLO, headers={**ACCEPT, **headers}) as answer:
                assert answer.status_code == status, headers
        assert client.get(over_http.url.replace("/mcp", "/healthz")).json() == {"status": "ok"}
        assert client.get(over_http.url, headers=ACCEPT).status_code == 401


def test_a_session_that_ends_takes_its_code_along(over_http: Place) -> None:
    """When a client of 2025-11-25 ends its session, what a call of it runs is ended, and the session is gone."""
    word = f"6{time.monotonic_ns() % 10**9}.5"
    hello = {**HELLO, "params": {**HELLO["params"], "capabilities": {"elicitation": {}}}}  # type: ignore[dict-item]
    call = {"jsonrpc": "2.0", "id": 2, "method": "tools/call",
            "params": {"name": "os_execute_sandboxed", "arguments": {"command": f"sleep {word}"}}}  # fmt: skip

    async def answer_when_asked(client: httpx2.AsyncClient) -> None:
        async with client.stream("POST", over_http.url, json=call) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {") and json.loads(line[6:]).get("method") == "elicitation/create":
                    yes_ = {"action": "accept", "content": {"approve": True}}
                    reply = {"jsonrpc": "2.0", "id": json.loads(line[6:])["id"], "result": yes_}
                    assert (await client.post(over_http.url, json=reply)).status_code == 202

    async def work() -> None:
        headers = {**ACCEPT, "authorization": f"Bearer {TOKEN}", "mcp-protocol-version": "2025-11-25"}
        async with httpx2.AsyncClient(headers=headers, timeout=60) as client:
            begun = await client.post(over_http.url, json=hello)
            client.headers["mcp-session-id"] = begun.headers["mcp-session-id"]
            await client.post(over_http.url, json={"jsonrpc": "2.0", "method": "notifications/initialized"})
            calling = asyncio.ensure_future(answer_when_asked(client))
            assert await until(lambda: seen(word))
            assert (await client.delete(over_http.url)).status_code == 200
            assert await until(lambda: not seen(word))
            assert (await client.post(over_http.url, json={**call, "id": 3})).status_code == 404
            calling.cancel()
            await asyncio.wait({calling})

    run(work)


DOCUMENT = Path(__file__).parents[2] / "docs" / "mcp.md"
CONFIGURATIONS = [
    server for text in blocks(DOCUMENT, "json") for table in json.loads(text).values() for server in table.values()
]


def test_the_configurations_in_the_document_work(over_http: Place, tmp_path: Path) -> None:
    """What clients are told to start, or to connect to, is there and runs code."""

    async def work(server: dict[str, Any]) -> None:
        if "url" in server:
            assert server["url"].endswith(over_http.url.rpartition("/")[2])
            token = server["headers"]["Authorization"].removeprefix("Bearer ")
            place = replace(over_http, token={"YOUR-TOKEN": TOKEN}[token])
        else:
            assert (server["command"], server["args"][0]) == ("cloche", "mcp")
            place = Place(args=tuple(server["args"][1:]), home=tmp_path)
        user = None if "--approve" in place.args else User(says=yes)
        async with place.client("legacy", user) as client:
            assert text_of(await client.call_tool("run_code", {"code": "print(6 * 7)"})) == "42"

    assert len(CONFIGURATIONS) == 4
    run(lambda: asyncio.gather(*map(work, CONFIGURATIONS)))
