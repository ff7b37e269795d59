"""Attempts to reach what the network's policy does not allow: each is first shown to arrive where there is no policy.

The rows of a policy run in one sandbox (tests/harness/escape/egress.py), in a world where every address has a server.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from cloche.core.network import NetworkRules
from tests.escape import egress_addresses, egress_names, egress_packets
from tests.escape.egress_addresses import KINDS
from tests.harness.escape.egress import Batch, Came, Row, run_inside, run_outside
from tests.harness.world import (
    METADATA,
    NAMES,
    OWN,
    OWN_PRIVATE,
    PRIVATE,
    PUBLIC,
    PUBLIC_TOO,
    RESOLVER,
    World,
    open_world,
)

pytestmark = pytest.mark.both_users

ALLOW = (
    "good.example",
    "*.wild.example",
    "wild.example:5432",
    "db.example:5432@10.0.0.0/8",
    "*.kinds.example",
    "own10.example:80@10.0.0.0/8",
    "shared10.example:80@0.0.0.0/0",
    "turns10.example:80@10.0.0.0/8",
    "turns.example",
    "mixed.example",
    "alias.example",
    "listener.example:444",
    "10.1.2.4:8080",
    f"{OWN}:8080",
)
DENY = ("*.denied.wild.example", "203.0.113.0/24", "151.101.0.0/16")
TABLE: dict[str, list[list[str]]] = {
    **NAMES,
    **{f"{kind}.kinds.example": [addresses] for kind, addresses in KINDS.items()},
    "own10.example": [[OWN_PRIVATE]],
    "shared10.example": [[METADATA]],
    "turns.example": [[PUBLIC], [METADATA]],
    "turns10.example": [[PRIVATE], [METADATA]],
    "mixed.example": [[PUBLIC, METADATA]],
    "alias.example": [["=metadata.kinds.example"]],
    "listener.example": [[PUBLIC]],
    "*.example": [[PUBLIC]],
}
ALLOWLIST: dict[str, Any] = {
    "network": "allowlist", "network_allow": ALLOW, "network_deny": DENY,
    "level": "jail", "timeout": 60, "pids": 400, "memory": "1g",
}  # fmt: skip
OPEN: dict[str, Any] = {**ALLOWLIST, "network": "open", "network_allow": ()}

ROWS = (*egress_names.ROWS, *egress_addresses.ROWS, *egress_packets.ROWS)
ALSO_OPEN = tuple(row for row in ROWS if row.also_open)
# What the policies are for: without it, nothing that is refused would say anything.
ALLOWED = (
    Row(name="plain HTTP", code='return get("good.example", T)', at=(PUBLIC,)),
    Row(name="TLS", code='return tls("good.example", T)', at=(PUBLIC,)),
    Row(name="a name deep below a wildcard", code='return tls("a.b.wild.example", T)', at=(PUBLIC_TOO,)),
    Row(name="a name in capitals", code='return get("GOOD.Example", T)', at=(PUBLIC,)),
    Row(
        name="two requests on a connection",
        code="""
        with connect("good.example", 80) as connection:
            connection.sendall(b"GET / HTTP/1.1\\r\\nHost: good.example\\r\\n\\r\\n")
            connection.recv(4096)
            return say(connection, f"GET /{T} HTTP/1.1\\r\\nHost: good.example:80\\r\\n\\r\\n".encode())
        """,
        at=(PUBLIC,),
    ),
)
ONLY_LISTED = (
    Row(name="a private address that a range covers", code='return http("db.example", T, 5432)', at=(PRIVATE,)),
    Row(name="a private address that is listed", code='return get("10.1.2.4", T, 8080)', at=("10.1.2.4",)),
    Row(
        name="the apex beside a wildcard, by its own rule",
        code='return http("wild.example", T, 5432)',
        at=(PUBLIC_TOO,),
    ),
)
ONLY_OPEN = (
    Row(name="any name", code='return get("third.example", T)', at=(PUBLIC,)),
    Row(name="a public address", code='return get("8.8.8.8", T)', at=("8.8.8.8",)),
    Row(name="a public address by TLS", code='return tls("8.8.8.8", T)', at=("8.8.8.8",)),
)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Open a world whose names lead everywhere."""
    with open_world(TABLE) as world:
        yield world


@pytest.fixture(scope="module")
def outside(world: World) -> Mapping[str, Came]:
    """Run all rows where there is no policy."""
    return run_outside(world, ROWS)


@pytest.fixture(scope="module")
def listed(world: World) -> Batch:
    """Run all rows in a sandbox that has a list."""
    return run_inside(world, [*ALLOWED, *ONLY_LISTED, *ROWS], ALLOWLIST)


@pytest.fixture(scope="module")
def opened(world: World) -> Batch:
    """Run those rows in an open one that are refused there, too."""
    return run_inside(world, [*ALLOWED, *ONLY_OPEN, *ALSO_OPEN], OPEN)


def assert_refused(row: Row, outside: Mapping[str, Came], batch: Batch) -> None:
    """Fail unless a row succeeded outside, and did not in a sandbox."""
    assert outside[row.name].succeeded, f"it shows nothing: {outside[row.name]}"
    came = batch.came[row.name]
    assert not came.crashed, came.crashed
    assert not came.succeeded, came


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_what_is_not_listed_is_not_reached(row: Row, outside: Mapping[str, Came], listed: Batch) -> None:
    """An attempt that arrives without a policy does not with a list."""
    assert_refused(row, outside, listed)


@pytest.mark.parametrize("row", ALSO_OPEN, ids=lambda row: row.name)
def test_what_is_never_open_is_not_reached(row: Row, outside: Mapping[str, Came], opened: Batch) -> None:
    """Where any public host may be reached, what is none is not, and nothing under another name."""
    assert_refused(row, outside, opened)


@pytest.mark.parametrize("row", [*ALLOWED, *ONLY_LISTED], ids=lambda row: row.name)
def test_what_is_listed_is_reached(row: Row, listed: Batch) -> None:
    """What a rule allows arrives where its name leads."""
    assert listed.came[row.name].arrived, listed.came[row.name]


@pytest.mark.parametrize("row", [*ALLOWED, *ONLY_OPEN], ids=lambda row: row.name)
def test_what_is_public_is_reached_where_it_is_open(row: Row, opened: Batch) -> None:
    """Public hosts are reached, by name and by address."""
    assert opened.came[row.name].arrived, opened.came[row.name]


# Where each batch may lead: the host's resolver, and what is allowed.
WEB = {("tcp", address, port) for address in (PUBLIC, PUBLIC_TOO) for port in (80, 443)}
RESOLVED = {("udp", RESOLVER, 53)}
LISTED_ENDPOINTS = {
    *RESOLVED,
    *WEB,
    ("tcp", PRIVATE, 5432),
    ("tcp", PRIVATE, 80),
    ("tcp", PUBLIC_TOO, 5432),
    ("tcp", "10.1.2.4", 8080),
}
OPEN_ENDPOINTS = {*RESOLVED, *WEB, ("tcp", "8.8.8.8", 80), ("tcp", "8.8.8.8", 443)}


def test_nothing_else_left(listed: Batch, opened: Batch) -> None:
    """Of all packets that left the host, none was for another address, port or protocol than those allowed."""
    assert listed.seen.endpoints <= LISTED_ENDPOINTS
    assert opened.seen.endpoints <= OPEN_ENDPOINTS


def test_only_allowed_names_were_asked_for(listed: Batch) -> None:
    """A question goes to the host's resolver when a connection comes to a name that is allowed, and so is that name."""
    rules = NetworkRules.parse(mode="allowlist", allow=ALLOW, deny=DENY)
    assert [name for name in listed.seen.names if not rules.knows(name)] == []


def test_what_was_refused_is_told(listed: Batch) -> None:
    """Refusals count, and the rows of a result name host, port and reason."""
    refused = {(row["host"], row["port"]) for row in listed.run["network"] if not row["is_allowed"]}
    assert {(METADATA, 80), ("metadata.kinds.example", 80), ("good.example", 80), ("good.example", 443)} <= refused
    assert listed.run["hits"]["network"] >= len(refused)
    assert all(row["why"] for row in listed.run["network"] if not row["is_allowed"])
