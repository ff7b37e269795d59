"""Containers: a docker daemon of the tests' own with its certificates, a registry of images, and Cloche in a container.

The daemon has its own socket, its own data, and none of this machine's network. Images are made of packages that are
installed here, so nothing is fetched.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Name -> what `scripts/sandbox_image.py` makes it of.
SHELL = ("dash", "bash", "coreutils", "tar")
IMAGES: dict[str, tuple[str, ...]] = {
    "cloche-test:python": (*SHELL, "python3"),
    "cloche-test:sessions": (*SHELL, "python3", "nodejs"),
    "cloche-test:small": ("ruby", "--busybox", "/usr/bin/busybox"),
    "cloche-test:shell": ("--busybox", "/usr/bin/busybox"),  # at hand in a moment
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
        stacks = {"runsc": "none", "runsc-network": "host"} if runsc else {}
        runtimes = {name: {"path": runsc, "runtimeArgs": [f"--network={stack}"]} for name, stack in stacks.items()}
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

    `runsc` is a program to register as gVisor's runtimes, both of them; `options` are further words of the daemon's.
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
    DockerBackend().drain()
    assert daemon.is_clean(), f"left: {daemon.containers()} {daemon.volumes()}"


NAMES = {"server": "subjectAltName=IP:127.0.0.1", "client": "extendedKeyUsage=clientAuth"}


def make_certificates(folder: Path) -> Path:
    """Make an authority, and what a daemon and its callers show; a caller's folder is as docker wants it, `client`."""
    folder.mkdir()
    _openssl(
        "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
        "-subj", "/CN=tests", "-keyout", folder / "ca-key.pem", "-out", folder / "ca.pem",
    )  # fmt: skip
    for name, extension in NAMES.items():
        place = folder / name
        place.mkdir()
        (place / "extensions").write_text(extension)
        _openssl(
            "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", f"/CN={name}",
            "-keyout", place / "key.pem", "-out", place / "request.pem",
        )  # fmt: skip
        _openssl(
            "x509", "-req", "-days", "2", "-in", place / "request.pem", "-CA", folder / "ca.pem", "-CAcreateserial",
            "-CAkey", folder / "ca-key.pem", "-extfile", place / "extensions", "-out", place / "cert.pem",
        )  # fmt: skip
        (place / "ca.pem").write_bytes((folder / "ca.pem").read_bytes())
    return folder


def _openssl(*words: str | Path) -> None:
    subprocess.run(["openssl", *words], check=True, capture_output=True)


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


MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
CONFIG = "application/vnd.docker.container.image.v1+json"
LAYER = "application/vnd.docker.image.rootfs.diff.tar.gzip"  # which may be plain: docker looks
CHUNK_BYTES, PAUSE_S = 2 << 20, 0.02


class Registry:
    """Serve one image under any name and the tag `here`; `is_breaking` makes it hang up in the middle of a layer."""

    def __init__(self, image: Path):
        self.asked: list[str] = []
        self.is_breaking = False
        with tarfile.open(image) as archive:
            config, layer = (archive.extractfile(name) for name in ("config.json", "layer.tar"))
            assert config is not None
            assert layer is not None
            parts = {CONFIG: config.read(), LAYER: layer.read()}
        rows = {kind: {"mediaType": kind, "size": len(data), "digest": digest(data)} for kind, data in parts.items()}
        manifest = {"schemaVersion": 2, "mediaType": MANIFEST, "config": rows[CONFIG], "layers": [rows[LAYER]]}
        self.manifest = json.dumps(manifest).encode()
        self.blobs = {digest(data): data for data in parts.values()}
        self.digest = digest(self.manifest)
        registry = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                registry.answer(self)

            def do_HEAD(self) -> None:
                registry.answer(self)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name is the library's
                registry.asked.append(format % args)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.name = f"127.0.0.1:{self._server.server_address[1]}/cloche-test"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def answer(self, call: BaseHTTPRequestHandler) -> None:
        """Answer one request."""
        _, what, name = call.path.rsplit("/", 2)
        if call.path == "/v2/":
            self._send(call, b"{}", "application/json")
        elif what == "manifests" and name in ("here", self.digest):
            self._send(call, self.manifest, MANIFEST)
        elif what == "manifests" and name.startswith("sha256:"):  # a registry that lies
            self._send(call, self.manifest + b" ", MANIFEST)
        elif what == "blobs" and name in self.blobs:
            self._send(call, self.blobs[name], "application/octet-stream")
        else:
            said = {"errors": [{"code": "MANIFEST_UNKNOWN", "message": "manifest unknown"}]}
            self._send(call, json.dumps(said).encode(), "application/json", code=404)

    def _send(self, call: BaseHTTPRequestHandler, data: bytes, kind: str, *, code: int = 200) -> None:
        began = int(call.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        if began:  # docker goes on where a layer broke off
            code = 206
        call.send_response(code)
        if began:
            call.send_header("Content-Range", f"bytes {began}-{len(data) - 1}/{len(data)}")
        call.send_header("Content-Type", kind)
        call.send_header("Content-Length", str(len(data) - began))
        call.send_header("Docker-Distribution-Api-Version", "registry/2.0")
        if kind == MANIFEST:
            call.send_header("Docker-Content-Digest", digest(data))
        call.end_headers()
        if call.command == "HEAD":
            return
        for at in range(began, len(data), CHUNK_BYTES):
            if self.is_breaking and at > len(data) // 2:
                call.close_connection = True
                return
            call.wfile.write(data[at : at + CHUNK_BYTES])
            time.sleep(PAUSE_S)

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()


def digest(data: bytes) -> str:
    """Return what content is addressed by."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


@contextmanager
def open_registry(folder: Path, image: str) -> Iterator[Registry]:
    """Serve one of the tests' images."""
    target = folder / "image.tar"
    subprocess.run([sys.executable, ROOT / "scripts" / "sandbox_image.py", image, target, *IMAGES[image]], check=True)
    registry = Registry(target)
    target.unlink()
    try:
        yield registry
    finally:
        registry.close()
