"""`cloche serve` on a node of the cluster, for callers outside of it: another Python, another Ray, or none.

Theory of operation: a detached actor keeps the service alive as its child. Its folder has the database, the certificate
with its key, and the port, so accounts outlive a service or an actor that was killed. Callers make their own keys, and
the cluster gets the hashes alone, since arguments and logs of its jobs are open to all of its users. A coordinator that
was killed is started again by Ray. Without one the fleet has ended, and the service ends with its folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import IO, Any
from urllib.parse import urlsplit

from cloche.core.errors import BackendUnavailable

from . import cluster
from .supervisor import environment, state_folder

SERVICE = "service"
LOOK_S, ENDS_S = 1.0, 10.0
ADMIT_S, READY_S, AGAIN_S = 60.0, 120.0, 0.2
JOINS = ("RAY_AUTH_", "RAY_TLS_", "RAY_USE_TLS")  # beginnings of variables by which a program joins the cluster
ADMITTED = "there is a key with this SHA-256"  # the answer to a caller whose first call was lost
MOST_LINES = 20  # of its log, which has links for browsers and so is not written anywhere
# Runs in a fresh interpreter, which becomes the service: a signal when the actor's thread ends (prctl(2)).
STARTER = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execv(sys.executable, [sys.executable, "-P", "-m", "cloche", "serve", *sys.argv[2:]])
"""


class ServiceSupervisor:
    """Keep the service of a fleet alive. Callers reach it at `host`; with port 0 it takes a free one, and keeps it.

    `variables` are further ones of the service.
    """

    def __init__(self, node: str, host: str, port: int, variables: Mapping[str, str]):
        self._folder = state_folder(f"service-{node}")
        self._host, self._port, self._variables = host, port, variables
        self._state: dict[str, str] = {}
        self._child: subprocess.Popen[str] | None = None
        self._lines: deque[str] = deque(maxlen=MOST_LINES)
        self._address = cluster.imported().get_runtime_context().gcs_address
        threading.Thread(target=self._supervise, daemon=True).start()

    def state(self) -> dict[str, str]:
        """Return the address and the hash of the certificate, or why it does not serve; nothing while it starts."""
        return self._state

    def admit(self, name: str, sha256: str) -> str:
        """Let the owner of a key use the service; return the failure, empty if there is none."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        words = ["-P", "-m", "cloche", "keys", "create", name, "--sha256", sha256, "--database", self._database]
        made = subprocess.run(
            [sys.executable, *words], env=self._environment(), stdin=subprocess.DEVNULL, capture_output=True,
            text=True, check=False, timeout=ADMIT_S,
        )  # fmt: skip
        if made.returncode and ADMITTED not in made.stderr:
            return made.stderr.strip().rpartition("\n")[2] or "its key was not stored"
        (self._folder / "has-key").touch()
        return ""

    @property
    def _database(self) -> str:
        return str(self._folder / "service.db")

    def _environment(self) -> dict[str, str]:
        return {**service_environment(os.environ, self._address), **self._variables}

    # In the thread.

    def _supervise(self) -> None:
        while has_fleet():
            try:
                self._look()
            except Exception as error:  # told to those who ask, and tried again
                self._state = {"reason": str(error)}
            time.sleep(LOOK_S)
        self._end()
        ray = cluster.imported()
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)

    def _look(self) -> None:
        """Start the service if it does not run. Without a key in the database it would make one itself."""
        has_key = (self._folder / "has-key").exists()
        if has_key and (self._child is None or self._child.poll() is not None):
            self._start()

    def _start(self) -> None:
        command = [sys.executable, "-I", "-S", "-c", STARTER, str(os.getpid()), *self._words()]
        self._child = child = subprocess.Popen(
            command, env=self._environment(), cwd=self._folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, errors="replace",
        )  # fmt: skip
        reader = threading.Thread(target=self._lines.extend, args=(child.stderr,), daemon=True)
        reader.start()
        with _opened(child.stdout) as stdout:
            line = stdout.readline()  # once it serves; nothing follows
        if not line:
            child.wait(ENDS_S)
            reader.join(ENDS_S)
            raise RuntimeError(self._lines[-1].strip() if self._lines else f"it ended with code {child.returncode}")
        server = json.loads(line)
        (self._folder / "port").write_text(str(urlsplit(server["address"]).port))
        self._state = {"address": server["address"], "certificate": server["certificate"]}

    def _words(self) -> list[str]:
        with contextlib.suppress(OSError, ValueError):
            self._port = self._port or int((self._folder / "port").read_text())
        return [
            "--host", self._host, "--port", str(self._port), "--database", self._database,
            "--self-signed", str(self._folder / "tls"), "--backend", "ray", "--accept-claimed", "--drain", "5s",
        ]  # fmt: skip

    def _end(self) -> None:
        """End the service, and remove its folder: keys and certificate are over."""
        if (child := self._child) is not None:
            child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(ENDS_S)
            child.kill()
        shutil.rmtree(self._folder, ignore_errors=True)


def _opened(stream: IO[str] | None) -> IO[str]:
    assert stream is not None  # noqa: S101 - it is a pipe
    return stream


def has_fleet() -> bool:
    """Tell whether there is a coordinator, also where Ray does not answer for a moment; blocks."""
    try:
        return cluster.actor(cluster.COORDINATOR) is not None
    except Exception:
        return True


def service_environment(variables: Mapping[str, str], address: str) -> dict[str, str]:
    """Return the environment of the service: of Ray's only how to join the cluster, and no account of Cloche's."""
    joins = {name: value for name, value in variables.items() if name.startswith(JOINS)}
    return {**environment(variables), **joins, "RAY_ADDRESS": address}


async def serve(variables: Mapping[str, str], *, name: str, sha256: str, port: int = 0) -> dict[str, str]:
    """Start the service of this fleet if it is missing, and admit a key; return its address and its certificate's hash.

    Raises BackendUnavailable.
    """
    ends = time.monotonic() + READY_S
    while True:
        try:
            return await _served(variables, name, sha256, port, ends)
        except cluster.imported().exceptions.RayError as error:  # that of an earlier fleet, which was about to end
            if time.monotonic() > ends:
                raise _unserved(str(error).partition("\n")[0]) from error
        await asyncio.sleep(AGAIN_S)


async def _served(variables: Mapping[str, str], name: str, sha256: str, port: int, ends: float) -> dict[str, str]:
    handle = await cluster.in_thread(_supervisor, port, dict(variables))
    if wrong := await cluster.answer(handle.admit.remote(name, sha256), ADMIT_S):
        raise _unserved(wrong)
    while not (state := await cluster.answer(handle.state.remote())).get("address"):
        if state or time.monotonic() > ends:
            raise _unserved(state.get("reason") or f"it did not start within {READY_S:g} s")
        await asyncio.sleep(AGAIN_S)
    return dict(state)


def _supervisor(port: int, variables: dict[str, str]) -> Any:  # noqa: ANN401 - a handle
    """Return the service's actor, a new one on this node if there is none; blocks."""
    ray = cluster.imported()
    from ray.util import get_node_ip_address  # pyright: ignore[reportMissingImports]
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # pyright: ignore[reportMissingImports]

    node = ray.get_runtime_context().get_node_id()
    remote = ray.remote(num_cpus=0, max_restarts=-1, max_concurrency=4)(ServiceSupervisor)
    options = {
        "name": SERVICE, "namespace": cluster.NAMESPACE, "lifetime": "detached", "get_if_exists": True,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
    }  # fmt: skip
    return remote.options(**options).remote(node, get_node_ip_address(), port, variables)


def _unserved(reason: str) -> BackendUnavailable:
    return BackendUnavailable(
        f"the fleet is not served outside of the cluster: {reason}.",
        remedy="It is a process on this node, whose Python needs \"pip install 'cloche[ray,server]'\".",
    )
