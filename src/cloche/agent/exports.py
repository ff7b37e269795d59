"""The tools in the formats of model providers, their answers in those formats, and plain functions."""

from __future__ import annotations

import inspect
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Literal, Protocol

from cloche.core.escape import utf8_safe

from .answers import Answer, clip
from .catalog import Tool
from .toolbox import Toolbox

Tools = Toolbox | Iterable[Tool]
ToolFunction = Callable[..., Awaitable[str]]
# What OpenAI's strict mode takes of a property's schema, besides `type`, which may then be null.
_STRICT_KEYS = ("description", "enum", "minimum", "exclusiveMinimum")
_TYPES: Mapping[str, type] = {"string": str, "number": float, "integer": int, "boolean": bool}


class Dumps(Protocol):
    """Be an object of a provider's own package, which can become plain data."""

    def model_dump(self) -> Mapping[str, Any]:
        """Return it as plain data."""
        ...


def openai_tools(tools: Tools, *, is_strict: bool = False) -> list[dict[str, Any]]:
    """Return the tools for `tools=` of OpenAI's chat completions.

    With `is_strict` the provider holds the model to the schema: every argument is then required, and null where the
    default is meant.
    """
    return [{"type": "function", "function": _openai_function(tool, is_strict=is_strict)} for tool in _each(tools)]


def openai_response_tools(tools: Tools, *, is_strict: bool = False) -> list[dict[str, Any]]:
    """Return the tools for `tools=` of OpenAI's responses."""
    return [{"type": "function", **_openai_function(tool, is_strict=is_strict)} for tool in _each(tools)]


def anthropic_tools(tools: Tools) -> list[dict[str, Any]]:
    """Return the tools for `tools=` of Anthropic's messages."""
    return [{"name": t.wire_name, "description": t.description, "input_schema": t.schema} for t in _each(tools)]


async def answer_openai(toolbox: Toolbox, call: Mapping[str, Any] | Dumps) -> dict[str, Any]:
    """Answer one entry of an assistant message's `tool_calls`, with the message that follows it.

    Such a message holds text alone, which says so where there were figures.
    """
    call = _as_mapping(call)
    function = call["function"]
    answer = await _call_with_json(toolbox, function["name"], function["arguments"])
    return {"role": "tool", "tool_call_id": call["id"], "content": _text_only(answer)}


async def answer_openai_response(toolbox: Toolbox, call: Mapping[str, Any] | Dumps) -> dict[str, Any]:
    """Answer one `function_call` of a response's output, with the item that follows it; figures are images in it."""
    call = _as_mapping(call)
    answer = await _call_with_json(toolbox, call["name"], call["arguments"])
    output: str | list[dict[str, Any]] = answer.text
    if answer.images:
        urls = [f"data:{image.mime};base64,{image.base64}" for image in answer.images]
        images = [{"type": "input_image", "image_url": url, "detail": "auto"} for url in urls]
        output = [{"type": "input_text", "text": answer.text}, *images]
    return {"type": "function_call_output", "call_id": call["call_id"], "output": output}


async def answer_anthropic(toolbox: Toolbox, block: Mapping[str, Any] | Dumps) -> dict[str, Any]:
    """Answer one `tool_use` block, with the `tool_result` block; figures are images in it."""
    block = _as_mapping(block)
    answer = await toolbox.call(block["name"], block["input"])
    content: list[dict[str, Any]] = [{"type": "text", "text": answer.text}]
    for image in answer.images:
        source = {"type": "base64", "media_type": image.mime, "data": image.base64}
        content.append({"type": "image", "source": source})
    return {"type": "tool_result", "tool_use_id": block["id"], "content": content, "is_error": answer.is_error}


def plain_functions(toolbox: Toolbox) -> dict[str, ToolFunction]:
    """Return every tool as an async function of its arguments, by the name that providers allow.

    Each has a signature with types, and a docstring with its arguments, for frameworks that read them. It returns the
    text for the model, errors included; a model's mistake never raises.
    """
    return {tool.wire_name: _function(toolbox, tool) for tool in toolbox.tools}


def _each(tools: Tools) -> Iterable[Tool]:
    return tools.tools if isinstance(tools, Toolbox) else tools


def _openai_function(tool: Tool, *, is_strict: bool) -> dict[str, Any]:
    described = {"name": tool.wire_name, "description": tool.description}
    if not is_strict:
        return {**described, "parameters": tool.schema}
    return {**described, "parameters": _strict(tool), "strict": True}


def _strict(tool: Tool) -> dict[str, Any]:
    """Return a tool's schema with every argument required; null stands for the default."""
    schema = tool.schema
    for name, about in schema["properties"].items():
        strict = {key: about[key] for key in _STRICT_KEYS if key in about}
        if "default" in about:
            strict["type"] = [about["type"], "null"]
            strict["description"] = f"{about.get('description', '')} Null: {about['default']}.".strip()
            if "enum" in about:
                strict["enum"] = [*about["enum"], None]
        else:
            strict["type"] = about["type"]
        schema["properties"][name] = strict
    return {**schema, "required": list(schema["properties"])}


def _as_mapping(call: Mapping[str, Any] | Dumps) -> Mapping[str, Any]:
    return call if isinstance(call, Mapping) else call.model_dump()


def _text_only(answer: Answer) -> str:
    if not answer.images:
        return answer.text
    return f"{answer.text}\n[Figures that cannot be shown here: {len(answer.images)}. Print their data instead.]"


async def _call_with_json(toolbox: Toolbox, name: str, arguments: str | Mapping[str, Any]) -> Answer:
    """Call a tool with arguments as JSON text, which a model may have got wrong; some servers send an object."""
    if isinstance(arguments, Mapping):
        return await toolbox.call(name, arguments)
    try:
        read = json.loads(arguments or "{}")
    except (ValueError, TypeError, RecursionError) as error:
        message = f"InvalidRequest: {name}: the arguments are not JSON: {error}"
        return Answer(text=utf8_safe(clip(message)), is_error=True)
    return await toolbox.call(name, read)


def _function(toolbox: Toolbox, tool: Tool) -> ToolFunction:
    parameters = [_parameter(name, about) for name, about in tool.properties.items()]
    signature = inspect.Signature(parameters, return_annotation=str)

    async def call(*args: Any, **named: Any) -> str:  # noqa: ANN401 - checked by the tool
        try:
            bound = signature.bind_partial(*args, **named)
        except TypeError as error:
            return utf8_safe(clip(f"InvalidRequest: {tool.name}: {error}"))
        return (await toolbox.call(tool.name, bound.arguments)).text

    call.__name__ = call.__qualname__ = tool.wire_name
    call.__doc__ = _docstring(tool)
    call.__signature__ = signature  # type: ignore[attr-defined]  # what inspect looks for
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters} | {"return": str}
    return call


def _parameter(name: str, about: Mapping[str, Any]) -> inspect.Parameter:
    kind: Any = Literal[tuple(about["enum"])] if "enum" in about else _TYPES[about["type"]]
    default = about.get("default", inspect.Parameter.empty)
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=kind, default=default)


def _docstring(tool: Tool) -> str:
    arguments = "\n".join(f"    {name}: {about['description']}" for name, about in tool.properties.items())
    return f"{tool.description}\n\nArgs:\n{arguments}\n"
