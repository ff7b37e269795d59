"""Interrupts that cross an answer: what a time-out does to one cell, it does not do to the next."""

from __future__ import annotations

import asyncio
import time

import pytest

import cloche
from cloche.backends.local.session import LocalSession
from tests.harness.processes import held_up


def inner_of(session: cloche.AsyncSession) -> LocalSession:
    """Return what the backend holds of a session."""
    found = session._interpreter.opened
    assert isinstance(found, LocalSession)
    return found


def test_an_interrupt_that_comes_late_is_not_for_the_next_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    """The helper is held up while a cell, which is over its time, answers by itself; then it does what it was told."""
    monkeypatch.setattr("cloche.backends.session.INTERRUPT_TIMEOUT_S", 60.0)

    async def cross() -> None:
        async with cloche.AsyncSandbox(live=False) as sandbox:
            session = await sandbox.session()
            await session.run("import time")
            inner = inner_of(session)
            assert inner.fork_tree is not None
            with held_up([inner.fork_tree.connection.helper_pid], for_s=7.0):
                late = await session.run("time.sleep(5); 'answered'", timeout=0.2)
                following = await session.run("time.sleep(4); 'answered, too'", timeout=60)
            assert (late.status, late.value) == ("timeout", "answered")
            assert (following.status, following.value) == ("ok", "answered, too")

    asyncio.run(cross())


def test_a_cell_that_answers_in_time_is_in_time() -> None:
    """Also where its caller was kept from reading the answer until after that; and the next one is left alone."""

    async def stall() -> None:
        async with cloche.AsyncSandbox(live=False) as sandbox:
            session = await sandbox.session()
            await session.run("import time")
            asyncio.get_running_loop().call_later(0.05, time.sleep, 7)
            early = await session.run("time.sleep(0.2); 'answered'", timeout=5)
            following = await session.run("time.sleep(1); 'answered, too'", timeout=60)
            assert (early.status, early.value) == ("ok", "answered")
            assert (following.status, following.value) == ("ok", "answered, too")

    asyncio.run(stall())
