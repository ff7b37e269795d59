"""The runsc backend: gVisor's own kernel around this host's toolchains, without a daemon or an image."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from cloche.core.capabilities import Capabilities
from cloche.core.enforcement import Enforcement
from cloche.core.errors import BackendUnavailable
from cloche.core.levels import Level
from cloche.core.limits import Limits
from cloche.core.policy import Policy

from ..containers.pool import close_pool
from ..drivers import DRIVERS
from ..enforcement import check_policy, gvisor_controls
from ..groups import remove_groups
from ..host import Host, measure_host
from ..toolchain import languages_here
from .engine import INSTALL, Engine
from .place import KIND, wait_for_all
from .sandbox import RunscOpenSandbox
from .trial import find_engine


class RunscBackend:
    """Give sandboxes on gVisor, made of nothing but runsc and this host's system.

    `use_cgroups` set to false leaves control groups aside even where there are some.
    """

    name = "gvisor"

    def __init__(self, *, use_cgroups: bool = True):
        self._use_cgroups = use_cgroups

    def capabilities(self) -> Capabilities:
        """Say what a container enforces here. The first time, one is run; that it works is kept until the next boot."""
        return self.capabilities_at(Level.GVISOR)

    def capabilities_at(self, level: Level) -> Capabilities:
        """Return what is enforced at level gvisor, which is the only one."""
        if level is not Level.GVISOR:
            return self._unavailable(f"level {level} is not what gVisor gives")
        engine = find_engine()
        if isinstance(engine, str):
            return self._unavailable(engine, INSTALL)
        found = gvisor_controls(self._host())
        return Capabilities(backend=self.name, available=True, level=level, controls=found)

    def languages(self) -> tuple[str, ...]:
        """Return the languages for which this host has a toolchain."""
        return languages_here()

    def session_languages(self) -> tuple[str, ...]:
        """Return the languages that may have sessions, here where their programs are."""
        return tuple(DRIVERS)

    def _unavailable(self, reason: str, remedy: str = "") -> Capabilities:
        return Capabilities(backend=self.name, available=False, reason=reason, remedy=remedy)

    @asynccontextmanager
    async def open(self, policy: Policy, limits: Limits) -> AsyncIterator[RunscOpenSandbox]:
        """Open a sandbox; nothing is started before its first run.

        Raises BackendUnavailable when runsc does not work here, or cannot give what the policy requires.
        """
        engine = await asyncio.to_thread(find_engine)
        if isinstance(engine, str):
            raise BackendUnavailable(f"gVisor cannot be used here: {engine}.", remedy=INSTALL)
        host = self._host()
        enforcement = Enforcement(level=Level.GVISOR, controls=gvisor_controls(host))
        _check(policy, enforcement)
        sandbox = RunscOpenSandbox(engine=engine, host=host, policy=policy, limits=limits, enforcement=enforcement)
        try:
            yield sandbox
        finally:
            await sandbox.close()

    def check(self) -> None:
        """Raise BackendUnavailable when runsc does not work here."""
        engine = find_engine()
        if isinstance(engine, Engine):
            return
        raise BackendUnavailable(f"gVisor cannot be used here: {engine}.", remedy=INSTALL)

    def cool_down(self) -> None:
        """End this process's warm containers, and wait until all that was let go is gone."""
        close_pool()
        wait_for_all()

    def clear(self) -> list[str]:
        """Remove what processes that are dead left, which takes no runsc; return a line for each."""
        return [f"control group {name}" for name in remove_groups(self._host(), KIND)]

    def _host(self) -> Host:
        host = measure_host()
        return host if self._use_cgroups else host.without_cgroups()


def _check(policy: Policy, enforcement: Enforcement) -> None:
    """Raise BackendUnavailable when something asked for would be missing."""
    check_policy(
        policy,
        enforcement,
        network="gVisor without docker has the network off only",
        level='gVisor gives; for it, use backend "local"',
        lacks=lambda missing: BackendUnavailable(f'backend "gvisor": {missing}'),
    )
