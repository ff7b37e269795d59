"""Backends by name: found, missing, unknown."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from cloche.core.enforcement import Level
from cloche.core.errors import BackendUnavailable, InvalidRequest
from cloche.core.policy import BACKEND_ROWS, Policy
from cloche.execution.registry import backend_named, policy_for


def test_every_name_of_the_mission_is_known() -> None:
    """All the words SANDBOX_TYPE may hold have a row."""
    assert set(BACKEND_ROWS) == {
        "local", "docker", "gvisor", "firecracker", "microvm", "microsandbox", "e2b", "daytona", "cloche", "kubernetes",
        "ray", "auto", "subprocess", "none",
    }  # fmt: skip


PLACES = sorted({place for row in BACKEND_ROWS.values() for place in (row.provider, row.alternative) if place})


@pytest.mark.parametrize("place", PLACES)
def test_every_row_names_a_backend(place: str) -> None:
    """Its class is there, and has what a backend has."""
    module, _, attribute = place.partition(":")
    kind = getattr(importlib.import_module(module), attribute)
    assert isinstance(kind.name, str)
    assert callable(kind.open)
    assert callable(kind.capabilities)


def test_an_unknown_name_lists_the_known_ones() -> None:
    """A typo is the caller's error."""
    with pytest.raises(InvalidRequest, match="known backends: local"):
        backend_named("dokcer")


def test_docker_without_its_daemon_is_named_as_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says where it was looked for, what to do, and what works without."""
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none")
    with pytest.raises(BackendUnavailable, match=r'nobody answers at .*/none.*systemctl start docker.*"local"'):
        backend_named("docker")


def test_docker_without_its_library_is_named_as_that(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The extra that brings it is named."""
    monkeypatch.setitem(sys.modules, "docker", None)
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none")
    with pytest.raises(BackendUnavailable, match=r'pip install "cloche\[docker\]"'):
        backend_named("docker")


def test_ray_without_any_package_of_its_extra_names_that_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other extras bring some of the packages, too; only this one brings all."""
    monkeypatch.setitem(sys.modules, "websockets", None)
    with pytest.raises(BackendUnavailable, match=r'pip install cloche\[ray\]"'):
        backend_named("ray")


def test_gvisor_without_docker_and_runsc_names_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are two ways to it, and the error has the reason and the remedy of each."""
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none")
    monkeypatch.setenv("CLOCHE_RUNSC", "none")
    with pytest.raises(
        BackendUnavailable, match=r"nobody answers .*no program runsc.*systemctl.*apt-get install runsc"
    ):
        backend_named("gvisor")
    with pytest.raises(BackendUnavailable, match="nobody answers") as refused:
        backend_named("gvisor", needs_image=True)
    assert "apt-get install runsc" not in str(refused.value)


@pytest.mark.parametrize("name", ["subprocess", "none"])
def test_the_names_without_isolation_stand_for_level_process(name: str) -> None:
    """Asking by that name is the explicit request for level process."""
    assert policy_for(name, Policy()).level is Level.PROCESS


def test_a_name_and_another_level_contradict() -> None:
    """`subprocess` with level jail is refused instead of one of them winning."""
    with pytest.raises(InvalidRequest, match="drop one"):
        policy_for("subprocess", Policy(level=Level.JAIL))


def test_local_leaves_the_level_alone() -> None:
    """The default takes the strongest there is."""
    assert policy_for("local", Policy()) == Policy()
