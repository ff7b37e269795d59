"""A docker daemon of the tests' own: its own socket, its own data, none of this machine's network.

Images are made of packages that are installed here, so nothing is fetched.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Name -> what `scripts/sandbox_image.py` makes it of.
SHELL = ("dash", "bash", "coreutils", "tar")
IMAGES: dict[str, tuple[str, ...]] = {
    "cloche-test:python": (*SHELL, "python3"),
    "cloche-test:sessions": (*SHELL, "python3", "nodejs"),
    "cloche-test:small": ("ruby", "--busybox", "/usr/bin/busybox"),
    # What Cloche itself runs in, and its tests: with the programs that they call.
    "cloche-test:host": (*SHELL, "python3", "util-linux", "procps"),
    "cloche-test:engine": (*SHELL, "python3", "docker.io", "mount", "util-linux"),
    "cloche-test:all": (
        *SHELL, "python3", "nodejs", "ruby", "golang-go", "rustc", "mono-mcs", "mono-runtime", "gcc", "libc6-dev",
    ),
}  # fmt: skip
_OFF = ("--bridge=none", "--iptables=false", "--ip6tables=false", "--ip-forward=false", "--ip-masq=false")


class Daemon:
    """Hold one running daemon in a folder of its own."""

    def __init__(self, folder: Path, runsc: str = "", options: Sequence[str] = ()):
        self.folder = folder
        runtimes = {"runsc": {"path": runsc, "runtimeArgs": ["--network=none"]}} if runsc else {}
        (folder / "daemon.json").write_text(json.dumps({"runtimes": runtimes}))
        self.url = f"unix://{folder}/socket"
        self._loaded: set[str] = set()
        words = [
            f"--config-file={folder}/daemon.json",
            f"--host={self.url}",
            f"--data-root={folder}/data",
            f"--exec-root={folder}/run",
            f"--cgroup-parent={_group_of(folder)}",
        ]
        words += [f"--pidfile={folder}/pid", "--shutdown-timeout=2", *_OFF, *options]
        self._words = ["dockerd", *words]
        self.start()

    def start(self) -> None:
        """Start it; again, when it was stopped."""
        with open(self.folder / "log", "ab") as log:
            self._process = subprocess.Popen(self._words, stdout=log, stderr=log, start_new_session=True)

    def wait_until_ready(self) -> None:
        """Wait until it answers."""
        deadline = time.monotonic() + 60
        while subprocess.run(self.words("version"), capture_output=True, check=False).returncode != 0:
            if time.monotonic() > deadline or self._process.poll() is not None:
                raise RuntimeError(f"dockerd does not start: {(self.folder / 'log').read_text()[-2000:]}")
            time.sleep(0.1)

    def words(self, *words: str) -> list[str]:
        """Return a docker command for this daemon."""
        return ["docker", "--host", self.url, *words]

    def docker(self, *words: str) -> str:
        """Run a docker command and return what it printed."""
        return subprocess.run(self.words(*words), capture_output=True, text=True, check=True).stdout

    def image(self, name: str, programs: Sequence[Path] = ()) -> str:
        """Have one of IMAGES, and return its name."""
        if name not in self._loaded:
            target = self.folder / "image.tar"
            more = [word for program in programs for word in ("--program", str(program))]
            script = [sys.executable, str(ROOT / "scripts" / "sandbox_image.py"), name, str(target), *IMAGES[name]]
            subprocess.run([*script, *more], check=True)
            self.docker("load", "--quiet", "--input", str(target))
            target.unlink()
            self._loaded.add(name)
        return name

    def containers(self) -> list[str]:
        """Return the ids of all containers."""
        return self.docker("ps", "--all", "--quiet", "--no-trunc").split()

    def volumes(self) -> list[str]:
        """Return the names of all volumes."""
        return self.docker("volume", "ls", "--quiet").split()

    def has_containers(self, count: int, *, patience_s: float = 30.0) -> bool:
        """Wait until there are so many containers; False when there never are."""
        deadline = time.monotonic() + patience_s
        while len(self.containers()) != count:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        return True

    def is_clean(self, *, patience_s: float = 60.0) -> bool:
        """Wait until no container and no volume is left; False when some stay."""
        deadline = time.monotonic() + patience_s
        while self.containers() or self.volumes():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        return True

    def is_clean_after(self, clear_up: Callable[[], object], *, patience_s: float = 60.0, quiet_s: float = 3.0) -> bool:
        """Clear up until nothing has been left for a while; False when there always is something.

        A busy daemon still creates and starts what a dead caller ordered, seconds after that one's end.
        """
        deadline = time.monotonic() + patience_s
        clean_since = None
        while time.monotonic() < deadline:
            clear_up()
            if self.containers() or self.volumes():
                clean_since = None
            elif clean_since is None:
                clean_since = time.monotonic()
            elif time.monotonic() - clean_since > quiet_s:
                return True
            time.sleep(0.2)
        return False

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the daemon itself, not to what it started."""
        self._process.send_signal(number)

    def stop(self) -> None:
        """End it, with all that it started."""
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(60)
        self._process.kill()
        self._process.wait()


def _group_of(folder: Path) -> str:
    """Name the control group below which a daemon puts its containers: other daemons have theirs."""
    return f"/{folder.name}"


def _control_groups(name: str) -> list[str]:
    return [folder for folder, _, _ in os.walk("/sys/fs/cgroup") if os.path.basename(folder) == name]


@contextlib.contextmanager
def open_daemon(runsc: str = "", options: Sequence[str] = ()) -> Iterator[Daemon]:
    """Start a daemon, and leave the machine as it was. Skips the test, naming it, when something is missing.

    `runsc` is a program to register as the runtime of that name; `options` are further words of the daemon's.
    """
    needed = ("dockerd", "docker", "dpkg-query", *([runsc] if runsc else []))
    lacks = [name for name in needed if shutil.which(name) is None]
    lacks += ["the Python library docker"] if importlib.util.find_spec("docker") is None else []
    if lacks:
        pytest.skip(f"missing: {', '.join(lacks)} (make setup-system)")
    folder = Path(tempfile.mkdtemp(prefix="docker-", dir="/var/tmp"))
    daemon = Daemon(folder, shutil.which(runsc) or "" if runsc else "", options)
    try:
        daemon.wait_until_ready()
        yield daemon
    finally:
        daemon.stop()
        for group in _control_groups(folder.name):
            for inner, _, _ in os.walk(group, topdown=False):
                with contextlib.suppress(OSError):
                    os.rmdir(inner)
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def chosen(daemon: Daemon, monkeypatch: pytest.MonkeyPatch, cache: Path) -> Iterator[None]:
    """Let Cloche find a daemon, and know nothing of its images; afterwards nothing may be left on it."""
    from cloche.backends.docker.backend import DockerBackend

    monkeypatch.setenv("DOCKER_HOST", daemon.url)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setenv("CLOCHE_RUNSC", "none")  # what it does without a daemon has its own tests
    yield
    DockerBackend().cool_down()
    assert daemon.is_clean(), f"left: {daemon.containers()} {daemon.volumes()}"
