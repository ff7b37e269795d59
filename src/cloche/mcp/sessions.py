"""Workspaces and interpreters that outlive a call: one toolbox for each connection, and those opened by handle.

Theory of operation: a session is a toolbox, with a workspace and interpreters that are kept between calls. Up to
2025-11-25 a connection is a session and ends with it. From 2026-07-28 on every request stands alone: a client that
wants to keep anything opens a session with a tool and passes its handle; without one, a call has a workspace of its
own, which is removed afterwards. A process that serves one client over its standard streams is that client's session
at every revision.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from types import TracebackType
from typing import Self

import anyio

from cloche.agent.toolbox import Toolbox
from cloche.core.errors import InvalidRequest
from cloche.core.record import dataclass, field

MOST_SESSIONS = 64
IDLE_S = 1800.0
SWEEP_S = 5.0
Make = Callable[[str | None, bool], Toolbox]  # of its owner, and whether it is still there after the call
log = logging.getLogger("cloche.mcp")


def quota(max_sessions: int, owners: int) -> int:
    """Return how many of `most` one of several owners may have, so that none of them can keep another one out."""
    return max(1, max_sessions // max(1, owners))


@dataclass(slots=True)
class Session:
    """Hold one workspace: its owner, the number of calls that use it, and when it was last used."""

    toolbox: Toolbox
    owner: str | None
    stack: AsyncExitStack
    idles: bool
    users: int = 0
    idle_since: float = field(default_factory=time.monotonic)


class Sessions:
    """Keep the workspaces of a server, made by `make`, at most `most` that clients opened and as many others.

    One that a client opened is closed after `idle_s` seconds without use. Of each kind one owner has at most
    `most_each`, by default all.
    """

    def __init__(self, make: Make, *, most: int, idle_s: float, most_each: int | None = None):
        self._make, self._most, self._idle_s = make, most, idle_s
        self._most_each = most if most_each is None else most_each
        self._open: dict[str, Session] = {}
        self._sweeping: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._sweeping = asyncio.create_task(self._sweep())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._sweeping is not None:
            self._sweeping.cancel()
            with suppress(asyncio.CancelledError):
                await self._sweeping
        for handle in tuple(self._open):
            await self._end(handle)

    async def open(self, owner: str | None, *, idles: bool = True, is_kept: bool = True) -> str:
        """Open a session for `owner` and return its handle, which cannot be guessed. Raises InvalidRequest.

        One without an idle limit is closed by its opener, and with the server; one that is not kept, after a call.
        """
        # Counted by kind, so that sessions that idle keep no call out.
        owners = [session.owner for session in self._open.values() if session.idles is idles]
        if len(owners) >= self._most:
            raise InvalidRequest(f"{self._most} sessions are open, the maximum; close one, or try later")
        if owners.count(owner) >= self._most_each:
            raise InvalidRequest(
                f"this token has {self._most_each} sessions open, the maximum of a token; close one, or try later"
            )
        toolbox, stack = self._make(owner, is_kept), AsyncExitStack()
        handle = secrets.token_urlsafe(24)
        self._open[handle] = Session(toolbox, owner, stack, idles)  # counted before anything is waited for
        try:
            await stack.enter_async_context(toolbox)
        except BaseException:
            del self._open[handle]
            raise
        return handle

    async def close(self, handle: str, owner: str | None) -> None:
        """End a session and its processes. Raises InvalidRequest for a handle that `owner` does not have."""
        self._find(handle, owner)
        await self.forget(handle)

    @asynccontextmanager
    async def use(self, handle: str, owner: str | None) -> AsyncIterator[Toolbox]:
        """Give a session's tools; while they are used it does not idle. Raises InvalidRequest, as `close` does."""
        session = self._find(handle, owner)
        session.users += 1
        try:
            yield session.toolbox
        finally:
            session.users -= 1
            session.idle_since = time.monotonic()

    @asynccontextmanager
    async def passing(self, owner: str | None) -> AsyncIterator[Toolbox]:
        """Give tools whose workspace is gone afterwards. Raises InvalidRequest when too many sessions are open."""
        handle = await self.open(owner, idles=False, is_kept=False)
        try:
            async with self.use(handle, owner) as toolbox:
                yield toolbox
        finally:
            await self.forget(handle)

    def _find(self, handle: str, owner: str | None) -> Session:
        session = self._open.get(handle)
        if session is None or session.owner != owner:
            raise InvalidRequest("this session does not exist, or no longer; open_session opens one")
        return session

    async def forget(self, handle: str) -> None:
        """End a session, if it is still there; a call that is cancelled meanwhile does not keep it from ending."""
        session = self._open.pop(handle, None)
        if session is not None:
            with anyio.CancelScope(shield=True):
                await session.stack.aclose()

    async def _end(self, handle: str) -> None:
        """End a session; a failure is logged, so that others can end, too."""
        try:
            await self.forget(handle)
        except Exception:
            log.exception("a session could not be closed")

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(min(SWEEP_S, self._idle_s))
            now = time.monotonic()
            for handle, session in tuple(self._open.items()):
                if session.idles and not session.users and now - session.idle_since >= self._idle_s:
                    await self._end(handle)
