"""Sessions on gVisor without docker: the promises of any session, and what is gVisor's own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import cloche
from cloche.sync import Sandbox, Session
from tests.integration import test_docker_sessions as docker
from tests.integration import test_session_drivers as drivers
from tests.integration import test_sessions as jail

pytestmark = pytest.mark.usefixtures("settings_of_nobody", "gvisor_alone")


@pytest.fixture
def sandbox(gvisor_alone: None) -> Iterator[Sandbox]:
    """Open a sandbox whose sessions are on gVisor."""
    with Sandbox(backend="gvisor") as opened:
        yield opened


@pytest.fixture
def session(sandbox: Sandbox) -> Session:
    """Return a session of Python."""
    return sandbox.session()


def test_sessions_need_no_daemon(sandbox: Sandbox, tmp_path: Path) -> None:
    """State, files, a time-out, an interrupt, an end and a restart, on gVisor's own kernel."""
    session = sandbox.session()
    jail.test_state_is_kept(session)
    result = session.run("open('/proc/version').read()")
    assert (result.value[:19], str(result.enforcement.level)) == ("Linux version 4.4.0", "gvisor")
    assert (result.meta["backend"], result.meta["engine"][:6], "image" in result.meta) == ("gvisor", "runsc ", False)
    jail.test_a_timeout_keeps_the_state(session)
    jail.test_interrupted_from_another_thread(session)
    jail.test_what_ends_the_interpreter(session, "import os; os._exit(4)", "error", 4)
    jail.test_runs_and_sessions_share_files(session, tmp_path)


@pytest.mark.soak
def test_files_outlive_a_session_that_was_killed_for_its_memory() -> None:
    """The place has them: whoever begins anew finds them, and so do runs."""
    with Sandbox(backend="gvisor", memory="64m", disk="16m") as sandbox:
        session = sandbox.session()
        session.run("open('f', 'w').write('kept')")
        result = session.run("x = [b'x' * 1_000_000 for _ in range(1000)]")
        assert (result.status, result.exit_code, result.meta["state"]) == ("out_of_memory", 137, "lost")
        assert sandbox.read_file("f") == b"kept"
        session.restart()
        assert session.run("open('f').read()").value == "kept"


def test_who_reaches_the_first_process_ends_its_session_only(session: Session) -> None:
    """It has the guest's id there: that costs the state, and is said."""
    session.run("open('f', 'w').write('kept')")
    result = session.run("import os, time; os.kill(1, 9); time.sleep(5)")
    assert (result.status, result.meta["state"]) == ("signaled", "lost")
    session.restart()
    assert session.run("open('f').read()").value == "kept"


@pytest.mark.soak  # for its length
def test_who_stops_the_first_process_is_killed_with_its_container(session: Session) -> None:
    """Nobody waits for it for ever."""
    session.run("open('f', 'w').write('kept')")
    started = time.monotonic()
    result = session.run("import os, signal, time; os.kill(1, signal.SIGSTOP); time.sleep(60)", timeout=3)
    assert (result.status, result.meta["state"]) == ("timeout", "lost")
    assert time.monotonic() - started < 60
    session.restart()
    assert session.run("open('f').read()").value == "kept"


@pytest.mark.parametrize("language", [pytest.param(one, marks=pytest.mark.soak) for one in jail.IN_OTHERS])
def test_other_languages_keep_their_state(sandbox: Sandbox, language: str) -> None:
    """Time-outs and interrupts cost a cell and never the state."""
    docker.check_language(sandbox, language, 2)


@pytest.mark.soak
@pytest.mark.parametrize("claim", docker.MORE_CLAIMS)
def test_what_a_session_promises_holds_on_gvisor(session: Session, claim: Callable[..., None]) -> None:
    """The claim is that of the same name in test_sessions.py."""
    claim(session)


@pytest.mark.soak
@pytest.mark.parametrize("code", list(docker.HOSTILE.values())[:4], ids=lambda code: str(code)[:30])
def test_a_hostile_cell_harms_its_session_only(session: Session, code: str) -> None:
    """The session is lost, within seconds, and the sandbox goes on with its files."""
    docker.check_hostile(session, code)


def test_the_first_process_takes_no_descriptors(session: Session) -> None:
    """What a guest can write to are pipes, so nobody closes for it a socket that lingers."""
    docker.check_no_descriptors(session)


@pytest.mark.soak
def test_files_that_change_while_they_are_looked_at(session: Session) -> None:
    """What a thread of the guest's does meanwhile costs nobody anything; what comes out it could read itself."""
    docker.check_moving_files(session, 10)


@pytest.mark.soak  # for its length
def test_two_sessions_share_files_and_nothing_else(sandbox: Sandbox) -> None:
    """Each has a kernel of its own; the files outlive both."""
    first, second = sandbox.session(), sandbox.session("bash", env={"NAME": "second"})
    first.run("open('f', 'w').write('f')")
    assert second.run("echo $(cat f) $NAME; ls /proc | grep -c '^[0-9]'").stdout.startswith("f second\n")
    first.close()
    second.close()
    assert sandbox.run("print(open('f').read())").stdout == "f\n"


@pytest.mark.soak  # for its length
def test_what_cannot_be_had_is_refused(sandbox: Sandbox) -> None:
    """Checkpoints and forks, a language without sessions, variables that come too late: with what to do."""
    session = sandbox.session()
    with pytest.raises(cloche.BackendUnavailable, match=r"no checkpoints and no forks.*local"):
        session.checkpoint("a")
    with pytest.raises(cloche.BackendUnavailable, match=r"no sessions of ruby.*use run"):
        sandbox.session("ruby")
    with pytest.raises(cloche.InvalidRequest, match="PYTHON"):
        sandbox.session(env={"PYTHONHASHSEED": "0"})


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("language", drivers.BOTH)
def test_whatever_a_cell_does_it_can_be_interrupted(sandbox: Sandbox, language: str) -> None:
    """The loops are those that the drivers are held to outside of any container."""
    docker.check_interrupts(sandbox, language)
