"""Tools of other libraries as functions that a program calls, and one tool for a model in place of many."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar

import pytest
from langchain_core.tools import tool as langchain_tool

import cloche
from cloche.agent.code_mode import code_mode
from cloche.core.errors import InvalidRequest
from cloche.functions.tool import stubs
from cloche.integrations.mcp_tools import mcp_tools

pytestmark = pytest.mark.usefixtures("settings_of_nobody")

SERVER = """
from mcp.server import MCPServer

server = MCPServer("shop")

@server.tool()
def price(item: str, currency: str = "EUR") -> dict[str, str]:
    "Return the price of an item."
    if item == "nothing":
        raise ValueError("there is no such item")
    return {"item": item, "price": f"5 {currency}"}

"""
USES_SERVER = """
from cloche_host import HostError, price

found = [price("saw"), price(item="hammer", currency="USD")]
try:
    price("nothing")
except HostError as error:
    found.append(str(error))
try:
    price(5)
except HostError as error:
    found.append(str(error))
found
"""


@contextmanager
def by_command() -> Iterator[list[str]]:
    """Have the server started as a child, which speaks over its standard input and output."""
    yield [sys.executable, "-c", f"{SERVER}server.run()"]


@contextmanager
def by_url() -> Iterator[str]:
    """Serve at a port of loopback, by streamable HTTP."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    code = f"{SERVER}server.run(transport='streamable-http', host='127.0.0.1', port={port})"
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True) as process:
        try:
            assert any("running on" in line for line in process.stderr or ())
            yield f"http://127.0.0.1:{port}/mcp"
        finally:
            process.kill()


@pytest.mark.parametrize("served", [by_command, by_url])
def test_an_mcp_servers_tools_are_functions(served: Callable[[], AbstractContextManager[Any]]) -> None:
    """With its schema as a signature, its results as values, its errors as errors."""

    async def claim(server: Any) -> None:
        async with mcp_tools(server) as tools:
            assert "def price(item: str, currency: str = ...):" in stubs(tools)
            result = await cloche.arun(USES_SERVER, tools=tools)
        values = result.value
        assert values[:2] == [{"item": "saw", "price": "5 EUR"}, {"item": "hammer", "price": "5 USD"}], result.stderr
        assert values[2] == "Error executing tool price"
        assert values[3] == "item must be text, not an integer"

    with served() as server:
        asyncio.run(claim(server))


@pytest.mark.parametrize(
    "server", ["no-such-server --token SECRET", f"{sys.executable} -c pass", "http://127.0.0.1:9/SECRET"]
)
def test_a_server_that_does_not_answer_is_one_error(server: str) -> None:
    """Not a group of them, and without the words of its command or its path, which may be credentials."""

    async def connect() -> None:
        async with mcp_tools(server):
            raise AssertionError

    with pytest.raises(cloche.BackendUnavailable, match=r"mcp_tools: the server .* does not answer: ") as caught:
        asyncio.run(connect())
    assert "SECRET" not in str(caught.value)


def test_an_error_of_the_block_stays_what_it_is() -> None:
    """A connection's group of tasks does not wrap it."""

    async def connect() -> None:
        with by_command() as server:
            async with mcp_tools(server):
                raise KeyError("of the block")

    with pytest.raises(KeyError):
        asyncio.run(connect())


@langchain_tool
def of_langchain(number: int, times: int = 2) -> int:
    """Multiply a number."""
    return number * times


class OfOpenAI:
    """Be a function tool as that of OpenAI's agents."""

    name, description = "of_openai", "Multiply a number."
    params_json_schema: ClassVar[dict[str, Any]] = {
        "type": "object", "required": ["number"],
        "properties": {"number": {"type": "integer", "description": "any"}, "times": {"type": ["integer", "null"]}},
    }  # fmt: skip

    async def on_invoke_tool(self, _context: object, arguments: str) -> int:
        """Call it with arguments as JSON."""
        values = json.loads(arguments)
        return int(values["number"] * values.get("times", 2))


class OfSmolagents:
    """Be a tool as those of smolagents."""

    name, description, output_type = "of_smolagents", "Multiply a number.", "integer"
    inputs: ClassVar[dict[str, Any]] = {
        "number": {"type": "integer", "description": "any"},
        "times": {"type": "integer", "description": "how often", "nullable": True},
    }

    def forward(self, number: int, times: int | None = 2) -> int:
        """Do it."""
        return number * (times or 1)

    def __call__(self, **values: Any) -> int:
        """Do it, as an agent does."""
        return self.forward(**values)


class OfPydanticAI:
    """Be a tool as those of Pydantic AI."""

    def __init__(self, function: Callable[..., Any], *, takes_ctx: bool = False) -> None:
        self.function, self.takes_ctx = function, takes_ctx
        self.name, self.description = "of_pydantic_ai", "Multiply a number."


def multiply(number: int, times: int = 2) -> int:
    """Multiply."""
    return number * times


@pytest.mark.parametrize("tool", [of_langchain, OfOpenAI(), OfSmolagents(), OfPydanticAI(multiply)], ids=type)
def test_tools_of_frameworks_are_taken_as_they_are(tool: Any) -> None:
    """With name, description and parameters; what is left out stays left out."""
    code = f"from cloche_host import {tool.name} as f; [f(3), f(number=3, times=5)]"
    result = cloche.run(code, tools=[tool])
    assert result.value == [6, 15], result.stderr
    assert f"def {tool.name}(number: int" in stubs([tool])
    assert "Multiply a number." in stubs([tool])
    refused = cloche.run(f"from cloche_host import {tool.name} as f; f('3')", tools=[tool])
    assert "number must be an integer, not text" in refused.stderr


def test_a_tool_that_needs_its_framework_is_refused() -> None:
    """A function that takes the context of a run gets none here."""
    with pytest.raises(InvalidRequest, match="takes the context of a run"):
        cloche.run("1", tools=[OfPydanticAI(multiply, takes_ctx=True)])  # type: ignore[list-item]


def test_code_mode_is_one_tool_with_the_stubs_of_all() -> None:
    """A model reads in its description what a program may call, and gets what it prints, or why it failed."""
    run_program = code_mode([multiply])
    assert "def multiply(number: int, times: int = 2) -> int:" in (run_program.__doc__ or "")
    program = "from cloche_host import multiply; print(sum(multiply(n) for n in range(10)))"
    assert asyncio.run(run_program(program)) == "90\n"
    assert "number must be an integer" in asyncio.run(run_program("from cloche_host import multiply; multiply('x')"))
