"""Sessions on gVisor without docker: what is gVisor's own. The rest is in conformance."""

from __future__ import annotations

import time
from collections.abc import Iterator

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
    with Sandbox(live=False, backend="gvisor") as opened:
        yield opened


@pytest.fixture
def session(sandbox: Sandbox) -> Session:
    """Return a session of Python."""
    return sandbox.session()


def test_sessions_need_no_daemon(session: Session) -> None:
    """They are on gVisor's own kernel, say so, and are interrupted as any other."""
    result = session.run("open('/proc/version').read()")
    assert (result.value[:19], str(result.enforcement.level)) == ("Linux version 4.4.0", "gvisor")
    assert (result.meta["backend"], result.meta["engine"][:6], "image" in result.meta) == ("gvisor", "runsc ", False)
    jail.check_interrupt(session)


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
