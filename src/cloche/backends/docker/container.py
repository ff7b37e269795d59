"""One container of a daemon: how it is started, killed and let go."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from cloche.core.errors import StartFailed
from cloche.core.outcome import KillCause, Observed

from ..containers.boot import boot_message
from ..containers.container import START_S, Container
from ..containers.frames import Link
from ..noting import noted
from .daemon import Daemon, explained
from .frames import AttachedWire
from .images import Image
from .plan import Plan
from .remains import see_out

log = logging.getLogger("cloche.docker")


class DockerContainer(Container[Image]):
    """Hold one started container with our first process in it. All methods block, and are for any thread."""

    def __init__(self, daemon: Daemon, plan: Plan, image: Image):
        super().__init__()
        self.daemon, self.plan, self.ground = daemon, plan, image
        self.id = ""

    def start(self, preload: Sequence[str]) -> None:
        """Create and start it, and wait until it listens. Raises StartFailed; then nothing is left."""
        self.id = self.daemon.create(self.plan.api())
        try:
            wire = AttachedWire(self.daemon.attach(self.id))
            self._link = Link(wire, self._hear, self._lose)
            self.daemon.start(self.id)
            self._begin(self._link, preload)
            self._ready.wait(START_S)
            if self.is_lost or not self._ready.is_set():
                raise StartFailed(f"the container of {self.ground.name!r} did not get ready{self.last_words()}")
            self.start_s = time.time() - self.started_at
        except OSError as error:
            self._abandon()
            raise StartFailed(f"the container of {self.ground.name!r} is gone: {error}{self.last_words()}") from error
        except BaseException:
            self._abandon()
            raise

    def _begin(self, link: Link, preload: Sequence[str]) -> None:
        """Send the first process its program."""
        link.send_raw(boot_message(preload))

    def _abandon(self) -> None:
        self.hang_up()
        self.daemon.remove(self.id)

    def kill(self) -> None:
        """Kill the container."""
        self.daemon.kill(self.id)

    def lift_quota(self) -> None:
        """Let what is being killed have a whole processor; gVisor has no such call."""
        if self.plan.cpus < 1 and not self.plan.is_gvisor:
            with noted(log, "what is killed dies with the share of the processors that it had", Exception):
                self.daemon.give_processor(self.id, self.plan.pids)

    def see_out(self) -> None:
        """Let it go, with the workspace that is its own."""
        see_out(self)

    def words(self) -> Sequence[str]:
        """Return the words of the `docker run` that makes the same container."""
        return self.plan.arguments()

    def end_by_guest(self) -> Observed | None:
        """Ask the daemon whether it ran out of memory."""
        import docker.errors
        import requests

        try:
            has_run_out = self.daemon.ran_out_of_memory(self.id, self.started_at, time.time())
        except (docker.errors.DockerException, requests.exceptions.RequestException) as error:
            log.debug("the daemon does not say what a container died of: %s", explained(error))
            return None
        return Observed(cause=KillCause.OUT_OF_MEMORY) if has_run_out else None
