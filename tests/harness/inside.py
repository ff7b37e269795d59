"""Cloche in a container of the tests' own daemon: its source and its packages, shown read-only."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from tests.harness.containers import ROOT, Daemon

ENVIRONMENT = {
    "PYTHONPATH": "/opt/cloche/src:/opt/packages",
    "PYTHONDONTWRITEBYTECODE": "1",
    "HOME": "/tmp",
    "CI": "true",
}
# What a daemon in a container needs; `--privileged` asks for all capabilities, and a test machine may lack one.
FOR_A_DAEMON = (
    "--cap-add=SYS_ADMIN", "--cap-add=NET_ADMIN", "--cap-add=SYS_PTRACE", "--security-opt=seccomp=unconfined",
    "--security-opt=systempaths=unconfined", "--device-cgroup-rule=a *:* rwm", "--volume=/var/lib/docker",
)  # fmt: skip
# Starts one of its own, loads an image into it, and goes on as whatever it is told.
WITH_A_DAEMON = """
export PATH=$PATH:/usr/sbin:/sbin
for place in /sys/fs/cgroup /sys/fs/cgroup/*; do
    mountpoint -q $place && mount -o remount,rw,bind $place
done
dockerd --bridge=none --iptables=false --ip6tables=false --ip-forward=false --ip-masq=false \\
    --storage-driver=$1 >/tmp/log 2>&1 &
daemon=$!
for _ in $(seq 150); do docker version >/dev/null 2>&1 && break; sleep 0.2; done
docker load --quiet --input /image.tar >&2 || { cat /tmp/log >&2; exit 99; }
shift
"$@"
code=$?
for _ in $(seq 150); do [ -z "$(docker ps --all --quiet; docker volume ls --quiet)" ] && break; sleep 0.2; done
docker ps --all --quiet >&2
docker volume ls --quiet >&2
kill $daemon
wait $daemon
exit $code
"""


def lay_out(folder: Path) -> Path:
    """Copy what a container is to be shown, readable by whoever runs in it."""
    for name in ("src", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "CHANGELOG.md"):
        shutil.copy(ROOT / name, folder / name)
    for path in [folder, *folder.rglob("*")]:
        path.chmod(path.stat().st_mode | (0o755 if path.is_dir() else 0o444))
    return folder


def run_inside(
    daemon: Daemon,
    project: Path,
    words: Sequence[str],
    *,
    image: str,
    options: Sequence[str] = (),
    timeout_s: int = 120,
) -> subprocess.CompletedProcess[str]:
    """Run words in a plain container, with nothing but `options` beyond docker's defaults."""
    return subprocess.run(
        command_inside(daemon, project, words, image=image, options=options),
        capture_output=True, text=True, check=False, timeout=timeout_s,
    )  # fmt: skip


def command_inside(
    daemon: Daemon, project: Path, words: Sequence[str], *, image: str, options: Sequence[str] = ()
) -> list[str]:
    """Return the command that runs words in a plain container."""
    shown = {project: "/opt/cloche", Path(sysconfig.get_path("purelib")): "/opt/packages"}
    given = [f"--volume={place}:{where}:ro" for place, where in shown.items()]
    given += [f"--env={name}={value}" for name, value in ENVIRONMENT.items()]
    return daemon.words("run", "--rm", "--workdir=/opt/cloche", *given, *options, image, *words)
