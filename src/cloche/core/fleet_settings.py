"""What an operator sets for a fleet; an account at an engine holds it, so it is apart from the seam in `fleet.py`."""

from __future__ import annotations

from .record import dataclass

TTL_S = 60.0  # of a lease
WAIT_S = 300.0  # in the queue


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    """What an operator sets for a fleet.

    `address` is the engine's, empty for the one that its environment names. `share` is the part of each node's
    processors and memory that leases may use; `reserve_cpu` takes it from the engine's own tasks. A lease lasts `ttl_s`
    unless it is renewed. Without a lease or a caller for `idle_s` the fleet ends. `quota` is the number of leases that
    one key may hold and wait for; None is without a limit. A request waits for `wait_s` in the queue. `scaling_s` is
    the time in which the engine's autoscaler brings a machine, 0 without an autoscaler. Each node's server listens on
    `port`, or on a free one if it is 0. A coordinator keeps the settings with which it was started.
    The lease of a live sandbox has room for so many `sandboxes` of its size: for itself, for each session with
    checkpoints, and for each fork.
    """

    address: str = ""
    share: float = 0.5
    reserve_cpu: bool = False
    ttl_s: float = TTL_S
    idle_s: float = 600.0
    quota: int | None = None
    wait_s: float = WAIT_S
    port: int = 0
    scaling_s: float = 0.0
    sandboxes: int = 1
