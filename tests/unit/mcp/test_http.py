"""Tokens have equal shares of the sessions that the old revisions have; no more JSON comes than may be parsed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx2
import pytest

from cloche.mcp.http import create_app
from cloche.mcp.server import create_server
from tests.harness.json_shapes import SHAPES

HELLO = {
    "jsonrpc": "2.0", "id": 1, "method": "initialize",
    "params": {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}},
}  # fmt: skip
MINE, YOURS, THEIRS = "a-token-of-mine-0123456789", "a-token-of-yours-0123456789", "a-token-of-theirs-0123456789"


def opened(tokens: Sequence[str], callers: Sequence[str | None], *, most: int, ending: int | None = None) -> list[int]:
    """Return what each of several clients is answered that opens a session; `ending` ends its own at once."""

    async def main() -> list[int]:
        app = create_app(create_server(tokens=tokens), most_sessions=most)
        transport = httpx2.ASGITransport(app=app)
        found = []
        async with app.router.lifespan_context(app), httpx2.AsyncClient(transport=transport) as client:
            for number, token in enumerate(callers):
                headers: dict[str, str] = {"accept": "application/json, text/event-stream"}
                if token is not None:
                    headers["authorization"] = f"Bearer {token}"
                url: Any = "http://localhost/mcp"
                said = await client.post(url, json=HELLO, headers=headers)
                found.append(said.status_code)
                if number == ending:
                    headers["mcp-session-id"] = said.headers["mcp-session-id"]
                    assert (await client.delete(url, headers=headers)).status_code == 200
        return found

    return asyncio.run(main())


def test_no_token_keeps_another_one_out() -> None:
    """Each gets its share, however much the others ask for, and no more."""
    callers = [*[MINE] * 4, *[YOURS] * 4, *[THEIRS] * 4]
    assert opened([MINE, YOURS, THEIRS], callers, most=7) == [200, 200, 503, 503] * 3


def test_one_that_ends_makes_room_for_its_owner() -> None:
    """And for nobody else."""
    assert opened([MINE, YOURS], [MINE, MINE, MINE, YOURS], most=2, ending=0) == [200, 200, 503, 200]


@pytest.mark.parametrize("tokens", [[], [MINE], [MINE, MINE]])
def test_one_token_and_none_have_all(tokens: list[str]) -> None:
    """There is nobody to share with."""
    callers = [tokens[0] if tokens else None] * 4
    assert opened(tokens, callers, most=3) == [200, 200, 200, 503]


def answered(body: bytes, revision: str, *, piece: int) -> tuple[int, int]:
    """Return the status of a request with this body, and how much of it was taken before."""

    async def main() -> tuple[int, int]:
        app = create_app(create_server())
        taken, statuses = 0, list[int]()

        async def receive() -> Any:
            nonlocal taken
            sent, taken = body[taken : taken + piece], min(len(body), taken + piece)
            return {"type": "http.request", "body": sent, "more_body": taken < len(body)}

        async def send(message: Any) -> None:
            statuses.extend([message["status"]] if "status" in message else [])

        headers = {
            "host": "localhost", "content-type": "application/json", "mcp-protocol-version": revision,
            "accept": "application/json, text/event-stream",
        }  # fmt: skip
        scope = {
            "type": "http", "method": "POST", "path": "/mcp", "query_string": b"", "http_version": "1.1",
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        }  # fmt: skip
        async with app.router.lifespan_context(app):
            await app(scope, receive, send)
        return statuses[0], taken

    return asyncio.run(main())


@pytest.mark.parametrize("revision", ["2025-11-25", "2026-07-28"])
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if "too long" not in shape])
def test_no_more_json_comes_than_may_be_parsed(shape: str, revision: str) -> None:
    """Each shape is refused before all of it has come; so nothing of it was parsed."""
    head = b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"x","arguments":'
    body = head + SHAPES[shape]()
    status, taken = answered(body, revision, piece=1 << 10)
    assert status == 413
    assert taken < len(body)
