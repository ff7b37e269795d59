"""The tools as providers and frameworks are told of them, held against the providers' own packages."""

import asyncio
import base64
import functools
import inspect
import json
from types import SimpleNamespace
from typing import Any, Literal, get_type_hints

import pytest

from cloche.agent.answers import Answer, Image
from cloche.agent.catalog import TOOLS, Tool, describe_with_interpreters, read_arguments
from cloche.agent.exports import (
    answer_anthropic,
    answer_openai,
    answer_openai_response,
    anthropic_tools,
    openai_response_tools,
    openai_tools,
    plain_functions,
)
from cloche.agent.toolbox import Toolbox

# As they are in a table, and as they are where interpreters go on.
TOLD = (
    *TOOLS.values(),
    *(describe_with_interpreters(tool, ("python", "javascript", "bash")) for tool in TOOLS.values()),
)
# What OpenAI's strict mode takes in a schema; `default`, say, is refused with the whole request.
STRICT = {
    "type",
    "properties",
    "required",
    "additionalProperties",
    "description",
    "enum",
    "minimum",
    "exclusiveMinimum",
}
PIXEL = base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(16)).decode()


@pytest.fixture(scope="module")
def packages() -> SimpleNamespace:
    """Give the providers' types. They take seconds to be read: only the process that runs these tests does it."""
    import pydantic
    from anthropic import types as anthropic
    from openai.types import chat, responses
    from openai.types.responses import response_input_param

    fits = functools.partial(_fits, pydantic.TypeAdapter)
    return SimpleNamespace(fits=fits, anthropic=anthropic, chat=chat, responses=responses, inputs=response_input_param)


def _fits(adapter: Any, kind: Any, value: object) -> None:
    """Hold a value against a type of a provider's package, which names every key that is allowed."""
    allowed = set(kind.__annotations__)
    for base in getattr(kind, "__orig_bases__", ()):
        allowed |= set(getattr(base, "__annotations__", ()))
    assert isinstance(value, dict)
    assert set(value) <= allowed
    adapter(kind).validate_python(value)


class Figures(Toolbox):
    """Answer every call with text and a figure."""

    async def call(self, name: str, arguments: Any = None) -> Answer:
        """Answer."""
        return Answer(text=f"{name} {json.dumps(arguments)}", images=(Image(mime="image/png", base64=PIXEL),))


@pytest.mark.parametrize("is_strict", [False, True])
def test_openai_takes_every_tool(packages: SimpleNamespace, is_strict: bool) -> None:
    """Its package's own types, of chat completions and of responses."""
    for told in openai_tools(TOLD, is_strict=is_strict):
        packages.fits(packages.chat.ChatCompletionFunctionToolParam, told)
        assert told["function"].get("strict", False) is is_strict
    for told in openai_response_tools(TOLD, is_strict=is_strict):
        packages.fits(packages.responses.FunctionToolParam, {"strict": None, **told})


def test_anthropic_takes_every_tool(packages: SimpleNamespace) -> None:
    """Its package's own type."""
    for told in anthropic_tools(TOLD):
        packages.fits(packages.anthropic.ToolParam, told)


@pytest.mark.parametrize("told", openai_tools(TOLD, is_strict=True), ids=[*TOOLS, *map("live {}".format, TOOLS)])
def test_a_strict_schema_keeps_openais_rules(told: dict[str, Any]) -> None:
    """All arguments required, no others, no key that strict mode does not know."""
    schema = told["function"]["parameters"]
    assert schema["additionalProperties"] is False
    assert schema["required"] == list(schema["properties"])
    for part in (schema, *schema["properties"].values()):
        assert set(part) <= STRICT
    for about in schema["properties"].values():
        assert "enum" not in about or (None in about["enum"]) == ("null" in about["type"])


@pytest.mark.parametrize("tool", TOLD, ids=[*TOOLS, *map("live {}".format, TOOLS)])
def test_null_is_the_default_where_there_is_one_and_nowhere_else(tool: Tool) -> None:
    """As a strict schema has it."""
    required = {name: "x" for name, about in tool.properties.items() if "default" not in about}
    optional = {name: about["default"] for name, about in tool.properties.items() if "default" in about}
    assert read_arguments(tool, required | dict.fromkeys(optional)) == required | optional
    for name in required:
        with pytest.raises(Exception, match=f"{name} must be of type string, not NoneType"):
            read_arguments(tool, {**required, name: None})


def test_calls_of_the_providers_packages_are_answered_in_their_types(packages: SimpleNamespace) -> None:
    """Objects as they come, figures as images where the protocol has them, else a word about them."""

    async def main() -> list[Any]:
        async with Figures() as tools:
            function: Any = {"name": "run_code", "arguments": '{"code": "1"}'}
            chat = packages.chat.ChatCompletionMessageFunctionToolCall(id="c1", type="function", function=function)
            item = packages.responses.ResponseFunctionToolCall(type="function_call", call_id="c2", **function)
            block = packages.anthropic.ToolUseBlock(type="tool_use", id="b1", name="run_code", input={"code": "1"})
            return [
                await answer_openai(tools, chat),
                await answer_openai_response(tools, item),
                await answer_anthropic(tools, block),
            ]

    chat, item, block = asyncio.run(main())
    packages.fits(packages.chat.ChatCompletionToolMessageParam, chat)
    packages.fits(packages.inputs.FunctionCallOutput, item)
    packages.fits(packages.anthropic.ToolResultBlockParam, block)
    assert chat["tool_call_id"] == "c1"
    assert (
        chat["content"] == 'run_code {"code": "1"}\n[Figures that cannot be shown here: 1. Print their data instead.]'
    )
    assert item["call_id"] == "c2"
    assert item["output"][1]["image_url"] == f"data:image/png;base64,{PIXEL}"
    assert block["content"][1]["source"] == {"type": "base64", "media_type": "image/png", "data": PIXEL}


def test_plain_functions_tell_frameworks_what_they_take() -> None:
    """By signature, annotations and docstring."""
    functions = plain_functions(Toolbox())
    assert set(functions) == {tool.wire_name for tool in TOOLS.values() if 3 in tool.tiers}
    run = functions["code_execute"]
    assert run.__name__ == "code_execute"
    assert inspect.iscoroutinefunction(run)
    assert inspect.signature(run).parameters["language"].annotation == Literal["python", "csharp"]
    assert inspect.signature(run).parameters["language"].default == "python"
    assert get_type_hints(run)["timeout"] is float
    assert "    language: The language." in (run.__doc__ or "")
    live = plain_functions(Toolbox(interpreters=True))["run_code"]
    assert get_type_hints(live)["restart"] is bool
    assert inspect.signature(live).parameters["restart"].default is False


def test_plain_functions_never_raise_for_what_a_model_did() -> None:
    """Arguments that do not exist, too many of them, none: an answer in words."""

    async def main() -> list[str]:
        async with Toolbox() as tools:
            do = plain_functions(tools)
            return [
                await do["write_file"]("a", content="kept"),
                await do["read_file"](path="a"),
                await do["read_file"](path="a", network="open"),
                await do["read_file"]("a", 0, 1, 2),
                await do["read_file"](),
                await do["run_code"]("1"),
            ]

    wrote, kept, unknown, many, none, denied = asyncio.run(main())
    assert wrote == "Wrote 4 characters to a."
    assert kept == "kept"
    assert unknown.startswith("InvalidRequest: read_file: ")
    assert "network" in unknown
    assert many.startswith("InvalidRequest: read_file: too many positional arguments")
    assert none == "InvalidRequest: read_file: the argument 'path' is missing"
    assert denied.startswith("ApprovalDenied: ")
