"""One open sandbox of the microvm backend, and the container of one run or session in its machine.

The workspace is a tmpfs in one machine, which lives as long as the sandbox. Each run gets a new container in the
machine when the container of the previous run is empty. Each session keeps its own container. If the machine is lost,
so is the workspace.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cloche.core.enforcement import Enforcement
from cloche.core.errors import InvalidRequest, StartFailed
from cloche.core.limits import Limits
from cloche.core.loops import finish
from cloche.core.policy import Policy
from cloche.core.request import Request
from cloche.core.result import KillCause, Observed
from cloche.core.suppressed import suppress_logged

from ..containers.container import ByteReceiver
from ..containers.machines import SharedSandbox, SharingContainer
from ..layout import SYSTEM_PATH
from ..session_languages import session_language
from .machine import VirtualMachine
from .plan import MOST_SESSIONS, HostAcceleration, MachineImage, Monitor, plan_machine

log = logging.getLogger("cloche.microvm")
END_S = 8.0  # wait for the machine to end a container
KILLED = -signal.SIGKILL & 0xFF  # as reported by the machine; only its kernel or the host can kill a first process


class VMContainer(SharingContainer[MachineImage]):
    """One of the containers in a machine."""

    step = "boot"
    shares_streams = True  # a port

    def __init__(self, machine: VirtualMachine):
        super().__init__()
        self.machine, self.rootfs = machine, machine.image
        self._number, self._is_first = 0, False
        self._left: Mapping[str, Any] = {}

    @property
    def label(self) -> str:
        """Return the name for messages: the machine if it is lost, else the container."""
        return "virtual machine" if self.machine.is_lost else "container in the virtual machine"

    @property
    def slowness(self) -> float:
        """Return the factor for the time-outs of programs inside."""
        return self.machine.monitor.slowness(self.machine.plan)

    @property
    def ready_s(self) -> float:
        """Return the maximum seconds until its first process is ready."""
        return self.machine.boot_s

    def _open(self, make_boot: Callable[[], bytes], receiver: ByteReceiver | None) -> None:
        """Boot the machine unless it runs, and make the container."""
        machine = self.machine
        self._is_first = not machine.has_booted
        if self._is_first:
            machine.boot()
        self._number, wire, mark = machine.make_container(self)
        self._connect(wire, receiver).send_raw(mark + make_boot())

    def _await_ready(self) -> None:
        if not self._is_ready(self.ready_s):
            name, why = self.label, self._why_not_ready()
            self._abandon()  # if this ends the machine, all of its output is read afterwards
            raise StartFailed(f"the {name} did not get ready{why}{self.machine.last_output()}", step=self.step)

    def _why_not_ready(self) -> str:
        """Return the known reason why the container did not get ready, besides the machine's output."""
        if not self.is_lost:
            return f" within {self.machine.boot_s:g} s"
        status = self._left.get("status")
        ended = f": its first process ended with status {status}" if isinstance(status, int) else ""
        return ended + super().last_output()

    def _abandon(self) -> None:
        """Remove the container, and the machine if this start booted it."""
        if not self._is_first:
            self.kill()
        else:
            self.machine.kill()
            self.machine.wait()

    def note_lost(self) -> None:
        """Return the container's port, which has ended."""
        self.machine.return_port(self._number)

    def leave(self, final_message: Mapping[str, Any]) -> None:
        """Record how the first process ended ({} if the machine did). Called in the machine's reading thread."""
        self._left = final_message

    def lose(self) -> None:
        """Record that no more frames will arrive. Called in the container's reading thread."""
        self._lose()
        self._over.set()

    def wait(self, timeout_s: float) -> bool:
        """Wait until no more frames will arrive; return whether that is so."""
        return self._over.wait(timeout_s)

    def end(self) -> None:
        """Have the machine kill the container, without waiting for that."""
        self.machine.end_container(self._number)

    def kill(self) -> None:
        """Have the machine kill the container; kill the machine if that fails."""
        if self._number and not self.is_lost:
            self.end()
            if not self._over.wait(END_S):
                self.machine.kill()

    def end_by_guest(self) -> Observed | None:
        """Return OUT_OF_MEMORY if the kernel inside killed the first process for memory, else None."""
        count = self._left.get("oom_kills")
        has_run_out = isinstance(count, int) and count > 0 and self._left.get("status") == KILLED
        return Observed(cause=KillCause.OUT_OF_MEMORY) if has_run_out else None

    def release(self) -> None:
        """Kill the machine."""
        self.machine.kill()

    def last_output(self) -> str:
        """Return the end of the output of the machine's console and monitor, for messages."""
        return self.machine.last_output()

    def argv(self) -> Sequence[str]:
        """Return the arguments that start such a machine."""
        return self.machine.argv()


class MicroVMOpenSandbox(SharedSandbox[MachineImage, VMContainer]):
    """Run requests in a virtual machine, one at a time, beside sessions; see core.protocols.OpenSandbox."""

    path = SYSTEM_PATH
    _advice = "Nothing of it is left; a memory limit of the host may have ended its monitor"

    def __init__(
        self, *, name: str, image: MachineImage, monitor: Monitor, acceleration: HostAcceleration,
        policy: Policy, limits: Limits, enforcement: Enforcement,
    ):  # fmt: skip
        super().__init__(policy=policy, limits=limits, enforcement=enforcement)
        self._name = name
        self._image, self._monitor, self._acceleration = image, monitor, acceleration
        self._machine = self._new_machine()

    def _new_machine(self) -> VirtualMachine:
        plan = plan_machine(self._policy, self._limits, self._acceleration.kind, self._acceleration.counter_khz)
        return VirtualMachine(plan, self._image, self._monitor)

    async def close(self) -> None:
        """Kill the machine and wait until it has ended."""
        try:
            await super().close()
        finally:  # also if the wait is cancelled
            self._machine.kill()
            await finish(asyncio.to_thread(self._machine.wait))

    def _find_rootfs(self, request: Request | None) -> MachineImage:  # noqa: ARG002 - one disk serves all
        return self._image

    def _find_session_rootfs(self, language: str) -> MachineImage:
        session_language(language)
        if len(self._sessions) >= MOST_SESSIONS:
            raise InvalidRequest(
                f"a virtual machine holds {MOST_SESSIONS} sessions at once; close one, or open another sandbox"
            )
        return self._image

    def _make(self, rootfs: MachineImage, after: VMContainer | None) -> VMContainer:  # noqa: ARG002 - one disk serves all
        if after is not None and after is self._used:  # a session's container continues
            after.empty()
        if after is not None:
            self._machine.check()
        container = VMContainer(self._machine)
        container.start(self._policy.preload)
        return container

    async def _start_container(self, rootfs: MachineImage, after: VMContainer | None) -> VMContainer:
        """Start the machine or a container in a thread. If the caller is cancelled, it is ended once it has started."""
        making = asyncio.ensure_future(asyncio.to_thread(self._make, rootfs, after))
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            machine = self._machine
            if after is None:
                machine.kill()
            with suppress_logged(log, "how a start ended, which nobody waits for any more", Exception):
                self._release(await finish(making))
            if after is None:
                await finish(asyncio.to_thread(machine.wait))
                self._machine = self._new_machine()
            raise

    def _kind(self, rootfs: MachineImage) -> tuple[object, ...]:
        return self._name, rootfs.id, id(self)

    def _notes(self, container: VMContainer) -> dict[str, Any]:
        return {
            "backend": self._name,
            "image": container.machine.image.name,
            "engine": f"{self._monitor.engine} ({self._acceleration.kind})",
            "start_s": round(container.start_s, 3),
        }
