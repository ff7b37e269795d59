"""A live sandbox of the e2b backend: the only container of its machine; see `containers.live`."""

from __future__ import annotations

from typing import Any

from cloche.core.enforcement import Enforcement
from cloche.core.limits import Limits
from cloche.core.policy import Policy

from ..containers.container import ByteReceiver
from ..containers.machines import LiveInMachine, LookedInto
from .machine import E2BMachine
from .sandbox import E2BContainer


class E2BLiveSandbox(LiveInMachine[E2BContainer]):
    """One sandbox at E2B with one container, created on first use."""

    backend = "e2b"

    def __init__(self, *, machine: E2BMachine, policy: Policy, limits: Limits, enforcement: Enforcement):
        super().__init__(policy=policy, limits=limits, enforcement=enforcement)
        self._machine = machine

    def _make(self, receiver: ByteReceiver) -> E2BContainer:
        if self._machine.is_lost:  # an earlier start was cancelled
            self._machine = self._machine.another()
        return self._launch(E2BContainer(self._machine), receiver)

    def _hasten(self) -> None:
        self._machine.end_soon()

    async def close(self) -> None:
        """End the machine and wait until it has ended."""
        try:
            await super().close()
        finally:  # also if the wait is cancelled
            await self._machine.close()

    def _equipment(self) -> LookedInto:
        return self._machine.create()

    def _notes(self) -> dict[str, Any]:
        return self._machine.notes()
