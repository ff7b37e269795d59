"""A sandbox that is set up by a manifest of a development environment: real sandboxes, and an index on loopback."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import cloche
from cloche.core.errors import ClocheError, InvalidRequest
from cloche.keeper import registry
from cloche.records.devenv import DevEnvManifest, Setup
from cloche.records.provision import Provisioned, provision
from tests.harness.npm import serving_npm
from tests.harness.packages import serving_packages

pytestmark = pytest.mark.usefixtures("settings_of_nobody", "downloads_outside")


@pytest.fixture(autouse=True)
def own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a store of packages, and no index but the test's."""
    for name in [name for name in os.environ if name.lower().startswith(("pip_", "uv_", "npm_", "netrc"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """Return a folder with a program, and with what a stranger may have put beside it."""
    folder = tmp_path / "shop"
    (folder / "src").mkdir(parents=True)
    (folder / "src" / "main.py").write_text("print('from the workspace')\n")
    (folder / "run.sh").write_text("#!/bin/sh\necho run\n")
    (folder / "run.sh").chmod(0o755)
    for name in (".git", "node_modules", "src/__pycache__"):
        (folder / name).mkdir()
        (folder / name / "inside").write_text("x")
    (tmp_path / "secret").write_text("secret")
    (folder / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(folder / "fifo")
    return folder


@contextmanager
def provisioned(manifest: DevEnvManifest, folder: Path, **options: Any) -> Iterator[Provisioned]:
    """Provision, and end the sandbox afterwards."""
    at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        made = asyncio.run(provision(manifest, folder=at, keep="5m", **options))
    finally:
        os.close(at)
    try:
        yield made
    finally:
        with suppress(ClocheError), cloche.Sandbox.attach(made.sandbox) as sandbox:
            sandbox.kill()


def manifest_of(*setup: tuple[str, ...] | Setup, **more: Any) -> DevEnvManifest:
    """Return a manifest with these commands."""
    steps = tuple(one if isinstance(one, Setup) else Setup(run=one) for one in setup)
    return DevEnvManifest(name="Shop_1", created_at="2026-01-31T12:00:00Z", setup=steps, **more)


def test_a_sandbox_is_set_up_by_a_manifest(workspace: Path) -> None:
    """The workspace's files are in a live sandbox on, pip's packages in a layer; each step says how it went.

    A manager that is missing and a command that fails are errors of their steps. Nothing outside came along, and what
    the manifest asks for above the operator's settings it does not get.
    """
    assert (workspace / "link").read_text() == "secret"  # whoever follows it finds it
    (workspace / "requirements.txt").write_text("one==1.0  # pinned\n")
    manifest = manifest_of(
        ("pip", "install", "-r", "requirements.txt"),
        Setup(run=("sh", "-c", "./run.sh && echo $MODE > made"), network=("evil.example",)),
        Setup(run=("yarn", "install"), network=()),
        Setup(run=("sh", "-c", "echo why >&2; exit 3"), network=()),
        env={"MODE": "debug"},
        limits={"memory": "8g", "pids": 40},
    )
    with serving_packages() as index, pytest.MonkeyPatch.context() as patch:
        index.add("one")
        patch.setenv("UV_DEFAULT_INDEX", index.url)
        with (
            provisioned(manifest, workspace, network_allow=["a.example"]) as made,
            cloche.Sandbox.attach(made.sandbox) as sandbox,
        ):
            found = sandbox.exec(["find", ".", "-mindepth", "1"]).stdout.split()
            said = sandbox.exec(["python3", "-c", "import one; print(one.VERSION)"])
            limits, network = sandbox.limits, sandbox.policy.network
            assert sandbox.read_file("made") == b"debug\n"

    assert [step.error for step in made.steps[:2]] == ["", ""]
    assert made.steps[2].error.startswith("there is no yarn in this sandbox; ")
    assert made.steps[3].error == "error, exit code 3: why"
    assert made.as_dict()["steps"][3]["status"] == "error"
    assert made.sandbox.startswith("shop-1-")
    assert said.stdout == "1.0\n", said.stderr
    assert sorted(found) == ["./made", "./requirements.txt", "./run.sh", "./src", "./src/main.py"]
    assert (limits.pids, network) == (40, "off")
    assert [note.partition(":")[0] for note in made.notes] == ["limits.memory", "network", "workspace"]


def test_packages_of_npm_come_as_the_sandbox_is_opened(workspace: Path, tmp_path: Path) -> None:
    """`npm ci` brings the locked versions; where they cannot be had the step says why, and the sandbox is there."""
    lock = {"packages": {"node_modules/one": {"version": "1.0.0"}, "node_modules/two": {"version": "1.0.0"}}}
    (workspace / "package.json").write_text('{"dependencies": {"one": "^1"}}')
    (workspace / "package-lock.json").write_text(json.dumps(lock))
    with serving_npm() as served, pytest.MonkeyPatch.context() as patch:
        (tmp_path / "npmrc").write_text(f"registry={served.url}/\n")
        patch.setenv("NPM_CONFIG_USERCONFIG", str(tmp_path / "npmrc"))
        served.add("one", "1.0.0", files={"index.js": "module.exports = 'locked'\n"})
        served.add("one", "1.1.0", files={"index.js": "module.exports = 'newest'\n"})
        locked = manifest_of(("npm", "ci"))
        with provisioned(locked, workspace) as made, cloche.Sandbox.attach(made.sandbox) as sandbox:
            said = sandbox.exec(["node", "-e", "console.log(require('one'))"])
        (workspace / "package.json").write_text('{"dependencies": {"one": "https://evil.example/one.tgz"}}')
        free = manifest_of(("npm", "install"))
        with provisioned(free, workspace) as refused, cloche.Sandbox.attach(refused.sandbox) as sandbox:
            assert sandbox.exec(["cat", "run.sh"]).ok

    assert made.ok, made.steps
    assert said.stdout == "locked\n", said.stderr
    assert "names a place to download from" in refused.steps[0].error


def test_nothing_is_left_of_a_sandbox_that_was_not_set_up(workspace: Path) -> None:
    """A workspace that is larger than the sandbox is refused, and its sandbox has gone."""
    with open(workspace / "large", "wb") as file:
        os.truncate(file.fileno(), 1 << 40)
    before = {one.name for one in registry.found()}
    with (
        pytest.raises(InvalidRequest, match="workspace: 'the workspace' has more than"),
        provisioned(manifest_of(), workspace),
    ):
        pass
    assert {one.name for one in registry.found()} <= before
