"""The caller's end of a place: namespaces of their own in which containers come and go, with one workspace.

A keeper process outside holds the place for as long as our socket is open; see `jail.place`. So a caller that is
killed leaves nothing, and one that closes it has nothing left to do but wait, which happens in the background.
"""

from __future__ import annotations

import itertools
import logging
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cloche.core.errors import StartFailed
from cloche.jail import wire
from cloche.jail.cgroups import Cgroup
from cloche.jail.launch import start_keeper

from ..containers.background import Background
from ..groups import clear_groups, group_name
from ..host import Host
from ..noting import noted
from .plan import Plan

OPEN_S, PATIENCE_S = 30.0, 10.0
KIND = "gvisor"  # of control groups
log = logging.getLogger("cloche.runsc")
_background = Background("cloche-runsc-end", 2 * PATIENCE_S)
wait_for_all = _background.wait_for_all
KILLED = {"number": 0, "status": 9, "cause": ""}
OnEnd = Callable[[Mapping[str, Any]], None]


class Place:
    """Hold one place. All methods block, and are for any thread."""

    def __init__(self, plan: Plan, host: Host):
        """Start it. Raises StartFailed; then nothing is left."""
        self._host = host
        self._numbers = itertools.count(1)
        self._waiting: dict[int, OnEnd] = {}
        self._answers: dict[int, threading.Event] = {0: threading.Event()}
        self._failed: dict[int, str] = {}
        self._folders: dict[int, Mapping[str, str]] = {}
        self._turn = threading.Lock()
        self.is_lost = False
        clear_groups(host, KIND)
        try:
            self._process, self._link = start_keeper(sys.executable)
        except OSError as error:
            raise StartFailed(f"cannot start the keeper process: {error}", step="keeper") from error
        self._reader = threading.Thread(target=self._read, name="cloche-runsc", daemon=True)
        self._reader.start()
        try:
            inside = 0 if plan.engine.is_rootless else None
            self._say("open", {"calls": plan.open_calls(), "inside_id": inside})
            self._await(0, "namespaces for gVisor cannot be made")
        except BaseException:
            self.close()
            raise

    def start(self, plan: Plan, streams: Sequence[int], on_end: OnEnd) -> int:
        """Start a container with these standard streams; `on_end` is called in another thread. Raises StartFailed."""
        number = next(self._numbers)
        cgroup = _cgroup(plan, self._host)
        self._answers[number] = threading.Event()
        self._waiting[number] = on_end
        if cgroup is not None:
            self._folders[number] = cgroup["folders"]
        body = {
            "number": number,
            "calls": plan.start_calls(number),
            "folder": plan.folder(number),
            "words": plan.words(number),
            "env": {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"},
            "cgroup": cgroup,
            "watched_bytes": 0 if cgroup else plan.guest_bytes,
            "processors": 0 if cgroup else max(1, round(plan.cpus)),
        }
        self._say("start", body, streams)
        self._await(number, "gVisor's runsc cannot be started")
        return number

    def kill(self, number: int) -> None:
        """Kill a container, with all that is in it."""
        with noted(log, "a container goes with its place, which takes no order to kill it", StartFailed):
            self._say("kill", {"number": number})

    def close(self) -> None:
        """Let everything go, and in the background make sure that it is gone."""
        with noted(log, "the keeper process had hung up first", OSError):
            self._link.shutdown(socket.SHUT_RDWR)
        _background.begin(self._make_sure)

    def _say(self, tag: str, body: dict[str, Any], fds: Sequence[int] = ()) -> None:
        try:
            with self._turn:
                if not _can_take(self._link):  # sending waits for ever, and with the interpreter's lock
                    raise TimeoutError(f"it takes no order within {PATIENCE_S:g} s")
                wire.send(self._link.fileno(), tag, body, fds)
        except OSError as error:
            raise StartFailed(f"the keeper process does not answer: {error}", step="keeper") from error

    def _await(self, number: int, what: str) -> None:
        has_answered = self._answers[number].wait(OPEN_S)
        del self._answers[number]
        if not has_answered:
            raise StartFailed(f"{what}: no answer within {OPEN_S:g} s", step="runsc")
        why = self._failed.get(number) or ("the keeper process is gone" if self.is_lost else "")
        if why:
            raise StartFailed(f"{what}: {why}", step="runsc")

    def _read(self) -> None:
        """Take what the keeper says until it is gone."""
        with noted(log, "the keeper process is not heard any more", OSError):
            poll = select.poll()
            poll.register(self._link.fileno(), select.POLLIN)
            while poll.poll():  # which lets go of the interpreter's lock; receiving would not
                tag, body, _ = wire.receive(self._link.fileno())
                if not tag:
                    break
                self._hear(tag, body)
        self.is_lost = True
        for number in list(self._waiting):
            self._waiting.pop(number)({**KILLED, "number": number})
        for answered in list(self._answers.values()):
            answered.set()

    def _hear(self, tag: str, body: Mapping[str, Any]) -> None:
        number = body["number"]
        if tag == "failed":
            self._failed[number] = str(body["why"])
        if tag in ("failed", "ended") and number in self._waiting:
            self._waiting.pop(number)(body)
        if tag == "ended":
            self._folders.pop(number, None)
        answered = self._answers.get(number)
        if answered is not None:
            answered.set()

    def _make_sure(self) -> None:
        try:
            try:
                self._process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(PATIENCE_S)
            self._reader.join(PATIENCE_S)
            if self._reader.is_alive():
                log.warning("what a keeper process said is still being read, so its link stays open")
            else:  # closed before, its number could be another's by the time that it is read from
                with self._turn:
                    self._link.close()
            if self._process.returncode != 0:
                self._remove_groups()
        except subprocess.TimeoutExpired:
            log.warning("the keeper process %d of a gVisor container was killed, and has not ended", self._process.pid)

    def _remove_groups(self) -> None:
        """Do what a keeper that was killed could not; its processes died with it."""
        for folders in self._folders.values():
            Cgroup(self._host.cgroup_version, folders).remove()


def _cgroup(plan: Plan, host: Host) -> dict[str, Any] | None:
    if not host.cgroup_version:
        return None
    name = group_name(KIND)
    folders = {controller: f"{folder}/{name}" for controller, folder in host.cgroup_folders.items()}
    return {"version": host.cgroup_version, "folders": folders, "amounts": plan.amounts()}


def _can_take(link: socket.socket) -> bool:
    poll = select.poll()
    poll.register(link.fileno(), select.POLLOUT)
    return bool(poll.poll(PATIENCE_S * 1000))
