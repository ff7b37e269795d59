"""The coordinator as a detached, named actor of Ray: it lives on when those who use it end, and Ray starts it again.

Theory of operation: a request for a lease is a task here, and its caller asks for the answer again and again, for a few
seconds each (`lease`). So a caller that is gone, or cut off, is noticed, and no call is open for longer. Errors of
Cloche are answers, not errors of the actor. After a restart the leases come from the nodes' own lists, and the private
key from the arguments, which Ray keeps.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import time
from collections import deque
from collections.abc import Awaitable, Mapping
from importlib import metadata
from typing import Any, TypeVar

from cloche.core.errors import ClocheError
from cloche.core.fleet import FleetEvent, FleetStatus, Lease, LeaseSpec
from cloche.core.fleet_settings import FleetSettings
from cloche.core.record import dataclass, field

from ..coordinator import Coordinator
from ..engine import LinkTo
from ..signing import Signer
from . import cluster
from .engine import RayEngine

T = TypeVar("T")
POLL_S = 5.0  # an answer comes within that time, if only to say that there is none yet
FORGOTTEN_S = 20.0  # a request whose caller asks no more is cancelled
TICK_S = 1.0
MOST_EVENTS = 1000
log = logging.getLogger("cloche.fleet")


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorSettings:
    """All that a coordinator is made from; Ray keeps it for a restart.

    `link` names the function that makes links to nodes, as "module:attribute". `words` are further arguments of
    `cloche node`.
    """

    version: str
    link: str
    private_key: bytes = field(repr=False)
    fleet: FleetSettings = FleetSettings()
    words: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorAnswer:
    """What a call of the actor returns: a value or an error; neither while there is none yet."""

    value: Any = None
    error: ClocheError | None = None
    is_there: bool = True


class _Request:
    """A request for a lease; `asked_at` is when its caller last asked for the answer."""

    def __init__(self, task: asyncio.Task[Lease]):
        self.task, self.asked_at = task, time.monotonic()


class CoordinatorActor:
    """Serve a fleet to callers in the same Ray cluster. Its methods run on one event loop."""

    def __init__(self, settings: CoordinatorSettings):
        self._settings = settings
        self._engine = RayEngine(settings.fleet, settings.version, settings.words)
        self._coordinator = make_coordinator(settings, self._engine)
        self._requests: dict[str, _Request] = {}
        self._events: deque[tuple[int, FleetEvent]] = deque(maxlen=MOST_EVENTS)
        self._new_event = asyncio.Event()
        self._starting: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._used_at, self._is_ending = time.monotonic(), False
        begin_to_serve()

    async def hello(self) -> str:
        """Return the version of Cloche in this process, and begin to serve."""
        self._used_at = time.monotonic()
        await self._started()
        return metadata.version("cloche")

    async def _started(self) -> None:
        """Start once."""
        if self._starting is None:
            self._starting = self._keep(self._start())
        await asyncio.shield(self._starting)

    async def _start(self) -> None:
        await self._coordinator.start()
        self._keep(self._look_after())
        self._keep(self._note_events())

    def _keep(self, work: Any) -> asyncio.Task[Any]:  # noqa: ANN401 - a coroutine of any result
        task: asyncio.Task[Any] = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def lease(
        self, request: str, spec: LeaseSpec, ttl_s: float, key: str, labels: Mapping[str, str]
    ) -> CoordinatorAnswer:
        """Return the answer to a request, which the first call makes, if there is one within `POLL_S`."""
        await self._started()
        if self._is_ending:  # the caller asks the next coordinator
            await asyncio.sleep(TICK_S)
            return CoordinatorAnswer(is_there=False)
        asked = self._requests.get(request)
        if asked is None:
            work = self._coordinator.lease(spec, ttl_s=ttl_s, key=key, labels=labels)
            asked = self._requests[request] = _Request(self._keep(work))
        asked.asked_at = self._used_at = time.monotonic()
        await asyncio.wait([asked.task], timeout=POLL_S)
        if not asked.task.done():
            return CoordinatorAnswer(is_there=False)
        self._requests.pop(request, None)
        return await answered(_result_of(asked.task))

    async def abandon(self, request: str) -> None:
        """Cancel a request; a lease that was granted meanwhile is released."""
        asked = self._requests.pop(request, None)
        if asked is None:
            return
        asked.task.cancel()
        await asyncio.wait([asked.task])
        if not asked.task.cancelled() and asked.task.exception() is None:
            await self._coordinator.release(asked.task.result())

    async def renew(self, lease: Lease, ttl_s: float) -> CoordinatorAnswer:
        """Return a lease with a later end."""
        return await self._of_use(self._coordinator.renew(lease, ttl_s=ttl_s))

    async def release(self, lease: Lease) -> CoordinatorAnswer:
        """Give a place back."""
        return await self._of_use(self._coordinator.release(lease))

    async def nodes(self) -> CoordinatorAnswer:
        """Return the nodes."""
        return await self._looked(self._coordinator.nodes())

    async def status(self) -> CoordinatorAnswer:
        """Return nodes and counts."""
        return await self._looked(self._coordinator.status())

    async def drain(self, node: str, timeout_s: float) -> CoordinatorAnswer:
        """Drain a node for at most `timeout_s`; a value of False says that it has leases yet."""
        await self._started()

        async def drained() -> bool:
            try:
                await self._coordinator.drain(node, timeout_s=timeout_s)
            except TimeoutError:
                return False
            return True

        return await answered(drained())

    async def undrain(self, node: str) -> CoordinatorAnswer:
        """Let a drained node take leases again."""
        return await self._looked(self._coordinator.undrain(node))

    async def settings(self) -> FleetSettings:
        """Return the settings with which the fleet was started."""
        return self._settings.fleet

    async def events(self, after: int) -> tuple[int, list[FleetEvent]]:
        """Return the events after a number, and the last number, within `POLL_S`; -1 returns the number alone."""
        await self._started()
        last = self._events[-1][0] if self._events else 0
        if after < 0:
            return last, []
        if last <= after:
            self._new_event.clear()
            try:
                await asyncio.wait_for(self._new_event.wait(), POLL_S)
            except TimeoutError:
                return after, []
        rows = [row for row in self._events if row[0] > after]
        return (rows[-1][0] if rows else after), [event for _, event in rows]

    async def down(self) -> CoordinatorAnswer:
        """End all leases, blocks and node servers; the caller ends this actor."""
        await self._started()
        return await answered(self._coordinator.down())

    async def _of_use(self, work: Awaitable[T]) -> CoordinatorAnswer:
        self._used_at = time.monotonic()
        return await self._looked(work)

    async def _looked(self, work: Awaitable[T]) -> CoordinatorAnswer:
        await self._started()
        return await answered(work)

    async def _look_after(self) -> None:
        """Cancel what nobody waits for; end all after `idle_s` without a lease or a caller."""
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            for name, asked in list(self._requests.items()):
                if now - asked.asked_at > FORGOTTEN_S:
                    self._keep(self.abandon(name))
            status: FleetStatus = await self._coordinator.status()
            if status.leases or status.waiting:
                self._used_at = now
            if now - self._used_at > self._settings.fleet.idle_s:
                await self._end()

    async def _end(self) -> None:
        self._is_ending = True
        try:
            await self._coordinator.down()
        except Exception as error:  # what is left ends by itself, as after the death of a coordinator
            log.warning("the fleet did not end properly: %r", error)
        await cluster.in_thread(cluster.end_actor, cluster.COORDINATOR)

    async def _note_events(self) -> None:
        number = 0
        async for event in self._coordinator.watch():
            number += 1
            self._events.append((number, event))
            self._new_event.set()


def begin_to_serve() -> None:
    """Have this actor greeted, so that it serves, and ends, without a caller too, as after a restart."""
    this_actor = cluster.imported().get_runtime_context().current_actor
    this_actor.hello.options(enable_task_events=False).remote()


async def answered(work: Awaitable[object]) -> CoordinatorAnswer:
    """Return the result of some work, or its error."""
    try:
        return CoordinatorAnswer(value=await work)
    except ClocheError as error:
        return CoordinatorAnswer(error=error)


async def _result_of(task: asyncio.Task[T]) -> T:
    return task.result()


def make_coordinator(settings: CoordinatorSettings, engine: RayEngine) -> Coordinator:
    """Return the coordinator behind the actor."""
    module, _, attribute = settings.link.partition(":")
    link_to: LinkTo = getattr(importlib.import_module(module), attribute)
    return Coordinator(
        engine, link_to, signer=Signer(settings.private_key), quota=settings.fleet.quota, version=settings.version
    )
