"""The methods of E2B's SDK for JavaScript, read from its types, and the programs (`*.mjs`) that call them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
# What a class is called in the table, by its name in the types.
LABELS: Mapping[str, str] = {
    "Sandbox": "Sandbox", "SandboxApi": "Sandbox", "Filesystem": "files", "Commands": "commands", "Pty": "pty",
    "Git": "git", "CommandHandle": "CommandHandle", "WatchHandle": "WatchHandle", "Volume": "Volume",
    "Secret": "Secret", "SecretPaginator": "SecretPaginator", "SandboxPaginator": "SandboxPaginator",
    "SnapshotPaginator": "SnapshotPaginator", "TemplateBase": "Template",
}  # fmt: skip
_CLASS = re.compile(r"^(?:export )?declare (?:abstract )?class (\w+)[^{]*\{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
_METHOD = re.compile(r"^ {2,4}(?:static )?(\w+)(?:<[^(]*>)?\(", re.MULTILINE)


@dataclass(frozen=True)
class Shown:
    """One program: its name and the methods that it calls."""

    name: str
    methods: Sequence[str]


def methods_of(modules: Path) -> set[str]:
    """Return every public method of the packages in a folder, as `label.name`."""
    methods = set()
    for package in ("e2b", "@e2b/code-interpreter"):
        for name, body in _CLASS.findall((modules / package / "dist" / "index.d.ts").read_text()):
            names = set(_METHOD.findall(body)) - {"constructor"}
            methods |= {f"{LABELS[name]}.{method}" for method in names if name in LABELS}
    return methods


def _programs(path: Path) -> list[Shown]:
    pattern = re.compile(r"name: '([^']+)',\s*shows: \[(.*?)\]", re.DOTALL)
    return [Shown(name, [*re.findall(r"'([^']+)'", methods)]) for name, methods in pattern.findall(path.read_text())]


PROGRAMS: Mapping[str, Sequence[Shown]] = {
    path.stem: _programs(path) for path in sorted(FOLDER.glob("*.mjs")) if path.stem != "run"
}
