"""The fork tree of a live session: its first interpreter, checkpoints and forks, as the helper outside sees them.

Theory of operation: a *node* is one interpreter with the process that is pid 1 around it. A clone's process namespace
lies inside that of the node it was cloned from, so an upper node could see, signal and read a lower one; and every node
is the guest's, pid 1 of a clone too. They are isolated because only leaves ever run: a node is stopped before its
clones continue, and stays so until all of them have ended. This module checks for a guest's preparations:
no other process may be in its process namespace, and a clone may hold none of its parent's descriptors. The checks of
one clone, and the building of its mounts, are in `clone_namespaces`.

`CgroupMove` puts a clone into its own control group.
"""

from __future__ import annotations

import posix
from time import monotonic

from . import messages, procfs
from .cgroups import Cgroup
from .clone_namespaces import (
    ForkTreeError,
    NamespaceWorker,
    check_is_apart,
    check_rest,
    new_builder,
    number_inside,
    start_building,
)
from .network import close_sockets
from .procfs import descriptors, is_dead, state_of, states_of
from .syscalls import ppoll

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .pause import Halt
    from .sandbox_state import SandboxState


class CgroupMove:
    """Make a control group for a clone before there is one, and move the clone in once it is known.

    To move another process the kernel takes a lock, and if the lock was unused for a while it waits for an RCU grace
    period first: ten milliseconds. So the mover takes the lock once, by moving itself, while other processes build.
    Until then no other group can be made, so its own is made first. A clone could move itself without that lock; but
    until it is checked it may share memory with its parent, and memory that it touched inside would be charged to no
    group after its end.
    """

    def __init__(self, cgroup: dict[str, Any]):
        self.group, self._amounts = Cgroup(cgroup["version"], cgroup["folders"]), cgroup["amounts"]
        self._worker: NamespaceWorker | None = NamespaceWorker(self._work)

    def _work(self, link: int) -> None:
        self.group.create(**self._amounts)
        self.group.attach(posix.getpid())
        tag, body, _ = messages.receive(link)
        if tag == "move":
            self.group.attach(body["pid"])

    def begin(self, pid: int) -> None:
        """Say which process is to be moved: one that cannot end, or whose parent has no chance to wait for it."""
        if self._worker is not None:
            self._worker.send("move", {"pid": pid})

    def finish(self, ended: list[NamespaceWorker]) -> Cgroup:
        """Wait until it is inside, and return the group; the worker is to be reaped. Raises OSError."""
        worker, self._worker = self._worker, None
        if worker is not None:
            ended.append(worker)
            worker.receive()
        return self.group

    def give_up(self) -> None:
        """Remove the group, which is not needed any more."""
        if self._worker is not None:
            self._worker.send("cancel")
        ended: list[NamespaceWorker] = []
        try:
            self.finish(ended)
        except OSError:
            pass  # there was no room
        for worker in ended:
            worker.reap()
        self.group.remove()


_signal: Any = __import__("_signal")  # `signal` would cost every run milliseconds

SIGINT, SIGKILL, SIGCONT, SIGSTOP = 2, 9, 18, 19
STOP_TIMEOUT_S, END_TIMEOUT_S = 20.0, 10.0
POLL_S, QUICK_POLLS = 0.0002, 10  # how often to look before taking naps in between
ORIGIN = 0
NO_CLONE = 0  # in place of the clone that a builder is started for
PROCESSES_OF_A_NODE = 2
URGENT = ("", "kill", "pace", "interrupt", "signal")


class ForkNode:
    """Hold one interpreter: `init` is pid 1 around it, `guest` is itself; the first has no `parent` (None)."""

    def __init__(self, init: int, parent: ForkNode | None, cgroup: Cgroup | None):
        self.init, self.parent, self.cgroup = init, parent, cgroup
        self.guest = 0
        self.ended = posix.pidfd_open(init) if hasattr(posix, "pidfd_open") and parent is not None else -1
        self.is_frozen = self.has_lost_guest = self.is_doomed = self.is_set_up = False

    def interpreter(self) -> int:
        """Return the guest's process, 0 if it has not started or has ended.

        Read anew each time: a clone's pid 1 is the guest's, and may reap its child, whose number another process of
        this host can then get.
        """
        if self.has_lost_guest:
            return 0
        children = procfs.children(self.init)
        if self.guest and self.guest not in children:
            self.guest, self.has_lost_guest = 0, True
        elif not self.guest and children:
            self.guest = children[0]
        return self.guest


class ForkTreeServer:
    """Handle the caller's requests for the nodes of one session. Answers carry the number of the question.

    `link` leads to the `reaper` of the first node. `look_after_others` keeps their limits until a descriptor can be
    read.
    """

    def __init__(self, state: SandboxState, link: int, reaper: int, look_after_others: Callable[[int], None]):
        self.state, self.link, self.look_after_others = state, link, look_after_others
        self.nodes: dict[int, ForkNode] = {ORIGIN: ForkNode(reaper, None, None)}
        self.is_busy = False
        self.halts: dict[int, Halt] = {}  # by the number of the node; forks may be looked at at once
        self.ended: list[NamespaceWorker] = []  # those that are done, and yet to be reaped
        # By the number of the clone that has no mounts of its own yet:
        self.moves: dict[int, CgroupMove] = {}
        self.builders: dict[int, NamespaceWorker] = {}

    def handle(self, tag: str, body: dict[str, Any]) -> None:
        """Handle a request, and answer it; "echo" has no other effect."""
        fds: list[int] = []
        answer: dict[str, Any] = {"id": body["id"]}
        try:
            if tag == "arm":
                self._arm(self._node(body["node"]))
            elif tag == "group":
                self.moves[body["clone"]] = CgroupMove(body["cgroup"])
            elif tag == "set_up":
                fds = self._set_up_clones(body)
            elif tag == "set_up_spare":
                fds = self._set_up_spare(body["node"], body["steps"])
            elif tag == "freeze":
                self._freeze(self._node(body["node"]))
            elif tag == "disarm":
                messages.send(self.link, "arm", {"pid": 0})
            elif tag == "thaw":
                self._thaw(self._node(body["node"]))
            elif tag == "halt":
                self._halt(body["node"])
            elif tag == "resume":
                self._resume(body["node"])
            elif tag == "signal":
                self._signal(self._node(body["node"]), body["number"], to_group=body["to_group"])
            elif tag == "drop":
                self._drop(body["node"], is_guest_only=body["is_guest_only"])
        except (ForkTreeError, OSError) as error:
            answer["error"] = str(error)
        self.state.send("answer", answer, tuple(fds))
        for fd in fds:
            posix.close(fd)
        if tag == "arm" and body["clone"] != NO_CLONE and "error" not in answer:
            self._start_builder(body["clone"])  # while the guest clones itself, which takes longer
        while self.ended:  # when no request waits for it any more
            self.ended.pop().reap()

    def interrupt(self, number: int) -> None:
        """Interrupt like Ctrl-C: signal the interpreter and the processes in its own group."""
        node = self.nodes.get(number)
        if node is not None:
            self._signal(node, SIGINT, to_group=True)

    def _signal(self, node: ForkNode, number: int, *, to_group: bool) -> None:
        guest = node.interpreter()
        if not guest:
            return
        try:
            leads = posix.getpgid(guest) == guest
            posix.kill(-guest if to_group and leads else guest, number)
        except ProcessLookupError:
            pass  # it has just ended

    @property
    def has_forks(self) -> bool:
        """Tell whether there is any node but the first."""
        return len(self.nodes) > 1

    def watched(self) -> list[int]:
        """Return the descriptors that become readable at a clone's end."""
        return [node.ended for node in self.nodes.values() if node.ended >= 0]

    def report_ended(self, ready: set[int]) -> None:
        """Tell the caller of the clones that have ended, and clear up after them."""
        for number, node in list(self.nodes.items()):
            if node.ended in ready:
                self.state.send("gone", {"node": number, "counters": self._counters(node)})
                self._forget(number, node)

    def check_memory(self, limit: int) -> None:
        """Kill the forks that use more than they may."""
        for number, node in self.nodes.items():
            if node.parent is None or node.is_frozen or node.is_doomed or not node.is_set_up:
                continue
            group = _group_of(node)
            if group is not None:
                used = group.anonymous_bytes() if group.memory_bytes() > limit else 0
            elif self.state.spec.accounting == "tree":
                pids = [node.init, *procfs.descendants(node.init)]
                used = procfs.private_bytes(pids) if procfs.resident_bytes(pids) > limit else 0
            else:
                continue
            if used > limit:
                self._exceed(number, node)

    def kill_exceeding(self) -> bool:
        """Kill the running nodes of the session's own control group; False if it has no forks."""
        for number, node in self.nodes.items():
            if node.is_set_up and _group_of(node) is None and not node.is_frozen:
                self._exceed(number, node)
        return self.has_forks

    def _exceed(self, number: int, node: ForkNode) -> None:
        if not node.is_doomed:
            node.is_doomed = True
            self.state.send("exceeded", {"node": number})
            _kill_clone(node)

    def lift_quota(self) -> None:
        """Lift the processor quotas of forks, after all processes in them have been killed."""
        for node in self.nodes.values():
            if node.cgroup is not None:
                node.cgroup.lift_quota()

    def clear_up(self) -> None:
        """Remove the control groups of forks, after all processes in them are dead."""
        for number in list(self.halts):
            self._resume(number)  # a group that is used again must not be frozen
        for number in {*self.moves, *self.builders}:
            self._cancel_set_up(number)
        for number, node in list(self.nodes.items()):
            if node.parent is not None:
                self._forget(number, node)

    def _cancel_set_up(self, number: int) -> None:
        """Remove the group of a clone that got no mounts, and kill its builder."""
        builder, move = self.builders.pop(number, None), self.moves.pop(number, None)
        if builder is not None:
            builder.kill()
        if move is not None:
            move.give_up()

    def _node(self, number: int) -> ForkNode:
        if number not in self.nodes:
            raise ForkTreeError("it has ended")
        return self.nodes[number]

    def _arm(self, node: ForkNode) -> None:
        """Let the interpreter of `node` clone itself once."""
        guest = node.interpreter()
        if not guest:
            raise ForkTreeError("its interpreter has ended")
        self._allow_for(1)
        messages.send(self.link, "arm", {"pid": number_inside(guest)})

    def _set_up_clones(self, body: dict[str, Any]) -> list[int]:
        """Stop a node, give its new clones separate ids and mounts, return their workspaces; or undo it all."""
        parent = self._node(body["node"])
        known_inits = {node.init for node in self.nodes.values()}
        fresh: list[int] = []
        mounts: list[int] = []
        workers: list[NamespaceWorker] = []
        try:
            guest = parent.interpreter()
            if not guest:
                raise ForkTreeError("its interpreter has ended")
            fresh = _living_children(guest, known_inits)
            if len(fresh) != len(body["clones"]):
                raise ForkTreeError("a process that the session started is still running")
            _stop(*fresh)
            for pid in fresh:
                check_is_apart(pid)  # else a signal to its group could resume its parent, which can resume clones
            self._freeze(parent)
            _stop(*fresh)
            siblings = set(procfs.children(parent.init)) - {guest}
            if any(not is_dead(pid) for pid in siblings) or fresh != _living_children(guest, known_inits):
                raise ForkTreeError("a process that the session started is still running")
            for clone in body["clones"]:
                pid = self._find(fresh, clone["holds"], body["bound"])
                self.nodes[clone["node"]] = ForkNode(pid, parent, None)
                if clone["node"] in self.moves:
                    self.moves[clone["node"]].begin(pid)
                if not clone["is_spare"]:
                    workers.append(self._builder(clone["node"]))
                    start_building(workers[-1], body["steps"], guest, pid, clone["node"])
            while workers:
                self._await(workers[0])
                self.ended.append(workers.pop(0))
                mounts += self.ended[-1].receive()
            for clone in body["clones"]:
                if clone["node"] in self.moves:
                    self.nodes[clone["node"]].cgroup = self.moves[clone["node"]].finish(self.ended)
                    self.moves.pop(clone["node"])
            for clone in body["clones"]:
                self.nodes[clone["node"]].is_set_up = True
                if not clone["is_spare"]:
                    posix.kill(self.nodes[clone["node"]].init, SIGCONT)
        except BaseException:
            for worker in workers:
                worker.kill()
            for pid in fresh:
                _kill(pid)
            for clone in body["clones"]:
                self._cancel_set_up(clone["node"])
                if clone["node"] in self.nodes:
                    self._forget(clone["node"], self.nodes[clone["node"]])
            for fd in mounts:
                posix.close(fd)
            self._thaw(parent)
            raise
        return mounts

    def _set_up_spare(self, number: int, steps: dict[str, Any]) -> list[int]:
        """Give a spare clone ids and mounts like those of its parent, which is still stopped."""
        node = self._node(number)
        guest = node.parent.interpreter() if node.parent is not None else 0
        if not guest:
            raise ForkTreeError("what it was cloned from has ended")
        worker = new_builder(self.state.spec, self.state.network_link)
        node.is_set_up = False
        try:
            start_building(worker, steps, guest, node.init, number)
            self._await(worker)
        except BaseException:
            worker.kill()
            raise
        finally:
            node.is_set_up = True
        mounts = worker.finish()
        posix.kill(node.init, SIGCONT)
        return mounts

    def _start_builder(self, clone: int) -> None:
        """Start the builder of a clone's mounts, while the clone is being made."""
        try:
            self.builders[clone] = new_builder(self.state.spec, self.state.network_link)
        except OSError:
            pass  # it is started when it is needed, and that request gets the error

    def _builder(self, clone: int) -> NamespaceWorker:
        """Return the builder of a clone's mounts, started ahead or now."""
        return self.builders.pop(clone, None) or new_builder(self.state.spec, self.state.network_link)

    def _await(self, worker: NamespaceWorker) -> None:
        """Wait for a worker process that may take its time, and look after the other runs meanwhile."""
        self.is_busy = True
        try:
            self.look_after_others(worker.link)
        finally:
            self.is_busy = False

    def is_urgent(self, tag: str, body: dict[str, Any]) -> bool:
        """Tell whether something cannot wait while a node is being cloned: signals, and the end of one that runs."""
        if tag != "drop":
            return tag in URGENT
        node = self.nodes.get(body["node"])
        return node is not None and node.parent is not None and node.is_set_up and not node.is_frozen

    def _find(self, fresh: list[int], holds: list[str], bound: list[str]) -> int:
        """Return the clone that holds exactly these descriptors and nothing else of its parent's; all are stopped."""
        expected = sorted(holds)
        surplus = ""
        for pid in fresh:
            open_names = sorted(descriptors(pid))
            if open_names == expected:
                check_rest(pid, bound)
                return pid
            if set(holds) & set(open_names):
                surplus = ", ".join(name for name in open_names if name not in expected) or "a descriptor twice"
        raise ForkTreeError(f"the clone holds something of its parent's open: {surplus or 'it closed its own link'}")

    def _freeze(self, node: ForkNode) -> None:
        guest = node.interpreter()
        if not guest:
            raise ForkTreeError("its interpreter has ended")
        node.is_frozen = True
        if node.parent is None:
            self._keep_origin(is_on=True)
        _stop(*([node.init, guest] if node.parent is not None else [guest]))  # pid 1 of a clone is the guest's too

    def _thaw(self, node: ForkNode) -> None:
        if any(other_node.parent is node for other_node in self.nodes.values()):
            raise ForkTreeError("a fork of it is still open")
        node.is_frozen = False
        if node.parent is None:
            self._keep_origin(is_on=False)
        for pid in (node.init if node.parent is not None else 0, node.interpreter()):
            if pid:
                posix.kill(pid, SIGCONT)

    def _halt(self, number: int) -> None:
        """Stop all processes of a node while its files are read; nodes below a stopped one are stopped already."""
        from .pause import MOST, Halt, processes_of

        self._resume(number)
        node, spec = self._node(number), self.state.spec
        if node.is_frozen:
            return
        find = processes_of(node.init, is_first=node.parent is None, has_namespace=spec.level == "jail")
        room = MOST - sum(halt.held() for halt in self.halts.values())  # descriptors are this helper's, not a node's
        self.halts[number] = Halt(find, _group_of(node) or self.state.cgroup, room)
        self.halts[number].begin()

    def _resume(self, number: int) -> None:
        halt = self.halts.pop(number, None)
        if halt is not None:
            halt.end()

    def _keep_origin(self, *, is_on: bool) -> None:
        """Keep pid 1 of the first node alive when its interpreter ends: other nodes are in its process namespace."""
        messages.send(self.link, "stay", {"is_on": is_on})

    def _drop(self, number: int, *, is_guest_only: bool) -> None:
        """Kill a node; only its interpreter, if other nodes are inside its process namespace."""
        self._cancel_set_up(number)
        node = self.nodes.get(number)
        if node is None:
            return
        guest = node.interpreter()
        if node.parent is None or is_guest_only:
            if guest:
                if node.parent is None:
                    self._keep_origin(is_on=True)
                node.guest, node.has_lost_guest = 0, True
                _kill(guest)
            return
        _kill_clone(node)
        if not ppoll((node.ended,), END_TIMEOUT_S):
            raise ForkTreeError("it does not die")
        self._forget(number, node)

    def _counters(self, node: ForkNode) -> dict[str, int]:
        """Return how often limits were hit: a fork's own, or those of the group that it shares."""
        shared, before = self.state.cgroup, self.state.before
        own = _group_of(node)
        group = own or shared
        now = group.counters() if group is not None else {}
        return now if own is not None else {name: count - before.get(name, 0) for name, count in now.items()}

    def _allow_for(self, count: int) -> None:
        """Raise the session's own limit for clones: stopped processes count as well."""
        spec, cgroup = self.state.spec, self.state.cgroup
        if cgroup is not None and spec.cgroup is not None:
            cgroup.allow_pids(spec.cgroup["amounts"]["pids"] + PROCESSES_OF_A_NODE * (len(self.nodes) + count))

    def _forget(self, number: int, node: ForkNode) -> None:
        if node.ended >= 0:
            posix.close(node.ended)
        if node.cgroup is not None:
            node.cgroup.remove()
        if self.state.network_link >= 0:
            close_sockets(self.state.network_link, number)
        self.nodes.pop(number, None)


def _group_of(node: ForkNode) -> Cgroup | None:
    """Return the control group of a node's fork; None for a node in the session's group."""
    above: ForkNode | None = node
    while above is not None and above.cgroup is None:
        above = above.parent
    return above.cgroup if above is not None else None


def _stop(*pids: int) -> None:
    """Stop processes, and wait until all their threads are stopped."""
    for pid in pids:
        posix.kill(pid, SIGSTOP)
    deadline, polls = monotonic() + STOP_TIMEOUT_S, 0
    for pid in pids:
        while state_of(pid) not in "Tt" or any(state not in "TtZX" for state in states_of(pid)):
            if monotonic() > deadline or is_dead(pid):
                raise ForkTreeError("a process of the session cannot be stopped")
            polls += 1
            if polls > QUICK_POLLS:
                ppoll((), POLL_S)
            posix.sched_yield()  # most stand still before a nap would be over


def _kill(pid: int) -> None:
    try:
        posix.kill(pid, SIGKILL)
    except ProcessLookupError:
        pass


def _kill_clone(node: ForkNode) -> None:
    """Kill a clone by its pid descriptor: its number may be reused once it has ended."""
    try:
        _signal.pidfd_send_signal(node.ended, SIGKILL)
    except ProcessLookupError:
        pass
    if node.cgroup is not None:
        node.cgroup.lift_quota()  # its last: a fork's group ends with it


def _living_children(guest: int, known_inits: set[int]) -> list[int]:
    """Return the processes that a guest has cloned, without the known ones."""
    return [pid for pid in procfs.children(guest) if pid not in known_inits and not is_dead(pid)]
