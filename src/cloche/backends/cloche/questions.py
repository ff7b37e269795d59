"""Questions of a live sandbox at a service, about hosts that no rule names: answered here, by the caller's function."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from cloche.core.errors import ClocheError
from cloche.core.remote import ANSWER_S, MOST_QUESTIONS

from ..remote.failures import Failure, RemoteUnavailable
from .calls import SandboxCalls
from .connections import begin, outcome

MOST_HOST, AGAIN_S = 253, 2.0
Decide = Callable[[str, int], Awaitable[bool | None]]
log = logging.getLogger("cloche.live")


class Answering:
    """Answer the questions of one sandbox, a bounded number at once, until it is closed."""

    def __init__(self, calls: SandboxCalls, decide: Decide):
        self._calls, self.decide = calls, decide
        self._answers: set[asyncio.Task[None]] = set()
        self._following = asyncio.ensure_future(self._follow())

    async def close(self) -> None:
        """Answer nothing more; the service refuses what waits."""
        tasks = [self._following, *self._answers]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    async def _follow(self) -> None:
        """Take the questions by a call that goes on; after a lost connection begin another one."""
        calls = self._calls
        while True:
            try:
                call = await begin(calls.account, "network.ask", {"sandbox": calls.id}, on_event=self._take)
                try:
                    await outcome(call, calls.account, "hosts were asked about", timeout_s=None)
                except asyncio.CancelledError:
                    call.cancel()
                    raise
                return
            except RemoteUnavailable as error:
                if error.failure is Failure.NOT_FOUND:
                    return
                log.debug("nobody is asked about hosts of sandbox %s for a moment: %s", calls.id, error)
            except (ClocheError, OSError) as error:
                log.debug("nobody is asked about hosts of sandbox %s for a moment: %s", calls.id, error)
            await asyncio.sleep(AGAIN_S)

    def _take(self, name: str, data: Mapping[str, Any]) -> None:
        """Begin to answer a question. Malformed and too many ones are dropped, which refuses the host."""
        number, host, port = data.get("question"), data.get("host"), data.get("port")
        if name != "question" or len(self._answers) >= MOST_QUESTIONS:
            return
        if type(number) is not int or not isinstance(host, str) or type(port) is not int:
            return
        if not 0 < len(host) <= MOST_HOST or not 0 < port < 1 << 16:
            return
        task = asyncio.ensure_future(self._answer(number, host, port))
        self._answers.add(task)
        task.add_done_callback(self._answers.discard)

    async def _answer(self, number: int, host: str, port: int) -> None:
        is_allowed = False
        try:
            async with asyncio.timeout(ANSWER_S):
                is_allowed = await self.decide(host, port) is True
        except Exception:  # of the caller's function: the host is refused
            log.warning("a question about a host was not answered", exc_info=True)
        try:
            await self._calls.ask_inside("network.answer", {"question": number, "allow": is_allowed})
        except (ClocheError, OSError) as error:
            log.debug("an answer about a host did not arrive: %s", error)
