"""The label that marks a provider's sandbox as created by Cloche, and the test whether its owner is dead."""

from __future__ import annotations

from ..garbage_collection import is_dead, owner

LABEL = "cloche-owner"  # its value is `garbage_collection.owner()`


def is_left(value: str) -> bool:
    """Return whether the process named by a label is certainly dead.

    True only for a process of this host's current boot.

    Hosts made from one image can share a machine-id (or lack one) and an account. A different boot id can therefore be
    another host, whose processes are not visible here. Sandboxes left by a host before it rebooted end with their
    lifetime.
    """
    return value.split(":")[:2] == owner().split(":")[:2] and is_dead(value)
