"""`cloche node` in a process of its own, with a coordinator's key: accounts of leases, and the coordinator's verbs."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cloche.backends.cloche.connections import ask
from cloche.backends.cloche.leased import _NodeBackend
from cloche.core.remote import LeasedPlace, RemoteAccount
from cloche.fleets.signing import LeaseClaim, Role, Signer
from tests.harness.commands import Command, imported_once
from tests.harness.service import environment

START_S, END_S = 60.0, 30.0
# As in a pod: an ordinary user, and no user namespaces.
POD = (
    "unshare", "--user", "--map-user=10001", "--keep-caps", "sh", "-c",
    'echo 0 >/proc/sys/user/max_user_namespaces; exec setpriv --ambient-caps=-all --inh-caps=-all "$@"', "sh",
)  # fmt: skip
MODULES = (
    "cloche.node.command", "cloche.cli.node", "cloche.backends.local.backend", "cloche.execution.sandbox",
    "cryptography.x509", "cryptography.hazmat.primitives.asymmetric.ed25519", "websockets.asyncio.server",
)  # fmt: skip


def lease_id(name: str, cpus: float = 64.0, mib: int = 65_536) -> str:
    """Return the id of a lease of these amounts, by default of more than a test takes."""
    return f"ls_{hashlib.sha256(name.encode()).hexdigest()[:20]}_{int(cpus * 1000)}_{mib}_{'0' * 16}"


class Node:
    """A node that runs, and the coordinator's signer."""

    def __init__(
        self, home: Path, *words: str, signer: Signer | None = None, variables: Mapping[str, str] | None = None,
        program: str = "cloche", before: Sequence[str] = (),
    ):  # fmt: skip
        self.signer = signer or Signer()
        self.home = home
        output = home / f"node-{time.monotonic_ns()}.out"
        command = ["node", "--listen", "127.0.0.1:0", "--public-key", self.signer.public_key, *words]
        environ = {**environment(home), **(variables or {})}
        self.process: Command | subprocess.Popen[bytes]
        with output.open("wb") as file, output.with_suffix(".err").open("wb") as errors:
            if variables or before:
                words_of_python = [*before, sys.executable, "-m", program, *command]
                self.process = subprocess.Popen(words_of_python, env=environ, cwd=home, stdout=file, stderr=errors)
            else:
                self.process = imported_once(*MODULES).start(command, env=environ, cwd=home, output=file.fileno())
        self.facts = self._wait(output)

    def _wait(self, output: Path) -> dict[str, Any]:
        ends = time.monotonic() + START_S
        while time.monotonic() < ends and self.process.poll() is None:
            for line in output.read_text().splitlines():
                if line.startswith("{") and line.endswith("}"):
                    return dict(json.loads(line))
            time.sleep(0.01)
        raise AssertionError(f"the node did not start: {output.read_text()}")

    @property
    def pid(self) -> int:
        """Return its process id."""
        return int(self.facts["pid"])

    def account(
        self, lease: str = "lease-1", *, role: Role = "lease", for_s: float = 60.0, signer: Signer | None = None,
        certificate: str = "", silence_s: float = 5.0,
    ) -> RemoteAccount:  # fmt: skip
        """Return the account of a lease at this node, by its id or a name, or of its coordinator."""
        lease = lease if lease.startswith("ls_") else lease_id(lease)
        claim = LeaseClaim(
            lease=lease, until=time.time() + for_s, certificate=certificate or self.facts["certificate"], role=role
        )
        place = LeasedPlace(
            engine="here", node="node-1", lease=lease, credential=(signer or self.signer).credential(claim)
        )
        return RemoteAccount(
            provider="cloche", url=self.facts["address"], certificate=self.facts["certificate"], place=place,
            silence_s=silence_s,
        )  # fmt: skip

    def backend(self, lease: str = "lease-1", **more: Any) -> _NodeBackend:
        """Return the backend of a lease."""
        return _NodeBackend(self.account(lease, **more), "")

    def ask(self, verb: str, **fields: Any) -> dict[str, Any]:
        """Call a verb as the coordinator; a lease may have a name."""
        if "lease" in fields and not fields["lease"].startswith("ls_"):
            fields["lease"] = lease_id(fields["lease"])
        return asyncio.run(ask(self.account("coordinator", role="coordinator"), verb, fields))

    def end(self, number: int = signal.SIGTERM) -> int:
        """End it by a signal, and return its exit code."""
        if number == signal.SIGKILL:
            os.kill(self.pid, number)
        else:
            self.process.send_signal(number)
        return self.process.wait(END_S)
