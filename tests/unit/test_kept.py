"""The session that attempts share is opened anew after one that left it dead, whatever said so."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import cast

from cloche.core.errors import InvalidRequest
from cloche.sync import Session
from tests.harness.escape.cells import LOOK, Kept


class Ended:
    """Stand for a session that ends of what was done to it, just when it is looked at."""

    def __init__(self) -> None:
        self.is_over = False

    def run(self, code: str) -> SimpleNamespace:
        if code == LOOK and self.is_over:
            raise InvalidRequest("this session has ended")
        return SimpleNamespace(ok=True, value="as ever")


def test_a_session_that_ends_while_it_is_looked_at_is_opened_anew() -> None:
    """Else every attempt after it would be asked of a dead session."""
    opened: list[Ended] = []

    @contextmanager
    def open_session() -> Iterator[Session]:
        opened.append(Ended())
        yield cast(Session, opened[-1])

    kept = Kept(open_session)
    kept.session()
    kept.look()
    assert cast(Ended, kept.session()) is opened[0]
    opened[0].is_over = True
    kept.look()
    assert cast(Ended, kept.session()) is opened[1]


def test_a_session_that_looks_other_than_it_did_is_opened_anew() -> None:
    """As one that an attempt has changed, and has not ended."""
    looks = iter(["one", "two", "one"])

    @contextmanager
    def open_session() -> Iterator[Session]:
        yield cast(Session, SimpleNamespace(run=lambda code: SimpleNamespace(ok=True, value=look(code))))

    def look(code: str) -> str:
        return next(looks) if code == LOOK else ""

    kept = Kept(open_session)
    first = kept.session()
    kept.look()
    assert kept.session() is not first
