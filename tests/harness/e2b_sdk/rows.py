"""The methods of E2B's SDK for Python, read from the SDK, and the programs that show what each of them does here."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from types import CodeType, FrameType
from typing import Any

# What a class is called in the table, and where the SDK has it, blocking and asynchronous; "" where it has none.
CLASSES: Mapping[str, tuple[str, str]] = {
    "Sandbox": ("e2b_code_interpreter:Sandbox", "e2b_code_interpreter:AsyncSandbox"),
    "commands": ("e2b.sandbox_sync.commands.command:Commands", "e2b.sandbox_async.commands.command:Commands"),
    "CommandHandle": ("e2b:CommandHandle", "e2b:AsyncCommandHandle"),
    "CommandInputHandle": ("", "e2b:AsyncCommandInputHandle"),
    "files": (
        "e2b.sandbox_sync.filesystem.filesystem:Filesystem",
        "e2b.sandbox_async.filesystem.filesystem:Filesystem",
    ),
    "WatchHandle": ("e2b:WatchHandle", "e2b:AsyncWatchHandle"),
    "pty": ("e2b.sandbox_sync.commands.pty:Pty", "e2b.sandbox_async.commands.pty:Pty"),
    "git": ("e2b.sandbox_sync.git:Git", "e2b.sandbox_async.git:Git"),
    "SandboxPaginator": ("e2b:SandboxPaginator", "e2b:AsyncSandboxPaginator"),
    "SnapshotPaginator": ("e2b:SnapshotPaginator", "e2b:AsyncSnapshotPaginator"),
    "Template": ("e2b:Template", "e2b:AsyncTemplate"),
    "TemplateBuilder": ("e2b.template.main:TemplateBuilder", "e2b.template.main:TemplateBuilder"),
    "Volume": ("e2b:Volume", "e2b:AsyncVolume"),
    "Secret": ("e2b:Secret", "e2b:AsyncSecret"),
    "SecretPaginator": ("e2b:SecretPaginator", "e2b:AsyncSecretPaginator"),
}
FUNCTIONS = (
    "default_build_logger", "get_signature", "wait_for_file", "wait_for_port", "wait_for_process", "wait_for_timeout",
    "wait_for_url",
)  # fmt: skip
PROGRAMS = ("sandboxes", "commands", "terminals", "files", "git", "code", "templates", "stores", "agreements")
Program = Callable[[Any], Awaitable[None]]


@dataclass(frozen=True)
class Shown:
    """One program: the methods that it calls, and how they differ from E2B's, by method."""

    program: Program
    methods: Sequence[str]
    differs: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    is_long: bool = False

    @property
    def name(self) -> str:
        """Return its name in the list of tests."""
        return f"{self.program.__module__.rpartition('.')[2]}.{self.program.__name__}"


_ALL: list[Shown] = []


def shows(
    *methods: str,
    differs: Mapping[str, str] | None = None,
    refused: Mapping[str, str] | None = None,
    is_long: bool = False,
) -> Callable[[Program], Program]:
    """Note that a program shows methods; `differs` and `refused` say how a method is not E2B's, or is not here."""

    def note(program: Program) -> Program:
        all_methods = [*methods, *(differs or {}), *(refused or {})]
        _ALL.append(Shown(program, all_methods, differs or {}, refused or {}, is_long))
        return program

    return note


@cache
def shown() -> tuple[Shown, ...]:
    """Return all programs."""
    for name in PROGRAMS:
        import_module(f"{__package__}.{name}")
    return tuple(_ALL)


def class_of(label: str, *, is_async: bool) -> Any:
    """Return a class of the SDK that is installed, or None."""
    module, _, name = CLASSES[label][is_async].partition(":")
    return getattr(import_module(module), name, None) if module else None


def methods_of(label: str, *, is_async: bool) -> list[str]:
    """Return the public methods of a class, as `label.name`."""
    owner = class_of(label, is_async=is_async)
    names = (
        [name for name in dir(owner) if not name.startswith("_") and callable(getattr(owner, name))] if owner else []
    )
    return [f"{label}.{name}" for name in names]


def all_methods(*, is_async: bool) -> list[str]:
    """Return every method and function of the SDK that is installed."""
    methods = [method for label in CLASSES for method in methods_of(label, is_async=is_async)]
    return [*methods, *(name for name in FUNCTIONS if hasattr(import_module("e2b"), name))]


def _codes(method: str, *, is_async: bool) -> set[CodeType]:
    """Return what runs when a method is called: the class may have it twice, for itself and for its objects."""
    label, _, name = method.rpartition(".")
    if not label:
        return {getattr(import_module("e2b"), name).__code__}
    owner = class_of(label, is_async=is_async)
    raw = inspect.getattr_static(owner, name)
    parts = [raw, getattr(raw, "__func__", None), *getattr(raw, "__dict__", {}).values()]
    parts += [inspect.getattr_static(owner, part) for part in parts if isinstance(part, str) and hasattr(owner, part)]
    functions = [inspect.unwrap(getattr(part, "__func__", part)) for part in parts if part is not None]
    return {code for function in functions if (code := getattr(function, "__code__", None))}


@contextmanager
def calls_noted(methods: Sequence[str], *, is_async: bool) -> Iterator[set[str]]:
    """Yield the methods that are called in the body, of these."""
    method_of = {code: method for method in methods for code in _codes(method, is_async=is_async)}
    called: set[str] = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        del argument
        if event == "call" and (method := method_of.get(frame.f_code)):
            called.add(method)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield called
    finally:
        sys.setprofile(before)
