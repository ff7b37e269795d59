"""The label by which a sandbox at a provider is known to be ours, and when it is sure that nobody has it any more."""

from __future__ import annotations

from ..garbage_collection import is_dead, owner

LABEL = "cloche-owner"  # its value is `garbage_collection.owner()`


def is_left(value: str) -> bool:
    """Tell whether the process that a label at a provider names is surely dead: one of this host since it booted.

    Hosts that were made from one image may have one machine-id, or none, and use one account: there another boot is
    another host, whose processes cannot be seen from here. What a host left before it booted ends with its lifetime.
    """
    return value.split(":")[:2] == owner().split(":")[:2] and is_dead(value)
