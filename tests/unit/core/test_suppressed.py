"""What nobody is to handle is noted, and nothing else is kept back."""

from __future__ import annotations

import logging

import pytest

from cloche.core.suppressed import noted

log = logging.getLogger("cloche.tests")


@pytest.mark.parametrize("error", [OSError("no room"), TimeoutError()])
def test_the_log_says_what_and_why(error: OSError, caplog: pytest.LogCaptureFixture) -> None:
    """An error without words is called by its name."""
    with caplog.at_level(logging.DEBUG, log.name), noted(log, "a thing was left", OSError):
        raise error
    assert caplog.messages == [f"a thing was left: {str(error) or 'TimeoutError'}"]


def test_other_errors_pass() -> None:
    """Only what was named is noted."""
    with pytest.raises(ValueError, match="another"), noted(log, "a thing was left", OSError):
        raise ValueError("another")
