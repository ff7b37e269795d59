"""Processes that are reached without their output, found by pid and tag, and that end with their output."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from cloche.init import wire
from cloche.init.control import MOST_UNREAD
from tests.harness.init import Client, serving_init


@pytest.fixture
def client() -> Iterator[Client]:
    """Be a client of an init."""
    with serving_init() as found:
        yield found


def alone(client: Client, line: str, **order: object) -> int:
    """Start a line of shell that ends with its output; return its channel."""
    channel = client.open("start", argv=["sh", "-c", line], streams=[1], alone=True, **order)
    client.event(channel, "started")
    return channel


def test_a_process_is_reached_while_another_channel_reads_it(client: Client) -> None:
    """By its tag or pid: what is written comes with what its own channel writes, and is granted once it is read."""
    reader = client.open("start", argv=["cat"], streams=[0, 1, 2], tag="one")
    started = client.event(reader, "started")
    for key in ({"tag": "one"}, {"pid": started["pid"]}, {"id": started["id"]}):
        channel = client.open("control", **key)
        assert client.event(channel, "started")["has_input"] is True
        client.link.sendall(wire.data_frame(channel, wire.STDIN, b"word\n"))
        kind, body = client.receive(channel)
        assert (kind, wire.read_grant(body)) == (wire.WINDOW, (wire.STDIN, 5))
        assert client.read(reader, 5) == b"word\n"
        client.send(wire.CLOSE, channel)
    channel = client.open("control", tag="one")
    client.event(channel, "started")
    client.send(wire.END, channel, bytes((wire.STDIN,)))
    assert client.event(reader, "exit")["status"] == 0


def test_of_several_with_a_tag_the_last_that_runs_is_meant(client: Client) -> None:
    """An ended one is found where none runs, by attaching alone."""
    for words in (["sleep", "1000"], ["sleep", "1000"], ["true"]):
        channel = client.open("start", argv=words, streams=[1, 2], tag="same", is_kept=True)
        last = client.event(channel, "started")
        if words == ["true"]:
            client.event(channel, "exit")
    control = client.open("control", tag="same")
    assert client.event(control, "started")["id"] == "2"
    assert client.closed(client.open("control", pid=last["pid"]))["kind"] == "not_found"
    assert client.event(client.open("attach", pid=last["pid"]), "started")["id"] == "3"


def test_input_that_is_not_read_is_bounded_over_all_channels(client: Client) -> None:
    """Whoever writes more to a process that does not read is told so; the process and the link go on."""
    reader = client.start("sleep", "1000")
    for _ in range(MOST_UNREAD // wire.WINDOW_BYTES + 1):
        channel = client.open("control", id="1")
        client.event(channel, "started")
        for _ in range(wire.WINDOW_BYTES // wire.MOST_DATA):
            client.link.sendall(wire.data_frame(channel, wire.STDIN, bytes(wire.MOST_DATA)))
    assert client.closed(channel)["kind"] == "full"
    assert client.is_quiet(reader)


@pytest.mark.parametrize("streams", [[1, 2], [0, 1, 2]])
def test_what_has_no_input_any_more_says_so(client: Client, streams: list[int]) -> None:
    """Before something is written, or when it is."""
    reader = client.open("start", argv=["sh", "-c", "exec 0<&-; echo ready; sleep 1000"], streams=streams)
    client.event(reader, "started")
    assert client.read(reader, 6) == b"ready\n"
    channels = [client.open("control", id="1") for _ in range(2)]
    assert client.event(channels[0], "started")["has_input"] is (0 in streams)
    client.event(channels[1], "started")
    for channel in channels:  # the first write finds out
        client.link.sendall(wire.data_frame(channel, wire.STDIN, b"x"))
    assert client.closed(channels[1])["kind"] == "closed"


def test_a_process_that_is_alone_ends_with_its_output(client: Client) -> None:
    """What it has left behind may still write; and its time-out kills it alone."""
    channel = alone(client, "(sleep 0.3; echo late) & echo now")
    assert client.read(channel, 9) == b"now\nlate\n"
    assert client.event(channel, "exit")["status"] == 0
    channel = alone(client, "sleep 1000 & printf %9s $!; sleep 1000", timeout_s=0.3)
    pid = int(client.read(channel, 9))
    assert client.event(channel, "exit")["cause"] == "timeout"
    os.kill(pid, 9)  # it lives


def test_a_signal_ends_what_waits_for_output(client: Client) -> None:
    """SIGKILL to a process that has ended but for its output."""
    channel = alone(client, "sleep 1000 & echo now")
    assert client.read(channel, 4) == b"now\n"
    control = client.open("control", id="1")
    client.event(control, "started")
    client.link.sendall(wire.json_frame(wire.ASK, control, do="signal", number=9))
    assert client.event(channel, "exit")["status"] in (0, 9)
