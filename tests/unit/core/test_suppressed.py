"""An error that nobody has to handle is suppressed and logged, and no other one."""

from __future__ import annotations

import logging

import pytest

from cloche.core.suppressed import suppress_logged

log = logging.getLogger("cloche.tests")


@pytest.mark.parametrize("error", [OSError("no room"), TimeoutError()])
def test_the_log_says_what_and_why(error: OSError, caplog: pytest.LogCaptureFixture) -> None:
    """An error without words is called by its name."""
    with caplog.at_level(logging.DEBUG, log.name), suppress_logged(log, "a thing was left", OSError):
        raise error
    assert caplog.messages == [f"a thing was left: {str(error) or 'TimeoutError'}"]


def test_other_errors_pass() -> None:
    """Only the kinds of errors that were named are suppressed."""
    with pytest.raises(ValueError, match="another"), suppress_logged(log, "a thing was left", OSError):
        raise ValueError("another")
