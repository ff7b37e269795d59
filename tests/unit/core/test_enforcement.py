"""Levels of isolation, and what a caller may require."""

from typing import Any

import pytest

from cloche.core.enforcement import Control, Level, parse_requirements
from cloche.core.errors import InvalidRequest


def test_levels_are_ordered() -> None:
    """A stronger level compares higher."""
    assert [str(level) for level in sorted(Level)] == ["none", "process", "confined", "jail", "gvisor", "vm"]


def test_levels_by_name() -> None:
    """A level is found in any case; an unknown one is refused with the known ones."""
    assert Level.parse(" Jail ") is Level.parse(Level.JAIL) is Level.JAIL
    with pytest.raises(InvalidRequest, match="unknown level 'fort'; known levels: none, process"):
        Level.parse("fort")


@pytest.mark.parametrize(
    ("names", "level", "controls"),
    [
        ("jail,memory", Level.JAIL, (Control.MEMORY,)),
        (("network", "network"), None, (Control.NETWORK,)),
        (["jail", "vm"], Level.VM, ()),
        ([Level.GVISOR, Control.CPU], Level.GVISOR, (Control.CPU,)),
        ("", None, ()),
    ],
)
def test_requirements(names: Any, level: Level | None, controls: tuple[Control, ...]) -> None:
    """A requirement is at most one level, the strongest named, and any number of controls."""
    assert parse_requirements(names) == (level, controls)


def test_unknown_requirements_are_named() -> None:
    """A word that is neither is refused with all that are."""
    with pytest.raises(InvalidRequest, match="require: unknown level or control 'memroy'; known: none, process"):
        parse_requirements("memroy")
