"""One open sandbox of the microvm backend.

The workspace is a file system in the memory of one machine, which lives as long as the sandbox. Each run gets a new
place in it, once that of the last one is empty, and each session a place that it keeps. A machine that was lost takes
the workspace with it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Mapping
from typing import Any

from cloche.core.enforcement import Enforcement
from cloche.core.errors import InvalidRequest
from cloche.core.limits import Limits
from cloche.core.policy import Policy
from cloche.core.request import Request

from ..containers.program import Program, program_of
from ..containers.session_program import SessionProgram
from ..containers.sessions import SessionSandbox
from ..drivers import session_language
from ..noting import noted
from ..waiting import finish
from .acceleration import Found
from .image import Image
from .machine import Machine
from .monitor import Monitor
from .place import Place
from .plan import MOST_SESSIONS, plan_machine
from .session_program import PATH, build_session_program

log = logging.getLogger("cloche.microvm")


class MicroVMOpenSandbox(SessionSandbox[Image, Place]):
    """Run requests in a virtual machine, one at a time, beside sessions; see core.protocols.OpenSandbox."""

    _advice = "Nothing of it is left; a memory limit of the host may have ended its monitor"

    def __init__(
        self, *, name: str, image: Image, monitor: Monitor, found: Found,
        policy: Policy, limits: Limits, enforcement: Enforcement,
    ):  # fmt: skip
        super().__init__(policy=policy, limits=limits, enforcement=enforcement)
        self._name = name
        self._image, self._monitor, self._found = image, monitor, found
        self._machine = self._new_machine()

    def _new_machine(self) -> Machine:
        plan = plan_machine(self._policy, self._limits, self._found.kind, self._found.counter_khz)
        return Machine(plan, self._image, self._monitor)

    async def close(self) -> None:
        """Kill the machine, and wait until it is gone."""
        try:
            await super().close()
        finally:  # also when nobody waits for it any more
            self._machine.kill()
            await finish(asyncio.to_thread(self._machine.wait))

    def _find_ground(self, request: Request | None) -> Image:  # noqa: ARG002 - one disk serves all
        return self._image

    def _build_program(self, request: Request, ground: Image) -> Program:
        return program_of(request, ground, {"PATH": PATH}, has_interpreter=True)

    def _find_session_ground(self, language: str) -> Image:
        session_language(language)
        if len(self._sessions) >= MOST_SESSIONS:
            raise InvalidRequest(
                f"a virtual machine holds {MOST_SESSIONS} sessions at once; close one, or open another sandbox"
            )
        return self._image

    def _build_session_program(self, language: str, env: Mapping[str, str], ground: Image) -> SessionProgram:
        return build_session_program(language, env, ground)

    def _make(self, ground: Image, after: Place | None) -> Place:  # noqa: ARG002 - one disk serves all
        if after is not None and after is self._used:  # that of a session goes on
            after.empty()
        if after is not None:
            self._machine.check()
        place = Place(self._machine)
        place.start(self._policy.preload)
        return place

    async def _made(self, ground: Image, after: Place | None) -> Place:
        """Start a machine, or make a place, in a thread; what nobody waits for any more is ended."""
        making = asyncio.ensure_future(asyncio.to_thread(self._make, ground, after))
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            machine = self._machine
            if after is None:
                machine.kill()
            with noted(log, "how a start ended, which nobody waits for any more", Exception):
                self._let_go(await finish(making))
            if after is None:
                await finish(asyncio.to_thread(machine.wait))
                self._machine = self._new_machine()
            raise

    def _kind(self, ground: Image) -> tuple[object, ...]:
        return self._name, ground.id, id(self)

    def _let_go(self, container: Place, *, with_workspace: bool = False) -> None:
        if with_workspace:
            container.machine.kill()
        elif not container.is_lost:
            threading.Thread(target=container.empty, name="cloche-place-end", daemon=True).start()

    def _go_on(self, container: Place, program: Program) -> None:
        """Make nothing ready: the machine is there, and a place in it is made when a run comes."""

    def _notes(self, container: Place) -> dict[str, Any]:
        return {
            "backend": self._name,
            "image": container.machine.image.name,
            "engine": f"{self._monitor.engine} ({self._found.kind})",
            "start_s": round(container.start_s, 3),
        }
