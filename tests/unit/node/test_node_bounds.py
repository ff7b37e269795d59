"""A node's leases and the bounds on strangers, without a node."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest

from cloche.core.errors import BackendUnavailable
from cloche.node import PACKAGES, require_extra
from cloche.node.admission import COORDINATOR, MOST_OF_ADDRESS, MOST_WRONG, WRONG_S, Admission
from cloche.node.leases import ENDED, MARGIN_S, RELEASED, REMEMBER_S, LeaseTable


def test_a_lease_ends_at_its_latest_end_and_its_id_stays_refused() -> None:
    """A later end renews it, an earlier one changes nothing; a released id is refused as long as credentials last."""
    table = LeaseTable(most=2)
    table.note("a", 10.0)
    table.note("a", 30.0)
    table.note("a", 20.0)
    assert table.over(29.9) == []
    assert table.over(30.0) == ["a"]
    assert table.end("a", ENDED, 30.0)
    assert (table.has("a"), table.why_over("a")) == (False, ENDED)
    assert not table.end("b", RELEASED, 31.0)  # before its first call
    assert table.why_over("b") == RELEASED
    assert table.over(30.0 + REMEMBER_S) == []
    assert (table.why_over("a"), table.why_over("b")) == (None, RELEASED)
    assert not table.end("b", RELEASED, 31.0, until=90.0)  # as the coordinator knows by now
    table.over(90.0 + MARGIN_S - 1)
    assert table.why_over("b") == RELEASED
    table.over(90.0 + MARGIN_S)
    assert table.why_over("b") is None
    table.note("c", 1.0)
    table.note("d", 1.0)
    assert table.is_full


class Connection:
    """A connection that has come so far."""

    def __init__(self, stage: int = 0):
        self.stage = stage


def test_strangers_hold_no_place_against_others() -> None:
    """Another one takes the place of the one that has come least far: of its address, or of the one with most."""
    admission = Admission(most_strangers=40)
    crowd = [Connection(stage=2) for _ in range(MOST_OF_ADDRESS)]
    crowd[3].stage = crowd[5].stage = 1
    assert [admission.opened("a", stranger) for stranger in crowd] == [None] * MOST_OF_ADDRESS
    assert admission.opened("a", Connection()) is crowd[3]
    assert [admission.opened("b", Connection()) for _ in range(8)] == [None] * 8
    assert admission.strangers == 40
    newest = Connection(stage=1)
    loser = admission.opened("c", newest)
    assert loser is not None
    assert (loser.stage, loser in crowd) == (0, False)
    admission.closed("a", crowd[3], None)  # it has lost its place before
    assert admission.strangers == 40
    admission.held("a", crowd[0], None, "lease", 0.0)
    assert admission.opened("d", Connection()) is None


def test_the_more_connections_there_are_the_fewer_has_a_lease() -> None:
    """So others have some; the coordinator always has; each gives its place back at its end."""
    admission, held = Admission(most=64), list[tuple[str, Connection]]()
    for lease in [f"lease-{number}" for number in range(30)]:
        while admission.has_room(lease):
            held.append((lease, Connection()))
            admission.opened("a", held[-1][1])
            admission.held("a", held[-1][1], None, lease, 0.0)
    leases = [lease for lease, _ in held]
    assert (leases.count("lease-0"), len(held)) == (7, 57)
    assert len(set(leases)) > 20
    assert admission.has_room(COORDINATOR)
    lease, connection = held.pop()
    assert not admission.has_room("other")
    admission.closed("a", connection, lease)
    assert admission.has_room("other")


def test_an_address_with_many_wrong_credentials_waits() -> None:
    """Only that address, for a while, and none that a valid one came from."""
    admission, connection = Admission(), Connection()
    for address in ("a", "b"):
        for _ in range(MOST_WRONG):
            assert admission.admits(address, 1.0)
            admission.note_wrong(address, 1.0)
    admission.opened("b", connection)
    admission.held("b", connection, None, "lease", 1.0)
    assert [admission.admits(address, 2.0) for address in "abc"] == [False, True, True]
    assert admission.admits("a", 1.0 + WRONG_S)


def test_the_packages_of_a_nodes_server_come_with_its_extra_and_with_the_engines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray starts the server where only the extra `ray` was installed; a missing package is named with the remedy."""
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    for extra in ("node", "ray", "kubernetes"):
        names = {line.partition(">=")[0] for line in project["optional-dependencies"][extra]}
        assert names.issuperset(PACKAGES), extra
    monkeypatch.setitem(sys.modules, "pydantic", None)
    with pytest.raises(BackendUnavailable, match=r'missing packages: pydantic\..*pip install cloche\[node\]"'):
        require_extra()
