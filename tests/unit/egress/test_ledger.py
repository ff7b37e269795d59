"""What was carried is told whatever else a guest tries: rows are bounded, and refusals take no room from the others."""

from __future__ import annotations

from cloche.egress.ledger import MORE_HOSTS, MOST_ROWS, Ledger
from cloche.egress.windows import Window


def test_refusals_do_not_hide_what_was_carried() -> None:
    """A guest that asks for many names first, of those it may reach, too, has all of its bytes counted."""
    ledger, window = Ledger(), Window(0)
    for _ in range(2):
        for number in range(2 * MOST_ROWS):
            ledger.row(f"{number}.refused.example", 53, "not in the list", is_allowed=False)
        for number in range(2 * MOST_ROWS):
            ledger.row(f"{number}.allowed.example", 443).sent += 1
        ledger.row("last.allowed.example", 443).sent += 1000
        report = ledger.take(set())
        assert len(report["rows"]) <= 2 * MOST_ROWS + 1
        window.add(report)
    traffic = window.traffic(is_lost=False)
    carried = [row for row in traffic.rows if row["is_allowed"]]
    assert sum(row["sent"] for row in carried) == 2 * (2 * MOST_ROWS + 1000)
    assert sum(row["connections"] for row in carried) == 2 * (2 * MOST_ROWS + 1)
    assert [row["sent"] for row in carried if row["host"] == MORE_HOSTS] == [2 * (MOST_ROWS + 1000)]
    assert traffic.refused == 2 * 2 * MOST_ROWS


def test_a_connection_that_goes_on_is_counted_in_the_row_of_all_others() -> None:
    """Its row is there in the next report, too."""
    ledger = Ledger()
    for number in range(MOST_ROWS):
        ledger.row(f"{number}.allowed.example", 443)
    row = ledger.row("last.allowed.example", 443)
    ledger.take({row})
    row.sent += 7
    assert [one["sent"] for one in ledger.take({row})["rows"]] == [7]
