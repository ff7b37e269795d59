"""The seam between an engine, which decides where sandboxes run, and the wire, which does all that they can do.

A *node* is a machine that runs sandboxes for others; its server is `cloche node`. A *lease* is the right to a place on
a node until a time. A *fleet* is the nodes of one engine (Ray, Kubernetes, this machine). An engine implements `Fleet`
for those who run code and `FleetOperator` for those who operate it, and nothing else.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Literal, Protocol

from .fleet_settings import TTL_S as TTL_S  # noqa: PLC0414 - its users know the seam alone
from .fleet_settings import WAIT_S as WAIT_S  # noqa: PLC0414
from .fleet_settings import FleetSettings as FleetSettings  # noqa: PLC0414
from .record import dataclass, field
from .remote import HiddenText

NodeState = Literal["starting", "ready", "draining", "lost"]
EventKind = Literal["node-up", "node-lost", "node-drained", "lease", "release", "expired", "refused"]
LEAST_TTL_S = 5.0  # of a lease; its holder renews it at a third of its time
MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseSpec:
    """Say what a lease needs of a node.

    `prefers` has digests of packages, images or workspaces: a node that has them already is taken first. `wait_s`
    bounds the time in the queue.
    """

    cpus: float = 1.0
    memory_bytes: int = 512 * MIB
    prefers: tuple[str, ...] = ()
    wait_s: float = WAIT_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Name a place on a node: its server's address, the SHA-256 of its certificate, and the right to use it.

    `credential` travels in each call to the node, which checks it without asking anybody. `until` is in seconds since
    1970.
    """

    id: str
    engine: str
    node: str
    address: str
    certificate: str
    credential: HiddenText = field(repr=False)
    until: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeInfo:
    """Describe a node of a fleet. `reason` says why it takes no lease, and what to do."""

    id: str
    address: str = ""
    state: NodeState = "starting"
    cpus: float = 0.0
    memory_bytes: int = 0
    leases: int = 0
    version: str = ""
    level: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetEvent:
    """Tell what happened to a node or a lease; `at` is in seconds since 1970."""

    kind: EventKind
    at: float
    node: str = ""
    lease: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetStatus:
    """Describe a fleet: its nodes, the leases that are held, and those who wait, with the number of refusals."""

    engine: str
    nodes: tuple[NodeInfo, ...] = ()
    leases: int = 0
    waiting: int = 0
    granted: int = 0
    refused: int = 0
    version: str = ""


class Fleet(Protocol):
    """Grant places on nodes. All methods may be called from any task of one event loop."""

    engine: str

    async def lease(
        self, spec: LeaseSpec, *, ttl_s: float = TTL_S, key: str = "", labels: Mapping[str, str] | None = None
    ) -> Lease:
        """Wait for a place, in order of arrival for each `key` and fairly between keys.

        Raises BackendUnavailable where no node can ever meet the specification, where a quota is used up, and after
        `spec.wait_s`. A caller that is cancelled holds nothing.
        """
        ...

    async def renew(self, lease: Lease, *, ttl_s: float = TTL_S) -> Lease:
        """Return the same lease with a later end. Raises NodeLost for one that is over."""
        ...

    async def release(self, lease: Lease) -> None:
        """Give a place back; everything of the lease ends at its node. Without effect for one that is over."""
        ...

    async def nodes(self) -> Sequence[NodeInfo]:
        """Return the nodes."""
        ...

    def watch(self) -> AsyncIterator[FleetEvent]:
        """Yield events from now on. A reader that falls behind misses the oldest."""
        ...

    async def status(self) -> FleetStatus:
        """Return nodes and counts."""
        ...

    async def close(self) -> None:
        """Disconnect from the fleet, which goes on."""
        ...


class FleetOperator(Protocol):
    """Start and end a fleet, and take nodes out of it."""

    async def up(self) -> FleetStatus:
        """Start what is missing, and return the state once a node is ready. Raises BackendUnavailable."""
        ...

    async def drain(self, node: str, *, timeout_s: float | None = None) -> None:
        """Give a node no further lease, and wait until it has none. Raises NotFound, TimeoutError."""
        ...

    async def undrain(self, node: str) -> None:
        """Let a drained node take leases again; whoever waits for its drain is told. Raises NotFound."""
        ...

    async def down(self) -> None:
        """End all leases, node servers and the coordinator."""
        ...
