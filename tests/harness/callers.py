"""Callers of SandboxFusion, unmodified: its client, and files of packages that need torch to be imported whole."""

from __future__ import annotations

import ast
import functools
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit, urlunsplit


def folder_of(package: str) -> Path:
    """Return the folder of a package that lies apart, in no folder that is searched for modules."""
    folder = Path(sys.prefix) / "callers" / package
    assert folder.is_dir(), f"{folder} is missing; scripts/venv.sh dev makes it"
    return folder


def sandbox_fusion_client() -> Any:
    """Return the published client of SandboxFusion."""
    folder = folder_of("sandbox_fusion")
    return load_file("sandbox_fusion", folder / "__init__.py", folder)


def verl_rewards() -> Any:
    """Return verl's reward function for SandboxFusion, loaded by its file."""
    folder = folder_of("verl") / "utils/reward_score/sandbox_fusion"
    return load_file("verl_sandbox_fusion", folder / "__init__.py", folder)


@functools.cache
def load_file(name: str, file: Path, package: Path | None = None) -> ModuleType:
    """Import a file as a module of that name; as a package, if its folder is given."""
    folders = None if package is None else [str(package)]
    spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=folders)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def trl_method(name: str, **around: object) -> Any:
    """Return a method of trl's GRPO trainer as a function, among the names that it is given."""
    file = folder_of("trl") / "trainer/grpo_trainer.py"
    trees = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)]
    (function,) = (node for node in trees if node.name == name)
    function.decorator_list = []  # which measure
    names: dict[str, Any] = dict(around)
    exec(compile(ast.Module([function], []), str(file), "exec"), names)
    return names[name]


def with_key(address: str, key: str) -> str:
    """Return an address with a key in it, as these callers take it."""
    parts = urlsplit(address)
    return urlunsplit(parts._replace(netloc=f"cloche:{key}@{parts.netloc}"))
