"""The caller's end of a helper: which message it believes when several cross. The test plays helper and guest."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from time import monotonic
from typing import Any, cast

import pytest

from cloche.backends.local.helper_link import HelperConnection
from cloche.core.errors import OutcomeUnknown, StartFailed
from cloche.forkserver.slot import HandoffSocket, Slot, Template
from cloche.jail import messages, shared_status
from cloche.jail.messages import Run, Spec

PATIENCE_S = 20.0
WELL = {"wait_status": 0, "is_alone": True, "is_worn": False, "user_s": 0.0, "system_s": 0.0, "most_kib": 1, "tasks": 0}


class Other:
    """Play a helper and its guests at the other ends of a connection, which takes the place of a sandbox's own."""

    def __init__(self) -> None:
        ours, self.link = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        self.slot = Slot(ours, None, cast("Template", None))
        self.slot.spec, self.slot.rebuilds = Spec().as_wire(), False
        self.connection = HelperConnection(Spec(), "", self.slot)
        self.device = 0  # of the guest's workspace
        self.messages: list[tuple[str, int]] = []  # that were handed on, with how many descriptors
        self.build()

    def build(self) -> None:
        """Have another prefork jail, with a handoff socket of its own."""
        self.slot.change_handoff(HandoffSocket())
        self.slot.key = "kept"

    @property
    def handoff(self) -> HandoffSocket:
        """Return the present handoff socket."""
        assert self.slot.handoff is not None
        return self.slot.handoff

    def send(self) -> int:
        """Send a run to the handoff socket, and return its number."""
        self.now = monotonic()  # of the whole run: how long the test takes is not the run's time
        self.connection._send_to_guest(
            self.slot, self.handoff, Run(), (), rebuilds=False, is_awaited=False, shares_workspace=False
        )
        return self.connection._run.number

    async def attend(self) -> dict[str, Any]:
        """Wait for its end."""

        def on_message(tag: str, _body: dict[str, Any], fds: list[int]) -> None:
            self.messages.append((tag, len(fds)))
            for fd in fds:
                os.close(fd)

        async with asyncio.timeout(PATIENCE_S):
            return await self.connection.attend(on_message)

    def send_as_jail(self, tag: str, fds: tuple[int, ...] = (), **body: object) -> None:
        """Send a message over the handoff socket, from inside, about the run that was sent last."""
        link, file, _ = self.handoff.other_ends
        now, number = self.now, self.connection._run.number
        if tag == "started":
            shared_status.note_start(file, number, now, self.device)
        at = {"at": now, "seconds": [], "generation": self.handoff.generation, "number": number}
        messages.send(link, tag, {**at, **body}, fds)

    def report(
        self, tag: str, number: int, *, fds: tuple[int, ...] = (), is_over: bool = False, **body: object
    ) -> None:
        """Say something as the helper, of a run with a number, perhaps that its prefork jail is no more."""
        report = {"number": number, "generation": self.handoff.generation + is_over, "cause": "", **body}
        messages.send(self.link.fileno(), tag, report, fds)

    async def end(self) -> None:
        """Hang up at both ends."""
        self.link.close()
        await self.connection.close()


def play(work: Callable[[Other], Coroutine[Any, Any, None]]) -> None:
    """Play both ends in one loop."""

    async def run() -> None:
        other = Other()
        await other.connection.start()
        try:
            await work(other)
        finally:
            await other.end()

    asyncio.run(run())


async def run_short(other: Other) -> int:
    """Let a run end well, and report it over the handoff socket alone; return its number."""
    number = other.send()
    other.send_as_jail("started")
    other.send_as_jail("ended", **WELL)
    assert (await other.attend())["ended"]["wait_status"] == 0
    return number


def folder(path: Path) -> int:
    """Return the descriptor of a folder, which stands for a guest's workspace."""
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def failure(message: str) -> dict[str, object]:
    """Return what a helper says of a failure of its own."""
    return {"message": message, "step": "helper", "index": 0, "errno": 0}


def test_orders_that_went_to_a_jail_that_is_no_more_fail() -> None:
    """When the helper says of the run before that its jail ended, nobody waits for a guest of it."""

    async def work(other: Other) -> None:
        before = await run_short(other)
        other.send()
        other.report("ended", before, is_over=True)
        with pytest.raises(StartFailed):
            await other.attend()
        assert other.slot.key is None

    play(work)


def test_a_guest_that_waits_goes_with_its_jail(tmp_path: Path) -> None:
    """The helper ends a jail in which the next guest waits already: nobody takes that guest's workspace later."""

    async def work(other: Other) -> None:
        number, gone, present = other.send(), folder(tmp_path), folder(tmp_path.parent)
        other.send_as_jail("started")
        other.send_as_jail("ended", **WELL, denied=0)
        other.connection._run.was_killed = True
        other.send_as_jail("ready", (gone,))
        other.report("ended", number, is_over=True, cause="output_limit", ended=WELL)
        assert (await other.attend())["cause"] == "output_limit"
        assert not other.handoff.has_guest
        other.send_as_jail("ready", (present,))
        assert other.handoff.look()
        (taken,) = other.handoff.take_guest()
        assert os.path.samestat(os.fstat(taken), os.fstat(present))
        for fd in (gone, present, taken):
            os.close(fd)

    play(work)


def test_what_cannot_be_taken_over_leaves_open_whether_it_ran(tmp_path: Path) -> None:
    """The helper was killed, and its folder cleared up by somebody: the run's own error, and nobody starts it again."""

    async def work(other: Other) -> None:
        def take(tag: str, _body: dict[str, Any], _fds: list[int]) -> None:
            folder(tmp_path / "gone")

        other.slot.change_handoff(None)
        other.connection._send_order(Run(), (), is_last=False, again=True)
        messages.send(other.link.fileno(), "ready", {"seconds": []})
        with pytest.raises(OutcomeUnknown, match="may have run"):
            async with asyncio.timeout(PATIENCE_S):
                await other.connection.attend(take)

    play(work)


def test_a_workspace_of_another_guest_is_not_looked_at(tmp_path: Path) -> None:
    """The guest says on which file system it works: a caller that holds another one reads none of its files."""

    async def work(other: Other) -> None:
        elsewhere = folder(Path("/proc/self"))
        other.send()
        other.device = os.stat(tmp_path).st_dev
        other.send_as_jail("ready", (elsewhere,))
        os.close(elsewhere)
        other.send_as_jail("started")
        with pytest.raises(OutcomeUnknown, match="another guest"):
            await other.attend()
        assert ("ready", 1) not in other.messages

    play(work)


def test_a_new_jail_may_be_ready_before_the_end_of_the_one_before_it_is_known() -> None:
    """Orders that went to the old one fail all the same: its successor takes none of them."""

    async def work(other: Other) -> None:
        before = await run_short(other)
        other.send()
        other.report("ended", before, is_over=True)
        other.send_as_jail("ready", generation=other.handoff.generation + 1)
        with pytest.raises(StartFailed):
            await other.attend()

    play(work)


def test_a_failure_of_a_run_that_was_given_up_is_not_the_next_one_s() -> None:
    """What the helper then says of the orders that were lost concerns nobody, and what it brings is closed."""

    async def work(other: Other) -> None:
        before = await run_short(other)
        given_up = other.send()
        other.report("ended", before, is_over=True)
        with pytest.raises(StartFailed):
            await other.attend()
        other.build()
        fd = os.open("/", os.O_RDONLY)
        descriptors = len(os.listdir("/proc/self/fd"))
        other.send()
        other.report("failed", given_up, fds=(fd,), **failure("no sandbox was prepared for the run"))
        attending = asyncio.ensure_future(other.attend())
        await asyncio.sleep(0.05)
        other.send_as_jail("started")
        other.send_as_jail("ended", **WELL)
        assert (await attending)["ended"]["wait_status"] == 0
        assert len(os.listdir("/proc/self/fd")) == descriptors
        os.close(fd)

    play(work)


def test_a_failure_of_its_own_is_a_run_s() -> None:
    """It is raised with the helper's message."""

    async def work(other: Other) -> None:
        other.report("failed", other.send(), **failure("no room"))
        with pytest.raises(StartFailed, match="no room"):
            await other.attend()

    play(work)


def test_a_run_killed_before_it_began_hands_its_workspace_on() -> None:
    """A guest that was ready has brought a mount, and may have attached the one before."""

    async def work(other: Other) -> None:
        number = other.send()
        fd = os.open("/", os.O_RDONLY)
        other.send_as_jail("ready", (fd,))
        os.close(fd)
        other.connection.kill("cancelled")
        other.report("ended", number, is_over=True, cause="cancelled", ended=None)
        assert (await other.attend())["cause"] == "cancelled"
        assert other.messages == [("ready", 1)]

    play(work)


def test_the_end_of_a_run_that_was_killed_is_the_helper_s_word() -> None:
    """The jail reports how the guest ended, but not whether it was killed in time, nor whether the jail goes on."""

    async def work(other: Other) -> None:
        number = other.send()
        other.connection.kill("output_limit")
        other.send_as_jail("started")
        other.send_as_jail("ended", **WELL)
        attending = asyncio.ensure_future(other.attend())
        await asyncio.sleep(0.05)
        assert not attending.done()
        other.report("ended", number, is_over=True, cause="output_limit")
        assert (await attending)["cause"] == "output_limit"
        assert other.slot.key is None

    play(work)


def test_nobody_is_killed_after_his_end() -> None:
    """A kill that comes when the end is known is not passed on: another run may be under way by then."""

    async def work(other: Other) -> None:
        await run_short(other)
        other.link.setblocking(False)
        other.connection.kill("timeout")
        with pytest.raises(BlockingIOError):
            messages.receive(other.link.fileno())

    play(work)


def test_who_waits_for_an_end_is_told_of_a_connection_that_closes() -> None:
    """Closing ends the waiting."""

    async def work(other: Other) -> None:
        other.send()
        attending = asyncio.ensure_future(other.attend())
        await asyncio.sleep(0.01)
        other.link.close()
        await other.connection.close()
        with pytest.raises(StartFailed):
            await attending

    play(work)
