"""The queue: bounded, first in first out, across threads and loops."""

from __future__ import annotations

import asyncio
import threading

import pytest

from cloche.execution.concurrency import Slots, default_count


def test_no_more_than_the_count_run_at_once() -> None:
    """Ten runs through three slots never make more than three at once."""
    slots, now, most = Slots(3), 0, 0

    async def one() -> None:
        nonlocal now, most
        async with slots.hold():
            now += 1
            most = max(most, now)
            await asyncio.sleep(0.01)
            now -= 1

    async def all_of_them() -> None:
        await asyncio.gather(*(one() for _ in range(10)))

    asyncio.run(all_of_them())
    assert most == 3


def test_waiters_are_served_in_the_order_they_came() -> None:
    """Who waits longest is next."""
    slots, order = Slots(1), []

    async def one(number: int) -> None:
        async with slots.hold():
            order.append(number)
            await asyncio.sleep(0)

    async def all_of_them() -> None:
        await asyncio.gather(*(one(number) for number in range(20)))

    asyncio.run(all_of_them())
    assert order == list(range(20))


def test_a_slot_passes_from_one_threads_loop_to_another() -> None:
    """Slots are the process's, whatever loop a run is in."""
    slots, now, most, done = Slots(2), 0, 0, 0
    guard, together = threading.Lock(), threading.Barrier(20)

    async def one() -> None:
        nonlocal now, most, done
        async with slots.hold():
            with guard:
                now += 1
                most = max(most, now)
            await asyncio.sleep(0.005)
            with guard:
                now -= 1
                done += 1

    def run() -> None:
        together.wait(30)
        asyncio.run(one())

    threads = [threading.Thread(target=run) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (most, done, slots.waiting) == (2, 20, 0)


def test_a_cancelled_waiter_leaves_the_queue() -> None:
    """Cancelling a queued run loses no slot and holds up nobody behind it."""
    slots = Slots(1)

    async def scenario() -> None:
        async with slots.hold():
            waiting = asyncio.create_task(_hold_once(slots))
            behind = asyncio.create_task(_hold_once(slots))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert slots.waiting == 1
        await asyncio.wait_for(behind, 30)
        await asyncio.wait_for(_hold_once(slots), 30)

    asyncio.run(scenario())


def test_a_slot_granted_to_a_cancelled_waiter_is_passed_on() -> None:
    """A grant and a cancellation at the same moment lose no slot."""
    slots = Slots(1)

    async def scenario() -> None:
        async with slots.hold():
            waiting = asyncio.create_task(_hold_once(slots))
            await asyncio.sleep(0)
        waiting.cancel()  # the slot is granted, and the waiter has not run since
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await asyncio.wait_for(_hold_once(slots), 30)

    asyncio.run(scenario())


def test_a_waiter_whose_loop_is_gone_is_passed_over() -> None:
    """A closed loop cannot be woken; the next waiter gets the slot."""
    slots = Slots(1)
    ours, gone = asyncio.new_event_loop(), asyncio.new_event_loop()
    held = slots.hold()
    ours.run_until_complete(held.__aenter__())
    lost = gone.create_task(_hold_once(slots))
    gone.run_until_complete(asyncio.sleep(0))
    assert slots.waiting == 1
    gone.close()
    ours.run_until_complete(held.__aexit__(None, None, None))
    ours.run_until_complete(asyncio.wait_for(_hold_once(slots), 30))
    ours.close()
    lost._log_destroy_pending = False  # type: ignore[attr-defined]  # it is lost on purpose


def test_the_default_is_four_per_core() -> None:
    """Concurrency is bounded by four runs per core."""
    assert default_count() % 4 == 0


async def _hold_once(slots: Slots) -> None:
    async with slots.hold():
        pass
