"""A node that answers its coordinator with too much, with nothing, or with other things than it should."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from cloche.backends.cloche import connections, links
from cloche.backends.cloche.links import WireLink
from cloche.backends.cloche.wire import MOST_EVENT_PARTS, MOST_FRAME_CHARS, LinkLost
from cloche.core.errors import InvalidRequest, NodeLost, OutcomeUnknown
from cloche.core.remote import SERVICE_WIRE, HiddenText
from cloche.fleets.engine import EngineNode
from cloche.init import wire
from cloche.serving.certificate import make_certificate

BOUNDS = {"frame": wire.MOST_DATA, "window": wire.WINDOW_BYTES, "calls": 64, "streamed": 1 << 20}
Answer = Callable[[ServerConnection, int], Awaitable[None]]


@asynccontextmanager
async def node_that(
    answer: Answer, note: Callable[[dict[str, Any]], object] = lambda _: None
) -> AsyncIterator[WireLink]:
    """Serve a node that answers each call so, and yield a link to it."""

    async def handle(connection: ServerConnection) -> None:
        await connection.send(json.dumps({"hello": {"wire": SERVICE_WIRE, "version": "1", "bounds": BOUNDS}}))
        buffer = wire.FrameBuffer(1 << 20, wire.PONG)
        try:
            async for message in connection:
                for kind, number, body in buffer.feed(message, 512):  # type: ignore[arg-type]
                    if kind == wire.OPEN:
                        note(json.loads(body))
                        await answer(connection, number)
        except ConnectionClosed:
            pass

    certificate = make_certificate("127.0.0.1")
    async with serve(handle, "127.0.0.1", 0, ssl=certificate.context, compression=None) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        node = EngineNode(
            id="n1", cpus=1.0, memory_bytes=1, address=f"https://127.0.0.1:{port}", certificate=certificate.sha256
        )
        link = WireLink(node, lambda: HiddenText("x.y"))
        yield link
        await link.close()


def test_an_answer_that_does_not_end_ends_its_connection() -> None:
    """At two megabytes, of a service's 64; the node gets no further, though it ignores that its call is cancelled."""
    sent = 0

    async def without_end(connection: ServerConnection, number: int) -> None:
        nonlocal sent
        while True:
            await connection.send(wire.frame(wire.DATA, number, bytes([wire.REPORT]) + b" " * wire.MOST_DATA))
            sent += wire.MOST_DATA
            await connection.recv()  # the grant

    async def main() -> None:
        async with node_that(without_end) as link:
            with pytest.raises(OutcomeUnknown):
                await link.keep([], 60.0, {})

    asyncio.run(asyncio.wait_for(main(), 60))
    assert links.MOST_JSON - wire.MOST_DATA <= sent <= links.MOST_JSON + wire.WINDOW_BYTES + wire.MOST_DATA


def test_an_answer_that_is_too_large_ends_its_call_alone() -> None:
    """A guest may have written it: the calls of other leases go on over the connection."""

    async def main() -> None:
        async with node_that(honest) as link:
            other = await connections.begin(link._account, "x", {})
            with pytest.raises(OutcomeUnknown, match="too large"):
                await link.status()
            assert (await link.keep([], 60.0, {})).denied_tag == "a"
            assert not other.closed.done()

    async def honest(connection: ServerConnection, number: int) -> None:
        if number == 2:
            for _ in range(links.MOST_JSON // wire.MOST_DATA + 1):
                await connection.send(wire.frame(wire.DATA, number, bytes([wire.REPORT]) + b" " * wire.MOST_DATA))
            await connection.send(wire.frame(wire.END, number, bytes([wire.REPORT])))
            await connection.send(wire.json_frame(wire.CLOSE, number, resultOn=wire.REPORT))
        elif number == 3:
            await connection.send(wire.json_frame(wire.CLOSE, number, result={"deniedTag": "a"}))

    asyncio.run(asyncio.wait_for(main(), 60))


def test_calls_that_are_never_answered_end_with_their_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often the coordinator tries again, there is no more than one connection, and none in the end."""
    monkeypatch.setattr(links, "ANSWER_S", 0.05)

    async def never(_: ServerConnection, __: int) -> None:
        pass

    async def main() -> None:
        async with node_that(never) as link:
            for _ in range(20):
                with pytest.raises(OutcomeUnknown):
                    await link.status()
                kept = connections._of_loops[asyncio.get_running_loop()]._wires
                assert [len(wires) for wires in kept.values()] == [1]
                await link.close()
                assert kept == {}

    asyncio.run(asyncio.wait_for(main(), 60))


def test_answers_of_other_types_are_none() -> None:
    """A report with texts, numbers and lists in the wrong places has nothing in them."""
    report: dict[str, Any] = {
        "version": 7, "boot": ["x"], "leases": -1, "isDraining": "yes", "clock": "now", "digestsTag": {},
        "digests": ["a", 5, "x" * 300, None], "deniedTag": 3,
    }  # fmt: skip

    async def odd(connection: ServerConnection, number: int) -> None:
        await connection.send(wire.json_frame(wire.CLOSE, number, result=report))

    async def main() -> None:
        async with node_that(odd) as link:
            told = await link.status()
            assert (told.version, told.boot, told.leases, told.is_draining) == ("", "", 0, False)
            assert (told.clock, told.digests, told.digests_tag) == (0.0, ("a",), "")
            assert (await link.keep([], 60.0, {})).denied_tag == ""
            assert await link.leases() == {}

    asyncio.run(asyncio.wait_for(main(), 60))


def test_what_the_event_loop_reads_is_small() -> None:
    """Events of a call that takes none are not read; an end with much JSON ends the connection, as does an event."""
    parts = [0] * (MOST_EVENT_PARTS + 1)

    async def told(connection: ServerConnection, number: int) -> None:
        await connection.send(wire.frame(wire.EVENT, number, b"{"))
        await connection.send(wire.json_frame(wire.CLOSE, number, result={"deniedTag": "a"}))

    async def large_end(connection: ServerConnection, number: int) -> None:
        await connection.send(wire.json_frame(wire.CLOSE, number, result={"deniedTag": "a" * MOST_FRAME_CHARS}))

    async def large_event(connection: ServerConnection, number: int) -> None:
        body = json.dumps({"parts": parts}, separators=(",", ":")).encode()
        for start in range(0, len(body), wire.MOST_DATA):
            piece = bytes([wire.REPORT]) + body[start : start + wire.MOST_DATA]
            await connection.send(wire.frame(wire.DATA, number, piece))
        await connection.send(wire.frame(wire.END, number, bytes([wire.REPORT])))
        await connection.send(wire.json_frame(wire.EVENT, number, event="x", dataOn=wire.REPORT))

    async def main() -> None:
        async with node_that(told) as link:
            assert (await link.keep([], 60.0, {})).denied_tag == "a"
        async with node_that(large_end) as link:
            with pytest.raises(OutcomeUnknown, match="more JSON"):
                await link.keep([], 60.0, {})
        async with node_that(large_event) as link:
            taken = list[object]()
            call = await connections.begin(link._account, "x", {}, on_event=lambda *event: taken.append(event))
            with pytest.raises(LinkLost):
                await call.result(30)
            assert taken == []

    asyncio.run(asyncio.wait_for(main(), 60))


def test_fields_of_many_values_come_in_pieces() -> None:
    """A service refuses those of one call; in the frame that opens it they would end the connection."""
    opened = list[dict[str, Any]]()

    async def note(connection: ServerConnection, number: int) -> None:
        await connection.send(wire.json_frame(wire.CLOSE, number, result={}))

    async def main() -> None:
        async with node_that(note, opened.append) as link:
            for count in (10, 30_000):
                await connections.ask(link._account, "x", {"argv": ["a"] * count})

    asyncio.run(asyncio.wait_for(main(), 60))
    assert [fields.get("fieldsOn") for fields in opened] == [None, wire.REPORT]


def test_half_a_surrogate_pair_ends_no_connection_and_a_close_is_named() -> None:
    """A model's code may have one: its call is refused here, and calls of other leases on the connection go on."""

    async def held(connection: ServerConnection, number: int) -> None:
        if number == 2:
            await connection.close(1008, "no more")

    async def main() -> None:
        async with node_that(held) as link:
            call = await connections.begin(link._account, "x", {})
            for text in ("\ud800", "\udcff"):
                with pytest.raises(InvalidRequest, match="not JSON in UTF-8"):
                    await connections.begin(link._account, "x", {"code": text})
            assert not call.closed.done()
            with pytest.raises(NodeLost, match="closed the connection with 1008 no more"):
                await connections.ask(link._account, "x", {"code": "\U0001f600"})

    asyncio.run(asyncio.wait_for(main(), 60))
