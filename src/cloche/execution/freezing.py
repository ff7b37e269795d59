"""A live sandbox that stands still, with the clocks of its runs, while an approver decides about a call out of it."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from cloche.core.errors import ClocheError
from cloche.core.loops import finish
from cloche.core.protocols import OpenLiveSandbox

if TYPE_CHECKING:
    from cloche.agent.approval import ApprovalRequest, Approver, Decision

log = logging.getLogger("cloche.tools")


class Freezing:
    """Ask an approver while the sandbox is paused, from the first open question to the last one.

    A sandbox that cannot be paused goes on meanwhile.
    """

    def __init__(self, approver: Approver):
        self._approver = approver
        self._opened: OpenLiveSandbox | None = None
        self._asked, self._is_frozen, self._turn = 0, False, asyncio.Lock()

    def freeze(self, opened: Any) -> None:  # noqa: ANN401 - any open sandbox
        """Pause this sandbox from now on."""
        self._opened = opened if hasattr(opened, "ask") else None  # a protocol's `isinstance` reads each property

    async def __call__(self, request: ApprovalRequest) -> Decision:
        """Return the approver's decision."""
        self._asked += 1
        try:
            await finish(self._follow())  # also if the call is cancelled meanwhile: a pause is sent before it is noted
            return await self._approver(request)
        finally:
            self._asked -= 1
            await finish(self._follow())

    async def _follow(self) -> None:
        async with self._turn:
            is_wanted = self._asked > 0
            if self._opened is None or is_wanted == self._is_frozen:
                return
            try:
                if is_wanted:  # the lifetime goes on, so that one whose caller dies meanwhile still ends
                    await self._opened.ask("pause", life_goes_on=True)
                else:
                    await self._opened.ask("resume")
            except ClocheError as error:
                log.debug("a sandbox is not paused while an approver decides: %s", error)
            self._is_frozen = is_wanted
