"""The place of one run or one session in a virtual machine: what is a container elsewhere."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from cloche.core.errors import StartFailed
from cloche.core.outcome import KillCause, Observed

from ..containers.boot import boot_message
from ..containers.container import Container
from ..noting import noted
from .image import Image
from .machine import Machine

log = logging.getLogger("cloche.microvm")
LEAVE_S = 20.0
OBEY_S = 8.0  # for the machine to end a place


class Place(Container[Image]):
    """Hold one place in a machine, which may hold others."""

    def __init__(self, machine: Machine):
        super().__init__()
        self.machine, self.ground = machine, machine.image
        self._number = 0
        self._left: Mapping[str, Any] = {}
        self._over = threading.Event()

    @property
    def what(self) -> str:
        """Name what is lost when this place is."""
        return "virtual machine" if self.machine.is_lost else "place in the virtual machine"

    @property
    def slowness(self) -> float:
        """Return how many times longer than usual one must be patient with what runs in it."""
        return self.machine.monitor.slowness(self.machine.plan)

    def start(self, preload: Sequence[str]) -> None:
        """Boot the machine when it has not been, and make the place. Raises StartFailed; then nothing of it is left."""
        machine = self.machine
        is_first = not machine.has_booted
        try:
            if is_first:
                machine.boot()
            self._number, self._link, mark = machine.make_room(self)
            self._link.send_raw(mark + boot_message(preload))
            self._ready.wait(machine.boot_s)
        except OSError as error:
            self._fail(is_first)
            raise StartFailed(f"the virtual machine is gone: {error}{machine.last_words()}", step="boot") from error
        except BaseException:
            self._fail(is_first)
            raise
        if self.is_lost or not self._ready.is_set():
            what, why = self.what, self._why_not_ready()
            self._fail(is_first)  # where the machine goes with it, all is heard by then that it had to say
            raise StartFailed(f"the {what} did not get ready{why}{machine.last_words()}", step="boot")
        self.start_s = time.time() - self.started_at

    def _why_not_ready(self) -> str:
        """Say what is known of why it did not get ready, besides what the machine says."""
        if not self.is_lost:
            return f" within {self.machine.boot_s:g} s"
        status = self._left.get("status")
        ended = f": its first process ended with status {status}" if isinstance(status, int) else ""
        return ended + super().last_words()

    def _fail(self, is_first: bool) -> None:
        """Leave nothing of it."""
        if not is_first:
            self.kill()
        else:
            self.machine.kill()
            self.machine.wait()

    def hear(self, tag: bytes, body: bytes) -> None:
        """Take one frame; in the place's reading thread."""
        self._hear(tag, body)

    def leave(self, left: Mapping[str, Any]) -> None:
        """Learn how its first process ended, or nothing where the machine did; in the machine's reading thread."""
        self._left = left

    def lose(self) -> None:
        """Learn that nothing more will come; in the place's reading thread."""
        self._lose()
        self._over.set()

    def wait(self, timeout_s: float) -> bool:
        """Wait until nothing more will come; tell whether that is so."""
        return self._over.wait(timeout_s)

    def empty(self) -> None:
        """End what is left in it, and wait until that is done."""
        if not self.is_lost:
            with noted(log, "a place could not be told to end, and will be killed", OSError):
                self.order({"do": "leave"})
            if not self._over.wait(LEAVE_S):
                self.kill()

    def kill(self) -> None:
        """Have the machine end it, and end the machine when that does not obey."""
        if self._number and not self.is_lost:
            self.machine.end_place(self._number)
            if not self._over.wait(OBEY_S):
                self.machine.kill()

    def end_by_guest(self) -> Observed | None:
        """Say whether the kernel inside killed the first process for want of memory."""
        count = self._left.get("oom_kills")
        has_run_out = isinstance(count, int) and count > 0
        return Observed(cause=KillCause.OUT_OF_MEMORY) if has_run_out else None

    def see_out(self) -> None:
        """Let the machine go."""
        self.machine.kill()

    def last_words(self) -> str:
        """Return what the machine's console and its monitor said last, for messages."""
        return self.machine.last_words()

    def words(self) -> Sequence[str]:
        """Return the words that start such a machine."""
        return self.machine.words()
