"""One open sandbox of the runsc backend: the workspace belongs to the place, and outlives every container in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cloche.core.enforcement import Enforcement
from cloche.core.errors import StartFailed
from cloche.core.limits import Limits
from cloche.core.policy import Policy
from cloche.core.request import Request

from ..containers.program import Program
from ..containers.session_program import SessionProgram
from ..containers.sessions import SessionSandbox
from ..host import Host
from .container import RunscContainer
from .engine import Engine
from .ground import build_program, build_session_program, ground_for, session_ground
from .place import Place
from .plan import Plan, Shown, plan_container


class RunscOpenSandbox(SessionSandbox[Shown, RunscContainer]):
    """Run requests in containers of gVisor, one at a time; see core.protocols.OpenSandbox."""

    _advice = "Something outside killed gVisor, or it failed: see the system's log"

    def __init__(self, *, engine: Engine, host: Host, policy: Policy, limits: Limits, enforcement: Enforcement):
        super().__init__(policy=policy, limits=limits, enforcement=enforcement)
        self._engine, self._host = engine, host

    def _find_ground(self, request: Request | None) -> Shown:
        return ground_for(request)

    def _build_program(self, request: Request, ground: Shown) -> Program:  # noqa: ARG002 - it is the host's
        return build_program(request)

    def _find_session_ground(self, language: str) -> Shown:
        return session_ground(language)

    def _build_session_program(
        self,
        language: str,
        env: Mapping[str, str],
        ground: Shown,  # noqa: ARG002 - it is the host's
    ) -> SessionProgram:
        return build_session_program(language, env)

    def _plan(self, ground: Shown) -> Plan:
        return plan_container(self._policy, self._limits, engine=self._engine, shown=ground)

    def _kind(self, ground: Shown) -> tuple[object, ...]:
        return "runsc", self._policy.preload, self._plan(ground)

    def _make(self, ground: Shown, after: RunscContainer | None) -> RunscContainer:
        plan = self._plan(ground)
        place = Place(plan, self._host) if after is None else after.place
        if place.is_lost:
            raise StartFailed("the workspace is gone with its keeper process; open another sandbox", step="keeper")
        container = RunscContainer(place, plan)
        try:
            container.start(self._policy.preload)
        except BaseException:
            if after is None:
                place.close()
            raise
        return container

    def _let_go(self, container: RunscContainer, *, with_workspace: bool = False) -> None:
        if with_workspace:
            container.see_out()
        else:
            container.end()

    def _notes(self, container: RunscContainer) -> dict[str, Any]:  # noqa: ARG002 - they are all alike
        return {"backend": "gvisor", "engine": f"runsc {self._engine.version} ({self._engine.platform})"}
