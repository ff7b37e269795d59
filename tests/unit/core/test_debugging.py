"""Debug namespaces: each has one logger, and what holds is who switched what."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloche.core.debugging import NAMESPACES, DebugState, check_namespaces, read_namespaces, switch
from cloche.core.errors import InvalidRequest

SOURCE = Path(__file__).parents[3] / "src" / "cloche"
# Loggers that are no namespace: they warn, or belong to a front end.
OTHERS = {"backends", "cli", "config", "inspect", "loop", "mcp", "sessions", "tools"}


@pytest.fixture
def _switched_off() -> Iterator[None]:
    yield
    switch(())


def test_every_logger_is_a_namespace_or_known_to_be_none() -> None:
    """So that nothing is logged which no name switches, and no name switches nothing."""
    named = {
        name for file in SOURCE.rglob("*.py") for name in re.findall(r'getLogger\("cloche\.(\w+)"\)', file.read_text())
    }
    assert named == {*NAMESPACES, *OTHERS}


@pytest.mark.usefixtures("_switched_off")
def test_switching_leaves_the_others_and_their_handlers_alone() -> None:
    """A namespace that is on logs at level debug; off again, it is as whoever configured logging has it."""
    jail, warm = logging.getLogger("cloche.jail"), logging.getLogger("cloche.warm")
    for on, levels in (({"jail"}, (logging.DEBUG, logging.NOTSET)), ({"warm"}, (logging.NOTSET, logging.DEBUG))):
        switch(on)
        assert (jail.level, warm.level) == levels
    assert (jail.handlers, warm.handlers, jail.propagate) == ([], [], True)


def test_names_are_read_from_a_list_and_a_star_stands_for_all() -> None:
    """What is no namespace is an error that names it, escaped, with those that are."""
    assert read_namespaces(" jail, warm,,") == {"jail", "warm"}
    assert read_namespaces("*") == set(NAMESPACES)
    assert read_namespaces("") == set()
    with pytest.raises(
        InvalidRequest, match=r"CLOCHE_DEBUG: \\x1b\[31m is not a debug namespace; use \* or some of jail, "
    ):
        check_namespaces(["jail", "\x1b[31m"], where="CLOCHE_DEBUG")


@pytest.mark.parametrize(
    ("state", "on", "source"),
    [
        (DebugState(), set(), "default"),
        (DebugState(stored={"jail": False}), set(), "stored"),
        (DebugState(stored={"jail": True, "warm": False}), {"jail"}, "stored"),
        (DebugState(environment=frozenset({"warm"}), stored={"warm": False}), {"warm"}, "environment, stored"),
        (
            DebugState(argument=frozenset({"jail"}), environment=frozenset({"warm"})), {"jail", "warm"},
            "argument, environment",
        ),
    ],
)  # fmt: skip
def test_what_is_on_and_who_said_so(state: DebugState, on: set[str], source: str) -> None:
    """Arguments and environment switch on and nothing off; the database does both."""
    told = state.as_dict()
    assert {name for name, is_on in told["namespaces"].items() if is_on} == on == state.on
    assert (told["enabled"], told["source"]) == (bool(on), source)
