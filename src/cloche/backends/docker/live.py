"""A sandbox of the docker backend that lives: one container of a daemon; see `containers.live`."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from cloche.core.enforcement import Enforcement
from cloche.core.errors import BackendUnavailable
from cloche.core.limits import Limits
from cloche.core.policy import Policy
from cloche.core.record import replace
from cloche.core.request import Request

from ..containers.container import ByteReceiver, boot_message
from ..containers.live import HOME, ContainerLiveSandbox
from ..containers.program import (
    ENVIRONMENT,
    Program,
    SessionProgram,
    program_with_layers,
    session_with_layers,
)
from ..layout import USERS, with_layers
from .container import DockerContainer
from .daemon import Daemon
from .images import DockerImage, find_image, image_name
from .layers import fill, places_of
from .plan import GVISOR, ContainerPlan, with_homes
from .sandbox import (
    any_id,
    build_program,
    build_session_program,
    image_variables,
    in_memory,
    notes_of,
    plan_for,
)

# Writable folders besides the workspace. Each has its own size limit, because two mounts cannot share a tmpfs volume.
HOMES = ("/run", "/srv", "/var/tmp")
HOMES_OF_USERS = ("/etc", "/home", "/root")
MOST_ETC_BYTES = 32 << 20
SLACK_NS = 20_000_000  # gVisor: file times come from the host's kernel, whose coarse clock lags by a few ms


def find_live_image(daemon: Daemon, images: Mapping[str, str]) -> DockerImage:
    """Return the image for a sandbox that lives. Blocks. Raises BackendUnavailable if it cannot hold one."""
    image = find_image(daemon, image_name("python", images))
    if not image.has_reaper:
        raise BackendUnavailable(
            f"image {image.name!r} cannot hold a sandbox that lives: it has no Python 3.11 or later, which serves it.",
            remedy="Leave live=True out: then runs take turns; or name another image: --image NAME, or "
            "images: {python: NAME}.",
        )
    return image


class DockerLiveSandbox(ContainerLiveSandbox[DockerContainer]):
    """One container of a daemon. Its image is Python's, or the one configured for all languages."""

    backend = "docker"
    more_homes = HOMES

    def __init__(
        self,
        *,
        daemon: Daemon,
        policy: Policy,
        limits: Limits,
        enforcement: Enforcement,
        image: DockerImage,
        runtime: str = "",
        notes: Mapping[str, str] = MappingProxyType({}),
    ):
        super().__init__(policy=policy, limits=limits, enforcement=enforcement)
        self._daemon, self._image, self._runtime, self._choice_notes = daemon, image, runtime, notes
        self.clock_slack_ns = SLACK_NS if runtime in GVISOR else 0

    def _make(self, receiver: ByteReceiver) -> DockerContainer:
        image = self._image
        fill(self._daemon, image, self._policy.layers)
        return self._launch(DockerContainer(self._daemon, self._plan(image), image, self._secrets), receiver)

    def _boot(self, container: DockerContainer) -> bytes:
        settings = self.live_settings()
        if self._policy.users:
            etc = self._daemon.archive_of(container.id, "/etc", MOST_ETC_BYTES)
            settings["users"] = {
                "shown": [path[1:] for path in container.plan.binds],
                "etc": base64.b64encode(zlib.compress(etc)).decode(),
                "uid": container.plan.user,
                "name": USERS[None][0],
                "home": HOME,
                "env": dict(self._variables()),
            }
        return boot_message(self._policy.preload, live=settings)

    def _plan(self, image: DockerImage) -> ContainerPlan:
        plan = plan_for(self._daemon, image, self._policy, self.limits, runtime=self._runtime, user=any_id())
        return with_homes(replace(plan, has_users=self._policy.users), self._homes())

    def _homes(self) -> tuple[str, ...]:
        return (*HOMES_OF_USERS, *HOMES) if self._policy.users else super()._homes()

    def _in_memory(self) -> Sequence[str]:
        return (*in_memory(self._runtime), *self._homes())

    def _build_program(self, request: Request, number: int) -> Program:
        return program_with_layers(build_program(request, self._image, number), places_of(self._policy.layers))

    def _build_session_program(self, language: str, env: Mapping[str, str]) -> SessionProgram:
        program = build_session_program(language, env, self._image)
        return session_with_layers(program, places_of(self._policy.layers))

    def _variables(self) -> Mapping[str, str]:
        return with_layers({**image_variables(self._image), **ENVIRONMENT}, places_of(self._policy.layers))

    def _notes(self) -> dict[str, Any]:
        return {**notes_of(self._daemon, self._image, self._runtime), **self._choice_notes}
