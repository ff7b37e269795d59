"""A daemon that goes away, or stands still: every call ends, within seconds, with what is known."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import cloche
from cloche.backends.docker.backend import DockerBackend
from tests.harness.containers import Daemon, open_daemon

# Where nobody answers, docker's own library leaves its sockets to the garbage collector.
UNCLOSED = "ignore::pytest.PytestUnraisableExceptionWarning"
pytestmark = [pytest.mark.soak, pytest.mark.root, pytest.mark.container, pytest.mark.filterwarnings(UNCLOSED)]
LONG = "print('up', flush=True); import time; time.sleep(60)"


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Daemon]:
    """Start a daemon for one test, which Cloche finds; however it ends, nothing may be left on it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CLOCHE_RUNSC", "none")
    with open_daemon() as daemon:
        monkeypatch.setenv("DOCKER_HOST", daemon.url)
        daemon.image("cloche-test:python")
        yield daemon
        DockerBackend().drain()
        for _ in range(3):  # while its warnings are this test's; threads that end take some with them
            time.sleep(0.5)
            gc.collect()


def run(code: str = "print(1)", **keywords: object) -> cloche.Result:
    """Run something on it."""
    return cloche.run(code, backend="docker", image="cloche-test:python", **keywords)  # type: ignore[arg-type]


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Fail when the block takes longer."""
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds


def wait_until_warm() -> None:
    """Run until a container waited."""
    deadline = time.monotonic() + 60
    while run().meta["start"] != "pooled":
        assert time.monotonic() < deadline
        time.sleep(0.5)


def test_what_waits_warm_is_not_waited_for(own: Daemon) -> None:
    """Stopped while containers wait, a sandbox is open and a session lives: each call says so; a new start is found."""
    wait_until_warm()
    with cloche.Sandbox(live=False, backend="docker", image="cloche-test:python") as sandbox:
        sandbox.run("open('f', 'w')")
        session = sandbox.session()
        session.run("x = 1")
        own.stop()
        calls: list[Callable[[], object]] = [run, run, lambda: sandbox.run("1"), lambda: sandbox.read_file("f")]
        for call in [*calls, sandbox.session]:
            with within(30), pytest.raises(cloche.BackendUnavailable, match=r"nobody answers.*systemctl start docker"):
                call()
        with within(30), pytest.raises(cloche.InvalidRequest, match="this session has ended"):
            session.run("x")
    own.start()
    own.wait_until_ready()
    assert run().stdout == "1\n"


WARM = f"""
import cloche, time
def run(code, **keywords):
    return cloche.run(code, backend="docker", image="cloche-test:python", **keywords)
while run("print(1)").meta["start"] != "pooled":
    time.sleep(0.5)
time.sleep(2)
try:
    run({LONG!r}, timeout=60, on_output=lambda *_: print("up", flush=True))
except cloche.OutcomeUnknown as error:
    print(error, flush=True)
"""


def test_a_warm_run_that_loses_the_daemon_is_told(own: Daemon) -> None:
    """A run in a container that had waited ends as any other does: at once, with nobody knowing how."""
    caller = subprocess.Popen([sys.executable, "-c", WARM], stdout=subprocess.PIPE, text=True)
    assert caller.stdout is not None
    assert caller.stdout.readline() == "up\n"
    with within(30):
        own.stop()
        assert "for an unknown reason" in caller.stdout.readline()
    caller.stdout.close()
    caller.wait(60)


@contextmanager
def standing_still(daemon: Daemon) -> Iterator[Callable[[], None]]:
    """Give a function that stops the daemon from doing anything, until the block ends."""
    try:
        yield lambda: daemon.signal(signal.SIGSTOP)
    finally:
        daemon.signal(signal.SIGCONT)


@pytest.mark.soak  # for its length
def test_a_daemon_that_stands_still_is_given_up(own: Daemon) -> None:
    """It takes orders and carries none out: a run past its time ends all the same, and so does a session's cell."""
    with standing_still(own) as stand_still, within(60), pytest.raises(cloche.OutcomeUnknown, match="still be running"):
        run(LONG, timeout=5, warm=False, on_output=lambda *_: stand_still())
    assert run(warm=False).stdout == "1\n"
    with cloche.Sandbox(live=False, backend="docker", image="cloche-test:python", warm=False) as sandbox:
        session = sandbox.session()
        with standing_still(own) as stand_still, within(60):
            result = session.run(LONG, timeout=5, on_output=lambda *_: stand_still())
        assert (result.ok, result.meta["state"]) == (False, "lost")
        assert "may still be running" in result.meta["lost"]
    assert own.is_clean(patience_s=30)
