"""A sandbox's lifetime, and its pause: the limits that init enforces by its own clock.

A process outside that should end the sandbox may be suspended, or have failed. The clock of a command is stopped with
it.
"""

from __future__ import annotations

from . import wire
from .loop import now

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .loop import Host, Loop

SIGKILL, SIGCONT, SIGSTOP = 9, 18, 19
LATE_S = 2.0  # after which the process outside that should pause everything has failed to


class Lifetime:
    """End everything in time, or stop everything for a while; `is_busy` tells whether any request is open.

    `pause_all` is called in place of the end where everything shall be paused then.
    """

    def __init__(self, loop: Loop, host: Host, is_busy: Callable[[], bool], pause_all: Callable[[], None]):
        self.loop, self.host, self._is_busy, self._pause_all = loop, host, is_busy, pause_all
        self._idle_s: float | None = None
        self._busy_at = now()

    def note_use(self) -> None:
        """Count the time without use from now on."""
        self._busy_at = now()

    def limit(self, order: dict[str, Any]) -> None:
        """End everything after the times of an order, which replace earlier ones."""
        ends_in_s, idle_s = order.get("ends_in_s"), order.get("idle_s")
        self._idle_s = None if idle_s is None else float(idle_s)
        self.loop.cancel("end")
        if ends_in_s is not None and order.get("pauses"):
            self.loop.call_at("end", now() + float(ends_in_s) + LATE_S, self._pause_all)
        elif ends_in_s is not None:
            self.loop.call_at("end", now() + float(ends_in_s), self.loop.stop)
        self.loop.cancel("idle")
        self._look_again()

    def _look_again(self) -> None:
        if self._idle_s is not None:
            self.loop.call_at("idle", self._busy_at + self._idle_s, self._look)

    def _look(self) -> None:
        if self._is_busy() or self.host.other_pids():
            self.note_use()
        if self._idle_s is not None and now() >= self._busy_at + self._idle_s:
            self.loop.stop()
        else:
            self._look_again()

    def check_running(self) -> None:
        """Refuse to start a process while the sandbox is paused."""
        if self.loop.is_paused:
            raise wire.Refused("paused", "the sandbox is paused; resume it first")

    def pause(self) -> None:
        """Stop all processes, and the clocks of commands."""
        self.host.signal_others(SIGSTOP)
        self.loop.stop_clocks("clock")

    def end_others(self) -> None:
        """Kill all processes at once."""
        self.host.signal_others(SIGKILL)

    def resume(self) -> None:
        """Let them go on."""
        self.loop.start_clocks()
        self.host.signal_others(SIGCONT)
