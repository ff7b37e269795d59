"""Live sandboxes of a node: each belongs to a lease, is open in this process, and ends with either."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial, reduce
from typing import Any

from cloche.core.errors import ClocheError, InvalidRequest, NotFound, OutcomeUnknown
from cloche.core.escape import escape_name
from cloche.core.letter_case import camel
from cloche.core.record import dataclass
from cloche.core.request import InputFile
from cloche.execution.sandbox import AsyncSandbox
from cloche.fleets.placing import NOTHING, ResourceSize
from cloche.keeper.life import KEEPS_FILES
from cloche.records.ids import new_id, now
from cloche.wire.attachments import Attachment
from cloche.wire.held import Terms, as_info, change_held, held_attachment, needs_worker, open_held, until_over
from cloche.wire.places import Places
from cloche.wire.problems import Refused
from cloche.wire.sandboxes import ENDED, PAUSED, RUNNING, read_labels, read_states
from cloche.wire.shares import Shares
from cloche.wire.work import Listing

from .amounts import LeaseAmounts

MOST_SANDBOXES, MOST_SANDBOXES_OF_LEASE = 512, 64
MOST_ENDED = 256  # whose facts are kept
END_S, DENY_S = 15.0, 2.0
STARTS, SLOW_S = 4, 3.0  # sandboxes that start at once
ROOM_S = 5.0  # in which what just ran in the lease ends
log = logging.getLogger("cloche.fleet")


@dataclass(slots=True, kw_only=True, eq=False)
class LeasedSandbox:
    """Hold a sandbox, its lease, its times and its facts, the task that ends it in time, and its end once begun."""

    lease: str
    size: ResourceSize
    terms: Terms
    facts: dict[str, Any]
    attachment: Attachment
    attending: asyncio.Task[None] | None = None
    ending: asyncio.Task[None] | None = None


class NodeSandboxes:
    """Open, find and end the sandboxes of leases."""

    def __init__(self, *, most: int = MOST_SANDBOXES):
        self._shares = Shares(most, most_of_one=MOST_SANDBOXES_OF_LEASE)
        self.amounts = LeaseAmounts(self._living)
        self._open: dict[str, LeasedSandbox] = {}
        self._ended: deque[tuple[str, dict[str, Any]]] = deque(maxlen=MOST_ENDED)
        self._starting = Places(STARTS)
        self.listings = asyncio.Semaphore(2)

    def __len__(self) -> int:
        return len(self._open)

    def _living(self, lease: str) -> ResourceSize:
        """Return what the sandboxes of a lease take, with those that are apart for sessions."""
        sizes = [held.size.times(1 + held.attachment.apart) for held in self._open.values() if held.lease == lease]
        return reduce(ResourceSize.plus, sizes, NOTHING)

    async def create(
        self, *, lease: str, terms: Terms, document: Mapping[str, Any], options: Mapping[str, Any],
        files: Mapping[str, bytes | InputFile] | None,
    ) -> dict[str, Any]:  # fmt: skip
        """Open a sandbox; return its facts once it runs. Raises Refused (429) for too many, ClocheError."""
        if not self._shares.has_room(lease):
            raise Refused(
                429, "too-many-sandboxes",
                f"{self._shares.held} sandboxes are live on this node, of {self._shares.most}, and of "
                f"{self._shares.most_of_one} of one lease", remedy="end one, or take another lease",
            )  # fmt: skip
        size = ResourceSize.of(options["cpus"], options["memory"])
        self._shares.take(lease)
        try:
            await self.amounts.take(lease, size, ROOM_S)
        except BaseException:
            self._shares.give_back(lease)
            raise
        try:
            await asyncio.to_thread(needs_worker, options, terms)
            async with self._start(lease):
                sandbox = await open_held(options, files, terms)
            facts = _facts_of(sandbox, lease, document)
            held = LeasedSandbox(
                lease=lease, size=size, terms=terms, facts=facts,
                attachment=held_attachment(facts["id"], sandbox, terms),
            )  # fmt: skip
            held.attachment.check_apart = lambda count: self.amounts.check(lease, size.times(count))
            self._open[facts["id"]] = held
        except BaseException:
            self._shares.give_back(lease)
            raise
        finally:  # a sandbox that is open counts as a living one
            self.amounts.give_back(lease, size)
        held.attending = asyncio.ensure_future(self._attend(held))
        return dict(facts)

    @asynccontextmanager
    async def _start(self, lease: str) -> AsyncIterator[None]:
        """Hold a place for the body, but for `SLOW_S` at most: one that waits for packages or an image needs none."""
        await self._starting.take(lease)
        turn = [lease]

        def give_back() -> None:
            if turn:
                self._starting.release(turn.pop())

        slow = asyncio.get_running_loop().call_later(SLOW_S, give_back)
        try:
            yield
        finally:
            slow.cancel()
            give_back()

    async def _attend(self, held: LeasedSandbox) -> None:
        memory = held.terms.at_end != KEEPS_FILES
        await until_over(held.attachment, held.terms, partial(self.change, held.attachment, "pause", memory=memory))
        await self._end(held)

    @asynccontextmanager
    async def held(self, sandbox_id: str, project: str) -> AsyncIterator[Attachment]:
        """Hold a sandbox of a lease for the body. Raises NotFound, Refused (409) for an ended one, ClocheError."""
        held = self._find(sandbox_id, project)
        if held is None or held.ending is not None or held.attachment.is_lost:
            raise _ended(sandbox_id)
        attachment = held.attachment
        attachment.users += 1
        try:
            yield attachment
        except OutcomeUnknown as error:
            if attachment.is_lost:
                raise _ended(sandbox_id) from error
            raise
        finally:
            attachment.users -= 1
            attachment.used_at = time.monotonic()

    def _find(self, sandbox_id: str, lease: str) -> LeasedSandbox | None:
        """Return a sandbox, None for one that has ended. Raises NotFound, also for another lease's."""
        held = self._open.get(sandbox_id)
        if held is not None and held.lease == lease:
            return held
        if self._facts_of_ended(sandbox_id, lease) is None:
            raise NotFound(f"there is no sandbox {escape_name(sandbox_id[:64])} of this lease")
        return None

    def _facts_of_ended(self, sandbox_id: str, lease: str) -> dict[str, Any] | None:
        ended = (facts for of, facts in self._ended if of == lease and facts["id"] == sandbox_id)
        return next(ended, None)

    async def describe(self, sandbox_id: str, project: str) -> dict[str, Any]:
        """Return the facts of a sandbox, also of one that has ended. Raises NotFound."""
        held = self._find(sandbox_id, project)
        if held is None:
            return dict(self._facts_of_ended(sandbox_id, project) or {})
        return {**held.facts, **as_info(held.attachment)}

    async def change(self, held: Attachment, op: str, **order: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON
        """Do an operation of a keeper on a sandbox, and return what it answers."""
        info = await change_held(held, op, **order)
        if (leased := self._open.get(held.id)) is not None:
            leased.facts |= {"state": PAUSED if info["is_paused"] else RUNNING, "atEnd": info["at_end"]}
        return info

    def list(self, listing: Listing, lease: str) -> dict[str, Any]:
        """Return the sandboxes of a lease, the newest first. Raises InvalidRequest."""
        if listing.cursor is not None:
            raise InvalidRequest("cursor: a node lists all sandboxes of a lease at once")
        labels, states = read_labels(listing.label), read_states(listing.state)
        ours = [held.facts for held in self._open.values() if held.lease == lease]
        rows = [
            facts
            for facts in (*ours, *(facts for of, facts in self._ended if of == lease))
            if labels.items() <= facts["labels"].items()
            and (not states or facts["state"] in states)
            and (listing.name is None or facts["name"] == listing.name)
        ]
        rows.sort(key=lambda facts: facts["id"], reverse=True)
        return {"items": rows[: listing.limit], "nextCursor": None}

    async def end(self, sandbox_id: str, lease: str) -> dict[str, Any]:
        """End a sandbox and everything in it; return its facts when nothing of it is left. Raises NotFound."""
        held = self._find(sandbox_id, lease)
        if held is not None:
            await self._end(held)
        return await self.describe(sandbox_id, lease)

    async def _end(self, held: LeasedSandbox) -> None:
        """End a sandbox. Several calls end it once, and each waits until nothing of it is left."""
        await asyncio.shield(self._begin_end(held))

    def _begin_end(self, held: LeasedSandbox) -> asyncio.Task[None]:
        if held.ending is None:
            held.ending = asyncio.ensure_future(self._close(held))
        return held.ending

    async def _close(self, held: LeasedSandbox) -> None:
        try:
            async with asyncio.timeout(END_S):
                await held.attachment.close()
        except (ClocheError, TimeoutError) as error:
            log.warning("sandbox %s did not end properly: %s", held.attachment.id, error)
        finally:
            self._shares.give_back(held.lease)
            held.facts.update(state=ENDED, endedAt=now())
            self._open.pop(held.attachment.id, None)
            self._ended.append((held.lease, held.facts))
            self.amounts.note_end(held.lease)
            if held.attending is not None and not held.attending.done():
                asyncio.get_running_loop().call_soon(held.attending.cancel)

    async def end_of(self, lease: str) -> None:
        """End all sandboxes of a lease."""
        await asyncio.gather(*(self._end(held) for held in list(self._open.values()) if held.lease == lease))

    async def end_all(self) -> None:
        """End all sandboxes."""
        await asyncio.gather(*(self._end(held) for held in list(self._open.values())))

    async def deny(self, rules: Sequence[str]) -> None:
        """Deny hosts in each live sandbox that has a network."""
        served = [held for held in self._open.values() if held.facts["network"] != "off"]
        await asyncio.gather(*(self._deny(held, rules) for held in served))

    async def _deny(self, held: LeasedSandbox, rules: Sequence[str]) -> None:
        try:
            async with asyncio.timeout(DENY_S):
                await held.attachment.sandbox.network.deny(*rules)
        except (ClocheError, OSError) as error:  # also TimeoutError
            log.warning("sandbox %s is ended, since it cannot be denied hosts: %s", held.attachment.id, error)
            self._begin_end(held)  # the coordinator, whose heartbeat brought the rules, does not wait for it


def _facts_of(sandbox: AsyncSandbox, lease: str, document: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "id": new_id("sb"), "state": RUNNING, "createdAt": now(), "endedAt": None, "apiKey": lease, **document,
        "heldBy": "worker", "backend": sandbox.backend, "network": sandbox.policy.network,
        "limits": {camel(limit): value for limit, value in sandbox.limits.as_dict().items()},
    }  # fmt: skip


def _ended(sandbox_id: str) -> Refused:
    return Refused(409, "sandbox-ended", f"sandbox {escape_name(sandbox_id[:64])} has ended", remedy="open another one")
