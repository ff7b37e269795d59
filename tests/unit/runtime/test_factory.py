"""Backends by name: found, missing, unknown."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cloche.core.errors import BackendUnavailable, InvalidRequest
from cloche.core.levels import Level
from cloche.core.policy import Policy
from cloche.runtime.factory import PROVIDERS, backend_named, capabilities_of, policy_for

ABSENT = [name for name, provider in PROVIDERS.items() if provider.target is None]


def program(folder: Path, name: str, script: str) -> None:
    """Put a shell script into a folder."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_every_name_of_the_mission_is_known() -> None:
    """All the words SANDBOX_TYPE may hold have a row."""
    assert set(PROVIDERS) == {
        "local", "docker", "gvisor", "firecracker", "microvm", "microsandbox", "e2b", "daytona", "kubernetes",
        "ray", "auto", "subprocess", "none",
    }  # fmt: skip


@pytest.mark.parametrize("name", ABSENT)
def test_a_missing_backend_says_what_works_instead(name: str) -> None:
    """No name falls back silently; the error has the remedy."""
    with pytest.raises(BackendUnavailable, match='default backend "local"'):
        backend_named(name)
    assert not capabilities_of(name).available


def test_an_unknown_name_lists_the_known_ones() -> None:
    """A typo is the caller's error."""
    with pytest.raises(InvalidRequest, match="known backends: local"):
        backend_named("dokcer")


def test_docker_without_its_command_is_named_as_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first thing missing is the program."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BackendUnavailable, match='"docker" is not installed'):
        backend_named("docker")


def test_docker_without_its_daemon_is_named_as_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the program there, it is the daemon, in docker's own words."""
    program(tmp_path, "docker", '[ "$1" = info ] && echo "Cannot connect to the Docker daemon" >&2; exit 1')
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(BackendUnavailable, match=r"daemon cannot be reached.*Cannot connect"):
        backend_named("docker")


def test_docker_that_answers_is_still_not_ours_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working docker is not blamed for our lack of a backend."""
    program(tmp_path, "docker", "exit 0")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(BackendUnavailable, match=r"daemon answers.*no such backend yet"):
        backend_named("docker")


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
