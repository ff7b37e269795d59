"""Run every attempt of a module in every place it is for, and print who was counted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.harness.escape.attempts import FORK, FOUND_OPEN, JAIL, LIVE, SESSION, Attempt, key_of, places_of
from tests.harness.escape.controls import Controls
from tests.harness.escape.targets import open_canaries

_opened: list[Controls] = []
# Some minutes of attempts that the jail itself is held to in every test run: a cell of a session, and of a fork, and a
# live sandbox, are held to one in six each, to different ones, and to the others by the soak; there an ordinary
# user tries them, too.
EVERY = 6
TURN = {SESSION: 0, FORK: 2, LIVE: 4}


@pytest.fixture(scope="session")
def controls() -> Iterator[Controls]:
    """Plant the canaries once, and remember the control of each attempt."""
    with open_canaries() as canaries:
        _opened.append(Controls(canaries))
        try:
            yield _opened[-1]
        finally:
            _opened[-1].close()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give a test that asks for an attempt and a place all of its module's that this user can show to work."""
    if {"attempt", "where"} <= set(metafunc.fixturenames):
        attempts = [a for a in metafunc.module.ATTEMPTS if a.has_control_here]
        pairs = [_pair(a, where, turn) for turn, a in enumerate(attempts) for where in places_of(a)]
        metafunc.parametrize(("attempt", "where"), pairs)


def _pair(attempt: Attempt, where: str, turn: int) -> Any:
    found = FOUND_OPEN.get((key_of(attempt), where))
    marks = [pytest.mark.xfail(reason=found, strict=True, raises=AssertionError)] if found else []
    if where in TURN and turn % EVERY != TURN[where]:
        marks.append(pytest.mark.soak)
    if where == JAIL or attempt.family in ("network", "metadata"):
        marks.append(pytest.mark.both_users)
    elif where in TURN:
        marks.append(pytest.mark.user_soak)
    return pytest.param(attempt, where, id=f"{attempt.name}-{where}", marks=marks)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the table of families, and each attempt that was not counted with the reason."""
    for controls in _opened:
        terminalreporter.section("escape attempts")
        for line in controls.report():
            terminalreporter.line(line)
