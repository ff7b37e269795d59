"""The docker backend: each run in a throwaway container of a daemon, under runc or gVisor's runsc."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from cloche.core.enforcement import Enforcement, Level, NetworkMode
from cloche.core.errors import BackendUnavailable, ClocheError
from cloche.core.layers import Interpreter
from cloche.core.limits import Limits
from cloche.core.policy import Policy
from cloche.core.protocols import Capabilities
from cloche.core.record import dataclass, replace
from cloche.core.request import WorkspaceContainer
from cloche.egress.client import operator_proxies, rest

from ..containers.pool import close_pool
from ..enforcement import (
    check_policy,
    docker_controls,
    docker_with_users,
    with_hosts_stack,
    with_less_than_preferred,
    with_network,
)
from ..network import SERVED
from ..session_languages import DRIVERS
from .daemon import Daemon, Key, clear, close_idle, connect, explained, key, wait_for_all
from .images import find_image, image_digests, image_name, interpreter_of, is_here
from .layers import prune
from .live import DockerLiveSandbox, find_live_image
from .plan import NETWORKS, workspace_arguments
from .runtimes import (
    REMEDY,
    REMEDY_NETWORK,
    choose_runtime,
    gvisor_runtime,
    has_hosts_stack,
    is_ruled_out,
    own_runtime,
    why_no_gvisor,
    why_not_preferred,
)
from .sandbox import DockerOpenSandbox

_clearing = threading.Lock()

USE_LOCAL = 'Or use the default backend "local", which needs nothing to be set up.'
LOOK_S = 3  # time-out of each of three requests when only availability is asked
ABSENT_S = 30  # an unreachable daemon is contacted again only after this time, when only availability is asked
_absent: dict[Key, tuple[float, str, str]] = {}  # time of the failure, reason, remedy
_cleared: set[int] = set()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chosen:
    """The daemon and runtime chosen for a container, their enforcement report, and the entries for `meta` of
    results.
    """

    daemon: Daemon
    runtime: str
    enforcement: Enforcement
    notes: Mapping[str, str]


class DockerBackend:
    """Give sandboxes that are containers. `images` maps languages to image names; `*` matches any other language."""

    name = "docker"
    serves_functions = "live"  # of the caller, to guests of live sandboxes
    takes_secrets = writes_secret_files = True

    def __init__(self, images: Mapping[str, str] | None = None):
        self._images = dict(images or {})

    def with_images(self, images: Mapping[str, str]) -> DockerBackend:
        """Return a backend of the same class with other images."""
        return DockerBackend(images)

    def session_languages(self) -> tuple[str, ...]:
        """Return the languages that support sessions. The image also needs the language's program."""
        return tuple(DRIVERS)

    def capabilities(self) -> Capabilities:
        """Return the controls that the daemon can enforce. gVisor counts if a test container ran on it.

        No image is pulled. After a failure the daemon is contacted again only after half a minute.
        """
        gvisor = self.capabilities_at(Level.GVISOR)
        if gvisor.available:
            return gvisor
        jail = self.capabilities_at(Level.JAIL)
        if not jail.available:
            return jail
        reason = f"containers share the host's kernel: gVisor cannot be used, {gvisor.reason}"
        return replace(jail, reason=reason, remedy=gvisor.remedy)

    def capabilities_at(self, level: Level) -> Capabilities:
        """Return the controls of a container on the daemon's own runtime (`jail`) or on gVisor's (`gvisor`)."""
        if level not in (Level.JAIL, Level.GVISOR):
            return self._unavailable(f"level {level} is not one that a container gives")
        try:
            daemon = _look()
            why_not, remedy = self._why_no_gvisor(daemon) if level is Level.GVISOR else ("", "")
        except ClocheError as error:
            reason = error.reason if isinstance(error, BackendUnavailable) else str(error)
            return self._unavailable(reason, getattr(error, "remedy", ""))
        if why_not:
            return self._unavailable(why_not, remedy)
        runtime = gvisor_runtime(daemon) if level is Level.GVISOR else ""
        controls = _enforcement(daemon, Policy(), level, runtime).controls
        return Capabilities(
            backend=self.name,
            available=True,
            level=level,
            controls=controls,
            networks=_networks(daemon, level),
            not_users="",
        )

    def _unavailable(self, reason: str, remedy: str = "") -> Capabilities:
        return Capabilities(backend=self.name, available=False, reason=reason, remedy=remedy)

    def why_not_ready(self) -> str:
        """Return which image must be pulled first, "" if it is present."""
        name = self._any_image()
        if is_here(_look(), name):
            return ""
        return f'image {name!r} is not here; fetch it with "docker pull {name}", or name one that is here'

    def image_digests(self) -> list[str]:
        """Return the digests of the images that the daemon has. Raises BackendUnavailable."""
        return image_digests(_look())

    def check_layers(self, policy: Policy) -> None:
        """Accept every policy: a container gets the layers as volumes."""

    def find_interpreter(self) -> Interpreter:
        """Return the interpreter of the image that runs Python. Blocks; may pull the image."""
        daemon = connect()
        return interpreter_of(daemon, find_image(daemon, image_name("python", self._images)))

    def prune_layers(self, folder: str) -> list[str]:
        """Remove the volumes of layers that no longer exist below `folder`; return one line for each."""
        try:
            return prune(_look(), folder)
        except BackendUnavailable:
            raise
        except Exception as error:
            raise BackendUnavailable(f'backend "docker": volumes cannot be listed: {explained(error)}') from error

    def _any_image(self) -> str:
        """Return the image used for tests: the first that is configured, else Python's."""
        return next(iter(self._images.values()), image_name("python", self._images))

    def _why_no_gvisor(self, daemon: Daemon) -> tuple[str, str]:
        """Return why gVisor cannot be used, and the remedy. It is tested only if the image is present."""
        if is_ruled_out(daemon):
            return why_no_gvisor(daemon, None), REMEDY
        lacking = self.why_not_ready()
        if lacking:
            return "it was not tried yet, for want of an image to try it with", lacking
        return why_no_gvisor(daemon, find_image(daemon, self._any_image())), REMEDY

    @asynccontextmanager
    async def open(self, policy: Policy, limits: Limits) -> AsyncIterator[DockerOpenSandbox]:
        """Open a sandbox; no container starts before the first run.

        Raises BackendUnavailable if there is no daemon or a required control is missing.
        """
        chosen = await self._choose(policy)
        sandbox = DockerOpenSandbox(
            daemon=chosen.daemon, policy=policy, limits=limits, enforcement=chosen.enforcement, images=self._images,
            runtime=chosen.runtime, notes=chosen.notes,
        )  # fmt: skip
        try:
            yield sandbox
        finally:
            await sandbox.close()

    @asynccontextmanager
    async def open_live(self, policy: Policy, limits: Limits) -> AsyncIterator[DockerLiveSandbox]:
        """Open a sandbox that lives, in one container, which starts on first use.

        Raises BackendUnavailable if there is no daemon or a required control is missing.
        """
        chosen = await self._choose(policy, is_live=True)
        image = await asyncio.to_thread(find_live_image, chosen.daemon, self._images)
        sandbox = DockerLiveSandbox(
            daemon=chosen.daemon, policy=policy, limits=limits, enforcement=chosen.enforcement, image=image,
            runtime=chosen.runtime, notes=chosen.notes,
        )  # fmt: skip
        try:
            yield sandbox
        finally:
            await sandbox.close()

    async def _choose(self, policy: Policy, *, is_live: bool = False) -> _Chosen:
        """Return the daemon, the runtime and their enforcement report. Raises BackendUnavailable."""
        daemon = await asyncio.to_thread(connect)
        _clear_once(daemon)
        runtime, level = await asyncio.to_thread(self._runtime, daemon, policy)
        enforcement = _enforcement(daemon, policy, level, runtime, has_users=is_live and policy.users)
        _check(daemon, policy, enforcement)
        why = why_not_preferred(daemon, policy, level)
        if why:
            enforcement = with_less_than_preferred(enforcement, why)
        return _Chosen(
            daemon=daemon, runtime=runtime, enforcement=enforcement, notes={"why_no_gvisor": why} if why else {}
        )

    def _runtime(self, daemon: Daemon, policy: Policy) -> tuple[str, Level]:
        """Choose the runtime. A test of gVisor needs an image; any image will do."""
        if policy.runtime is not None:
            return own_runtime(daemon)
        is_served = policy.network in SERVED
        if policy.level is None and policy.network == "bridge":
            return choose_runtime(daemon, None, Level.JAIL)  # gVisor has no bridge
        if policy.level is Level.JAIL or is_ruled_out(daemon, is_served=is_served):
            return choose_runtime(daemon, None, policy.level, is_served=is_served)
        return choose_runtime(daemon, find_image(daemon, self._any_image()), policy.level, is_served=is_served)

    def workspace_arguments(self, container: WorkspaceContainer, policy: Policy, limits: Limits) -> list[str]:
        """Return the arguments of the `docker run` for an agent's container. Sends no request to the daemon."""
        return workspace_arguments(container, policy, limits)

    def drain(self) -> None:
        """End this process's warm containers, and wait until all released containers are removed."""
        close_pool()
        wait_for_all()
        close_idle()
        rest()

    def check(self) -> None:
        """Raise BackendUnavailable if there is no daemon."""
        try:
            connect()
        except BackendUnavailable as error:
            raise BackendUnavailable(error.reason, remedy=f"{error.remedy} {USE_LOCAL}") from error

    def collect_garbage(self) -> list[str]:
        """Remove containers and volumes of dead processes; return one line for each. Raises BackendUnavailable."""
        return clear(connect())


def _enforcement(daemon: Daemon, policy: Policy, level: Level, runtime: str, *, has_users: bool = False) -> Enforcement:
    """Return the enforcement report of a container on this runtime."""
    enforcement = Enforcement(level=level, controls=docker_controls(daemon, policy, level))
    if has_users:
        enforcement = docker_with_users(enforcement, daemon)
    is_through_host = level is Level.GVISOR and has_hosts_stack(daemon, runtime)
    if policy.network in SERVED:
        is_proxied = bool(operator_proxies())
        enforcement = with_network(enforcement, policy.network, is_proxied=is_proxied, is_through_host=is_through_host)
    return with_hosts_stack(enforcement, is_root_outside=not daemon.is_id_mapped) if is_through_host else enforcement


def _networks(daemon: Daemon, level: Level) -> tuple[NetworkMode, ...]:
    """Return the supported network modes. Only docker's own runtime has its bridge.

    Allowlists need a local daemon: the sockets are made in the container's network namespace and served from here.
    """
    is_jail = level is Level.JAIL
    is_served = daemon.is_by_socket and (is_jail or bool(gvisor_runtime(daemon, is_served=True)))
    return (*(NETWORKS if is_jail else NETWORKS[:1]), *(SERVED if is_served else ()))


def _check(daemon: Daemon, policy: Policy, enforcement: Enforcement) -> None:
    """Raise BackendUnavailable if a required control would be missing."""

    def lacks(missing: str) -> BackendUnavailable:
        remedy = REMEDY_NETWORK if policy.network in SERVED else REMEDY
        return BackendUnavailable(f'backend "docker": {missing}. To get a stronger level: {remedy}')

    check_policy(
        policy,
        enforcement,
        networks=_networks(daemon, enforcement.level),
        network="rules of the network are kept with a daemon of this machine",
        remedy='use backend "local", or network="bridge", docker\'s own without any rules',
        level=f"a container gives: that is {enforcement.level}. "
        f'To get more, {REMEDY}; for less, use backend "local" or "subprocess"',
        lacks=lacks,
    )


def _look() -> Daemon:
    """Return the daemon, found within seconds. Raises BackendUnavailable; failures are cached for `ABSENT_S`."""
    named = key()
    failure = _absent.get(named)
    if failure is not None and time.monotonic() - failure[0] < ABSENT_S:
        raise BackendUnavailable(failure[1], remedy=failure[2])
    try:
        daemon = connect(timeout_s=LOOK_S)
        daemon.check_socket(LOOK_S)
        return daemon
    except BackendUnavailable as error:
        _absent[named] = (time.monotonic(), error.reason, error.remedy)
        raise


def _clear_once(daemon: Daemon) -> None:
    """Remove what dead processes left on the daemon, once per daemon, in the background."""
    with _clearing:
        if id(daemon) in _cleared:
            return
        _cleared.add(id(daemon))
    threading.Thread(target=clear, args=(daemon,), name="cloche-docker-clear", daemon=True).start()
