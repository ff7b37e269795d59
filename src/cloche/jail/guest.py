"""The guest before the program: get ready, apply the last restrictions, wait for orders, become the program.

A guest is a child of a `reaper`, for one run. That of a prefork jail, `prefork.PreforkGuest`, first makes its own
mounts, and takes its order from the caller itself.
"""

from __future__ import annotations

import gc
import posix
import sys
from time import monotonic, perf_counter

from . import messages
from .messages import FILTER, Building, Order
from .pid1 import never_freed, report_failure
from .steps import CALLERS_WORKSPACE, NEXT_WORKSPACE, StepFailed, perform, perform_calls
from .syscalls import (
    EXIT_NOTICE,
    SCHED_BATCH,
    attempt,
    call,
    clone,
    close_range,
    ppoll,
    recvmsg,
    run_anywhere,
    socketpair,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .pid1 import Parent

_signal: Any = __import__("_signal")  # `signal` would cost every run milliseconds

LINK, ANSWERS = 3, 4  # where the driver of a session finds its link and the pipe of its answers
HOST_CALLS, HOST_ANSWERS = 5, 6  # where a program finds the ends for its calls of the caller's functions
MOST_FILES = 1024  # that a guest may have open, where the caller's own limit is no lower
CANNOT_RUN, NOT_FOUND = 126, 127
GO = b"g"
OUTPUT = "CLOCHE_OUTPUT"  # the variable that tells programs which are theirs, as JOURNAL_STREAM does of systemd
ROBUST_LIST_BYTES = 24
notify: Any = None  # our module `seccomp_notify`, once it is needed


class Guest:
    """Be a guest: build its own part, hand descriptors to its parent, take the order, become the program."""

    def __init__(
        self,
        parent: Parent,
        index: int,
        asking: int,
        processors: set[int] | None = None,
        *,
        is_of_later_run: bool = False,
    ):
        """Take the parent's data, and the processors for the program, if this process is moved between them.

        The parent and this process exchange messages over the link `asking`. The parent of a guest that
        `is_of_later_run` has its identity already.
        """
        self.spec, self.link, self.registers = parent.spec, parent.link, parent.registers  # ours alone since the fork
        self.plan_fd, self.go, self.load_interpreter = parent.plan_fd, parent.go, parent.load_interpreter
        self.index, self.asking, self.processors = index, asking, processors or set()
        self.is_first = index == 0 and not is_of_later_run
        self.seconds: list[float] = []  # that each step took
        self.listener, self.holds = -1, False
        self.interpreter: Any = None
        self.privileges, self.building = parent.privileges, parent.building_of_guests
        self.gives_exit_notice = self.is_under_load = False

    def become(self) -> None:
        """Do everything. Returns when a Python guest has run to its end."""
        try:
            self._build()
            self._hand_over()
            order, fds = self._take_order()
        except StepFailed as error:
            names = (CALLERS_WORKSPACE, NEXT_WORKSPACE)
            workspaces = [self.registers[name] for name in names if name in self.registers]
            report_failure(self.link, error, tuple(workspaces[:1]))
            posix._exit(1)
        self._start_program(order, fds)

    def _build(self) -> None:
        """Get ready while the reaper builds, then enter the finished sandbox for good."""
        self.building = self.building or unpack_building(self.plan_fd)
        self._get_ready()
        if self.go >= 0 and self.is_first and posix.read(self.go, 1) != GO:  # the helper has ended
            posix._exit(1)
        self.seconds = perform(self.building.first if self.is_first else self.building.later, self.registers)
        if not self.is_first:
            self.seconds = [0.0] * len(self.building.first)  # the parent has made the steps that take time
        self._receive("built")
        run_anywhere(self.processors)
        self._restrict(holds=bool(self.spec.answered))  # calls that were made for it must not notify again

    def _hand_over(self) -> None:
        """Give the parent the filter's notification descriptor, if it has one."""
        if self.listener >= 0:
            messages.send_retrying(self.asking, "listener", {}, [self.listener])
            posix.close(self.listener)

    def _take_order(self) -> tuple[Order, list[int]]:
        """Wait for the order; return it and the streams: standard input, output, error, the value's pipe.

        For a session that pipe takes its answers, and its link follows. The ends for calls of the caller's functions
        come last, if there are any. The reaper has written the input files by then;
        if it must not read this run's data, this process writes them.
        """
        if not self.is_under_load and self._has_time(self.asking):
            self._warm_up()
        body, (packed, *fds) = self._receive("order")
        order = Order(**messages.unpack(packed))
        if body.get("has_files"):
            files = fds.pop(0)
            posix.umask(0)  # their modes are those that they are made with
            perform(messages.unpack(files)["steps"], self.registers)
            posix.close(files)
        if self.index == 0:  # after which we may be killed at any time
            messages.send(self.link, "started", {"at": monotonic(), "seconds": self.seconds})
        return order, fds

    def _start_program(self, order: Order, fds: list[int]) -> None:
        """Leave the program only its streams, and start it."""
        command = order.commands[self.index] if self.index < len(order.commands) else None
        if command is None and order.python is None:
            posix._exit(0)
        is_compiling = command is not None and self.index < len(order.commands) - 1
        self._take_streams(fds, is_compiling=is_compiling)
        numbers = (ANSWERS, LINK, HOST_CALLS, HOST_ANSWERS)[0 if order.is_session else 2 :]
        passed = fds[3:] if command is None or order.is_session else [] if is_compiling else fds[4:]
        kept_fds = _out_of_the_way(passed)
        self._close_descriptors(kept_fds)
        if command is not None:
            for fd, number in zip(
                kept_fds, numbers, strict=False
            ):  # the executed program gets its ends by known numbers
                call("dup3", fd, number, 0)
            self._exec(command, order.env)
        self._run_python(order, kept_fds)

    def _get_ready(self) -> None:
        """Import and prepare all that needs no file of the sandbox and no privilege, while the reaper builds."""
        gc.disable()  # nothing of it is garbage, and looking for some takes time
        import os  # noqa: F401 - for later, when the filter is in place

        if self.load_interpreter is not None:
            self.interpreter = self.load_interpreter("oneshot")
            self.interpreter.prepare()
        gc.enable()

    def _restrict(self, *, holds: bool) -> None:
        """Apply the last restrictions. If the filter `holds`, only SIGKILL ends the wait of a notifying thread."""
        self.seconds += perform(self.building.late, self.registers)
        begun = perf_counter()
        if self.building.seccomp is not None:
            try:
                self.listener, self.holds = load_notify().install(self.building.seccomp, holds=holds)
            except OSError as error:
                raise StepFailed(FILTER, 0, 1, error) from error
            if self.listener < 0:
                perform(self.building.unheard, self.registers)
        self.seconds.append(perf_counter() - begun)

    def _has_time(self, link: int) -> bool:
        """Tell whether no order has come, so that the interpreter can be warmed up."""
        return self.interpreter is not None and not ppoll((link,), 0.0)

    def _warm_up(self) -> None:
        """Take an empty order, and perform an empty run, with streams of the same kinds as a run's."""
        reading, writing = posix.pipe()
        if self.building.warm_up:
            ours, theirs = socketpair()
            messages.send_retrying(ours, "order", {"steps": self.building.warm_up}, (reading,))
            _, body, (again,) = messages.receive(theirs)
            perform(body["steps"], {})
            for fd in (again, ours, theirs):
                posix.close(fd)
        for number in (1, 2):
            call("dup3", writing, number, 0)
        self.interpreter.warm_up_fork()
        posix.close(reading)
        posix.close(writing)

    def _receive(self, expected: str) -> tuple[dict[str, Any], list[int]]:
        """Wait for this message of the parent, and return its body and descriptors."""
        tag, body, fds = messages.receive(self.asking)
        if tag != expected:  # the reaper is gone, and so must we be
            posix._exit(1)
        return body, fds

    def _take_streams(self, fds: list[int], *, is_compiling: bool) -> None:
        posix.umask(0o022)
        stdout = fds[2] if is_compiling else fds[1]  # a compiler's messages are no output of the program
        for number, fd in enumerate((fds[0], stdout, fds[2])):
            call("dup3", fd, number, 0)

    def _close_descriptors(self, kept_fds: list[int]) -> None:
        """Leave exactly the standard streams, for a Python guest the pipe of its value, and a session's two ends."""
        first = 3
        for fd in sorted(kept_fds):
            if fd > first:
                close_range(first, fd - 1)
            first = fd + 1
        close_range(first)

    def _exec(self, command: list[str], env: dict[str, str]) -> None:
        import os

        for number in (_signal.SIGPIPE, _signal.SIGXFSZ):  # which Python ignores, and a program inherits
            _signal.signal(number, _signal.SIG_DFL)
        try:
            os.execvpe(command[0], command, {**env, OUTPUT: name_output()})
        except OSError as error:
            missing = isinstance(error, FileNotFoundError)
            why = (missing and _missing_interpreter(command[0], env)) or posix.strerror(error.errno or 0)
            posix.write(2, f"cloche: cannot run {command[0]!r}: {why}\n".encode("utf-8", "surrogateescape"))
            posix._exit(NOT_FOUND if missing else CANNOT_RUN)

    def _run_python(self, order: Order, kept_fds: list[int]) -> None:
        """Remove the helper's traces from the interpreter and give it to the guest."""
        assert order.python is not None
        assert self.load_interpreter is not None
        run = self.load_interpreter("session").serve if order.is_session else self.interpreter.run
        privileges = self.privileges or forget_helper(self.interpreter)
        if order.is_session:
            privileges.clone, privileges.recvmsg = clone, recvmsg  # the filter lets a clone ask whether it may be
            capabilities = order.python.pop("capabilities")
            privileges.give_up = lambda: perform_calls(capabilities)
        if self.gives_exit_notice:
            privileges.exit_early = give_exit_notice
        run(order.python, order.env, self.interpreter.prepare(), privileges, *kept_fds)


def unpack_building(plan_fd: int) -> Building:
    """Return the guests' part of a packed building."""
    return Building.of_parts(messages.unpack(plan_fd)["guests"])


def name_output() -> str:
    """Return device and inode of the run's own output and errors: other outputs of a program are pipes or files."""
    return " ".join([f"{state.st_dev}:{state.st_ino}" for state in (posix.fstat(1), posix.fstat(2))])


def _missing_interpreter(program: str, env: dict[str, str]) -> str:
    """Return the missing interpreter of a script; empty if the file is no script, or its interpreter exists."""
    import os

    folders = [""] if "/" in program else [f"{folder}/" for folder in env.get("PATH", os.defpath).split(":")]
    for folder in folders:
        try:
            with open(folder + program, "rb") as file:
                line = file.readline(256)
        except OSError:
            continue
        arguments = os.fsdecode(line[2:]).split() if line.startswith(b"#!") else []
        if arguments and not os.path.exists(arguments[0]):
            return f"its interpreter {arguments[0]!r}, which its first line names, is not there"
    return ""


def give_exit_notice(code: int) -> None:
    """End this process and notify pid 1 first, see `prefork`; returns if pid 1 does not listen any more.

    A batch process preempts no other when it wakes up: the kernel's remaining work for this process can wait.
    """
    attempt("set_robust_list", None, ROBUST_LIST_BYTES)  # no other thread could wait for a futex of this one
    attempt("sched_setscheduler", 0, SCHED_BATCH, bytes(4))
    attempt("exit_group", EXIT_NOTICE << 32 | code & 0xFFFFFFFF)


def load_notify() -> Any:  # noqa: ANN401 - a module
    """Return the module that installs and answers filters, which many a start can do without."""
    global notify
    if notify is None:
        from . import seccomp_notify

        notify = seccomp_notify
    return notify


def forget_helper(interpreter: Any) -> Any:  # noqa: ANN401 - a module, and its `Privileges`
    """Hide Cloche's modules from the interpreter; return the privileges, which hold their finder.

    The modules are kept, because freeing them takes time.
    """
    from . import archive

    sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not archive]
    never_freed.extend([sys.modules.pop(name) for name in list(filter(is_ours, sys.modules))])
    return interpreter.Privileges(archive)


def is_ours(name: str) -> bool:
    """Tell whether a module is one of our packages'."""
    return name.partition(".")[0] in ("jail", "interpreter", "init")


def _out_of_the_way(fds: list[int]) -> list[int]:
    """Move kept descriptors to the last numbers below the limit: some programs close all low numbers, opened or not.

    The value's pipe, or that of a session's answers, has the first, a session's link the next.
    """
    numbers = range(min(MOST_FILES, posix.sysconf("SC_OPEN_MAX")) - 1, 2, -1)
    return [call("dup3", fd, number, posix.O_CLOEXEC) for fd, number in zip(fds, numbers, strict=False)]
