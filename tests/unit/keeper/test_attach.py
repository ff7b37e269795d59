"""What is said of a sandbox that is kept, from who opened it to who attaches."""

from __future__ import annotations

import json

from cloche.core.enforcement import Enforcement, Level
from cloche.core.limits import Limits
from cloche.core.policy import Policy
from cloche.keeper.attach import as_entry, read_entry


def test_who_attaches_has_the_policy_that_it_was_opened_with() -> None:
    """As values of the same types, which other decisions are keyed by."""
    policy = Policy(network="open", network_deny=("bad.example",), network_ports=(5432,), require_level=Level.JAIL)
    entry = {**as_entry("local", policy, Limits()), "enforcement": Enforcement(level=Level.JAIL).as_dict()}
    assert read_entry("x", json.loads(json.dumps(entry))).policy == policy
