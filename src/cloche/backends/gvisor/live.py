"""A sandbox of the gvisor backend that lives: one container below one shim; see `containers.live`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from cloche.core.enforcement import Enforcement
from cloche.core.errors import StartFailed
from cloche.core.limits import Limits
from cloche.core.policy import Policy
from cloche.core.record import replace
from cloche.core.request import Request

from ..containers.container import ByteReceiver
from ..containers.live import ContainerLiveSandbox
from ..containers.program import (
    ENVIRONMENT,
    TEMPORARY,
    Program,
    SessionProgram,
    program_with_layers,
    session_with_layers,
)
from ..host import Host
from ..layout import with_layers
from .container import RunscContainer, ShimClient
from .plan import (
    RunscEngine,
    RunscPlan,
    build_program,
    build_session_program,
    live_rootfs,
    plan_container,
    variables_of,
)

SLACK_NS = (
    20_000_000  # file times of its workspace come from the host's kernel, which updates its coarse clock every few ms
)
# Writable folders in one file system with the workspace.
HOMES = ("/root", "/var", "/opt", "/srv", "/run")


class RunscLiveSandbox(ContainerLiveSandbox[RunscContainer]):
    """One container of gVisor, which shows every toolchain of this host."""

    backend = "gvisor"
    more_homes = HOMES
    clock_slack_ns = SLACK_NS

    def __init__(self, *, engine: RunscEngine, host: Host, policy: Policy, limits: Limits, enforcement: Enforcement):
        super().__init__(policy=policy, limits=limits, enforcement=enforcement)
        self._engine, self._host = engine, host

    def _make(self, receiver: ByteReceiver) -> RunscContainer:
        plan = self._plan()
        shim = ShimClient(plan, self._host)
        try:
            return self._launch(RunscContainer(shim, plan, secrets=self._secrets), receiver)
        except BaseException:
            shim.close()
            raise

    def _plan(self) -> RunscPlan:
        plan = plan_container(self._policy, self.limits, engine=self._engine, shown=live_rootfs(self._policy.layers))
        return replace(plan, homes=self._homes(), rows=self._secrets.guest.rows if self._secrets is not None else ())

    def _check_greeting(self, greeting: Mapping[str, Any]) -> None:
        if greeting.get("kernel") == os.uname().release:
            raise StartFailed("the program runsc is not gVisor: a container saw this host's kernel", step="runsc")

    def _in_memory(self) -> Sequence[str]:
        return TEMPORARY

    def _build_program(self, request: Request, number: int) -> Program:
        return program_with_layers(build_program(request, number), self._policy.layers)

    def _build_session_program(self, language: str, env: Mapping[str, str]) -> SessionProgram:
        return session_with_layers(build_session_program(language, env), self._policy.layers)

    def _variables(self) -> Mapping[str, str]:
        return with_layers({**variables_of(None), **ENVIRONMENT}, self._policy.layers)

    def _notes(self) -> dict[str, Any]:
        return {"backend": "gvisor", "engine": f"runsc {self._engine.version} ({self._engine.platform})"}
