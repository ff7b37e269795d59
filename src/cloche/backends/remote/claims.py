"""Controls that a provider claims for its sandboxes, which cannot be verified from here, and the check of a policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cloche.core.enforcement import Control, Enforcement, Level, Measure, State
from cloche.core.errors import BackendUnavailable
from cloche.core.policy import Policy
from cloche.core.protocols import Capabilities

from ..enforcement import check_policy

# Controls that are enforced here, independent of the provider.
_OWN = {
    Control.TIME: Measure(state=State.ENFORCED, mechanism="wall clock here; a remote sandbox that is late is ended"),
    Control.OUTPUT: Measure(state=State.ENFORCED, mechanism="bounded buffers here, flood limit kills"),
}


def claimed(by: str, reason: str = "") -> Measure:
    """Return the measure of a control that `by` claims."""
    return Measure(state=State.CLAIMED, mechanism=f"claimed by {by}", reason=reason)


def claimed_controls(by: str, changes: Mapping[Control, Measure] | None = None) -> Mapping[Control, Measure]:
    """Return a measure for each control: enforced for those implemented here, claimed for the rest, except for
    `changes`.
    """
    return {**{control: claimed(by) for control in Control}, **_OWN, **(changes or {})}


def claimed_enforcement(level: Level, controls: Mapping[Control, Measure]) -> Enforcement:
    """Return the enforcement report of a remote sandbox."""
    return Enforcement(level=level, controls=controls, level_source="claimed")


def claimed_capabilities(
    backend: str, level: Level, controls: Mapping[Control, Measure], networks: tuple[Any, ...] = ("off",)
) -> Capabilities:
    """Return the capabilities of an available provider."""
    return Capabilities(
        backend=backend, available=True, level=level, controls=controls, networks=networks, level_source="claimed"
    )


def unavailable(backend: str, error: BackendUnavailable) -> Capabilities:
    """Return the capabilities of an unavailable provider, with the reason and the remedy of `error`."""
    return Capabilities(
        backend=backend, available=False, reason=error.reason, remedy=error.remedy, level_source="claimed"
    )


def check_claims(
    policy: Policy,
    enforcement: Enforcement,
    *,
    backend: str,
    networks: tuple[str, ...],
    network: str,
    level: str,
    can_ask: bool = False,
    has_account: bool = False,
) -> None:
    """Raise BackendUnavailable if a control that the policy requires would be missing; see `check_policy`."""
    check_policy(
        policy, enforcement, networks=networks, network=network, level=level, can_ask=can_ask,
        has_account=has_account,
        lacks=lambda missing: BackendUnavailable(
            f"backend {backend!r}: {missing}.",
            remedy="Accept the provider's own claims (accept_claimed), ask for less, or use a backend of this "
            "host.",
        ),
    )  # fmt: skip
