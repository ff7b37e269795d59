"""Ending all processes of a tree: stopped first, so that a fork bomb cannot grow, then killed.

Theory of operation: the processes of a tree share its mark. One look at all live processes serves every tree that is to
end, and a look continues for a moment in each turn of the loop: a guest may have thousands. Found processes are
stopped, until a look finds no new one; the next look kills. Then looks are repeated until none is left. If that takes
long, because they fork faster than the looks, all others are stopped for one look, if the host can do so.
"""

from __future__ import annotations

import os

from .loop import now

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .loop import Host, Loop

SIGKILL, SIGCONT, SIGSTOP = 9, 18, 19
LOOKED_AT = 128  # processes, in one turn: a few milliseconds
HIDDEN = -1  # the mark of a process that cannot be inspected: it counts as part of every tree
URGENT_S = 0.5  # of looking and stopping, after which all others stand still for a look
MOST_PASSES = 50  # of stopping; a tree that forks faster is killed as far as it is found, and looked for again
AGAIN_S, MOST_ROUNDS = 0.05, 200  # between two looks at whether all that was killed is gone, and how many there are


class _Target:
    """Hold the state of one tree that is to end."""

    def __init__(self, on_end: Callable[[], None]):
        self.on_end = on_end
        self.rounds = MOST_ROUNDS
        self.begin()

    def begin(self) -> None:
        """Stop all that is found, from the beginning."""
        self.stopped: set[int] = set()
        self.passes, self.due, self.urgent_at = 0, 0.0, now() + URGENT_S
        self.has_new = self.is_killing = False

    def take(self, pid: int) -> None:
        """Take one that belongs to it."""
        if self.is_killing:
            send(pid, SIGKILL)
        elif pid not in self.stopped:
            send(pid, SIGSTOP)
            self.stopped.add(pid)
            self.has_new = True

    def conclude(self) -> bool:
        """Decide after a look the purpose of the next one; True when no process is left."""
        if self.is_killing:
            self.rounds -= 1
            self.begin()
            self.due = now() + AGAIN_S
            self.urgent_at += AGAIN_S
            return self.rounds <= 0
        self.passes += 1
        self.is_killing = bool(self.stopped) and not (self.has_new and self.passes < MOST_PASSES)
        self.has_new = False
        return not self.stopped


class Ender:
    """End all processes with certain marks, and call back when none is left."""

    def __init__(self, loop: Loop, host: Host):
        self.loop, self.host = loop, host
        self._targets: dict[int, _Target] = {}  # by mark
        self._looking: Iterator[tuple[int, int]] | None = None
        self._looked_for: dict[int, _Target] = {}

    def end(self, mark: int, on_end: Callable[[], None] = lambda: None) -> None:
        """Kill all that has a mark, now and in the turns to come, and then call `done`."""
        self._targets[mark] = _Target(on_end)
        if self._looking is None:
            self._go_on()

    def _go_on(self) -> None:
        remaining = LOOKED_AT
        while self._looking is not None or self._begin():
            for pid, mark in self._looking or ():
                for target in self._targets_of(mark):
                    target.take(pid)
                remaining -= 1
                if remaining <= 0:
                    self.loop.call_at(self, now(), self._go_on)
                    return
            self._conclude()

    def _begin(self) -> bool:
        """Begin a look for all due targets; tell whether there are any."""
        moment = now()
        self._looked_for = {mark: target for mark, target in self._targets.items() if target.due <= moment}
        if any(target.urgent_at <= moment for target in self._looked_for.values()) and self.host.hold_others():
            self._kill_held()
        elif self._looked_for:
            self._looking = self.host.look()
        elif self._targets:
            self.loop.call_at(self, min(target.due for target in self._targets.values()), self._go_on)
        return bool(self._looked_for)

    def _kill_held(self) -> None:
        """Kill the trees while no process can fork, then resume all others."""
        for target in self._looked_for.values():
            target.is_killing = True
        for pid, mark in self.host.look():
            for target in self._targets_of(mark):
                target.take(pid)
        if not self.loop.is_paused:
            self.host.signal_others(SIGCONT)
        self._conclude()

    def _targets_of(self, mark: int) -> tuple[_Target, ...]:
        if mark == HIDDEN:
            return (*self._looked_for.values(),)
        targets = self._looked_for.get(mark)
        return () if targets is None else (targets,)

    def _conclude(self) -> None:
        looked_for, self._looking = self._looked_for, None
        for mark, target in looked_for.items():
            if target.conclude() and self._targets.get(mark) is target:
                del self._targets[mark]
                target.on_end()

    def signal(self, mark: int, number: int) -> None:
        """Send a signal once to all that has a mark."""
        self._signal_on(self.host.look(), mark, number)

    def _signal_on(self, looking: Iterator[tuple[int, int]], wanted_mark: int, number: int) -> None:
        for remaining, (pid, mark) in enumerate(looking, 1 - LOOKED_AT):
            if mark in (wanted_mark, HIDDEN):
                send(pid, number)
            if remaining >= 0:
                self.loop.call_at(looking, now(), lambda: self._signal_on(looking, wanted_mark, number))
                return


def send(pid: int, number: int) -> None:
    """Send a signal; a process that has gone meanwhile needs none."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        pass
