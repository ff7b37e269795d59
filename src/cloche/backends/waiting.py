"""Waiting: for what must be finished, whatever happens meanwhile; for the first of several."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

T = TypeVar("T")


async def finish(work: Awaitable[T]) -> T:
    """Wait until `work` is done, however often the waiting is cancelled; then be cancelled."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # nobody else will ask for it
        raise cancelled
    return task.result()


async def any_of(*futures: asyncio.Future[Any]) -> None:
    """Wait until one of them is done; cheaper than `asyncio.wait`, which every cell would pay for."""
    woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def wake(_: object) -> None:
        if not woken.done():
            woken.set_result(None)

    for one in futures:
        one.add_done_callback(wake)
    try:
        await woken
    finally:
        for one in futures:
            one.remove_done_callback(wake)
