"""The microsandbox backend: every sandbox in a machine of that project's, on KVM alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from cloche.core.capabilities import Capabilities
from cloche.core.enforcement import Enforcement
from cloche.core.errors import BackendUnavailable
from cloche.core.languages import LANGUAGES
from cloche.core.levels import Level
from cloche.core.limits import Limits
from cloche.core.policy import Policy

from ..containers.owner import is_dead, owner
from ..enforcement import check_policy, microsandbox_controls
from .machine import ANSWER_S, END_S, Machine
from .package import call, find_package
from .plan import OWNER_LABEL, plan_machine
from .sandbox import MicrosandboxOpenSandbox
from .trial import NEEDS_KVM, check_host

ANY_LANGUAGE = "*"
IMAGE = LANGUAGES["python"].image  # what has no Python could not hold our first process


class MicrosandboxBackend:
    """Give sandboxes that are machines of microsandbox's.

    `given` is its package, or what has the same parts, for whoever knows that it works: it is not tried out.
    """

    name = "microsandbox"

    def __init__(self, images: Mapping[str, str] | None = None, *, given: Any = None):
        self._images, self._given = dict(images or {}), given

    def with_images(self, images: Mapping[str, str]) -> MicrosandboxBackend:
        """Return the same backend with other images."""
        return MicrosandboxBackend(images, given=self._given)

    def capabilities(self) -> Capabilities:
        """Say what a machine enforces here; the first time in a process, one is run to find out whether any can be."""
        try:
            self._package()
        except BackendUnavailable as error:
            return Capabilities(backend=self.name, available=False, reason=error.reason, remedy=error.remedy)
        return Capabilities(backend=self.name, available=True, level=Level.VM, controls=microsandbox_controls())

    def check(self) -> None:
        """Raise BackendUnavailable when the package or KVM is missing."""
        self._package()

    @asynccontextmanager
    async def open(self, policy: Policy, limits: Limits) -> AsyncIterator[MicrosandboxOpenSandbox]:
        """Open a sandbox; its machine is created at its first run.

        Raises BackendUnavailable where there is none to be had, or when one cannot give what is required.
        """
        package = await asyncio.to_thread(self._package)
        enforcement = Enforcement(level=Level.VM, controls=microsandbox_controls())
        _check(policy, enforcement)

        def new_machine(image: str) -> Machine:
            return Machine(package, plan_machine(policy, limits, image=image, labels={OWNER_LABEL: owner()}))

        sandbox = MicrosandboxOpenSandbox(
            new_machine=new_machine, image_for=self._image_for, policy=policy, limits=limits, enforcement=enforcement
        )
        try:
            yield sandbox
        finally:
            await sandbox.close()

    def clear(self) -> list[str]:
        """Remove machines of processes that are dead; return a line for each. Raises BackendUnavailable."""
        package = self._given or find_package()
        try:
            return call(lambda: _clear(package), END_S * 4)
        except (package.MicrosandboxError, OSError) as error:
            raise BackendUnavailable(f"microsandbox does not tell its machines: {error}") from error

    def _package(self) -> Any:
        if self._given is not None:
            return self._given
        package = find_package()
        check_host(package)
        return package

    def _image_for(self, language: str) -> str:
        """Return the image that is configured for a language, else the usual one."""
        return self._images.get(language) or self._images.get(ANY_LANGUAGE) or IMAGE


async def _clear(package: Any) -> list[str]:
    found, cursor = [], None
    while True:
        page = await asyncio.wait_for(package.Sandbox.list_with(cursor=cursor), ANSWER_S)
        for one in page.sandboxes:
            labels = one.config().get("labels") or {}
            if OWNER_LABEL in labels and is_dead(labels[OWNER_LABEL]):
                await one.destroy(force=True, timeout=END_S)
                found.append(f"machine {one.name}")
        cursor = page.next_cursor
        if not cursor:
            return found


def _check(policy: Policy, enforcement: Enforcement) -> None:
    """Raise BackendUnavailable when something asked for would be missing."""
    check_policy(
        policy,
        enforcement,
        network="on microsandbox it is off only",
        level="a virtual machine gives: that is vm. Use another backend for less",
        lacks=lambda missing: BackendUnavailable(f'backend "microsandbox": {missing}.', remedy=NEEDS_KVM),
    )
