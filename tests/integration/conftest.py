"""What several modules of tests have in common."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import cloche
from cloche.core.enforcement import Level
from cloche.core.policy import Policy
from cloche.packages import steps
from cloche.sync import Session
from tests.harness.commands import imported
from tests.harness.sessions import Driver


@pytest.fixture
def settings_of_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the machine's own configuration out of a test; the caller's home stays what it is."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name in ("SANDBOX_TYPE", "SANDBOX_TIMEOUT_SEC", "CLOCHE_CONFIG"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep this machine's keys, proxies and settings out of a test that asks an endpoint."""
    for name in os.environ:
        if name.startswith(("CLOCHE_", "OPENAI_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)


@pytest.fixture
def settings_of_nobody_at_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the machine's own configuration and this user's history out of a test of the prompt."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.chdir(tmp_path)
    for name in ("SANDBOX_TYPE", "SANDBOX_TIMEOUT_SEC", "CLOCHE_CONFIG", "INPUTRC", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def cloche_imported() -> Iterator[Path]:
    """Give the folder of a program `cloche` that starts in a moment: a command's imports are most of what it costs."""
    with imported() as program:
        yield program.folder


@pytest.fixture
def cloche_on_path(cloche_imported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have that program found first."""
    monkeypatch.setenv("PATH", f"{cloche_imported}:{os.environ['PATH']}")


@pytest.fixture
def session() -> Iterator[Session]:
    """Return a session in a sandbox of its own."""
    with cloche.Sandbox(live=False) as sandbox:
        yield sandbox.session()


@pytest.fixture
def open_driver(tmp_path: Path) -> Iterator[Callable[..., Driver]]:
    """Return a function that starts a driver, which ends with the test, and ends well."""
    with ExitStack() as stack:
        yield lambda language, **settings: stack.enter_context(Driver(language, tmp_path, **settings))


@pytest.fixture
def javascript(open_driver: Callable[..., Driver]) -> Driver:
    """Start a driver of JavaScript."""
    return open_driver("javascript")


@pytest.fixture
def bash(open_driver: Callable[..., Driver]) -> Driver:
    """Start a driver of Bash."""
    return open_driver("bash")


@pytest.fixture
def downloads_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let steps with a network run at level process: egress never reaches loopback, where a test's index is."""
    real = steps.step_policy

    def step_policy(policy: Policy, step: steps.Step) -> Policy:
        return real(policy.with_changes(level=Level.PROCESS) if step.network_allow else policy, step)

    monkeypatch.setattr(steps, "step_policy", step_policy)


@pytest.fixture
def own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have names, and what is noted of commits, in places of this test's own."""
    for variable, name in (("XDG_RUNTIME_DIR", "runtime"), ("XDG_STATE_HOME", "state")):
        (tmp_path / name).mkdir(mode=0o700)
        monkeypatch.setenv(variable, str(tmp_path / name))
