"""The loop of init: descriptors, clocks, and frames to the client. One thread, and nothing but the loop waits."""

from __future__ import annotations

import os
import select
import time

from . import wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any, Protocol

    class Host(Protocol):
        """Do the parts that differ between a jail (pid 1 has capabilities) and a container (all have one id)."""

        ender: Ends | None  # ends trees, None for `tree`

        def fork(self, order: dict[str, Any], streams: dict[int, int]) -> Forked:
            """Fork a process that becomes a guest and performs `order`: a program, or `files.serve`. Raises OSError.

            `streams` are its descriptors by the numbers of `wire`.
            """
            ...

        def look(self) -> Iterator[tuple[int, int]]:
            """Yield the pid of each process that lives, the newest first, and the number of its mark; but us."""
            ...

        def note_orphan(self, pid: int) -> None:
            """Take note of the end of a process that the client has not asked for."""
            ...

        def other_pids(self) -> list[int]:
            """Return the pids of all processes but ours."""
            ...

        def signal_others(self, number: int) -> None:
            """Send a signal to all of them at once."""
            ...

        def hold_others(self) -> bool:
            """Stop all of them by one call; False where that takes more than one."""
            ...

        def note_busy(self, *, is_busy: bool) -> None:
            """Take note of whether any process of the client's is at work."""
            ...

        def hand_out(self, channel: int, fd: int) -> bool:
            """Give the client a descriptor for a channel, over another transport; False without one."""
            ...

        def why_failed(self, take: Callable[[str, int], None]) -> None:
            """Find out why a process may have failed, since the last call, and call `take` with it, at once or later.

            The cause if the kernel has killed any, and how often the limit on processes was reached.
            """
            ...

        def is_full(self) -> bool:
            """Tell whether nothing more can be written in the workspace."""
            ...

        def disk(self) -> tuple[int, int]:
            """Return how many bytes of its file system are used, and how many it has; zeros if unknown."""
            ...

    class Ends(Protocol):
        """End all that belongs to a process, or send it a signal, by its mark; see `tree.Ender`."""

        def end(self, mark: int, on_end: Callable[[], None] = ...) -> None: ...
        def signal(self, mark: int, number: int) -> None: ...

    class Mark(Protocol):
        """Stand for all that belongs to a process."""

        number: int

        def close(self) -> None: ...

    class Forked(Protocol):
        """Describe a fork: its pid, the mark of its whole tree, the number of denied calls of that tree."""

        pid: int
        mark: Mark
        denied: int

        def conclude(self) -> dict[str, Any]: ...

        def signal(self, number: int, group: int = 0) -> None:
            """Send a signal to it, or to a process group. Raises OSError."""
            ...


POLLIN, POLLOUT, GONE = select.POLLIN, select.POLLOUT, select.POLLHUP | select.POLLERR
CHUNK = 1 << 16  # above it, each read would be given new memory of the kernel's
LONGEST_WAIT_S = 60.0  # in one call: poll's clock stands still while the machine sleeps, and `now` does not
MOST_UNSENT = 1 << 20  # bytes that wait for the client, beyond which nothing more of a guest's is read


class Loop:
    """Call the handlers of descriptors and clocks, and send frames on `link`, or on `out`, until that is closed.

    `receive` gets the client's bytes. It raises WireError on invalid ones, after which the link is closed. With
    `blocks` the link's mode is left as it is, because others use its open file after this process; then sending may
    block.
    """

    def __init__(self, link: int, receive: Callable[[bytes], None], out: int = -1, *, blocks: bool = False):
        self.link, self._receive = link, receive
        self._out = link if out < 0 else out
        self._unsent: list[bytes] = []
        self._unsent_bytes = 0
        self._paused: list[Callable[[], None]] = []
        self._timers: dict[object, tuple[float, Callable[[], None]]] = {}
        self._stopped: dict[object, tuple[float, Callable[[], None]]] | None = None  # with the seconds that are left
        self._handlers: dict[int, Callable[[int], object]] = {}
        self._new: set[int] = set()  # descriptors that are watched since the events were collected
        self._poll = select.poll()
        for fd in {self.link, self._out}:
            if not blocks:
                os.set_blocking(fd, False)
            self._handlers[fd] = self._serve_link
        self._await_client(is_sending=False)

    def watch(self, fd: int, events: int, handler: Callable[[int], object]) -> None:
        """Call `handler` with the events of a descriptor from now on."""
        if fd not in self._handlers:
            self._new.add(fd)
        self._handlers[fd] = handler
        self._poll.register(fd, events)

    def ignore(self, fd: int) -> None:
        """Watch a descriptor no more."""
        if self._handlers.pop(fd, None) is not None:
            self._poll.unregister(fd)

    def call_at(self, key: object, due: float, function: Callable[[], None]) -> None:
        """Call a function at a time of the clock `now`, in place of an earlier call with the same key."""
        self._timers[key] = (due, function)

    def cancel(self, key: object) -> None:
        """Cancel the call of a key."""
        self._timers.pop(key, None)
        if self._stopped:
            self._stopped.pop(key, None)

    @property
    def is_paused(self) -> bool:
        """Tell whether clocks were stopped."""
        return self._stopped is not None

    def stop_clocks(self, kind: str) -> None:
        """Stop the clocks whose key is a pair with this word."""
        if self._stopped is None:
            keys, moment = [key for key in self._timers if isinstance(key, tuple) and key[1] == kind], now()
            clocks = [(key, *self._timers.pop(key)) for key in keys]
            self._stopped = {key: (due - moment, function) for key, due, function in clocks}

    def start_clocks(self) -> None:
        """Let them go on."""
        stopped, self._stopped = self._stopped or {}, None
        for key, (left_s, function) in stopped.items():
            self.call_at(key, now() + left_s, function)

    def stop(self) -> None:
        """Let `serve` return."""
        if self.link >= 0:
            self.ignore(self.link)
            self.link = -1

    def send(self, data: bytes) -> None:
        """Send a frame: now, or when the client reads."""
        if not self._unsent:
            try:
                sent = os.write(self._out, data)
            except BlockingIOError:
                sent = 0
            except OSError:
                return  # the client is gone, as the loop will find
            if sent == len(data):
                return
            data = data[sent:]
            self._await_client(is_sending=True)
        self._unsent.append(data)
        self._unsent_bytes += len(data)

    @property
    def is_full(self) -> bool:
        """Tell whether more waits for the client than should."""
        return self._unsent_bytes > MOST_UNSENT

    def go_on_later(self, function: Callable[[], None]) -> None:
        """Call a function when the client has read all waiting frames."""
        self._paused.append(function)

    def serve(self) -> None:
        """Do everything until the client is gone, or `stop` was called."""
        while self.link >= 0:
            self._new.clear()
            for fd, events in self._poll.poll(self._timeout_ms()):
                handler = self._handlers.get(fd)
                if (
                    handler is not None and fd not in self._new
                ):  # else the events are those of an earlier file with this number
                    handler(events)
            if self._timers and self.link >= 0:
                self._ring()

    def _timeout_ms(self) -> float | None:
        if not self._timers:
            return None
        left_s = min(due for due, _ in self._timers.values()) - now()
        return min(max(0.0, left_s), LONGEST_WAIT_S) * 1000 + 1

    def _ring(self) -> None:
        moment = now()
        for key, (due, function) in list(self._timers.items()):
            if due <= moment and self._timers.pop(key, None) is not None:
                function()

    def _await_client(self, *, is_sending: bool) -> None:
        """Wait for the client to send and, with unsent frames, to read."""
        if self._out == self.link:
            self._poll.register(self.link, POLLIN | (POLLOUT if is_sending else 0))
            return
        self._poll.register(self.link, POLLIN)
        self._poll.register(self._out, POLLOUT)
        if not is_sending:
            self._poll.unregister(self._out)

    def _serve_link(self, events: int) -> None:
        if events & POLLOUT or (self._unsent and events & GONE):
            self._send_more()
        if events & (POLLIN | GONE):
            try:
                data = os.read(self.link, CHUNK)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            try:
                self._receive(data)
            except wire.WireError:
                data = b""
            if not data:  # the client is gone, or speaks another language
                self.stop()

    def _send_more(self) -> None:
        while self._unsent:
            data = self._unsent[0] if len(self._unsent) == 1 else b"".join(self._unsent[:64])
            batch_size = 1 if len(self._unsent) == 1 else min(64, len(self._unsent))
            try:
                sent = os.write(self._out, data)
            except BlockingIOError:
                return
            except OSError:
                self._unsent.clear()
                break
            self._unsent_bytes -= sent
            self._unsent[:batch_size] = [data[sent:]] if sent < len(data) else []
        self._await_client(is_sending=False)
        self._unsent_bytes = 0
        paused, self._paused = self._paused, []
        for go_on in paused:
            go_on()


def now() -> float:
    """Return the time in seconds of a clock that goes on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
