"""All that a coordinator needs of an engine and of a node's server.

An engine knows machines, starts `cloche node` on each of them, and reserves capacity there in *blocks*. It knows no
leases and no queue. `LocalEngine` (`local.py`) is the smallest one. A link carries the verbs of role `coordinator` to
one node; the layer that has the wire's client makes links, and gives the coordinator a function for it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from cloche.core.errors import BackendUnavailable
from cloche.core.record import dataclass
from cloche.core.remote import HiddenText


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineNode:
    """Describe a machine of an engine.

    `cpus` and `memory_bytes` are what leases may use of it, already the share of the fleet. `address` and `certificate`
    are empty until its `cloche node` serves; `boot` differs after each start of that server. `reason` says why it
    serves no leases, with the remedy (no Cloche there, another version). `hosts` are its addresses, which no guest may
    reach; an engine adds those of its own services. `is_coming` is true for a machine that starts by itself: requests
    may wait for it, and no block is taken there yet. One that `is_leaving` serves the leases that it has, and no other.
    """

    id: str
    cpus: float
    memory_bytes: int
    address: str = ""
    certificate: str = ""
    boot: str = ""
    hosts: tuple[str, ...] = ()
    reason: str = ""
    is_coming: bool = False
    is_leaving: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservedBlock:
    """Name capacity that an engine reserved on one node; leases are sublet from it."""

    id: str
    node: str
    cpus: float
    memory_bytes: int


class BlockTaken(BackendUnavailable):
    """Report that another coordinator was faster, which is nothing to tell an operator."""


class FleetEngine(Protocol):
    """Say where there are machines, and reserve blocks on them. The coordinator calls it from one event loop.

    `has_blocks` is False for an engine that reserves nothing: then the whole share of each node is used, and
    `take_block`, `give_back` and `blocks` are never called. `scaling_s` is the time in which an autoscaler brings a
    machine that was asked for, and 0 without an autoscaler.
    """

    name: str
    has_blocks: bool
    scaling_s: float

    async def start(self, public_key: str) -> None:
        """Connect, and begin to start `cloche node` with this key on each present and later machine.

        A server that runs already with this key is kept. Raises BackendUnavailable.
        """
        ...

    async def nodes(self) -> Sequence[EngineNode]:
        """Return the machines that are up, by their id. It is called each second, and bounded in time by the caller.

        A machine that is missing once is lost.
        """
        ...

    async def blocks(self) -> Sequence[ReservedBlock]:
        """Return the blocks of this fleet, also those that an earlier coordinator took."""
        ...

    async def take_block(self, *, node: str, cpus: float, memory_bytes: int) -> ReservedBlock:
        """Reserve capacity on a node, and return it once it is there. A caller that is cancelled holds nothing.

        For an empty `node` the engine takes it on any machine with room, or on one that its autoscaler brings; the
        block that is returned is pinned to that machine (exchange an unpinned reservation for a pinned one). Raises
        BackendUnavailable; BlockTaken where another coordinator was faster.
        """
        ...

    async def give_back(self, block: str) -> None:
        """End a reservation, by the block's id. Without effect for one that is over."""
        ...

    async def stop(self) -> None:
        """End all blocks and node servers of this fleet."""
        ...

    async def close(self) -> None:
        """Disconnect; blocks and node servers stay."""
        ...


@runtime_checkable
class TellingEngine(FleetEngine, Protocol):
    """An engine that is told of changes, and so knows more than a list of machines.

    `changed` is set when `nodes` would have another answer; who waits for it clears it.
    """

    changed: asyncio.Event

    async def why_lost(self, node: str) -> str:
        """Return why a machine was lost, once that is known; empty where the engine does not know."""
        ...

    def remedy(self, reasons: str) -> str:
        """Return what to do about the reasons why machines take no lease; empty where the engine does not know."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """What a node's server says about itself.

    `digests` names the packages and images that it has, those used last first. `digests_tag` differs when they do.
    `clock` is its time in seconds since 1970, 0 if it does not say.
    """

    version: str
    boot: str = ""
    level: str = ""
    python: str = ""
    leases: int = 0
    digests: tuple[str, ...] = ()
    digests_tag: str = ""
    is_draining: bool = False
    clock: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepAnswer:
    """What a node answers to a heartbeat: the tags of the digests that it has, and of the addresses that it denies."""

    digests_tag: str = ""
    denied_tag: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeniedAddresses:
    """What no guest may reach: addresses of machines, and a tag that differs when they do."""

    addresses: tuple[str, ...] = ()
    tag: str = ""


def denied_tag(addresses: Sequence[str]) -> str:
    """Return a tag that differs when these addresses do."""
    return hashlib.sha256(json.dumps(list(addresses)).encode()).hexdigest()[:16]


class NodeLink(Protocol):
    """Carry the verbs of role `coordinator` to one node's server.

    A link connects at its first call, and again after a lost connection. Its methods raise ClocheError or OSError, and
    a caller that is cancelled gets its turn back at once.
    """

    async def status(self) -> NodeReport:
        """Return what the node reports."""
        ...

    async def keep(self, denied: Sequence[str] | None, ttl_s: float, leases: Mapping[str, float]) -> KeepAnswer:
        """Say that the coordinator lives, for `ttl_s`, and replace the addresses that no guest may reach.

        They stay as they are for None. `leases` has the later ends of renewed leases, in seconds since 1970; a node
        ignores those it does not hold.
        """
        ...

    async def leases(self) -> Mapping[str, float]:
        """Return the ends of the leases that the node holds, in seconds since 1970, by their id."""
        ...

    async def release(self, lease: str, until: float) -> None:
        """End a lease and all that belongs to it. Without effect for one that is over.

        `until` is when the last credential for it is over, in seconds since 1970; 0 where that is not known.
        """
        ...

    async def drain(self, *, undo: bool = False) -> None:
        """Accept no further lease; with `undo` accept them again."""
        ...

    async def close(self) -> None:
        """Disconnect."""
        ...


# Makes the link to a node. The second argument returns a fresh credential of role `coordinator` for that node.
LinkTo = Callable[[EngineNode, Callable[[], HiddenText]], NodeLink]
