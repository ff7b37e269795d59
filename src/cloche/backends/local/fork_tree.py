"""The clones of a session, at the caller's end: which interpreters exist, which one runs, which may be resumed.

Theory of operation: only leaves of the tree run (`cloche.jail.fork_tree` says why). A checkpoint is an interpreter that
was stopped, while a clone of it continues the session. A rollback discards the running interpreter and resumes the
checkpoint just long enough to clone itself again. A fork stops the interpreter, too, and makes one clone more than
requested, the *spare clone*. If the session continues while its forks live, it continues in the spare clone. Once no
fork is left, the spare clone is dropped and the interpreter resumed. This saves nesting, since the kernel nests at most
32 levels of namespaces (pid_namespaces(7), user_namespaces(7)).
"""

from __future__ import annotations

import asyncio
import enum
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cloche.core.errors import InvalidRequest, StartFailed
from cloche.core.loops import finish
from cloche.core.suppressed import suppress_logged
from cloche.jail.setup.plan import compile_clone_mounts, inner_of

from .helper_ends import CLOSE_TIMEOUT_S
from .streams import SessionPipes
from .workspace import Workspace

if TYPE_CHECKING:
    from cloche.jail.messages import Spec

    from .helper_link import HelperConnection

ORIGIN = 0
NO_CLONE = 0  # for a clone that does not need namespaces yet
CLONE_TIMEOUT_S = 30.0
ANSWER_S = 5.0  # a session has the time of a cell to answer, and at least this

log = logging.getLogger("cloche.jail")


class CloneKind(enum.Enum):
    """Name the purpose of a clone."""

    CONTINUATION = enum.auto()  # continues the session of its original
    FORK = enum.auto()  # continues as a separate session
    SPARE = enum.auto()  # waits in its parent's namespaces


class Node:
    """Hold one interpreter of a fork tree, with its pipes and workspace.

    `is_runner`: an open session runs in it. `is_held`: the name of a checkpoint keeps it. `is_hollow`: only its pid 1
    is left, because other interpreters live in its process namespace. `spare` is the clone in which the session
    continues while this interpreter is stopped and its forks live.
    """

    def __init__(self, number: int, parent: Node | None, pipes: SessionPipes, workspace: Workspace, *, is_fork: bool):
        self.number, self.parent, self.pipes, self.workspace = number, parent, pipes, workspace
        workspace.has_node = True
        self.is_fork = is_fork
        self.is_runner = self.is_held = self.is_frozen = self.is_hollow = False
        self.spare: Node | None = None
        self.is_exceeded = False
        self.counters: Mapping[str, int] = {}

    def close(self) -> None:
        """Close the caller's ends."""
        self.pipes.close()
        self.workspace.has_node = False
        self.workspace.drop_unless_needed()


class ForkTree:
    """Hold the fork tree of one session, the nodes of its forks included, and the helper that supervises them."""

    def __init__(
        self, connection: HelperConnection, spec: Spec, first: Node, timeout_s: float, binds: Sequence[str] = ()
    ):
        self.connection, self.spec, self._inner = connection, spec, inner_of(binds, spec)
        self._answer_s = min(CLONE_TIMEOUT_S, max(ANSWER_S, timeout_s))
        self.end: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self.nodes: dict[int, Node] = {ORIGIN: first}
        self.members = 1  # open sessions
        self._last = ORIGIN
        self._request_id = 1 << 40  # above the numbers of cells
        self._turn = asyncio.Lock()
        self._until = 0.0
        self._clone_steps: Mapping[str, Any] | None = None

    async def clone(self, parent: Node, new_pipes: Callable[[], SessionPipes]) -> Node:
        """Stop `parent`, unless it is stopped already, and return a running clone.

        Raises InvalidRequest if something in the session cannot be cloned; the session then continues as before.
        """
        async with self._turn:
            was_frozen = parent.is_frozen
            if was_frozen:
                await self._thaw(parent)
            try:
                (node,) = await self._clones(parent, new_pipes, [CloneKind.CONTINUATION])
            except BaseException:
                if was_frozen:  # a checkpoint must not run
                    await finish(self._ask("freeze", node=parent.number))
                    parent.is_frozen = True
                raise
            return node

    async def fork(self, parent: Node, new_pipes: Callable[[], SessionPipes], count: int) -> list[Node]:
        """Stop `parent` and return forks of it; raises as `clone` does."""
        async with self._turn:
            *forks, spare = await self._clones(parent, new_pipes, [*[CloneKind.FORK] * count, CloneKind.SPARE])
            parent.spare = spare
            return forks

    async def _clones(
        self, parent: Node, new_pipes: Callable[[], SessionPipes], kinds: Sequence[CloneKind]
    ) -> list[Node]:
        nodes: list[Node] = []
        self._restart_timeout()
        try:
            for kind in kinds:  # in turn: the interpreter makes one clone at a time
                node = await self._clone_one(parent, new_pipes(), kind)
                nodes.append(node)
            for node in nodes:
                await self._await_clone(node)
            await self._set_up(parent, nodes, kinds)
        except BaseException:
            for node in nodes:
                self.kill(node)  # the helper may have begun to make its control group
                self.nodes.pop(node.number, None)
                node.close()
            raise
        return nodes

    async def _clone_one(self, parent: Node, pipes: SessionPipes, kind: CloneKind) -> Node:
        """Make one clone, which reports that it runs and then waits for its namespaces and mounts."""
        self._last += 1
        is_fork = kind is CloneKind.FORK
        node = Node(self._last, parent, pipes, parent.workspace.copy_for_fork(), is_fork=is_fork)
        try:
            orders = [self._ask("arm", node=parent.number, clone=NO_CLONE if kind is CloneKind.SPARE else node.number)]
            if is_fork and self.spec.cgroup is not None:  # first: it takes longest, and overlaps with the other orders
                orders.insert(0, self._ask("group", {"cgroup": self._cgroup()}, clone=node.number))
            await asyncio.gather(*orders)
            self._request_id += 1
            answer = await parent.pipes.ask_for_clone(self._request_id, pipes, self._answer_s)
            await self._first_of(answer, parent.pipes.link.lost, self.end, longest_s=self._answer_s)
            if not answer.done():
                has_ended = parent.pipes.link.lost.done() or self.end.done()
                why = "ended" if has_ended else "did not answer (perhaps a task in it never awaits)"
                raise StartFailed(f"the session {why} while it was cloned{_stderr_tail(parent.pipes)}")
            error = answer.result().get("error")
            if error is not None:
                why = str(error.get("message"))[:2000] if isinstance(error, dict) else "no reason"
                raise InvalidRequest(f"this session cannot be cloned: it has {why}")
        except BaseException:
            self.kill(node)
            self.connection.notify("disarm", id=0)
            node.close()
            raise
        self.nodes[node.number] = node
        return node

    async def _await_clone(self, node: Node) -> None:
        cloned = node.pipes.cloned
        await self._first_of(cloned, self.end)
        if not cloned.done():
            raise StartFailed(f"a clone of the session was made and did not live{_stderr_tail(node.pipes)}")

    async def _set_up(self, parent: Node, nodes: Sequence[Node], kinds: Sequence[CloneKind]) -> None:
        """Stop the parent, give the clones namespaces and mounts, and let all but a spare one continue."""
        clones = [
            {
                "node": node.number,
                "holds": node.pipes.holds(),
                "is_spare": kind is CloneKind.SPARE,
            }
            for node, kind in zip(nodes, kinds, strict=True)
        ]
        orders = {"clones": clones, "steps": self._steps(), "bound": self._inner}
        mounts = await self._ask("set_up", orders, node=parent.number)
        self._restart_timeout()  # copying a large workspace takes its time
        parent.is_frozen = True
        for node in nodes:
            node.pipes.close_guest_ends()
        started = [node for node, kind in zip(nodes, kinds, strict=True) if kind is not CloneKind.SPARE]
        # Per clone: the workspace's mount, and the mount that shows its files to this user, if there is one.
        each = len(mounts) // max(1, len(started))
        for number, node in enumerate(started):
            node.workspace.take(mounts[number * each : (number + 1) * each])
            node.pipes.go(is_fork=node.is_fork)
        for node in started:
            await self._is_ready(node)

    def _steps(self) -> Mapping[str, Any]:
        if self._clone_steps is None:
            outside, inside = compile_clone_mounts(self.spec, self._inner)
            self._clone_steps = {"outside": outside, "inside": inside}
        return self._clone_steps

    async def _is_ready(self, node: Node) -> None:
        pipes = node.pipes
        await self._first_of(pipes.link.ready, pipes.link.lost, self.end)
        if not pipes.link.ready.done():
            why = "ended during its start" if pipes.link.lost.done() or self.end.done() else "did not start in time"
            raise StartFailed(f"a clone of the session {why}{_stderr_tail(pipes)}")

    def _cgroup(self) -> Mapping[str, Any] | None:
        """Return a new control group for a fork. All other clones share the session's."""
        session_group = self.spec.cgroup
        if session_group is None:
            return None
        name = os.urandom(6).hex()
        folders = {kind: f"{path.rpartition('-')[0]}-{name}" for kind, path in session_group["folders"].items()}
        return {**session_group, "folders": folders}

    def children(self, node: Node) -> list[Node]:
        return [child for child in self.nodes.values() if child.parent is node]

    def others_below(self, node: Node, runner: Node) -> bool:
        """Tell whether a session other than that of `runner` lives below `node`."""
        return any(
            other_node.is_runner and other_node is not runner and _is_below(other_node, node)
            for other_node in self.nodes.values()
        )

    async def go_on(self, node: Node) -> Node:
        """Return the node in which the session of `node` continues: itself, or its spare clone while forks live."""
        spare = node.spare
        if spare is None:
            return node
        async with self._turn:
            node.spare = None
            if self.children(node) == [spare]:
                await self._drop(spare)
                await self._thaw(node)
                return node
            mounts = await self._ask("set_up_spare", {"steps": self._steps()}, node=spare.number)
            node.is_runner, spare.is_runner = False, True
            spare.workspace.take(mounts)
            spare.pipes.go(is_fork=False)
            self._restart_timeout()
            await self._is_ready(spare)
        await self.prune()
        return spare

    async def _thaw(self, node: Node) -> None:
        await self._ask("thaw", node=node.number)
        node.is_frozen = False

    async def prune(self) -> None:
        """End all interpreters that no session or checkpoint needs."""
        async with self._turn:
            while unneeded := [node for node in self.nodes.values() if self._is_unneeded(node)]:
                for node in unneeded:
                    await self._drop(node)
            for node in list(self.nodes.values()):
                if not (node.is_runner or node.is_held or node.is_hollow or self._is_spare(node)):
                    await self._hollow_out(node)

    def _is_unneeded(self, node: Node) -> bool:
        is_needed = node.is_runner or node.is_held or node.parent is None or self._is_spare(node)
        return not (is_needed or self.children(node))

    def _is_spare(self, node: Node) -> bool:
        """Tell whether a session that is stopped in the parent may still continue in this node."""
        above = node.parent
        return above is not None and above.is_runner and above.spare is node

    async def _drop(self, node: Node) -> None:
        with suppress_logged(log, "an interpreter had ended by itself", OSError):
            await self.connection.ask("drop", node=node.number, is_guest_only=False)
        self.nodes.pop(node.number, None)
        node.close()

    async def _hollow_out(self, node: Node) -> None:
        """End only the interpreter, not its pid 1: others live in its process namespace."""
        node.is_hollow = True
        with suppress_logged(log, "an interpreter had ended by itself", OSError):
            await self.connection.ask("drop", node=node.number, is_guest_only=True)
        node.close()

    def kill(self, node: Node) -> None:
        """Kill a node that does not respond; its link reports the end."""
        self.connection.notify("drop", id=0, node=node.number, is_guest_only=False)

    def on_message(self, tag: str, body: Mapping[str, Any]) -> None:
        node = self.nodes.get(body.get("node", -1))
        if node is None:
            return
        if tag == "exceeded":
            node.is_exceeded = True
        elif tag == "gone":
            node.counters = body["counters"]
            node.pipes.end("the interpreter has ended")

    async def _ask(self, tag: str, payload: Mapping[str, Any] | None = None, **body: int) -> list[int]:
        try:
            return await self.connection.ask(tag, payload, **body)
        except OSError as error:
            raise InvalidRequest(f"this session cannot be cloned: {error}") from error

    async def close_session(self, held: Sequence[Node]) -> None:
        """Close one session with the nodes that it `held`. Closing the last session ends everything."""
        for node in held:
            node.is_runner = node.is_held = False
        self.members -= 1
        if self.members == 0:
            await self.close()
        elif not self.end.done():
            await self.prune()

    def _restart_timeout(self) -> None:
        """Restart the time-out shared by all clones of one call; the helper's own work does not count against it."""
        self._until = asyncio.get_running_loop().time() + CLONE_TIMEOUT_S

    async def _first_of(self, *futures: asyncio.Future[Any], longest_s: float = CLONE_TIMEOUT_S) -> None:
        timeout_s = min(longest_s, self._left_s())
        await asyncio.wait(futures, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)

    def _left_s(self) -> float:
        return max(0.0, self._until - asyncio.get_running_loop().time())

    async def close(self) -> None:
        for node in self.nodes.values():
            node.close()
        self.connection.kill("cancelled")
        try:
            await finish(asyncio.wait_for(self.end, CLOSE_TIMEOUT_S))
        except TimeoutError:
            log.warning("a session was not said to have ended within %g s; its helper is hung up on", CLOSE_TIMEOUT_S)
        except Exception as error:  # the run in it got the error; here only the end matters
            log.debug("a session that is closed had ended: %s", error)
        await finish(self.connection.close())


def _stderr_tail(pipes: SessionPipes) -> str:
    pipes.catch_up()
    text = pipes.kept("stderr").decode("utf-8", "replace").strip()[-400:]
    return f": {text}" if text else ""


def _is_below(node: Node, ancestor: Node) -> bool:
    above: Node | None = node
    while above is not None and above is not ancestor:
        above = above.parent
    return above is ancestor
