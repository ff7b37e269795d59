"""What a model passes to a tool, checked against the tool's own table: nothing unknown, nothing of another kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cloche.core.errors import InvalidRequest

from .catalog import Tool

_KINDS: Mapping[str, tuple[type, ...]] = {
    "string": (str,), "number": (int, float), "integer": (int,), "boolean": (bool,),
}  # fmt: skip


def read_arguments(tool: Tool, arguments: object) -> dict[str, Any]:
    """Return a tool's arguments, complete with defaults. Raises InvalidRequest that names tool and argument."""
    if not isinstance(arguments, Mapping):
        raise InvalidRequest(f"{tool.name}: give the arguments as an object, not {type(arguments).__name__}")
    unknown = [str(name) for name in arguments if name not in tool.properties]
    if unknown:
        known = ", ".join(tool.properties)
        raise InvalidRequest(f"{tool.name}: there is no argument {unknown[0]!r}; it takes: {known}")
    return {name: _read(tool, name, schema, arguments) for name, schema in tool.properties.items()}


def _read(tool: Tool, name: str, schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> Any:  # noqa: ANN401
    if "default" in schema and arguments.get(name) is None:  # null: what a strict schema has instead of leaving it out
        return schema["default"]
    if name not in arguments:
        raise InvalidRequest(f"{tool.name}: the argument {name!r} is missing")
    value, kinds = arguments[name], _KINDS[schema["type"]]
    if isinstance(value, bool) is not (bool in kinds) or not isinstance(value, kinds):
        raise InvalidRequest(f"{tool.name}: {name} must be of type {schema['type']}, not {type(value).__name__}")
    if "enum" in schema and value not in schema["enum"]:
        raise InvalidRequest(f"{tool.name}: {name} {value!r} is not one of: {', '.join(schema['enum'])}")
    if "minimum" in schema and not value >= schema["minimum"]:
        raise InvalidRequest(f"{tool.name}: {name} must be at least {schema['minimum']}, not {value}")
    if "exclusiveMinimum" in schema and not value > schema["exclusiveMinimum"]:
        raise InvalidRequest(f"{tool.name}: {name} must be more than {schema['exclusiveMinimum']}, not {value}")
    return value
