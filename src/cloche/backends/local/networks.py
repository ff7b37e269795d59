"""The networks of a sandbox's runs and sessions, with its secrets, where it has some."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from cloche.core.errors import StartFailed
from cloche.core.policy import Policy
from cloche.egress.client import KeptNetwork, SandboxNetwork
from cloche.jail.messages import Run, Spec

from ..layout import Row
from ..live_files import FILE_MODE
from ..network import new_network, open_kept_network, open_shared_network

if TYPE_CHECKING:
    from cloche.egress.windows import SharedNetwork
    from cloche.forkserver.slot import Slot

    from ..secrets import GuestSecrets


def authority_rows(policy: Policy) -> list[Row]:
    """Return the rows of a file tree with room for the authority of a sandbox; none without secrets."""
    if policy.secrets is None:
        return []
    from ..secrets import authority_row  # needed by some sandboxes only

    return [authority_row()]


def show_authority(spec: Spec, secrets: GuestSecrets) -> None:
    """Show a sandbox the certificates with its own authority; its spec is like no other one then."""
    spec.mounts, spec.origin = [*(row for row in spec.mounts if row[0] != "shown text"), *secrets.rows], None


async def open_session_network(policy: Policy, spec: Spec) -> tuple[SharedNetwork | None, GuestSecrets | None]:
    """Return a session's network and secrets, and show it their certificates; None for what it has not."""
    if policy.secrets is None:
        return (open_shared_network(policy) if spec.network is not None else None), None
    from ..secrets import open_shared_with_secrets

    network, secrets = await open_shared_with_secrets(policy)
    show_authority(spec, secrets)
    return network, secrets


class LentNetwork:
    """Be a sandbox's network for one of its jails, whose end does not end it."""

    def __init__(self, network: SandboxNetwork):
        self.jail_end = network.jail_end

    def close(self) -> None:
        """Do nothing: the sandbox closes it."""


class RunNetwork:
    """Hold the network and the secrets of a sandbox whose runs take turns.

    That is its own, or, for a single run in a jail that had waited, that of the jail's slot.
    """

    def __init__(self, policy: Policy):
        self._policy = policy
        self._own: SandboxNetwork | None = None
        self.secrets: GuestSecrets | None = None

    def own(self) -> SandboxNetwork:
        """Return the sandbox's own, opened at the first call. Raises StartFailed."""
        if self._own is None:
            self._own = _open_network(self._policy)
        return self._own

    def lent(self) -> LentNetwork | None:
        """Return it for one of several jails, which then have the same secrets; None where each has its own network."""
        return LentNetwork(self.own()) if self._policy.secrets is not None else None

    def used_by(self, slot: Slot | None) -> SandboxNetwork | None:
        """Return the one that a run had."""
        network = slot.network if slot is not None else None
        return network if isinstance(network, SandboxNetwork) else self._own

    async def fill(self, slot: Slot | None) -> GuestSecrets:
        """Give the secrets to the network of a slot's jail, or to the sandbox's own. Raises as `fill_network` does."""
        from ..secrets import fill_network

        network = self.used_by(slot) or self.own()
        self.secrets = await fill_network(self._policy, network)
        return self.secrets

    def give_back(self, slot: Slot) -> None:
        """Have the network of a slot's jail carry nothing until it gets the secrets of another sandbox."""
        if self.secrets is not None and isinstance(slot.network, SandboxNetwork):
            with suppress(OSError):  # the egress process is gone
                slot.network.give_secrets()

    def leave_slot(self) -> None:
        """Take note that a slot has ended, with the secrets that were in the network of its jail."""
        self.secrets = self.secrets if self._own is not None else None

    def close(self) -> None:
        """Close the sandbox's own."""
        if self._own is not None:
            self._own.close()
            self._own = None


def _open_network(policy: Policy) -> SandboxNetwork:
    rules = policy.network_rules()
    if policy.secrets is None:
        return new_network(rules)
    from ..secrets import open_waiting_network

    try:
        return open_waiting_network(rules)
    except OSError as error:
        reason = error.strerror or error
        raise StartFailed(f"cannot open the network: {reason}", step="network", errno=error.errno) from error


def add_files(run: Run, secrets: GuestSecrets) -> dict[str, bytes]:
    """Have a run in a workspace that is its home write the files of secrets there, once; return their contents."""
    texts = files_of(secrets)
    given = {path for path, *_ in run.files}
    run.files = [*((path, FILE_MODE, data) for path, data in texts.items() if path not in given), *run.files]
    return texts


def files_of(secrets: GuestSecrets | None) -> dict[str, bytes]:
    """Return the files of secrets, by paths below the home folder."""
    return {path: text.encode() for path, text in secrets.texts.items()} if secrets is not None else {}


async def open_live_network(
    policy: Policy, spec: Spec, *, is_kept: bool
) -> tuple[SharedNetwork | None, KeptNetwork | None, GuestSecrets | None]:
    """Return a live sandbox's network, or the one that its keeper gets, and its secrets; None for what it has not."""
    if policy.secrets is None:
        return (None, open_kept_network(policy), None) if is_kept else (open_shared_network(policy), None, None)
    from ..secrets import open_own_with_secrets

    if not is_kept:
        network, secrets = await open_session_network(policy, spec)
        return network, None, secrets
    own, secrets = await open_own_with_secrets(policy)
    show_authority(spec, secrets)
    return None, own, secrets
