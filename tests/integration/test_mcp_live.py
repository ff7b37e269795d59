"""Interpreters that go on between the calls of an MCP client, over both transports and at both eras of the protocol."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from mcp import Client
from mcp_types import CallToolResult

from cloche.agent.approval import auto
from cloche.mcp.server import create_server
from tests.harness.audits import lines_of
from tests.harness.mcp import (
    MODES,
    Place,
    User,
    http_server,
    images_of,
    run,
    text_of,
    token_file,
    until,
    yes,
)
from tests.harness.processes import seen

TOKEN = "a-token-of-the-tests-0123456789"
OTHER_TOKEN = "another-token-of-the-tests-0123456789"
FIGURE = "import matplotlib.pyplot as plt\nplt.plot(data)\nplt.show()"


@pytest.fixture(scope="module")
def over_http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Give a server that several clients use."""
    home = tmp_path_factory.mktemp("live")
    with http_server(["--token-file", token_file(home, TOKEN, OTHER_TOKEN)], home) as (_, url):
        yield Place(url=url, token=TOKEN)


# Over standard streams each test starts servers of its own.
@pytest.fixture(params=[pytest.param("stdio", marks=pytest.mark.soak), "http"])
def place(request: pytest.FixtureRequest, over_http: Place, tmp_path: Path) -> Place:
    """Give a server by each transport."""
    return over_http if request.param == "http" else Place(home=tmp_path)


class Cells:
    """Call `run_code` in the session that a client has, or opened where it has none by itself."""

    def __init__(self, client: Client, session: str):
        self.client, self.session = client, {"session": session} if session else {}

    async def __call__(self, code: str, **more: Any) -> CallToolResult:
        return await self.client.call_tool("run_code", {"code": code, **self.session, **more})


@asynccontextmanager
async def cells_of(place: Place, mode: str, user: User) -> AsyncIterator[Cells]:
    """Give a client that runs cells."""
    async with place.client(mode, user) as client:
        session = ""
        if place.url and client.protocol_version == "2026-07-28":
            session = ((await client.call_tool("open_session", {})).structured_content or {})["session"]
        yield Cells(client, session)


def state_of(result: CallToolResult) -> str:
    """Return what became of the interpreter."""
    return str((result.structured_content or {})["state"])


def at_both(work: Any) -> None:
    """Do something at both revisions, at the same time."""
    run(lambda: asyncio.gather(*map(work, MODES)))


def test_what_a_call_defined_is_there_in_the_next(place: Place) -> None:
    """Variables, and a figure of them; each call is approved."""

    async def work(mode: str) -> None:
        user = User(says=yes)
        async with cells_of(place, mode, user) as ask:
            assert state_of(await ask("data = [1, 2, 4]")) == "new"
            drawn = await ask(FIGURE)
            assert (state_of(drawn), len(images_of(drawn))) == ("kept", 1)
            assert len(user.asked) == 2
            assert "an interpreter that goes on between calls" in user.asked[0]
            for language, first, second in (("bash", "x=7", "echo $x"), ("javascript", "let x = 7", "console.log(x)")):
                await ask(first, language=language)
                assert text_of(await ask(second, language=language)) == "7"

    at_both(work)


def test_another_client_comes_near_nothing(over_http: Place) -> None:
    """Of one server; over stdio each client has a server of its own."""

    async def work(mode: str) -> None:
        async with cells_of(over_http, mode, User(says=yes)) as ask, cells_of(over_http, mode, User(says=yes)) as other:
            assert state_of(await ask("data = 1")) == "new"
            assert text_of(await other("'data' in globals()")) == "[value]\nfalse"

    at_both(work)


def test_a_time_out_keeps_it_and_memory_and_a_restart_do_not(place: Place) -> None:
    """Each is said, in words and as data; the next call works in any case."""

    async def work(mode: str) -> None:
        async with cells_of(place, mode, User(says=yes)) as ask:
            await ask("x = 1")
            late = await ask("import time; time.sleep(60)", timeout=5)
            assert (late.is_error, state_of(late)) == (True, "kept")
            assert "The interpreter goes on" in text_of(late)
            assert text_of(await ask("x")) == "[value]\n1"
            killed = await ask("y = [b'x' * 1_000_000 for _ in range(1000)]")
            assert (killed.is_error, state_of(killed)) == (True, "lost")
            assert "memory" in text_of(killed)
            assert "what earlier calls defined is gone" in text_of(killed)
            after = await ask("'x' in globals()")
            assert (text_of(after), state_of(after)) == ("[value]\nfalse", "new")
            await ask("x = 2")
            fresh = await ask("'x' in globals()", restart=True)
            assert (text_of(fresh), state_of(fresh)) == ("[value]\nfalse", "new")

    at_both(work)


def test_a_call_that_is_cancelled_keeps_it(place: Place) -> None:
    """Its cell is interrupted, with the program that it waits for."""

    async def work(mode: str) -> None:
        word = f"7{time.monotonic_ns() % 10**9}.5"
        async with cells_of(place, mode, User(says=yes)) as ask:
            await ask("x = 1")
            call = asyncio.ensure_future(ask(f"import subprocess; subprocess.run(['sleep', '{word}'])"))
            assert await until(lambda: seen(word)), call
            call.cancel()
            await asyncio.wait({call})
            assert await until(lambda: not seen(word))
            after = await ask("x")
            assert (text_of(after), state_of(after)) == ("[value]\n1", "kept")

    at_both(work)


def test_without_a_session_nothing_is_kept(over_http: Place) -> None:
    """Where every request stands alone a call begins anew; `restart` is taken there, and widens nothing."""

    async def work() -> None:
        async with over_http.client("2026-07-28", User(says=yes)) as client:
            ask = Cells(client, "")
            assert state_of(await ask("x = 1")) == "none"
            assert text_of(await ask("'x' in globals()", restart=True)) == "[value]\nfalse"
            assert "restart must be of type boolean" in text_of(await ask("1", restart="yes"))

    run(work)


@asynccontextmanager
async def server_for(mode: str, **options: Any) -> AsyncIterator[Client]:
    """Give a client of a server in this process."""
    async with Client(create_server(approve=auto("high"), **options), mode=mode) as client:
        yield client


async def _opened(client: Client) -> Cells:
    opened = (await client.call_tool("open_session", {})).structured_content or {}
    return Cells(client, opened["session"])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.usefixtures("settings_of_nobody")
def test_a_server_has_few_of_them(mode: str) -> None:
    """The least recently used one is put away, which the next call in it says; its files are still there."""

    async def work() -> None:
        async with server_for(mode, interpreters=1) as client:
            mine, yours = await _opened(client), await _opened(client)
            await mine("x = 1; open('f', 'w').close()")
            await yours("x = 2")
            back = await mine("import os; ['x' in globals(), os.listdir()]")
            assert "is gone: it was put away as the one that was used least recently" in text_of(back)
            assert text_of(back).endswith('[false, ["f"]]')
            assert state_of(back) == "new"

    run(work)


@pytest.mark.parametrize("options", [{"interpreters": 0}, {"tier": 4}])
@pytest.mark.usefixtures("settings_of_nobody")
def test_a_server_without_them_has_no_restart(options: dict[str, Any]) -> None:
    """Neither has one whose code runs on the host: there every call begins anew."""

    async def work() -> None:
        async with server_for("legacy", **options) as client:
            tools = {tool.name: tool for tool in (await client.list_tools()).tools}
            assert "restart" not in tools["run_code"].input_schema["properties"]
            said = await client.call_tool("run_code", {"code": "1", "restart": True})
            assert "there is no argument 'restart'" in text_of(said)

    run(work)


@pytest.mark.usefixtures("settings_of_nobody")
def test_calls_of_a_session_take_turns_and_are_executions(tmp_path: Path) -> None:
    """Fifty at once find each the state that the one before it left, and each is in the log."""
    count = 50

    async def work() -> None:
        async with server_for("legacy", audit=tmp_path / "log") as client:
            ask = Cells(client, "")
            await ask("n = 0")
            said = await asyncio.gather(
                *(ask("k = n; import time; time.sleep(0.001); n = k + 1; n") for _ in range(count))
            )
            assert sorted(int(text_of(one).removeprefix("[value]\n")) for one in said) == [*range(1, count + 1)]

    run(work)
    ended = [event for line in lines_of(tmp_path / "log") if (event := json.loads(line))["kind"] == "execution"]
    assert [one["what"] for one in ended] == ["cell"] * (count + 1)
    assert len({one["call"] for one in ended}) == count + 1
