"""Drivers of live sessions for the tests of them."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.session_driver import Driver


@pytest.fixture
def open_driver(tmp_path: Path) -> Iterator[Callable[..., Driver]]:
    """Return a function that starts a driver, which ends with the test, and ends well."""
    with ExitStack() as stack:
        yield lambda language, **settings: stack.enter_context(Driver(language, tmp_path, **settings))


@pytest.fixture
def javascript(open_driver: Callable[..., Driver]) -> Driver:
    """Start a driver of JavaScript."""
    return open_driver("javascript")


@pytest.fixture
def bash(open_driver: Callable[..., Driver]) -> Driver:
    """Start a driver of Bash."""
    return open_driver("bash")
