"""gVisor through docker: preferred where it works, required by name, never assumed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

import cloche
from cloche.backends.docker.backend import DockerBackend, own_runtime
from cloche.backends.docker.daemon import Daemon as ForDocker
from cloche.backends.local.backend import LocalBackend
from cloche.core.enforcement import Control, Level
from cloche.execution.registry import capabilities_of
from tests.harness.containers import Daemon, open_daemon

pytestmark = pytest.mark.root

KERNEL = "print(open('/proc/version').read())"


@pytest.fixture
def image(gvisor: Daemon) -> str:
    """Give an image on the daemon that knows runsc."""
    return gvisor.image("cloche-test:python")


@pytest.mark.parametrize("backend", ["docker", "gvisor"])
def test_gvisor_is_taken_where_it_works(gvisor: Daemon, image: str, backend: str) -> None:
    """The level says so, and the kernel that a program sees is gVisor's."""
    result = cloche.run(KERNEL, backend=backend, image=image, warm=False, require="gvisor")
    assert (result.enforcement.level, result.meta["level"]) == (Level.GVISOR, "gvisor")
    assert result.stdout.startswith("Linux version 4.4.0")


def test_the_ordinary_runtime_can_be_demanded(gvisor: Daemon, image: str) -> None:
    """Level jail is a container of runc, on the host's kernel."""
    result = cloche.run(KERNEL, backend="docker", image=image, warm=False, level="jail")
    assert result.enforcement.level is Level.JAIL
    assert result.stdout.strip() == Path("/proc/version").read_text().strip()


def test_runc_is_run_whatever_the_daemon_would_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`runtime="runc"` is told to the daemon by name, and the result says so (C3)."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with open_daemon("runsc", options=["--default-runtime=runsc"]) as daemon:
        monkeypatch.setenv("DOCKER_HOST", daemon.url)
        image = daemon.image("cloche-test:shell")
        result = cloche.run("cat /proc/version", language="bash", runtime="runc", image=image, warm=False)
        assert result.stdout.strip() == Path("/proc/version").read_text().strip()
        assert (result.enforcement.level, result.meta["engine"].endswith(", runc")) == (Level.JAIL, True)
        assert result.enforcement.controls[Control.FILESYSTEM].mechanism.startswith("container of runc")
        DockerBackend().drain()
        assert daemon.is_clean()


def test_a_daemon_without_runc_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else is taken for it: not what the daemon has, and no fallback of trusted code."""
    with pytest.raises(cloche.BackendUnavailable, match=r"does not know the runtime runc.*it knows: crun"):
        own_runtime(cast(ForDocker, SimpleNamespace(info={"Runtimes": {"crun": {}}})))
    with pytest.raises(cloche.InvalidRequest, match="one is given"):
        cloche.run("print(1)", backend=LocalBackend(), runtime="runc")
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere")
    with pytest.raises(cloche.BackendUnavailable, match=r"runtime runc \(argument\) is demanded, so nothing else runs"):
        cloche.run("print(1)", runtime="runc", fallback="process", trusted=True)


def test_a_time_out_ends_a_container_of_gvisor(gvisor: Daemon, image: str) -> None:
    """As with any other."""
    result = cloche.run("while True: pass", backend="gvisor", image=image, timeout=1, warm=False)
    assert result.timed_out
    assert gvisor.is_clean()


@pytest.mark.parametrize("asked", [{"backend": "gvisor"}, {"backend": "docker", "require": "gvisor"}])
def test_nothing_less_is_taken_for_it(docker: Daemon, asked: dict[str, str]) -> None:
    """A daemon without runsc is an error with the remedy."""
    with pytest.raises(cloche.BackendUnavailable, match="runsc install"):
        cloche.run("print(1)", image=docker.image("cloche-test:python"), **asked)  # type: ignore[arg-type]
    assert not capabilities_of("gvisor").available


def test_a_runtime_that_does_not_work_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the daemon only believes to know is tried: it fails, and the ordinary runtime runs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CLOCHE_RUNSC", "none")
    with open_daemon("false") as daemon:
        monkeypatch.setenv("DOCKER_HOST", daemon.url)
        image = daemon.image("cloche-test:shell")
        result = cloche.run("echo 1", language="bash", backend="docker", image=image, warm=False)
        assert (result.stdout, result.enforcement.level) == ("1\n", Level.JAIL)
        with pytest.raises(cloche.BackendUnavailable, match="gVisor does not work on this daemon"):
            cloche.run("echo 1", language="bash", backend="gvisor", image=image)
        assert daemon.is_clean()
