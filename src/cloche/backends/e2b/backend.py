"""The e2b backend: each sandbox is a machine of E2B, or of a server with the same API, in the configured account.

No request is sent before a sandbox is used. Until then, available means that the package and the key are present.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from cloche.core.enforcement import Control, Enforcement, Level, Measure, NetworkMode, State
from cloche.core.errors import BackendUnavailable
from cloche.core.limits import Limits
from cloche.core.policy import Policy
from cloche.core.protocols import Capabilities
from cloche.core.remote import RemoteAccount

from ..containers.live import HOME
from ..garbage_collection import owner
from ..remote.accounts import AccountBackend, check_account
from ..remote.claims import check_claims, claimed_capabilities, claimed_controls, claimed_enforcement
from ..remote.labels import is_left
from ..remote.quota import counter_for
from .live import E2BLiveSandbox
from .machine import OURS, E2BMachine, kill_sandbox, list_sandboxes, plan_sandbox
from .sandbox import E2BOpenSandbox
from .sdk import EXTRA, KEY_VARIABLE, PACKAGE, PROVIDER, provider_of

NETWORKS: tuple[NetworkMode, ...] = ("off", "allowlist", "open")
CONTROLS = claimed_controls(
    "E2B",
    {
        Control.CPU: Measure(
            state=State.PARTIAL,
            mechanism="the processors of the template, claimed by E2B",
            reason="a sandbox cannot have another number",
        ),
        Control.MEMORY: Measure(
            state=State.PARTIAL,
            mechanism="sums of the processes' own memory, every 20 ms, by Cloche's first process there; the "
            "template's size",
            reason="shared memory is not counted, and the machine may be smaller than the limit",
        ),
    },
)


class E2BBackend(AccountBackend):
    """Give sandboxes at E2B, for one account."""

    name = PROVIDER

    def _claimed(self, account: RemoteAccount) -> Capabilities:  # noqa: ARG002 - the same for all
        return claimed_capabilities(self.name, Level.VM, CONTROLS, NETWORKS)

    @asynccontextmanager
    async def open(self, policy: Policy, limits: Limits) -> AsyncIterator[E2BOpenSandbox]:
        """Open a sandbox; it is created at the provider on first use.

        Raises BackendUnavailable if the account cannot be used or a required control is missing.
        """
        machine, enforcement = await asyncio.to_thread(self._planned, policy, limits, is_live=False)
        sandbox = E2BOpenSandbox(machine=machine, policy=policy, limits=limits, enforcement=enforcement)
        try:
            yield sandbox
        finally:
            await sandbox.close()

    @asynccontextmanager
    async def open_live(self, policy: Policy, limits: Limits) -> AsyncIterator[E2BLiveSandbox]:
        """Open a live sandbox; it is created at the provider on first use.

        Raises BackendUnavailable as `open` does, and if the policy has several users.
        """
        if policy.users:
            raise BackendUnavailable(
                f'backend "{self.name}": a sandbox has one user.',
                remedy='Leave users out, or use backend "local" or "docker".',
            )
        machine, enforcement = await asyncio.to_thread(self._planned, policy, limits, is_live=True)
        sandbox = E2BLiveSandbox(machine=machine, policy=policy, limits=limits, enforcement=enforcement)
        try:
            yield sandbox
        finally:
            await sandbox.close()

    def collect_garbage(self) -> list[str]:
        """End the sandboxes of dead processes; return one line for each. Raises BackendUnavailable."""
        account = self._checked()
        provider, counter, leftover = provider_of(account), counter_for(account), []
        for name, whose in list_sandboxes(provider, {OURS: "1"}):
            if is_left(whose):
                kill_sandbox(provider, name)
                if counter is not None:
                    counter.forget_sandbox(name)
                leftover.append(f"sandbox {name} at E2B")
        return leftover

    def _checked(self) -> RemoteAccount:
        return check_account(self._account, provider=PROVIDER, package=PACKAGE, extra=EXTRA, variable=KEY_VARIABLE)

    def _planned(self, policy: Policy, limits: Limits, *, is_live: bool) -> tuple[E2BMachine, Enforcement]:
        """Return a machine that is not created yet, and its enforcement report. Raises BackendUnavailable."""
        account, enforcement = self._checked(), claimed_enforcement(Level.VM, CONTROLS)
        check_claims(
            policy, enforcement, backend=self.name, networks=NETWORKS,
            network="E2B has off, open, and lists of hosts",
            level="E2B claims (vm). Use another backend for a lower one",
        )  # fmt: skip
        if limits.timeout_s > account.lifetime_s:
            raise BackendUnavailable(
                f'backend "e2b": a run may take {limits.timeout_s:g} s, and a sandbox ends there after '
                f"{account.lifetime_s:g} s.",
                remedy="Use a shorter time-out, or raise e2b.lifetime as far as the provider allows.",
            )
        homes = (HOME,) if is_live and policy.user != "nobody" else ()
        plan = plan_sandbox(
            policy, limits, template=account.template, lifetime_s=account.lifetime_s, is_live=is_live, homes=homes
        )
        return E2BMachine(provider_of(account), plan, owner()), enforcement
