"""The networks of a sandbox's runs and sessions, with its secrets, where it has some."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cloche.core.policy import Policy
from cloche.egress.client import OwnNetwork, SandboxNetwork
from cloche.jail.messages import Run, Spec

from ..live_files import FILE_MODE
from ..network import open_own_network, open_shared_network
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
) -> tuple[SharedNetwork | None, OwnNetwork | None, GuestSecrets | None]:
    """Return a live sandbox's network, or the one that its keeper gets, and its secrets; None for what it has not."""
    if policy.secrets is None:
        return (None, open_own_network(policy), None) if is_kept else (open_shared_network(policy), None, None)
    from ..secrets import open_own_with_secrets

    if not is_kept:
        network, secrets = await open_session_network(policy, spec)
        return network, None, secrets
    own, secrets = await open_own_with_secrets(policy)
    show_authority(spec, secrets)
    return None, own, secrets
