"""One open sandbox of the microsandbox backend: one machine, and one first process after the other, one for each run.

The workspace is a tmpfs of the machine. Before a run starts, all processes that the previous run left are killed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from cloche.core.enforcement import Enforcement
from cloche.core.errors import InvalidRequest, StartFailed
from cloche.core.limits import Limits
from cloche.core.policy import Policy
from cloche.core.request import Request

from ..containers.machines import HostedContainer, HostedSandbox, LookedInto
from ..containers.program import language_of
from ..garbage_collection import Background
from .machine import COMMAND, END_S, MicrosandboxMachine

_background = Background("cloche-microsandbox-end", 2 * END_S)
wait_for_all = _background.wait_for_all


class MicrosandboxContainer(HostedContainer):
    """One first process in a machine."""

    background = _background
    machine: MicrosandboxMachine

    def __init__(self, machine: MicrosandboxMachine, image: LookedInto):
        super().__init__()
        self.machine, self.rootfs = machine, image

    @property
    def label(self) -> str:
        """Return the name for messages."""
        return "machine of microsandbox"

    def argv(self) -> Sequence[str]:
        """Return the machine's name and the program started in it."""
        return (self.machine.name, COMMAND)


class MicrosandboxOpenSandbox(HostedSandbox[MicrosandboxContainer]):
    """Run requests in a machine, one at a time; see core.protocols.OpenSandbox."""

    _machine: MicrosandboxMachine | None

    _advice = 'See "msb list" and "msb logs"'

    def __init__(
        self, *, new_machine: Callable[[str], MicrosandboxMachine], image_for: Callable[[str], str],
        policy: Policy, limits: Limits, enforcement: Enforcement,
    ):  # fmt: skip
        super().__init__(policy=policy, limits=limits, enforcement=enforcement)
        self._new_machine, self._image_for = new_machine, image_for
        self._machine = None
        self._image: LookedInto | None = None

    def _find_rootfs(self, request: Request | None) -> LookedInto:
        """Return the contents of the image.

        The first call creates the machine, because only a machine can list them.
        """
        image_name = self._image_for(language_of(request).name if request is not None else "python")
        if self._image is None:
            self._machine = self._new_machine(image_name)
            self._image = self._machine.create()
        elif request is not None and image_name != self._image.name:
            raise InvalidRequest(
                f"this sandbox is a machine of image {self._image.name!r}, but image {image_name!r} is requested; "
                "open another sandbox for it"
            )
        return self._image

    def _make(self, rootfs: LookedInto, after: MicrosandboxContainer | None) -> MicrosandboxContainer:
        machine = self._machine
        if machine is None or machine.is_lost:
            raise StartFailed("the workspace is gone with its machine; open another sandbox", step="boot")
        if after is not None:
            after.shutdown()
            try:
                machine.sweep()
            except OSError as error:
                machine.end()
                raise StartFailed(
                    f"processes that a run left could not be ended, so the machine was ended: {error}"
                ) from error
        container = MicrosandboxContainer(machine, rootfs)
        container.start(self._policy.preload)
        return container

    def _kind(self, rootfs: LookedInto) -> tuple[object, ...]:
        return "microsandbox", rootfs.id, id(self)

    def _notes(self, container: MicrosandboxContainer) -> dict[str, Any]:
        package = container.machine.package
        return {
            "backend": "microsandbox",
            "image": container.rootfs.name,
            "engine": f"microsandbox {package.version()}",
            "start_s": round(container.start_s, 3),
        }
