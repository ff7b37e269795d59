"""Which event loops run nothing but one blocking call: whoever waits in one of them keeps nobody else waiting."""

from __future__ import annotations

import weakref
from asyncio import AbstractEventLoop

_alone: weakref.WeakSet[AbstractEventLoop] = weakref.WeakSet()


def keep_for_one_call(loop: AbstractEventLoop) -> None:
    """Say that this loop runs one call after the other, each by itself."""
    _alone.add(loop)


def runs_one_call(loop: AbstractEventLoop) -> bool:
    """Tell whether what runs in this loop is all that it runs."""
    return loop in _alone
