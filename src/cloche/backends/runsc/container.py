"""One container of gVisor: how it is started, killed and let go."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import select
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from cloche.core.errors import StartFailed
from cloche.core.outcome import KillCause, Observed

from ..containers.boot import boot_message
from ..containers.container import START_S, Container
from ..containers.frames import CHUNK_BYTES, OUTPUT, Link
from ..layout import has_customization, user_site
from .place import Place
from .plan import Plan, Shown

log = logging.getLogger("cloche.runsc")
ERROR = 2
SETTLE_S = 5.0  # for word of a container's end
STALL_S = 60.0  # for a container to take more of what it is sent


# How runsc begins the lines of its log, and how it says in one what ended it, or which of our words it does not know.
_LOGGED = re.compile(r"[DIWEF]\d{4} [\d:.]+ +\d+ [\w.]+:\d+\] ?")
_FATAL = re.compile(r"FATAL ERROR: (.+)|(flag provided but not defined: .+)")
_MOST_REASON = 300


def reason_in(said: str) -> str:
    """Return the line of what runsc wrote to standard error that says why it ended, without what its log adds."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    fatal = [found[1] or found[2] for line in lines if (found := _FATAL.search(line))]
    plain = [line for line in lines if not _LOGGED.match(line)]
    chosen = (fatal or plain or [_LOGGED.sub("", line) for line in lines])[-1:]
    return "".join(chosen)[:_MOST_REASON]


class PipeWire:
    """Hold the pipes to a container's standard streams; see containers.frames.Wire."""

    def __init__(self, stall_s: float = STALL_S) -> None:
        """Open the pipes. Raises OSError when there is no room for them; then none is left open."""
        self.stall_s = stall_s
        with ExitStack() as on_failure:
            (theirs_in, self._in), (self._out, theirs_out), (self._err, theirs_err) = (
                _pipe(on_failure) for _ in range(3)
            )
            on_failure.pop_all()
        os.set_blocking(self._in, False)
        self.theirs = (theirs_in, theirs_out, theirs_err)
        self._turn = threading.Lock()

    def send(self, data: bytes) -> None:
        """Send bytes. Raises OSError when the container is gone, TimeoutError when it takes nothing for a while."""
        view, poll = memoryview(data), select.poll()
        with self._turn:
            if self._in < 0:
                raise ConnectionError("the container was let go")
            poll.register(self._in, select.POLLOUT)
            while view:
                if not poll.poll(self.stall_s * 1000):
                    raise TimeoutError(f"it took nothing of what it was sent for {self.stall_s:g} s")
                with contextlib.suppress(BlockingIOError):
                    view = view[os.write(self._in, view) :]

    def pieces(self) -> Iterator[tuple[int, bytes]]:
        """Yield what the container writes."""
        poll, streams = select.poll(), {self._out: OUTPUT, self._err: ERROR}
        for fd in streams:
            poll.register(fd, select.POLLIN)
        while streams:
            for fd, _ in poll.poll():
                data = os.read(fd, CHUNK_BYTES)
                if data:
                    yield streams[fd], data
                else:
                    poll.unregister(fd)
                    del streams[fd]

    def let_go_of_theirs(self) -> None:
        """Close the container's ends, which it holds itself."""
        for fd in self.theirs:
            os.close(fd)

    def hang_up(self) -> None:
        """End the container's standard input."""
        with self._turn:
            if self._in >= 0:
                os.close(self._in)
                self._in = -1

    def close(self) -> None:
        """Let go of everything."""
        self.hang_up()
        os.close(self._out)
        os.close(self._err)


def _pipe(on_failure: ExitStack) -> tuple[int, int]:
    ends = os.pipe()
    for fd in ends:
        on_failure.callback(os.close, fd)
    return ends


class RunscContainer(Container[Shown]):
    """Hold one started container in a place, which may hold its predecessor too."""

    def __init__(self, place: Place, plan: Plan):
        super().__init__()
        self.place, self.plan, self.ground = place, plan, plan.shown
        self.number = 0
        self._end: Mapping[str, Any] = {}
        self._has_ended = threading.Event()

    def start(self, preload: Sequence[str], *, patience_s: float = START_S) -> None:
        """Start it, and wait until it listens. Raises StartFailed; then nothing of it is left."""
        try:
            wire = PipeWire(min(patience_s, STALL_S))
        except OSError as error:
            raise StartFailed(f"there are no pipes for a container of gVisor: {error}", step="runsc") from error
        try:
            self.number = self.place.start(self.plan, wire.theirs, self._note_end)
        except BaseException:
            wire.let_go_of_theirs()
            wire.close()
            raise
        wire.let_go_of_theirs()
        self._link = Link(wire, self._hear, self._lose)
        try:
            self._link.send_raw(boot_message(preload, extra_paths=user_site(), customizes=has_customization()))
            self._ready.wait(patience_s)
            if self.is_lost or not self._ready.is_set():
                raise StartFailed(f"a container of gVisor did not get ready{self.last_words()}", step="runsc")
            if self._said.get("kernel") == os.uname().release:
                raise StartFailed("what runs as runsc is not gVisor: a container saw this host's kernel", step="runsc")
            self.start_s = time.time() - self.started_at
        except OSError as error:
            self.end()
            raise StartFailed(
                f"a container of gVisor is gone{self.last_words() or f': {error}'}", step="runsc"
            ) from error
        except BaseException:
            self.end()
            raise

    def _reason_in(self, said: str) -> str:
        log.debug("what runsc said: %s", said)
        return reason_in(said)

    def end(self) -> None:
        """End this container alone; the place stays, and the workspace in it."""
        self.place.kill(self.number)
        self.hang_up()

    def kill(self) -> None:
        """Kill the container."""
        self.place.kill(self.number)

    def see_out(self) -> None:
        """Let it go, with its place."""
        self.place.close()
        self.hang_up()

    def words(self) -> Sequence[str]:
        """Return the words that started it."""
        return self.plan.words(self.number)

    def end_by_guest(self) -> Observed | None:
        """Say what it died of: memory, processes, or a signal that the guest sent to our first process."""
        if not self._has_ended.wait(SETTLE_S):
            return None
        end = self._end
        if end.get("cause") == "out_of_memory" or end.get("oom_kills"):
            return Observed(cause=KillCause.OUT_OF_MEMORY)
        if end.get("pids_hits"):
            return Observed(signal=signal.SIGKILL, pids_hits=int(end["pids_hits"]))
        status = int(end.get("status", 0))
        is_killed_inside = os.WIFEXITED(status) and os.WEXITSTATUS(status) == 128 + signal.SIGKILL
        return Observed(signal=signal.SIGKILL) if is_killed_inside else None

    def _note_end(self, end: Mapping[str, Any]) -> None:
        self._end = end
        self._has_ended.set()
