"""Which packages and images this machine has, by their digests: the coordinator prefers its leases to go there."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
from collections.abc import Callable, Sequence

from cloche.config.options import SandboxOptions
from cloche.config.settings import load_settings
from cloche.core.errors import ClocheError
from cloche.execution.packages import shared_store
from cloche.execution.registry import image_digests
from cloche.wire.exec_options import backend_for_image

MOST_DIGESTS, MOST_IMAGES = 1_000, 250
LOOK_EVERY_S = 10.0
log = logging.getLogger("cloche.fleet")


def digests_here(options: SandboxOptions) -> list[str]:
    """Return what a node with these options has: images, if requests may name some, and packages. Blocks."""
    settings = load_settings(dict(options))
    images: Sequence[str] = ()
    if settings.images_allow:
        try:
            images = image_digests(backend_for_image(settings))[:MOST_IMAGES]
        except ClocheError as error:
            log.debug("the images of this node are not known: %s", error)
    return [*images, *shared_store().digests(MOST_DIGESTS - len(images))]


class HeldDigests:
    """Hold what `look` returned last, the most recently used first; it is called in a thread."""

    def __init__(self, look: Callable[[], Sequence[str]]):
        self._look = look
        self._next_at = 0.0
        self._task: asyncio.Task[None] | None = None
        self.all: tuple[str, ...] = ()
        self.tag = ""  # differs when they do

    async def refresh(self) -> None:
        """Look now."""
        try:
            digests = tuple(await asyncio.to_thread(self._look))
        except (ClocheError, OSError) as error:
            log.debug("the digests of this node are not known: %s", error)
            return
        self.all, self.tag = digests, hashlib.sha256(json.dumps(sorted(digests)).encode()).hexdigest()[:16]

    def refresh_in_time(self) -> None:
        """Look in the background, unless that was done within `LOOK_EVERY_S` or goes on."""
        now = time.monotonic()
        if now >= self._next_at and (self._task is None or self._task.done()):
            self._next_at = now + LOOK_EVERY_S
            self._task = asyncio.ensure_future(self.refresh())
