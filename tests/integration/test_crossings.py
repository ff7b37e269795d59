"""What crosses on the way: a kill and an end, an order and a death, a cancelled start and a mount, Ctrl-C and a loop.

Whatever comes first, the run after it is answered, and a sandbox keeps its files.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

import cloche
from cloche.backends.host import measure_host
from cloche.backends.local.fork_tree import ForkTree
from cloche.backends.local.plan import build_session_program
from cloche.backends.local.prefork import pool_for
from cloche.backends.local.sandbox import LocalOpenSandbox
from cloche.backends.local.session import LocalSession, LocalTransport
from cloche.core.errors import ClocheError, InvalidRequest, OutcomeUnknown, SandboxFileRefused, StartFailed
from cloche.core.policy import Policy
from cloche.core.result import KillCause, Status
from cloche.forkserver.slot import Slot
from tests.harness.leaks import Snapshot, wait_for_leftovers
from tests.harness.processes import guests, held_up, is_alive, kill_and_wait, run_pooled, run_warm

pytestmark = pytest.mark.user_soak

T = TypeVar("T")

PROMPTLY_S = 30.0  # a run takes some milliseconds; what was lost on the way was waited for a minute or for ever
SLEEP = "import time; time.sleep(100)"
KEEP = "open('f', 'w').write('kept')"
LOOK = "import os; print(sorted(os.listdir()))"
READ = "print(open('f').read())"


async def promptly(work: Awaitable[T]) -> T:
    """Wait for it, as long as nothing can take that is not stuck."""
    async with asyncio.timeout(PROMPTLY_S):
        return await work


async def cut(work: Coroutine[Any, Any, object], *, after_s: float = 0.0, after_turns: int = 0) -> None:
    """Begin something and cancel it at a moment: so many seconds, or so many turns of the loop, later."""
    task = asyncio.ensure_future(work)
    for _ in range(after_turns):
        await asyncio.sleep(0)
    if after_s:
        await asyncio.sleep(after_s)
    task.cancel()
    done, _ = await asyncio.wait([task], timeout=PROMPTLY_S)
    assert done, "what was cancelled goes on"
    assert task.cancelled() or task.exception() is None


@asynccontextmanager
async def sandbox_in_use(**options: Any) -> AsyncIterator[cloche.AsyncSandbox]:
    """Open a sandbox in which a file lies, and where the next guest waits if guests wait at all."""
    run_warm("1")
    async with cloche.AsyncSandbox(live=False, **options) as sandbox:
        for _ in range(2):
            await promptly(sandbox.run(KEEP))
        yield sandbox


def opened(sandbox: cloche.AsyncSandbox) -> LocalOpenSandbox:
    """Return what the local backend holds of it."""
    found = sandbox._opened
    assert isinstance(found, LocalOpenSandbox)
    return found


def helper_of(sandbox: cloche.AsyncSandbox) -> int:
    """Return its helper's process."""
    connection = opened(sandbox)._connection
    assert connection is not None
    return connection.helper_pid


def slot_of(sandbox: cloche.AsyncSandbox) -> Slot:
    """Return the warm slot that it has taken."""
    slot = opened(sandbox)._slot
    assert slot is not None
    return slot


def waiting_guests(slots: Sequence[Slot]) -> list[int]:
    """Return the guests of these slots, once there are any."""
    deadline = time.monotonic() + PROMPTLY_S
    while time.monotonic() < deadline:
        found = [guest for slot in slots if slot.look() and slot.has_guest() for guest in guests(slot.pid)]
        if found:
            return found
        time.sleep(0.01)
    raise AssertionError("no guest waits")


async def still_kept(sandbox: cloche.AsyncSandbox) -> None:
    """Check that the files are there, twice: what was lost may be missed by the second run only."""
    for _ in range(2):
        assert (await promptly(sandbox.run(READ))).stdout == "kept\n"


def test_a_flood_and_its_end_may_cross(tmp_path: Path) -> None:
    """Who says too much with its last breath is killed or not; the next run is prompt either way."""
    (tmp_path / "c.yaml").write_text("sandbox:\n  flood_limit: 20KB\n  output_limit: 10KB\n")

    async def flood() -> None:
        for _ in range(20):
            result = await promptly(cloche.arun("import os; os.write(1, b'x' * 60000)", config=tmp_path / "c.yaml"))
            assert result.status in (Status.OK, Status.OUTPUT_LIMIT)
            assert (await promptly(cloche.arun("print(1)"))).stdout == "1\n"

    run_pooled("1")
    asyncio.run(flood())


def test_a_kill_and_an_end_may_reach_a_helper_at_once() -> None:
    """The end counts if it came first; whichever did, run and kill are both over with, and the next run is prompt."""

    async def cross() -> None:
        async with sandbox_in_use() as sandbox:
            for number in range(4):
                with held_up([helper_of(sandbox)], for_s=2.0):
                    running = asyncio.ensure_future(sandbox.run("1"))
                    await asyncio.sleep(0.001 * number)
                    time.sleep(0.1)  # noqa: ASYNC251 - nobody shall hear of the end meanwhile
                    opened(sandbox)._kill(KillCause.OUTPUT_LIMIT)
                assert (await promptly(running)).status in (Status.OK, Status.OUTPUT_LIMIT)
                await still_kept(sandbox)

    asyncio.run(cross())


@pytest.mark.root
def test_a_jail_that_ends_after_its_run_is_replaced() -> None:
    """A helper may end a jail for what it has only now seen: the order that lies there is given to another guest."""

    async def kill_late() -> None:
        async with sandbox_in_use() as sandbox:
            connection = opened(sandbox)._connection
            assert connection is not None
            for _ in range(3):
                with held_up([connection.helper_pid], for_s=2.0):
                    await promptly(sandbox.run("1"))
                    connection.notify("kill", cause="out_of_memory", number=connection._run.number)
                await still_kept(sandbox)

    asyncio.run(kill_late())


def test_a_helper_that_lags_gives_no_wrong_answer() -> None:
    """While helpers are held up, for longer than a run may take, each run is answered as if they were not."""

    async def lag() -> None:
        for code, timeout_s, held_s, expected in (
            ("print(1)", 6.0, 6.5, (Status.OK, "1\n")),
            (SLEEP, 0.2, 0.6, (Status.TIMEOUT, "")),
        ):
            pool = pool_for(Policy(), measure_host())
            with held_up([slot.pid for slot in pool._idle if slot.pid], for_s=held_s):
                found = await promptly(asyncio.gather(*(cloche.arun(code, timeout=timeout_s) for _ in range(3))))
                await asyncio.sleep(timeout_s)
            assert [(one.status, one.stdout) for one in found] == [expected] * 3
            for number in range(4):
                assert (await promptly(cloche.arun(f"print({number})"))).stdout == f"{number}\n"

    run_pooled("1")
    asyncio.run(lag())


def test_a_helper_that_lags_lets_no_killed_run_go_on() -> None:
    """It hears of a kill while it still attends to the run before, and remembers whom it is for."""

    async def kill_early() -> None:
        async with sandbox_in_use() as sandbox:
            for _ in range(2):
                with held_up([helper_of(sandbox)], for_s=0.5):
                    await promptly(sandbox.run("1"))
                    await cut(sandbox.run(SLEEP), after_s=0.05)
                await still_kept(sandbox)

    asyncio.run(kill_early())


@pytest.mark.root
def test_rights_that_a_guest_takes_from_itself_lose_no_files() -> None:
    """Runs that would write to a closed folder are refused, what needs no file runs, and opens it again."""

    async def close_folder() -> None:
        async with sandbox_in_use() as sandbox:
            await promptly(sandbox.run("import os; os.chmod('.', 0)"))
            for _ in range(2):
                with pytest.raises(SandboxFileRefused):
                    await promptly(sandbox.run("1"))
                with pytest.raises(SandboxFileRefused):
                    await promptly(sandbox.write_file("g", b"x"))
                with pytest.raises(StartFailed):
                    await promptly(sandbox.session())
            assert (await promptly(sandbox.run(argv=["chmod", "755", "/workspace"]))).ok
            await still_kept(sandbox)
            session = await promptly(sandbox.session())
            assert (await promptly(session.run("open('f').read()"))).value == "kept"

    asyncio.run(close_folder())


STARTS: dict[str, Callable[[cloche.AsyncSandbox], Coroutine[Any, Any, object]]] = {
    "run": lambda sandbox: sandbox.run(SLEEP),
    "command": lambda sandbox: sandbox.run(argv=["sleep", "100"]),
    "session": lambda sandbox: sandbox.session(),
    "file": lambda sandbox: sandbox.write_file("g", b"x" * 100_000),
}


@pytest.mark.parametrize("is_warm", [True, False], ids=["warm", "cold"])
@pytest.mark.parametrize("name", STARTS)
def test_what_is_cancelled_while_it_starts_loses_no_files(name: str, is_warm: bool) -> None:
    """There is one mount of the files to attach after a time-out, and who is killed with it hands it back."""

    async def cancel() -> None:
        async with sandbox_in_use(warm=is_warm) as sandbox:
            for step in range(6 if is_warm else 4):
                await promptly(sandbox.run(SLEEP, timeout=0.02))
                await cut(STARTS[name](sandbox), after_s=step * (0.003 if is_warm else 0.03))
                await still_kept(sandbox)

    asyncio.run(cancel())


def test_a_session_whose_orders_cannot_be_sent_ends() -> None:
    """Nobody waits for the end of what was never begun."""

    def refuse(_streams: list[int]) -> None:
        raise StartFailed("nobody is there", step="helper")

    async def open_in_vain() -> None:
        async with sandbox_in_use() as sandbox:
            inner = opened(sandbox)
            assert inner._connection is not None
            program = build_session_program("python", {}, inner._guest_paths)
            session = LocalSession(
                LocalTransport(inner, program, sandbox.limits), program, sandbox.limits,
                enforcement=inner._enforcement, can_fork=False,
            )  # fmt: skip
            with pytest.raises(StartFailed, match="nobody is there"):
                await promptly(session.open(inner._connection, inner._spec, refuse, inner._connection.attend))
            await promptly(session.close())
            await still_kept(sandbox)

    asyncio.run(open_in_vain())


def test_what_is_cancelled_at_once_never_runs() -> None:
    """Cancelled some turns of the loop after it began, a run changes nothing, and the next one is prompt."""

    async def cancel() -> None:
        async with sandbox_in_use() as sandbox:
            for turns in range(12):
                await cut(sandbox.run("import time; time.sleep(4); open('g', 'w')"), after_turns=turns)
                assert (await promptly(sandbox.run(LOOK))).stdout == "['cloche-main.py', 'f']\n"
            await asyncio.sleep(4.5)  # one that went on would have come to its end
            assert (await promptly(sandbox.run(LOOK))).stdout == "['cloche-main.py', 'f']\n"

    asyncio.run(cancel())


@pytest.mark.root
def test_a_run_that_is_killed_before_its_guest_takes_the_order_never_runs() -> None:
    """The order lies in the handoff socket of a guest that is held up; after the kill it is no later guest's."""

    async def kill_early() -> None:
        async with sandbox_in_use() as sandbox:
            for after_s in (0.0, 0.001, 0.02):
                with held_up(waiting_guests([slot_of(sandbox)]), for_s=60.0):
                    await cut(sandbox.run("open('g', 'w')"), after_s=after_s, after_turns=3)
                assert (await promptly(sandbox.run(LOOK))).stdout == "['cloche-main.py', 'f']\n"
            await still_kept(sandbox)

    asyncio.run(kill_early())


@pytest.mark.root
def test_the_clock_is_kept_while_the_caller_is_busy() -> None:
    """A run is ended in time though nobody listens, and its sandbox goes on."""

    async def be_busy() -> None:
        async with sandbox_in_use() as sandbox:
            slot = slot_of(sandbox)
            for _ in range(2):
                (guest,) = waiting_guests([slot])
                running = asyncio.ensure_future(sandbox.run("while True: pass", timeout=1.0))
                for _ in range(20):  # until the order is sent
                    await asyncio.sleep(0)
                deadline = time.monotonic() + PROMPTLY_S
                while is_alive(guest) and time.monotonic() < deadline:
                    time.sleep(0.05)  # noqa: ASYNC251 - this loop hears nothing
                assert not is_alive(guest)
                assert (await promptly(running)).status is Status.TIMEOUT
                await still_kept(sandbox)

    asyncio.run(be_busy())


@pytest.mark.root
def test_a_guest_that_dies_while_it_waits_is_replaced() -> None:
    """The next run of a sandbox takes another guest, with the same files."""

    async def kill_idle() -> None:
        async with sandbox_in_use() as sandbox:
            for _ in range(3):
                kill_and_wait(waiting_guests([slot_of(sandbox)]))
                await still_kept(sandbox)

    asyncio.run(kill_idle())


def test_a_guest_that_dies_in_the_pool_is_replaced() -> None:
    """Runs start afresh when the guests that waited for them are dead."""

    async def kill_idle() -> None:
        pool = pool_for(Policy(), measure_host())
        kill_and_wait(waiting_guests(pool._idle))
        for number in range(5):
            assert (await promptly(cloche.arun(f"print({number})"))).stdout == f"{number}\n"

    run_pooled("1")
    asyncio.run(kill_idle())


@pytest.mark.parametrize("after_s", [0.0, 0.002, 0.3], ids=str)
def test_a_sandbox_closes_under_a_run(after_s: float) -> None:
    """The run ends with an error that says whether it had begun, nothing is left, and the sandbox is closed."""

    async def close() -> None:
        sandbox = cloche.AsyncSandbox(live=False)
        await sandbox.__aenter__()
        await promptly(sandbox.run("1"))
        inner = opened(sandbox)
        before = Snapshot.take()
        begun = asyncio.Event()
        running = asyncio.ensure_future(sandbox.run(f"print(1, flush=True); {SLEEP}", on_output=lambda *_: begun.set()))
        await asyncio.sleep(after_s)
        if after_s > 0.1:
            await promptly(begun.wait())
        await promptly(sandbox.__aexit__(None, None, None))
        with pytest.raises(OutcomeUnknown if after_s > 0.1 else ClocheError):
            await promptly(running)
        with pytest.raises(InvalidRequest):
            await promptly(inner.read_file("f", max_bytes=1))
        assert wait_for_leftovers(before, patience_s=10) == []

    run_warm("1")
    asyncio.run(close())


def family_of(session: object) -> ForkTree:
    """Return what the local backend holds of a session."""
    assert isinstance(session, LocalSession)
    assert session.fork_tree is not None
    return session.fork_tree


def test_a_session_whose_end_is_not_heard_is_hung_up_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its helper may be held up for long: that is said, and nobody waits for it any more."""
    for module in ("fork_tree", "helper_ends"):
        monkeypatch.setattr(f"cloche.backends.local.{module}.CLOSE_TIMEOUT_S", 0.2)

    async def close_unheard() -> None:
        async with cloche.AsyncSandbox(live=False) as sandbox:
            session = await opened(sandbox).open_session("python", {})
            with held_up([family_of(session).connection.helper_pid], for_s=60.0):
                await promptly(session.close())

    asyncio.run(close_unheard())
    assert "a session was not said to have ended within 0.2 s; its helper is hung up on" in caplog.messages


def test_the_end_of_a_sandbox_that_is_cancelled_ends_all_of_it() -> None:
    """Not only the session that is just being waited for: the other one, the runs' helper and the workspace too."""

    async def cancel_the_end() -> None:
        async with cloche.AsyncSandbox(live=False, warm=False) as sandbox:
            await sandbox.run("1")
            inner = opened(sandbox)
            sessions = [await inner.open_session("python", {}) for _ in range(2)]
            with held_up([family_of(sessions[0]).connection.helper_pid], for_s=0.3):
                await cut(inner.close(), after_s=0.1)
            assert inner._connection is None
            assert [session.is_closed for session in sessions] == [True, True]
            assert not any(family_of(session).connection.is_alive for session in sessions)

    before = Snapshot.take()
    asyncio.run(cancel_the_end())
    left = wait_for_leftovers(before, patience_s=10)
    assert not left, "\n".join(left)
