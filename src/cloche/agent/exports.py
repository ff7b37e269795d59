"""The tools as model providers and agent frameworks want to be told of them."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from cloche.core.errors import BackendUnavailable, InvalidRequest

from .toolbox import Answer, Toolbox
from .wording import clip, sendable


def openai_tools(toolbox: Toolbox) -> list[dict[str, Any]]:
    """Return the tools for `tools=` of OpenAI's chat completions."""
    return [
        {"type": "function", "function": {"name": t.wire_name, "description": t.description, "parameters": t.schema}}
        for t in toolbox.tools
    ]


def anthropic_tools(toolbox: Toolbox) -> list[dict[str, Any]]:
    """Return the tools for `tools=` of Anthropic's messages."""
    return [{"name": t.wire_name, "description": t.description, "input_schema": t.schema} for t in toolbox.tools]


async def answer_openai(toolbox: Toolbox, call: Mapping[str, Any]) -> dict[str, Any]:
    """Answer one entry of an assistant message's `tool_calls` (as a dict), with the message that follows it."""
    function = call["function"]
    answer = await _call_with_json(toolbox, function["name"], function["arguments"])
    return {"role": "tool", "tool_call_id": call["id"], "content": answer.text}


async def answer_anthropic(toolbox: Toolbox, block: Mapping[str, Any]) -> dict[str, Any]:
    """Answer one `tool_use` block (as a dict), with the `tool_result` block; figures are images in it."""
    answer = await toolbox.call(block["name"], block["input"])
    content: list[dict[str, Any]] = [{"type": "text", "text": answer.text}]
    for image in answer.images:
        source = {"type": "base64", "media_type": image.mime, "data": image.base64}
        content.append({"type": "image", "source": source})
    return {"type": "tool_result", "tool_use_id": block["id"], "content": content, "is_error": answer.is_error}


async def _call_with_json(toolbox: Toolbox, name: str, arguments: str | Mapping[str, Any]) -> Answer:
    """Call a tool with arguments as JSON text, which a model may have got wrong; some servers send an object."""
    import json

    if isinstance(arguments, Mapping):
        return await toolbox.call(name, arguments)
    try:
        read = json.loads(arguments or "{}")
    except (ValueError, TypeError, RecursionError) as error:
        told = f"InvalidRequest: {name}: the arguments are not JSON: {error}"
        return Answer(text=sendable(clip(told)), is_error=True)
    return await toolbox.call(name, read)


def langchain_tool(toolbox: Toolbox, name: str = "run_code") -> Any:  # noqa: ANN401 - of a package that may be missing
    """Return a `StructuredTool` for LangChain, by default `run_code`.

    Raises BackendUnavailable without the package `langchain-core`, InvalidRequest for a tool that is not here.
    """
    try:
        structured_tool = import_module("langchain_core.tools").StructuredTool
    except ImportError as error:
        raise BackendUnavailable(
            "LangChain's tools need the package langchain-core.", remedy='Install it with "pip install cloche[agents]".'
        ) from error
    tool = next((one for one in toolbox.tools if name in (one.name, one.wire_name)), None)
    if tool is None:
        raise InvalidRequest(
            f"there is no tool {name!r} here; there is: {', '.join(one.name for one in toolbox.tools)}"
        )

    async def call(**arguments: Any) -> tuple[str, Answer]:  # noqa: ANN401 - checked by the tool
        answer = await toolbox.call(tool.name, arguments)
        return answer.text, answer

    def call_and_wait(**arguments: Any) -> tuple[str, Answer]:  # noqa: ANN401 - checked by the tool
        answer = toolbox.call_and_wait(tool.name, arguments)
        return answer.text, answer

    return structured_tool(
        name=tool.wire_name,
        description=tool.description,
        args_schema=tool.schema,
        func=call_and_wait,
        coroutine=call,
        response_format="content_and_artifact",
    )
