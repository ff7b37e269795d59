"""Errors that need no handling: work goes on, and the log names at level debug the step left undone and why."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def suppress_logged(log: logging.Logger, consequence: str, *kinds: type[Exception]) -> Iterator[None]:
    """Suppress errors of these kinds; log at level debug the consequence and the error."""
    try:
        yield
    except kinds as error:
        # An OSError's text has a file's name, which may be a guest's.
        why = getattr(error, "strerror", None) or str(error)
        log.debug("%s: %s", consequence, why or type(error).__name__)
