"""The network at level confined: a guest holds no socket of it but what is connected to the egress process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.world import World, open_world

SOURCE = (Path(__file__).parents[1] / "harness/programs/confined_network.py").read_text()
# What root alone may do, or not every kernel has, and what only a stand-in might do; the rest is done by anybody.
NOT_BY_ALL = {"packet", "raw", "vsock", "alg", "mptcp", "io_uring", "path, as TCP", "path, as UDP"}


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Open a world, in whose host the attempts are made."""
    with open_world() as world:
        yield world


def told(world: World, call: str, user: str) -> Any:
    """Run one function of the program on the world's host."""
    return world.run(f"{SOURCE}\nprint(json.dumps({call}))", user=user)


@pytest.mark.root
@pytest.mark.parametrize("user", ["root", "ordinary"])
def test_no_other_way_out_is_taken(world: World, user: str) -> None:
    """By no call, address, family or option is another peer reached; without a sandbox each is done."""
    came = told(world, "attempts()", user)
    undone = {name for name, what in came["outside"].items() if what != "done"}
    assert undone <= NOT_BY_ALL, came
    assert came["seen_outside"] >= 15
    assert [name for name, what in came["inside"].items() if what == "done"] == []
    assert came["seen_inside"] == 0


@pytest.mark.root
@pytest.mark.parametrize(
    ("user", "count"),
    [
        ("ordinary", 200),
        pytest.param("root", 2000, marks=pytest.mark.soak),
        pytest.param("ordinary", 2000, marks=pytest.mark.soak),
    ],
)
def test_an_address_that_changes_reaches_nobody_else(world: World, user: str, count: int) -> None:
    """What is decided on is what is connected to: with calls that go on, a victim is reached, here never."""
    came = told(world, f"race({count})", user)
    assert came["gone_on"] > 0, came
    assert came["connected"] > 0, came
    assert came["inside"] == 0, came
