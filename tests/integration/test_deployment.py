"""How the service is deployed: the systemd unit is valid and leaves a jail what it needs; the image runs."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.harness.containers import ROOT, Daemon

DEPLOY = ROOT / "deploy"
PATIENCE_S = 60
# What `ProtectSystem=full` and `ProtectHome=yes` do; and what ProtectKernelTunables would do besides.
MOUNTS = """
set -e
mount --make-rslave /
for folder in /usr /etc; do mount --bind $folder $folder; mount -o remount,bind,ro $folder; done
mount -t tmpfs -o mode=0 tmpfs /home
"""
TUNABLES = "mount --bind /proc/sys /proc/sys; mount -o remount,bind,ro /proc/sys\n"
ASK = """
import http.client, json, sys
asked = json.dumps({"code": "print(6 * 7)"})
service = http.client.HTTPConnection("127.0.0.1", 8470, timeout=60)
headers = {"Authorization": "Bearer " + sys.argv[1], "Content-Type": "application/json"}
service.request("POST", "/api/code/exec", asked, headers)
print(service.getresponse().read().decode())
"""


def verify(unit: Path) -> list[str]:
    """Return what `systemd-analyze verify` says of a unit."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("missing: systemd-analyze (Debian's package systemd)")
    command = ["systemd-analyze", "verify", "--man=no", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return [*done.stderr.splitlines(), *([f"exit code {done.returncode}"] if done.returncode else [])]


def test_the_unit_is_valid(tmp_path: Path) -> None:
    """Every key and value of it is known to systemd, but for one that this machine's may be too old for."""
    unit = tmp_path / "cloche.service"
    text = (DEPLOY / "cloche.service").read_text().replace("/opt/cloche/bin/cloche", sys.executable)
    unit.write_text(text.replace("KillMode=process", "KillMode=nobody\nNoSuchKey=1"))
    assert len(verify(unit)) >= 2
    unit.write_text(text)
    assert [line for line in verify(unit) if "'DelegateSubgroup'" not in line] == []


def test_the_unit_lets_keepers_live_and_takes_nothing_from_jails() -> None:
    """Only the service's own process is ended, its groups are its own, and no filter takes `newuidmap` its rights."""
    lines = (DEPLOY / "cloche.service").read_text().splitlines()
    keys = dict(line.partition("=")[::2] for line in lines if re.match(r"[A-Z]\w+=", line))
    assert (keys["KillMode"], keys["Delegate"], keys["RuntimeDirectoryPreserve"]) == ("process", "yes", "yes")
    implied = {"NoNewPrivileges", "DynamicUser", "SystemCallFilter", "PrivateDevices", "MemoryDenyWriteExecute"}
    taken = {"RestrictNamespaces", "PrivateUsers", "ProtectKernelTunables", "ProtectProc", "ProtectControlGroups"}
    assert not (implied | taken | {"PrivateTmp"}) & keys.keys()


@pytest.mark.root
def test_a_jail_starts_behind_what_the_unit_mounts(tmp_path: Path) -> None:
    """As it does not where the kernel's settings are shown for reading only, which is why the unit leaves that out."""
    run = f"{sys.executable} -m cloche run --require jail -c 'print(6 * 7)'"
    command = ["unshare", "--mount", "sh", "-c"]
    done = subprocess.run([*command, MOUNTS + run], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.stdout == "42\n", done.stderr
    done = subprocess.run(
        [*command, MOUNTS + TUNABLES + run], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 125, done.stdout
    assert re.search("Read-only file system|only confined can be reached", done.stderr), done.stderr


def needed(*names: str) -> set[str]:
    """Return the distributions that some need, extras included; those that are not installed here are for others."""
    found, pending = set(), [Requirement(name) for name in names]
    while pending:
        one = pending.pop()
        extras = one.extras or {""}
        try:
            wanted = metadata.distribution(one.name)
        except metadata.PackageNotFoundError:
            continue
        if one.name in found and not one.extras:
            continue
        found.add(one.name)
        for text in wanted.requires or ():
            below = Requirement(text)
            if below.marker is None or any(below.marker.evaluate({"extra": extra}) for extra in extras):
                pending.append(below)
    return found


def copy_distributions(names: set[str], target: Path) -> None:
    """Copy the files of installed distributions, as another Python of this version finds them."""
    for name in names:
        for file in metadata.distribution(name).files or ():
            source = Path(str(file.locate()))
            if ".." not in file.parts and "__pycache__" not in file.parts and source.is_file():
                place = target / file
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, place)


@pytest.fixture(scope="module")
def image(docker_daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Build the service's image upon one that has Python and all packages but Cloche; nothing is fetched."""
    base, context = tmp_path_factory.mktemp("base"), tmp_path_factory.mktemp("context")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = needed(*project["dependencies"], *extras["server"], *extras["otel"], "hatchling", "pip")
    copy_distributions(wanted, base / "packages")
    (base / "Dockerfile").write_text(
        f"FROM {docker_daemon.image('cloche-test:host')}\n"
        f"COPY packages /usr/local/lib/python3.{sys.version_info.minor}/dist-packages\n"
    )
    docker_daemon.docker("build", "--quiet", "--tag", "cloche-test:base", str(base))
    for name in ("pyproject.toml", "README.md", "LICENSE", ".dockerignore"):
        shutil.copy(ROOT / name, context / name)
    shutil.copytree(ROOT / "src", context / "src", ignore=shutil.ignore_patterns("__pycache__"))
    options = "--no-index --no-deps --no-build-isolation"
    docker_daemon.docker(
        "build", "--quiet", "--network=none", "--file", str(DEPLOY / "Dockerfile"), "--tag", "cloche-test:service",
        "--build-arg=BASE=cloche-test:base", f"--build-arg=PIP_OPTIONS={options}", str(context),
    )  # fmt: skip
    yield "cloche-test:service"
    docker_daemon.docker("image", "rm", "--force", "cloche-test:service", "cloche-test:base")


@pytest.mark.soak
def test_the_image_serves(docker_daemon: Daemon, image: str) -> None:
    """It is healthy by its own check, which asks /health over loopback, runs code, and ends orderly."""
    run = ["run", "--detach", "--network=none", "--health-interval=1s", image]
    container = docker_daemon.docker(*run).strip()
    try:
        deadline = time.monotonic() + PATIENCE_S
        while docker_daemon.docker("inspect", "--format={{.State.Health.Status}}", container).strip() != "healthy":
            assert time.monotonic() < deadline, docker_daemon.docker("logs", container)
            time.sleep(0.2)
        logs = subprocess.run(docker_daemon.words("logs", container), capture_output=True, text=True, check=True)
        key = re.search(r"shown once: (\S+)", logs.stderr)
        assert key is not None
        result = json.loads(docker_daemon.docker("exec", container, "python3", "-c", ASK, key[1]))
        assert (result["stdout"], result["status"], result["meta"]["level"]) == ("42\n", "ok", "confined")
        docker_daemon.docker("stop", container)
        assert docker_daemon.docker("inspect", "--format={{.State.ExitCode}}", container).strip() == "143"
    finally:
        docker_daemon.docker("rm", "--force", "--volumes", container)
