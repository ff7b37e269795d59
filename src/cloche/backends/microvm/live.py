"""A sandbox of the microvm backend that lives: the only container of its machine; see `containers.live`."""

from __future__ import annotations

import asyncio
from typing import Any

from cloche.core.enforcement import Enforcement
from cloche.core.limits import Limits
from cloche.core.loops import finish
from cloche.core.policy import Policy

from ..containers.container import ByteReceiver
from ..containers.machines import LiveInMachine
from ..layout import SYSTEM_PATH
from .machine import VirtualMachine
from .plan import HostAcceleration, MachineImage, Monitor, plan_machine
from .sandbox import VMContainer

# Writable folders in one file system with the workspace.
HOMES = ("/root", "/var", "/opt", "/srv", "/run")


class MicroVMLiveSandbox(LiveInMachine[VMContainer]):
    """One machine with one container, which boots on first use."""

    path = SYSTEM_PATH
    more_homes = HOMES

    def __init__(
        self, *, name: str, image: MachineImage, monitor: Monitor, acceleration: HostAcceleration,
        policy: Policy, limits: Limits, enforcement: Enforcement,
    ):  # fmt: skip
        super().__init__(policy=policy, limits=limits, enforcement=enforcement)
        self.backend = name
        self._image, self._monitor, self._acceleration = image, monitor, acceleration
        self._plan = plan_machine(
            policy, limits, acceleration.kind, acceleration.counter_khz, is_live=True, homes=self._homes()
        )
        self._machine = self._new_machine()

    def _new_machine(self) -> VirtualMachine:
        return VirtualMachine(self._plan, self._image, self._monitor)

    def _make(self, receiver: ByteReceiver) -> VMContainer:
        if self._machine.is_killed:  # an earlier start was cancelled
            self._machine.wait()
            self._machine = self._new_machine()
        return self._launch(VMContainer(self._machine), receiver)

    def _hasten(self) -> None:
        self._machine.kill()

    async def close(self) -> None:
        """Kill the machine and wait until it has ended."""
        if self.link is None:  # it may be booting
            self._machine.kill()
        try:
            await super().close()
        finally:  # also if the wait is cancelled
            self._machine.kill()
            await finish(asyncio.to_thread(self._machine.wait))

    def _equipment(self) -> MachineImage:
        return self._image

    def _notes(self) -> dict[str, Any]:
        engine = f"{self._monitor.engine} ({self._acceleration.kind})"
        return {"backend": self.backend, "image": self._image.name, "engine": engine}
