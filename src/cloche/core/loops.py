"""Which event loops run nothing but one blocking call: whoever waits in one of them keeps nobody else waiting.

What they run begins by hand, without a task (see `runtime.by_hand`), and becomes one when it waits for the first time.
"""

from __future__ import annotations

import asyncio
import weakref
from asyncio import AbstractEventLoop

_alone: weakref.WeakSet[AbstractEventLoop] = weakref.WeakSet()


def keep_for_one_call(loop: AbstractEventLoop) -> None:
    """Say that this loop runs one call after the other, each by itself."""
    _alone.add(loop)


def runs_one_call(loop: AbstractEventLoop) -> bool:
    """Tell whether what runs in this loop is all that it runs."""
    return loop in _alone


async def become_task() -> None:
    """Go on as a task, which time-outs, groups and others' code ask for; a coroutine that is one goes on at once."""
    if asyncio.current_task() is None:
        await asyncio.sleep(0)
