"""Values that are fetched anew: when, by whom, and what is told."""

from __future__ import annotations

import asyncio
import os
import socket

from cloche.core.loops import until_readable
from cloche.egress.renewal import Renewals
from cloche.jail import messages

ENDED = "cannot be run again, since the process that would do it has ended"
VALUE = "ghp_0123456789abcdefghij"


def _rows(**lives: float | None) -> list[dict[str, object]]:
    return [{"name": name, "renews": True, "life_s": life_s} for name, life_s in lives.items()]


async def _requested(link: socket.socket) -> str:
    await asyncio.wait_for(until_readable(link.fileno()), 10)
    tag, body, _ = messages.receive(link.fileno())
    return str(body["name"]) if tag == "renew" else ""


def _answer(link: socket.socket, name: str, data: bytes = b"", why: str = "") -> None:
    output, pipe = os.pipe()
    os.write(pipe, data)
    messages.send(link.fileno(), "value", {"name": name, "why": why}, [] if why else [output])
    os.close(output)
    os.close(pipe)


def test_a_value_is_fetched_when_its_life_is_over_and_again() -> None:
    """Each time as long after the last one; a wrong value is not taken."""

    async def renew() -> list[tuple[str, str]]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        taken: list[tuple[str, str]] = []
        renewals = Renewals(theirs.detach(), _rows(KEY=0.01, OTHER=None))
        renewals.begin(lambda name, value: taken.append((name, value)))
        for data in (b"short", f" {VALUE}\n".encode(), VALUE.encode()):
            assert await _requested(ours) == "KEY"
            _answer(ours, "KEY", data)
        assert await _requested(ours) == "KEY"
        renewals.close()
        assert messages.receive(ours.fileno())[0] == ""
        ours.close()
        return taken

    assert asyncio.run(renew()) == [("KEY", VALUE)] * 2


def test_a_refused_value_is_fetched_once_a_minute_and_a_failure_is_told() -> None:
    """A secret without a command is none of these; without its process the value stays."""

    async def refuse() -> list[str]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        renewals = Renewals(theirs.detach(), _rows(KEY=None, OTHER=None))
        renewals.begin(lambda *_: None)
        told = [renewals.note_refused("PLAIN"), renewals.note_refused("KEY"), renewals.note_refused("KEY")]
        assert await _requested(ours) == "KEY"
        _answer(ours, "KEY", why="ended with exit code 3; run it to see why")
        await asyncio.sleep(0)  # the answer is there, and is read before what comes next
        await asyncio.sleep(0)
        said = renewals.note_refused("KEY")
        ours.setblocking(False)
        try:
            messages.receive(ours.fileno())
        except BlockingIOError:
            told.append("nothing more was asked")
        ours.close()
        return [*told, said, renewals.note_refused("OTHER")]

    refused = "was refused with status 401"
    assert asyncio.run(refuse()) == [
        "",
        *[f"the value of KEY {refused}; its command is run again"] * 2,
        "nothing more was asked",
        f"the value of KEY {refused}, and stays: its command ended with exit code 3; run it to see why",
        f"the value of OTHER {refused}, and stays: its command {ENDED}",
    ]
