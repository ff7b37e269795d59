"""The microvm backend: each sandbox in a throwaway virtual machine, under QEMU or Firecracker.

Whether machines run on KVM or on an emulated processor is tested by booting one, and cached. The kernel of an emulated
machine needs the frequency of the processor's time-stamp counter as an argument (`counter`).
"""

from __future__ import annotations

import asyncio
import os
import platform
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from cloche.core.enforcement import Enforcement, Level
from cloche.core.errors import BackendUnavailable, StartFailed
from cloche.core.limits import Limits
from cloche.core.policy import Policy
from cloche.core.protocols import Capabilities
from cloche.core.record import replace

from ..enforcement import Controls, check_policy, microvm_controls
from ..host import NEEDS_KVM, KeptAnswers, changed_ns, why_no_kvm
from ..session_languages import DRIVERS
from .counter import counter_khz
from .firecracker import find_firecracker
from .live import MicroVMLiveSandbox
from .machine import VirtualMachine
from .plan import Acceleration, HostAcceleration, MachineImage, Monitor, find_image, plan_machine
from .qemu import find_qemu
from .sandbox import MicroVMOpenSandbox

# Acceleration.
PROBE_S = 5.0  # a guest on KVM boots in a fraction of that
USE_KVM = "To get more, use a host with KVM, or nested virtualisation, whose /dev/kvm this user may open."

# Remedies.
USE_QEMU = 'The backend "microvm" runs the same machines under QEMU, emulated where there is no KVM.'
USE_LOCAL = 'Or use the default backend "local", which needs nothing to be set up.'
SLOW = (
    "there is no KVM that can be used, and emulated machines take seconds to start and run many times slower; "
    'name backend "microvm" to run in one all the same'
)


def find_acceleration(image: MachineImage, monitor: Monitor) -> HostAcceleration:
    """Return the acceleration of machines here.

    The first call on a host boots a guest on KVM, for at most five seconds.
    """
    reason = why_no_kvm()
    about = (monitor.program, changed_ns(monitor.program), image.id)
    acceleration = (
        HostAcceleration(kind="tcg", reason=reason) if reason else _KEPT.find(about, lambda: _try_kvm(image, monitor))
    )
    return acceleration if acceleration.kind == "kvm" else replace(acceleration, counter_khz=counter_khz())


def _try_kvm(image: MachineImage, monitor: Monitor) -> HostAcceleration:
    try:
        VirtualMachine(plan_machine(Policy(), Limits(), "kvm"), image, monitor).probe(PROBE_S)
    except StartFailed as error:
        return HostAcceleration(kind="tcg", reason=f"no guest got up on KVM within {PROBE_S:g} s ({error})")
    return HostAcceleration(kind="kvm")


def _from_plain(plain: tuple[Acceleration, str]) -> HostAcceleration:
    kind, reason = plain
    if kind not in ("kvm", "tcg"):
        raise ValueError(kind)
    return HostAcceleration(kind=kind, reason=str(reason))


_KEPT = KeptAnswers[HostAcceleration](
    "microvm", to_plain=lambda acceleration: (acceleration.kind, acceleration.reason), from_plain=_from_plain
)


class MicroVMBackend:
    """Give sandboxes that are virtual machines under QEMU."""

    name = "microvm"
    serves_functions = "live"  # of the caller, to guests of live sandboxes

    def capabilities(self) -> Capabilities:
        """Return the controls that a machine enforces here. The first call on a host boots a machine to test KVM."""
        try:
            _, monitor, acceleration = self._look()
        except BackendUnavailable as error:
            return Capabilities(backend=self.name, available=False, reason=error.reason, remedy=error.remedy)
        is_emulated = acceleration.kind == "tcg"
        return Capabilities(
            backend=self.name,
            available=True,
            level=Level.VM,
            controls=_controls(acceleration, monitor),
            reason=f"software emulation, slow: {acceleration.reason}" if is_emulated else "",
            remedy=USE_KVM if is_emulated else "",
        )

    def session_languages(self) -> tuple[str, ...]:
        """Return the languages that support sessions. The disk also needs the language's program."""
        return tuple(DRIVERS)

    def why_not_ready(self) -> str:
        """Return why the automatic choice must not take this backend: emulated machines are slow."""
        return SLOW if self._look()[2].kind == "tcg" else ""

    def check(self) -> None:
        """Raise BackendUnavailable if the monitor or its image is missing."""
        try:
            self._check_parts()
        except BackendUnavailable as error:
            raise BackendUnavailable(error.reason, remedy=f"{error.remedy} {USE_LOCAL}") from error

    def build_image(self, packages: Sequence[str]) -> str:
        """Build kernel and root disk, with `packages` besides the default ones; return a line about the result.

        Raises BackendUnavailable if a required program is missing, StartFailed if a package cannot be downloaded.
        """
        from .image_build import build_image

        image = build_image(packages)
        return f"microVM image {image.name} with Python {image.python}, in {image.folder}"

    @asynccontextmanager
    async def open(self, policy: Policy, limits: Limits) -> AsyncIterator[MicroVMOpenSandbox]:
        """Open a sandbox; its machine boots at the first run.

        Raises BackendUnavailable if monitor or image is missing, or if a required control is missing.
        """
        image, monitor, acceleration, enforcement = await self._choose(policy)
        sandbox = MicroVMOpenSandbox(
            name=self.name, image=image, monitor=monitor, acceleration=acceleration,
            policy=policy, limits=limits, enforcement=enforcement,
        )  # fmt: skip
        try:
            yield sandbox
        finally:
            await sandbox.close()

    @asynccontextmanager
    async def open_live(self, policy: Policy, limits: Limits) -> AsyncIterator[MicroVMLiveSandbox]:
        """Open a sandbox that lives, in the only container of one machine, which boots on first use.

        Raises BackendUnavailable as `open` does, and if the policy has several users.
        """
        if policy.users:
            raise BackendUnavailable(
                f'backend "{self.name}": a sandbox has one user.',
                remedy='Leave users out; or use backend "local" or "docker".',
            )
        image, monitor, acceleration, enforcement = await self._choose(policy)
        sandbox = MicroVMLiveSandbox(
            name=self.name, image=image, monitor=monitor, acceleration=acceleration,
            policy=policy, limits=limits, enforcement=enforcement,
        )  # fmt: skip
        try:
            yield sandbox
        finally:
            await sandbox.close()

    async def _choose(self, policy: Policy) -> tuple[MachineImage, Monitor, HostAcceleration, Enforcement]:
        """Return image, monitor, acceleration and enforcement report. Raises BackendUnavailable."""
        image, monitor, acceleration = await asyncio.to_thread(self._look)
        enforcement = Enforcement(level=Level.VM, controls=_controls(acceleration, monitor))
        _check(self.name, policy, enforcement)
        return image, monitor, acceleration, enforcement

    def _find_monitor(self) -> Monitor:
        return find_qemu()

    def _check_parts(self) -> tuple[MachineImage, Monitor]:
        _check_host(self.name)
        monitor = self._find_monitor()
        return find_image(self.name), monitor

    def _look(self) -> tuple[MachineImage, Monitor, HostAcceleration]:
        """Return image, monitor and acceleration. Raises BackendUnavailable."""
        image, monitor = self._check_parts()
        return image, monitor, find_acceleration(image, monitor)


class FirecrackerBackend(MicroVMBackend):
    """Give sandboxes that are virtual machines under Firecracker, on KVM only.

    `given` is a monitor with its acceleration, which is used without a test.
    """

    name = "firecracker"

    def __init__(self, given: tuple[Monitor, HostAcceleration] | None = None):
        self._given = given

    def check(self) -> None:
        """Raise BackendUnavailable if Firecracker, its image or KVM is missing."""
        try:
            self._look()
        except BackendUnavailable as error:
            raise BackendUnavailable(error.reason, remedy=f"{error.remedy} {USE_LOCAL}") from error

    def _find_monitor(self) -> Monitor:
        return self._given[0] if self._given else find_firecracker()

    def _look(self) -> tuple[MachineImage, Monitor, HostAcceleration]:
        """Return image, monitor and acceleration. Raises BackendUnavailable, also if there is no KVM."""
        image, monitor = self._check_parts()
        acceleration = self._given[1] if self._given else find_acceleration(image, monitor)
        if acceleration.kind != "kvm":
            raise BackendUnavailable(
                f'backend "firecracker": it runs on KVM alone, and {acceleration.reason}.',
                remedy=f"{NEEDS_KVM} {USE_QEMU}",
            )
        return image, monitor, acceleration


def _check_host(name: str) -> None:
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise BackendUnavailable(
            f'backend "{name}": this is {platform.system()} on {platform.machine()}, and it is for Linux on x86-64.'
        )


def _controls(acceleration: HostAcceleration, monitor: Monitor) -> Controls:
    return microvm_controls(acceleration.kind, is_root=os.geteuid() == 0, monitor=monitor.engine)


def _check(name: str, policy: Policy, enforcement: Enforcement) -> None:
    """Raise BackendUnavailable if a required control would be missing."""
    check_policy(
        policy,
        enforcement,
        network="a microVM has no network device",
        level="a virtual machine gives: that is vm. Use another backend for less",
        lacks=lambda missing: BackendUnavailable(f'backend "{name}": {missing}.', remedy=USE_KVM),
    )
