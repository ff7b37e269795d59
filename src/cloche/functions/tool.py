"""A function of the caller as a guest sees it: its name, its source as a stub, its arguments checked.

`read_tools` takes all forms in which a caller gives functions. `stubs` is text for a model's prompt: what `help` shows
inside, without a body.
"""

from __future__ import annotations

import inspect
import math
import sys
import textwrap
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import CodeType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary

from cloche.core.errors import InvalidRequest
from cloche.core.limits import MIB
from cloche.core.record import dataclass, field

from .annotations import Check, Unfit, checker
from .schemas import Call, Described, adapted, is_name, of_schema

RISKS = ("low", "medium", "high", "critical")
TIMEOUT_S, APPROVAL_S = 60.0, 300.0
AT_ONCE, MOST_CALLS, CALL_BYTES, TOTAL_BYTES = 16, 100_000, MIB, 1024 * MIB
MOST_TOOLS, MOST_DOC_CHARS, MOST_SOURCES = 500, 4000, 16
MOST_BYTES = 8 * MIB  # of one call, or one result
_NAMED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_MORE, _KEYWORDS = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD


@dataclass(frozen=True, slots=True)
class Tool:
    """Offer `function` to a guest, under its own name or another one.

    `description` replaces its docstring. With `risk` high or critical each call needs the approver's yes. A call that
    takes more than `timeout_s` seconds fails; a function that is not async then goes on in its thread, unheard.
    """

    function: Callable[..., Any]
    name: str = field(default="", kw_only=True)
    description: str = field(default="", kw_only=True)
    risk: str = field(default="low", kw_only=True)
    timeout_s: float = field(default=TIMEOUT_S, kw_only=True)

    def __post_init__(self) -> None:
        given: object = self.function
        if not callable(given):
            raise InvalidRequest(f"tools: {self.function!r} is not a function; give one, or a Tool of one")
        name = self.name or getattr(self.function, "__name__", "")
        if not is_name(name):
            raise InvalidRequest(
                f"tools: {name!r} is not a name for a function in the sandbox; give another one: Tool(f, name=...)"
            )
        object.__setattr__(self, "name", name)
        if str(self.risk) not in RISKS:
            raise InvalidRequest(f"tools: {name}: unknown risk {self.risk!r}; known: {', '.join(RISKS)}")
        object.__setattr__(self, "risk", str(self.risk))
        time_s: object = self.timeout_s
        is_time = isinstance(time_s, int | float) and not isinstance(time_s, bool)
        if not is_time or not 0 < self.timeout_s < math.inf:
            raise InvalidRequest(f"tools: {name}: timeout_s {self.timeout_s!r} is not a time; give seconds, such as 60")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolLimits:
    """Bound the calls of one run, or of one cell of a session.

    `at_once` calls run at a time, and further ones wait. `calls` is their number in all, `call_bytes` the size of one
    call's arguments and of its result as JSON, `total_bytes` that of all arguments and results. An approver has
    `approval_s` seconds to answer; the time of the call itself begins after that.
    """

    at_once: int = AT_ONCE
    calls: int = MOST_CALLS
    call_bytes: int = CALL_BYTES
    total_bytes: int = TOTAL_BYTES
    approval_s: float = APPROVAL_S

    def __post_init__(self) -> None:
        bounds = {"at_once": 256, "calls": 1 << 31, "call_bytes": MOST_BYTES, "total_bytes": 1 << 50}
        for name, most in bounds.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
                raise InvalidRequest(f"tool_limits: {name} {value!r} is not a whole number from 1 to {most}")


class FunctionSignature:
    """Hold what a function says of itself: its parameters with their checks, and its source as a guest has it.

    Raises whatever reading them raises.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004 - an object's own method, which may be async
        )
        self.signature = inspect.signature(function)
        self.doc = inspect.getdoc(function) or ""
        hints = typing.get_type_hints(function) if hasattr(function, "__annotations__") else {}
        self.hints = tuple(hints.values())
        self.checks: dict[str, Check] = {name: checker(hints.get(name, Any)) for name in self.signature.parameters}
        self.sources: dict[tuple[str, str], str] = {}  # by name and description


_State = tuple[CodeType, Any, Any, Any, Any]
_signatures: WeakKeyDictionary[FunctionType, tuple[_State, FunctionSignature]] = WeakKeyDictionary()


def _signature_of(function: Callable[..., Any]) -> FunctionSignature:
    """Return a function's signature; that of a plain function is read once, as long as it is the same."""
    if type(function) is not FunctionType or function.__dict__:
        return FunctionSignature(function)
    state = _state_of(function)
    known = _signatures.get(function)
    if known is None or known[0] != state:
        known = _signatures[function] = (state, FunctionSignature(function))
    return known[1]


def _state_of(function: FunctionType) -> _State:
    """Return what can be changed at a function; defaults by identity, since not all can be compared."""
    defaults = tuple(map(id, function.__defaults__ or ()))
    named = {name: id(value) for name, value in (function.__kwdefaults__ or {}).items()}
    return function.__code__, defaults, named, function.__doc__, dict(function.__annotations__)


class BoundTool:
    """Hold a tool with its signature: check arguments, and write its stub."""

    def __init__(self, tool: Tool) -> None:
        self.tool, self.name, self.timeout_s, self.risk = tool, tool.name, tool.timeout_s, tool.risk
        try:
            self._read = _signature_of(tool.function)
        except Exception as error:
            raise InvalidRequest(f"tools: {tool.name}: its signature cannot be read: {error}") from error
        self.is_async, self._checks = self._read.is_async, self._read.checks
        self._signature, self._parameters = self._read.signature, self._read.signature.parameters
        for name in self._parameters:
            if name.startswith("_cloche"):
                raise InvalidRequest(f"tools: {tool.name}: no parameter may be called {name}")
        self._keywords = next((p.name for p in self._parameters.values() if p.kind is _KEYWORDS), None)

    def arguments(self, data: Mapping[str, Any], more: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return checked arguments, by position and by name. Raises Unfit, with the name of the argument."""
        positional: list[Any] = []
        named: dict[str, Any] = {}
        left = dict(data)
        for parameter in self._parameters.values():
            if parameter.kind is _MORE:
                positional += [self._checks[parameter.name](value, parameter.name) for value in more]
                more = ()
            elif parameter.kind in _NAMED:
                is_first = parameter.kind is _NAMED[0] or (bool(more) and parameter.kind is _NAMED[1])
                self._take(parameter, left, positional if is_first else None, named)
        if more:
            raise Unfit(f"{self.name} takes no further arguments by position")
        if left and self._keywords is None:
            raise Unfit(f"{self.name} has no parameter {min(left)[:100]!r}")
        named |= {name: self._checks[str(self._keywords)](value, name[:100]) for name, value in left.items()}
        return positional, named

    def _take(
        self, parameter: inspect.Parameter, left: dict[str, Any], positional: list[Any] | None, named: dict[str, Any]
    ) -> None:
        if parameter.name in left:
            value = self._checks[parameter.name](left.pop(parameter.name), parameter.name)
        elif parameter.default is not parameter.empty:
            value = parameter.default
        else:
            raise Unfit(f"{self.name} lacks the argument {parameter.name!r}")
        if positional is None:
            named[parameter.name] = value
        else:
            positional.append(value)

    @property
    def doc(self) -> str:
        """Return its description."""
        return (self.tool.description or self._read.doc).strip()[:MOST_DOC_CHARS]

    def parameter_names(self) -> list[str]:
        """Return the names of the parameters that have a value each."""
        return [parameter.name for parameter in self._parameters.values() if parameter.kind in _NAMED]

    def head(self) -> str:
        """Return its first line, as Python."""
        return f"def {self.name}{_signature_text(self._signature)}:"

    def annotations(self) -> Sequence[Any]:
        """Return those of the parameters and of the result, as objects."""
        return self._read.hints

    def stub(self) -> str:
        """Return its signature and docstring, as Python."""
        return f"{self.head()}\n{_docstring(self.doc)}" if self.doc else f"{self.head()} ..."

    def source(self) -> str:
        """Return the function that a Python guest has in its place."""
        key = (self.name, self.tool.description)
        if key not in self._read.sources:
            if len(self._read.sources) >= MOST_SOURCES:
                self._read.sources.clear()
            self._read.sources[key] = self._new_source()
        return self._read.sources[key]

    def _new_source(self) -> str:
        values = "{" + ", ".join(f"{name!r}: {name}" for name in self.parameter_names()) + "}"
        more = next((p.name for p in self._parameters.values() if p.kind is _MORE), "()")
        call = f"    return _cloche_call({self.name!r}, {values}, {more}, {self._keywords})"
        return "\n".join([self.head(), *([_docstring(self.doc)] if self.doc else []), call, ""])


class Tools:
    """Hold the tools of one sandbox by their names, and the limits of their calls."""

    def __init__(self, tools: Iterable[Tool], limits: ToolLimits) -> None:
        self.limits = limits
        self.by_name: dict[str, BoundTool] = {}
        for tool in tools:
            if tool.name in self.by_name:
                raise InvalidRequest(f"tools: two functions are called {tool.name}; rename one: Tool(f, name=...)")
            self.by_name[tool.name] = BoundTool(tool)
        if len(self.by_name) > MOST_TOOLS:
            raise InvalidRequest(f"tools: {len(self.by_name)} are more than {MOST_TOOLS}")

    def greeting(self) -> dict[str, Any]:
        """Return what a guest is told."""
        rows = [
            {"name": name, "source": tool.source(), "doc": tool.doc, "parameters": tool.parameter_names()}
            for name, tool in self.by_name.items()
        ]
        return {"version": 1, "functions": rows}


def tool_of_schema(name: str, description: str, schema: Mapping[str, Any], call: Call) -> Tool:
    """Return a tool whose arguments a JSON Schema describes; `call` gets those that the program gave, by name."""
    return _of(of_schema(name, description, schema, call))


def _of(described: Described) -> Tool:
    return Tool(described.function, name=described.name, description=described.description)


def read_tools(tools: object, limits: ToolLimits | None = None) -> Tools | None:
    """Return the tools of a mapping by name, or of a list; None for none.

    They are functions, `Tool`s, and tools of LangChain, Pydantic AI, OpenAI Agents and smolagents.

    Raises InvalidRequest for anything else.
    """
    if tools is None:
        return None
    if isinstance(tools, Tools):
        return tools
    if isinstance(tools, Mapping):
        rows = [_named(name, one) for name, one in tools.items()]
    elif isinstance(tools, Iterable) and not isinstance(tools, str | bytes):
        rows = [_read(one) for one in tools]
    else:
        raise InvalidRequest(
            f"tools: give functions by name, {{'search': search}}, or a list, not {type(tools).__name__}"
        )
    if limits is not None and not isinstance(limits, ToolLimits):
        raise InvalidRequest(f"tool_limits: give ToolLimits(...), not {type(limits).__name__}")
    return Tools(rows, limits or ToolLimits()) if rows else None


def _read(one: Any) -> Tool:  # noqa: ANN401 - whatever the caller gave
    if isinstance(one, Tool):
        return one
    described = adapted(one) if type(one) is not FunctionType else None
    return Tool(one) if described is None else _of(described)


def _named(name: object, one: object) -> Tool:
    if not isinstance(name, str):
        raise InvalidRequest(f"tools: {name!r} is not a name")
    if not isinstance(one, Tool) and adapted(one) is None:
        return Tool(one, name=name)  # type: ignore[arg-type]  # which it checks
    tool = _read(one)
    return Tool(tool.function, name=name, description=tool.description, risk=tool.risk, timeout_s=tool.timeout_s)


def stubs(tools: object) -> str:
    """Return the tools' signatures and docstrings as Python, for a model's prompt."""
    bound = read_tools(tools)
    if bound is None:
        return ""
    names, records = list(bound.by_name), _records(bound.by_name.values())
    first = f"from cloche_host import {', '.join(names)}  # in a coroutine: await {names[0]}(...)"
    text = "\n\n".join([first, *map(_record_stub, records), *(tool.stub() for tool in bound.by_name.values())])
    for record in records:
        text = text.replace(f"{record.__module__}.{record.__qualname__}", record.__name__)
    return text


def _records(tools: Iterable[BoundTool]) -> list[type]:
    """Return the models and records of signatures, and those of their fields, which a program has as dicts."""
    found: dict[type, None] = {}
    waiting = [annotation for tool in tools for annotation in tool.annotations()]
    while waiting:
        annotation = waiting.pop(0)
        waiting += typing.get_args(annotation)
        if isinstance(annotation, type) and annotation not in found and (fields := _fields(annotation)):
            found[annotation] = None
            waiting += [kind for kind, _ in fields.values()]
    return list(found)


def _fields(record: type) -> dict[str, tuple[Any, bool]]:
    """Return the type of each field of a record or a model of pydantic, and whether it is required; else none."""
    if hasattr(record, "__dataclass_fields__"):
        dataclasses = sys.modules["dataclasses"]  # which has made the class, or described it just now
        missing, hints = dataclasses.MISSING, typing.get_type_hints(record)
        rows = {row.name: row.default is row.default_factory is missing for row in dataclasses.fields(record)}
        return {name: (hints[name], is_required) for name, is_required in rows.items()}
    models = getattr(record, "model_fields", None)
    given = models.items() if isinstance(models, dict) else ()
    return {row.alias or name: (row.annotation, row.is_required()) for name, row in given}


def _record_stub(record: type) -> str:
    rows = ((name, _shown(kind), is_required) for name, (kind, is_required) in _fields(record).items())
    lines = [f"    {name}: {kind if is_required else f'NotRequired[{kind}]'}" for name, kind, is_required in rows]
    return "\n".join([f"class {record.__name__}(TypedDict):", *lines])


def _docstring(text: str) -> str:
    quoted = text.replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
    end = "\n" if "\n" in quoted or quoted.endswith('"') else ""
    return textwrap.indent(f'"""{quoted}{end}"""', "    ", lambda line: bool(line.strip()))


def _signature_text(signature: inspect.Signature) -> str:
    parameters = [parameter.replace(default=_default(parameter)) for parameter in signature.parameters.values()]
    returned = signature.return_annotation
    shown = inspect.Signature([p.replace(annotation=_shown(p.annotation)) for p in parameters])
    result = "" if returned is signature.empty else f" -> {_shown(returned)}"
    return f"{shown}{result}"


class _Text:
    """Be shown as it is."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def _shown(annotation: Any) -> Any:  # noqa: ANN401
    if annotation is inspect.Parameter.empty:
        return annotation
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return _Text(_as_expression(text))


def _as_expression(text: str) -> str:
    """Return an annotation's text, quoted where it is no Python."""
    try:
        compile(text, "<annotation>", "eval")
    except SyntaxError:
        return repr(text)
    return text


def _default(parameter: inspect.Parameter) -> Any:  # noqa: ANN401
    """Return a default as a stub has it: plain values as they are, and `...` for what the caller alone knows."""
    default = parameter.default
    is_plain = default is parameter.empty or default is None or isinstance(default, bool | int | str)
    return default if is_plain or (isinstance(default, float) and math.isfinite(default)) else _Text("...")
