"""The MCP server as a user starts it, spoken to by the protocol package's own client at both of its eras."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mcp import MCPError
from mcp_types import MISSING_REQUIRED_CLIENT_CAPABILITY

from tests.mcp_clients import MODES, Place, User, accept, http_server, images_of, no, run, text_of, token_file, yes

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


@pytest.fixture(params=["stdio", "http"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """Give a server by each transport."""
    if request.param == "http":
        found: Place = request.getfixturevalue("over_http")
        return found
    return Place(args=TIER_4, home=tmp_path)


@pytest.mark.parametrize("mode", MODES)
def test_a_client_runs_code_and_its_user_decides(place: Place, mode: str) -> None:
    """A HIGH call runs when its user approves, and not otherwise; the result is text, data and a figure."""

    async def work() -> None:
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

    run(work)


@pytest.mark.parametrize("mode", MODES)
def test_a_critical_call_is_approved_and_confirmed_every_time(place: Place, mode: str, tmp_path: Path) -> None:
    """On the host nothing runs before both questions were answered with yes; no answer holds for the next call."""

    async def work() -> None:
        user = User(says=yes)
        async with place.client(mode, user) as client:
            call = {"command": f"echo once >> {tmp_path}/mark"}
            for count in (1, 2):
                done = await client.call_tool("os_execute", call)
                assert not done.is_error, text_of(done)
                assert len(user.asked) == 2 * count
            assert user.asked[0].startswith("Approve os.execute (critical, on the host)")
            assert user.asked[1].startswith("Confirm once more")
            assert (tmp_path / "mark").read_text() == "once\nonce\n"

            user.says = accept(approve=True, remember=True)  # to the second question that is no answer
            assert (await client.call_tool("os_execute", call)).is_error
            user.says = no
            assert (await client.call_tool("os_execute", call)).is_error
            assert (tmp_path / "mark").read_text() == "once\nonce\n"

    run(work)


@pytest.mark.parametrize("mode", MODES)
def test_a_client_that_cannot_ask_is_refused(place: Place, mode: str, tmp_path: Path) -> None:
    """Without elicitation neither HIGH nor CRITICAL runs, and the error says what is missing; LOW does."""

    async def work() -> None:
        async with place.client(mode) as client:
            calls = {"run_code": {"code": "print(1)"}, "os_execute": {"command": f"touch {tmp_path}/mark"}}
            for name, arguments in calls.items():
                with pytest.raises(MCPError, match="cannot ask its user") as caught:
                    await client.call_tool(name, arguments)
                assert caught.value.error.code == MISSING_REQUIRED_CLIENT_CAPABILITY
            assert not (tmp_path / "mark").exists()
            listed = await client.call_tool("list_files", {})
            assert text_of(listed) == "There are no files."

    run(work)
