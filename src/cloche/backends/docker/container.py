"""One container: how it is started, talked to, and let go."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from cloche.core.errors import StartFailed

from .boot import boot_message
from .daemon import Daemon
from .frames import CHUNK_BYTES, Link
from .images import Image
from .plan import Plan
from .running import DATA, DONE, FAILED

READY, ORDER, KILL, TOLD, WORD = b"H", b"O", b"K", b"L", b"W"
OF_FILES = (DATA, DONE, FAILED)
START_S = 60.0


class Listener(Protocol):
    """Hear what a container says; called in its reading thread."""

    def hear(self, tag: bytes, body: bytes) -> None:
        """Take one frame."""
        ...

    def lose(self) -> None:
        """Learn that nothing more will come."""
        ...


class Container:
    """Hold one started container with our first process in it. All methods block, and are for any thread."""

    def __init__(self, daemon: Daemon, plan: Plan, image: Image):
        self.daemon, self.plan, self.image = daemon, plan, image
        self.id = ""
        self.is_lost = False
        self.started_at, self.start_s = time.time(), 0.0
        self._listener: Listener | None = None
        self._asker: Listener | None = None
        self._ready = threading.Event()
        self._link: Link | None = None

    def start(self, preload: Sequence[str]) -> None:
        """Create and start it, and wait until it listens. Raises StartFailed; then nothing is left."""
        self.id = self.daemon.create(self.plan.api())
        try:
            connection = self.daemon.attach(self.id)
            self._link = Link(connection, self._hear, self._lose)
            self.daemon.start(self.id)
            self._begin(self._link, preload)
            self._ready.wait(START_S)
            if self.is_lost or not self._ready.is_set():
                raise StartFailed(f"the container of {self.image.name!r} did not get ready{self.last_words()}")
            self.start_s = time.time() - self.started_at
        except OSError as error:
            self._abandon()
            raise StartFailed(f"the container of {self.image.name!r} is gone: {error}{self.last_words()}") from error
        except BaseException:
            self._abandon()
            raise

    def _begin(self, link: Link, preload: Sequence[str]) -> None:
        """Send the first process its program."""
        link.send_raw(boot_message(preload))

    def _abandon(self) -> None:
        self.hang_up()
        self.daemon.remove(self.id)

    def listen(self, listener: Listener | None) -> None:
        """Hand everything that comes from now on to `listener`."""
        self._listener = listener
        if listener is not None and self.is_lost:
            listener.lose()

    def answer_to(self, asker: Listener | None) -> None:
        """Hand what is said about files to `asker`, and no longer to who listens to all."""
        self._asker = asker
        if asker is not None and self.is_lost:
            asker.lose()

    def tell(self, data: bytes) -> None:
        """Send what is meant for a session's interpreter. Raises OSError when the container is gone."""
        link = self._connected()
        for at in range(0, len(data), CHUNK_BYTES):
            link.send(TOLD, data[at : at + CHUNK_BYTES])

    def heed(self, word: str, **body: int) -> None:
        """Send the first process a word about a session. Raises OSError when the container is gone."""
        self._connected().send(WORD, json.dumps({"word": word, **body}).encode())

    def order(self, order: Mapping[str, Any], *payloads: bytes) -> None:
        """Send an order, and what belongs to it. Raises OSError when the container is gone."""
        link = self._connected()
        link.send(ORDER, json.dumps(order).encode())
        for payload in payloads:
            link.send_data(payload)

    def kill_guest(self) -> None:
        """Ask the first process to kill everything else; the container itself when it cannot be asked."""
        try:
            self._connected().send(KILL)
        except OSError:
            self.kill()

    def kill(self) -> None:
        """Kill the container."""
        self.daemon.kill(self.id)

    def hang_up(self) -> None:
        """End the conversation; the container then ends by itself."""
        if self._link is not None:
            self._link.close()

    def last_words(self) -> str:
        """Return what it said on standard error, for messages."""
        said = self._link.last_words.decode("utf-8", "replace").strip() if self._link is not None else ""
        return f": {said[-600:]}" if said else ""

    def ran_out_of_memory(self) -> bool:
        """Ask the daemon whether it ran out of memory."""
        return self.daemon.ran_out_of_memory(self.id, self.started_at, time.time())

    def _connected(self) -> Link:
        if self._link is None or self.is_lost:
            raise ConnectionError("the container is gone")
        return self._link

    def _hear(self, tag: bytes, body: bytes) -> None:
        if tag == READY:
            self._ready.set()
        else:
            self._hand_on(tag, body)

    def _hand_on(self, tag: bytes, body: bytes) -> None:
        listener = self._listener
        if self._asker is not None and tag in OF_FILES:
            listener = self._asker
        if listener is not None:
            listener.hear(tag, body)

    def _lose(self) -> None:
        self.is_lost = True
        self._ready.set()
        for listener in (self._listener, self._asker):
            if listener is not None:
                listener.lose()
