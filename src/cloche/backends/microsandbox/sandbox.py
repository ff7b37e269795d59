"""One open sandbox of the microsandbox backend: one machine, and in it a first process for each run, one after another.

The workspace is a file system in the machine's memory. Before a run begins, all that the one before it left running is
ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from cloche.core.enforcement import Enforcement
from cloche.core.errors import InvalidRequest, StartFailed
from cloche.core.limits import Limits
from cloche.core.loops import finish
from cloche.core.policy import Policy
from cloche.core.request import Request
from cloche.core.result import Observed

from ..containers.container import Container, Link, boot_message
from ..containers.program import IMAGE_PATH, Program, language_of, program_of
from ..containers.sandbox import ContainerSandbox
from ..garbage_collection import Background
from .machine import COMMAND, END_S, Image, Machine

_background = Background("cloche-microsandbox-end", 2 * END_S)
wait_for_all = _background.wait_for_all


class MicrosandboxContainer(Container[Image]):
    """Hold one first process in a machine."""

    def __init__(self, machine: Machine, image: Image):
        super().__init__()
        self.machine, self.rootfs = machine, image

    @property
    def what(self) -> str:
        """Name what is lost."""
        return "machine of microsandbox"

    def start(self, preload: Sequence[str]) -> None:
        """Start it, and wait until it listens. Raises StartFailed; then the machine is gone."""
        try:
            self._link = Link(self.machine.start(), self._receive, self._lose)
            self._link.send_raw(boot_message(preload))
            if not self._is_ready():
                raise StartFailed(f"nothing got ready in a machine of microsandbox{self.last_output()}", step="boot")
        except OSError as error:
            self.machine.end()
            raise StartFailed(f"a machine of microsandbox is gone: {error}{self.last_output()}", step="boot") from error
        except BaseException:
            self.machine.end()
            raise

    def kill(self) -> None:
        """Kill the machine: a first process that does not answer cannot be told apart from what it serves."""
        self.machine.end()

    def end_by_guest(self) -> Observed | None:
        """Return None: the machine does not report what its kernel killed."""
        return None

    def release(self) -> None:
        """End the machine, in the background."""
        self.shutdown()
        _background.begin(self.machine.end)

    def argv(self) -> Sequence[str]:
        """Return the program that is started, with the machine's name."""
        return (self.machine.name, COMMAND)


class MicrosandboxOpenSandbox(ContainerSandbox[Image, MicrosandboxContainer]):
    """Run requests in a machine, one at a time; see core.protocols.OpenSandbox."""

    _advice = 'See what is known of it: "msb list" and "msb logs"'

    def __init__(
        self, *, new_machine: Callable[[str], Machine], image_for: Callable[[str], str],
        policy: Policy, limits: Limits, enforcement: Enforcement,
    ):  # fmt: skip
        super().__init__(policy=policy, limits=limits, enforcement=enforcement)
        self._new_machine, self._image_for = new_machine, image_for
        self._machine: Machine | None = None
        self._image: Image | None = None

    async def close(self) -> None:
        """End the machine, and wait until it is gone."""
        try:
            await super().close()
        finally:  # also when nobody waits for it any more
            if self._machine is not None:
                await finish(asyncio.to_thread(self._machine.end))

    def _find_rootfs(self, request: Request | None) -> Image:
        """Return the image; its machine is created when there is none yet, for only that shows what is in it."""
        wanted = self._image_for(language_of(request).name if request is not None else "python")
        if self._image is None:
            self._machine = self._new_machine(wanted)
            self._image = self._machine.create()
        elif request is not None and wanted != self._image.name:
            raise InvalidRequest(
                f"this sandbox is a machine of image {self._image.name!r}, and image {wanted!r} is asked for; "
                "open another sandbox for it"
            )
        return self._image

    def _build_program(self, request: Request, rootfs: Image) -> Program:
        return program_of(request, rootfs, {"PATH": IMAGE_PATH}, has_interpreter=True)

    def _make(self, rootfs: Image, after: MicrosandboxContainer | None) -> MicrosandboxContainer:
        machine = self._machine
        if machine is None or machine.is_lost:
            raise StartFailed("the workspace is gone with its machine; open another sandbox", step="boot")
        if after is not None:
            after.shutdown()
            try:
                machine.sweep()
            except OSError as error:
                machine.end()
                raise StartFailed(f"what a run left could not be ended, so the machine was: {error}") from error
        container = MicrosandboxContainer(machine, rootfs)
        container.start(self._policy.preload)
        return container

    def _kind(self, rootfs: Image) -> tuple[object, ...]:
        return "microsandbox", rootfs.id, id(self)

    def _release(self, container: MicrosandboxContainer, *, with_workspace: bool = False) -> None:
        if with_workspace:
            container.release()
        else:
            container.shutdown()

    def _prepare_next(self, container: MicrosandboxContainer, program: Program) -> None:
        """Make nothing ready: the machine is there, and a first process in it is started when a run comes."""

    def _notes(self, container: MicrosandboxContainer) -> dict[str, Any]:
        package = container.machine.package
        return {
            "backend": "microsandbox",
            "image": container.rootfs.name,
            "engine": f"microsandbox {package.version()}",
            "start_s": round(container.start_s, 3),
        }
