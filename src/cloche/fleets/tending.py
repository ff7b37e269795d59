"""The coordinator's side of one node: its link, its heartbeat, and the leases that are to end there.

Theory of operation: one task for each node connects, reads what the node is and which leases it holds, and then sends
a heartbeat each second. A node that answers nothing for `silence_s` is lost, unless its machine accepts connections:
then its server is busy, and is lost after `busy_s`. One that refuses connections is lost at once. The task then tries
to connect again, for as long as the engine has the node. A second task ends leases. An end that could not be sent is
kept, and sent before the node's leases are read again, so that no lease that was released comes back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol
from urllib.parse import urlsplit

from cloche.core.errors import BackendUnavailable
from cloche.core.fleet import NodeInfo
from cloche.core.record import dataclass
from cloche.core.remote import HiddenText

from .engine import DeniedAddresses, EngineNode, KeepAnswer, LinkTo, NodeLink, NodeReport

ENDS_AT_ONCE = 16  # leases of a node
CLOSE_S, REACH_S = 1.0, 1.0
MOST_AHEAD_S = 20.0  # of a node's clock, and behind
STALL_S = 1.0  # of this event loop, after which silence is not the node's fault
log = logging.getLogger("cloche.fleet")


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Settings of a coordinator, in seconds.

    Nodes and engine are looked at every `beat_s`; a node is lost after `silence_s`, or after `busy_s` where its machine
    accepts connections. Requests wait `back_s` for it. Without a heartbeat for `alone_s` a node ends its leases. A
    block on a node has to come within `block_s`; `up` waits for a node for `ready_s`.
    """

    beat_s: float = 1.0
    silence_s: float = 3.0
    busy_s: float = 15.0
    tick_s: float = 0.5
    back_s: float = 30.0
    alone_s: float = 60.0
    block_s: float = 30.0
    ready_s: float = 60.0
    end_s: float = 5.0


Reach = Literal["open", "refused", "silent"]


async def reach(address: str) -> Reach:
    """Try to connect to a node's address, over TCP alone."""
    parts = urlsplit(address)
    try:
        async with asyncio.timeout(REACH_S):
            _, writer = await asyncio.open_connection(parts.hostname, parts.port)
    except ConnectionRefusedError:
        return "refused"
    except (OSError, ValueError):
        return "silent"
    writer.close()
    return "open"


class NodeOwner(Protocol):
    """The coordinator, as a node sees it."""

    timing: Timing

    def clock(self) -> float:
        """Return the time in seconds."""
        ...

    def has_stalled(self) -> bool:
        """Tell whether this event loop has just stood still."""
        ...

    async def reach(self, address: str) -> Reach:
        """Try to connect to a node's address."""
        ...

    def denied(self) -> DeniedAddresses:
        """Return the addresses that no guest may reach."""
        ...

    def node_answers(self, node: TendedNode, report: NodeReport, leases: Mapping[str, float]) -> None:
        """Take a node that answers, with the ends of its leases. Raises BackendUnavailable for a useless one."""
        ...

    def node_has(self, node: TendedNode, digests: Sequence[str]) -> None:
        """Take note of the packages and images that a node has now."""
        ...

    def node_is_silent(self, node: TendedNode) -> None:
        """Take note of a node that does not answer any longer."""
        ...


class TendedNode:
    """Tend one node's server until it is closed."""

    def __init__(self, owner: NodeOwner, node: EngineNode, link_to: LinkTo, credential: Callable[[], HiddenText]):
        self.node, self._owner = node, owner
        self._link_to, self._credential = link_to, credential
        self.report: NodeReport | None = None
        self.is_ready = self.was_ready = False
        self.silent_since, self._began_at = 0.0, owner.clock()
        self.reason = ""
        self.ending: dict[str, float] = {}  # leases, and when their last credentials are over
        self._renewed: dict[str, float] = {}
        self._denied_tag = ""  # of what the node denies
        self._has_ends, self._all_ended, self._first_try = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._all_ended.set()
        self._link: NodeLink | None = None
        self._tasks = [asyncio.create_task(self._tend()), asyncio.create_task(self._end_leases())]

    async def tried(self) -> None:
        """Wait until it has answered, or failed to."""
        await self._first_try.wait()

    def end(self, lease: str, until: float = 0.0) -> None:
        """End a lease at the node, soon; `until` is when its last credential is over, 0 if that is not known."""
        self.ending[lease] = until
        self._renewed.pop(lease, None)
        self._all_ended.clear()
        self._has_ends.set()

    def renew(self, lease: str, until: float) -> None:
        """Let the node know a later end with the next heartbeat."""
        self._renewed[lease] = until

    async def drain(self, *, undo: bool = False) -> None:
        """Let the node accept no further lease; with `undo` it accepts them again. Raises ClocheError, OSError."""
        async with asyncio.timeout(self._owner.timing.silence_s):
            await self._connected().drain(undo=undo)

    async def ended(self) -> None:
        """Wait for `end_s` at most until the leases that are to end have ended at the node, if it answers."""
        if self.is_ready:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._owner.timing.end_s):
                    await self._all_ended.wait()

    async def close(self) -> None:
        """Stop."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._first_try.set()
        await self._close_link()

    async def _close_link(self) -> None:
        link, self._link = self._link, None
        try:
            async with asyncio.timeout(CLOSE_S):
                if link is not None:
                    await link.close()
        except Exception as error:
            log.debug("the link to node %s: %s", self.node.id, error)

    def _connected(self) -> NodeLink:
        if self._link is None:
            raise ConnectionError(f"node {self.node.id} is not connected")
        return self._link

    async def _tend(self) -> None:
        while True:
            try:
                await self._connect()
                self._first_try.set()
                await self._beat()
            except Exception as error:
                self._note(error)
            self.is_ready = False
            if not await self._is_still_busy():
                self._owner.node_is_silent(self)
            self._all_ended.set()
            self._first_try.set()
            await self._close_link()
            await asyncio.sleep(self._owner.timing.beat_s)

    async def _is_still_busy(self) -> bool:
        """Tell whether a server that has never answered may only be busy, as one that has just started."""
        is_late = self._owner.clock() - self._began_at > self._owner.timing.busy_s
        if self.was_ready or is_late:
            return False
        reached = await self._owner.reach(self.node.address)
        return reached == "open" or (reached == "silent" and self._owner.has_stalled())

    def _note(self, error: Exception) -> None:
        reason = str(error) or type(error).__name__
        if isinstance(error, TimeoutError):
            reason = "its server does not answer"
        if reason != self.reason:
            log.warning("node %s: %s", self.node.id, reason)
        self.reason = reason

    async def _connect(self) -> None:
        async with asyncio.timeout(self._owner.timing.busy_s):
            link = self._link = self._link_to(self.node, self._credential)
            self.report = await link.status()
            told = await link.keep(self._owner.denied().addresses, self._owner.timing.alone_s, {})
            self._denied_tag = told.denied_tag
            for lease in list(self.ending):
                await self._release(lease)
            leases = await link.leases()
        self._owner.node_answers(self, self.report, leases)
        self.is_ready = self.was_ready = True
        self.reason = ""
        self._has_ends.set()

    async def _beat(self) -> None:
        """Send heartbeats until the node is lost. Raises its last error."""
        timing, heard_at, limit_s = self._owner.timing, self._owner.clock(), 0.0
        while True:
            await asyncio.sleep(timing.beat_s)
            limit_s = timing.silence_s if limit_s else max(timing.silence_s - timing.beat_s, timing.beat_s)
            try:
                await self._keep(limit_s)
                heard_at, limit_s = self._owner.clock(), 0.0
            except Exception:  # raised below once the node counts as lost; until then it is only late
                reached = await self._owner.reach(self.node.address)
                if self._owner.has_stalled():
                    heard_at = self._owner.clock()
                elif self._is_lost(reached, self._owner.clock() - heard_at):
                    raise

    async def _keep(self, limit_s: float) -> None:
        renewed, self._renewed = self._renewed, {}
        try:
            async with asyncio.timeout(limit_s):
                answer = await self._tell(renewed)
                renewed = {}
                if self.report is not None and answer.digests_tag != self.report.digests_tag:
                    self.report = await self._connected().status()
                    self._owner.node_has(self, self.report.digests)
        except BaseException:
            self._renewed = renewed | self._renewed
            raise

    async def _tell(self, renewed: Mapping[str, float]) -> KeepAnswer:
        """Send a heartbeat, with the addresses that no guest may reach if the node may have others."""
        denied = self._owner.denied()
        addresses = None if denied.tag == self._denied_tag else denied.addresses
        answer = await self._connected().keep(addresses, self._owner.timing.alone_s, renewed)
        self._denied_tag = answer.denied_tag
        return answer

    def _is_lost(self, reached: Reach, silent_s: float) -> bool:
        limits = {"refused": 0.0, "silent": self._owner.timing.silence_s, "open": self._owner.timing.busy_s}
        return silent_s >= limits[reached] - self._owner.timing.beat_s / 10

    async def _end_leases(self) -> None:
        while True:
            await self._has_ends.wait()
            self._has_ends.clear()
            while self.is_ready and self.ending:
                leases = list(self.ending)[:ENDS_AT_ONCE]
                results = await asyncio.gather(*map(self._release, leases), return_exceptions=True)
                for lease, failure in zip(leases, results, strict=True):
                    if failure is not None and lease in self.ending:
                        self.ending[lease] = self.ending.pop(lease)  # behind the others
                if any(results):
                    await asyncio.sleep(self._owner.timing.beat_s)

    async def _release(self, lease: str) -> None:
        await self._connected().release(lease, self.ending.get(lease, 0.0))
        self.ending.pop(lease, None)
        if not self.ending:
            self._all_ended.set()


def sentence_of(unready: Sequence[NodeInfo]) -> str:
    """Return a sentence about nodes that take no lease, with the names of some for each reason."""
    alike: dict[str, list[str]] = {}
    for info in unready:
        alike.setdefault(f"{info.state}{f': {info.reason}' if info.reason else ''}", []).append(info.id)
    shown = [f"{_some(names)} ({why})" for why, names in alike.items()]
    return f" Nodes that take no lease: {_some(shown, 5)}." if shown else ""


def _some(texts: Sequence[str], most: int = 3) -> str:
    return ", ".join(texts[:most]) + (f" and {len(texts) - most} others" if len(texts) > most else "")


def why_unfit(report: NodeReport, *, version: str, wall: float) -> BackendUnavailable | None:
    """Return why a node that answers may take no lease: another version of Cloche, or a clock that differs too much."""
    if version and report.version != version:
        reason = f"the node has Cloche {report.version}, and the coordinator {version}."
        return BackendUnavailable(reason, remedy="Install the same version there.")
    ahead_s = report.clock - wall if report.clock else 0.0
    if abs(ahead_s) > MOST_AHEAD_S:
        reason = f"its clock is {abs(ahead_s):.0f} s {'ahead' if ahead_s > 0 else 'behind'}: credentials have ends."
        return BackendUnavailable(reason, remedy="Set the clocks of all machines, for example by NTP.")
    return None
