"""The docker backend on daemons that are named: over TLS, by a variable and by docker's contexts."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import cloche
from cloche.backends.docker.backend import DockerBackend
from cloche.backends.docker.daemon import connect
from tests.harness.containers import Daemon, make_certificates, open_daemon

pytestmark = [pytest.mark.soak, pytest.mark.root, pytest.mark.container]
PYTHON = "cloche-test:python"


@dataclass(frozen=True, slots=True)
class Remote:
    """Hold a daemon that listens on TLS: where, and the folder of its certificates."""

    daemon: Daemon
    url: str
    certificates: Path

    def variables(self) -> dict[str, str]:
        """Return what names it, as docker's own command wants it."""
        return {
            "DOCKER_HOST": self.url, "DOCKER_TLS_VERIFY": "1", "DOCKER_CERT_PATH": str(self.certificates / "client"),
        }  # fmt: skip


def port_that_nobody_gets() -> int:
    """Return a port that is free, and that the kernel gives to nobody who asks for any."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in random.sample(range(first // 2, first), 100):
        with socket.socket() as trial:
            try:
                trial.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("no port is free")


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Remote]:
    """Start a daemon that talks to those alone who show a certificate of its authority's."""
    if shutil.which("openssl") is None:
        pytest.skip("missing: openssl (make setup-system)")
    folder = make_certificates(tmp_path_factory.mktemp("tls") / "certificates")
    port = port_that_nobody_gets()
    options = [f"--host=tcp://127.0.0.1:{port}", "--tlsverify", f"--tlscacert={folder}/ca.pem"]
    options += [f"--tlscert={folder}/server/cert.pem", f"--tlskey={folder}/server/key.pem"]
    with open_daemon(options=options) as daemon:
        daemon.image(PYTHON)
        daemon.image("cloche-test:small")
        yield Remote(daemon, f"tcp://127.0.0.1:{port}", folder)


@pytest.fixture
def remote(started: Remote, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Remote]:
    """Give it to a test that names it by itself; afterwards nothing may be left on it."""
    for name in ("DOCKER_HOST", "DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH", "DOCKER_CONTEXT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "nothing"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CLOCHE_RUNSC", "none")
    yield started
    DockerBackend().drain()
    assert started.daemon.is_clean(), f"left: {started.daemon.containers()} {started.daemon.volumes()}"


@pytest.fixture
def named(remote: Remote, monkeypatch: pytest.MonkeyPatch) -> Remote:
    """Name it by the variables."""
    for name, value in remote.variables().items():
        monkeypatch.setenv(name, value)
    return remote


def test_a_run_over_tls(named: Remote) -> None:
    """Code, files and output travel in both directions, however much it is, and a warm run follows."""
    data = os.urandom(3 << 20)
    code = "data = open('in', 'rb').read(); open('out', 'wb').write(data[::-1]); print(len(data)); print('x' * 50_000)"
    result = cloche.run(code, backend="docker", image=PYTHON, files={"in": data}, require="jail")
    assert result.stdout == f"{len(data)}\n{'x' * 50_000}\n"
    assert [record.sha256 for record in result.files] == [hashlib.sha256(data[::-1]).hexdigest()]
    with cloche.Sandbox(live=False, backend="docker", image=PYTHON) as sandbox:
        sandbox.write_file("f", data)
        assert sandbox.run("print(len(open('f', 'rb').read()))").stdout == f"{len(data)}\n"
        assert sandbox.read_file("f", max_bytes=1 << 23) == data
    assert connect().is_encrypted


def test_limits_hold_over_tls(named: Remote) -> None:
    """A time-out kills, a flood is cut, and neither waits for the other direction."""
    result = cloche.run("while True: pass", backend="docker", image=PYTHON, timeout=1, warm=False)
    assert (result.timed_out, result.exit_code) == (True, -1)
    result = cloche.run("while True: print('x' * 10_000)", backend="docker", image=PYTHON, warm=False)
    assert str(result.status) == "output_limit"


def test_a_session_over_tls(named: Remote) -> None:
    """Its cells, its values, its output as it comes, and an interrupt that keeps its state."""
    with cloche.Sandbox(live=False, backend="docker", image=PYTHON) as sandbox:
        session = sandbox.session()
        session.run("x = 41")
        assert session.run("x + 1").value == 42
        result = session.run("while True: pass", timeout=1)
        assert (result.timed_out, result.meta["state"]) == (True, "kept")
        seen: list[bytes] = []
        session.run("print(x)", on_output=lambda _, data: seen.append(data))
        assert seen == [b"41\n"]


def test_an_image_with_a_shell_alone_over_tls(named: Remote) -> None:
    """There standard input and files have an end as well, though the connection's one direction cannot be closed."""
    with cloche.Sandbox(live=False, backend="docker", image="cloche-test:small") as sandbox:
        sandbox.write_file("in", b"given\n" * 50_000)
        result = sandbox.run("cat in - | wc -l; echo new > out; (sleep 300 &); exit 3", language="bash", stdin="one\n")
        assert (result.stdout.strip(), result.exit_code) == ("50001", 3), result
        assert sandbox.read_file("out") == b"new\n"
        assert sandbox.run("cat; exit 4", language="bash").exit_code == 4
        result = sandbox.run("head -n 1; exit 5", language="bash", stdin=b"first\n" + bytes(4 << 20))
        assert (result.stdout, result.exit_code) == ("first\n", 5)


def test_a_killed_caller_over_tls_leaves_nothing(named: Remote) -> None:
    """Its containers hear that it is gone."""
    code = (
        "import cloche, sys\n"
        "cloche.run('print(1, flush=True); import time; time.sleep(600)', backend='docker', image=sys.argv[1],\n"
        "           timeout=600, warm=False, on_output=lambda *_: print('up', flush=True))"
    )
    caller = subprocess.Popen([sys.executable, "-c", code, PYTHON], stdout=subprocess.PIPE)
    assert caller.stdout is not None
    assert caller.stdout.readline() == b"up\n"
    caller.kill()
    caller.wait()
    caller.stdout.close()
    assert named.daemon.is_clean()


def test_without_a_certificate_nobody_is_let_in(remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is a daemon trusted that shows none of the authority's; the error names the daemon and what was missing."""

    def refusal(**variables: str) -> str:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(cloche.BackendUnavailable) as caught:
            cloche.run("print(1)", backend="docker", image=PYTHON)
        return str(caught.value)

    assert "HTTPS server" in refusal(DOCKER_HOST=remote.url)
    nothing = str(remote.certificates / "nothing")
    said = refusal(DOCKER_HOST=remote.url, DOCKER_TLS_VERIFY="1", DOCKER_CERT_PATH=nothing)
    assert "certificates" in said
    assert "DOCKER_CERT_PATH names a folder with ca.pem" in said
    stranger = make_certificates(remote.certificates.parent / "stranger") / "client"
    said = refusal(DOCKER_HOST=remote.url, DOCKER_TLS_VERIFY="1", DOCKER_CERT_PATH=str(stranger))
    assert remote.url in said
    assert "certificate verify failed" in said
    mixed = remote.certificates.parent / "mixed"  # trusts the daemon, and is nobody to it
    shutil.copytree(stranger, mixed)
    shutil.copy(remote.certificates / "ca.pem", mixed / "ca.pem")
    said = refusal(DOCKER_HOST=remote.url, DOCKER_TLS_VERIFY="1", DOCKER_CERT_PATH=str(mixed))
    assert remote.url in said


def test_a_context_names_the_daemon(remote: Remote, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One that is made and chosen with docker's own command, chosen there or in the environment."""
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "config"))
    (tmp_path / "config").mkdir()
    client = remote.certificates / "client"
    ends = f"host={remote.url},ca={client}/ca.pem,cert={client}/cert.pem,key={client}/key.pem"
    for name, words in {"far": ends, "near": f"host={remote.daemon.url}"}.items():
        subprocess.run(["docker", "context", "create", name, "--docker", words], check=True, capture_output=True)
    subprocess.run(["docker", "context", "use", "far"], check=True, capture_output=True)
    assert cloche.run("print(1)", backend="docker", image=PYTHON, warm=False).stdout == "1\n"
    assert connect().where == remote.url
    monkeypatch.setenv("DOCKER_CONTEXT", "near")
    assert connect().where == remote.daemon.url
    assert cloche.run("print(1)", backend="docker", image=PYTHON, warm=False).stdout == "1\n"
    for name, value in remote.variables().items():
        monkeypatch.setenv(name, value)
    assert connect().is_encrypted  # DOCKER_HOST goes before


@pytest.mark.parametrize("has_config", [True, False])
def test_a_context_that_is_not_there_is_not_another_daemon(
    remote: Remote, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, has_config: bool
) -> None:
    """A name that nobody has is an error with the remedy, never another daemon; the working directory is not asked."""
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "config"
    monkeypatch.setenv("DOCKER_CONFIG", str(config))
    config.mkdir()
    if has_config:
        (config / "config.json").write_text("{}")
    else:  # the SDK would take these
        subprocess.run(
            ["docker", "context", "create", "far", "--docker", f"host={remote.daemon.url}"], check=True,
            capture_output=True, env={**os.environ, "DOCKER_CONFIG": str(tmp_path)},
        )  # fmt: skip
        assert (tmp_path / "contexts").exists()
    monkeypatch.setenv("DOCKER_CONTEXT", "far")
    with pytest.raises(cloche.BackendUnavailable, match=r"context 'far' cannot be used.*docker context ls"):
        cloche.run("print(1)", backend="docker", image=PYTHON)
