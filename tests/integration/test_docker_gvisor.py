"""gVisor through docker: preferred where it works, required by name, never assumed."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import cloche
from cloche.backends.docker.backend import DockerBackend
from cloche.backends.docker.daemon import Daemon as ForDocker
from cloche.backends.docker.runtimes import own_runtime
from cloche.backends.local.backend import LocalBackend
from cloche.core.enforcement import Control, Level, State
from cloche.execution.registry import capabilities_of
from tests.harness.containers import Daemon, open_daemon
from tests.harness.environments import run_as_user
from tests.harness.texts import NAMES_AND_A_LITERAL
from tests.integration.test_docker import BY_A_MEMBER

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


def test_a_network_by_name_is_served_from_outside(gvisor: Daemon, image: str) -> None:
    """In runs, in a live sandbox, in a session, on the runtime with the host's stack; and the result says so."""
    rules: dict[str, Any] = {
        "backend": "docker", "image": image, "network": "allowlist", "network_allow": ["good.example"],
    }  # fmt: skip
    result = cloche.run(NAMES_AND_A_LITERAL, require="gvisor", **rules)
    assert result.stdout.split("\n", 2)[:2] == ["198.18.1.0", "403"], result.stderr
    assert [row["host"] for row in result.network_refused] == ["198.51.100.7", "bad.example"]
    assert (result.status, result.enforcement.hits["network"]) == ("denied", 2)
    assert result.meta["engine"].endswith(", runsc-network")
    controls = result.enforcement.controls
    assert "passes socket calls to the host's kernel" in controls[Control.NETWORK].mechanism
    assert "only system calls on sockets reach the host's kernel" in controls[Control.SYSCALLS].mechanism
    assert (controls[Control.IDENTITY].state, result.enforcement.level) == (State.PARTIAL, Level.GVISOR)
    with cloche.Sandbox(users=True, **rules) as sandbox:
        sandbox.network.allow("new.example")
        assert sandbox.exec(["python3", "-c", "import socket; socket.gethostbyname('new.example')"], user="root").ok
        assert sandbox.run(NAMES_AND_A_LITERAL).status == "denied"
    with cloche.Sandbox(live=False, **rules) as sandbox:
        cell = sandbox.session().run("import socket; socket.gethostbyname('bad.example')")
        assert [row["host"] for row in cell.network_refused] == ["bad.example"]


def test_a_member_of_the_docker_group_has_it_by_a_container_beside(gvisor: Daemon, image: str) -> None:
    """The one beside is of docker's own runtime, in the namespace of the one that is gVisor's."""
    os.chmod(gvisor.folder, 0o755)
    os.chmod(gvisor.folder / "socket", 0o666)  # as for a member
    program = f"print(open('/proc/version').read()[:19])\n{NAMES_AND_A_LITERAL}"
    told = f"PROGRAM, IMAGE = {program!r}, {image!r}\n"
    found = run_as_user(told + BY_A_MEMBER, env={"DOCKER_HOST": gvisor.url, "CLOCHE_RUNSC": "none"})
    assert found == ["denied", "Linux version 4.4.0\n198.18.1.0\n403\n", ["198.51.100.7", "bad.example"]]
    assert gvisor.is_clean()


def test_the_ordinary_runtime_can_be_demanded(gvisor: Daemon, image: str) -> None:
    """Level jail is a container of runc, on the host's kernel."""
    result = cloche.run(KERNEL, backend="docker", image=image, warm=False, level="jail")
    assert "why_no_gvisor" not in result.meta  # nobody preferred it
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
    with pytest.raises(
        cloche.BackendUnavailable, match=r"runtime runc \(argument\) is required, so nothing else may run"
    ):
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
        rules: dict[str, Any] = {
            "backend": "docker",
            "image": image,
            "network": "allowlist",
            "network_allow": ["a.example"],
        }
        result = cloche.run("echo 1", language="bash", warm=False, **rules)
        assert (result.stdout, result.enforcement.level) == ("1\n", Level.JAIL)
        why = result.meta["why_no_gvisor"]
        assert result.enforcement[Control.SYSCALLS].reason.endswith(f"though gVisor is preferred: {why}")
        with pytest.raises(cloche.BackendUnavailable, match="gVisor does not work on this daemon"):
            cloche.run("echo 1", language="bash", backend="gvisor", image=image)
        assert daemon.is_clean()
