"""The docker backend: every run in a throwaway container of a daemon."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from cloche.core.capabilities import Capabilities
from cloche.core.enforcement import Enforcement, shortfalls
from cloche.core.errors import BackendUnavailable
from cloche.core.levels import Control, Level
from cloche.core.limits import Limits
from cloche.core.policy import Policy

from .daemon import Daemon, connect, rest
from .images import find_image, image_name
from .measures import measures
from .pool import close_pool
from .remains import clear
from .runtimes import REMEDY, choose_runtime, why_no_gvisor
from .sandbox import DockerOpenSandbox


class DockerBackend:
    """Give sandboxes that are containers. `images` names one per language; `*` stands for any other."""

    name = "docker"

    def __init__(self, images: Mapping[str, str] | None = None):
        self._images = dict(images or {})

    def with_images(self, images: Mapping[str, str]) -> DockerBackend:
        """Return the same backend with other images."""
        return DockerBackend(images)

    def capabilities(self) -> Capabilities:
        """Ask the daemon what it can enforce."""
        try:
            daemon = connect()
        except BackendUnavailable as error:
            return Capabilities(backend=self.name, available=False, reason=str(error))
        why_not = why_no_gvisor(daemon, None)
        level = Level.JAIL if why_not else Level.GVISOR
        return Capabilities(
            backend=self.name,
            available=True,
            level=level,
            controls=measures(daemon, Policy(), level),
            reason=f"containers share the host's kernel: gVisor cannot be used, {why_not}" if why_not else "",
            remedy=REMEDY if why_not else "",
        )

    @asynccontextmanager
    async def open(self, policy: Policy, limits: Limits) -> AsyncIterator[DockerOpenSandbox]:
        """Open a sandbox; nothing is started before its first run.

        Raises BackendUnavailable when there is no daemon, or when it cannot give what the policy requires.
        """
        daemon = await asyncio.to_thread(connect)
        _clear_once(daemon)
        runtime, level = await asyncio.to_thread(self._runtime, daemon, policy)
        enforcement = Enforcement(level=level, controls=measures(daemon, policy, level))
        _check(policy, enforcement)
        sandbox = DockerOpenSandbox(
            daemon=daemon, policy=policy, limits=limits, enforcement=enforcement, images=self._images, runtime=runtime
        )
        try:
            yield sandbox
        finally:
            await sandbox.close()

    def _runtime(self, daemon: Daemon, policy: Policy) -> tuple[str, Level]:
        """Choose the runtime; trying one takes an image, and any will do."""
        if policy.level is Level.JAIL or why_no_gvisor(daemon, None):
            return choose_runtime(daemon, None, policy.level)
        name = next(iter(self._images.values()), image_name("python", self._images))
        return choose_runtime(daemon, find_image(daemon, name), policy.level)

    def cool_down(self) -> None:
        """End this process's warm containers, and wait until all that was let go is gone."""
        close_pool()
        rest()

    def check(self) -> None:
        """Raise BackendUnavailable when there is no daemon."""
        connect()

    def clear(self) -> list[str]:
        """Remove what dead processes left on the daemon; return a line for each. Raises BackendUnavailable."""
        return clear(connect())


def _check(policy: Policy, enforcement: Enforcement) -> None:
    """Raise BackendUnavailable when something asked for would be missing."""
    if policy.network == "allowlist":
        raise BackendUnavailable(
            "network 'allowlist': the docker backend has the network off or open, in this version; "
            "leave network off, or pass what the code needs as files"
        )
    if policy.level not in (None, enforcement.level):
        raise BackendUnavailable(
            f"level {policy.level} is not what a container gives: that is {enforcement.level}. "
            f'To get more, {REMEDY}; for less, use backend "local" or "subprocess"'
        )
    wished = (Control.NETWORK,) if policy.network == "open" else ()
    missing = shortfalls(
        enforcement,
        level=policy.require_level,
        controls=policy.require_controls,
        best_effort=(*policy.best_effort, *wished),
    )
    if missing:
        raise BackendUnavailable(f'backend "docker": {"; ".join(missing)}. To get a stronger level: {REMEDY}')


_turn = threading.Lock()
_cleared: set[int] = set()


def _clear_once(daemon: Daemon) -> None:
    """Remove what dead processes left, once per daemon, in the background."""
    with _turn:
        if id(daemon) in _cleared:
            return
        _cleared.add(id(daemon))
    threading.Thread(target=clear, args=(daemon,), name="cloche-docker-clear", daemon=True).start()
