"""The guest before the program: get ready, apply the last restrictions, wait for orders, become the program.

A guest is a child of a `reaper`, for one run, or of a prefork jail (`prefork`), where it is called *nursed*: there it
makes mounts of its own first, and takes its orders from the caller itself, over the handoff socket (`door`).
"""

from __future__ import annotations

import gc
import posix
import sys
from time import monotonic, perf_counter

from . import messages, shared_status
from .messages import FILTER, Building, Order
from .pid1 import tell_failure
from .steps import (
    CALLERS_WORKSPACE,
    MOUNT_NAMESPACE,
    NEXT_WORKSPACE,
    OWN_MOUNTS,
    OWN_WORKSPACE,
    SHOWN_WORKSPACE,
    StepFailed,
    perform,
    perform_calls,
)
from .syscalls import FAREWELL, SCHED_BATCH, attempt, call, clone, close_range, ppoll, recvmsg, run_anywhere, socketpair

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .pid1 import Parent

LINK, ANSWERS = 3, 4  # where the driver of a session finds its link and the pipe of its answers
# The last numbers below the limit: out of the way of programs that close what they did not open. The value's pipe, or
# that of a session's answers, has the first, a session's link the other.
KEPT_NUMBERS, FEWER_NUMBERS = (1023, 1022), (63, 62)
CANNOT_RUN, NOT_FOUND = 126, 127
GO, EBUSY = b"g", 16
ROBUST_LIST_BYTES = 24
kept: list[object] = []  # what no guest shall take apart on its way out of the helper: it would copy its memory first
notify: Any = None  # our module `seccomp_notify`, once it is needed


class Nursed:
    """Hold what a prefork jail gives its guest: the building, which it has read, the handoff socket (`door`), the file
    of the shared status, and how to say `ready`.

    Where it `is_crowded`, others wait for our processor time, and nobody will give us orders soon. Where this kernel
    `can_copy` memory ahead, those after us want to know which.
    """

    def __init__(
        self, building: Building, door: int, file: int, ready: dict[str, Any], *, is_crowded: bool, can_copy: bool
    ):
        self.building, self.door, self.file, self.ready = building, door, file, ready
        self.is_crowded, self.can_copy = is_crowded, can_copy


class Guest:
    """Be the guest: get ready, apply the last restrictions, wait for orders, run the program."""

    def __init__(
        self,
        parent: Parent,
        index: int,
        go: int,
        asking: int,
        nursed: Nursed | None = None,
        processors: set[int] | None = None,
    ):
        """Take what the parent knows, and the processors on which the program may run, if we are moved about."""
        self.spec, self.link, self.registers = parent.spec, parent.link, parent.registers  # ours alone since the fork
        self.plan_fd, self.load_interpreter = parent.plan_fd, parent.load_interpreter
        self.index, self.go, self.asking, self.nursed = index, go, asking, nursed
        self.processors = processors or set()
        self.interpreter: Any = None
        self.privileges = parent.privileges
        self.says_farewell = False

    def become(self) -> None:
        """Do everything. Returns when a Python guest has run to its end."""
        try:
            nursed = self.nursed
            building = nursed.building if nursed is not None else self._read_building()
            self._get_ready()
            if self.go >= 0 and self.index == 0 and posix.read(self.go, 1) != GO:  # nobody gives us an identity
                posix._exit(1)
            seconds = perform(building.first if self.index == 0 else building.later, self.registers)
            if nursed is None:
                self._await("built")
                run_anywhere(self.processors)
            seconds += perform(building.late, self.registers)
            begun = perf_counter()
            listener, holds = self._filter_system_calls(building.seccomp, is_nursed=nursed is not None)
            seconds.append(perf_counter() - begun)
            self._hand_over(listener, holds=holds, is_nursed=nursed is not None)
            if nursed is not None:
                messages.send_patiently(nursed.door, "ready", nursed.ready, self._for_caller())
            if self.interpreter is not None and self._has_time():
                self._rehearse(building)
                self._tell_those_after_us(nursed)
            order, fds = self._take_order(nursed)
            if nursed is None and self.index == 0:  # after which we may be killed at any time
                messages.send(self.link, "started", {"at": monotonic(), "seconds": seconds})
        except StepFailed as error:
            kept = [self.registers[name] for name in (CALLERS_WORKSPACE, NEXT_WORKSPACE) if name in self.registers]
            tell_failure(self.link, error, tuple(kept[:1]))
            posix._exit(1)
        command = order.commands[self.index] if self.index < len(order.commands) else None
        if command is None and order.python is None:
            posix._exit(0)
        is_compiling = command is not None and self.index < len(order.commands) - 1
        self._take_streams(fds, is_compiling=is_compiling)
        kept = _out_of_the_way(fds[3:]) if command is None or order.is_session else []
        self._close_descriptors(kept)
        if command is not None:
            if order.is_session:  # what is executed gets its ends by numbers that it was told
                for fd, number in zip(kept, (ANSWERS, LINK), strict=True):
                    call("dup3", fd, number, 0)
            self._exec(command, order.env)
        self._run_python(order, kept)

    def _read_building(self) -> Building:
        return Building.of_parts(messages.unpack(self.plan_fd)["guests"])

    def _get_ready(self) -> None:
        """Import and prepare what needs no file of the sandbox's and no privilege, while the reaper builds."""
        gc.disable()  # nothing of it is garbage, and looking for some takes time
        import os  # noqa: F401 - for later, when the filter is in place

        if self.load_interpreter is not None:
            self.interpreter = self.load_interpreter("oneshot")
            self.interpreter.prepare()
        gc.enable()

    def _for_caller(self) -> list[int]:
        """Return what the caller shall see the workspace by: one that is kept, it has since the first guest."""
        shown = [self.registers[SHOWN_WORKSPACE]] if SHOWN_WORKSPACE in self.registers else []
        if CALLERS_WORKSPACE in self.registers:
            return [self.registers[CALLERS_WORKSPACE], *shown]
        return [] if NEXT_WORKSPACE in self.registers else [self.registers[OWN_WORKSPACE], *shown]

    def _rehearse(self, building: Building) -> None:
        """Take orders for nothing, and go through a run of nothing, with streams of the same kinds as a run's."""
        reading, writing = posix.pipe()
        if building.rehearsal:
            ours, theirs = socketpair()
            messages.send_patiently(ours, "order", {"steps": building.rehearsal}, (reading,))
            _, body, (again,) = messages.receive(theirs)
            perform(body["steps"], {})
            for fd in (again, ours, theirs):
                posix.close(fd)
        for number in (1, 2):
            call("dup3", writing, number, 0)
        self.interpreter.warm_up_fork()
        posix.close(reading)
        posix.close(writing)

    def _tell_those_after_us(self, nursed: Nursed | None) -> None:
        """Say, unless somebody has, what memory is ours by now: theirs will be the same."""
        if nursed is not None and nursed.can_copy and not shared_status.touched(nursed.file):
            try:
                shared_status.note_touched(nursed.file, shared_status.find())
            except OSError:
                pass  # a host may keep it from us

    def _has_time(self) -> bool:
        """Tell whether what makes the answer come sooner keeps nobody waiting."""
        if self.nursed is not None and self.nursed.is_crowded:
            return False
        return not ppoll((self.nursed.door if self.nursed is not None else self.asking,), 0.0)

    def _await(self, expected: str) -> tuple[dict[str, Any], list[int]]:
        tag, body, fds = messages.receive(self.asking)
        if tag != expected:  # the reaper is gone, and so must we be
            posix._exit(1)
        return body, fds

    def _filter_system_calls(self, program: bytes | None, *, is_nursed: bool) -> tuple[int, bool]:
        """Install the filter; return the descriptor on which it asks, -1 where it asks nobody, and whether it holds."""
        if program is None:
            return -1, False
        try:
            listener, holds = load_notify().install(program, holds=is_nursed)
            if is_nursed and listener < 0:
                raise OSError(EBUSY, "somebody outside listens already, so nobody would hear of a socket")
        except OSError as error:
            raise StepFailed(FILTER, 0, 1, error) from error
        return listener, holds

    def _hand_over(self, listener: int, *, holds: bool, is_nursed: bool) -> None:
        """Give the parent what it answers the filter by; and what a prefork jail looks at and unmounts at the end."""
        if is_nursed:
            further = NEXT_WORKSPACE if NEXT_WORKSPACE in self.registers else SHOWN_WORKSPACE
            kept = [self.registers[further]] if further in self.registers else []
            made = [self.registers[name] for name in (*OWN_MOUNTS.values(), MOUNT_NAMESPACE)]
            messages.send_patiently(self.asking, "made", {"holds": holds}, [*made, listener, *kept])
        elif listener >= 0:
            messages.send_patiently(self.asking, "listener", {}, [listener])
        if listener >= 0:
            posix.close(listener)

    def _take_order(self, nursed: Nursed | None) -> tuple[Order, list[int]]:
        """Wait for orders; return them and the streams: standard input, output, error, the value's pipe.

        For a session that pipe takes its answers, and its link follows.
        A reaper has written the input files by then. Pid 1 of a prefork jail may have another id; it leaves that to us,
        and the orders come from the caller itself.
        """
        if nursed is not None:
            return self._take_order_at_door(nursed)
        _, (packed, *fds) = self._await("order")
        return Order(**messages.unpack(packed)), fds

    def _take_order_at_door(self, nursed: Nursed) -> tuple[Order, list[int]]:
        """Wait for orders that are meant for this prefork jail: one that was killed may not have read its own.

        Who is to hear at once that the program starts is told; everybody else can read it.
        """
        generation = nursed.ready["generation"]
        while True:
            tag, body, fds = messages.receive(nursed.door)
            if tag != "order":  # nobody needs us
                posix._exit(1)
            if body["generation"] == generation:
                break
            for fd in fds:
                posix.close(fd)
        number = body["number"]
        shared_status.note_taken(nursed.file, number)
        perform(body["steps"], self.registers)
        shared_status.note_start(nursed.file, number, monotonic())
        self.says_farewell = body["says_farewell"]
        if body["is_awaited"]:
            messages.send(nursed.door, "started", {"number": number, "generation": generation})
        return Order(**body["order"]), fds

    def _take_streams(self, fds: list[int], *, is_compiling: bool) -> None:
        posix.umask(0o022)
        stdout = fds[2] if is_compiling else fds[1]  # a compiler's words are no output of the program
        for number, fd in enumerate((fds[0], stdout, fds[2])):
            call("dup3", fd, number, 0)

    def _close_descriptors(self, kept: list[int]) -> None:
        """Leave exactly the standard streams, for a Python guest the pipe of its value, and a session's two ends."""
        first = 3
        for fd in sorted(kept):
            if fd > first:
                close_range(first, fd - 1)
            first = fd + 1
        close_range(first)

    def _exec(self, command: list[str], env: dict[str, str]) -> None:
        import os

        try:
            os.execvpe(command[0], command, env)
        except OSError as error:
            missing = isinstance(error, FileNotFoundError)
            posix.write(2, f"cloche: cannot run {command[0]!r}: {posix.strerror(error.errno or 0)}\n".encode())
            posix._exit(NOT_FOUND if missing else CANNOT_RUN)

    def _run_python(self, order: Order, kept: list[int]) -> None:
        """Let the interpreter forget the helper and become the guest's."""
        assert order.python is not None
        assert self.load_interpreter is not None
        run = self.load_interpreter("session").serve if order.is_session else self.interpreter.run
        privileges = self.privileges or forget_helper(self.interpreter)
        if order.is_session:
            privileges.clone, privileges.recvmsg = clone, recvmsg  # the filter lets a clone ask whether it may be
            capabilities = order.python.pop("powers")
            privileges.give_up = lambda: perform_calls(capabilities)
        if self.says_farewell:
            privileges.exit_early = say_farewell
        run(order.python, order.env, self.interpreter.prepare(), privileges, *kept)


def say_farewell(code: int) -> None:
    """End this process and let pid 1 hear of it first, see `prefork`; returns where nobody listens any more.

    Who goes on as a batch job takes nobody's place when it is woken up: what is left to do for us can wait.
    """
    attempt("set_robust_list", None, ROBUST_LIST_BYTES)  # nobody else is there who could wait for a futex of ours
    attempt("sched_setscheduler", 0, SCHED_BATCH, bytes(4))
    attempt("exit_group", FAREWELL << 32 | code & 0xFFFFFFFF)


def load_notify() -> Any:  # noqa: ANN401 - a module
    """Return the module that installs and answers filters, which many a start can do without."""
    global notify
    if notify is None:
        from . import seccomp_notify

        notify = seccomp_notify
    return notify


def forget_helper(interpreter: Any) -> Any:  # noqa: ANN401 - a module, and its `Privileges`
    """Let the interpreter find no module of ours any more; return the privileges, which hold what finds them.

    The modules are kept, for letting them go takes time.
    """
    from . import archive

    sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not archive]
    ours = [name for name in sys.modules if name.partition(".")[0] in ("jail", "interpreter")]
    kept.extend([sys.modules.pop(name) for name in ours])
    return interpreter.Privileges(archive)


def _out_of_the_way(fds: list[int]) -> list[int]:
    """Give what is kept numbers that do not depend on how we got here; a host may allow no number so high."""
    try:
        return [call("dup3", fd, number, posix.O_CLOEXEC) for fd, number in zip(fds, KEPT_NUMBERS, strict=False)]
    except OSError:
        return [call("dup3", fd, number, posix.O_CLOEXEC) for fd, number in zip(fds, FEWER_NUMBERS, strict=False)]
