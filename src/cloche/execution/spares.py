"""Spare sandboxes: open, held by keepers, and given a name when a caller opens one of the same rules and limits.

Theory of operation: a pool belongs to one event loop. It notes the rules and limits with which named sandboxes are
opened in its context (`used`), and keeps some spares for each of the last few such kinds. A keeper holds a spare under
a name that no caller can give or list. Until it is taken, it ends with the pool's connection, and thereby with this
process. To take one is a single operation of its keeper (`KeeperClaim.adopt`); everything else that makes a sandbox
(files, functions, environment) is done by the caller as in a new one. So both ways lead to the same sandbox, and a
caller that finds no spare opens one.

Spares are opened one after the other, and for two seconds none is begun while a caller waits for its sandbox. A caller
that finds one being opened waits for it. What cannot be opened is not tried again before it is asked for again.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from contextvars import Context, ContextVar
from typing import Protocol, runtime_checkable

from cloche.core.errors import BackendUnavailable, ClocheError, InternalError, InvalidRequest
from cloche.core.limits import Limits
from cloche.core.loops import finish
from cloche.core.policy import Policy
from cloche.core.protocols import Backend, OpenLiveSandbox, SupportsNames
from cloche.core.record import dataclass, replace
from cloche.core.suppressed import suppress_logged
from cloche.keeper import registry
from cloche.keeper.attach import Adoptable, KeeperClaim, Terms

from .installing import with_growing
from .prepare import Prepared

KINDS = 4  # of rules and limits that have spares, those used last
LIFETIME_S = 3600.0  # of a spare; then another one is opened
ANSWER_S, QUIET_S = 0.005, 2.0
LEAST_FREE_BYTES = 1 << 30  # of memory, below which no spare is opened
log = logging.getLogger("cloche.live")
_pool: ContextVar[SparePool | None] = ContextVar("spares", default=None)


@runtime_checkable
class SpareSandbox(OpenLiveSandbox, Adoptable, Protocol):
    """Be a live sandbox that can get its name later."""

    @property
    def is_lost(self) -> bool:
        """Tell whether it has ended."""
        ...


Kind = tuple[Backend, Policy, Limits]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Spare:
    """Hold a spare, its policy with the folder for added packages, and what closes it."""

    sandbox: SpareSandbox
    policy: Policy
    stack: AsyncExitStack

    async def close(self) -> None:
        """End it, or detach from it if it was taken."""
        with suppress_logged(log, "how a spare sandbox ended", Exception):
            await self.stack.aclose()


class SparePool:
    """Keep `count` spares of each of the last few kinds. Use from one event loop."""

    def __init__(self, count: int):
        self._count = count
        self._kinds: dict[Kind, list[Spare]] = {}  # the kind used last is the last one
        self._prepared: dict[Kind, Prepared] = {}
        self._callers = 0  # that wait for a sandbox
        self._filling: asyncio.Task[None] | None = None
        self._coming: tuple[Kind, asyncio.Future[Spare | None]] | None = None  # being opened, for the first who waits
        self._is_quiet = asyncio.Event()
        self._is_quiet.set()
        self._is_closed = False

    @property
    def ready(self) -> int:
        """Count the spares of all kinds."""
        return sum(map(len, self._kinds.values()))

    @contextmanager
    def used(self) -> Iterator[None]:
        """Have the named sandboxes that the body opens taken from this pool. None is opened meanwhile."""
        token = _pool.set(self if self._count else None)
        self._callers += 1
        self._is_quiet.clear()
        try:
            yield
        finally:
            _pool.reset(token)
            self._callers -= 1
            if not self._callers:
                self._is_quiet.set()

    def prepare(self, prepared: Prepared) -> None:
        """Open spares of this kind, if it can have some, before the first is asked for."""
        kind = _kind_of(prepared)
        if self._count and kind is not None:
            self._note(kind, prepared)

    async def take(self, prepared: Prepared, claim_for: Callable[[Prepared], KeeperClaim]) -> Spare | None:
        """Return a spare that lives and has got its name; None without one. Raises InvalidRequest for a used name."""
        kind = _kind_of(prepared)
        if kind is None:
            return None
        self._note(kind, prepared)
        while (spare := await self._next(kind)) is not None:
            claim = claim_for(replace(prepared, policy=spare.policy))
            try:
                await claim.adopt(spare.sandbox)
                return spare
            except InvalidRequest:
                claim.abandon()
                self._kinds.setdefault(kind, []).append(spare)
                raise
            except (ClocheError, OSError, TimeoutError) as error:
                log.warning("a spare sandbox could not be taken: %s", error)
                await finish(spare.close())
                claim.abandon()
            except BaseException:
                await finish(spare.close())
                claim.abandon()
                raise
        return None

    async def _next(self, kind: Kind) -> Spare | None:
        spares = self._kinds.get(kind, [])
        while spares:
            spare = spares.pop(0)
            if not spare.sandbox.is_lost:
                return spare
            await spare.close()
        if self._coming is None or self._coming[0] != kind:
            return None
        coming, self._coming = self._coming[1], None
        return await coming

    def _note(self, kind: Kind, prepared: Prepared | None = None) -> None:
        """Note the use of a kind, and begin to open what is missing."""
        self._kinds[kind] = self._kinds.pop(kind, [])
        if prepared is not None:
            self._prepared[kind] = prepared
        if self._filling is None and not self._is_closed:
            # Without the context of this caller, which has an owner of sandboxes.
            filling = asyncio.get_running_loop().create_task(self._fill(), context=Context())
            filling.add_done_callback(self._note_filled)
            self._filling = filling

    def _note_filled(self, filling: asyncio.Task[None]) -> None:
        self._filling = None
        if not filling.cancelled() and filling.exception() is not None:
            log.error("spare sandboxes could not be opened", exc_info=filling.exception())

    async def _fill(self) -> None:
        while (kind := await self._missing()) is not None:
            future: asyncio.Future[Spare | None] = asyncio.get_running_loop().create_future()
            self._coming, spare = (kind, future), None
            try:
                spare = await _open_spare(self._prepared[kind])
            except (ClocheError, OSError) as error:
                log.warning("no spare sandbox can be opened: %s", error)
                self._kinds.pop(kind, None)
            finally:
                self._deliver(kind, future, spare)

    def _deliver(self, kind: Kind, future: asyncio.Future[Spare | None], spare: Spare | None) -> None:
        """Give a new spare to the caller that waits for it, else keep it."""
        is_awaited, self._coming = self._coming is None, None
        if is_awaited and not future.done():
            future.set_result(spare)
        elif spare is not None:
            self._kinds.setdefault(kind, []).append(spare)

    async def _missing(self) -> Kind | None:
        """Return a kind that has too few spares, once no caller waits; end those of kinds too many."""
        await self._quiet()
        for kind in list(self._kinds)[:-KINDS]:
            self._prepared.pop(kind)
            for spare in self._kinds.pop(kind):
                await spare.close()
        kinds = [kind for kind, spares in self._kinds.items() if len(spares) < self._count]
        is_room = not kinds or await asyncio.to_thread(_free_bytes) >= LEAST_FREE_BYTES
        return kinds[-1] if kinds and is_room else None

    async def _quiet(self) -> None:
        """Wait until no caller waits and the last one has answered its own, though not for long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(QUIET_S):
                while True:
                    await self._is_quiet.wait()
                    await asyncio.sleep(ANSWER_S)
                    if not self._callers:
                        return

    async def tend(self) -> None:
        """Replace spares that have ended."""
        for spares in list(self._kinds.values()):
            for spare in [spare for spare in spares if spare.sandbox.is_lost]:
                spares.remove(spare)
                await spare.close()
        if self._kinds:
            self._note(next(reversed(self._kinds)))

    async def close(self) -> None:
        """End all spares."""
        self._is_closed = True
        if self._filling is not None:
            self._filling.cancel()
            await asyncio.wait((self._filling,))
        ready = [spare for spares in self._kinds.values() for spare in spares]
        self._kinds.clear()
        await asyncio.gather(*(spare.close() for spare in ready))


def current_pool() -> SparePool | None:
    """Return the pool in use."""
    return _pool.get()


def _kind_of(prepared: Prepared) -> Kind | None:
    """Return the kind of a sandbox; None for one with something of its own: folders of the host, secrets, questions."""
    policy = prepared.policy
    has_own = policy.host_folder is not None or policy.home is not None or policy.secrets is not None
    if has_own or policy.on_network == "ask" or not isinstance(prepared.backend, SupportsNames):
        return None
    return prepared.backend, policy, prepared.limits


async def _open_spare(prepared: Prepared) -> Spare:
    """Open a spare. Raises ClocheError."""
    backend = prepared.backend
    if not isinstance(backend, SupportsNames):
        raise InternalError("a spare sandbox of a backend without names")
    name = f"{registry.SPARE}{os.urandom(12).hex()}"
    claim = KeeperClaim(Terms(name=name, lifetime_s=LIFETIME_S), {})  # nobody attaches to it
    async with AsyncExitStack() as on_failure:
        prepared, growing = await asyncio.to_thread(with_growing, prepared)
        if growing is not None:
            on_failure.callback(growing.close)
        opening = backend.open_kept(prepared.policy, prepared.limits, claim)
        sandbox = await on_failure.enter_async_context(opening)
        if not isinstance(sandbox, SpareSandbox):
            raise BackendUnavailable("a sandbox of this backend gets its name when it is opened")
        return Spare(sandbox=sandbox, policy=prepared.policy, stack=on_failure.pop_all())


def _free_bytes() -> int:
    """Return the memory that can be had. Blocks."""
    with open("/proc/meminfo") as file:
        amounts = {line.split(":")[0]: int(line.split()[1]) << 10 for line in file}
    return amounts.get("MemAvailable", 0)
