"""`run`, and the conversion of a coroutine function into a blocking one: callbacks run in the caller's thread.

It is separate from `sync`, whose classes import modules that a throwaway run does not need.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, ParamSpec, TypeVar

from .blocking import calls
from .execution.run import arun

P = ParamSpec("P")
T = TypeVar("T")

_CALLBACKS = ("on_output", "on_event")


def blocking(
    function: Callable[P, Coroutine[Any, Any, T]], *, name: str, module: str = __name__, runs_anywhere: bool = False
) -> Callable[P, T]:
    """Return `function` as a blocking function with the same signature; callbacks run in the caller's thread.

    `runs_anywhere` says that it needs no loop that outlives the call; without callbacks it then runs entirely in the
    caller's thread.
    """

    @functools.wraps(function)
    def call_and_wait(*args: P.args, **kwargs: P.kwargs) -> T:
        if runs_anywhere and not _has_callbacks(kwargs) and calls.can_run_inline():
            return calls.run(function, *args, **kwargs)
        return wait_for(function, args, kwargs)

    call_and_wait.__name__ = call_and_wait.__qualname__ = name
    call_and_wait.__module__ = module
    return call_and_wait


def wait_for(
    function: Callable[..., Coroutine[Any, Any, T]],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    is_eager: bool = False,
) -> T:
    """Call `function` in the shared loop and wait; callbacks among `kwargs` run in this thread."""
    if _has_callbacks(kwargs):
        return calls.call_delivering(lambda deliver: function(*args, **_delivered(kwargs, deliver)))
    return calls.call(lambda: function(*args, **kwargs), is_eager=is_eager)


def _has_callbacks(kwargs: Mapping[str, Any]) -> bool:
    return any(map(kwargs.get, _CALLBACKS))


def _delivered(kwargs: Mapping[str, Any], deliver: calls.Deliver) -> dict[str, Any]:
    """Replace each callback by a function that queues the call for the waiting thread."""
    changed = dict(kwargs)
    for name in _CALLBACKS:
        callback = changed.get(name)
        if callback is not None:
            changed[name] = _queued(callback, deliver)
    return changed


def _queued(callback: Callable[..., None], deliver: calls.Deliver) -> Callable[..., None]:
    return lambda *args: deliver(functools.partial(callback, *args))


run = blocking(arun, name="run", runs_anywhere=True)
