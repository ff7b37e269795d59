"""Builds of E2B's templates: how many of them may wait."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="missing: the service's packages, which this environment lacks")
from cloche.server.e2b.builder import MOST_OF_KEY, MOST_WAITING, BuildOrder, begin
from cloche.server.e2b.errors import E2BError


def test_one_key_does_not_take_all_places_of_waiting_builds() -> None:
    """Another key finds a place, until there is none."""
    call: Any = SimpleNamespace(
        e2b=SimpleNamespace(parts={}), service=SimpleNamespace(in_background=lambda work: work.close())
    )

    def ask(key: str, number: int) -> None:
        facts: Any = SimpleNamespace(id=f"{key}-{number}", template_id="t", status="waiting")
        caller: Any = SimpleNamespace(key_id=key)
        begin(call, caller, facts, BuildOrder())

    for key, most in (("greedy", MOST_OF_KEY), ("other", MOST_WAITING - MOST_OF_KEY)):
        for number in range(most):
            ask(key, number)
        with pytest.raises(E2BError, match="may wait"):
            ask(key, most)
