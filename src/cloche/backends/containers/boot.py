"""What is sent to the first process of a container before it can listen: its own code, and the interpreter's."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

LEAST_PYTHON = (3, 11)
# The only text on the command line: it makes the interpreter read a length, then that many bytes, and run them.
ARGUMENTS = (
    "-I",
    "-S",
    "-c",
    (
        "import os\nn=int(os.read(0,9))\nb=b''\nwhile len(b)<n:\n d=os.read(0,n-len(b))\n if not d:os._exit(0)\n b+=d\n"
        "exec(compile(b,'<cloche>','exec'),{'__name__':'cloche_boot'})"
    ),
)
_FIND_MODULES = """
import json, sys
from importlib.machinery import ModuleSpec
class Archive:
    sources = json.loads({sources!r})
    def find_spec(name, path=None, target=None):
        if name in Archive.sources: return ModuleSpec(name, Archive, origin="cloche", is_package="." not in name)
    def create_module(spec): return None
    def exec_module(module):
        text = Archive.sources[module.__name__]
        exec(compile(text, f"<{{module.__name__}}>", "exec", dont_inherit=True), module.__dict__)
sys.meta_path.insert(0, Archive)
"""
_START = """
import inside.reaper
inside.reaper.main(Archive, json.loads({settings!r}))
"""
_OURS = (
    "reaper", "reaper_counters", "reaper_files", "reaper_link", "reaper_program", "reaper_rehearsal", "reaper_session",
    "reaper_waiting",
)  # fmt: skip


def boot_message(preload: Sequence[str], *, extra_paths: Sequence[str] = (), customizes: bool = False) -> bytes:
    """Return what the first process reads: a length in nine digits, and its program."""
    settings: dict[str, Any] = {"home": "/workspace", "preload": list(preload), "ahead": None}
    settings |= {"extra_paths": list(extra_paths), "customizes": customizes}
    start = _START.format(settings=json.dumps(settings))
    program = (_FIND_MODULES.format(sources=json.dumps(_modules())) + start).encode()
    return f"{len(program):09d}".encode() + program


@functools.cache
def _modules() -> dict[str, str]:
    """Return the sources of our modules and the interpreter's by the names that they have inside."""
    names = [one.name for one in files("cloche.interpreter").iterdir() if one.name.endswith(".py")]
    theirs = {f"interpreter.{name.removesuffix('.py')}": _text("cloche.interpreter", name) for name in names}
    theirs["interpreter"] = theirs.pop("interpreter.__init__")
    return {
        **theirs,
        "inside": "",
        **{f"inside.{name}": _text("cloche.backends.containers", f"{name}.py") for name in _OURS},
    }


@functools.cache
def _text(package: str, name: str) -> str:
    return (files(package) / name).read_text(encoding="utf-8")
