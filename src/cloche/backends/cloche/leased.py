"""Backends over a fleet: each sandbox has a place on a node, by a lease, and runs there over the wire.

The engine says where; what a sandbox can do is the same as at a service (`backend="cloche"`).
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
from abc import abstractmethod
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import ClassVar

from cloche.core.ceilings import image_digest
from cloche.core.fleet import Fleet, LeaseSpec
from cloche.core.limits import Limits
from cloche.core.loops import become_task
from cloche.core.policy import Policy
from cloche.core.record import replace
from cloche.core.remote import Quota, RemoteAccount
from cloche.fleets.leases import HeldLease, Leases, no_engine

from ..remote.failures import Failure, RemoteUnavailable
from .backend import ClocheBackend
from .connections import connected
from .live import RemoteSandbox
from .sandbox import ThrowawaySandbox

# For places whose node does not answer: the coordinator notices a dead one within seconds, a busy one after 15.
REACHED_S, AGAIN_S, LONGEST_AGAIN_S = 30.0, 0.2, 2.0
_UNREACHABLE = (Failure.NO_NETWORK, Failure.TIMEOUT, Failure.TLS)
_of_processes: dict[tuple[str, RemoteAccount, int], Leases] = {}


class LeasedBackend(ClocheBackend):
    """Run code on the nodes of a fleet. The `url` of its account is the fleet's address, and may be empty."""

    package: ClassVar[str]  # that is imported for the engine

    @abstractmethod
    async def connect(self, account: RemoteAccount) -> Fleet:
        """Return the fleet. Raises BackendUnavailable."""

    def account(self) -> RemoteAccount:
        """Return the account, by default that of the fleet which the environment names."""
        return self._account or RemoteAccount(provider=self.name)

    def _checked(self) -> RemoteAccount:
        for package in (self.package, "websockets", "cryptography"):
            if importlib.util.find_spec(package) is None:
                raise no_engine(self.name, package, self.name)  # its extra brings all of them
        return self.account()

    @asynccontextmanager
    async def open(self, policy: Policy, limits: Limits) -> AsyncIterator[ThrowawaySandbox]:
        """Open a throwaway sandbox on a node. Raises InvalidRequest, BackendUnavailable."""
        self._settled(policy, limits)  # what is refused anyway takes no place
        async with self._leased(self._spec(policy, limits)) as node:
            async with node.open(policy, limits) as sandbox:
                yield sandbox
            node.is_empty = True

    def open_live(self, policy: Policy, limits: Limits) -> AbstractAsyncContextManager[RemoteSandbox]:
        """Open a live sandbox on a node."""
        return self._living_on_node(policy, limits)

    @asynccontextmanager
    async def _living_on_node(self, policy: Policy, limits: Limits) -> AsyncIterator[RemoteSandbox]:
        self._settled(policy, limits)
        async with self._leased(self._spec(policy, limits, sandboxes=self._checked().fleet.sandboxes)) as node:
            async with node.open_live(policy, limits) as sandbox:
                yield sandbox
            node.is_empty = sandbox.has_ended

    @asynccontextmanager
    async def _leased(self, spec: LeaseSpec) -> AsyncIterator[_NodeBackend]:
        """Yield the backend of a place whose node answers. A place that may hold something is not used again."""
        await become_task()
        leases = self._leases()
        held, account = await self._reachable(leases, spec)
        node = _NodeBackend(account, self._image)
        node.usual_level = self.usual_level
        try:
            yield node
        finally:
            leases.give_back(held, is_used_up=not node.is_empty)

    def _spec(self, policy: Policy, limits: Limits, *, sandboxes: int = 1) -> LeaseSpec:
        """Return what so many sandboxes need of a node, and what they will use there."""
        prefers = (*policy.digests, image_digest(self._image)) if self._image else policy.digests
        cpus, memory_bytes = sandboxes * limits.cpus, sandboxes * limits.memory_bytes
        return LeaseSpec(cpus=cpus, memory_bytes=memory_bytes, prefers=prefers, wait_s=self.account().fleet.wait_s)

    async def _reachable(self, leases: Leases, spec: LeaseSpec) -> tuple[HeldLease, RemoteAccount]:
        """Take a place. Raises BackendUnavailable, also if no node that is given answers for `REACHED_S`."""
        loop = asyncio.get_running_loop()
        ends, again_s = loop.time() + REACHED_S, AGAIN_S
        while True:
            held = await leases.take(spec)
            place = {"url": held.lease.address, "certificate": held.lease.certificate, "place": held.place}
            account = replace(self._checked(), **place)  # type: ignore[arg-type]  # a field each
            try:
                await connected(account)
            except BaseException as error:
                leases.give_back(held, is_used_up=True)
                is_away = isinstance(error, RemoteUnavailable) and error.failure in _UNREACHABLE
                if not is_away or loop.time() > ends:
                    raise
            else:
                return held, account
            await asyncio.sleep(again_s)
            again_s = min(2 * again_s, LONGEST_AGAIN_S)

    def _leases(self) -> Leases:
        account = self._checked()
        key = self.name, replace(account, quota=Quota(), quota_file=None), os.getpid()
        leases = _of_processes.get(key)
        if leases is None:
            leases = _of_processes[key] = Leases(lambda: self.connect(account), ttl_s=account.fleet.ttl_s)
        return leases


class _NodeBackend(ClocheBackend):
    """Run code at the node of a lease, whose account needs no key."""

    is_empty = False  # nothing of a sandbox is left in its place, for certain

    def __init__(self, account: RemoteAccount, image: str):
        super().__init__(account)
        self._leased_account, self._image = account, image

    def _checked(self) -> RemoteAccount:
        return self._leased_account
