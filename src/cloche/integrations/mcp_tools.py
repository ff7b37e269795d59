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
from urllib.parse import urlsplit

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
    InvalidRequest for a text that is neither, and BackendUnavailable where no server answers.
    """
    is_open = False
    try:
        async with AsyncExitStack() as stack:
            session = await _connect(stack, server, env)
            tools = [_tool(session, row) async for row in _rows(session)]
            is_open = True
            yield tools
    except Exception as error:
        cause = _cause(error)
        if is_open or isinstance(cause, InvalidRequest):
            raise cause from None
        raise BackendUnavailable(
            f"mcp_tools: the server {_name(server)!r} does not answer: {cause}.",
            remedy="Start it by itself to see why.",
        ) from error


async def _connect(stack: AsyncExitStack, server: str | Sequence[str], env: Mapping[str, str] | None) -> ClientSession:
    if _is_url(server):
        streams = await stack.enter_async_context(streamable_http_client(str(server)))
    else:
        command, *arguments = shlex.split(server) if isinstance(server, str) else server or [""]
        if not command:
            raise InvalidRequest("mcp_tools: give the command that starts a server, or its URL")
        parameters = StdioServerParameters(command=command, args=arguments, env=dict(env) if env else None)
        streams = await stack.enter_async_context(stdio_client(parameters))
    session = await stack.enter_async_context(ClientSession(streams[0], streams[1]))
    await session.initialize()
    return session


def _is_url(server: str | Sequence[str]) -> bool:
    return isinstance(server, str) and server.startswith(("http://", "https://"))


def _name(server: str | Sequence[str]) -> str:
    """Return the host of a URL, or the program of a command; the rest may have credentials."""
    if _is_url(server):
        return urlsplit(str(server)).hostname or ""
    return server.split(maxsplit=1)[0] if isinstance(server, str) else server[0]


def _cause(error: Exception) -> Exception:
    """Return the only error in groups of one, which those of task groups are."""
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


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
