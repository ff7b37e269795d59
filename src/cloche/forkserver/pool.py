"""Warm slots, ready before a run needs them: how many, which is a pure plan, and the pool that carries it out.

Theory of operation: a slot is a helper, forked from a fork server (`Template`), with its own control group and outside
id. It builds a jail ahead, and another as soon as one was used; a jail is used once, a slot often. `plan` decides how
many there are, without I/O or a clock; the pool performs the plan under a lock that is never held during a wait: all
its actions are messages that need no answer. A slot leaves the pool while a run uses it and comes back only when that
run left nothing behind. Threads and event loops share one pool; a forked child of the caller starts without.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Protocol

from cloche.core.limits import MIB
from cloche.core.record import dataclass
from cloche.jail import messages
from cloche.jail.cgroups import Cgroup
from cloche.jail.work_folder import SPARE, WorkFolder

from .slot import Slot, Template

SLOT_BYTES = 8 * MIB  # that a finished jail which waits may add, with some room …
LOADED_SLOT_BYTES = 32 * MIB  # … and where large modules are preloaded, which each jail has used once for itself
MEMORY_SHARE = 8  # of what is free, at most this part
IDLE_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Describe a pool at one moment. Sizes are in bytes, times in seconds.

    `idle` and `busy` count slots; `peak` is how many were busy at once of late; `least` is the smallest number to keep
    ready, `most` the largest number of slots, `slot_bytes` the memory that one more may take.
    """

    idle: int
    busy: int
    peak: int
    least: int
    most: int
    free_memory_bytes: int
    longest_idle_s: float = 0.0
    slot_bytes: int = SLOT_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """Say how many slots to open, and how many of the idle ones to close."""

    open: int = 0
    close: int = 0


def plan(demand: Demand) -> Moves:
    """Keep as many slots as were busy at once of late, at least `least`, never more than memory allows."""
    affordable = demand.free_memory_bytes // (MEMORY_SHARE * demand.slot_bytes)
    max_slots = max(0, min(demand.most, affordable + demand.busy))
    wanted_slots = min(max_slots, max(demand.least, demand.peak))
    existing = demand.idle + demand.busy
    if existing < wanted_slots:
        return Moves(open=wanted_slots - existing)
    surplus = min(demand.idle, existing - wanted_slots)
    if existing > max_slots or demand.longest_idle_s > IDLE_S:
        return Moves(close=surplus)
    return Moves()


PEAK_MEMORY_S = 60.0
END_TIMEOUT_S = 10.0
RETRY_S = 60.0
LOOK_AGAIN_S = 65.0
BEGIN_S = 0.1  # after the first run, when no second one has come: a process that runs one program needs no fork server
PLAN_AGAIN_S = 0.5  # with as many slots as before, the plan changes with time and free memory alone

log = logging.getLogger("cloche.warm")


class Jail(Protocol):
    """Describe a jail that a slot can build ahead: the equality of two, and the way to have one built."""

    @property
    def key(self) -> Hashable: ...

    @property
    def level(self) -> str: ...

    def prepare(self, slot: Slot) -> None:
        """Tell the slot's helper to build; raises OSError when it is gone or the control group is refused."""
        ...


class Pool:
    """Keep slots of one fork server. `settings` are those of the interpreter's `warm_up`; `namespace` is its user's."""

    def __init__(
        self,
        settings: Mapping[str, Any],
        *,
        cgroup_version: int,
        cgroup_folders: Mapping[str, str],
        group_name: Callable[[], str],
        least: int,
        most: int,
        slot_bytes: int = SLOT_BYTES,
        namespace: int = -1,
    ):
        self._settings, self._slot_bytes, self._namespace = settings, slot_bytes, namespace
        self._version, self._folders, self._group_name = cgroup_version, dict(cgroup_folders), group_name
        self._least, self._most = least, most
        self._lock = threading.Lock()
        self._template: Template | None = None
        self._retry_at = 0.0
        self._idle: list[Slot] = []
        self._busy: set[Slot] = set()
        self._peak, self._peak_at = 0, 0.0
        self._planned, self._plan_again_at = (-1, -1), 0.0
        self._exiting: list[Any] = []
        self._links: list[socket.socket] = []
        self._latest: Jail | None = None
        self._is_closed = self._has_begun = self._is_repeated = False
        self._beginning: threading.Timer | None = None
        self._timer: threading.Timer | None = None

    def start(self) -> None:
        """Start the fork server unless it runs, now and from now on; returns at once."""
        with self._lock:
            self._has_begun = True
            self._have_template()

    def start_soon(self) -> None:
        """Start it in a moment, or at the first request for a slot; returns at once."""
        with self._lock:
            if self._has_begun:
                self._have_template()
            elif self._beginning is None and not self._is_closed:
                self._beginning = threading.Timer(BEGIN_S, self.start)
                self._beginning.daemon = True
                self._beginning.start()

    def start_if_repeated(self) -> None:
        """Start it at the second call: a process that opens one sandbox for a keeper needs none."""
        if self._is_repeated:
            self.start()
        self._is_repeated = True

    def is_ready(self) -> bool:
        """Tell whether the next run can start warm."""
        with self._lock:
            return self._template is not None and self._template.is_ready()

    def take(self, jail: Jail) -> Slot | None:
        """Return a slot, with `jail` built ahead if there is one; None where only a cold start is left.

        Nothing is started before `start` or `start_soon` was called.
        """
        with self._lock:
            self._latest = jail
            self._has_begun |= self._beginning is not None
            template = self._have_template() if self._has_begun else None
            slot = self._choose(jail.key, jail.level)
            if slot is None and template is not None and template.is_ready():
                slot = self._open(template)
            if slot is not None:
                self._busy.add(slot)
                self._note_demand()
            log.debug("a start is %s; %d slots are idle", "cold" if slot is None else "warm", len(self._idle))
            return slot

    def fork(self) -> Slot | None:
        """Return a fresh slot for something that lives long; it is not counted, and never comes back.

        None where there is no fork server yet.
        """
        with self._lock:
            template = self._have_template() if self._has_begun else None
            return self._open(template) if template is not None and template.is_ready() else None

    def give_back(self, slot: Slot) -> None:
        """Take back a slot whose run has ended and left nothing."""
        with self._lock:
            self._busy.discard(slot)
            is_worn = slot.is_dying or slot.is_used_up
            if self._is_closed or is_worn or slot.template.is_gone or slot.template is not self._template:
                self._close(slot)
            else:
                slot.note_unused()
                self._idle.append(slot)
            self._follow_plan()

    def write_off(self, slot: Slot) -> None:
        """Count a slot no more that its user has ended."""
        with self._lock:
            self._busy.discard(slot)
            slot.stop_counting()
            self._follow_plan()

    def close(self) -> None:
        """End everything that waits here, and wait until it is gone."""
        with self._lock:
            for slot in self._idle:
                self._close(slot)
            self._idle.clear()
            self._is_closed = True
            for timer in (self._beginning, self._timer):
                if timer is not None:
                    timer.cancel()
            if self._template is not None:
                self._exiting.append(self._template.close())
                self._template = None
            exiting, self._exiting = self._exiting, []
            links, self._links = self._links, []
        deadline = time.monotonic() + END_TIMEOUT_S
        _await_end(links, deadline)
        for process in exiting:
            process.wait()

    def forget(self) -> None:
        """Close everything in a forked child, whose it is not."""
        for slot in (*self._idle, *self._busy):
            slot.close()
        for link in self._links:
            link.close()
        if self._template is not None:
            self._template.forget()

    def _have_template(self) -> Template | None:
        """Return the fork server, started if it does not run; a worn one is replaced and lives on in its slots."""
        if self._is_closed:
            return None
        template = self._template
        self._exiting = [process for process in self._exiting if process.poll() is None]
        if template is not None and (template.is_ready() or not template.is_gone) and not template.is_worn:
            return template
        now = time.monotonic()
        if template is not None:
            if template.is_gone:
                pause = 0.0 if template.was_well else RETRY_S
                log.warning("%s; the next one is started %s", template.reason, f"in {pause:.0f} s" if pause else "now")
                self._retry_at = now + pause
            self._exiting.append(template.close())
            self._template = None
        if now < self._retry_at:
            return None
        try:
            self._template = Template(self._settings, sys.executable, self._namespace)
            log.debug("a fork server is started")
        except OSError as error:
            log.warning("no warm starts for %d s: cannot start a template: %s", RETRY_S, error)
            self._retry_at = now + RETRY_S
        return self._template

    def _choose(self, key: Hashable, level: str) -> Slot | None:
        """Take the idle slot that fits best and is well: one with a guest that waits, else the longest unused.

        A helper keeps to its first level: the objects that it makes outside of namespaces depend on that.
        """
        # As nearly always, the last one that was in use; where nobody knows if a guest waits, the one that rested most.
        for slot in reversed(self._idle) if level == "jail" else list(self._idle):
            if slot.key == key and slot.is_well and slot.has_guest():
                self._idle.remove(slot)
                return slot
        alike = [slot for slot in reversed(self._idle) if slot.key == key]
        ready = next((slot for slot in alike if slot.has_guest()), None)
        usable = [slot for slot in reversed(self._idle) if slot.key != key and slot.may_build(level)]
        for slots in ([ready] if ready is not None else [], alike[::-1], usable):
            for slot in slots:
                if slot not in self._idle:
                    continue
                if slot.is_well or slot.look():  # one that has died since will take no orders
                    self._idle.remove(slot)
                    return slot
                if slot.is_dead:
                    self._idle.remove(slot)
                    self._close(slot)
        return None

    def _open(self, template: Template) -> Slot | None:
        """Let the fork server fork a helper with a new control group."""
        name = self._group_name()
        folders = {controller: f"{folder}/{name}" for controller, folder in self._folders.items()}
        cgroup = {"version": self._version, "folders": folders} if self._version else None
        try:
            link = template.fork_helper(self._version, folders)
        except OSError:
            return None
        return Slot(link, cgroup, template)

    def _build_ahead(self, slot: Slot) -> None:
        """Let a new slot build the last requested jail."""
        try:
            if self._latest is not None:
                self._latest.prepare(slot)
        except OSError as error:
            log.warning("cannot build a sandbox ahead: %s", error)
            self._close(slot)
            return
        self._idle.insert(0, slot)

    def _close(self, slot: Slot) -> None:
        """Shut down our direction, and keep the other to detect the helper's end; clear up after a killed one."""
        slot.look()
        if slot.is_dead:
            slot.close()
            remove_cgroup(slot.cgroup)
            remove_folder(slot.folder)
            return
        self._links = [link for link in self._links if not _has_ended(link)]
        slot.stop_counting()
        slot.change_handoff(None)
        slot.change_network(None)
        try:
            slot.link.shutdown(socket.SHUT_WR)
        except OSError as error:
            log.debug("a helper had closed its link first: %s", error)
        self._links.append(slot.link)

    def _note_demand(self) -> None:
        now = time.monotonic()
        if len(self._busy) >= self._peak or now - self._peak_at > PEAK_MEMORY_S:
            self._peak, self._peak_at = len(self._busy), now

    def _follow_plan(self) -> None:
        """Open or close idle slots as the plan says."""
        self._note_demand()
        template, now = self._template, time.monotonic()
        if template is None or not template.is_ready():
            return
        if len(self._idle) > self._least and self._timer is None:
            self._timer = threading.Timer(LOOK_AGAIN_S, self._tidy)
            self._timer.daemon = True
            self._timer.start()
        state = (len(self._idle) + len(self._busy), self._peak)
        if state == self._planned and now < self._plan_again_at:
            return
        self._planned, self._plan_again_at = state, now + PLAN_AGAIN_S
        oldest = min((slot.idle_since for slot in self._idle), default=now)
        moves = plan(
            Demand(
                idle=len(self._idle),
                busy=len(self._busy),
                peak=self._peak,
                least=self._least,
                most=self._most,
                free_memory_bytes=free_memory_bytes(),
                longest_idle_s=now - oldest,
                slot_bytes=self._slot_bytes,
            )
        )
        for _ in range(moves.open):
            slot = self._open(template)
            if slot is not None:
                self._build_ahead(slot)
        for slot in sorted(self._idle, key=lambda candidate: candidate.idle_since)[: moves.close]:
            self._idle.remove(slot)
            self._close(slot)

    def _tidy(self) -> None:
        """Apply the plan again without a caller: unused slots are not kept for ever."""
        with self._lock:
            self._timer = None
            if not self._is_closed:
                self._follow_plan()


def free_memory_bytes() -> int:
    """Return the kernel's estimate of available memory, in bytes."""
    with open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 0


def remove_cgroup(cgroup: Mapping[str, Any] | None) -> None:
    """Remove a control group whose helper was killed."""
    if cgroup is not None:
        Cgroup(cgroup["version"], cgroup["folders"]).remove()


def remove_folder(path: str) -> None:
    """Remove the folders that a helper which was killed had made ahead, and no guest had used; "" for none."""
    for folder in (path, f"{path}{SPARE}") if path else ():
        try:
            WorkFolder(folder, folder, folder, None).remove()
        except OSError as error:  # a guest was in it, and it has another name; or it is left to `cloche gc`
            log.debug("a folder that was made ahead is not removed: %s", error)


def _has_ended(link: socket.socket) -> bool:
    """Tell whether the helper at the other end has closed it."""
    try:
        while True:
            tag, _, fds = messages.receive(link.fileno())
            for fd in fds:
                os.close(fd)
            if not tag:
                link.close()
                return True
    except BlockingIOError:
        return False
    except OSError:
        link.close()
        return True


def _await_end(links: list[socket.socket], deadline: float) -> None:
    while links and time.monotonic() < deadline:
        links = [link for link in links if not _has_ended(link)]
        if links:
            time.sleep(0.002)
