"""Attempts to keep the caller waiting by a socket that lingers, sent to who has no room for descriptors."""

from __future__ import annotations

import asyncio
import socket
import time
from typing import Any

import pytest

import cloche
from tests.harness.escape.hostile import LINGERING, OPTIONS

LINGER_S = 30
PROMPTLY_S = 15
# What it tells: which descriptors took the socket, and how long that lingers.
SEND = (
    LINGERING
    + f"""
told = [send_everywhere({LINGER_S}), lingers(lingering({LINGER_S})[0])]
"""
)
NOBODY_TOOK_IT = [[], [0, 0]]


def test_who_has_no_room_lingers() -> None:
    """The attempt works where two processes share a plain pair of sockets: the receiver waits."""
    guest: dict[str, Any] = {}
    exec(LINGERING, guest)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert guest["takes"](theirs.fileno(), 1)
        began = time.monotonic()
        ours.recv(1)
        assert time.monotonic() - began > 0.5
        for other in guest["held"]:
            other.close()


@pytest.mark.both_users
def test_no_session_stops_its_callers_loop() -> None:
    """Nothing that its guest can write to carries descriptors, so another session's cells go on, and it is closed."""

    async def main() -> tuple[float, cloche.Result]:
        async with (
            cloche.AsyncSandbox(live=False, timeout=20) as hostile,
            cloche.AsyncSandbox(live=False, timeout=20) as other,
        ):
            attacker, session = await hostile.session(), await other.session()
            attack, worst = asyncio.ensure_future(attacker.run(f"{SEND}\ntold", timeout=2)), 0.0
            while not attack.done():
                began = time.monotonic()
                await session.run("1")
                await asyncio.sleep(0.001)
                worst = max(worst, time.monotonic() - began)
            return worst, attack.result()

    began = time.monotonic()
    worst, result = asyncio.run(main())
    assert (result.value, result.status) == (NOBODY_TOOK_IT, "ok")
    assert worst < PROMPTLY_S
    assert time.monotonic() - began < 2 * PROMPTLY_S


@pytest.mark.both_users
def test_no_fork_and_no_run_has_a_way_either() -> None:
    """A clone's link is as its parent's; a run has pipes alone."""
    with cloche.Sandbox(live=False, timeout=20) as sandbox:
        session = sandbox.session()
        (fork,) = session.fork()
        assert fork.run(f"{SEND}\ntold", timeout=2).value == NOBODY_TOOK_IT
        assert session.run("1").value == 1
    assert cloche.run(f"{SEND}\ntold", timeout=10).value == NOBODY_TOOK_IT


def test_no_socket_can_linger_and_other_options_are_as_ever() -> None:
    """The filter compares what the kernel will read, in a session and in a run."""
    with cloche.Sandbox(live=False, timeout=20) as sandbox:
        assert sandbox.session().run(f"{LINGERING}{OPTIONS}\nsettings").value == [[0, 0], True, True]
    assert cloche.run(f"{LINGERING}{OPTIONS}\nsettings", timeout=20).value == [[0, 0], True, True]
