"""The door: who is heard at it, and what happens to what nobody needs."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator

import pytest

from cloche.jail import slate, wire
from cloche.zygote.door import Door


@pytest.fixture
def door() -> Iterator[Door]:
    """Return a door that is closed in the end."""
    found = Door()
    yield found
    found.close()


def say(door: Door, tag: str, generation: int, **body: object) -> None:
    """Say something from inside; `ready` brings a descriptor along."""
    fds = [os.open("/", os.O_RDONLY)] if tag == "ready" else []
    wire.send(door.other_ends[0], tag, {"generation": generation, "seconds": [0.5], **body}, fds)
    for fd in fds:
        os.close(fd)


def order(door: Door, body: dict[str, object], *fds: int, timeout_s: float = 30.0) -> None:
    """Send the orders of run 7."""
    door.order(body, fds, number=7, timeout_s=timeout_s, rebuilds=True)


def descriptors() -> int:
    """Count what this process has open."""
    return len(os.listdir("/proc/self/fd"))


def test_an_order_reaches_who_waits(door: Door) -> None:
    """An order comes out at the other end, with its descriptors."""
    reading, writing = os.pipe()
    order(door, {"order": {"env": {}}, "steps": []}, writing)
    tag, body, fds = wire.receive(door.other_ends[0])
    told = {"number": 7, "generation": door.generation, "says_farewell": True}
    assert (tag, body) == ("order", {"order": {"env": {}}, "steps": [], **told})
    os.write(fds[0], b"hello")
    assert os.read(reading, 5) == b"hello"
    for fd in (reading, writing, *fds):
        os.close(fd)


def test_a_large_order_comes_whole(door: Door) -> None:
    """What is too large for a message comes in a memory file."""
    body = {"order": {"env": {"LONG": "x" * 3_000_000}}, "steps": []}
    order(door, dict(body))
    told = {"number": 7, "generation": door.generation, "says_farewell": True}
    assert wire.receive(door.other_ends[0]) == ("order", {**body, **told}, [])


def test_an_order_is_on_the_slate_before_it_is_sent(door: Door) -> None:
    """The helper finds there what it must know, as soon as the timer goes off."""
    _, file, timer = door.other_ends
    order(door, {}, timeout_s=0.001)
    state = slate.State(file)
    assert (state.ordered, state.timeout_s, state.rebuilds, state.ended) == (7, 0.001, True, 0)
    assert select.select([timer], [], [], 10) == ([timer], [], [])
    assert door.start_of(7) == 0.0
    slate.note_start(file, 7, 12.5)
    assert (door.start_of(7), door.start_of(8)) == (12.5, 0.0)


def test_a_guest_that_waits_brings_its_workspace(door: Door) -> None:
    """It is known once it said so, and its workspace is handed out once."""
    assert not door.look()
    say(door, "ready", door.generation)
    assert door.look()
    (fd,) = door.take_guest()
    os.close(fd)
    assert not door.has_guest
    assert door.take_guest() == []
    assert door.seconds == [0.5]


def test_what_a_dead_nursery_said_is_dropped(door: Door) -> None:
    """Words with an earlier number count for nothing, and what they brought is closed."""
    old, door.generation = door.generation, door.generation + 2
    before = descriptors()
    say(door, "ready", old)
    say(door, "ended", old, wait_status=0)
    assert [door.hear()[0], door.hear()[0]] == ["", ""]
    assert descriptors() == before


def test_a_later_nursery_is_believed(door: Door) -> None:
    """The caller may hear of it at the door first; from then on nothing earlier counts."""
    number = door.generation
    say(door, "ready", number)
    say(door, "ready", number + 1)
    say(door, "ended", number, wait_status=0)
    before = descriptors()
    assert [door.hear()[0] for _ in range(3)] == ["ready", "ready", ""]
    assert door.generation == number + 1
    assert descriptors() == before + 1  # of two, the first is closed


def test_no_two_doors_share_a_number(door: Door) -> None:
    """What was said at one can never be taken for what is said at a later one."""
    other = Door()
    assert other.generation > door.generation + 1_000_000
    other.close()


def test_who_is_gone_is_noticed(door: Door) -> None:
    """Without another end there is nobody to hear."""
    door.hand_over()
    with pytest.raises(ConnectionResetError):
        door.hear()
    assert not door.look()


def test_everything_is_closed() -> None:
    """A door that is closed leaves no descriptor, a workspace that nobody took included."""
    before = descriptors()
    door = Door()
    say(door, "ready", door.generation)
    assert door.look()
    door.close()
    assert descriptors() == before


def test_nothing_is_waited_for(door: Door) -> None:
    """Looking returns at once."""
    with pytest.raises(BlockingIOError):
        door.hear()
