"""The networks of a sandbox's runs and sessions, with its secrets, where it has some."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cloche.core.policy import Policy
from cloche.egress.client import SandboxNetwork
from cloche.jail.messages import Spec

from ..network import open_shared_network
from .plan import show_authority

if TYPE_CHECKING:
    from cloche.egress.windows import SharedNetwork

    from ..secrets import GuestSecrets


async def open_session_network(policy: Policy, spec: Spec) -> tuple[SharedNetwork | None, GuestSecrets | None]:
    """Return a session's network and secrets, and show it their certificates; None for what it has not."""
    if policy.secrets is None:
        return (open_shared_network(policy) if spec.network is not None else None), None
    from ..secrets import open_shared_with_secrets  # needed by some sandboxes only

    network, secrets = await open_shared_with_secrets(policy)
    show_authority(spec, secrets)
    return network, secrets


async def open_run_secrets(policy: Policy, spec: Spec) -> tuple[SandboxNetwork, GuestSecrets]:
    """Return the network and the secrets of a sandbox whose runs take turns, and show it their certificates."""
    from ..secrets import open_with_secrets

    network, secrets = await open_with_secrets(policy)
    show_authority(spec, secrets)
    return network, secrets
