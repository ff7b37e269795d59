"""One program in a container: how it is started, what of it is passed on, and how it and all it left is ended."""

from __future__ import annotations

import ctypes
import importlib
import os
import resource
import select
import signal
import sys
import time

from .reaper_counters import Counters, is_full, stored
from .reaper_files import WORKSPACE
from .reaper_link import CHUNK, ENDED, ERR, KILL, OUT, VALUE, Caller

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .reaper_waiting import Waiting

MAX_TOLD = 32 << 20
LOOK_S = 0.02
GRACE_S = 5.0  # beyond a run's time, when nobody outside ends it
CANNOT_RUN, NOT_FOUND = 126, 127
PR_SET_DUMPABLE = 4
prctl = ctypes.CDLL(None).prctl
FOR_EVER = float("inf")
LINK, ANSWERS = 3, 4  # where the driver of a session finds its link and the pipe of its answers
archive: Any = None  # the finder of our modules and the interpreter's


class Attempt:
    """Run one command to its end and pass on what it writes."""

    def __init__(
        self,
        caller: Caller,
        order: dict[str, Any],
        stdin: int,
        wake: int,
        end: float,
        counters: Counters,
        weight: int = 0,
    ):
        """Take what it needs; `weight` is the memory that the program already has."""
        self.caller, self.order, self.stdin, self.wake = caller, order, stdin, wake
        self.end, self.counters = end, counters
        self.cause = ""
        self.ended_at: float | None = None  # when the program ended, also where nobody could attend to it then
        self.is_last = self.is_crowded = False
        self.told = 0
        self.status: int | None = None
        self.pid = 0
        self.base = counters.held()[0] - weight, stored()
        self.poll, self.look_s = select.poll(), LOOK_S
        self.unused = used_by_children()  # CPU times that are not this program's

    def go(self, index: int, waiting: Waiting | None = None) -> int:
        """Return the wait status of command number `index`, which a guest that waits may run."""
        self.is_last, self.ended_at = index >= len(self.order["commands"]) - 1, None
        tags = (OUT if self.is_last else ERR, ERR, VALUE)
        if waiting is not None and waiting.take(self.order):
            self.pid = waiting.pid
            status = self.see_out(dict(zip(waiting.readers, tags, strict=True)))
            begun = waiting.beginning()
            if begun is not None or self.cause:
                self.unused = tuple(map(sum, zip(self.unused, begun or (0.0, 0.0), strict=True)))
                return status
            self.status = self.ended_at = None  # it ended before it had run anything
            self.unused = used_by_children()
        pipes = [os.pipe() for _ in range(3)]
        self.start(index, [theirs for _, theirs in pipes])
        return self.see_out({ours: tag for (ours, _), tag in zip(pipes, tags, strict=True)})

    def start(self, index: int, theirs: list[int]) -> None:
        """Start command number `index` with its ends of output, error and the value's pipe, or those of a session."""
        self.pid = os.fork()
        if self.pid == 0:
            become_guest(self.order, index, self.stdin, theirs)
        for fd in theirs:
            os.close(fd)

    def see_out(self, readers: dict[int, bytes]) -> int:
        """Pass on what it says until its end, and leave nothing of it; return its wait status."""
        for fd in readers:
            os.set_blocking(fd, False)
        self._attend(readers)
        self._count()
        sweep()
        for fd, tag in readers.items():
            while self._pass_on(fd, tag):
                pass
            os.close(fd)
        return self.status if self.status is not None else 1

    def rehearse(self, reader: int) -> None:
        """Go through passing on what is there, once, and close the reader."""
        os.set_blocking(reader, False)
        self.poll.register(reader, select.POLLIN)
        self.poll.poll(0)
        self._pass_on(reader, OUT)
        self._look()
        self._count()
        os.close(reader)

    def _attend(self, readers: dict[int, bytes]) -> None:
        """Pass on output until the program has ended."""
        signal.signal(signal.SIGCHLD, self._note_end)
        for fd in (0, self.wake, *readers):
            self.poll.register(fd, select.POLLIN)
        while self.status is None:
            for fd, _ in self.poll.poll(self.look_s * 1000):
                if fd in readers:
                    if not self._pass_on(fd, readers[fd]):
                        self.poll.unregister(fd)
                elif fd == self.wake:
                    os.read(fd, CHUNK)
                    self._reap()
                elif fd == 0:
                    self._listen()
                else:
                    self._push()
            self._look()
        self.poll = select.poll()

    def _push(self) -> None:
        """Hand on what waits to be written."""

    def _pass_on(self, fd: int, tag: bytes) -> bool:
        """Pass on what is there; False at the end, and where nothing is there yet after the end."""
        try:
            data = os.read(fd, CHUNK)
        except BlockingIOError:
            return self.status is None
        if tag == VALUE:
            self.told += len(data)
        if data and self.told <= MAX_TOLD:
            self.caller.say(tag, data)
        return bool(data)

    def _note_end(self, *_: object) -> None:
        """Note when the program ends: what it wrote may keep this process from attending to it, while nobody reads."""
        try:
            if self.ended_at is None and os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                self.ended_at = time.monotonic()
        except OSError:
            pass  # it has been waited for, or is not known yet

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.pid:
                self.status, self.ended_at = status, self.ended_at or time.monotonic()

    def _listen(self) -> None:
        self.caller.read()
        while (frame := self.caller.next()) is not None:
            self._take(*frame)
        if self.caller.is_gone:
            os._exit(0)

    def _take(self, tag: bytes, body: bytes) -> None:  # noqa: ARG002 - those that live are told more
        if tag == KILL and not (self.is_last and self.ended_at):  # else it comes too late
            self._kill("asked")

    def _look(self) -> None:
        if self.ended_at is None and time.monotonic() > self.end:
            self._kill("timeout")
        limit = self.order["memory_bytes"]
        if limit:
            private, shared = self.counters.held()
            hidden = max(0, shared - max(0, stored() - self.base[1]))
            if private - self.base[0] + hidden > limit:
                self._kill("out_of_memory")

    def _kill(self, cause: str) -> None:
        self._count()
        self.cause = self.cause or cause
        kill_all()

    def _count(self) -> None:
        self.is_crowded = self.is_crowded or count_processes() >= self.order["pids"]


def kill_all() -> None:
    """Kill every process of the namespace but this one."""
    try:
        os.kill(-1, signal.SIGKILL)
    except ProcessLookupError:
        pass


def count_processes() -> int:
    """Count the processes besides this one, and the program, which has just ended."""
    return sum(name.isdigit() for name in os.listdir("/proc"))


def sweep() -> None:
    """Kill what is left and wait until it is gone."""
    kill_all()
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def become_guest(order: dict[str, Any], index: int, stdin: int, ends: list[int]) -> None:
    """Become the program; never returns."""
    try:
        leave_first()
        os.chdir(WORKSPACE)
        for number, fd in enumerate((stdin, ends[0], ends[1])):
            os.dup2(fd, number)
        last = order["nofile"] - 1
        kept = [os.dup2(fd, last - at, inheritable=False) for at, fd in enumerate(ends[2:])]
        os.closerange(3, kept[-1])
        commands = order["commands"]
        if commands and order["is_session"]:
            for fd, number in zip(kept, (ANSWERS, LINK), strict=True):
                os.dup2(fd, number)
        if commands:
            os.closerange(kept[-1], last + 1)
            execute(commands[index], order["env"])
        run_python(order, kept)
    finally:
        os._exit(1)


def leave_first() -> None:
    """Lay aside, in a fork, what is the first process's own."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    os.umask(0o022)


def execute(words: list[str], env: dict[str, str]) -> None:
    """Become a command."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvpe(words[0], words, env)  # noqa: S606 - this is what the container is for
    except OSError as error:
        os.write(2, f"cloche: cannot run {words[0]!r}: {os.strerror(error.errno or 0)}\n".encode())
        os._exit(NOT_FOUND if isinstance(error, FileNotFoundError) else CANNOT_RUN)


def run_python(order: dict[str, Any], kept: list[int]) -> None:
    """Let the interpreter forget what it was, and run a script, or serve a session."""
    oneshot = interpreter()
    work = importlib.import_module("interpreter.session").serve if order["is_session"] else oneshot.run
    forget_ours()
    work(order["python"], order["env"], *kept)


def interpreter() -> Any:
    """Return the module that runs scripts."""
    oneshot = sys.modules["interpreter.oneshot"]
    oneshot.__dict__["archive"] = archive
    return oneshot


def forget_ours() -> None:
    """Let the interpreter find no module of ours any more."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ("inside", "interpreter")]:
        del sys.modules[name]
    sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not archive]


def write_generated(order: dict[str, Any]) -> None:
    """Write what a compiler needs besides the code, or a session besides its engine."""
    if order["build"]:
        os.makedirs(order["build"], exist_ok=True)
    for path, text in order["generated"].items():
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)


def used_by_children() -> tuple[float, ...]:
    """Return the CPU times, of programs and of the kernel for them, of all children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime, used.ru_stime


class Account:
    """Tell how a program ended, and what it and its children used and hit."""

    def __init__(self, caller: Caller, counters: Counters):
        self.caller, self.counters = caller, counters
        self.hits, self.started = counters.hits(), time.monotonic()
        self.unreachable = counters.unreachable()

    def close(self, attempt: Attempt, status: int) -> None:
        """Say it."""
        wall_s = (attempt.ended_at or time.monotonic()) - self.started
        used = [now - then for now, then in zip(used_by_children(), attempt.unused, strict=True)]
        oom, pids = (now - then for now, then in zip(self.counters.hits(), self.hits, strict=True))
        if not self.counters.counts_processes:  # then what was there at the end tells
            pids = int(attempt.is_crowded)
        peak = self.counters.read("peak").strip()
        unreachable = self.counters.unreachable() - self.unreachable if status else 0
        self.caller.say_json(
            ENDED, wait_status=status, cause=attempt.cause, oom_kills=oom, pids_hits=pids, full=is_full(),
            unreachable=unreachable, wall_s=wall_s, cpu_user_s=max(0.0, used[0]), cpu_system_s=max(0.0, used[1]),
            peak_bytes=int(peak) if peak.isdigit() else None,
        )  # fmt: skip
