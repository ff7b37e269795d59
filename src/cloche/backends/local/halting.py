"""Stand still while files are looked at: what sessions run in a workspace is stopped, and goes on afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .session import LocalSession


@contextlib.asynccontextmanager
async def halted(sessions: Sequence[LocalSession]) -> AsyncIterator[None]:
    """Have `sessions` stand still."""
    async with contextlib.AsyncExitStack() as stack:
        for session in sessions:
            await stack.enter_async_context(session.halted())
        yield
