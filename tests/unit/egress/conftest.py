"""Turns are the whole process's: those of a test, whose clock may have been put forward, are not the next one's."""

import pytest


@pytest.fixture(autouse=True)
def no_turns_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the sandboxes with traffic of late."""
    monkeypatch.setattr("cloche.egress.stream._recent", {})
