"""A live sandbox of the e2b backend: the only container of its machine; see `containers.live`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cloche.core.enforcement import Enforcement
from cloche.core.limits import Limits
from cloche.core.policy import Policy
from cloche.core.request import Request

from ..containers.container import ContainerWire, boot_message
from ..containers.live import TEMPORARY, ContainerLiveSandbox
from ..containers.program import ENVIRONMENT, IMAGE_PATH, WORKSPACE, Program, SessionProgram, program_of, session_in
from .machine import E2BMachine
from .sandbox import E2BContainer


class E2BLiveSandbox(ContainerLiveSandbox[E2BContainer]):
    """One sandbox at E2B with one container, created on first use."""

    backend = "e2b"

    def __init__(self, *, machine: E2BMachine, policy: Policy, limits: Limits, enforcement: Enforcement):
        super().__init__(policy=policy, limits=limits, enforcement=enforcement)
        self._machine = machine

    def _make(self) -> tuple[E2BContainer, ContainerWire]:
        if self._machine.is_lost:  # an earlier start was cancelled
            self._machine = self._machine.another()
        container = E2BContainer(self._machine)
        return container, container.start_live(boot_message(self._policy.preload, live=self.live_settings()))

    def _hasten(self) -> None:
        self._machine.end_soon()

    async def close(self) -> None:
        """End the machine and wait until it has ended."""
        try:
            await super().close()
        finally:  # also if the wait is cancelled
            await self._machine.close()

    def _in_memory(self) -> Sequence[str]:
        return (WORKSPACE, *TEMPORARY)

    def _build_program(self, request: Request, number: int) -> Program:
        return program_of(request, self._machine.create(), {"PATH": IMAGE_PATH}, has_interpreter=True, number=number)

    def _build_session_program(self, language: str, env: Mapping[str, str]) -> SessionProgram:
        return session_in(language, env, self._machine.create())

    def _variables(self) -> Mapping[str, str]:
        return {"PATH": IMAGE_PATH, **ENVIRONMENT}

    def _notes(self) -> dict[str, Any]:
        return self._machine.notes()
