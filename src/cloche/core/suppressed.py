"""Errors that nobody has to handle: work goes on, and the log says at level debug what was left undone and why."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def noted(log: logging.Logger, what: str, *kinds: type[Exception]) -> Iterator[None]:
    """Go on after an error of these kinds; say at level debug what it is about, and the error itself."""
    try:
        yield
    except kinds as error:
        log.debug("%s: %s", what, str(error) or type(error).__name__)
