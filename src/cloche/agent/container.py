"""The container that an agent itself works in, where it gets one: the argument list that starts it (C15)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Unpack

from cloche.config.keys import Settings
from cloche.config.options import SandboxOptions
from cloche.config.settings import given_options, load_settings
from cloche.core.enforcement import Level
from cloche.core.errors import BackendUnavailable, InvalidRequest
from cloche.core.policy import Policy
from cloche.core.request import WorkspaceContainer
from cloche.execution.inputs import read_argv
from cloche.execution.registry import workspace_arguments

WORKSPACE = "/workspace"
_OF_DOCKER = ("docker", "gvisor", "auto")  # what a file says of backends is about runs


def container_arguments(
    folder: str | PathLike[str],
    image_name: str,
    command: Sequence[str] = (),
    *,
    env: Mapping[str, str | None] | None = None,
    user: tuple[int, int] | None = None,
    name: str = "",
    has_terminal: bool = False,
    **options: Unpack[SandboxOptions],
) -> list[str]:
    """Return the arguments of the `docker run` that starts an agent's container with `folder` as its /workspace (C15).

    `command` runs in the image, by default the image's own. It runs as `user`, a pair of ids, by default the owner of
    the folder, never as root. A variable of `env` with the value None gets its value where docker is called, so that no
    secret is in the list. The folders of the configuration's `roots` are its /memory and /configs.

    Of `options`, the keywords of `cloche.run`, those apply that a container has: memory in bytes, cpus, pids, the size
    of /tmp, network (off or bridge), user, runtime and level. Nothing is started and no daemon is called.

    Raises InvalidRequest for invalid options, BackendUnavailable for a level or network that docker lacks.
    """
    path = os.path.realpath(folder)
    try:
        owner = os.stat(path)
        os.listdir(path)
    except OSError as error:
        why = f"cannot look into {path!r}: {error.strerror}"
        raise InvalidRequest(f"workspace: {why}; name a folder of yours") from None
    settings = load_settings(given_options(options))
    owned = (owner.st_uid, owner.st_gid or owner.st_uid)
    if user is not None and settings.policy.user is not None:
        by = settings.origins.get("user", "argument")
        raise InvalidRequest(f"user: {user[0]} conflicts with {settings.policy.user} ({by}); drop one")
    container = WorkspaceContainer(
        image=image_name,
        command=read_argv(command),
        folders={
            WORKSPACE: path,
            **{f"/{root}": os.path.realpath(host_path) for root, host_path in settings.roots.items()},
        },
        user=(user or owned)[0],
        group=(user or owned)[1],
        env=env or {},
        name=name,
        runtime=_runtime(settings),
        has_terminal=has_terminal,
    )
    return workspace_arguments(container, settings.policy, settings.limits)


def _runtime(settings: Settings) -> str:
    """Return the runtime by name, empty for the daemon's default. Raises for a level that docker cannot give."""
    policy = settings.policy
    _check_controls(settings, policy)
    if settings.backend not in _OF_DOCKER and settings.origins.get("backend") == "argument":
        raise BackendUnavailable(f"backend {settings.backend!r} is requested, and this is a docker container.")
    required_level = max(policy.require_level or Level.NONE, policy.level or Level.NONE)
    if required_level > Level.GVISOR or policy.level in (Level.NONE, Level.PROCESS, Level.CONFINED):
        raise BackendUnavailable(
            f"level {policy.level or required_level} is required, and a container gives jail or gvisor."
        )
    if required_level is not Level.GVISOR and settings.backend != "gvisor":
        return policy.runtime or ""
    if policy.level is Level.JAIL:
        raise InvalidRequest("level gvisor and docker's own runtime exclude each other; drop one")
    return "runsc"


def _check_controls(settings: Settings, policy: Policy) -> None:
    if policy.require_controls:
        by = settings.origins.get("require", "argument")
        raise InvalidRequest(
            f"require: {', '.join(policy.require_controls)} ({by}) is measured when something runs, which an argument "
            'list does not; "cloche backends" says what the daemon enforces'
        )
