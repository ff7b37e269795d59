"""Images that are not here are pulled by the real daemon, from a registry of the tests' own on loopback."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import cloche
from cloche.backends.docker.backend import DockerBackend
from cloche.core.events import Progress, progress_sinks
from tests.harness.containers import Daemon, Registry, open_daemon, open_registry
from tests.harness.escape.runners import show_on_terminal

pytestmark = [pytest.mark.soak, pytest.mark.root, pytest.mark.container]


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    """Serve an image with Python."""
    with open_registry(tmp_path_factory.mktemp("registry"), "cloche-test:python") as registry:
        yield registry


@pytest.fixture(scope="module")
def daemon_of_module() -> Iterator[Daemon]:
    """Start a daemon that gives up on a layer at once, where others try five times in 50 seconds."""
    with open_daemon(options=["--max-download-attempts=1"]) as daemon:
        yield daemon


@pytest.fixture
def daemon(
    daemon_of_module: Daemon, registry: Registry, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Daemon]:
    """Give it without any image, to the library and to commands."""
    monkeypatch.setenv("DOCKER_HOST", daemon_of_module.url)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CLOCHE_RUNSC", "none")
    registry.asked.clear()
    registry.is_breaking = False
    yield daemon_of_module
    DockerBackend().drain()
    assert daemon_of_module.is_clean()
    images = daemon_of_module.docker("images", "--quiet", "--no-trunc").split()
    if images:
        daemon_of_module.docker("rmi", "--force", *set(images))


@pytest.fixture
def told() -> Iterator[list[Progress]]:
    """Note what is told of how far a pull is."""
    found: list[Progress] = []
    progress_sinks.append(found.append)
    yield found
    progress_sinks.remove(found.append)


def run(image: str) -> cloche.Result:
    """Run something in an image."""
    return cloche.run("print(6 * 7)", backend="docker", image=image, warm=False)


def test_a_missing_image_is_pulled_once(daemon: Daemon, registry: Registry, told: list[Progress]) -> None:
    """How far it is is told in bytes, from a part to the whole; the next run asks nobody."""
    image = f"{registry.name}:here"
    result = run(image)
    assert (result.stdout, result.meta["image"]) == ("42\n", image)
    size = max(len(blob) for blob in registry.blobs.values())
    steps = [progress for progress in told if not progress.is_over]
    assert {progress.what for progress in told} == {f"pulling {image}"}
    assert len(steps) >= 3
    assert [progress.done for progress in steps] == sorted(progress.done for progress in steps)
    assert 0 < steps[0].done < steps[-1].done <= size
    assert {progress.total for progress in steps} == {size}
    assert [progress.is_over for progress in told] == [False] * len(steps) + [True]
    asked = len(registry.asked)
    assert run(image).stdout == "42\n"
    assert len(registry.asked) == asked


def test_a_terminal_shows_a_bar(daemon: Daemon, registry: Registry) -> None:
    """With what is pulled and how much of it; what is no terminal gets the output alone."""
    image = f"{registry.name}:here"
    command = [sys.executable, "-m", "cloche", "run", "--backend", "docker", "--image", image, "-c", "print(6 * 7)"]
    shown = show_on_terminal(command, env={**os.environ, "TERM": "xterm", "COLUMNS": "150"}).decode()
    assert f"pulling {image}" in shown
    assert "━" in shown
    assert "MB" in shown
    assert "42" in shown
    daemon.docker("rmi", image)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "42\n", "")


def test_a_tag_that_nobody_has_is_an_error(daemon: Daemon, registry: Registry, told: list[Progress]) -> None:
    """In the registry's own words, with how to have or name another one."""
    with pytest.raises(cloche.BackendUnavailable) as caught:
        run(f"{registry.name}:nowhere")
    said = str(caught.value)
    assert f"image '{registry.name}:nowhere' is not here and cannot be pulled" in said
    assert "manifest" in said
    assert "Dockerfile.sandbox" in said
    assert "--image" in said
    assert [progress.is_over for progress in told] == [True]


def test_a_layer_that_breaks_off_is_an_error(daemon: Daemon, registry: Registry, told: list[Progress]) -> None:
    """Nothing of it is used; when all of it comes, it runs."""
    registry.is_breaking = True
    image = f"{registry.name}:here"
    with pytest.raises(cloche.BackendUnavailable, match="is not here and cannot be pulled") as caught:
        run(image)
    assert "EOF" in str(caught.value)
    assert (told[-1].is_over, daemon.docker("images", "--quiet")) == (True, "")
    registry.is_breaking = False
    assert run(image).stdout == "42\n"


def test_a_registry_that_is_not_there_is_an_error(daemon: Daemon) -> None:
    """With what the daemon says of it."""
    with pytest.raises(cloche.BackendUnavailable, match=r"cannot be pulled: .*refused"):
        run("127.0.0.1:9/cloche-test:here")


def test_a_digest_is_what_is_run(daemon: Daemon, registry: Registry) -> None:
    """An image can be named by what it is; a registry that sends something else is not believed."""
    image = f"{registry.name}@{registry.digest}"
    assert run(image).stdout == "42\n"
    other = f"{registry.name}@sha256:{'0' * 64}"
    with pytest.raises(cloche.BackendUnavailable, match="cannot be pulled") as caught:
        run(other)
    assert "digest" in str(caught.value)
