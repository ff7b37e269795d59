"""Leases that a process holds: taken for one sandbox after the other, renewed, and given back.

Theory of operation: a blocking call runs its event loop only while it waits, so nothing in that loop could renew a
lease between calls. One thread with a loop of its own talks to the fleet. A lease that is given back waits `IDLE_S` for
the next sandbox that needs the same, and is then released: so many programs one after the other, as in `cloche.map`,
hold a lease per worker and not one per program. A lease that cannot be renewed is lost, and not used again.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from cloche.core.errors import BackendUnavailable, ClocheError, NodeLost
from cloche.core.fleet import TTL_S, Fleet, Lease, LeaseSpec
from cloche.core.remote import LeasedPlace

IDLE_S = 1.0
ASK_S, OVER_S = 0.5, 5.0  # between two questions whether a lease is over, and for all of them
MARGIN_S = 5.0  # a lease that ends sooner is renewed before it is used
AT_EXIT_S = 2.0
log = logging.getLogger("cloche.fleet")
T = TypeVar("T")


class HeldLease:
    """A lease that this process holds; its `place` always has the newest credential."""

    def __init__(self, spec: LeaseSpec, lease: Lease):
        self.spec, self.lease = spec, lease
        self.place = LeasedPlace(engine=lease.engine, node=lease.node, lease=lease.id, credential=lease.credential)
        self.is_lost = False
        self.renewing: asyncio.Task[None] | None = None
        self.releasing: asyncio.TimerHandle | None = None

    def renewed(self, lease: Lease) -> None:
        """Note a later end."""
        self.lease, self.place.credential = lease, lease.credential

    @property
    def is_usable(self) -> bool:
        """Tell whether it is neither lost nor about to end."""
        return not self.is_lost and self.lease.until - time.time() > MARGIN_S


class Leases:
    """Hold the leases of one fleet for this process. `connect` returns the fleet; it is called once, in the thread."""

    def __init__(self, connect: Callable[[], Awaitable[Fleet]], *, ttl_s: float = TTL_S, key: str = ""):
        self._connect, self._ttl_s, self._pid = connect, ttl_s, os.getpid()
        self._key = key or f"{os.getuid()}@{socket.gethostname()}"
        self._lock = threading.Lock()
        self._idle: dict[LeaseSpec, deque[HeldLease]] = {}
        self._held: set[HeldLease] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._fleet: asyncio.Future[Fleet] | None = None

    async def take(self, spec: LeaseSpec) -> HeldLease:
        """Return a lease: one that waits, or a new one. Raises BackendUnavailable."""
        held = self._waiting(spec)
        return held if held is not None else await self.take_new(spec)

    async def take_new(self, spec: LeaseSpec) -> HeldLease:
        """Return a new lease. Raises BackendUnavailable."""
        granted: list[HeldLease] = []
        try:
            return await asyncio.wrap_future(
                asyncio.run_coroutine_threadsafe(self._new(spec, granted), self._running_loop())
            )
        except asyncio.CancelledError:  # it may have been granted at the same moment
            self._soon(self._release_all(granted))
            raise

    def _waiting(self, spec: LeaseSpec) -> HeldLease | None:
        with self._lock:
            idle = self._idle.get(spec)
            while idle:
                held = idle.pop()  # the last one used: its node is warm
                if held.is_usable:
                    return held
                self._soon(self._release(held))
        return None

    def give_back(self, held: HeldLease, *, is_used_up: bool = False) -> None:
        """Let a lease wait for the next sandbox. One that is lost, or may hold something, is released at once."""
        with self._lock:
            if is_used_up or not held.is_usable:
                self._soon(self._release(held))
                return
            self._idle.setdefault(held.spec, deque()).append(held)
        self._soon(self._release_later(held))

    def close(self) -> None:
        """Release all leases, and disconnect. Blocks, for at most `AT_EXIT_S`. A later `take` connects anew."""
        atexit.unregister(self.close)
        if os.getpid() != self._pid:  # a forked child has no such thread, and perhaps a lock that nobody gives back
            return
        with self._lock:
            loop, self._loop = self._loop, None
            self._idle.clear()
        if loop is None:
            return
        closing = asyncio.run_coroutine_threadsafe(self._close(), loop)
        try:
            closing.result(AT_EXIT_S)
        except Exception as error:  # they end by their own time
            log.debug("leases were left to their end: %s", error)
        loop.call_soon_threadsafe(loop.stop)

    # In the thread.

    async def _connected(self) -> Fleet:
        if self._fleet is None or (self._fleet.done() and self._fleet.exception() is not None):
            self._fleet = asyncio.ensure_future(self._connect())
            await asyncio.shield(self._fleet)
            atexit.unregister(self.close)
            atexit.register(self.close)  # before what the engine's package has registered meanwhile
        return await asyncio.shield(self._fleet)

    async def _new(self, spec: LeaseSpec, granted: list[HeldLease]) -> HeldLease:
        fleet = await self._connected()
        held = HeldLease(spec, await fleet.lease(spec, ttl_s=self._ttl_s, key=self._key))
        held.renewing = asyncio.ensure_future(self._renew(held))
        if hasattr(fleet, "why_lost"):  # a coordinator in this process
            held.place.why_lost = partial(self._why_lost, fleet.why_lost, held)  # pyright: ignore[reportAttributeAccessIssue]
        held.place.is_over = partial(self._is_over, held)
        self._held.add(held)
        granted.append(held)
        return held

    async def _is_over(self, held: HeldLease) -> bool:
        """Tell whether a lease is over, from any event loop; a node that has just died is known within seconds."""
        if self._loop is None:
            return True
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._soon_over(held), self._loop))

    async def _soon_over(self, held: HeldLease) -> bool:
        ends = time.monotonic() + OVER_S
        while await self._renew_once(held):
            if time.monotonic() > ends:
                return False
            await asyncio.sleep(ASK_S)
        return True

    async def _why_lost(
        self, ask: Callable[[str, float], Coroutine[Any, Any, str]], held: HeldLease, wait_s: float
    ) -> str:
        """Return why the node of a lease was lost, from any event loop; empty if it is not known within `wait_s`."""
        if self._loop is None:
            return ""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(ask(held.lease.id, wait_s), self._loop))

    async def _renew(self, held: HeldLease) -> None:
        """Renew a lease at a third of its time, for as long as it is held."""
        while True:
            await asyncio.sleep(self._ttl_s / 3)
            if not await self._renew_once(held):
                return

    async def _renew_once(self, held: HeldLease) -> bool:
        """Renew a lease if the fleet answers, and tell whether it goes on."""
        if held.is_lost:
            return False
        try:
            held.renewed(await (await self._connected()).renew(held.lease, ttl_s=self._ttl_s))
        except NodeLost as error:
            held.is_lost = True
            log.warning("%s", error)
        except (ClocheError, OSError) as error:  # it is tried again, until the lease has ended
            log.debug("lease %s was not renewed: %s", held.lease.id, error)
        return not held.is_lost

    async def _release_later(self, held: HeldLease) -> None:
        if held.releasing is not None:
            held.releasing.cancel()
        held.releasing = asyncio.get_running_loop().call_later(IDLE_S, self._release_idle, held)

    def _release_idle(self, held: HeldLease) -> None:
        with self._lock:
            idle = self._idle.get(held.spec, deque())
            if held not in idle:
                return
            idle.remove(held)
        asyncio.ensure_future(self._release(held))  # noqa: RUF006 - kept in `_held` until it is done

    async def _release(self, held: HeldLease) -> None:
        if held.renewing is not None:
            held.renewing.cancel()
        try:
            await (await self._connected()).release(held.lease)
        except (ClocheError, OSError) as error:
            log.debug("lease %s was left to its end: %s", held.lease.id, error)
        finally:
            self._held.discard(held)

    async def _release_all(self, leases: Iterable[HeldLease]) -> None:
        await asyncio.gather(*(self._release(held) for held in leases), return_exceptions=True)

    async def _close(self) -> None:
        await self._release_all(list(self._held))
        if self._fleet is not None:
            await (await self._fleet).close()

    # The thread itself.

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._loop.set_default_executor(_LastingExecutor())
                self._fleet = None
                threading.Thread(target=_run, args=(self._loop,), name="cloche-leases", daemon=True).start()
                atexit.register(self.close)
            return self._loop

    def _soon(self, work: Coroutine[Any, Any, object]) -> None:
        """Start work in the thread; after `close` all leases were released anyway."""
        if self._loop is None:
            work.close()
        else:
            asyncio.run_coroutine_threadsafe(work, self._loop)


class _LastingExecutor(ThreadPoolExecutor):
    """Call in this thread what comes when the interpreter ends: other pools refuse it, and leases are released then."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **named: Any) -> Future[T]:  # noqa: ANN401 - any call
        try:
            return super().submit(fn, *args, **named)
        except RuntimeError:
            future = Future[T]()
            try:
                future.set_result(fn(*args, **named))
            except BaseException as error:
                future.set_exception(error)
            return future


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """Run a loop until it is stopped, then close it."""
    try:
        loop.run_forever()
    finally:
        loop.close()


def no_engine(name: str, package: str, extra: str) -> BackendUnavailable:
    """Return the error for an engine whose package is missing."""
    return BackendUnavailable(
        f"backend {name!r}: the package {package} is not installed.",
        remedy=f'Install the extra that brings it: "pip install cloche[{extra}]".',
    )
