"""Calls about one sandbox at a service."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from typing import Any

from cloche.core.errors import ClocheError
from cloche.core.remote import RemoteAccount

from ..live_files import FILE_S
from .connections import ask

LOOK_S = 5.0
log = logging.getLogger("cloche.live")


class SandboxCalls:
    """Make calls about one sandbox."""

    def __init__(self, account: RemoteAccount, sandbox_id: str):
        self.account, self.id = account, sandbox_id
        self._tasks: set[asyncio.Task[None]] = set()

    async def ask_inside(
        self, verb: str, fields: Mapping[str, Any] | None = None, *, path: str | None = None, timeout_s: float = FILE_S
    ) -> Mapping[str, Any]:
        """Make a call that has only a result, and return it."""
        return await ask(
            self.account, verb, {"sandbox": self.id, **(fields or {})}, path=path, timeout_s=timeout_s,
            where=self.where(),
        )  # fmt: skip

    def where(self) -> str:
        """Return the sentence of errors that says where to look at the sandbox."""
        return f"It is sandbox {self.id}: look at {self.account.url}/api/sandboxes/{self.id}."

    async def is_paused(self) -> bool:
        """Return whether the sandbox is paused; False if that cannot be determined."""
        with contextlib.suppress(ClocheError):
            return (await ask(self.account, "sandbox.look", {"sandbox": self.id}, timeout_s=LOOK_S)).get(
                "state"
            ) == "paused"
        return False

    def do_soon(self, verb: str, fields: Mapping[str, Any]) -> None:
        """Make a call in the background; its outcome is ignored. Such calls keep their order."""
        before = tuple(self._tasks)

        async def do() -> None:
            if before:
                await asyncio.wait(before)  # keep the order of the calls
            try:
                await self.ask_inside(verb, fields)
            except (ClocheError, OSError) as error:
                log.debug("%s of sandbox %s: %s", verb, self.id, error)

        task = asyncio.ensure_future(do())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def settle(self, seconds: float) -> None:
        """Wait for the background calls."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=seconds)
