"""Sessions in virtual machines: what is a machine's own. Emulated, each boot is long. The rest is in conformance.

One machine serves all that needs no other; what needs one, or seconds, is left to the soak where it may be.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import cloche
from cloche.backends.microvm.plan import MOST_SESSIONS
from cloche.sync import Sandbox, Session
from tests.harness.machines import monitors
from tests.integration import test_docker_sessions as docker
from tests.integration import test_sessions as jail
from tests.integration.test_microvm import image

__all__ = ["image"]
pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("settings_of_nobody")]

DAEMONS = """
import os, socket, time
door = socket.create_server(("127.0.0.1", 4242))
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        time.sleep(600)
        os._exit(0)
"""
# What sees none of these: no process, no door; nor do they see this.
LOOK = """
import os, socket
print(len([name for name in os.listdir("/proc") if name.isdigit()]))
try:
    socket.create_connection(("127.0.0.1", 4242))
    print("open")
except OSError:
    print("closed")
"""
HOSTILE = {name: docker.HOSTILE[name] for name in list(docker.HOSTILE)[:4]}


def parent_of(process: int) -> int:
    """Return the number of a process's parent, 0 where it is gone."""
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def machines_of(caller: int) -> set[int]:
    """Return the numbers of the monitors whose keepers a process has started."""
    return {one for one in monitors() if parent_of(parent_of(one)) == caller}


@pytest.fixture(scope="module")
def sandbox(image: Path) -> Iterator[Sandbox]:
    """Have one machine; closed with a session that is open, it is gone."""
    before = machines_of(os.getpid())
    with Sandbox(
        live=False, backend="microvm", memory="96m", disk="16m", pids=32, timeout=120, output_limit="2k"
    ) as one:
        yield one
        one.session("bash").run("sleep 600 &")
        machine = machines_of(os.getpid()) - before
    assert len(machine) == 1
    assert not monitors() & machine


@pytest.fixture
def session(sandbox: Sandbox) -> Iterator[Session]:
    """Return a session of Python in that machine."""
    with sandbox.session() as one:
        yield one


@pytest.mark.soak
def test_nothing_but_files_is_shared(sandbox: Sandbox, session: Session) -> None:
    """What a cell left running goes on beside a run and another session, which neither see nor end it."""
    session.run(DAEMONS)
    assert sandbox.run(LOOK).stdout == "2\nclosed\n"
    with sandbox.session(env={"NAME": "second"}) as second:
        assert second.run(LOOK + "os.environ['NAME']").stdout == "2\nclosed\n"
        second.run("open('f', 'w').write('f')")
    assert session.run(LOOK).stdout == "5\nopen\n"
    assert (session.run("open('f').read()").value, sandbox.read_file("f")) == ("f", b"f")


@pytest.mark.soak  # for its length
def test_a_run_that_is_killed_for_its_memory_is_not_the_sessions_end(sandbox: Sandbox, session: Session) -> None:
    """Each has its own limit, also when both use most of it."""
    session.run("kept = b'x' * 60_000_000")
    result = sandbox.run("x = [b'x' * 1_000_000 for _ in range(1000)]")
    assert (result.status, result.exit_code) == ("out_of_memory", 137)
    assert sandbox.run("x = b'x' * 60_000_000; print(len(x))").stdout == "60000000\n"
    assert session.run("len(kept)").value == 60_000_000


@pytest.mark.soak  # for its length
@pytest.mark.parametrize("code", HOSTILE.values(), ids=[name.replace(" ", "_") for name in HOSTILE])
def test_a_hostile_cell_harms_its_session_only(sandbox: Sandbox, session: Session, code: str) -> None:
    """The session is lost, within a time; another one in the same machine goes on."""
    with sandbox.session("bash") as other:
        other.run("n=20")
        docker.check_hostile(session, code, within_s=200)  # emulated, and all processors may be busy
        assert other.run("echo $((n + 1))").stdout == "21\n"


@pytest.mark.soak  # for its length
def test_the_first_process_takes_no_descriptors(session: Session) -> None:
    """What a guest can write to are pipes, so nobody closes for it a socket that lingers."""
    docker.check_no_descriptors(session)


@pytest.mark.soak  # for its length
def test_a_fork_bomb_harms_its_session_only(sandbox: Sandbox, session: Session) -> None:
    """Whether the limit on processes or that on memory comes first: nobody else notices, and a restart begins anew."""
    with sandbox.session("bash") as other:
        other.run("n=20")
        result = session.run("import os\nwhile os.fork() >= 0: pass", timeout=10)
        assert not result.ok
        assert other.run("echo $((n + 1))").stdout == "21\n"
        assert sandbox.run("print(1)").stdout == "1\n"
        session.restart()
        assert session.run("1").value == 1


@pytest.mark.soak  # for its length
def test_who_signals_the_first_process_signals_nobody(session: Session) -> None:
    """The kernel keeps it from its own namespace."""
    result = session.run("import os, signal; os.kill(1, signal.SIGKILL); os.kill(1, signal.SIGSTOP); 5")
    assert (result.value, result.meta["state"]) == (5, "kept")
    assert session.run("6").value == 6


@pytest.mark.soak  # for its length
def test_whatever_a_cell_does_it_can_be_interrupted(sandbox: Sandbox) -> None:
    """The loops are those that the drivers are held to outside of any machine."""
    docker.check_interrupts(sandbox, "bash")


@pytest.mark.soak
def test_files_that_change_while_they_are_looked_at(session: Session) -> None:
    """What a thread of the guest's does meanwhile costs nobody anything."""
    docker.check_moving_files(session, 5)


@pytest.mark.soak  # for its length
def test_an_unused_session_expires_and_leaves_the_files(sandbox: Sandbox) -> None:
    """It ends by itself, says why, and can be begun anew."""
    docker.check_expiry(sandbox)


@pytest.mark.soak  # for its length
@pytest.mark.usefixtures("image")
def test_a_machine_has_places_for_so_many_and_gets_them_back() -> None:
    """One session more is refused, and a run has a place all the same; those that are closed make room."""
    with Sandbox(live=False, backend="microvm", memory="96m", disk="16m", timeout=120) as sandbox:
        for _ in range(2):
            several = [sandbox.session("bash") for _ in range(MOST_SESSIONS)]
            with pytest.raises(cloche.InvalidRequest, match=f"holds {MOST_SESSIONS} sessions at once; close one"):
                sandbox.session()
            assert sandbox.run("print(1)").stdout == "1\n"
            for number, one in enumerate(several):
                assert one.run(f"echo {number}").stdout == f"{number}\n"
                one.close()


@pytest.mark.soak  # for its length
def test_what_cannot_be_had_is_refused(sandbox: Sandbox, session: Session) -> None:
    """Languages without sessions, programs that are not on the disk, checkpoints: with what to do."""
    with pytest.raises(cloche.BackendUnavailable, match=r"no sessions of ruby.*use run"):
        sandbox.session("ruby")
    with pytest.raises(cloche.BackendUnavailable, match="images build --package nodejs"):
        sandbox.session("javascript")
    with pytest.raises(cloche.InvalidRequest, match="PYTHON"):
        sandbox.session(env={"PYTHONHASHSEED": "0"})
    with pytest.raises(cloche.BackendUnavailable, match=r"'microvm' has no checkpoints and no forks.*local"):
        session.checkpoint("a")
    assert session.run("1").value == 1


@pytest.mark.soak  # for its length
def test_a_machine_that_is_lost_ends_its_sessions_and_says_so(image: Path) -> None:
    """In the middle of a cell and between two; and what was in the workspace is gone, which is said as well."""
    before = machines_of(os.getpid())
    with Sandbox(live=False, backend="microvm", timeout=120) as sandbox:
        first, second = sandbox.session(), sandbox.session("bash")
        watch = jail.Watch()
        wait = jail.in_a_thread(lambda: first.run(jail.FOR_EVER, on_output=watch))
        assert watch.has_begun.wait(60)
        (monitor,) = machines_of(os.getpid()) - before
        os.kill(monitor, signal.SIGKILL)
        result = wait()
        assert (result.status, result.exit_code, result.meta["state"]) == ("signaled", 137, "lost")
        assert "virtual machine is gone" in result.meta["lost"]
        with pytest.raises(cloche.InvalidRequest, match=r"has ended.*signaled.*restart"):
            first.run("1")
        with pytest.raises(cloche.InvalidRequest, match=r"has ended.*virtual machine is gone.*restart"):
            second.run("1")
        with pytest.raises(cloche.StartFailed, match="workspace is gone"):
            second.restart()


@pytest.mark.soak  # for its length
def test_a_start_that_nobody_waits_for_leaves_nothing(image: Path) -> None:
    """Cancelled while the machine boots, or at any moment while a place is made; the sandbox goes on."""

    async def cancelled_after(sandbox: cloche.AsyncSandbox, pause_s: float) -> None:
        starting = asyncio.ensure_future(sandbox.session())
        await asyncio.sleep(pause_s)
        starting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await (await starting).close()

    async def scenario() -> None:
        async with cloche.AsyncSandbox(live=False, backend="microvm", timeout=120) as sandbox:
            await cancelled_after(sandbox, 1)
            assert machines_of(os.getpid()) <= before
            assert (await sandbox.run("print(1)")).stdout == "1\n"
            for tenths in range(1, 2 * MOST_SESSIONS):
                await cancelled_after(sandbox, tenths / 10)
            session = await sandbox.session()
            assert (await session.run("1 + 1")).value == 2
            assert len(machines_of(os.getpid()) - before) == 1

    before = machines_of(os.getpid())
    asyncio.run(scenario())
    assert machines_of(os.getpid()) <= before
