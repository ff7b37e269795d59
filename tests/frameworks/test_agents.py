"""Tools of OpenAI Agents, smolagents, Pydantic AI and LangChain, of their own packages, as functions for a program."""

from __future__ import annotations

from typing import Any

import pytest
from agents import function_tool
from langchain_core.tools import tool as langchain_tool
from pydantic_ai import Tool as PydanticTool
from smolagents import Tool as SmolTool
from smolagents import tool as smolagents_tool

import cloche
from cloche.functions.tool import stubs

PROGRAM = """
from cloche_host import HostError, {name} as multiply

def refusal():
    try:
        multiply("three")
    except HostError as error:
        return str(error)

[multiply(3), multiply(number=3, times=5), refusal()]
"""


def multiply(number: int, times: int = 2) -> int:
    """Multiply a number.

    Args:
        number: any number
        times: how often
    """
    return number * times


class Multiply(SmolTool):
    """Be a tool that is a class, as most of smolagents' are."""

    name, description, output_type = "multiply", "Multiply a number.", "integer"
    inputs = {  # noqa: RUF012 - as smolagents asks for
        "number": {"type": "integer", "description": "any number"},
        "times": {"type": "integer", "description": "how often", "nullable": True},
    }

    def forward(self, number: int, times: int | None = None) -> int:
        """Do it."""
        return number * (times or 2)


TOOLS = {
    "openai": lambda: function_tool(multiply),
    "smolagents": lambda: smolagents_tool(multiply),
    "smolagents, a class": Multiply,
    "pydantic_ai": lambda: PydanticTool(multiply),
    "langchain": lambda: langchain_tool(multiply),
}


@pytest.mark.parametrize("kind", TOOLS)
def test_a_list_of_tools_is_called_from_a_program_as_it_is(kind: str) -> None:
    """With the tool's name, description and parameters; wrong arguments are refused before it is asked."""
    tool: Any = TOOLS[kind]()
    assert "Multiply a number." in stubs([tool])
    result = cloche.run(PROGRAM.format(name=tool.name), tools=[tool])
    assert result.value == [6, 15, "number must be an integer, not text"], result.stderr


def test_tools_of_several_frameworks_are_one_list() -> None:
    """Beside plain functions, by names that a mapping gives."""
    tools: Any = {f"f{index}": make() for index, make in enumerate(TOOLS.values())}
    code = f"from cloche_host import *\n[{', '.join(f'{name}(4)' for name in tools)}, plain(4)]"
    assert cloche.run(code, tools={**tools, "plain": multiply}).value == [8] * (len(tools) + 1)
