"""The commands of `kubectl` in the documents, for the small API server: a program that asks the test's own process."""

from __future__ import annotations

import base64
import json
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.harness.kubernetes_api import Cluster, path_of
from tests.harness.kubernetes_kubelet import Kubelet

PROGRAM = """#!{python} -IS
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as client:
    client.connect({path!r})
    client.sendall(json.dumps([os.getcwd(), sys.argv[1:]]).encode())
    client.shutdown(socket.SHUT_WR)
    answer = json.loads(b"".join(iter(lambda: client.recv(65536), b"")))
print(answer["printed"], end="", file=sys.stderr if answer["code"] else sys.stdout)
sys.exit(answer["code"])
"""
PATIENCE_S = 60.0


class Kubectl:
    """Answer the program `kubectl` in `folder`. A pod of a Deployment is started once, and not in place of another."""

    def __init__(self, cluster: Cluster, kubelet: Kubelet, folder: Path):
        self._cluster, self._kubelet = cluster, kubelet
        path = str(folder / "socket")
        (folder / "kubectl").write_text(PROGRAM.format(python=sys.executable, path=path))
        (folder / "kubectl").chmod(0o755)
        self._servers: list[socketserver.BaseServer] = []
        self._serve(socketserver.ThreadingUnixStreamServer(path, _handler(self._answer)))

    def _serve(self, server: socketserver.ThreadingUnixStreamServer | socketserver.ThreadingTCPServer) -> None:
        server.daemon_threads, server.block_on_close = True, False  # a forwarded port is open until the end
        self._servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        """Serve no longer."""
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def pods(self, app: str) -> dict[str, Any]:
        """Return the pods of a Deployment by name."""
        return {name: row for name, row in self._cluster.pods.items() if row["metadata"]["labels"].get("app") == app}

    def _answer(self, client: socket.socket) -> None:
        where, words = json.loads(b"".join(iter(lambda: client.recv(65536), b"")))
        try:
            answer = {"code": 0, "printed": self._run(Path(where), [*map(str, words)])}
        except (AssertionError, KeyError, OSError, StopIteration, subprocess.CalledProcessError) as error:
            answer = {"code": 1, "printed": f"kubectl {words}: {error!r}\n"}
        client.sendall(json.dumps(answer).encode())

    def _run(self, where: Path, words: list[str]) -> str:
        namespace = words.pop(words.index("-n") + 1)
        words.remove("-n")
        assert namespace == self._cluster.settings.namespace
        match words:
            case ["create", "secret", "generic", name, value]:
                key, _, text = value.removeprefix("--from-literal=").partition("=")
                self._make_secret(name, {key: text.encode()})
            case ["create", "secret", "tls", name, cert, key]:
                files = {"tls.crt": cert.removeprefix("--cert="), "tls.key": key.removeprefix("--key=")}
                self._make_secret(name, {key: (where / file).read_bytes() for key, file in files.items()})
            case ["apply", "-k", folder]:
                self._apply(where / folder)
            case ["rollout", "status", name]:
                self._wait(name.removeprefix("deployment/"))
            case ["exec", name, "--", *command]:
                return self._kubelet.exec(next(iter(self.pods(name.removeprefix("deployment/")))), command)
            case ["port-forward", name, port]:
                self._forward(name.removeprefix("service/"), *map(int, port.split(":")))
                threading.Event().wait()
            case _:
                raise AssertionError("unknown")
        return ""

    def _make_secret(self, name: str, values: dict[str, bytes]) -> None:
        path = f"/api/v1/namespaces/{self._cluster.settings.namespace}/secrets"
        data = {key: base64.b64encode(value).decode() for key, value in values.items()}
        self._cluster.put(path, {"kind": "Secret", "metadata": {"name": name}, "data": data})

    def _apply(self, folder: Path) -> None:
        for file in yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]:
            for row in yaml.safe_load_all((folder / file).read_text()):
                self._cluster.put(path_of(row), row)
                for number in range(row["spec"]["replicas"] if row["kind"] == "Deployment" else 0):
                    self._start(f"{row['metadata']['name']}-{number}", row["spec"]["template"])

    def _start(self, name: str, template: dict[str, Any]) -> None:
        row = {"metadata": {**template["metadata"], "name": name}, "spec": template["spec"], "status": {}}
        self._cluster.put(self._cluster.pods_path, row)
        self._cluster.created(self._cluster.pods_path, row)

    def _wait(self, app: str) -> None:
        """Wait until the readiness probes of all pods succeed."""
        for name in self.pods(app):
            ends = time.monotonic() + PATIENCE_S
            while not self._is_ready(name):
                assert time.monotonic() < ends, self._cluster.pods[name]
                time.sleep(0.05)

    def _is_ready(self, name: str) -> bool:
        row = self._cluster.pods[name]
        (container,) = row["spec"]["containers"]
        probe, (port,) = container["readinessProbe"]["httpGet"], container["ports"]
        address = f"https://{row['status'].get('podIP')}:{port['containerPort']}{probe['path']}"
        try:
            return httpx.get(address, verify=False, trust_env=False).status_code == 200
        except httpx.TransportError:
            return False

    def _forward(self, app: str, port: int, inside: int) -> None:
        address = next(iter(self.pods(app).values()))["status"]["podIP"]

        def pass_on(client: socket.socket) -> None:
            with socket.create_connection((address, inside)) as server:
                outward = threading.Thread(target=_copy, args=(server, client), daemon=True)
                outward.start()
                _copy(client, server)
                outward.join(PATIENCE_S)

        self._serve(socketserver.ThreadingTCPServer(("127.0.0.1", port), _handler(pass_on)))


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):  # either end may be gone
        for data in iter(lambda: source.recv(65536), b""):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


def _handler(work: Callable[[socket.socket], None]) -> type[socketserver.BaseRequestHandler]:
    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            work(self.request)

    return Handler
