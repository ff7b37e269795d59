"""Put the network questions of a sandbox with a name into the queue of approvals, while no caller is attached.

The sandbox's keeper starts `main` in a new process, with a link to the egress process as standard input. That process
ends with the link, or after a time without questions; the keeper starts another one on demand.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Mapping
from functools import partial
from typing import Any

from cloche.audit.log import Audit
from cloche.core.ceilings import NetworkCeiling
from cloche.egress.client import join_network
from cloche.egress.windows import SharedNetwork
from cloche.execution.network import check_ceiling, may_be_asked
from cloche.keeper import registry
from cloche.keeper.attach import Kept, read_entry

from .approval import ApprovalRequest, Decided, record_decision
from .queue import ApprovalQueue

IDLE_S, END_S = 60.0, 30.0
log = logging.getLogger("cloche.agent")


class HostApprovals:
    """Have the queue decide about hosts for one sandbox, within the operator's ceiling."""

    def __init__(self, name: str, kept: Kept, ceiling: NetworkCeiling | None, audit: Audit | None):
        self._name, self._kept, self._audit = name, kept, audit
        self._check = partial(check_ceiling, ceiling)
        self._queue = ApprovalQueue()
        self._asking = 0
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

    async def decide(self, host: str, port: int) -> bool | None:
        """Return the decision, None without one in time, or if it could not be recorded."""
        if not may_be_asked(self._check, host, port):
            return False
        entry = self._kept
        request = ApprovalRequest.of_host(
            host, port, policy=entry.policy, runs_on=entry.backend, sandbox=self._name
        )  # fmt: skip
        self._asking += 1
        try:
            decision = await self._queue(request)
            record_decision(self._audit, Decided(request=request, decision=decision))
        except Exception as error:
            log.warning("%s:%d is refused for now, because the approver cannot be asked: %s", host, port, error)
            return None
        finally:
            self._asking -= 1
            self.asked.set()
        return None if decision.by == "time-out" else decision.is_approved is True


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
