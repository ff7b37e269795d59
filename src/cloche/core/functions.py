"""The protocols between backends and the caller's functions that a guest may call; see `cloche.functions`.

A backend carries bytes alone: those of the guest's calls come here, and those of the answers go back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, runtime_checkable


class CallTransport(Protocol):
    """Carry the frames of one guest's calls."""

    @property
    def is_full(self) -> bool:
        """Tell whether the guest has many answers to read."""
        ...

    def send(self, data: bytes, /) -> None:
        """Queue a frame for the guest."""
        ...

    async def drain(self) -> None:
        """Wait until the guest has read most of what was queued, or is gone."""
        ...

    def pause(self, is_paused: bool, /) -> None:
        """Stop, or go on, reading the guest's bytes."""
        ...

    def hang_up(self) -> None:
        """Send nothing more: the guest learns that its calls, open and further ones, have no answers."""
        ...


class OpenCalls(Protocol):
    """Serve the calls of one guest, on one event loop."""

    @property
    def is_running(self) -> bool:
        """Tell whether a function runs, also one that was cancelled and cleans up."""
        ...

    def receive(self, data: bytes, /) -> None:
        """Take bytes of the guest."""
        ...

    def resume(self) -> None:
        """Go on, as the transport is full no more."""
        ...

    def renew(self) -> None:
        """Count anew, for the next cell of a session."""
        ...

    def follow(self, earlier: OpenCalls, /) -> None:
        """Count on where an earlier guest of the same session has ended."""
        ...

    def notes(self) -> Mapping[str, Any]:
        """Return the entries for a result's meta."""
        ...

    def end(self) -> None:
        """Cancel all calls; nothing more is sent."""
        ...

    async def close(self) -> None:
        """End, and wait a moment for the cancelled functions."""
        ...


class OfferedFunctions(Protocol):
    """Be the functions that the guests of one sandbox may call."""

    @property
    def names(self) -> Sequence[str]:
        """Return what they are called."""
        ...

    def serve(self, transport: CallTransport, /) -> OpenCalls:
        """Serve one guest, on the running event loop."""
        ...


@runtime_checkable
class SupportsFunctions(Protocol):
    """Be an open sandbox whose programs and sessions may call functions of the caller."""

    def offer_functions(self, functions: OfferedFunctions, /) -> None:
        """Offer them to all programs and sessions that start from now on."""
        ...


class OffersFunctions:
    """Be a sandbox whose guests may call the functions that it was offered, or those of a service's client."""

    _functions: OfferedFunctions | None = None

    def offer_functions(self, functions: OfferedFunctions | None) -> None:
        """Let programs and sessions that start from now on call functions of the caller."""
        self._functions = functions

    @property
    def functions(self) -> OfferedFunctions | None:
        """Return the functions for what starts now."""
        return _of_client.get() or self._functions

    @property
    def has_functions(self) -> bool:
        """Tell whether what starts now may call functions."""
        return self.functions is not None


_of_client: ContextVar[OfferedFunctions | None] = ContextVar("functions", default=None)


def functions_of_client() -> OfferedFunctions | None:
    """Return the functions of the client whose work this is, in a service; None for others."""
    return _of_client.get()


@contextmanager
def offering(functions: OfferedFunctions) -> Iterator[None]:
    """Offer functions of a service's client to all programs and sessions that the body starts, in any sandbox."""
    token = _of_client.set(functions)
    try:
        yield
    finally:
        _of_client.reset(token)
