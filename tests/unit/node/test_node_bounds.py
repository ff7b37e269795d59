"""A node's leases and the bounds on strangers, without a node."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest

from cloche.core.errors import BackendUnavailable
from cloche.node import PACKAGES, require_extra
from cloche.node.admission import MOST_OF_ADDRESS, MOST_OF_HOLDER, MOST_WRONG, WRONG_S, Admission
from cloche.node.leases import ENDED, RELEASED, REMEMBER_S, LeaseTable


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
    table.note("c", 1.0)
    table.note("d", 1.0)
    assert table.is_full


def test_strangers_have_a_part_of_all_connections() -> None:
    """An address has half of them; a lease's count as the lease's, which has few, and give room back at their end."""
    admission = Admission(most=100, most_strangers=64)
    for _ in range(MOST_OF_ADDRESS):
        assert admission.admits("a", 0.0)
        admission.opened("a")
    assert (admission.admits("a", 0.0), admission.admits("b", 0.0)) == (False, True)
    for _ in range(MOST_OF_HOLDER):
        assert admission.has_room("lease")
        admission.held("a", None, "lease")
        admission.opened("a")
    assert (admission.has_room("lease"), admission.has_room("other")) == (False, True)
    admission.held("a", "lease", "other")
    assert admission.has_room("lease")
    for holder in ["other", *["lease"] * (MOST_OF_HOLDER - 1), None, None]:
        admission.closed("a", holder)
    assert (admission.open, admission.strangers) == (MOST_OF_ADDRESS - 2, MOST_OF_ADDRESS - 2)
    for number in range(64 - admission.strangers):
        admission.opened(f"c{number}")
    assert not admission.admits("b", 0.0)


def test_an_address_with_many_wrong_credentials_waits() -> None:
    """Only that address, and only for a while."""
    admission = Admission()
    for _ in range(MOST_WRONG):
        assert admission.admits("a", 1.0)
        admission.note_wrong("a", 1.0)
    assert (admission.admits("a", 2.0), admission.admits("b", 2.0)) == (False, True)
    assert admission.admits("a", 1.0 + WRONG_S)


def test_the_packages_of_a_nodes_server_come_with_its_extra_and_with_the_engines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray starts the server where only the extra `ray` was installed; a missing package is named with the remedy."""
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    for extra in ("node", "ray"):
        names = {line.partition(">=")[0] for line in project["optional-dependencies"][extra]}
        assert names.issuperset(PACKAGES), extra
    monkeypatch.setitem(sys.modules, "pydantic", None)
    with pytest.raises(BackendUnavailable, match=r'missing packages: pydantic\..*pip install cloche\[node\]"'):
        require_extra()
