"""A notebook of one test, and the process put back as it was."""

import asyncio
import builtins
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloche.interpreter import rich
from cloche.interpreter.pretty import Printer
from tests.unit.interpreter.notebook import Notebook

_OF_STAND_INS = ("IPython", "matplotlib_inline")


@pytest.fixture(autouse=True)
def _the_process_is_put_back() -> Iterator[None]:
    """Take back what a session makes of this process: of asyncio, of what is built in, and of IPython's stand-ins."""
    finders, kept = sys.meta_path[:], [(module, dict(vars(module))) for module in (asyncio, builtins)]
    yield
    sys.meta_path[:] = finders
    for module, names in kept:
        for name in set(vars(module)) - set(names):
            delattr(module, name)
        vars(module).update(names)
    for name in [name for name in sys.modules if name.partition(".")[0] in _OF_STAND_INS]:
        del sys.modules[name]


@pytest.fixture
def notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Notebook]:
    """Offer a session in an empty folder."""
    monkeypatch.chdir(tmp_path)
    path, argv, environment = sys.path[:], sys.argv, dict(os.environ)
    try:
        yield Notebook()
    finally:
        sys.path[:], sys.argv = path, argv
        os.environ.clear()
        os.environ.update(environment)
        rich.OPTIONS.__init__()  # type: ignore[misc]
        Printer.float_format = ""
