"""A notebook of one test, and the process put back as it was."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloche.interpreter import rich
from cloche.interpreter.pretty import Printer
from tests.unit.interpreter.notebook import Notebook

_OF_STAND_INS = ("IPython", "matplotlib_inline")


@pytest.fixture
def notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Notebook]:
    """Offer a session in an empty folder."""
    monkeypatch.chdir(tmp_path)
    finders, path, argv, environment = sys.meta_path[:], sys.path[:], sys.argv, dict(os.environ)
    try:
        yield Notebook()
    finally:
        sys.meta_path[:], sys.path[:], sys.argv = finders, path, argv
        os.environ.clear()
        os.environ.update(environment)
        for name in [name for name in sys.modules if name.partition(".")[0] in _OF_STAND_INS]:
            del sys.modules[name]
        rich.OPTIONS.__init__()  # type: ignore[misc]
        Printer.float_format = ""
