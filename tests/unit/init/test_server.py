"""Init serves any number of processes: nobody who is slow, gone or malformed costs another, and nothing piles up."""

from __future__ import annotations

import errno
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloche.init import wire
from cloche.init.process import MOST_KEPT_EXITS
from cloche.init.streams import KEPT_BYTES
from tests.harness.init import Client, serving_init

ENDLESS = "while :; do echo 0123456789012345678901234567890123456789; done"


@pytest.fixture
def client() -> Iterator[Client]:
    """Be a client of an init."""
    with serving_init() as found:
        yield found


def lives(pid: int) -> bool:
    """Tell whether a process is there."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_a_process_from_its_start_to_its_end(client: Client) -> None:
    """Its input comes, its streams go out apart, its status and usage are told, and the channel is closed."""
    channel = client.start("sh", "-c", "cat; echo error >&2; exit 3")
    client.link.sendall(wire.data_frame(channel, wire.STDIN, b"input"))
    client.send(wire.END, channel, bytes((wire.STDIN,)))
    found = {wire.STDOUT: b"", wire.STDERR: b""}
    while True:
        kind, body = client.receive(channel)
        if kind == wire.EVENT:
            break
        if kind == wire.DATA:
            found[body[0]] += body[1:]
    ended = wire.read_object(body)
    assert found == {wire.STDOUT: b"input", wire.STDERR: b"error\n"}
    assert (os.waitstatus_to_exitcode(ended["status"]), ended["cause"]) == (3, "")
    assert ended["usage"]["most_kib"] > 0
    assert client.closed(channel) == {}


def test_what_is_given_up_before_it_has_begun_is_not_begun(client: Client) -> None:
    """Such as while init stood still: the next process is the first."""
    given_up = wire.json_frame(wire.OPEN, 1000, op="start", argv=["true"], streams=[0, 1, 2])
    client.link.sendall(given_up + wire.frame(wire.CLOSE, 1000, b""))
    channel = client.open("start", argv=["true"], streams=[0, 1, 2])
    assert client.event(channel, "started")["id"] == "1"


def test_who_grants_nothing_gets_a_window_and_no_more(client: Client) -> None:
    """Its process waits, others do not; what is granted comes, to the byte."""
    channel = client.start("sh", "-c", ENDLESS)
    client.read(channel, wire.WINDOW_BYTES)
    other = client.start("echo", "other")
    assert client.read(other, 6) == b"other\n"
    assert client.is_quiet(channel)
    client.link.sendall(wire.grant_frame(channel, wire.STDOUT, 100))
    assert len(client.read(channel, 100)) == 100
    assert client.is_quiet(channel)


def test_input_is_taken_as_fast_as_it_is_read(client: Client) -> None:
    """A window is taken of what nobody reads yet; as it is read, as much is granted; of who has ended, all is."""
    channel = client.start("sh", "-c", f"read x; head -c {wire.WINDOW_BYTES} | wc -c; exec cat > /dev/null")
    piece = b"x" * (wire.MOST_DATA - 1) + b"\n"
    for _ in range(wire.WINDOW_BYTES // wire.MOST_DATA):
        client.link.sendall(wire.data_frame(channel, wire.STDIN, piece))
    granted = 0
    while granted < wire.WINDOW_BYTES:
        kind, body = client.receive(channel)
        assert kind == wire.WINDOW
        granted += wire.read_grant(body)[1]
    client.link.sendall(wire.data_frame(channel, wire.STDIN, piece))
    assert int(client.read(channel, 7)) == wire.WINDOW_BYTES


def test_the_end_of_input_on_a_terminal_is_granted_to_nobody(client: Client) -> None:
    """It is a Ctrl-D that init writes: who is granted more than it has sent takes that for a broken protocol."""
    channel = client.start("sh", "-c", "cat; echo end", streams=[], terminal=[24, 80])
    client.link.sendall(wire.data_frame(channel, wire.STDIN, b"line\r"))
    client.send(wire.END, channel, bytes((wire.STDIN,)))
    granted, found = 0, b""
    while b"end" not in found:
        kind, body = client.receive(channel)
        granted += wire.read_grant(body)[1] if kind == wire.WINDOW else 0
        found += body[1:] if kind == wire.DATA else b""
    assert granted == 5


def test_more_than_the_window_ends_the_link(client: Client) -> None:
    """Who sends more than is granted has broken the protocol."""
    channel = client.start("sleep", "1000")
    for _ in range(wire.WINDOW_BYTES // wire.MOST_DATA + 2):  # a pipe holds a piece
        client.link.sendall(wire.data_frame(channel, wire.STDIN, bytes(wire.MOST_DATA)))
    assert client.has_ended()


def test_who_comes_back_finds_the_last_of_what_was_written(client: Client) -> None:
    """A process that is kept goes on without a client; the bytes that were dropped are counted; one client has it."""
    script = f"echo up; read x; head -c {3 * KEPT_BYTES} /dev/zero | tr '\\0' y; echo end"
    channel = client.open("start", argv=["sh", "-c", script], streams=[0, 1, 2], is_kept=True)
    name = client.event(channel, "started")["id"]
    client.read(channel, 3)
    goes_on = wire.grant_frame(channel, wire.STDOUT, 3) + wire.data_frame(channel, wire.STDIN, b"\n")
    client.link.sendall(goes_on + wire.frame(wire.CLOSE, channel))  # at once: who is there at the end is told of it
    while True:
        rows = client.event(client.open("processes"), "processes")["processes"]
        if rows[0]["status"] is not None:
            break
    first = client.open("attach", id=name)
    client.event(first, "started")
    assert client.read(first, KEPT_BYTES)[-5:] == b"yend\n"
    assert client.event(first, "exit")["dropped"] == 2 * KEPT_BYTES + 4
    again = client.start("sleep", "1000", is_kept=True)
    rows = client.event(client.open("processes"), "processes")["processes"]
    second = client.open("attach", id=rows[-1]["id"])
    client.event(second, "started")
    assert client.closed(again)["kind"] == "replaced"
    assert client.closed(client.open("attach", id="nonesuch"))["kind"] == "not_found"
    client.closed(client.open("kill", id=rows[-1]["id"]))


def test_a_process_ends_with_all_that_is_its(client: Client) -> None:
    """By its clock, when its client closes the channel, or when it is asked; the cause is told."""
    for end in ("timeout", "close", "kill", "by id"):
        order = {"timeout_s": 0.5} if end == "timeout" else {}
        channel = client.open("start", argv=["sh", "-c", "sleep 1000 & echo $!; wait"], streams=[0, 1, 2], **order)
        started = client.event(channel, "started")
        child = int(client.read(channel, 2))
        while client.pending and client.pending[-1][1] == channel:
            child = int(f"{child}{client.pending.pop()[2][1:].decode()}")
        if end == "close":
            client.send(wire.CLOSE, channel)
        elif end == "kill":
            client.ask(channel, do="kill", cause="asked")
        elif end == "by id":
            client.closed(client.open("kill", id=started["id"], cause="asked"))
        if end != "close":
            assert client.event(channel, "exit")["cause"] == ("timeout" if end == "timeout" else "asked")
        while lives(child) or lives(started["pid"]):
            client.event(client.open("processes"), "processes")


def test_what_is_left_behind_delays_nothing(client: Client) -> None:
    """The end is told with all that the pipe held, while another process holds the pipe and goes on writing to it."""
    script = "(while :; do echo; sleep 0.01; done) & echo $! >&2; head -c 50000 /dev/zero"
    channel = client.start("sh", "-c", script)
    found, left = 0, b""
    while True:
        kind, body = client.receive(channel)
        if kind == wire.EVENT:
            break
        found += len(body) - 1 if kind == wire.DATA and body[0] == wire.STDOUT else 0
        left += body[1:] if kind == wire.DATA and body[0] == wire.STDERR else b""
    os.kill(int(left), signal.SIGKILL)
    assert found >= 50000
    assert client.closed(channel) == {}


def test_the_channels_are_bounded(client: Client) -> None:
    """One too many is refused, and the others are served."""
    with socket.create_server(("127.0.0.1", 0), backlog=2 * wire.MOST_CHANNELS) as server:
        port = server.getsockname()[1]
        channels = [client.open("connect", port=port) for _ in range(wire.MOST_CHANNELS)]
        for channel in channels:
            client.event(channel, "connected")
        assert client.closed(client.open("connect", port=port))["kind"] == "too_many"
        client.send(wire.CLOSE, channels[0])
        channel = client.start("echo", "other")
        assert client.read(channel, 6) == b"other\n"


def test_a_connection_that_is_refused_says_so(client: Client) -> None:
    """By which error, whatever the other loopback address comes to; a server that goes away ends it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        channel = client.open("connect", port=port)
        client.event(channel, "connected")
        with server.accept()[0] as accepted:
            client.link.sendall(wire.data_frame(channel, 0, b"ping"))
            assert accepted.recv(9) == b"ping"
            accepted.sendall(b"pong")
            assert client.read(channel, 4) == b"pong"
        client.send(wire.END, channel, b"\0")
        assert client.closed(channel) == {}
    assert client.closed(client.open("connect", port=port)).get("errno") == errno.ECONNREFUSED
    assert client.closed(client.open("nonesuch"))["kind"] == "unknown"


def test_an_order_that_makes_no_sense_is_refused(client: Client) -> None:
    """It costs its own channel; no process is left of it; a time-out of years is one."""
    wrong: list[tuple[str, dict[str, object]]] = [
        ("start", {"argv": ["sleep", "1000"], "streams": "x"}), ("start", {"argv": ["true"], "terminal": 5}),
        ("start", {"argv": ["sleep", "1000"], "timeout_s": "x"}),
        ("start", {"argv": ["sleep", "1000"], "timeout_s": float("nan")}),
        ("connect", {}), ("connect", {"port": 1 << 17}), ("connect", {"port": "x"}),
    ]  # fmt: skip
    for op, order in wrong:
        assert client.closed(client.open(op, **order)).get("kind") in ("unknown", "os"), (op, order)
    channel = client.start("true", timeout_s=1e12)
    assert client.event(channel, "exit")["status"] == 0
    assert client.event(client.open("processes"), "processes")["processes"][:-1] == []
    children = Path(f"/proc/{client.pid}/task/{client.pid}/children").read_text().split()
    assert children == []


@pytest.mark.parametrize(
    "sent",
    [
        wire.frame(wire.CLOSE + 1, 1), wire.HEADER.pack(wire.MOST_BODY + 1, 1, wire.DATA),
        wire.frame(wire.OPEN, 9, b"["), wire.frame(wire.OPEN, 9, b"[]"), wire.frame(wire.OPEN, 0, b"{}"),
        wire.frame(wire.OPEN, 1, b'{"op": "processes"}'), wire.frame(wire.DATA, 1), wire.frame(wire.END, 1),
        wire.frame(wire.WINDOW, 1, b"1"), wire.frame(wire.ASK, 1, b"{"), wire.frame(wire.ASK, 1, b'{"do": "signal"}'),
        wire.frame(wire.ASK, 1, b'{"do": "signal", "number": "x"}'), wire.json_frame(wire.HELLO, 0, version=0),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_malformed_ends_the_link(client: Client, sent: bytes) -> None:
    """And init with it, in order: it is not the end of a Python program with a traceback."""
    client.start("sleep", "1000")
    client.link.sendall(sent)
    assert client.has_ended()


@pytest.mark.parametrize("count", [250, pytest.param(10_000, marks=pytest.mark.soak)])
def test_exits_do_not_pile_up(client: Client, count: int) -> None:
    """What is kept of the ended is bounded: neither memory nor descriptors grow."""

    def run(count: int) -> None:
        for _ in range(0, count, 50):
            for channel in [client.open("start", argv=["nothing"], streams=[0, 1, 2]) for _ in range(50)]:
                assert client.closed(channel) == {}

    def held() -> tuple[int, int]:
        pages = int(Path(f"/proc/{client.pid}/statm").read_text().split()[1])
        return pages * 4096, len(os.listdir(f"/proc/{client.pid}/fd"))

    run(MOST_KEPT_EXITS + 22)
    before = held()
    run(count)
    after = held()
    assert after[0] < before[0] + (1 << 18)  # a page or two more are none
    assert after[1] == before[1]
    rows = client.event(client.open("processes"), "processes")["processes"]
    assert len(rows) == MOST_KEPT_EXITS
    assert client.closed(client.open("attach", id="1"))["kind"] == "not_found"


def test_all_are_asked_to_end_and_nothing_starts_from_then_on(client: Client) -> None:
    """Whoever does not end has until the time is up, which is answered then; who stood still goes on, and ends."""
    stubborn = client.start("sh", "-c", "trap '' TERM; echo up; exec sleep 1000")
    orderly = client.start("sh", "-c", "trap 'echo bye; exit 7' TERM; echo up; while :; do :; done", streams=[0, 1])
    for channel in (stubborn, orderly):
        assert client.read(channel, 3) == b"up\n"
    assert client.closed(client.open("pause")) == {}
    assert client.closed(client.open("stop", grace_s=1)) == {}
    assert client.read(orderly, 4) == b"bye\n"
    assert client.event(orderly, "exit")["status"] == 7 << 8
    assert client.closed(client.open("start", argv=["true"], streams=[0, 1, 2]))["kind"] == "stopping"
    client.ask(stubborn, do="kill", cause="")
    client.event(stubborn, "exit")
    assert client.closed(client.open("stop", grace_s=1000)) == {}
