"""Two nodes with folders of their own: a sandbox goes where its packages are."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import cloche
from cloche.backends.cloche.leased import LeasedBackend
from cloche.backends.cloche.links import link_to
from cloche.core.fleet import Fleet
from cloche.core.remote import RemoteAccount
from cloche.fleets.coordinator import Coordinator
from cloche.fleets.engine import EngineNode
from cloche.fleets.leases import Leases
from cloche.fleets.local import LocalEngine
from cloche.fleets.signing import Signer
from tests.harness.node import Node
from tests.harness.packages import PackageIndex, own_index

pytestmark = pytest.mark.usefixtures("settings_of_nobody")
PATIENCE_S = 60.0


class TwoNodes(LocalEngine):
    """An engine whose machines are there already."""

    def __init__(self, nodes: Sequence[Node]):
        super().__init__()
        self._nodes = nodes

    async def nodes(self) -> Sequence[EngineNode]:
        return [
            EngineNode(
                id=f"n{number}",
                cpus=4.0,
                memory_bytes=4 << 30,
                address=node.facts["address"],
                certificate=node.facts["certificate"],
                boot=node.facts["boot"],
            )
            for number, node in enumerate(self._nodes)
        ]


class TwoNodesBackend(LeasedBackend):
    """A backend over these nodes, with a coordinator of its own."""

    name, package = "two-nodes", "websockets"

    def __init__(self, nodes: Sequence[Node]):
        super().__init__(RemoteAccount(provider=self.name))
        self._nodes = nodes
        self.leases = Leases(lambda: self.connect(self._checked()))
        self.coordinators: list[Coordinator] = []

    async def connect(self, account: RemoteAccount) -> Fleet:
        self.coordinators.append(Coordinator(TwoNodes(self._nodes), link_to, signer=self._nodes[0].signer))
        await self.coordinators[-1].up()
        return self.coordinators[-1]

    def _leases(self) -> Leases:
        return self.leases

    def lose_coordinator(self) -> None:
        """Let the coordinator stop; the leases stay."""
        assert self.leases._loop is not None
        asyncio.run_coroutine_threadsafe(self.coordinators[-1].close(), self.leases._loop).result(PATIENCE_S)


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[list[Node], PackageIndex]]:
    """Serve two nodes with one index, and a store each."""
    signer, nodes = Signer(), list[Node]()
    with own_index(tmp_path, monkeypatch) as index:
        try:
            for name in ("a", "b"):
                (home := tmp_path / name).mkdir()
                variables = {
                    "UV_DEFAULT_INDEX": index.url, "PYTHONPATH": os.pathsep.join(sys.path),
                    "XDG_DATA_HOME": str(home / "data"),
                }  # fmt: skip
                nodes.append(Node(home, signer=signer, variables=variables, program="tests.harness.node_outside"))
            yield nodes, index
        finally:
            for node in nodes:
                node.end()


def place_of(result: Any) -> str:
    """Return the node of a run."""
    assert result.ok, result.stderr
    return str(result.meta["remote"]["node"])


@pytest.mark.timeout(180)
def test_a_sandbox_goes_where_its_packages_are(nodes: tuple[list[Node], PackageIndex]) -> None:
    """Though that node is the more loaded one; also by a coordinator that starts anew and learns it from the nodes."""
    served, index = nodes
    index.add("one")
    backend = TwoNodesBackend(served)
    run: dict[str, Any] = {"code": "import one", "packages": ["One"]}
    first = place_of(cloche.run(**run, backend=backend))
    node = served[int(first[1:])]
    ends = time.monotonic() + PATIENCE_S
    while not node.ask("node.status")["digests"]:
        assert time.monotonic() < ends, "the node does not say that it has the package"
        time.sleep(0.1)
    with cloche.Sandbox(live=True, packages=["one"], backend=backend) as loads:
        assert place_of(loads.exec(["true"])) == first
        assert place_of(cloche.run("1", backend=backend)) != first
        assert place_of(cloche.run(**run, backend=backend)) == first
        backend.lose_coordinator()
        later = TwoNodesBackend(served)
        assert place_of(cloche.run(**run, backend=later)) == first
        assert place_of(cloche.run("1", backend=later)) != first
        later.leases.close()
    backend.leases.close()
    assert len(index.downloads()) == 1
