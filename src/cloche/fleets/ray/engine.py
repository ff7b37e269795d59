"""Nodes and blocks of a Ray cluster, for the coordinator. See `fleets/engine.py`.

A block is a placement group that outlives its maker, pinned to one node by that node's id: Ray moves a group that is
not pinned to another node after a loss, and calls it created. A group reserves memory, and processors only with
`reserve_cpu`: the tasks of a cluster may hold every CPU and run code in sandboxes all the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from cloche.core.errors import BackendUnavailable
from cloche.core.fleet_settings import FleetSettings

from ..engine import EngineNode, ReservedBlock
from . import cluster, supervisor

NODE_LABEL = "ray.io/node-id"
ASK_S, STATE_S = 1.0, 3.0
START_S = 60.0  # of a supervisor: an actor takes seconds, more on a busy machine
PINNED_S, STEP_S = 10.0, 1.0  # until a block on a node with room is there; how long a thread waits at once
STOP_S, EARLIER_S = 30.0, 10.0
LEAST_CPUS = 0.001  # a group must ask for something
_DONE, _HOPELESS = "CREATED", "INFEASIBLE"


class RayEngine:
    """Implement FleetEngine on the cluster that this process has joined."""

    name, has_blocks = "ray", True

    def __init__(self, settings: FleetSettings, version: str, words: Sequence[str] = ()):
        self.scaling_s, self._settings, self._version = settings.scaling_s, settings, version
        self._words, self._key = list(words), ""
        self._servers: dict[str, Mapping[str, Any]] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._groups: dict[str, Any] = {}

    async def start(self, public_key: str) -> None:
        """Begin to start a server with this key on each node; those that an earlier coordinator started answer first.

        They have its leases, and the coordinator asks for those once. What a fleet with another key left is ended: each
        supervisor ends a server with other words than its own.
        """
        self._key = public_key
        names = await cluster.in_thread(cluster.actors)
        left = [name for name in names if name.startswith(_SUPERVISOR) and not name.endswith(self._mark)]
        await asyncio.gather(*(cluster.in_thread(cluster.end_actor, name) for name in left))
        await self.nodes()
        earlier = [node for node in self._asking if self._name_of(node) in names]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(EARLIER_S):
                while any(node in self._asking and not self._servers.get(node) for node in earlier):  # noqa: ASYNC110
                    await asyncio.sleep(EARLIER_S / 100)

    async def nodes(self) -> Sequence[EngineNode]:
        """Return the nodes that Ray takes for alive; a new one gets a supervisor."""
        rows = await cluster.in_thread(cluster.imported().nodes)
        alive = {row["NodeID"]: row for row in rows if row["Alive"]}
        for node in self._asking.keys() - alive.keys():
            self._asking.pop(node).cancel()
            self._servers.pop(node, None)
        for node, row in alive.items():
            if node not in self._asking:
                self._asking[node] = asyncio.create_task(self._ask(node, row["NodeManagerAddress"]))
        return [self._described(node, row) for node, row in alive.items()]

    def _described(self, node: str, row: Mapping[str, Any]) -> EngineNode:
        resources, server = row["Resources"], self._servers.get(node, {})
        cpus = float(resources.get("CPU", 0.0)) * self._settings.share
        reason = str(server.get("reason", "")) or ("" if cpus else "Ray may use no CPU of it (num_cpus=0)")
        return EngineNode(
            id=node,
            cpus=cpus,
            memory_bytes=int(resources.get("memory", 0.0) * self._settings.share),
            address=str(server.get("address", "")),
            certificate=str(server.get("certificate", "")),
            boot=str(server.get("boot", "")),
            hosts=tuple(dict.fromkeys((row["NodeManagerAddress"], *server.get("hosts", ())))),
            reason=reason,
        )

    async def _ask(self, node: str, host: str) -> None:
        """Keep asking a node's supervisor, which is started if it is missing."""
        handle: Any = None
        starts_until = time.monotonic() + START_S
        while True:
            try:
                handle = handle or await cluster.in_thread(self._supervisor, node, host)
                self._servers[node] = await cluster.answer(_quiet(handle.state), STATE_S)
            except Exception as error:
                handle = None
                if "address" not in self._servers.get(node, {}) and time.monotonic() > starts_until:
                    first = str(error).strip().partition("\n")[0] or type(error).__name__
                    self._servers[node] = {"reason": f"its supervisor does not answer: {first}"}
            await asyncio.sleep(ASK_S)

    @property
    def _mark(self) -> str:
        return f":{self._key[:16]}"

    def _name_of(self, node: str) -> str:
        """Return the name of a node's supervisor, which serves one key for all of its life."""
        return f"{_SUPERVISOR}{node}{self._mark}"

    def _supervisor(self, node: str, host: str) -> Any:  # noqa: ANN401 - a handle
        """Return the supervisor of a node, a new one if it has none; blocks."""
        ray = cluster.imported()
        ray.cloudpickle.register_pickle_by_value(supervisor)
        remote = ray.remote(num_cpus=0, max_restarts=-1, max_concurrency=4)(supervisor.NodeSupervisor)
        options = {
            "name": self._name_of(node), "namespace": cluster.NAMESPACE, "lifetime": "detached", "get_if_exists": True,
            "enable_task_events": False, "scheduling_strategy": _only_on(node),
        }  # fmt: skip
        listen = f"[{host}]:{self._settings.port}" if ":" in host else f"{host}:{self._settings.port}"
        words = ["--public-key", self._key, "--listen", listen, "--backend", "local", *self._words]
        return remote.options(**options).remote(node, self._version, words, self._settings.idle_s)

    async def blocks(self) -> Sequence[ReservedBlock]:
        """Return the blocks that Ray has created. Other groups of this fleet are removed: nobody waits for them."""
        table = await cluster.in_thread(cluster.imported().util.placement_group_table)
        self._groups = {row["name"]: supervisor.group_of(row) for row in table.values() if is_ours(row)}
        blocks = [block for row in table.values() if (block := block_of(row))]
        for name in self._groups.keys() - {block.id for block in blocks}:
            await self.give_back(name)
        return blocks

    async def take_block(self, *, node: str, cpus: float, memory_bytes: int) -> ReservedBlock:
        """Reserve capacity on a node; for an empty one first anywhere, so that an autoscaler sees what is missing."""
        if not node:
            node = await self._node_with_room(cpus, memory_bytes)
        name = block_name(cpus, memory_bytes)
        group = await self._created(self._bundle(cpus, memory_bytes), name, {NODE_LABEL: node}, PINNED_S)
        self._groups[name] = group
        return ReservedBlock(id=name, node=node, cpus=cpus, memory_bytes=memory_bytes)

    async def _node_with_room(self, cpus: float, memory_bytes: int) -> str:
        """Return a node that comes within the autoscaler's time; those that are here have been found full."""
        known = ",".join(self._asking)
        bundle = self._bundle(cpus, memory_bytes) | {"CPU": cpus}
        label = {NODE_LABEL: f"!in({known})"} if known else {}
        group = await self._created(bundle, f"{_WANTED}{uuid.uuid4().hex}", label, self.scaling_s)
        try:
            row = await cluster.in_thread(cluster.imported().util.placement_group_table, group)
            return str(next(iter(row["bundles_to_node_id"].values())))
        finally:
            await asyncio.shield(cluster.in_thread(cluster.imported().util.remove_placement_group, group))

    def _bundle(self, cpus: float, memory_bytes: int) -> dict[str, float]:
        processors = {"CPU": cpus} if self._settings.reserve_cpu else {}
        return {"memory": memory_bytes} | processors if memory_bytes else {"CPU": max(cpus, LEAST_CPUS)}

    async def _created(self, bundle: Mapping[str, float], name: str, label: Mapping[str, str], timeout_s: float) -> Any:  # noqa: ANN401 - a group
        """Return a placement group once it is there. Raises BackendUnavailable, and holds nothing then."""
        util = cluster.imported().util
        options = {"name": name, "lifetime": "detached", "bundle_label_selector": [dict(label)] if label else None}
        making = asyncio.ensure_future(cluster.in_thread(util.placement_group, [dict(bundle)], **options))
        try:
            group = await asyncio.shield(making)
            ends = time.monotonic() + timeout_s
            while not await cluster.in_thread(group.wait, STEP_S):
                if time.monotonic() > ends:
                    raise BackendUnavailable(
                        f"Ray did not reserve {dict(bundle)} within {timeout_s:g} s.",
                        remedy='"ray status" shows what its nodes have left; "fleet.share" is the part for sandboxes.',
                    )
        except BaseException:
            making.add_done_callback(_remove_made)
            raise
        return group

    async def give_back(self, block: str) -> None:
        """Remove a placement group, by its name."""
        if group := self._groups.pop(block, None):
            await cluster.in_thread(cluster.imported().util.remove_placement_group, group)

    async def stop(self) -> None:
        """Remove all groups, and end all supervisors with their servers."""
        nodes = list(self._asking)
        await self.close()
        await asyncio.gather(*(self._stop_node(node) for node in nodes))
        for block in await self.blocks():
            await self.give_back(block.id)

    async def _stop_node(self, node: str) -> None:
        handle = await cluster.in_thread(cluster.actor, self._name_of(node))
        if handle is not None:
            with contextlib.suppress(Exception):  # its server ends itself when nobody keeps it
                await cluster.answer(_quiet(handle.stop), STOP_S)
            await cluster.in_thread(cluster.end_actor, self._name_of(node))

    async def close(self) -> None:
        """Ask the nodes no more."""
        asking, self._asking = list(self._asking.values()), {}
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)


_WANTED, _SUPERVISOR = "cloche-wanted:", "node-"


def is_ours(row: Mapping[str, Any]) -> bool:
    """Tell whether a row of Ray's table is a group of a fleet that is not removed yet."""
    return str(row.get("name", "")).startswith((supervisor.BLOCK, _WANTED)) and row.get("state") != "REMOVED"


def block_name(cpus: float, memory_bytes: int) -> str:
    """Return the name of a new block, from which the next coordinator reads what it is."""
    return f"{supervisor.BLOCK}{uuid.uuid4().hex}:{cpus:g}:{memory_bytes}"


def block_of(row: Mapping[str, Any]) -> ReservedBlock | None:
    """Return the block of a row of Ray's table, None for a group that is another's, gone, or not there yet."""
    words = str(row.get("name", "")).removeprefix(supervisor.BLOCK).split(":")
    nodes = list((row.get("bundles_to_node_id") or {}).values())
    if not is_ours(row) or len(words) != 3 or row.get("state") != _DONE or not nodes:
        return None
    return ReservedBlock(id=row["name"], node=nodes[0], cpus=float(words[1]), memory_bytes=int(words[2]))


def _only_on(node: str) -> Any:  # noqa: ANN401 - a class of Ray's
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # pyright: ignore[reportMissingImports]

    return NodeAffinitySchedulingStrategy(node, soft=False)


def _quiet(method: Any) -> Any:  # noqa: ANN401 - a reference
    """Call an actor without an event of it in the memory of Ray's head."""
    return method.options(enable_task_events=False).remote()


def _remove_made(making: asyncio.Future[Any]) -> None:
    """Remove a group whose maker was cancelled or gave up, without waiting."""
    if not making.cancelled() and making.exception() is None:
        cluster.start_in_thread(cluster.imported().util.remove_placement_group, making.result())
