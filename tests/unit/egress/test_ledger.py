"""What was carried is told whatever else a guest tries: rows are bounded, and refusals take no room from the others."""

from __future__ import annotations

from cloche.egress.ledger import KEPT_ROWS, MORE_HOSTS, MOST_ROWS, Ledger, Sum
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


def test_of_what_is_kept_for_who_comes_later_the_last_rows_are() -> None:
    """A ledger that nobody asks hands its rows on before it is full; the oldest lose the row of their own."""
    history = Sum(KEPT_ROWS)
    ledger = Ledger(lambda: history.add(ledger.take(set())))
    for is_allowed in (True, False):
        for number in range(KEPT_ROWS + 50):
            ledger.row("0.example", 443, is_allowed=is_allowed)
            ledger.row(f"{number}.example", 443, is_allowed=is_allowed).sent += 1
    history.add(ledger.take(set()))
    for is_allowed in (True, False):
        hosts = {row["host"] for row in history.rows if row["is_allowed"] == is_allowed} - {MORE_HOSTS}
        assert hosts == {f"{number}.example" for number in (0, *range(51, KEPT_ROWS + 50))}
    assert [row["connections"] for row in history.rows if row["host"] == MORE_HOSTS] == [50]
    assert history.unlisted == 50
