"""Put the network questions of a sandbox with a name into the queue of approvals, while no attached caller decides.

The sandbox's keeper starts `main` in a new process, with a link to the egress process as standard input. That process
ends with the link, or after a time without questions; the keeper starts another one on demand. A question waits longer
than the connection that raised it, and its end without an answer is a no. Hosts that were allowed for the folder of the
sandbox are not asked about.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import socket
import subprocess
from collections.abc import Mapping
from functools import partial
from typing import Any

from cloche.audit.log import Audit
from cloche.core.ceilings import NetworkCeiling
from cloche.core.errors import InvalidRequest
from cloche.egress.client import join_network
from cloche.egress.windows import HostAnswer, SharedNetwork
from cloche.execution.network import check_ceiling, may_be_asked
from cloche.keeper import registry
from cloche.keeper.attach import Kept, read_entry

from .approval import ApprovalRequest, Decided, Decision, record_decision
from .network_grants import GrantFolder, add_grant, use_grant
from .queue import ApprovalQueue

IDLE_S, END_S = 60.0, 30.0
WAITS_S, MOST_WAITING = 3600.0, 16  # of the questions of one sandbox
NOTIFY_AGAIN_S = 10.0
PROGRAMS = "/usr/local/bin:/usr/bin:/bin:/run/current-system/sw/bin"  # not PATH, which may have folders of projects
log = logging.getLogger("cloche.agent")


class HostApprovals:
    """Have the queue decide about hosts for one sandbox, within the operator's ceiling."""

    def __init__(self, name: str, kept: Kept, ceiling: NetworkCeiling | None, audit: Audit | None):
        self._name, self._kept, self._audit = name, kept, audit
        self._check = partial(check_ceiling, ceiling)
        self._queue = ApprovalQueue(patience_s=WAITS_S)
        self._folder = _folder_of(kept)
        self._asking, self._notified_at = 0, -NOTIFY_AGAIN_S
        self.asked = asyncio.Event()

    @property
    def is_asking(self) -> bool:
        """Tell whether anything waits for a decision."""
        return self._asking > 0

    async def close(self) -> None:
        """Wait until abandoned questions are closed in the queue, too."""
        async with asyncio.timeout(END_S):
            while self.is_asking:
                self.asked.clear()
                await self.asked.wait()

    async def decide(self, host: str, port: int) -> HostAnswer | bool | None:
        """Return the decision; one that is not final where there are too many questions, or none can be recorded."""
        if not may_be_asked(self._check, host, port):
            return False
        if self._folder is not None and await asyncio.to_thread(_is_granted, self._folder, host, port):
            return True
        if self._asking >= MOST_WAITING:
            return None
        entry, folder = self._kept, self._folder.path if self._folder is not None else ""
        request = ApprovalRequest.of_host(
            host, port, policy=entry.policy, runs_on=entry.backend, sandbox=self._name, folder=folder
        )  # fmt: skip
        self._asking += 1
        self._notify(host, port)
        try:
            decision = await self._queue(request)
            record_decision(self._audit, Decided(request=request, decision=decision))
        except Exception as error:
            log.warning("%s:%d is refused for now, because the approver cannot be asked: %s", host, port, error)
            return None
        finally:
            self._asking -= 1
            self.asked.set()
        if decision.is_approved is True and decision.is_for_folder is True and self._folder is not None:
            await asyncio.to_thread(_grant, self._folder, host, port)
        return _answer_of(decision)

    def _notify(self, host: str, port: int) -> None:
        """Show a notification on the user's desktop, where there is one; not many at once."""
        now = asyncio.get_running_loop().time()
        if now >= self._notified_at + NOTIFY_AGAIN_S:
            self._notified_at = now
            notify(f"Sandbox {self._name} asks for {host}:{port}", "Decide with: cloche approvals watch")


def _answer_of(decision: Decision) -> HostAnswer:
    if decision.is_approved is True:
        return HostAnswer(is_allowed=True, is_once=decision.is_once is True)
    why = f"the user was asked, and did not answer within {WAITS_S / 60:.0f} minutes" * (decision.by == "time-out")
    return HostAnswer(is_allowed=False, why=why)


def _folder_of(kept: Kept) -> GrantFolder | None:
    """Return the folder of the host that a sandbox works on, if it has one that is there."""
    shown = kept.policy.host_folder
    if shown is None:
        return None
    try:
        folder = GrantFolder.at(shown.path)
    except InvalidRequest:
        return None
    return folder if folder.inode == shown.identity[1] else None


def _is_granted(folder: GrantFolder, host: str, port: int) -> bool:
    try:
        return use_grant(folder, host, port)
    except InvalidRequest as error:  # an unusable file: the user is asked
        log.warning("%s", error)
        return False


def _grant(folder: GrantFolder, host: str, port: int) -> None:
    try:
        add_grant(folder, host, port)
    except InvalidRequest as error:
        log.warning("%s:%d is allowed for this sandbox alone: %s", host, port, error)


def notify(title: str, text: str) -> None:
    """Show a notification on the user's desktop, where it has the program for it; nobody waits for that."""
    program = shutil.which("notify-send", path=PROGRAMS)
    bus = os.environ.get("DBUS_SESSION_BUS_ADDRESS") or os.path.exists(f"{os.environ.get('XDG_RUNTIME_DIR')}/bus")
    if program is None or not bus:
        return
    words = [program, "--app-name=Cloche", "--expire-time=30000", "--", title, text]
    try:
        subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, process_group=0
        )
    except OSError as error:
        log.debug("no notification: %s", error)


def main(name: str) -> None:
    """Put the questions of this user's sandbox of this name, until none come."""
    asyncio.run(_stand_in(name, socket.socket(fileno=0)))


async def _stand_in(name: str, control: socket.socket) -> None:
    network, rules, _ = join_network(control)
    entry = registry.find(name).entry
    sandbox, asking = read_entry(name, entry), entry["asking"]
    approvals = HostApprovals(
        name, sandbox, _ceiling(asking["ceiling"]), Audit(asking["audit"]) if asking["audit"] else None
    )
    shared = SharedNetwork(network, sandbox.policy.network_rules().parse(**rules))
    shared.decide_by(approvals.decide)
    try:
        while not shared.is_lost:
            approvals.asked.clear()
            waiting = [asyncio.ensure_future(event.wait()) for event in (shared.lost, approvals.asked)]
            finished, _ = await asyncio.wait(waiting, timeout=IDLE_S, return_when=asyncio.FIRST_COMPLETED)
            for task in waiting:
                task.cancel()
            if not (finished or approvals.is_asking):
                return
    finally:
        shared.close()
        await approvals.close()


def _ceiling(document: Mapping[str, Any] | None) -> NetworkCeiling | None:
    """Return the operator's ceiling of when the sandbox was opened."""
    if document is None:
        return None
    hosts = None if document["hosts"] is None else tuple(document["hosts"])
    return NetworkCeiling(mode=document["mode"], hosts=hosts, networks=tuple(document["networks"]))
