"""The workspaces of a server: whose they are, how many, and how they end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest

from cloche.agent.toolbox import Toolbox
from cloche.core.errors import InvalidRequest
from cloche.mcp.sessions import Sessions, quota


def _toolbox(_owner: str | None, _is_kept: bool) -> Toolbox:
    return Toolbox()


def use(work: Callable[[Sessions], Awaitable[None]], *, most: int = 3, idle_s: float = 60.0) -> None:
    """Do something with the sessions of a server."""

    async def main() -> None:
        async with asyncio.timeout(60), Sessions(_toolbox, most=most, idle_s=idle_s) as sessions:
            await work(sessions)

    asyncio.run(main())


async def _has(sessions: Sessions, handle: str, owner: str | None) -> bool:
    try:
        async with sessions.use(handle, owner):
            return True
    except InvalidRequest:
        return False


def test_a_session_has_one_owner() -> None:
    """Whoever has not opened it neither uses nor closes it; what they hear does not say that it exists."""

    async def work(sessions: Sessions) -> None:
        handle = await sessions.open("me")
        assert await _has(sessions, handle, "me")
        for other in ("you", None):
            assert not await _has(sessions, handle, other)
            with pytest.raises(InvalidRequest, match="this session does not exist"):
                await sessions.close(handle, other)
        await sessions.close(handle, "me")
        assert not await _has(sessions, handle, "me")

    use(work)


def test_sessions_are_counted() -> None:
    """As many as may be are open; one that ends makes room, and those that idle keep no passing call out."""

    async def work(sessions: Sessions) -> None:
        handles = [await sessions.open("me") for _ in range(3)]
        assert len(set(handles)) == 3
        with pytest.raises(InvalidRequest, match="3 sessions are open"):
            await sessions.open("you")
        async with sessions.passing("you"), sessions.passing("me"), sessions.passing("me"):
            with pytest.raises(InvalidRequest, match="3 sessions are open"):
                async with sessions.passing("you"):
                    pass
        await sessions.close(handles[0], "me")
        await sessions.open("you")

    use(work)


def test_one_owner_does_not_keep_the_others_out() -> None:
    """Each has a share, of those that are opened and of those that are gone after a call."""

    async def main() -> None:
        async with Sessions(_toolbox, most=3, idle_s=60, most_each=2) as sessions:
            for _ in range(2):
                await sessions.open("me")
                await sessions.open("me", idles=False)
            with pytest.raises(InvalidRequest, match="this token has 2 sessions open"):
                await sessions.open("me")
            with pytest.raises(InvalidRequest, match="this token has 2 sessions open"):
                async with sessions.passing("me"):
                    pass
            await sessions.open("you")
            async with sessions.passing("you"):
                pass

    asyncio.run(main())


@pytest.mark.parametrize(("most", "owners", "each"), [(64, 0, 64), (64, 1, 64), (64, 2, 32), (64, 3, 21), (2, 5, 1)])
def test_owners_have_equal_shares(most: int, owners: int, each: int) -> None:
    """All of them together never want more than there is, unless there is less than one for each."""
    assert quota(most, owners) == each


def test_a_session_that_idles_is_closed() -> None:
    """It is not while it is used, and not where whoever opened it closes it."""

    async def work(sessions: Sessions) -> None:
        busy, idle, home = await sessions.open("me"), await sessions.open("me"), await sessions.open("me", idles=False)
        async with sessions.use(busy, "me"):
            while await _is_there(sessions, idle):  # noqa: ASYNC110 - it is what is waited for
                await asyncio.sleep(0.01)
            assert await _is_there(sessions, busy)
        assert await _is_there(sessions, home)

    use(work, idle_s=0.05)


def test_a_cancelled_call_closes_its_workspace() -> None:
    """Cancellation, which the protocol package repeats until it is obeyed, does not cut the tidying up short."""
    closed = []

    class Slow(Toolbox):
        async def __aexit__(self, *error: Any) -> None:
            await asyncio.sleep(0.05)
            await super().__aexit__(*error)
            closed.append(self)

    async def main() -> None:
        async with Sessions(lambda *_: Slow(), most=3, idle_s=60) as sessions:
            with anyio.CancelScope() as scope:
                async with sessions.passing("me"):
                    scope.cancel()
                    await asyncio.sleep(60)
            assert len(closed) == 1

    asyncio.run(main())


async def _is_there(sessions: Sessions, handle: str) -> Any:
    return handle in sessions._open
