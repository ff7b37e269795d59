"""The tools of an MCP server as functions that a program in a sandbox may call.

    async with mcp_tools("python -m my_server") as tools:
        result = await cloche.arun(program, tools=tools)

Needs the extra `mcp`.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from cloche.core.errors import BackendUnavailable, InvalidRequest
from cloche.functions.tool import Tool, tool_of_schema

try:
    from mcp import ClientSession, StdioServerParameters
    from mcp import types as mcp_types
    from mcp.client.stdio import stdio_client
    from mcp.client.streamable_http import streamable_http_client
except ImportError as error:
    raise BackendUnavailable("MCP tools need the package mcp.", remedy="pip install cloche[mcp]") from error

MOST_PAGES = 100


@asynccontextmanager
async def mcp_tools(server: str | Sequence[str], *, env: Mapping[str, str] | None = None) -> AsyncIterator[list[Tool]]:
    """Connect to an MCP server and yield its tools, until the block ends: a command that starts it, or its URL.

    `env` are variables of the command. The server runs with the caller's rights, outside of any sandbox. Raises
    InvalidRequest for a text that is neither.
    """
    async with AsyncExitStack() as stack:
        if isinstance(server, str) and server.startswith(("http://", "https://")):
            streams = await stack.enter_async_context(streamable_http_client(server))
        else:
            command, *arguments = shlex.split(server) if isinstance(server, str) else server or [""]
            if not command:
                raise InvalidRequest("mcp_tools: give the command that starts a server, or its URL")
            parameters = StdioServerParameters(command=command, args=arguments, env=dict(env) if env else None)
            streams = await stack.enter_async_context(stdio_client(parameters))
        session = await stack.enter_async_context(ClientSession(streams[0], streams[1]))
        await session.initialize()
        yield [_tool(session, row) async for row in _rows(session)]


async def _rows(session: ClientSession) -> AsyncIterator[Any]:
    cursor: str | None = None
    for _ in range(MOST_PAGES):
        page = await session.list_tools(params=mcp_types.PaginatedRequestParams(cursor=cursor))
        for row in page.tools:
            yield row
        cursor = page.next_cursor
        if not cursor:
            return


def _tool(session: ClientSession, row: Any) -> Tool:
    async def call(arguments: dict[str, Any]) -> Any:
        answer: Any = await session.call_tool(row.name, arguments)
        texts = [part.text if getattr(part, "type", "") == "text" else f"[{part.type}]" for part in answer.content]
        if answer.is_error:
            raise RuntimeError("\n".join(texts) or f"{row.name} failed")
        if answer.structured_content is not None:
            return answer.structured_content
        return _value("\n".join(texts))

    return tool_of_schema(row.name, row.description or "", row.input_schema or {}, call)


def _value(text: str) -> Any:
    """Return the value of a text that is a JSON object or list, any other text as it is."""
    if text[:1] not in ("{", "["):
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text
