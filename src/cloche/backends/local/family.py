"""A session's family as its owner sees it: which interpreters there are, which one runs, and which may be woken.

Theory of operation: see `cloche.jail.family` for why only leaves run. So a checkpoint is the interpreter that ran
until then, stopped, and a clone of it goes on; a rollback discards what runs and wakes the checkpoint for as long as
it takes to clone itself once more. A fork stops the interpreter too, and makes one clone more than was asked for,
which goes on in its place. Namespaces can be nested some thirty deep; so where the clone that went on has not been
used yet, and no fork is left, it is dropped, and the one that it came from is woken instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cloche.core.errors import InvalidRequest, StartFailed
from cloche.jail.enter import compile_rehousing

from .dialogue import Dialogue
from .reports import finish
from .workspace import Workspace

if TYPE_CHECKING:
    from cloche.jail.spec import Spec

    from .connection import Connection

ORIGIN = 0
BIRTH_PATIENCE_S = 30.0


class Node:
    """Hold one interpreter of a family: how to talk to it, and its workspace.

    `is_runner` says that an open session goes on in it, `is_held` that a checkpoint's name keeps it, `is_hollow` that
    only pid 1 is left of it, because others live in its process namespace.
    """

    def __init__(self, number: int, parent: Node | None, dialogue: Dialogue, workspace: Workspace, *, is_fork: bool):
        self.number, self.parent, self.dialogue, self.workspace = number, parent, dialogue, workspace
        self.is_fork = is_fork
        self.is_runner = self.is_held = self.is_frozen = self.is_hollow = False
        self.has_run = parent is None
        self.is_exceeded = False
        self.counters: Mapping[str, int] = {}

    @property
    def is_used(self) -> bool:
        """Tell whether it may differ from the one that it was cloned from."""
        return self.has_run or self.is_fork or self.workspace.mounts_taken > 1

    def close(self) -> None:
        """Let go of our ends."""
        self.dialogue.close()
        self.workspace.drop()


class Family:
    """Hold all nodes of one session and of its forks, and the helper that guards them."""

    def __init__(self, connection: Connection, spec: Spec, first: Node):
        self.connection, self.spec = connection, spec
        self.end: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self.nodes: dict[int, Node] = {ORIGIN: first}
        self.members = 1  # sessions that are open
        self._last = ORIGIN
        self._request_id = 1 << 40  # above the numbers of cells
        self._turn = asyncio.Lock()
        self._until = 0.0

    async def clone(self, parent: Node, new_dialogue: Callable[[], Dialogue], kinds: Sequence[bool]) -> list[Node]:
        """Stop `parent` and return clones of it, one for each of `kinds`, which says whether it is a fork.

        Raises InvalidRequest when something in the session cannot be cloned; then it goes on as before.
        """
        async with self._turn:
            if parent.is_frozen:
                await self._thaw(parent)
            nodes: list[Node] = []
            self._until = asyncio.get_running_loop().time() + BIRTH_PATIENCE_S
            try:
                for is_fork in kinds:  # one after the other: the interpreter can clone itself once at a time
                    node = await self._bear(parent, new_dialogue(), is_fork=is_fork)
                    nodes.append(node)
                await self._settle(parent, nodes, kinds)
            except BaseException:
                for node in nodes:
                    self.nodes.pop(node.number, None)
                    node.close()
                raise
            return nodes

    async def _bear(self, parent: Node, dialogue: Dialogue, *, is_fork: bool) -> Node:
        """Let one clone be born, which waits for its home."""
        self._last += 1
        node = Node(self._last, parent, dialogue, parent.workspace.twin(), is_fork=is_fork)
        try:
            await self._ask("arm", node=parent.number)
            self._request_id += 1
            asked = await parent.dialogue.ask_for_clone(self._request_id, dialogue)
            await self._first_of(asked, parent.dialogue.lost, self.end)
            if not asked.done():
                raise StartFailed("the session ended while it was cloned")
            error = asked.result().get("error")
            if error is not None:
                why = str(error.get("message"))[:2000] if isinstance(error, dict) else "no reason"
                raise InvalidRequest(f"this session cannot be cloned: it has {why}")
            await self._first_of(dialogue.born, self.end)
            if not dialogue.born.done():
                raise StartFailed(f"a clone of the session was born and did not live{_last_words(dialogue)}")
        except BaseException:
            self.connection.tell("disarm", id=0)
            node.close()
            raise
        self.nodes[node.number] = node
        return node

    async def _settle(self, parent: Node, nodes: Sequence[Node], kinds: Sequence[bool]) -> None:
        """Stop the parent, give every clone its home, and let it go on."""
        outside, inside = compile_rehousing(self.spec)
        clones = [
            {"node": node.number, "holds": node.dialogue.holds(), "cgroup": self._cgroup() if is_fork else None}
            for node, is_fork in zip(nodes, kinds, strict=True)
        ]
        steps = {"outside": outside, "inside": inside}
        mounts = await self._ask("settle", {"clones": clones, "steps": steps}, node=parent.number)
        parent.is_frozen = True
        for node, mount, is_fork in zip(nodes, mounts, kinds, strict=True):
            node.workspace.take([mount])
            node.dialogue.close_guest_ends()
            node.dialogue.go(is_fork=is_fork)
        for node in nodes:
            await self._first_of(node.dialogue.ready, node.dialogue.lost, self.end)
            if not node.dialogue.ready.done():
                raise StartFailed(f"a clone of the session ended while it began{_last_words(node.dialogue)}")

    def _cgroup(self) -> Mapping[str, Any] | None:
        """Return a control group of its own for a fork; everything else shares the session's."""
        given = self.spec.cgroup
        if given is None:
            return None
        name = f"{secrets.token_hex(6)}"
        folders = {kind: f"{path.rpartition('-')[0]}-{name}" for kind, path in given["folders"].items()}
        return {**given, "folders": folders}

    def children(self, node: Node) -> list[Node]:
        return [one for one in self.nodes.values() if one.parent is node]

    def others_below(self, node: Node, runner: Node) -> bool:
        """Tell whether another session than that of `runner` lives below `node`."""
        return any(one.is_runner and one is not runner and _is_below(one, node) for one in self.nodes.values())

    async def freshest(self, node: Node) -> Node:
        """Return where a session goes on that stands at `node`: there, or where it came from if that is the same."""
        above = node.parent
        if node.is_used or above is None or above.is_held or above.is_hollow or self.children(above) != [node]:
            return node
        async with self._turn:
            node.is_runner, above.is_runner = False, True
            await self._drop(node)
            await self._thaw(above)
        return above

    async def _thaw(self, node: Node) -> None:
        await self._ask("thaw", node=node.number)
        node.is_frozen = False

    async def prune(self) -> None:
        """End what nobody needs any more."""
        async with self._turn:
            while unneeded := [one for one in self.nodes.values() if self._is_unneeded(one)]:
                for node in unneeded:
                    await self._drop(node)
            for node in list(self.nodes.values()):
                if not (node.is_runner or node.is_held or node.is_hollow or self._can_be_woken(node)):
                    await self._hollow_out(node)

    def _is_unneeded(self, node: Node) -> bool:
        return not (node.is_runner or node.is_held or node.parent is None or self.children(node))

    def _can_be_woken(self, node: Node) -> bool:
        return any(one.is_runner and not one.is_used for one in self.children(node))

    async def _drop(self, node: Node) -> None:
        with contextlib.suppress(OSError):  # it has ended by itself
            await self.connection.ask("drop", node=node.number, is_guest_only=False)
        self.nodes.pop(node.number, None)
        node.close()

    async def _hollow_out(self, node: Node) -> None:
        """End an interpreter alone: others live in its process namespace."""
        node.is_hollow = True
        with contextlib.suppress(OSError):
            await self.connection.ask("drop", node=node.number, is_guest_only=True)
        node.close()

    def kill(self, node: Node) -> None:
        """Kill a node that does not listen; its end is heard on its link."""
        self.connection.tell("drop", id=0, node=node.number, is_guest_only=False)

    def hear(self, tag: str, body: Mapping[str, Any]) -> None:
        """Take note of what the helper says of a node."""
        node = self.nodes.get(body.get("node", -1))
        if node is None:
            return
        if tag == "exceeded":
            node.is_exceeded = True
        elif tag == "gone":
            node.counters = body["counters"]
            node.dialogue.end("the interpreter has ended")

    async def _ask(self, tag: str, payload: Mapping[str, Any] | None = None, **body: int) -> list[int]:
        try:
            return await self.connection.ask(tag, payload, **body)
        except OSError as error:
            raise InvalidRequest(f"this session cannot be cloned: {error}") from error

    async def leave(self, held: Sequence[Node]) -> None:
        """Take leave of one session, whose nodes are `held`; with the last one everything ends."""
        for node in held:
            node.is_runner = node.is_held = False
        self.members -= 1
        if self.members == 0:
            await self.close()
        elif not self.end.done():
            await self.prune()

    async def _first_of(self, *futures: asyncio.Future[Any]) -> None:
        """Wait until one is done, within reason: what all the clones of one call together may take."""
        left = max(0.0, self._until - asyncio.get_running_loop().time())
        await asyncio.wait(futures, timeout=left, return_when=asyncio.FIRST_COMPLETED)

    async def close(self) -> None:
        """Kill and remove everything."""
        for node in self.nodes.values():
            node.close()
        self.connection.kill("cancelled")
        with contextlib.suppress(Exception):
            await finish(self.end)
        await finish(self.connection.close())


def _last_words(dialogue: Dialogue) -> str:
    dialogue.catch_up()
    said = dialogue.kept("stderr").decode("utf-8", "replace").strip()[-400:]
    return f": {said}" if said else ""


def _is_below(node: Node, other: Node) -> bool:
    above: Node | None = node
    while above is not None and above is not other:
        above = above.parent
    return above is other
