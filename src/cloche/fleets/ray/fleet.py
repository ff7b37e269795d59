"""A fleet on Ray, on the caller's side: each call is one of the coordinator's actor, from any task of one event loop.

A coordinator that was killed comes back within seconds, so a call that fails with it is repeated: all of them have the
same effect twice as once. A request for a lease that was granted by the dead one is unknown to every node.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from importlib import metadata
from typing import Any

from cloche.core.errors import BackendUnavailable, ClocheError, NodeLost, NotFound
from cloche.core.fleet import TTL_S, FleetEvent, FleetStatus, Lease, LeaseSpec, NodeInfo
from cloche.core.fleet_settings import FleetSettings

from ..signing import Signer
from . import cluster
from .coordinator import POLL_S, CoordinatorActor, CoordinatorAnswer, CoordinatorSettings
from .engine import NODE_LABEL

STARTED_S, READY_S, AGAIN_S = 60.0, 60.0, 0.2
HOPELESS_S = 5.0  # that all nodes have a reason: a server that did not start is started again within that time
OTHERS_S = 15.0  # for the other nodes, once one is ready
BACK_S = 30.0  # until a killed coordinator serves again
ENDED_S = 60.0
OF_COORDINATOR = ("share", "reserve_cpu", "idle_s", "quota", "scaling_s", "port")
log = logging.getLogger("cloche.fleet")
LINK = "cloche.backends.cloche.links:WireLink"


class RayFleet:
    """Implement Fleet and FleetOperator over the coordinator of a cluster; see `cluster.join`."""

    engine = "ray"

    def __init__(
        self,
        settings: FleetSettings | None = None,
        *,
        link: str = LINK,
        words: Sequence[str] = (),
    ):
        self._settings, self._link, self._words = settings or FleetSettings(), link, tuple(words)
        self._address = self._settings.address
        self._handle: Any = None
        self._finding = asyncio.Lock()
        self._tasks: set[asyncio.Future[Any]] = set()

    async def lease(
        self, spec: LeaseSpec, *, ttl_s: float = TTL_S, key: str = "", labels: Mapping[str, str] | None = None
    ) -> Lease:
        """Wait for a place. A caller that is cancelled holds nothing."""
        request = uuid.uuid4().hex
        try:
            while True:
                answer = await self._answer("lease", request, spec, ttl_s, key, dict(labels or {}))
                if answer.is_there:
                    lease: Lease = answer.value
                    return lease
        except BaseException:
            self._tell("abandon", request)
            raise

    async def renew(self, lease: Lease, *, ttl_s: float = TTL_S) -> Lease:
        """Return the same lease with a later end."""
        if not await self._exists():
            raise NodeLost(f"the coordinator of lease {lease.id} has ended, and all leases with it.")
        renewed: Lease = (await self._answer("renew", lease, ttl_s)).value
        return renewed

    async def release(self, lease: Lease) -> None:
        """Give a place back."""
        if await self._exists():
            await self._answer("release", lease)

    async def nodes(self) -> Sequence[NodeInfo]:
        """Return the nodes."""
        nodes: Sequence[NodeInfo] = (await self._answer("nodes")).value if await self._exists() else ()
        return nodes

    async def watch(self) -> AsyncIterator[FleetEvent]:
        """Yield events from now on."""
        after, _ = await self._call("events", -1)
        while True:
            last, events = await self._call("events", after)
            for event in events:
                yield event
            after = last

    async def status(self) -> FleetStatus:
        """Return nodes and counts; none where there is no coordinator."""
        if not await self._exists():
            return FleetStatus(engine=self.engine)
        status: FleetStatus = (await self._answer("status")).value
        return status

    async def close(self) -> None:
        """Disconnect from the coordinator. The process stays in Ray's cluster, which others may use here."""
        if cluster.is_own():
            await self.down()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=POLL_S)
        self._handle = None

    async def up(self) -> FleetStatus:
        """Start the coordinator if it is missing, and return the state once a node is ready.

        The others are waited for, too, for some seconds.
        """
        await cluster.joined(self._address, starts=False)
        if texts := differences(await self._call("settings"), self._settings):
            log.warning('The fleet runs with %s: "cloche fleet down" and "up" apply the new settings.', texts)
        ends, hopeless_at = time.monotonic() + READY_S, float("inf")
        others_until = 0.0
        while True:
            await self._call("hello")  # whoever waits uses the fleet
            status = await self.status()
            if any(node.state == "ready" for node in status.nodes):
                others_until = others_until or time.monotonic() + OTHERS_S
                is_starting = any(node.state == "starting" and not node.reason for node in status.nodes)
                if not is_starting or time.monotonic() > others_until:
                    return status
            is_hopeless = bool(status.nodes) and all(node.reason for node in status.nodes)
            if is_hopeless and self._settings.scaling_s:  # machines come with the first requests
                return status
            hopeless_at = min(hopeless_at, time.monotonic() + HOPELESS_S) if is_hopeless else float("inf")
            if time.monotonic() > min(ends, hopeless_at):
                raise BackendUnavailable("no node of the fleet is ready.", remedy=_reasons(status.nodes))
            await asyncio.sleep(AGAIN_S)

    async def drain(self, node: str, *, timeout_s: float | None = None) -> None:
        """Give a node no further lease, and wait until it has none."""
        if not await self._exists():
            raise NotFound("there is no fleet in this cluster.")
        ends = time.monotonic() + (float("inf") if timeout_s is None else timeout_s)
        while True:
            left_s = ends - time.monotonic()
            if (await self._answer("drain", node, min(max(left_s, 0.0), POLL_S))).value:
                return
            if left_s <= 0:
                raise TimeoutError(f"node {node} has leases yet.")

    async def undrain(self, node: str) -> None:
        """Let a drained node take leases again."""
        if not await self._exists():
            raise NotFound("there is no fleet in this cluster.")
        await self._answer("undrain", node)

    async def down(self) -> None:
        """End all leases, node servers and the coordinator. Without effect where there is no fleet."""
        if not await self._exists():
            return
        try:
            await cluster.answer(_quiet(self._handle, "down"), ENDED_S)
        finally:
            await cluster.in_thread(cluster.end_actor, cluster.COORDINATOR)
            self._handle = None

    async def _answer(self, verb: str, *values: Any) -> CoordinatorAnswer:  # noqa: ANN401 - of any verb
        """Call the coordinator. Raises its error."""
        answer: CoordinatorAnswer = await self._call(verb, *values)
        if answer.error is not None:
            raise answer.error
        return answer

    async def _call(self, verb: str, *values: Any) -> Any:  # noqa: ANN401 - of any verb
        """Call the coordinator, again if it was killed meanwhile. Raises BackendUnavailable."""
        failures = cluster.imported().exceptions
        ends = time.monotonic() + BACK_S
        while True:
            try:
                return await cluster.answer(_quiet(await self._found(), verb, *values))
            except (failures.RayActorError, TimeoutError) as error:
                self._handle = None
                if time.monotonic() > ends or "creation task" in str(error):
                    raise _silent(error) from error
            except failures.RayError as error:
                raise _silent(error) from error
            await asyncio.sleep(AGAIN_S)

    def _tell(self, verb: str, *values: Any) -> None:  # noqa: ANN401 - of any verb
        """Call the coordinator without waiting for an answer."""
        if self._handle is None:
            return
        with contextlib.suppress(Exception):  # nobody waits for it; what it would have ended ends by its own time
            told = asyncio.wrap_future(_quiet(self._handle, verb, *values).future())
            self._tasks.add(told)
            told.add_done_callback(self._forget)

    def _forget(self, told: asyncio.Future[Any]) -> None:
        self._tasks.discard(told)
        if not told.cancelled():
            told.exception()

    async def _exists(self) -> bool:
        """Tell whether there is a coordinator."""
        if self._handle is None:
            await cluster.joined(self._address, starts=False)
            self._handle = await cluster.in_thread(cluster.actor, cluster.COORDINATOR)
        return self._handle is not None

    async def _found(self) -> Any:  # noqa: ANN401 - a handle
        """Return the coordinator, which is started if it is missing."""
        async with self._finding:
            if self._handle is None:
                await cluster.joined(self._address)
                handle = await cluster.in_thread(self._coordinator)
                await self._greet(handle)
                self._handle = handle
            return self._handle

    async def _greet(self, handle: Any) -> None:  # noqa: ANN401 - a handle
        version = await cluster.answer(_quiet(handle, "hello"), STARTED_S)
        if version != _version():
            raise BackendUnavailable(
                f"the fleet's coordinator has Cloche {version}, and this Python has {_version()}.",
                remedy='Install the same version, or end the fleet with that one\'s "cloche fleet down".',
            )

    def _coordinator(self) -> Any:  # noqa: ANN401 - a handle
        """Return the coordinator's actor, a new one if there is none; blocks."""
        if handle := cluster.actor(cluster.COORDINATOR):
            return handle
        settings = CoordinatorSettings(
            version=_version(), link=self._link, private_key=Signer().private_key,
            fleet=self._settings, words=self._words,
        )  # fmt: skip
        return start_coordinator(settings)


def differences(running: FleetSettings, wanted: FleetSettings) -> str:
    """Return what a running coordinator does not have as it is configured now; callers apply the other settings."""
    rows = [(name, getattr(running, name), getattr(wanted, name)) for name in OF_COORDINATOR]
    return ", ".join(f"{name.removesuffix('_s')} {old} and not {new}" for name, old, new in rows if old != new)


def _version() -> str:
    return metadata.version("cloche")


def start_coordinator(settings: CoordinatorSettings) -> Any:  # noqa: ANN401 - a handle
    """Start the coordinator's actor on this node, later elsewhere if need be, unless another caller just did; blocks.

    By a label: Ray does not keep to a soft affinity of an actor that needs no processor.
    """
    ray = cluster.imported()
    here = ray.get_runtime_context().get_node_id()
    remote = ray.remote(num_cpus=0, max_restarts=-1, max_concurrency=100_000)(CoordinatorActor)
    options = {
        "name": cluster.COORDINATOR, "namespace": cluster.NAMESPACE, "lifetime": "detached", "get_if_exists": True,
        "enable_task_events": False, "label_selector": {NODE_LABEL: here},
        "fallback_strategy": [{"label_selector": {}}],
    }  # fmt: skip
    return remote.options(**options).remote(settings)


def _quiet(handle: Any, verb: str, *values: Any) -> Any:  # noqa: ANN401 - a reference
    """Call an actor without an event of it in the memory of Ray's head."""
    return getattr(handle, verb).options(enable_task_events=False).remote(*values)


def _silent(error: Exception) -> ClocheError:
    """Return the error of a coordinator that does not answer, or that cannot start where there is no Cloche."""
    text = str(error).strip()
    if "No module named 'cloche" in text:
        return BackendUnavailable(
            "the fleet's coordinator cannot start: the Python of Ray's workers on this node has no Cloche.",
            remedy=f'Install cloche[ray]=={_version()} beside the "ray" of "ray start", or bring it by a runtime_env.',
        )
    lines = text.splitlines() or [type(error).__name__]
    if "creation task" in lines[0]:
        return BackendUnavailable(
            f"the fleet's coordinator cannot start on this node: {lines[-1]}",
            remedy=f'Cloche beside the "ray" of "ray start" has to be this one, {_version()}, in all of its files.',
        )
    return BackendUnavailable(
        f"the fleet's coordinator does not answer: {lines[0]}",
        remedy='"cloche fleet status" tries again; "ray list actors" shows where it was.',
    )


def _reasons(nodes: Sequence[NodeInfo]) -> str:
    return " ".join(f"Node {node.id[:12]}: {node.reason or node.state}." for node in nodes) or "Ray has no node."
