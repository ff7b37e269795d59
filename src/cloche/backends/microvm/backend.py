"""The microvm backend: every sandbox in a throwaway virtual machine under QEMU."""

from __future__ import annotations

import asyncio
import platform
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from cloche.core.capabilities import Capabilities
from cloche.core.enforcement import Enforcement, shortfalls
from cloche.core.errors import BackendUnavailable
from cloche.core.levels import Level
from cloche.core.limits import Limits
from cloche.core.policy import Policy

from .acceleration import USE_KVM, Found, find_acceleration
from .image import Image, find_image
from .machine import monitor_path
from .measures import measures
from .sandbox import MicroVMOpenSandbox

USE_LOCAL = 'Or use the default backend "local", which needs nothing to be set up.'
SLOW = (
    "there is no KVM that can be used, and emulated machines take seconds to start and run many times slower; "
    'name backend "microvm" to run in one all the same'
)


class MicroVMBackend:
    """Give sandboxes that are virtual machines."""

    name = "microvm"

    def capabilities(self) -> Capabilities:
        """Say what a machine enforces here; the first time on a host, one is booted to find out about KVM."""
        try:
            _, _, found = _look()
        except BackendUnavailable as error:
            return Capabilities(backend=self.name, available=False, reason=error.reason, remedy=error.remedy)
        is_emulated = found.kind == "tcg"
        return Capabilities(
            backend=self.name,
            available=True,
            level=Level.VM,
            controls=measures(found),
            reason=f"software emulation, slow: {found.reason}" if is_emulated else "",
            remedy=USE_KVM if is_emulated else "",
        )

    def lacks(self) -> str:
        """Say why nobody should be given an emulated machine who did not ask for one."""
        return SLOW if _look()[2].kind == "tcg" else ""

    def check(self) -> None:
        """Raise BackendUnavailable when QEMU or its image is missing."""
        try:
            _check_host()
            monitor_path()
            find_image()
        except BackendUnavailable as error:
            raise BackendUnavailable(error.reason, remedy=f"{error.remedy} {USE_LOCAL}") from error

    def build_image(self, packages: Sequence[str]) -> str:
        """Build kernel and root disk, with `packages` besides the usual ones; return a line that says what came of it.

        Raises BackendUnavailable when a program for it is missing, StartFailed when a package cannot be had.
        """
        from .build import build_image

        image = build_image(packages)
        return f"microVM image {image.name} with Python {image.python}, in {image.folder}"

    @asynccontextmanager
    async def open(self, policy: Policy, limits: Limits) -> AsyncIterator[MicroVMOpenSandbox]:
        """Open a sandbox; its machine boots at its first run.

        Raises BackendUnavailable when QEMU or its image is missing, or when a machine cannot give what is required.
        """
        image, monitor, found = await asyncio.to_thread(_look)
        enforcement = Enforcement(level=Level.VM, controls=measures(found))
        _check(policy, enforcement)
        sandbox = MicroVMOpenSandbox(
            image=image, monitor=monitor, found=found, policy=policy, limits=limits, enforcement=enforcement
        )
        try:
            yield sandbox
        finally:
            await sandbox.close()


def _look() -> tuple[Image, str, Found]:
    """Return image, monitor and what it runs on. Raises BackendUnavailable."""
    _check_host()
    monitor, image = monitor_path(), find_image()
    return image, monitor, find_acceleration(image, monitor)


def _check_host() -> None:
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise BackendUnavailable(
            f'backend "microvm": this is {platform.system()} on {platform.machine()}, and it is for Linux on x86-64.'
        )


def _check(policy: Policy, enforcement: Enforcement) -> None:
    """Raise BackendUnavailable when something asked for would be missing."""
    if policy.network != "off":
        raise BackendUnavailable(
            f"network {policy.network!r}: a microVM has no network device, in this version; "
            "leave network off, or pass what the code needs as files"
        )
    if policy.level not in (None, Level.VM):
        raise BackendUnavailable(
            f"level {policy.level} is not what a virtual machine gives: that is vm. Use another backend for less"
        )
    missing = shortfalls(
        enforcement,
        level=policy.require_level,
        controls=policy.require_controls,
        best_effort=policy.best_effort,
    )
    if missing:
        raise BackendUnavailable(f'backend "microvm": {"; ".join(missing)}.', remedy=USE_KVM)
