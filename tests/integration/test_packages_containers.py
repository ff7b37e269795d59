"""Packages in containers: for the image's interpreter, as a volume; gVisor alone shows the host's folders."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import cloche
from cloche.backends.docker.backend import DockerBackend
from cloche.backends.docker.daemon import connect
from cloche.backends.docker.images import find_image
from cloche.backends.docker.layers import fill
from cloche.cli.app import root
from cloche.config.settings import Settings
from cloche.core.errors import BackendUnavailable
from cloche.execution.packages import prune
from cloche.packages.store import Store
from cloche.skills.loader import load_skill
from cloche.skills.run import run_skill
from tests.harness.containers import Daemon
from tests.harness.packages import PackageIndex, own_index
from tests.harness.processes import fill_pool
from tests.harness.texts import NAMES_AND_A_LITERAL, write_skill
from tests.harness.world import open_world

pytestmark = pytest.mark.usefixtures("settings_of_nobody", "downloads_outside")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PackageIndex]:
    """Serve an index, which this user's environment names, and give an empty store."""
    with own_index(tmp_path, monkeypatch) as served:
        served.add("below", files={"below/__init__.py": "WORD = 'within'\n", "below/empty/none.txt": ""})
        source = "import below\ndef main():\n    print(below.WORD)\n"
        served.add("above", requires=("below>=1",), scripts={"say-above": "above:main"}, files={"above.py": source})
        yield served


@pytest.fixture
def in_docker(index: PackageIndex, docker: Daemon) -> Iterator[dict[str, Any]]:
    """Give the keywords of a call in a container; afterwards the daemon has no volumes of this store."""
    yield {"backend": "docker", "image": docker.image("cloche-test:python")}
    forget_layers()


def forget_layers() -> None:
    """Let the daemon have no volume of this store."""
    DockerBackend().drain()
    (Path(os.environ["XDG_DATA_HOME"]) / "cloche" / "packages" / "layers").rename(Path.cwd() / "layers-aside")
    prune(unused_s=1e9)


LOOK = """
import above, importlib.metadata, os, subprocess, sys
try:
    open(above.__file__, "a")
    why = "it can be written to"
except OSError as error:
    why = error.strerror
said = subprocess.run(["say-above"], capture_output=True, text=True).stdout
other = subprocess.run([sys.executable, "-c", "import below; print(below.WORD)"], capture_output=True, text=True).stdout
has_bytecode = os.path.exists(above.__cached__)
[said, other, importlib.metadata.version("above"), why, has_bytecode, list(sys.version_info[:2]), above.__file__]
"""


def check_what_is_seen(value: list[Any]) -> str:
    """Check what `LOOK` says; return where the package lies."""
    assert value[:3] == ["within\n", "within\n", "1.0"]
    assert value[3] in {"Read-only file system", "Permission denied"}
    assert value[4] == (tuple(value[5]) == sys.version_info[:2])
    return str(value[6])


@pytest.mark.root
def test_a_container_has_packages_for_its_own_interpreter(
    index: PackageIndex, docker: Daemon, in_docker: dict[str, Any]
) -> None:
    """In runs, cold and warm, in sandboxes, in sessions; nothing of the host is mounted, and one volume serves all."""
    result = cloche.run(LOOK, packages=["above"], **in_docker)
    assert result.ok, result.stderr
    assert check_what_is_seen(result.value).startswith("/opt/cloche/packages/")
    assert result.meta["packages"] == ["above==1.0", "below==1.0"]
    fill_pool()
    mounts = [mount for one in _inspected(docker) for mount in one["Mounts"]]
    assert {mount["Type"] for mount in mounts} == {"volume"}
    assert {mount["RW"] for mount in mounts if "packages" in mount["Name"]} == {False}
    before = len(index.asked)
    warm = cloche.run(LOOK, packages=["above"], **in_docker)
    assert (warm.meta["start"], warm.value) == ("pooled", result.value)
    for live in (False, True):
        with cloche.Sandbox(packages=["above"], live=live, **in_docker) as sandbox:
            assert sandbox.run(LOOK).value == result.value
            assert sandbox.session().run("import above; above.main()").stdout == "within\n"
            assert sandbox.run("say-above", language="bash").stdout == "within\n"
    assert cloche.run("import above", **in_docker).status == "error"
    assert len(index.asked) == before
    assert len([name for name in docker.volumes() if "packages" in name]) == 2  # it, and its mark


def _inspected(docker: Daemon) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(docker.docker("inspect", *docker.containers()))
    return found


@pytest.mark.root
def test_nothing_is_added_to_a_container_that_lives(index: PackageIndex, in_docker: dict[str, Any]) -> None:
    """The error says what to do instead."""
    cloche.run("1", packages=["below"], **in_docker)
    with (
        cloche.Sandbox(live=True, **in_docker) as sandbox,
        pytest.raises(BackendUnavailable, match="when it is opened"),
    ):
        sandbox.install("above")


def test_packages_of_npm_are_refused_before_an_image_is_fetched(
    docker: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No interpreter is looked for."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    with pytest.raises(BackendUnavailable, match="'docker' cannot use packages of npm"):
        cloche.run("1", language="javascript", packages=["one"], backend="docker", image="cloche-test:not-there")


KILLED = """
import os, signal, sys
from cloche.backends.docker import daemon
real = daemon.Daemon.put_archive
def cut(pieces):
    for _ in range(3):
        yield next(pieces)
    os.kill(os.getpid(), signal.SIGKILL)
daemon.Daemon.put_archive = lambda self, container, path, pieces: real(self, container, path, cut(pieces))
from cloche.backends.docker.images import find_image
from cloche.backends.docker.layers import fill
found = daemon.connect()
fill(found, find_image(found, sys.argv[1]), sys.argv[2:])
"""


@pytest.mark.root
def test_a_volume_that_was_left_half_made_is_never_shown(
    index: PackageIndex, docker: Daemon, in_docker: dict[str, Any]
) -> None:
    """It is filled before it is used, or removed by `cloche gc`; one whose mark went is looked into, not made again."""
    assert cloche.run("import above", packages=["above"], **in_docker).ok
    DockerBackend().drain()
    (layer,) = Store().layers()
    docker.docker("volume", "rm", *docker.volumes())
    killed = [sys.executable, "-c", KILLED, in_docker["image"], layer.folder]
    assert subprocess.run(killed, check=False, env=_env()).returncode == -9
    (half,) = docker.volumes()
    assert cloche.run("import above; above.main()", packages=["above"], **in_docker).stdout == "within\n"
    DockerBackend().drain()
    docker.docker("volume", "rm", f"{half}.whole")
    made = json.loads(docker.docker("volume", "inspect", half))
    daemon = connect()
    fill(daemon, find_image(daemon, in_docker["image"]), [layer.folder])
    assert json.loads(docker.docker("volume", "inspect", half)) == made
    assert len(DockerBackend().collect_garbage()) == 1  # the container through which it was filled
    docker.docker("volume", "rm", half, f"{half}.whole")
    assert subprocess.run(killed, check=False, env=_env()).returncode == -9
    assert any(half in line for line in DockerBackend().collect_garbage())
    assert docker.volumes() == []


@pytest.mark.root
def test_volumes_go_with_the_layers_that_they_are_of(
    index: PackageIndex, docker: Daemon, in_docker: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """By `cloche packages prune`."""
    program = "import cloche, json, sys; cloche.run('import below', packages=['below'], **json.loads(sys.argv[1]))"
    for packages in (["below"], ["above"]):
        other = program.replace("['below']", str(packages)).replace("import below", f"import {packages[0]}")
        outside = "from tests.integration.test_packages import OUTSIDE; exec(OUTSIDE)\n"
        subprocess.run(
            [sys.executable, "-c", outside + other, json.dumps({**in_docker, "warm": False})], check=True, env=_env()
        )
    assert len(docker.volumes()) == 4
    with pytest.raises(SystemExit) as ended:
        root(["packages", "prune", "--most-layers", "1"])
    assert not ended.value.code
    assert len(docker.volumes()) == 2
    assert "docker: volume cloche-packages-" in capsys.readouterr().out


def _env() -> dict[str, str]:
    paths = [str(Path(__file__).parents[2]), str(Path(cloche.__file__).parents[1])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


@pytest.mark.root
def test_a_skill_with_hosts_and_packages_runs_unchanged_on_local_and_docker(
    index: PackageIndex, in_docker: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has its package, its host by name, and no other; what it asks for is its own, what it gets the operator's."""
    manifest = "entry: scripts/go.py\nnetwork: [good.example]\npackages: [above]\n"
    folder = write_skill(
        tmp_path, "reaching", manifest=manifest, go__py=f"import above\nabove.main()\n{NAMES_AND_A_LITERAL}"
    )
    (tmp_path / "owner.yaml").write_text(
        "sandbox: {packages_allow: [above], ceilings: {packages: [above], network: [good.example]}}\n"
    )
    monkeypatch.setenv("CLOCHE_CONFIG", str(tmp_path / "owner.yaml"))
    skill = load_skill(folder, Settings())
    found = [run_skill(skill, **options) for options in ({}, in_docker)]
    assert [one.meta["backend"] for one in found] == ["local", "docker"]
    for result in found:
        assert result.stdout == "within\n198.18.1.0\n403\n", result.stderr
        assert [row["host"] for row in result.network_refused] == ["198.51.100.7", "bad.example"]
        assert (result.status, result.meta["packages"]) == ("denied", ["above==1.0", "below==1.0"])


@pytest.mark.root
def test_gvisor_of_a_daemon_has_the_same_volume(index: PackageIndex, gvisor: Daemon) -> None:
    """On its own kernel."""
    image = gvisor.image("cloche-test:python")
    result = cloche.run(LOOK, packages=["above"], backend="docker", require="gvisor", image=image, timeout=60)
    assert result.ok, result.stderr
    assert check_what_is_seen(result.value).startswith("/opt/cloche/packages/")
    forget_layers()


@pytest.mark.both_users
@pytest.mark.usefixtures("gvisor_alone")
def test_gvisor_alone_shows_the_same_folder_as_the_jail(index: PackageIndex) -> None:
    """Read-only, in runs, in a live sandbox and in a session; nothing is downloaded for it again."""
    there = check_what_is_seen(cloche.run(LOOK, packages=["above"]).value)
    before = len(index.asked)
    result = cloche.run(LOOK, packages=["above"], backend="gvisor", timeout=60)
    assert result.ok, result.stderr
    assert check_what_is_seen(result.value) == there
    with cloche.Sandbox(packages=["above"], backend="gvisor", timeout=60) as sandbox:
        assert check_what_is_seen(sandbox.run(LOOK).value) == there
        assert sandbox.session().run("import above; above.main()").stdout == "within\n"
        with pytest.raises(BackendUnavailable, match="when it is opened"):
            sandbox.install("below")
    assert len(index.asked) == before


@pytest.mark.root
def test_packages_for_an_image_come_by_the_network_that_steps_are_served(
    docker: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ahead, from an index over TLS; the container has them without one."""
    image, store = docker.image("cloche-test:python"), tmp_path / "data"
    config = tmp_path / "owner.yaml"
    config.write_text("sandbox: {packages_hosts: [files.example]}\n")
    given = {
        "UV_DEFAULT_INDEX": "https://index.example/simple", "XDG_DATA_HOME": str(store), "CLOCHE_CONFIG": str(config),
        "DOCKER_HOST": docker.url,
    }  # fmt: skip
    with open_world() as world:
        ahead = world.run(AHEAD, image, env=given)
    assert ahead == ["harmless==1.0", "harmless-more==1.0"]
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    result = cloche.run("import harmless", packages=["harmless"], backend="docker", image=image, warm=False)
    assert (result.status, result.meta["packages"]) == ("ok", ahead), result.stderr
    forget_layers()


AHEAD = """
import asyncio
from cloche.execution.packages import install_ahead
found = asyncio.run(install_ahead(packages=["harmless"], backend="docker", image=ARGUMENT))
print(json.dumps(found.as_dict()["installed"]))
"""
