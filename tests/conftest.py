"""What holds for every test: in CI a skip is a failure, and a session leaves nothing of ours behind."""

import gc
import os
import shutil
import signal
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from cloche.audit import log
from tests.harness.commands import close_imported
from tests.harness.containers import Daemon, chosen, open_daemon
from tests.harness.outcome import Outcome
from tests.harness.worker import ENGINES_OF, Worker

IN_CI = os.environ.get("CI", "").lower() in {"true", "1"}
# How long an example takes says how busy the machine is; and of one tree CI tries the same ones every time.
# A test that names no number of examples has few of them.
settings.register_profile(
    "cloche", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=IN_CI, max_examples=40
)
settings.load_profile("cloche")


# All that a program may let a handler raise at, but SIGALRM, which is the test runner's.
HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)

# Who has one of these needs containers, or virtual machines. One worker of `make test` has all tests of a daemon or an
# image, so that it is there once; and all of gVisor's, some of which look for what others may have left lying about.
ENGINES = {
    "docker_daemon": ("container", "docker"),
    "gvisor_daemon": ("container", "gvisor"),
    "runsc_alone": ("container", "gvisor"),
    "microvm_image": ("machine", "machine"),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Know who asks for tests."""
    parser.addoption("--jobs", type=int, metavar="FD", help="run what this connection of scripts/gate.py asks for")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Look at the machine before all tests."""
    outcome = Outcome(session.config)
    session.config.pluginmanager.register(outcome)
    if (descriptor := session.config.getoption("jobs")) is not None:
        session.config.pluginmanager.register(Worker(session.config, descriptor, outcome))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Leave what stays to the end, a million objects, to no collector: each look through it takes half a second."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what needs an engine, and leave out what the other user's run is for: `make test` runs both."""
    for item in items:
        engines = [ENGINES[name] for name in ENGINES.keys() & set(getattr(item, "fixturenames", ()))]
        for marker, _ in engines:
            item.add_marker(marker)
        item.stash[ENGINES_OF] = frozenset(engine for _, engine in engines)
    other = "user" if os.geteuid() == 0 else "root"
    left_out = [item for item in items if item.get_closest_marker(other)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def _skip_to_failure(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Turn a skip into a failure where everything is installed and nothing may be left out."""
    if IN_CI and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"A skip is a failure in CI: {reason}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fail a test that skips itself in CI."""
    report = yield
    _skip_to_failure(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Fail a module that skips itself in CI."""
    report = yield
    _skip_to_failure(report)
    return report


@pytest.fixture(autouse=True)
def _handlers_are_put_back() -> Iterator[None]:
    """Put back what a command that was run in this process handles: later calls here would go another way.

    The command line also turns the audit on, for the whole of its process.
    """
    before, front_end = [signal.getsignal(number) for number in HANDLED], log._front_end
    yield
    log._front_end = front_end
    for number, handler in zip(HANDLED, before, strict=True):
        signal.signal(number, handler)


@pytest.fixture(scope="session", autouse=True)
def _audit_logs_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let the command line write its audit log to a folder of the tests'."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _commands_are_ended() -> Iterator[None]:
    """End what forks commands for tests."""
    yield
    close_imported()


@pytest.fixture(scope="session")
def docker_daemon() -> Iterator[Daemon]:
    """Give a docker daemon of the tests' own."""
    with open_daemon() as daemon:
        yield daemon


@pytest.fixture(scope="session")
def gvisor_daemon() -> Iterator[Daemon]:
    """Give one that knows gVisor's runsc."""
    with open_daemon("runsc") as daemon:
        yield daemon


@pytest.fixture(scope="session")
def microvm_image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give an image for virtual machines, in a cache of the tests' own, which also remembers what was found of KVM."""
    from tests.harness.machines import build_once

    return build_once(tmp_path_factory.mktemp("microvm"))


@pytest.fixture
def runsc_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Have runsc, and no daemon that knows it."""
    if shutil.which("runsc") is None:
        pytest.skip("missing: runsc (make setup-system)")
    monkeypatch.delenv("CLOCHE_RUNSC", raising=False)
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none")


@pytest.fixture
def gvisor_alone(runsc_alone: None) -> Iterator[None]:
    """The same, and no container waits afterwards."""
    from cloche.backends.gvisor.backend import RunscBackend

    yield
    RunscBackend().drain()


@pytest.fixture
def docker(docker_daemon: Daemon, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Daemon]:
    """Give that daemon as the one which Cloche finds; afterwards nothing may be left on it."""
    with chosen(docker_daemon, monkeypatch, tmp_path):
        yield docker_daemon


@pytest.fixture
def gvisor(gvisor_daemon: Daemon, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Daemon]:
    """The same with the daemon that knows runsc."""
    with chosen(gvisor_daemon, monkeypatch, tmp_path):
        yield gvisor_daemon
