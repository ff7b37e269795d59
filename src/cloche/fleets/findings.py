"""What there is of a fleet, as `cloche doctor` shows it: nothing is started for it."""

from __future__ import annotations

import platform

from cloche.core.fleet import FleetStatus
from cloche.core.record import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetFindings:
    """What there is of a fleet: the cluster's address, versions, nodes, and what is wrong with a remedy.

    `version` is that of Ray here, or of the API server; empty where there is none.
    """

    engine: str
    address: str = ""
    version: str = ""
    python: str = platform.python_version()
    status: FleetStatus | None = None
    problem: str = ""
    remedy: str = ""
