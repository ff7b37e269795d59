"""One open sandbox of the docker backend, and the programs of its requests and sessions.

The workspace is a tmpfs volume, which exists as long as a container has it mounted. The last container therefore stays,
idle, until the next has started. If no container is left, the workspace is lost.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from cloche.core.enforcement import Control, Enforcement, Measure, State
from cloche.core.errors import BackendUnavailable, StartFailed
from cloche.core.limits import Limits
from cloche.core.policy import Policy
from cloche.core.record import replace
from cloche.core.request import Request

from ..containers.container import ARGUMENTS
from ..containers.program import (
    IMAGE_PATH,
    TEMPORARY,
    WORKSPACE,
    Program,
    SessionProgram,
    language_of,
    program_of,
    program_with_layers,
    session_of,
    session_with_layers,
)
from ..containers.sandbox import SessionSandbox
from ..garbage_collection import owner
from ..session_languages import session_language
from .container import DockerContainer
from .daemon import OWNER_LABEL, Daemon, release
from .images import DockerImage, find_image, image_name
from .layers import fill, places_of, volumes_of
from .plan import FIRST_ID, GVISOR, IDS, ContainerPlan, plan_container
from .shell_container import COMMAND as SHELL_COMMAND
from .shell_container import ShellContainer

COMMAND = ("python3", *ARGUMENTS)
UNWATCHED = Measure(state=State.ENFORCED, mechanism="memory control group; what the file systems in memory hold counts")


def build_program(request: Request, image: DockerImage, number: int = 0) -> Program:
    """Return the program of a request. Raises InvalidRequest, or BackendUnavailable for a missing engine."""
    return program_of(request, image, image_variables(image), has_interpreter=image.has_reaper, number=number)


def image_variables(image: DockerImage) -> dict[str, str]:
    """Return the variables that an image sets, always with a PATH."""
    return {"PATH": IMAGE_PATH, **image.env}


def build_session_program(name: str, env: Mapping[str, str], image: DockerImage) -> SessionProgram:
    """Return the program of a session.

    Raises BackendUnavailable for a language without sessions, and for an image that cannot run it.
    """
    language, driver = session_language(name)
    program = driver.program if driver is not None else "python3"
    missing = [] if image.has_reaper else ["Python 3.11 or later, which keeps a session in a container"]
    missing += [program] if program not in image.programs and driver is not None else []
    if missing:
        raise BackendUnavailable(
            f"image {image.name!r} cannot hold a {language.name} session: it has no {', and no '.join(missing)}. "
            'Use run instead; or build an image that has both with "docker build -f Dockerfile.sandbox -t '
            f'cloche-sandbox .", and name it: --image cloche-sandbox, images: {{{language.name}: NAME}}, or '
            f"CLOCHE_IMAGE_{language.name.upper()}"
        )
    return session_of(language, driver, image, image_variables(image), env)


class DockerOpenSandbox(SessionSandbox[DockerImage, DockerContainer]):
    """Run requests in containers of a daemon, one at a time; see core.protocols.OpenSandbox."""

    _advice = 'See whether the daemon is well: "docker info"'

    def __init__(
        self,
        *,
        daemon: Daemon,
        policy: Policy,
        limits: Limits,
        enforcement: Enforcement,
        images: Mapping[str, str],
        runtime: str = "",
        notes: Mapping[str, str] = MappingProxyType({}),
    ):
        super().__init__(policy=policy, limits=limits, enforcement=enforcement)
        self._daemon, self._images, self._runtime, self._choice_notes = daemon, images, runtime, notes
        self._volume = ""

    def _find_rootfs(self, request: Request | None) -> DockerImage:
        language = language_of(request).name if request is not None else "python"
        return find_image(self._daemon, image_name(language, self._images))

    def _build_program(self, request: Request, rootfs: DockerImage) -> Program:
        return program_with_layers(build_program(request, rootfs), places_of(self._policy.layers))

    def _find_session_rootfs(self, language: str) -> DockerImage:
        return find_image(self._daemon, image_name(session_language(language)[0].name, self._images))

    def _build_session_program(self, language: str, env: Mapping[str, str], rootfs: DockerImage) -> SessionProgram:
        program = build_session_program(language, env, rootfs)
        return session_with_layers(program, places_of(self._policy.layers))

    def _make(self, rootfs: DockerImage, after: DockerContainer | None) -> DockerContainer:
        fill(self._daemon, rootfs, self._policy.layers)
        kind = DockerContainer if rootfs.has_reaper else ShellContainer
        container = kind(self._daemon, self._plan(rootfs, after), rootfs, self._secrets)
        container.start(self._policy.preload)
        return container

    def _plan(self, image: DockerImage, after: DockerContainer | None) -> ContainerPlan:
        user = after.plan.user if after is not None else any_id()
        plan = plan_for(self._daemon, image, self._policy, self._limits, runtime=self._runtime, user=user)
        return replace(plan, volume=self._volume) if after is not None else plan

    def _kind(self, rootfs: DockerImage) -> tuple[object, ...]:
        return id(self._daemon), self._policy.preload, self._plan(rootfs, None).kind()

    def _release(self, container: DockerContainer, *, with_workspace: bool = False) -> None:
        if container.network is not None:
            container.network.close()
        release(container, self._volume if with_workspace else "")

    def _in_memory(self) -> Sequence[str]:
        return in_memory(self._runtime)

    def _notes(self, container: DockerContainer) -> dict[str, Any]:
        return {**notes_of(self._daemon, container.rootfs, self._runtime), **self._choice_notes}

    def _enforced(self, container: DockerContainer) -> Enforcement:
        if container.rootfs.has_reaper:
            return self._enforcement
        controls = {**self._enforcement.controls, Control.MEMORY: UNWATCHED}
        return replace(self._enforcement, controls=controls)

    async def _hold_workspace(self, holder: DockerContainer | None) -> None:
        if holder is None:
            output = self._last.last_output() if self._last is not None else ""
            raise StartFailed(f"the workspace is gone with its container{output}", step="container")
        if not self._volume:
            self._volume = await asyncio.to_thread(self._daemon.volume_of, holder.id)


def plan_for(
    daemon: Daemon, image: DockerImage, policy: Policy, limits: Limits, *, runtime: str, user: int
) -> ContainerPlan:
    """Return the plan of a container of an image."""
    plan = plan_container(
        policy,
        limits,
        image=image.id,
        command=COMMAND if image.has_reaper else SHELL_COMMAND,
        user=user,
        is_watched=image.has_reaper,
        runtime=runtime,
        is_id_mapped=daemon.is_id_mapped,
        labels={OWNER_LABEL: owner()},
    )
    return replace(plan, layers=volumes_of(policy.layers))


def notes_of(daemon: Daemon, image: DockerImage, runtime: str) -> dict[str, Any]:
    """Return the entries for `meta` of results."""
    engine = f"docker {daemon.version}{f', {runtime}' if runtime else ''}"
    return {"backend": "docker", "image": image.name, "engine": engine}


def in_memory(runtime: str) -> tuple[str, ...]:
    """Return the file systems that the container's kernel keeps in memory; on gVisor, the workspace is the host's."""
    return TEMPORARY if runtime in GVISOR else (WORKSPACE, *TEMPORARY)


def any_id() -> int:
    """Return a random user id that, very likely, no other sandbox uses."""
    return FIRST_ID + random.SystemRandom().randrange(IDS)
