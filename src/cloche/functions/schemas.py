"""Tools that other libraries describe: by a JSON Schema, or by an object of their own that holds a function.

Nothing of these libraries is imported: an object is known by its attributes. A schema becomes a signature, so that
stubs, `help` and the check of arguments are those of any function.
"""

from __future__ import annotations

import inspect
import json
import keyword
import re
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal, cast

from cloche.core.errors import InvalidRequest
from cloche.core.record import dataclass

Call = Callable[[dict[str, Any]], Awaitable[Any]]
_KINDS: dict[object, Any] = {
    "string": str, "integer": int, "number": float, "boolean": bool, "array": list, "object": dict, "null": None,
}  # fmt: skip
MOST_CHOICES = 50
RESERVED = ("HostError",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """Hold a function with the name and description that its library gave it."""

    function: Callable[..., Any]
    name: str
    description: str


def is_name(name: object) -> bool:
    """Tell whether a guest's module may have a function of this name."""
    is_word = isinstance(name, str) and name.isidentifier() and name.isascii() and not keyword.iskeyword(name)
    return is_word and not str(name).startswith("_") and name not in RESERVED and len(str(name)) <= 100


class _Missing:
    """Stand for an argument that the program left out."""

    def __repr__(self) -> str:
        return "..."


_MISSING = _Missing()


def of_schema(name: str, description: str, schema: Mapping[str, Any], call: Call) -> Described:
    """Return a function whose arguments a JSON Schema describes; `call` gets those that the program gave, by name."""
    properties = schema.get("properties")
    rows = properties if isinstance(properties, Mapping) else {}
    listed = schema.get("required")
    required = listed if isinstance(listed, list) else []
    names = {_identifier(given): given for given in rows}
    if len(names) < len(rows):
        raise InvalidRequest(f"tools: {name}: two of its parameters have the same name as identifiers")

    async def function(**values: Any) -> Any:  # noqa: ANN401 - JSON
        return await call({names[key]: value for key, value in values.items() if value is not _MISSING})

    parameters = [
        inspect.Parameter(
            identifier,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            annotation=_annotation(rows[given]),
            default=inspect.Parameter.empty if given in required else _MISSING,
        )
        for identifier, given in names.items()
    ]
    parameters.sort(key=lambda parameter: parameter.default is _MISSING)
    function.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return Described(function=function, name=_identifier(name), description=_described(description, names, rows))


def adapted(tool: object) -> Described | None:
    """Return the function of a LangChain, Pydantic AI, OpenAI Agents or smolagents object; None for anything else."""
    for adapt in (_langchain, _openai, _smolagents, _pydantic_ai):
        if (known := adapt(tool)) is not None:
            return known
    return None


def _langchain(tool: Any) -> Described | None:  # noqa: ANN401
    if not callable(getattr(tool, "ainvoke", None)) or not hasattr(tool, "args"):
        return None
    schema: Any = getattr(tool, "tool_call_schema", None)
    described = schema.model_json_schema() if hasattr(schema, "model_json_schema") else {"properties": tool.args}
    return of_schema(tool.name, tool.description, described, tool.ainvoke)


def _openai(tool: Any) -> Described | None:  # noqa: ANN401
    invoke = getattr(tool, "on_invoke_tool", None)
    if not callable(invoke) or not hasattr(tool, "params_json_schema"):
        return None

    async def call(arguments: dict[str, Any]) -> Any:  # noqa: ANN401
        text = json.dumps(arguments)
        return await cast("Any", invoke)(_openai_context(tool.name, text), text)

    return of_schema(tool.name, tool.description, _not_strict(tool.params_json_schema), call)


def _openai_context(name: str, arguments: str) -> Any:  # noqa: ANN401
    """Return the context of a call outside of an agent's run, which the package of the tool reads names from."""
    context = getattr(sys.modules.get("agents.tool_context"), "ToolContext", None)
    return context and context(context=None, tool_name=name, tool_call_id="cloche", tool_arguments=arguments)


def _not_strict(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema that requires no parameter with a default, and none that may be null, as a strict one does."""
    rows, required = schema.get("properties", {}), schema.get("required", [])
    left_out = [name for name in required if "default" in rows.get(name, {}) or _is_nullable(rows.get(name, {}))]
    return {**schema, "required": [name for name in required if name not in left_out]}


def _is_nullable(schema: Mapping[str, Any]) -> bool:
    options = schema.get("anyOf") or schema.get("type")
    return isinstance(options, list) and any(option in ("null", {"type": "null"}) for option in options)


def _smolagents(tool: Any) -> Described | None:  # noqa: ANN401
    inputs = getattr(tool, "inputs", None)
    if not isinstance(inputs, Mapping) or not callable(getattr(tool, "forward", None)):
        return None
    parameters = inspect.signature(tool.forward).parameters
    required = [name for name in inputs if name in parameters and parameters[name].default is inspect.Parameter.empty]
    model = of_schema(tool.name, tool.description, {"properties": inputs, "required": required}, _no_call)

    def function(**values: Any) -> Any:  # noqa: ANN401 - which blocks, so it runs in a thread
        return tool(**{name: value for name, value in values.items() if value is not _MISSING})

    function.__annotations__ = model.function.__annotations__
    function.__signature__ = inspect.signature(model.function)  # type: ignore[attr-defined]
    return Described(function=function, name=model.name, description=model.description)


async def _no_call(_: dict[str, Any]) -> None:
    """Stand for a call that is made otherwise."""


def _pydantic_ai(tool: Any) -> Described | None:  # noqa: ANN401
    if not callable(getattr(tool, "function", None)) or not hasattr(tool, "takes_ctx"):
        return None
    if tool.takes_ctx:
        raise InvalidRequest(
            f"tools: {tool.name} takes the context of a run of Pydantic AI, which a sandbox has not; give a function "
            "without it"
        )
    return Described(function=tool.function, name=tool.name, description=tool.description or "")


def _annotation(schema: object) -> Any:  # noqa: ANN401
    if not isinstance(schema, Mapping):
        return Any
    choices = schema.get("enum")
    if (
        isinstance(choices, list)
        and 0 < len(choices) <= MOST_CHOICES
        and all(isinstance(c, str | int) for c in choices)
    ):
        return Literal[tuple(choices)]
    options = schema.get("anyOf") or schema.get("oneOf")
    if isinstance(options, list) and options:
        return _any_of([_annotation(option) for option in options])
    kind = schema.get("type")
    if isinstance(kind, list):
        return _any_of([_annotation({**schema, "type": each}) for each in kind])
    if kind == "array" and isinstance(schema.get("items"), Mapping):
        return list[_annotation(schema["items"])]  # type: ignore[misc]
    annotation = _KINDS.get(kind, Any)
    if annotation is None:
        return type(None)
    return annotation | None if schema.get("nullable") is True and annotation is not Any else annotation


def _any_of(annotations: list[Any]) -> Any:  # noqa: ANN401
    if any(annotation is Any for annotation in annotations):
        return Any
    union = annotations[0]
    for annotation in annotations[1:]:
        union = union | annotation
    return union


def _identifier(name: str) -> str:
    text = re.sub(r"\W", "_", name, flags=re.ASCII).lstrip("_") or "argument"
    text = f"a_{text}" if text[0].isdigit() else text
    return f"{text}_" if keyword.iskeyword(text) or not is_name(text) else text


def _described(description: str, names: Mapping[str, str], rows: Mapping[str, Any]) -> str:
    """Return a description with that of each parameter."""
    lines = [
        f"{identifier}: {rows[given]['description']}"
        for identifier, given in names.items()
        if isinstance(rows[given], Mapping) and rows[given].get("description")
    ]
    return "\n\n".join(filter(None, [(description or "").strip(), "\n".join(lines)]))
