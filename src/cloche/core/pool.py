"""The pure plan of a pool of warm sandboxes: what to open and what to close. No I/O, no clock."""

from __future__ import annotations

from dataclasses import dataclass

from .units import MIB

SLOT_BYTES = 8 * MIB  # what a finished jail that waits may add, with some room …
LOADED_SLOT_BYTES = 32 * MIB  # … and where large modules are preloaded, which each jail has used once for itself
MEMORY_SHARE = 8  # of what is free, at most this part
IDLE_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Describe a pool at one moment. Sizes are in bytes, times in seconds.

    `idle` and `busy` count slots; `peak` is how many were busy at once of late; `least` is how many shall be ready
    whatever comes, `most` how many there may be, `slot_bytes` what one may add.
    """

    idle: int
    busy: int
    peak: int
    least: int
    most: int
    free_memory_bytes: int
    longest_idle_s: float = 0.0
    slot_bytes: int = SLOT_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """Say how many slots to open, and how many of the idle ones to close."""

    open: int = 0
    close: int = 0


def plan(demand: Demand) -> Moves:
    """Keep as many slots as were busy at once of late, at least `least`, never more than memory allows."""
    affordable = demand.free_memory_bytes // (MEMORY_SHARE * demand.slot_bytes)
    most = max(0, min(demand.most, affordable + demand.busy))
    wanted = min(most, max(demand.least, demand.peak))
    there = demand.idle + demand.busy
    if there < wanted:
        return Moves(open=wanted - there)
    surplus = min(demand.idle, there - wanted)
    if there > most or demand.longest_idle_s > IDLE_S:
        return Moves(close=surplus)
    return Moves()
