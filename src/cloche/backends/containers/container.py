"""One container: how it is talked to. How it is started, killed and let go is each backend's own."""

from __future__ import annotations

import json
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from cloche.core.outcome import Observed

from .frames import CHUNK_BYTES, Link
from .guest import NOFILE
from .running import DATA, DONE, FAILED, read_object

READY, ORDER, KILL, TOLD, WORD = b"H", b"O", b"K", b"L", b"W"
OF_FILES = (DATA, DONE, FAILED)
START_S = 60.0
SMALL_BYTES = 32 * 1024  # that are sent without a thread


class Listener(Protocol):
    """Hear what a container says; called in its reading thread."""

    def hear(self, tag: bytes, body: bytes) -> None:
        """Take one frame."""
        ...

    def lose(self) -> None:
        """Learn that nothing more will come."""
        ...


class Ground(Protocol):
    """Say what a container was made of: an image, or what is shown of the host."""

    @property
    def id(self) -> str:
        """Name exactly this one."""
        ...

    @property
    def name(self) -> str:
        """Name it to people."""
        ...


G = TypeVar("G", bound=Ground)


class Container(ABC, Generic[G]):
    """Hold one started container with our first process in it. All methods block, and are for any thread."""

    ground: G

    def __init__(self) -> None:
        self.is_lost = self.is_given_up = False
        self.started_at, self.start_s = time.time(), 0.0
        self._listener: Listener | None = None
        self._asker: Listener | None = None
        self._ready = threading.Event()
        self._said: Mapping[str, Any] = {}
        self._link: Link | None = None

    @property
    def what(self) -> str:
        """Name it to people."""
        return "container"

    @property
    def slowness(self) -> float:
        """Return how many times longer than usual one must be patient with what runs in it."""
        return 1.0

    @abstractmethod
    def start(self, preload: Sequence[str]) -> None:
        """Create and start it, and wait until it listens. Raises StartFailed; then nothing is left."""

    @abstractmethod
    def kill(self) -> None:
        """Kill the container."""

    @abstractmethod
    def end_by_guest(self) -> Observed | None:
        """Say what it died of where that was the guest's doing, else None; may wait some seconds for the answer."""

    @abstractmethod
    def see_out(self) -> None:
        """Let it go with all that is its own, and in the background make sure that it is gone."""

    @abstractmethod
    def words(self) -> Sequence[str]:
        """Return the words of a command that makes the same container."""

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

    def expect_python(self) -> None:
        """Have the first process fork a guest ahead, for a Python program. Raises OSError when it is gone."""
        self.order({"do": "expect", "nofile": NOFILE})

    def kill_guest(self) -> None:
        """Ask the first process to kill everything else; the container itself when it cannot be asked."""
        try:
            self._connected().send(KILL)
        except OSError:
            self.kill()

    def lift_quota(self) -> None:
        """Let what is being killed have more of the processors, where that can be had: a process dies by running."""
        return

    def hang_up(self) -> None:
        """End the conversation; the container then ends by itself."""
        if self._link is not None:
            self._link.close()

    def give_up(self) -> None:
        """Take it for lost: it does not answer, and whoever was to kill it has not done so."""
        self.is_given_up = True
        self.hang_up()
        self._lose()

    def why_lost(self) -> str:
        """Say what is known of a run that it was lost with."""
        if self.is_given_up:
            return f"the {self.what} does not answer and could not be killed; the code may still be running"
        return f"the {self.what} was lost while the code ran, and nobody said why; it may have run to its end"

    def last_words(self) -> str:
        """Return what it said on standard error, for messages."""
        said = self._link.last_words.decode("utf-8", "replace").strip() if self._link is not None else ""
        return f": {self._reason_in(said)}" if said else ""

    def _reason_in(self, said: str) -> str:
        return said[-600:]

    def _connected(self) -> Link:
        if self._link is None or self.is_lost:
            raise ConnectionError("the container is gone")
        return self._link

    def _hear(self, tag: bytes, body: bytes) -> None:
        if tag == READY:
            self._said = read_object(body)
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
