"""One process does the operations on files of a module; each test has an empty folder."""

import os
import shutil
from collections.abc import Iterator

import pytest

from tests.harness.init import Files, serving_files


@pytest.fixture(scope="module")
def _server() -> Iterator[Files]:
    with serving_files() as files:
        yield files


@pytest.fixture
def files(_server: Files) -> Iterator[Files]:
    """Do operations on files in an empty folder."""
    yield _server
    for name in os.listdir(_server.folder):
        path = _server / name
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            os.unlink(path)
