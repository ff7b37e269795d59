"""The guest before it is the guest's: get ready, wait, close the last doors, run the program."""

from __future__ import annotations

import os
import sys

from . import landlock, notify, wire
from .enter import identity_steps, limit_steps, power_steps, tell_failure
from .steps import Step, StepFailed, perform
from .syscalls import PR_SET_DUMPABLE, close_range, prctl

TYPE_CHECKING = False
if TYPE_CHECKING:
    import _socket

    from .reaper import Reaper

CANNOT_RUN, NOT_FOUND = 126, 127
RELEASED = b"r"


class Guest:
    """Be the guest: get ready, wait, close the last doors, run the program."""

    def __init__(self, reaper: Reaper, index: int, waiting: int, asking: _socket.socket):
        self.spec, self.run, self.fds, self.link = reaper.spec, reaper.run, reaper.fds, reaper.link
        self.command = self.run.commands[index] if index < len(self.run.commands) else None
        self.is_first = index == 0
        self.waiting, self.asking = waiting, asking

    def become(self) -> None:
        """Do everything. Returns when a Python guest has run to its end."""
        try:
            perform(self.early_steps())
            if self.command is None and self.run.python is not None:
                sys.modules["interpreter.oneshot"].prepare(self.run.env)
            if os.read(self.waiting, 1) != RELEASED:
                os._exit(1)
            if self.command is None and self.run.python is None:
                os._exit(0)
            perform(self.late_steps())
        except StepFailed as error:
            tell_failure(self.link, error)
            os._exit(1)
        self._close_descriptors()
        if self.command is not None:
            self._exec(self.command)
        self._run_python()

    def early_steps(self) -> list[Step]:
        """List what needs no file of the sandbox's, and so can be done while the reaper builds it."""
        who = identity_steps(self.spec, self.run)
        # The first guest was forked before the reaper gave these up; a later one is born without them.
        return [
            *([*who, *limit_steps(self.spec), *power_steps(self.spec)] if self.is_first else who[-1:]),
            Step("session", "lead a session of its own, without a terminal", os.setsid),
            Step("standard_streams", "take the given standard streams", self._take_streams),
        ]

    def late_steps(self) -> list[Step]:
        """List the last doors to close, once the sandbox stands."""
        spec = self.spec
        steps = [
            Step("directory", f"work in {spec.workspace}", lambda: os.chdir(spec.workspace)),
            Step("dumpable", "own its /proc entries", lambda: prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)),
        ]
        if spec.landlock is not None:
            rules = [*spec.landlock, *self.run.readable]
            steps.append(Step("landlock", f"restrict files to {len(rules)} trees", lambda: landlock.restrict(rules)))
        if spec.seccomp is not None:
            steps.append(Step("seccomp", "filter system calls", self._filter_system_calls))
        return steps

    def _take_streams(self) -> None:
        os.umask(0o022)
        is_compiling = self.command is not None and self.command is not self.run.commands[-1]
        stdout = self.fds.stderr if is_compiling else self.fds.stdout  # a compiler's words are no output of the program
        for number, fd in enumerate((self.fds.stdin, stdout, self.fds.stderr)):
            os.dup2(fd, number, inheritable=True)

    def _filter_system_calls(self) -> None:
        listener = notify.install(self.spec.seccomp or b"")
        if listener >= 0:
            wire.send(self.asking, "listener", fds=[listener])
            os.close(listener)

    def _close_descriptors(self) -> None:
        """Leave exactly the standard streams, and for a Python guest the pipe of its value."""
        self.link.detach()
        self.asking.detach()
        keep = self.fds.value if self.command is None else -1
        if keep > 3:
            close_range(3, keep - 1)
        close_range(max(keep + 1, 3))

    def _exec(self, command: list[str]) -> None:
        try:
            os.execvpe(command[0], command, self.run.env)
        except OSError as error:
            missing = isinstance(error, FileNotFoundError)
            os.write(2, f"cloche: cannot run {command[0]!r}: {os.strerror(error.errno or 0)}\n".encode())
            os._exit(NOT_FOUND if missing else CANNOT_RUN)

    def _run_python(self) -> None:
        """Let the interpreter forget the helper and become the guest's."""
        assert self.run.python is not None
        settings, value_fd = self.run.python, self.fds.value
        run_guest = sys.modules["interpreter.oneshot"].run
        for name in [name for name in sys.modules if name.partition(".")[0] in ("jail", "interpreter")]:
            del sys.modules[name]
        del sys.meta_path[0]
        run_guest(settings, value_fd)
