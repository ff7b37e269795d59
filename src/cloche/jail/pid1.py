"""The common part of all parents of guests: build, wake up for signals, reap children, sum their usage."""

from __future__ import annotations

import posix

from . import messages
from .steps import NETWORK_LINK, NEXT_WORKSPACE, SHOWN_WORKSPACE, StepFailed, perform, private_register
from .syscalls import SIGCHLD, WNOHANG, wait4

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

    from .messages import Building, Spec

_signal: Any = __import__("_signal")  # `signal` would cost every run milliseconds

MOST_STEPS = 200  # whose seconds a message holds
# Objects that no guest may free before its program: a write to their reference counts would copy their pages.
never_freed: list[object] = []


class Parent:
    """Hold the inputs of every process that builds for guests.

    `registers` hold the helper's inputs for the building: a workspace to attach, the outside id. A message on `link`
    reports that this process has its identity; a guest that was forked before reads the same from the pipe `go`.
    `plan_fd` holds the building.
    """

    def __init__(
        self,
        spec: Spec,
        registers: dict[str, int],
        *,
        plan_fd: int,
        link: int,
        go: int,
        load_interpreter: Callable[[str], Any] | None,
    ):
        self.spec, self.registers, self.plan_fd, self.link, self.go = spec, registers, plan_fd, link, go
        self.load_interpreter = load_interpreter
        self.building_of_guests: Any = None  # where it was unpacked for all of them at once
        self.privileges: Any = None  # for Python guests, where the helper was forgotten for all of them at once

    def await_go(self) -> list[int]:
        """Wait until the helper has set identity and group; return the mounts that it opened for us."""
        tag, _, fds = messages.receive(self.link)
        if tag != "go":  # the helper is gone, and so must we be
            posix._exit(1)
        return fds

    def build(self, building: Building, private: list[int]) -> list[float]:
        """Build the sandbox, and return the seconds that each step took."""
        self.registers.update(zip(map(private_register, building.private), private, strict=True))
        link = self.registers.pop(NETWORK_LINK, -1)
        try:
            if self.spec.network is not None and self.spec.level != "jail":
                from .network_calls import begin

                begin(link)
                self.spec.network, link = {**self.spec.network, "link": link}, -1
            elif self.spec.network is not None:
                from .network import open_sockets

                open_sockets(self.spec.network, link)
            return perform(building.build, self.registers)[:MOST_STEPS]
        except StepFailed as error:
            self.fail(error)
        finally:
            if link >= 0:
                posix.close(link)

    def fail(self, error: StepFailed) -> NoReturn:
        report_failure(self.link, error, self.take_workspace())
        posix._exit(1)

    def take_workspace(self) -> tuple[int, ...]:
        """Return the mount of the workspace that was made or attached, which is the helper's from then on.

        One that was made is followed by the mount that shows it to the caller, where that is another one.
        """
        return tuple(self.registers.pop(name) for name in (NEXT_WORKSPACE, SHOWN_WORKSPACE) if name in self.registers)


class ChildWatcher:
    """Wake up, by the pipe `woken`, when a child has ended; sum the usage of the dead."""

    def __init__(self) -> None:
        self.woken, self.wake = posix.pipe2(posix.O_CLOEXEC | posix.O_NONBLOCK)
        _signal.set_wakeup_fd(self.wake, warn_on_full_buffer=False)
        _signal.signal(SIGCHLD, _wake)
        self.user_s, self.system_s, self.most_kib = 0.0, 0.0, 0

    def stop(self) -> None:
        """Undo, in a guest, the parent's own settings."""
        _signal.set_wakeup_fd(-1)
        _signal.signal(SIGCHLD, _signal.SIG_DFL)
        posix.close(self.woken)

    def take_dead(self, pid: int) -> int | None:
        """Take every dead child; return the wait status of `pid` when it is among them."""
        self.drain()
        while True:
            try:
                dead_pid, status, usage = wait4(-1, WNOHANG)
            except ChildProcessError:
                return None
            if dead_pid == 0:
                return None
            self.add(usage)
            if dead_pid == pid:
                return status

    def drain(self) -> None:
        """Take note of the signals that came until now."""
        try:
            posix.read(self.woken, 512)
        except BlockingIOError:
            pass  # there were none

    def add(self, usage: tuple[float, float, int]) -> None:
        """Add the usage of one dead process."""
        self.user_s += usage[0]
        self.system_s += usage[1]
        self.most_kib = max(self.most_kib, usage[2])

    def spent(self) -> dict[str, float]:
        """Return the usage of the dead."""
        return {"user_s": self.user_s, "system_s": self.system_s, "most_kib": self.most_kib}


def _wake(number: int, frame: object) -> None:
    """Handle SIGCHLD: without a handler no signal would reach the wakeup pipe."""


def report_failure(link: int, error: StepFailed, workspace: tuple[int, ...] = ()) -> None:
    """Report to the helper which step failed, and give the workspace back: attaching took it from the helper."""
    body = {"message": str(error), "step": error.step, "index": error.index, "errno": error.errno}
    messages.send_retrying(link, "failed", body, workspace)
