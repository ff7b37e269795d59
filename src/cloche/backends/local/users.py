"""The ids of a live sandbox with several users: a block of this host's, claimed for it alone."""

from __future__ import annotations

import errno

from cloche.core.errors import BackendUnavailable
from cloche.jail.messages import Spec
from cloche.jail.user_namespaces import Claim, claim_outside_id

from ..host import Host
from .plan import has_range

# Outside ids of sandboxes with several users: each has a block of them, claimed by its number. Root's lie above those
# of sandboxes with one user, and below 2^31; an ordinary user's are the upper half of the range.
BLOCKS, FIRST_BLOCK, BLOCK_IDS, IDS = 1000, 2_000_100_000, 70_000, 65_537
FEWER_IDS = 1_024  # per sandbox, in an ordinary user's range: of the usual 65,536 ids, 32 sandboxes
LOCKS_OF_BLOCKS = 1 << 40  # offset in the file of locks, far beyond those of single ids


def check_range(host: Host) -> None:
    """Raise BackendUnavailable if this host has no ids for several users of a sandbox."""
    if not has_range(host):
        raise BackendUnavailable(
            "users: this host has no range of ids to give.",
            remedy="Add a line for this user to /etc/subuid and to /etc/subgid (16,384 ids or more), and install "
            "newuidmap and newgidmap; or leave users off.",
        )


def claim_block(spec: Spec, host: Host) -> Claim:
    """Claim ids for all users of a sandbox, and name them in its spec. Raises BackendUnavailable without a free one."""
    if host.ids is None or host.owns_ids:
        first, size, count, used = FIRST_BLOCK, BLOCK_IDS, BLOCKS, IDS
    else:
        first, size, used = host.ids.first + host.ids.count // 2, FEWER_IDS, FEWER_IDS
        count = (host.ids.count - host.ids.count // 2) // FEWER_IDS
    try:
        claim = claim_outside_id(LOCKS_OF_BLOCKS, count, spec.ids[2])
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        remedy = f"End one, or give this user more ids in /etc/subuid and /etc/subgid: {2 * size:,} for each sandbox."
        raise BackendUnavailable(f"users: {count} sandboxes have all ids of this host.", remedy=remedy) from error
    start = first + (claim.outside_id - LOCKS_OF_BLOCKS) * size
    spec.users, spec.outside = (start, used), (start, 1)
    return claim
