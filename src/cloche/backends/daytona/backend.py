"""The backend "daytona": its availability, its sandboxes, and the removal of sandboxes of dead processes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from cloche.core.enforcement import Control, Enforcement, Level, Measure, NetworkMode, State
from cloche.core.errors import BackendUnavailable
from cloche.core.limits import Limits
from cloche.core.policy import Policy
from cloche.core.protocols import Capabilities
from cloche.core.remote import RemoteAccount

from ..remote.accounts import AccountBackend
from ..remote.claims import check_claims, claimed_capabilities, claimed_controls, claimed_enforcement
from ..remote.labels import LABEL, is_left
from ..remote.quota import counter_for
from .client import DaytonaClient, checked
from .sandbox import DaytonaLiveSandbox, DaytonaMachine, DaytonaOpenSandbox, wait_for_all

NETWORKS: tuple[NetworkMode, ...] = ("off", "open")
_THERE = "if the provider's kernel works as documented"


def _partial(mechanism: str, reason: str) -> Measure:
    return Measure(state=State.PARTIAL, mechanism=mechanism, reason=reason)


def daytona_controls(network: str = "off") -> Mapping[Control, Measure]:
    """Return the controls of a sandbox at Daytona: its own claims, and the limits set inside."""
    changes = {
        Control.MEMORY: _partial(
            "RLIMIT_DATA of each process; private memory of all is summed inside every 20 ms",
            "the limit can be exceeded in between, shared memory is not counted, and the total limit is the provider's",
        ),
        Control.PIDS: _partial("RLIMIT_NPROC of an id of its own", _THERE),
        Control.DISK: _partial(
            "RLIMIT_FSIZE; a file system in memory with a fixed size, if root there may mount one",
            "if it may not, all files together can fill the sandbox's own disk",
        ),
    }
    if network == "open":
        changes[Control.NETWORK] = _partial(
            "the provider's network", "it can reach any address that the provider allows"
        )
    return claimed_controls("Daytona", changes)


class DaytonaBackend(AccountBackend):
    """Give sandboxes at Daytona, for an account."""

    name = "daytona"

    def _checked(self) -> RemoteAccount:
        return checked(self._account)

    def _claimed(self, account: RemoteAccount) -> Capabilities:  # noqa: ARG002 - the same for all
        return claimed_capabilities(self.name, Level.VM, daytona_controls(), NETWORKS)

    @asynccontextmanager
    async def open(self, policy: Policy, limits: Limits) -> AsyncIterator[DaytonaOpenSandbox]:
        """Open a sandbox; it is created at the first run. Raises BackendUnavailable."""
        account, enforcement = self._choose(policy)
        sandbox = DaytonaOpenSandbox(
            new_machine=lambda: DaytonaMachine(DaytonaClient(account), policy, limits),
            policy=policy, limits=limits, enforcement=enforcement,
        )  # fmt: skip
        try:
            yield sandbox
        finally:
            await sandbox.close()

    @asynccontextmanager
    async def open_live(self, policy: Policy, limits: Limits) -> AsyncIterator[DaytonaLiveSandbox]:
        """Open a live sandbox; it is created on first use. Raises BackendUnavailable."""
        if policy.users:
            raise BackendUnavailable(
                'backend "daytona": a sandbox has one user.', remedy='Leave users out, or use backend "local".'
            )
        account, enforcement = self._choose(policy)
        sandbox = DaytonaLiveSandbox(
            new_machine=lambda homes: DaytonaMachine(DaytonaClient(account), policy, limits, homes),
            policy=policy, limits=limits, enforcement=enforcement,
        )  # fmt: skip
        try:
            yield sandbox
        finally:
            await sandbox.close()

    def drain(self) -> None:
        """Wait until all released sandboxes are deleted."""
        wait_for_all()

    def collect_garbage(self) -> list[str]:
        """Delete sandboxes whose label names a dead process of this host; return one line for each."""
        account = self._checked()
        client, counter, deleted = DaytonaClient(account), counter_for(account), []
        try:
            for sandbox in client.list_with(LABEL):
                if is_left(sandbox.labels[LABEL]):
                    client.delete(sandbox.id)
                    deleted.append(f"sandbox {sandbox.id}")
                    if counter is not None:
                        counter.forget_sandbox(sandbox.id)
        finally:
            client.close()
        return deleted

    def _choose(self, policy: Policy) -> tuple[RemoteAccount, Enforcement]:
        """Return the account and the enforcement report. Raises BackendUnavailable."""
        account = self._checked()
        enforcement = claimed_enforcement(Level.VM, daytona_controls(policy.network))
        check_claims(
            policy, enforcement, backend=self.name, networks=NETWORKS,
            network="at Daytona it is off or open: its own lists have neither ports nor host names",
            level="Daytona claims (vm). Use another backend for a lower one",
        )  # fmt: skip
        return account, enforcement
