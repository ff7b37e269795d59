"""Ids of leases, which say what a lease takes and whose it is: a coordinator that starts again learns it from nodes.

`ls_RANDOM_CPUS_MIB_KEY`: thousandths of processors, MiB of memory, and a hash of the key. A credential signs the id.
"""

from __future__ import annotations

import hashlib
import re
import secrets

from cloche.core.errors import InvalidRequest
from cloche.core.fleet import LEAST_TTL_S, LeaseSpec

from .decisions import Sublet
from .placing import ResourceSize

MIB = 1 << 20
MOST_TTL_S, MOST_WAIT_S = 3_600.0, 86_400.0  # a node refuses the id of a released lease for an hour
_ID = re.compile(r"ls_[0-9a-f]{20}_([0-9]{1,9})_([0-9]{1,9})_([0-9a-f]{16})")


def check_request(spec: LeaseSpec, ttl_s: float) -> None:
    """Raise InvalidRequest for amounts or times that no lease can have."""
    if not LEAST_TTL_S <= ttl_s <= MOST_TTL_S:
        raise InvalidRequest(f"ttl_s of a lease must be {LEAST_TTL_S:g} to {MOST_TTL_S:g}, not {ttl_s!r}")
    if not 0 < spec.cpus < 1e6 or not 0 < spec.memory_bytes < 1 << 50:
        raise InvalidRequest(
            f"a lease needs processors and memory above 0, not {spec.cpus!r} and {spec.memory_bytes!r}"
        )
    if not 0 <= spec.wait_s <= MOST_WAIT_S:
        raise InvalidRequest(f"wait_s must be 0 to {MOST_WAIT_S:g}, not {spec.wait_s!r}")


def key_tag(key: str) -> str:
    """Return the hash of a key, by which leases are counted."""
    return hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()[:16]


def size_of(cpus: float, memory_bytes: int) -> ResourceSize:
    """Return the size of a lease: at least a thousandth of a processor, and whole MiB."""
    size = ResourceSize.of(cpus, memory_bytes)
    return ResourceSize(max(size.cpus_m, 1), max(-(-size.memory // MIB), 1) * MIB)


def new_lease_id(size: ResourceSize, tag: str) -> str:
    """Return a new id."""
    return f"ls_{secrets.token_hex(10)}_{size.cpus_m}_{size.memory // MIB}_{tag}"


def sublet_of(lease: str, node: str) -> Sublet | None:
    """Return what an id says; None for one that is not of this kind."""
    match = _ID.fullmatch(lease)
    if match is None:
        return None
    size = ResourceSize(int(match[1]), int(match[2]) * MIB)
    return Sublet(id=lease, key=match[3], node=node, size=size)
