"""One slot of the pool, its fork server, and the handoff socket of its prefork jail.

`Template` is the caller's end of a fork server: start it, let it fork helpers, end it. `HandoffSocket` is the caller's
end of the socket that gives the guests of a prefork jail their orders, and reports their ends. `Slot` holds a helper
and its state: the jail that it built, its control group's figures, its quota.

Sending never waits, so it may be done from any thread and any event loop; only `HandoffSocket.wait` waits, for as long
as its argument says.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import select
import socket
import subprocess
import sys
import time
from array import array
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from cloche.jail import messages, shared_status
from cloche.jail.cgroups import PERIOD_US, Cgroup, Gauges
from cloche.jail.setup.launch import make_cgroup, start_template

if TYPE_CHECKING:
    from cloche.jail.messages import Building, Spec

log = logging.getLogger("cloche.warm")

MOST_FORKS = 5_000
OLDEST_S = 3600.0
LEAST_LIFE_S = 1.0


class Template:
    """Hold one fork server. `failed` says, once it is ready, which modules could not be loaded and why."""

    def __init__(self, settings: Mapping[str, Any], executable: str = sys.executable, namespace: int = -1):
        self._process, self._link = start_template(settings, executable, namespace=namespace)
        self._link.setblocking(False)
        self._is_ready = self._is_gone = False
        self._forks = 0
        self._started_at = time.monotonic()
        self.reason = ""
        self.failed: Mapping[str, str] = {}

    def is_ready(self) -> bool:
        """Tell whether it can fork by now; once `is_gone`, never."""
        if not self._is_ready and not self._is_gone:
            with contextlib.suppress(BlockingIOError):
                self._take_message(*messages.receive(self._link.fileno()))
        return self._is_ready and not self._is_gone

    @property
    def is_gone(self) -> bool:
        """Tell whether it has ended, or must not be used; `reason` says why."""
        return self._is_gone

    @property
    def was_well(self) -> bool:
        """Tell whether it had been of use, so that its end was an accident and another one may be started at once."""
        return self._is_ready and time.monotonic() - self._started_at > LEAST_LIFE_S

    @property
    def is_worn(self) -> bool:
        """Tell whether it should be replaced: all its children share the layout of its memory."""
        return self._forks >= MOST_FORKS or time.monotonic() - self._started_at > OLDEST_S

    def _take_message(self, tag: str, body: Mapping[str, Any], _fds: list[int]) -> None:
        if tag != "ready":
            self._is_gone, self.reason = True, "the template process ended while it was loading"
        elif body["threads"] != 1:
            self._is_gone, self.reason = True, f"loading started {body['threads'] - 1} threads, which no fork survives"
        else:
            self._is_ready = True
            self.failed = body["failed"]
            for name, reason in self.failed.items():
                log.warning("preload: %s cannot be loaded ahead: %s", name, reason)

    def fork_helper(self, version: int, folders: Mapping[str, str]) -> socket.socket:
        """Return our end of a new helper's socket; the helper says `here` on it. Raises OSError."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            messages.send(
                self._link.fileno(), "fork", {"version": version, "folders": dict(folders)}, [theirs.fileno()]
            )
        except OSError as error:
            if not isinstance(error, BlockingIOError):
                self._is_gone, self.reason = True, f"the template process cannot be reached: {error}"
            ours.close()
            raise
        finally:
            theirs.close()
        self._forks += 1
        ours.setblocking(False)
        return ours

    def close(self) -> subprocess.Popen[bytes]:
        """Let it end, and return its process to be waited for; helpers that it forked live on."""
        if not self._is_ready:
            self._process.kill()  # it is still loading, and would not read its socket
        self._is_gone = True
        with contextlib.suppress(OSError):
            self._link.shutdown(socket.SHUT_WR)  # a forked child of ours may hold it, too
        self._link.close()
        return self._process

    def forget(self) -> None:
        """Close the link in a forked child, whose it is not."""
        self._is_gone = True
        self._link.close()
        self._process.returncode = 0  # it is no child of this process: there is nothing to wait for


_ROOM = socket.CMSG_SPACE(4 * messages.MAX_DESCRIPTORS)
UNWATCHED_S = 0.02  # how long a run goes on before its helper looks at it
_generations = itertools.count(1, 1 << 32)  # with room for the prefork jails of each handoff socket


class HandoffSocket:
    """Hold the handoff socket, whose other end a helper hands to one prefork jail after the other, by `generation`.

    No two prefork jails of this process have the same number: a later one has a higher one, at any socket.

    A guest that is ready waits at it: `seconds` are those that its jail took to build, step by step. With it comes a
    shared status, for all its prefork jails. Raises OSError.
    """

    def __init__(self) -> None:
        self._link, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._status, self._timer = shared_status.make()
        except BaseException:
            self._link.close()
            self._theirs.close()
            raise
        self._link.setblocking(False)
        self._waiting = select.poll()
        self._waiting.register(self._link, select.POLLIN)
        self.generation = next(_generations)
        self.seconds: Sequence[float] = ()
        self.has_guest = False
        self._workspace: list[int] = []

    def fileno(self) -> int:
        """Return the descriptor to wait on."""
        return self._link.fileno()

    @property
    def other_ends(self) -> tuple[int, int, int]:
        """Return the helper's ends, which keeps copies: the socket's other end, the shared status, its timer."""
        return self._theirs.fileno(), self._status, self._timer

    def hand_over(self) -> None:
        """Close the other end: the helper has it."""
        self._theirs.close()

    def order(
        self,
        body: dict[str, Any],
        fds: Sequence[int],
        *,
        number: int,
        timeout_s: float,
        rebuilds: bool,
        is_under_load: bool = False,
        shares_workspace: bool = False,
    ) -> None:
        """Send the orders of run `number`, which a guest of the present jail takes and no other. Raises OSError.

        The helper checks it when it may have lasted too long to be left alone. If this run turns out to be the last one
        in its jail, the helper builds anew, or waits for the next building. Where this process `is_under_load`, the
        next guest leaves out work that only makes it answer sooner. There, and where the run `shares_workspace` with a
        live session, its end is not reported before the kernel has freed its memory.
        """
        shared_status.note_order(
            self._status,
            number,
            timeout_s,
            rebuilds=rebuilds,
            is_under_load=is_under_load,
            shares_workspace=shares_workspace,
        )
        shared_status.set_timer(self._timer, min(timeout_s, UNWATCHED_S))
        body |= {
            "number": number,
            "generation": self.generation,
            "gives_exit_notice": not (is_under_load or shares_workspace),
        }
        messages.send_by(self._pass_on, "order", body, fds)

    def start_of(self, number: int) -> tuple[float, int]:
        """Return when the program of run `number` started, in seconds on the monotonic clock, 0.0 if it has not.

        With it comes the device number of its guest's workspace.
        """
        return shared_status.start_of(self._status, number)

    def receive(self) -> tuple[str, dict[str, Any]]:
        """Return one message; an empty one for irrelevant ones. Raises BlockingIOError when no message waits."""
        tag, body, fds = self._receive()
        if not tag:
            raise ConnectionResetError("the other end of the handoff socket is gone")
        if body["generation"] < self.generation:  # of a prefork jail that is no more
            _close_all(fds)
            return "", {}
        self.advance(body["generation"])
        if tag == "ready":
            _close_all(self._workspace)
            self._workspace, self.has_guest = fds, True
            self.seconds = body.get("seconds", self.seconds)
        return tag, body

    def _pass_on(self, data: bytes, fds: Sequence[int]) -> None:
        control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
        self._link.sendmsg([data], control, socket.MSG_NOSIGNAL)

    def _receive(self) -> tuple[str, dict[str, Any], list[int]]:
        """Do the same as `messages.receive` by the socket's own methods, which the caller has loaded."""
        try:
            data, control, _, _ = self._link.recvmsg(messages.INLINE_BYTES, _ROOM, socket.MSG_CMSG_CLOEXEC)
        except ConnectionResetError:
            return "", {}, []
        fds = array("i")
        for level, kind, content in control:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
        return messages.read(data, fds.tolist())

    def wait(self, seconds: float, other: int = -1) -> bool:
        """Wait for a message, and tell whether there is one; not when time is up or the other end is gone.

        Neither when there is something to read from `other`, a descriptor.
        """
        waiting = self._waiting
        if other >= 0:
            waiting = select.poll()
            waiting.register(self.fileno(), select.POLLIN)
            waiting.register(other, select.POLLIN)
        events = waiting.poll(seconds * 1000) if seconds > 0 else []
        return bool(events) and all(fd != other and event == select.POLLIN for fd, event in events)

    def advance(self, generation: int) -> None:
        """Take note of the generation that the present jail has; a guest of an earlier one is gone."""
        if generation > self.generation:
            self.generation = generation
            _close_all(self.take_guest())

    def look(self) -> bool:
        """Tell whether a guest is known to wait; raises nothing."""
        try:
            while not self.has_guest:
                self.receive()
        except OSError:
            pass
        return self.has_guest

    def take_guest(self) -> list[int]:
        """Return the mount of the workspace of the waiting guest, which the caller then owns; empty if it is kept."""
        mounts, self._workspace, self.has_guest = self._workspace, [], False
        return mounts

    def close(self) -> None:
        """Close all descriptors."""
        if self._link.fileno() < 0:
            return
        _close_all((*self.take_guest(), self._status, self._timer))
        self._link.close()
        self._theirs.close()


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


START_S = 0.005  # of processor time, at least, that it takes to have another guest ready
MOST_SPENT = 0.5  # of a quota


class SlotNetwork(Protocol):
    """Be the server of the network of a slot's jails, as far as a slot uses it."""

    @property
    def jail_end(self) -> int: ...

    def close(self) -> None: ...


class Slot:
    """Hold one helper of a fork server, and its state, which only the methods here change.

    `key` names the jail that it has built ahead, None for none. `handoff` is where its guests take their orders, None
    where the helper hands them over. `spec` is the last spec that the helper got. Unless it `rebuilds`, after the last
    run in a jail its helper waits for the next building. `kept_bytes` are files of earlier results that its control
    group still pays for. It `is_dying` while the kernel still ends its last run; its helper waits for that. `pid` is
    the helper's, 0 until it has reported it. `network` is the receiver of the sockets for the network of its present
    jail, None without network. `folder` is where its helper makes the folders that replace mounts below level jail. It
    `has_run` from its first run on, and `goes_on` if the last one has left a guest's parent in its initial state.
    """

    def __init__(self, link: socket.socket, cgroup: Mapping[str, Any] | None, template: Template):
        self.link, self.cgroup, self.template = link, cgroup, template
        self.key: Hashable = None
        self.spec: Mapping[str, Any] | None = None
        self.level = ""  # that its helper has begun with, and keeps to
        self._origin: Spec | None = None  # of which `spec` says the same
        self.handoff: HandoffSocket | None = None
        self._counted: dict[str, int] = {}  # the figures of the control group that are no longer any run's own
        self._gauges = Gauges(Cgroup(cgroup["version"], cgroup["folders"])) if cgroup is not None else None
        self._spent_s = 0.0  # of processor time, since the quota was filled
        self.network: SlotNetwork | None = None
        self.folder = ""
        self.rebuilds = True
        self.kept_bytes = 0
        self.is_dying = self.is_dead = self.has_run = self.goes_on = False
        self.pid = 0
        self.idle_since = time.monotonic()

    @property
    def is_well(self) -> bool:
        """Tell whether it was there and well when its link was last read."""
        return self.pid != 0 and not self.is_dead

    @property
    def is_used_up(self) -> bool:
        """Tell whether no guest of another run may come from its helper: below level jail, it knows files of runs."""
        return self.has_run and not self.goes_on and self.level not in ("", "jail")

    def may_build(self, level: str) -> bool:
        """Tell whether its helper may build a jail of another kind, of this level."""
        return self.level in ("", level) and (not self.has_run or level == "jail")

    def has_guest(self) -> bool:
        """Tell whether a guest waits at the handoff socket; True without a socket, where it is not known."""
        return self.handoff is None or self.handoff.look()

    def look(self) -> bool:
        """Tell whether the helper is there and well; raises nothing."""
        try:
            while not self.is_dead:
                tag, body, fds = messages.receive(self.link.fileno())
                for fd in fds:
                    os.close(fd)
                self.take_message(tag, body)
        except BlockingIOError:
            pass
        except OSError:
            self.is_dead = True
        return self.is_well

    def take_message(self, tag: str, body: Mapping[str, Any]) -> None:
        """Take the helper's first message, its report of a run whose end was known before, or its end."""
        if tag == "here":
            self.pid = body["pid"]
        elif tag == "ended" and self.handoff is not None:
            if body["generation"] > self.handoff.generation:
                self.handoff.advance(body["generation"])
                self.key = self.key if self.rebuilds else None
        else:  # any other message, while it waits, is a fault
            self.is_dead = True

    def open(self, spec: Spec, claim: Sequence[int] = ()) -> None:
        """Give the helper the amounts of a sandbox, where they are not the same as before. Raises OSError.

        `claim` is empty, or the descriptor that holds the sandbox's outside id, for a helper that shall not use its
        own.
        """
        if not claim and spec.is_as(self._origin):
            return
        wire = spec.as_wire()
        if spec.cgroup is not None and self.cgroup is not None:
            wire["cgroup"] = {**self.cgroup, "amounts": spec.cgroup["amounts"]}  # the slot's own, not the sandbox's
        if wire == self.spec and not claim:
            self._origin = spec.origin if spec.is_as(spec.origin) else None
            return
        self._origin = None
        if wire["cgroup"] is not None:
            make_cgroup(wire["cgroup"], is_there=self.spec is not None)
        send_packed(self.link.fileno(), "open", {}, wire, claim)
        self.spec, self.level = wire, spec.level

    def prepare(
        self, key: Hashable, building: Building, body: Mapping[str, Any], *, is_prefork: bool, rebuilds: bool,
        workspace: int = -1, network: SlotNetwork | None = None,
    ) -> None:  # fmt: skip
        """Have the helper build the jail that `key` names, with the mount of a workspace where there is one.

        In a prefork jail one guest follows the other; each jail sends its sockets to the `network`, which is the slot's
        own from then on. Raises OSError when the helper is gone.
        """
        self.change_network(network)
        self.change_handoff(HandoffSocket() if is_prefork else None)
        fds: tuple[int, ...] = self.handoff.other_ends if self.handoff is not None else ()
        generation = self.handoff.generation if self.handoff is not None else 0
        how = {"is_prefork": is_prefork, "generation": generation, "has_workspace": workspace >= 0}
        fds += (workspace,) if workspace >= 0 else ()
        if network is not None:
            how["has_network"] = True
            fds += (network.jail_end,)
        send_packed(self.link.fileno(), "prepare", {**body, **how}, building.as_wire(), fds)
        if self.handoff is not None:
            self.handoff.hand_over()
        self.key, self.rebuilds = key, rebuilds

    def keep_folder(self, path: str) -> str:
        """Return where its helper makes its folders ahead: the same `path` from the first time on."""
        self.folder = self.folder or path
        return self.folder

    def drop_folder(self) -> None:
        """Have the folder of the last run removed, where there is one: the caller is through with it."""
        if self.folder:
            try:
                messages.send(self.link.fileno(), "drop")
            except OSError:
                self.is_dead = True

    def invalidate(self) -> None:
        """Mark the jail that was built ahead as unusable."""
        self.key = None

    def account(self, report: dict[str, Any], *, is_watched: bool) -> None:
        """Record the end of a run, and add to its report its own share of the figures of the control group.

        For a run that `is_watched`, the helper has filled the quota.
        """
        if not is_watched:
            self._spent_s += report["cpu_user_s"] + report["cpu_system_s"] + START_S
        before = self._counted
        now = self._count()
        peak_tasks = now.get("tasks", 0)
        report["tasks"] = peak_tasks if peak_tasks > before.get("tasks", 0) else 0
        figures = now.items() if now != before else ()  # nearly always as before
        report["counters"] = {name: number - before.get(name, 0) for name, number in figures if name != "tasks"}
        self.is_dying, self.goes_on, self.has_run = bool(report.get("is_quiet")), bool(report.get("goes_on")), True

    def account_failure(self) -> None:
        """Take note that a run failed before its program started; a jail that keeps a workspace ends by that."""
        self._count()
        if not self.rebuilds:
            self.invalidate()

    def account_files(self, stored_bytes: int) -> None:
        """Take note that a result lives on with files that the control group pays for."""
        self.kept_bytes += stored_bytes

    def refill_quota(self, spec: Spec) -> None:
        """Fill the processor quota before it runs out: a run shall not pay for those before. Raises OSError."""
        if self.cgroup is None or spec.cgroup is None:
            return
        cpus = spec.cgroup["amounts"]["cpus"]
        if self._spent_s > MOST_SPENT * cpus * PERIOD_US / 1e6:
            self._spent_s = 0.0
            Cgroup(self.cgroup["version"], self.cgroup["folders"]).renew_quota(cpus)

    def _count(self) -> dict[str, int]:
        """Return the figures of the control group, and remember them: later increases are a later run's."""
        if self._gauges is not None:
            self._counted = self._gauges.read()
        return self._counted

    def note_unused(self) -> None:
        """Note that it is unused from now on."""
        self.idle_since = time.monotonic()

    def change_handoff(self, handoff: HandoffSocket | None) -> None:
        """Use another handoff socket; the one before is closed."""
        if self.handoff is not None:
            self.handoff.close()
        self.handoff = handoff

    def change_network(self, network: SlotNetwork | None) -> None:
        """Have another network, or none; the one before is closed."""
        if self.network is not None:
            self.network.close()
        self.network = network

    def stop_counting(self) -> None:
        """Close the files with the control group's figures; the next reading opens them again."""
        if self._gauges is not None:
            self._gauges.close()

    def close(self) -> None:
        """Close our ends; the helper ends by that."""
        self.stop_counting()
        self.change_handoff(None)
        self.change_network(None)
        self.link.close()


def send_packed(link: int, tag: str, body: Mapping[str, Any], payload: dict[str, Any], fds: Sequence[int] = ()) -> None:
    """Send a message with a payload in a memory file. Raises OSError when the helper is gone."""
    packed = messages.pack(payload)
    try:
        messages.send(link, tag, dict(body), [packed, *fds])
    finally:
        os.close(packed)
