"""The docker backend where the caller is in a container: with a daemon of its own, and with the socket of its host."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cloche.backends.garbage_collection import owner
from tests.harness.containers import (
    FOR_A_DAEMON,
    IMAGES,
    ROOT,
    WITH_A_DAEMON,
    Daemon,
    command_inside,
    lay_out,
    run_inside,
)

pytestmark = [pytest.mark.soak, pytest.mark.root]
PYTHON = "cloche-test:python"
# Files in and out, a second run in the same workspace, a session: all of it by streams, none by a path of this side.
USED = f"""
import cloche, json
from cloche.backends.docker import DockerBackend
with cloche.Sandbox(live=False, backend="docker", image={PYTHON!r}, level="jail") as sandbox:
    sandbox.write_file("in", b"given" * 100_000)
    first = sandbox.run("open('out', 'w').write(open('in').read() + ' back'); print(open('/proc/self/uid_map').read())")
    assert first.ok and [record.path for record in first.files] == ["out"], first
    assert sandbox.read_file("out")[-10:] == b"given back"
    assert sandbox.run("wc -c < out", language="bash").stdout.strip() == "500005"
    session = sandbox.session()
    session.run("x = 41")
    assert session.run("x + len(open('in').read()) - 499_999").value == 42
    controls = {{str(name): str(one.state) for name, one in first.enforcement.controls.items()}}
DockerBackend().drain()
print(json.dumps([str(first.enforcement.level), controls["network"], controls["memory"]]))
"""
ENDLESS = f"""
import cloche
cloche.run("print('up', flush=True); import time; time.sleep(600)", backend="docker", image={PYTHON!r}, warm=False,
           timeout=600, on_output=lambda _, data: print(data.decode(), end="", flush=True))
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give what is shown to a container."""
    return lay_out(tmp_path_factory.mktemp("project"))


def with_its_socket(docker: Daemon) -> str:
    """Return the option that hands a container the daemon which runs it."""
    return f"--volume={docker.folder}/socket:/var/run/docker.sock"


@pytest.mark.parametrize("driver", ["overlay2", pytest.param("vfs", marks=pytest.mark.soak)])
def test_with_a_daemon_of_its_own(docker: Daemon, project: Path, tmp_path: Path, driver: str) -> None:
    """A daemon in the container runs the sandboxes, which are there as good as anywhere; nothing of them is left."""
    image = tmp_path / "image.tar"
    subprocess.run([sys.executable, ROOT / "scripts" / "sandbox_image.py", PYTHON, image, *IMAGES[PYTHON]], check=True)
    words = ["bash", "-c", WITH_A_DAEMON, "bash", driver, "python3", "-c", USED]
    options = [*FOR_A_DAEMON, f"--volume={image}:/image.tar:ro"]
    done = run_inside(docker, project, words, image=docker.image("cloche-test:engine"), options=options)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["jail", "enforced", "enforced"]
    assert done.stderr.splitlines()[-1].startswith("Loaded image"), f"left: {done.stderr}"


def test_with_the_hosts_socket(docker: Daemon, project: Path) -> None:
    """Containers beside its own, on a daemon that knows none of the caller's paths: files travel by streams."""
    docker.image(PYTHON)
    words, image = ["python3", "-c", USED], docker.image("cloche-test:host")
    done = run_inside(docker, project, words, image=image, options=[with_its_socket(docker)])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["jail", "enforced", "enforced"]
    assert docker.is_clean()


def test_a_killed_container_takes_its_sandboxes_along(docker: Daemon, project: Path) -> None:
    """The caller's whole container is killed in the middle of a run: what it had started beside it ends by itself."""
    docker.image(PYTHON)
    options = [with_its_socket(docker), "--name=cloche-caller"]
    words, image = ["python3", "-c", ENDLESS], docker.image("cloche-test:host")
    caller = subprocess.Popen(
        command_inside(docker, project, words, image=image, options=options), stdout=subprocess.PIPE
    )
    assert caller.stdout is not None
    assert caller.stdout.readline() == b"up\n"
    assert docker.has_containers(2)
    docker.docker("kill", "cloche-caller")
    caller.wait(60)
    caller.stdout.close()
    assert docker.is_clean()


def test_nobody_clears_up_what_he_cannot_see(docker: Daemon, project: Path) -> None:
    """`cloche gc` in a container leaves what others have, and a host what containers have, whatever they look like."""
    image = docker.image("cloche-test:host")
    words = ["python3", "-c", "from cloche.backends.garbage_collection import owner; print(owner())"]
    theirs = run_inside(docker, project, words, image=image).stdout.strip().split(":")
    elsewhere = [theirs[0], "another-boot", *theirs[2:]]  # of the same image, but another host's daemon
    hidden = [*theirs[:2], "1", *theirs[3:]]
    for name in (owner(), ":".join(elsewhere), ":".join(hidden)):
        docker.docker("volume", "create", "--label", f"cloche.owner={name}")
    try:
        words = ["-m", "cloche", "gc", "--json"]
        done = run_inside(docker, project, ["python3", *words], image=image, options=[with_its_socket(docker)])
        assert json.loads(done.stdout)["docker"] == [], done.stderr
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True)
        assert json.loads(done.stdout)["docker"] == []
    finally:
        docker.docker("volume", "rm", *docker.volumes())
