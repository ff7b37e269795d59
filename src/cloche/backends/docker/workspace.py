"""The words of the `docker run` that starts the container an agent works in (C15), decided purely.

It is as hard as the container of a run, of the same table of facts; but it lives as long as the agent does, and its
workspace is a folder of the host.
"""

from __future__ import annotations

import dataclasses

from cloche.core.errors import BackendUnavailable
from cloche.core.limits import Limits
from cloche.core.policy import Policy
from cloche.core.workspace import WorkspaceContainer

from ..containers.guest import ENVIRONMENT, WORKSPACE
from .plan import SHELLS, plan_container


def workspace_arguments(wanted: WorkspaceContainer, policy: Policy, limits: Limits) -> list[str]:
    """Return the argument list, `docker` first; a shell is not needed to run it.

    Raises BackendUnavailable for a network that docker does not have.
    """
    if policy.network == "allowlist":
        raise BackendUnavailable(
            "network 'allowlist': a container of docker's has the network off or open, in this version.",
            remedy="Leave network off, or open it.",
        )
    plan = plan_container(
        policy, limits, image=wanted.image, command=wanted.command, user=wanted.user, is_watched=False,
        runtime=wanted.runtime,
    )  # fmt: skip
    plan = dataclasses.replace(plan, pids=plan.pids - SHELLS)  # the command is the first process
    group = wanted.group if plan.user == wanted.user else plan.user
    words = ["docker", "run", "--rm", "--interactive", *(["--tty"] if wanted.has_terminal else [])]
    words += [*plan.walls(), f"--user={plan.user}:{group}", f"--workdir={WORKSPACE}"]
    words += [f"--name={wanted.name}"] if wanted.name else []
    words += [f"--mount=type=bind,{_field('src', host)},dst={place}" for place, host in wanted.folders.items()]
    variables = {**ENVIRONMENT, **wanted.env}
    words += [f"--env={name}" if value is None else f"--env={name}={value}" for name, value in variables.items()]
    return [*words, wanted.image, *wanted.command]


def _field(name: str, value: str) -> str:
    """Return a field of a line of comma-separated values, which is how docker reads a mount."""
    quoted = value.replace('"', '""')
    return f'"{name}={quoted}"'
