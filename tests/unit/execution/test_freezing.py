"""A sandbox that stands still while an approver decides."""

from __future__ import annotations

import asyncio

import pytest

from cloche.agent.approval import ApprovalRequest, Decision, Risk
from cloche.execution.freezing import Freezing
from tests.harness.loops import in_loop


def test_a_call_that_is_cancelled_while_its_sandbox_is_paused_resumes_it() -> None:
    """Else a program that cancels its own call has a sandbox that stands still, and whose clocks do, for good."""

    class Opened:
        asked: list[str] = []  # noqa: RUF012 - of one object
        is_sent, is_done = asyncio.Event(), asyncio.Event()

        async def ask(self, order: str, **_: object) -> None:
            self.asked.append(order)
            self.is_sent.set()
            await self.is_done.wait()

    async def approver(_: ApprovalRequest) -> Decision:
        raise AssertionError

    async def claim() -> None:
        freezing, opened = Freezing(approver), Opened()
        freezing.freeze(opened)
        call = asyncio.ensure_future(freezing(ApprovalRequest(tool="remove", risk=Risk.HIGH, arguments={})))
        await opened.is_sent.wait()
        call.cancel()
        await asyncio.sleep(0)
        opened.is_done.set()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert opened.asked == ["pause", "resume"]

    in_loop(claim)
