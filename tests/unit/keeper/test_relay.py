"""A keeper between an init that is a socket here and clients: who gets which frame, and what a bad client can do."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some

from cloche.init import wire
from cloche.keeper import plain_json, process, relay
from cloche.keeper.process import Keeper

Frame = tuple[int, int, bytes]
VALUES = some.recursive(
    some.none() | some.booleans() | some.integers() | some.floats(allow_nan=False, allow_infinity=False) | some.text(),
    lambda inner: some.lists(inner, max_size=3) | some.dictionaries(some.text(), inner, max_size=3),
    max_leaves=10,
)


class End:
    """One end of a connection to the keeper."""

    def __init__(self, link: socket.socket) -> None:
        self.link, self.frames = link, wire.FrameBuffer()
        link.setblocking(False)

    def send(self, *frames: bytes) -> None:
        """Send frames."""
        self.link.send(b"".join(frames))

    def take(self) -> list[Frame] | None:
        """Return the frames that have come, None where the connection is closed."""
        found: list[Frame] = []
        while True:
            try:
                data = self.link.recv(1 << 20)
            except BlockingIOError:
                return found
            except ConnectionError:
                return None
            if not data:
                return None
            found += self.frames.feed(data)


class Scene:
    """A keeper that is driven by hand, its init, and clients."""

    def __init__(self, folder: Path, **terms: float | None) -> None:
        ours, theirs = socket.socketpair()
        self.listening = socket.socket(socket.AF_UNIX)
        self.path = str(folder / "x.sock")
        self.listening.bind(self.path)
        self.listening.listen(100)
        self.listening.setblocking(False)
        self.init = End(ours)
        self.ends: list[End] = []
        fds = {
            "init": theirs.detach(), "listening": self.listening.detach(),
            "folder": os.open(folder, os.O_RDONLY), "lock": os.open(os.devnull, os.O_RDONLY),
        }  # fmt: skip
        order = {"name": "x", "keep_s": 60.0, "lifetime_s": 3600.0, "idle_s": None, **terms, "said": {"boot": "b"}}
        self.keeper = Keeper(order, fds, wire, plain_json)
        self.relay = self.keeper.relay
        self.init.send(wire.json_frame(wire.HELLO, 0, version=wire.VERSION, inside="i"))
        self.pump()

    def pump(self) -> None:
        """Let the keeper do all that there is to do."""
        for _ in range(1000):
            ready = self.relay.poll.poll(0)
            if not ready or self.relay.ended:
                return
            for fd, events in ready:
                if fd in self.relay.handlers:
                    self.relay.handlers[fd](events)
        raise AssertionError("the keeper does not come to rest")

    def client(self, *, is_visit: bool = False) -> End:
        """Connect one, which has greeted."""
        one = self.stranger()
        one.send(wire.json_frame(wire.HELLO, 0, version=wire.VERSION, is_visit=is_visit))
        self.pump()
        return one

    def stranger(self) -> End:
        """Connect one, which says nothing."""
        link = socket.socket(socket.AF_UNIX)
        link.connect(self.path)
        self.ends.append(End(link))
        self.pump()
        return self.ends[-1]

    def heard(self) -> list[Frame]:
        """Return what init has heard of clients."""
        found: list[Frame] = []
        while frames := self.init.take():
            found += frames
            self.pump()
        return [frame for frame in found if frame[1] >> 16]

    def close(self) -> None:
        """Close all."""
        if self.keeper.fds["lock"] >= 0:
            self.keeper.end()
        for end in (self.init, *self.ends):
            end.link.close()


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    """Give a keeper with its init."""
    one = Scene(tmp_path)
    yield one
    one.close()


def open_frame(channel: int, **order: object) -> bytes:
    """Return the first frame of an operation."""
    return wire.json_frame(wire.OPEN, channel, **order)


def test_a_client_hears_who_answers_and_what_the_sandbox_says_of_itself(scene: Scene) -> None:
    """The greeting is the sandbox's, with the keeper's beside."""
    ((kind, channel, body),) = scene.client().take() or ()
    assert (kind, channel) == (wire.HELLO, 0)
    assert json.loads(body) == {"version": wire.VERSION, "inside": "i", "keeper": {"name": "x", "boot": "b"}}


def test_channels_of_clients_do_not_mix_and_end_with_them(scene: Scene) -> None:
    """Two use one number; each gets its own answers, and who goes leaves nothing open."""
    first, second = scene.client(), scene.client()
    for one in (first, second):
        one.take()
        one.send(open_frame(7, op="start"), wire.data_frame(7, 0, b"in"))
    first.send(open_frame(9, op="start"))
    scene.pump()
    heard = scene.heard()
    channels = [channel for kind, channel, _ in heard if kind == wire.OPEN]
    assert sorted(channel & 0xFFFF for channel in channels) == [7, 7, 9]
    (also_of_first,) = (channel for channel in channels if channel & 0xFFFF == 9)
    of_first, of_second = sorted(set(channels) - {also_of_first})
    assert of_first >> 16 == also_of_first >> 16 != of_second >> 16
    scene.init.send(wire.data_frame(of_second, 1, b"out"), wire.json_frame(wire.CLOSE, also_of_first))
    scene.pump()
    assert second.take() == [(wire.DATA, 7, b"\1out")]
    assert first.take() == [(wire.CLOSE, 9, b"{}")]
    first.link.close()
    scene.pump()
    assert scene.heard() == [(wire.CLOSE, of_first, b"")]
    scene.init.send(wire.data_frame(of_first, 1, b"late"))
    third = scene.client()
    third.take()
    third.send(open_frame(7, op="start"))
    scene.pump()
    assert third.take() == []  # whose number is none that was used before


BAD = {
    "no greeting": [open_frame(1, op="ports")],
    "another version": [wire.json_frame(wire.HELLO, 0, version=99)],
    "channel 0": [open_frame(0, op="ports")],
    "a channel beyond": [open_frame(1 << 16, op="ports")],
    "a channel in use": [open_frame(1, op="start"), open_frame(1, op="start")],
    "an order that is none": [wire.frame(wire.OPEN, 1, b'{"op":"start"')],
    "a deep one": [wire.frame(wire.OPEN, 1, b"[" * 100_000)],
    "no object": [wire.frame(wire.OPEN, 1, b"[]")],
    "a question that is none": [open_frame(1, op="start"), wire.frame(wire.ASK, 1, b"{")],
    "a signal without a number": [open_frame(1, op="start"), wire.json_frame(wire.ASK, 1, do="signal")],
    "an end of nothing": [open_frame(1, op="start"), wire.frame(wire.END, 1)],
    "a window that is none": [open_frame(1, op="start"), wire.frame(wire.WINDOW, 1, b"\0")],
    "an event": [open_frame(1, op="start"), wire.frame(wire.EVENT, 1, b"{}")],
    "an empty frame": [open_frame(1, op="start"), wire.frame(wire.DATA, 1)],
    "data exceeds the window": [open_frame(1, op="start"), *[wire.data_frame(1, 0, bytes(wire.MOST_DATA))] * 5],
    "a kind that is none": [wire.HEADER.pack(0, 1, 99)],
    "a frame that is too long": [wire.HEADER.pack(wire.MOST_BODY + 1, 1, wire.OPEN)],
}


@pytest.mark.parametrize("what", BAD)
def test_who_breaks_the_protocol_loses_the_connection_and_nobody_else(scene: Scene, what: str) -> None:
    """Init, which would end everything for it, never hears of it."""
    good, bad = scene.client(), scene.stranger()
    good.take()
    hello = [] if what in ("no greeting", "another version") else [wire.json_frame(wire.HELLO, 0, version=wire.VERSION)]
    for frame in [*hello, *BAD[what]]:
        bad.send(frame)
        scene.pump()
    assert bad.take() is None
    heard = scene.heard()
    assert {kind for kind, *_ in heard} <= {wire.OPEN, wire.DATA, wire.CLOSE}
    assert sum(kind == wire.OPEN for kind, *_ in heard) == sum(kind == wire.CLOSE for kind, *_ in heard)
    assert sum(len(body) for kind, _, body in heard if kind == wire.DATA) <= wire.WINDOW_BYTES + 4
    good.send(open_frame(1, op="ports"))
    scene.pump()
    assert [kind for kind, *_ in scene.heard()] == [wire.OPEN]


def test_who_does_not_read_is_dropped_and_holds_nobody_up(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for one client is bounded; another one reads meanwhile."""
    monkeypatch.setattr(relay, "MOST_UNSENT", 4 * wire.MOST_DATA)
    deaf, other = scene.client(), scene.client()
    other.take()
    for one in (deaf, other):
        one.send(open_frame(1, op="start"))
    scene.pump()
    of_deaf, of_other = (channel for kind, channel, _ in scene.heard() if kind == wire.OPEN)
    for _ in range(30):
        scene.init.send(wire.data_frame(of_deaf, 1, bytes(wire.MOST_DATA)))
        scene.init.send(wire.data_frame(of_other, 1, b"x"))
        scene.pump()
        assert other.take() == [(wire.DATA, 1, b"\1x")]
    assert [frame for frame in scene.heard() if frame[0] == wire.CLOSE] == [(wire.CLOSE, of_deaf, b"")]
    assert len(scene.relay.clients) == 1


def test_clients_wait_while_init_does_not_read(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for init is bounded, and comes in order when it reads again."""
    monkeypatch.setattr(relay, "MOST_FOR_INIT", 1 << 16)
    client = scene.client()
    sent = 0
    while True:
        try:
            client.send(open_frame(sent + 1, op="start", filler="x" * 20_000))
        except BlockingIOError:
            break
        sent += 1
        scene.pump()
    assert scene.relay.init.unsent_bytes <= (1 << 16) + 2 * relay.CHUNK
    heard: list[Frame] = []
    while len(heard) < sent:
        heard += scene.heard()
        scene.pump()
    assert [channel & 0xFFFF for _, channel, _ in heard] == list(range(1, sent + 1))


def test_clients_are_counted(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """One more than there may be is not let in; a place that is given back is one for the next."""
    monkeypatch.setattr(relay, "MOST_CLIENTS", 2)
    first, _second = scene.client(), scene.client()
    assert scene.stranger().take() is None
    first.link.close()
    scene.pump()
    assert scene.client().take()


def test_times_count_from_the_last_client_and_are_told_to_init(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a client `keep` counts, with one the lifetime alone; a visit changes nothing; init hears each change."""
    moment = 1000.0
    for module in (relay, process):
        monkeypatch.setattr(module, "now", lambda: moment)
    scene = Scene(tmp_path, keep_s=60.0, lifetime_s=3600.0, idle_s=5.0)

    def told() -> list[float]:
        orders = [json.loads(body) for kind, _, body in scene.init.take() or () if kind == wire.OPEN]
        assert all(order["op"] == "limits" and order["idle_s"] == 5.0 for order in orders)
        return [order["ends_in_s"] for order in orders]

    assert (scene.relay.deadline, told()) == (1060.0, [60.0])
    moment = 1010.0
    client = scene.client()
    assert (scene.relay.deadline, told()) == (4600.0, [3590.0])
    moment = 2000.0
    client.link.close()
    scene.pump()
    assert (scene.relay.deadline, told()) == (2060.0, [60.0])
    moment = 2030.0
    visit = scene.client(is_visit=True)
    visit.send(open_frame(1, op="keep", keep_s=7200))
    scene.pump()
    assert (scene.relay.deadline, told()) == (4600.0, [2570.0])
    visit.send(open_frame(2, op="info"), open_frame(3, op="keep", keep_s=-1))
    scene.pump()
    *_, info, _, refused = visit.take() or ()
    said = json.loads(info[2])
    assert (said["clients"], said["without_client_s"], said["left_s"], said["keep_s"]) == (0, 30.0, 2570.0, 7200.0)
    assert b"keep_s is not a duration" in refused[2]
    moment = 4600.0
    scene.relay._check_time()
    assert scene.relay.ended == "its lifetime is over"
    scene.close()


def test_without_its_owner_it_ends_unless_somebody_is_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each word of the owner counts from anew; a client's presence, too; while the machine sleeps nothing counts."""
    moment = asleep = 0.0
    for module in (relay, process):
        monkeypatch.setattr(module, "now", lambda: moment + asleep)
        monkeypatch.setattr(module, "awake", lambda: moment)
    scene = Scene(tmp_path, keep_s=36_000.0, lifetime_s=36_000.0, owner_s=60.0)
    client = scene.client()

    def is_over() -> bool:
        scene.relay._check_time()
        return bool(scene.relay.ended)

    moment = 100.0
    assert (scene.relay.deserted_at, is_over()) == (None, False)
    client.link.close()
    scene.pump()
    moment, asleep = 159.0, 10_000.0
    assert not is_over()
    assert scene.relay._timeout_ms() == pytest.approx(1001)
    visit = scene.client(is_visit=True)
    visit.send(open_frame(1, op="own", owner_s=30))
    scene.pump()
    moment = 188.0
    assert not is_over()
    visit.send(open_frame(2, op="own", owner_s="x"))
    scene.pump()
    assert b"owner_s is not a duration" in (visit.take() or ())[-1][2]
    moment = 189.0
    assert is_over()
    assert scene.relay.ended == "its service has not come back"
    scene.close()


def asked(scene: Scene) -> list[tuple[int, dict[str, object]]]:
    """Return the keeper's own orders to init, by channel, but those of its clocks."""
    scene.pump()
    orders = [(channel, json.loads(body)) for kind, channel, body in scene.init.take() or () if kind == wire.OPEN]
    return [(channel, order) for channel, order in orders if order["op"] != "limits"]


def test_pausing_is_done_by_init_whose_answer_is_passed_on(scene: Scene) -> None:
    """The keeper believes that it is paused when init says so, not before."""
    client = scene.client()
    client.take()
    client.send(open_frame(1, op="pause"), open_frame(2, op="resume"))
    (first, pause), (second, _) = asked(scene)
    assert pause == {"op": "pause"}
    assert not scene.keeper.is_paused
    scene.init.send(wire.json_frame(wire.CLOSE, first))
    scene.pump()
    assert scene.keeper.is_paused
    scene.init.send(wire.json_frame(wire.CLOSE, second, error={"kind": "os", "message": "m"}))
    scene.pump()
    assert scene.keeper.is_paused
    _, closed, refused = client.take() or ()
    assert (closed, refused) == ((wire.CLOSE, 1, b"{}"), (wire.CLOSE, 2, b'{"error":{"kind":"os","message":"m"}}'))


def test_the_life_stands_still_in_a_pause_and_what_happens_at_its_end_stays_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is paused at its end, each time; a time that is set counts from then on; only an extension never shortens."""
    moment = 1000.0
    for module in (relay, process):
        monkeypatch.setattr(module, "now", lambda: moment)
    scene = Scene(tmp_path, lifetime_s=100.0, at_end="pause")
    client, number = scene.client(), 0
    client.send(open_frame(500, op="watch"))

    def do(op: str, **order: object) -> dict[str, object]:
        nonlocal number
        number += 1
        client.take()
        client.send(open_frame(number, op=op, **order))
        for channel, _ in asked(scene):
            scene.init.send(wire.json_frame(wire.CLOSE, channel))
        scene.pump()
        events = [json.loads(body) for kind, _, body in client.take() or () if kind == wire.EVENT]
        return next(event for event in events if event["event"] == "info")

    def end() -> list[dict[str, object]]:
        client.take()
        scene.relay._check_time()
        orders = asked(scene)
        for channel, _ in orders:
            scene.init.send(wire.json_frame(wire.CLOSE, channel))
        scene.pump()
        assert b"life" in (client.take() or ())[-1][2]  # those that watch hear of it
        return [order for _, order in orders]

    assert do("lifetime", left_s=50, only_extends=True)["left_s"] == 100
    assert do("lifetime", left_s=50)["left_s"] == 50
    moment += 20
    assert do("pause")["left_s"] == 30
    moment += 10_000
    assert (scene.relay.deadline, scene.relay.ended, do("info")["left_s"]) == (None, "", 30)
    assert do("resume")["left_s"] == 30
    moment += 30
    assert end() == [{"op": "pause"}]
    assert do("info")["left_s"] == 0
    answer = do("lifetime", left_s=60, only_extends=True, resumes=True)
    assert (answer["was_paused"], answer["is_paused"], answer["left_s"]) == (True, False, 60)
    moment += 60
    assert end() == [{"op": "pause"}]
    assert do("resume")["left_s"] == 60  # the whole time again
    assert do("lifetime", at_end="pause-files", left_s=0)["left_s"] == 0
    assert end() == [{"op": "pause", "memory": False}]
    assert do("info")["has_memory"] is False
    scene.close()


def test_a_sandbox_that_is_resumed_while_its_time_ends_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pause at the end is sent before the resume, whose time counts: none of a later pause is on its way."""
    moment = 1000.0
    for module in (relay, process):
        monkeypatch.setattr(module, "now", lambda: moment)
    scene = Scene(tmp_path, lifetime_s=100.0, at_end="pause")
    client = scene.client()
    moment += 100
    scene.relay._check_time()
    client.send(open_frame(1, op="lifetime", left_s=60, only_extends=True, resumes=True))
    orders = asked(scene)
    assert [order["op"] for _, order in orders] == ["pause", "resume"]
    for channel, _ in orders:
        scene.init.send(wire.json_frame(wire.CLOSE, channel))
    scene.pump()
    scene.relay._check_time()
    assert (scene.keeper.is_paused, scene.relay.deadline, asked(scene)) == (False, moment + 60, [])
    scene.close()


@pytest.mark.parametrize("end", ["gone", "broken"])
def test_it_is_over_when_init_is_gone_or_breaks_the_protocol(scene: Scene, end: str) -> None:
    """Then clients lose their connections, and the socket is gone."""
    client = scene.client()
    client.take()
    if end == "gone":
        scene.init.link.shutdown(socket.SHUT_RDWR)
    else:
        scene.init.send(wire.HEADER.pack(0, 1, 99))
    scene.pump()
    assert scene.relay.ended
    scene.keeper.end()
    assert client.take() is None
    assert not os.path.exists(scene.path)


@given(VALUES)
def test_its_json_is_json(value: object) -> None:
    """What it writes, and what others write, is read as what it was."""
    codec = plain_json
    assert json.loads(codec.write({"value": value})) == {"value": value}
    assert codec.read(json.dumps({"value": value}, ensure_ascii=False).encode("utf-8", "surrogatepass")) == {
        "value": value
    }
