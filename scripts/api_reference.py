"""Write docs/api.md from the public names' signatures and docstrings."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from enum import Enum
from pathlib import Path

import cloche
from cloche.autofix.endpoint import Endpoint
from cloche.autofix.loop import AutoFix
from cloche.config.options import SandboxOptions
from cloche.core.changes import Change, Committed, Diff, LeftOut
from cloche.core.enforcement import Enforcement, Measure
from cloche.core.errors import WorkspaceConflict, WorkspaceFailed
from cloche.core.events import Displayed, Ended, OutputChunk, Started
from cloche.core.grading import CaseResult, CheckVerdict
from cloche.core.processes import FileChange, FileInfo, ListeningPort, ProcessInfo, Transfer
from cloche.core.protocols import OpenStream
from cloche.core.result import FileRecord, FixReport, FixRound, Output, Usage
from cloche.execution.history import HistoryEntry
from cloche.execution.paths import AsyncWatch
from cloche.execution.ports import AsyncConnection, AsyncForward
from cloche.execution.processes import AsyncProcess
from cloche.execution.sandbox import AsyncSession
from cloche.sync import ByteStream, Connection, Forward, Process, Session, Watch

TARGET = Path(__file__).parents[1] / "docs" / "api.md"
HEAD = """# API

Generated from the docstrings by `scripts/api_reference.py`; the narrative is in the [README](../README.md) and the
[design](design.md).
"""
GROUPS: dict[str, tuple[str, ...]] = {
    "Running code": ("run", "arun", "map", "amap", "run_python_code", "Sandbox", "AsyncSandbox"),
    "Sandboxes chosen by settings": ("get_sandbox", "CodeSandbox", "LocalSandbox", "DockerSandbox", "E2BSandbox"),
    "Grading": ("check", "acheck"),
    "Results": ("Result", "ExecutionResult", "Status"),
    "Limits, levels and secrets": ("Limits", "Level", "Secret"),
    "Errors": (
        "ClocheError", "InvalidRequest", "PolicyDenied", "ApprovalDenied", "BackendUnavailable",
        "StartFailed", "OutcomeUnknown", "InternalError", "SandboxFileError",
    ),
}  # fmt: skip
SAME_AS = {
    "cloche.acheck": "The same as `cloche.check`, to be awaited.",
    "cloche.arun": "The same as `cloche.run`, to be awaited.",
    "cloche.amap": "The same as `cloche.map`, for `async for`; the programs may come asynchronously, too.",
    "cloche.ExecutionResult": "Another name of `cloche.Result`.",
}
# What public calls take and return, without being names of the package itself.
PARTS = (
    SandboxOptions, Process, AsyncProcess, ByteStream, OpenStream, ProcessInfo, FileInfo, Transfer, ListeningPort,
    FileChange, Watch, AsyncWatch, Connection, AsyncConnection, Forward, AsyncForward, Session, AsyncSession,
    HistoryEntry, CheckVerdict, CaseResult, Enforcement, Measure, FileRecord, Usage, Output, Started, OutputChunk,
    Displayed, Ended, AutoFix, Endpoint, FixReport, FixRound, Diff, Change, LeftOut, Committed, WorkspaceConflict,
    WorkspaceFailed,
)  # fmt: skip


def render() -> str:
    """Return the whole reference."""
    parts = [HEAD]
    for title, names in GROUPS.items():
        parts.append(f"## {title}\n")
        parts += [entry(f"cloche.{name}", getattr(cloche, name)) for name in names]
    parts.append("## Parts of these\n")
    parts += [entry(f"{part.__module__}.{part.__qualname__}", part) for part in PARTS]
    return "\n".join(parts)


def entry(name: str, thing: object) -> str:
    """Return the section of one name."""
    if name in SAME_AS:
        return f"### {name}\n\n{SAME_AS[name]}\n"
    lines = [f"### {name}\n", f"```text\n{signature(name, thing)}\n```\n", docstring(thing) + "\n"]
    if inspect.isclass(thing):
        lines += list(members(thing))
    return "\n".join(lines)


def signature(name: str, thing: object) -> str:
    """Return how a thing is called, one parameter a line when there are many."""
    short = name.rpartition(".")[2]
    if inspect.isclass(thing) and issubclass(thing, BaseException):
        return f"class {short}({', '.join(base.__name__ for base in thing.__bases__)})"
    if inspect.isclass(thing) and (issubclass(thing, dict | Enum) or getattr(thing, "_is_protocol", False)):
        return f"class {short}"
    found = inspect.signature(thing)
    listed = list(parameters(found))
    gives = found.return_annotation
    returned = "" if gives in (inspect.Signature.empty, None, "None") else f" -> {gives}"
    line = f"{short}({', '.join(listed)}){returned}"
    return line if len(line) <= 100 else f"{short}(\n    " + ",\n    ".join(listed) + f",\n){returned}"


def parameters(found: inspect.Signature) -> Iterator[str]:
    """Yield each parameter as the source has it, the bare star included."""
    is_starred = False
    for parameter in found.parameters.values():
        if parameter.name == "save_files":  # how a result reaches its files is not the caller's business
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not is_starred:
            is_starred = True
            yield "*"
        prefix = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        kind = "" if parameter.annotation is parameter.empty else f": {parameter.annotation}"
        yield f"{prefix}{parameter.name}{kind}{_default(parameter.default)}"


def _default(default: object) -> str:
    """Return a default that prints the same in every version of Python."""
    if default is inspect.Parameter.empty:
        return ""
    if isinstance(default, Enum):
        return f" = {type(default).__name__}.{default.name}"
    is_plain = default is None or isinstance(default, str | int | float | bytes | tuple)
    return f" = {default!r}" if is_plain else " = ..."


def docstring(thing: object) -> str:
    """Return a docstring; what is indented stays code."""
    text = inspect.getdoc(thing) or ""
    if inspect.isclass(thing) and text.startswith(f"{thing.__name__}("):
        return ""
    return text


def members(thing: type) -> Iterator[str]:
    """Yield one line per public method, property, field or value that the class itself documents."""
    if hasattr(thing, "__members__"):
        yield "Values: " + ", ".join(f"`{value!s}`" for value in thing) + "\n"  # type: ignore[attr-defined]
        return
    for name, member in vars(thing).items():
        function = member.fget if isinstance(member, property) else member
        if name.startswith("_") or not inspect.isfunction(function) or not function.__doc__:
            continue
        kind = name if isinstance(member, property) else f"{name}()"
        yield f"- `{kind}`: {' '.join(inspect.getdoc(function).split())}"  # type: ignore[union-attr]
    yield ""


if __name__ == "__main__":
    TARGET.write_text(render())
    print(f"{TARGET.name}: {len(render().splitlines())} lines")
