"""The state of a fleet for `cloche doctor`, which starts nothing."""

from __future__ import annotations

import platform

from cloche.core.fleet import FleetStatus
from cloche.core.record import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetFindings:
    """The state of a fleet: the cluster's address, versions, nodes, and a problem with its remedy.

    `version` is that of Ray here, of the dashboard's Ray, or of the API server; empty if unknown. `network_policy` says
    whether the network of pods enforces the fleet's policy, as far as it could be tried.
    """

    engine: str
    address: str = ""
    version: str = ""
    python: str = platform.python_version()
    status: FleetStatus | None = None
    problem: str = ""
    remedy: str = ""
    network_policy: str = ""
