"""Play every attempt of a module at every level it is for, and print who was counted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.escape.ledger import Ledger
from tests.escape.stage import open_stage

_ledgers: list[Ledger] = []


@pytest.fixture(scope="session")
def ledger() -> Iterator[Ledger]:
    """Plant the canaries once, and remember the control of each attempt."""
    with open_stage() as stage:
        _ledgers.append(Ledger(stage))
        yield _ledgers[-1]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give a test that asks for an attempt and a level all of its module's that this user can show to work."""
    if {"attempt", "level"} <= set(metafunc.fixturenames):
        attempts = [a for a in metafunc.module.ATTEMPTS if a.has_control_here]
        pairs = [pytest.param(a, level, id=f"{a.name}-{level}") for a in attempts for level in a.levels]
        metafunc.parametrize(("attempt", "level"), pairs)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the table of families, and each attempt that was not counted with the reason."""
    for ledger in _ledgers:
        terminalreporter.section("escape attempts")
        for line in ledger.report():
            terminalreporter.line(line)
