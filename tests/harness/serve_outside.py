"""`cloche` whose steps with a network run at level process: egress never reaches loopback, where a test's index is."""

from __future__ import annotations

from cloche.cli import main
from cloche.core.enforcement import Level
from cloche.core.policy import Policy
from cloche.core.record import replace
from cloche.packages import steps

real = steps.step_policy


def step_policy(policy: Policy, step: steps.Step) -> Policy:
    """Return the policy of a step, at level process if it has a network."""
    if step.network_allow:
        policy = replace(policy, level=Level.PROCESS, require_level=None, require_controls=())
    return real(policy, step)


steps.step_policy = step_policy
if __name__ == "__main__":
    main()
