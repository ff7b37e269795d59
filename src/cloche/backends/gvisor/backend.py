"""The gvisor backend: gVisor's own kernel around this host's toolchains, without a daemon or an image.

Whether it works here is tested: an installed runsc may lack a privilege or a kernel feature. One container is run,
within a bounded time. Success is cached in the user's cache folder until the program, the user, the boot or the
interpreter shown to containers changes. Failure is cached for the life of this process.

The workspace of an open sandbox belongs to its shim (`container.ShimClient`) and outlives each container.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from cloche.core.enforcement import Enforcement, Level
from cloche.core.errors import BackendUnavailable, StartFailed
from cloche.core.limits import Limits
from cloche.core.policy import Policy
from cloche.core.protocols import Capabilities
from cloche.core.record import replace
from cloche.core.request import Request
from cloche.egress.client import operator_proxies, rest

from ..containers.pool import close_pool
from ..containers.program import TEMPORARY, Program, SessionProgram, program_with_layers, session_with_layers
from ..containers.sandbox import SessionSandbox
from ..enforcement import check_policy, gvisor_controls, with_hosts_stack, with_network
from ..garbage_collection import remove_groups
from ..host import Host, KeptAnswers, changed_ns, measure_host
from ..network import SERVED
from ..session_languages import DRIVERS
from ..toolchain import languages_here
from .container import KIND, RunscContainer, ShimClient, wait_for_all
from .live import RunscLiveSandbox
from .plan import (
    INSTALL,
    PLATFORMS,
    HostView,
    RunscEngine,
    RunscPlan,
    build_program,
    build_session_program,
    find_runsc,
    plain_rootfs,
    plan_container,
    rootfs_for,
    session_rootfs,
    version_of,
    why_no_runsc,
)

PROBE_S = 20.0


def find_engine() -> RunscEngine | str:
    """Return the runsc that can run a container here, or the reason why none can."""
    path = find_runsc()
    if not path:
        return why_no_runsc()
    shown = plain_rootfs()
    return _KEPT.find((path, changed_ns(path), shown.python, *shown.binds), lambda: _find(path, shown))


def _find(path: str, shown: HostView) -> RunscEngine | str:
    version = version_of(path, changed_ns(path))
    if not version:
        return f"{path} does not say its version"
    try:
        host = measure_host()
    except OSError as error:
        return f"a process cannot be started here: {error}"
    whys = []
    for platform in PLATFORMS:
        engine = RunscEngine(path=path, version=version, platform=platform, is_rootless=host.uid != 0)
        why = _try(engine, host, shown)
        if not why:
            return engine
        whys.append(f"{platform}: {why}")
    return f"no container runs on it ({'; '.join(whys)})"


def _try(engine: RunscEngine, host: Host, shown: HostView) -> str:
    """Run a test container; return the failure, "" on success. Nothing is left of it."""
    plan = plan_container(Policy(), Limits(), engine=engine, shown=shown)
    try:
        shim = ShimClient(plan, host)
    except StartFailed as error:
        return str(error)
    try:
        RunscContainer(shim, plan, PROBE_S).start(())
    except StartFailed as error:
        return str(error)
    finally:
        shim.close()
    return ""


def _from_plain(plain: dict[str, str]) -> RunscEngine | None:
    # A cached success does not hold where namespaces are refused, such as in a plain container on this machine.
    engine = RunscEngine(**plain, is_rootless=os.geteuid() != 0)
    try:
        is_possible = not measure_host().namespaces
    except OSError:
        return None
    return engine if is_possible and engine.platform in PLATFORMS else None


def _to_plain(answer: RunscEngine | str) -> dict[str, str] | None:
    if isinstance(answer, str):
        return None
    return {"path": answer.path, "version": answer.version, "platform": answer.platform}


_KEPT = KeptAnswers[RunscEngine | str]("runsc", to_plain=_to_plain, from_plain=_from_plain)


class RunscOpenSandbox(SessionSandbox[HostView, RunscContainer]):
    """Run requests in containers of gVisor, one at a time; see core.protocols.OpenSandbox."""

    _advice = "Something outside killed gVisor, or it failed: see the system's log"

    def __init__(self, *, engine: RunscEngine, host: Host, policy: Policy, limits: Limits, enforcement: Enforcement):
        super().__init__(policy=policy, limits=limits, enforcement=enforcement)
        self._engine, self._host = engine, host

    def _find_rootfs(self, request: Request | None) -> HostView:
        return rootfs_for(request, self._policy.layers)

    def _build_program(self, request: Request, rootfs: HostView) -> Program:  # noqa: ARG002 - it is the host's
        return program_with_layers(build_program(request), self._policy.layers)

    def _find_session_rootfs(self, language: str) -> HostView:
        return session_rootfs(language, self._policy.layers)

    def _build_session_program(
        self,
        language: str,
        env: Mapping[str, str],
        rootfs: HostView,  # noqa: ARG002 - it is the host's
    ) -> SessionProgram:
        return session_with_layers(build_session_program(language, env), self._policy.layers)

    def _plan(self, rootfs: HostView) -> RunscPlan:
        plan = plan_container(self._policy, self._limits, engine=self._engine, shown=rootfs)
        return replace(plan, rows=self._secrets.guest.rows) if self._secrets is not None else plan

    def _kind(self, rootfs: HostView) -> tuple[object, ...]:
        return "runsc", self._policy.preload, self._plan(rootfs)

    def _make(self, rootfs: HostView, after: RunscContainer | None) -> RunscContainer:
        plan = self._plan(rootfs)
        shim = ShimClient(plan, self._host) if after is None else after.shim
        if shim.is_lost:
            raise StartFailed("the workspace is gone with its shim; open another sandbox", step="shim")
        container = RunscContainer(shim, plan, secrets=self._secrets)
        try:
            container.start(self._policy.preload)
        except BaseException:
            if after is None:
                shim.close()
            raise
        return container

    def _release(self, container: RunscContainer, *, with_workspace: bool = False) -> None:
        if with_workspace:
            container.release()
        else:
            container.end()

    def _in_memory(self) -> Sequence[str]:
        return TEMPORARY

    def _notes(self, container: RunscContainer) -> dict[str, Any]:  # noqa: ARG002 - they are all alike
        return {"backend": "gvisor", "engine": f"runsc {self._engine.version} ({self._engine.platform})"}


class RunscBackend:
    """Give sandboxes on gVisor, made of runsc and this host's system only.

    With `use_cgroups=False`, control groups are not used even if there are some.
    """

    name = "gvisor"
    serves_functions = "live"  # of the caller, to guests of live sandboxes
    takes_secrets = writes_secret_files = True

    def __init__(self, *, use_cgroups: bool = True):
        self._use_cgroups = use_cgroups

    def capabilities(self) -> Capabilities:
        """Return the controls that a container enforces here.

        The first call runs a test container; success is cached.
        """
        return self.capabilities_at(Level.GVISOR)

    def capabilities_at(self, level: Level) -> Capabilities:
        """Return the controls at level gvisor, the only supported level."""
        if level is not Level.GVISOR:
            return self._unavailable(f"level {level} is not what gVisor gives")
        engine = find_engine()
        if isinstance(engine, str):
            return self._unavailable(engine, INSTALL)
        controls = gvisor_controls(self._host())
        networks = ("off", *SERVED)
        return Capabilities(backend=self.name, available=True, level=level, controls=controls, networks=networks)

    def languages(self) -> tuple[str, ...]:
        """Return the languages that have a toolchain on this host."""
        return languages_here()

    def session_languages(self) -> tuple[str, ...]:
        """Return the languages that support sessions. The host also needs the language's program."""
        return tuple(DRIVERS)

    def check_layers(self, policy: Policy) -> None:
        """Accept every policy: a container gets read-only bind mounts of the layers' folders on the host."""

    def _unavailable(self, reason: str, remedy: str = "") -> Capabilities:
        return Capabilities(backend=self.name, available=False, reason=reason, remedy=remedy)

    @asynccontextmanager
    async def open(self, policy: Policy, limits: Limits) -> AsyncIterator[RunscOpenSandbox]:
        """Open a sandbox; no container starts before the first run.

        Raises BackendUnavailable if runsc does not work here or a required control is missing.
        """
        engine, host, enforcement = await self._choose(policy)
        sandbox = RunscOpenSandbox(engine=engine, host=host, policy=policy, limits=limits, enforcement=enforcement)
        try:
            yield sandbox
        finally:
            await sandbox.close()

    @asynccontextmanager
    async def open_live(self, policy: Policy, limits: Limits) -> AsyncIterator[RunscLiveSandbox]:
        """Open a sandbox that lives, in one container, which starts on first use.

        Raises BackendUnavailable if runsc does not work here or a required control is missing.
        """
        if policy.users:
            raise BackendUnavailable(
                'backend "gvisor": a sandbox has one user.',
                remedy='Leave users out; or use backend "local", or "docker" with gVisor as its runtime.',
            )
        engine, host, enforcement = await self._choose(policy)
        sandbox = RunscLiveSandbox(engine=engine, host=host, policy=policy, limits=limits, enforcement=enforcement)
        try:
            yield sandbox
        finally:
            await sandbox.close()

    async def _choose(self, policy: Policy) -> tuple[RunscEngine, Host, Enforcement]:
        """Return the runsc, the host and their enforcement report. Raises BackendUnavailable."""
        engine = await asyncio.to_thread(find_engine)
        if isinstance(engine, str):
            raise BackendUnavailable(f"gVisor cannot be used here: {engine}.", remedy=INSTALL)
        host = self._host()
        enforcement = Enforcement(level=Level.GVISOR, controls=gvisor_controls(host))
        if policy.network in SERVED:
            enforcement = with_network(
                enforcement, policy.network, is_proxied=bool(operator_proxies()), is_through_host=True
            )
            enforcement = with_hosts_stack(enforcement, is_root_outside=not engine.is_rootless)
        _check(policy, enforcement)
        return engine, host, enforcement

    def check(self) -> None:
        """Raise BackendUnavailable if runsc does not work here."""
        engine = find_engine()
        if isinstance(engine, RunscEngine):
            return
        raise BackendUnavailable(f"gVisor cannot be used here: {engine}.", remedy=INSTALL)

    def drain(self) -> None:
        """End this process's warm containers, and wait until all released resources are removed."""
        close_pool()
        wait_for_all()
        rest()

    def collect_garbage(self) -> list[str]:
        """Remove the control groups of dead processes, without runsc; return one line for each."""
        return [f"control group {name}" for name in remove_groups(self._host(), KIND)]

    def _host(self) -> Host:
        host = measure_host()
        return host if self._use_cgroups else host.without_cgroups()


def _check(policy: Policy, enforcement: Enforcement) -> None:
    """Raise BackendUnavailable if a required control would be missing."""
    check_policy(
        policy,
        enforcement,
        networks=("off", *SERVED),
        network="gVisor without docker has the network off, by an allowlist, or open",
        level='gVisor gives; for it, use backend "local"',
        lacks=lambda missing: BackendUnavailable(f'backend "gvisor": {missing}'),
    )
