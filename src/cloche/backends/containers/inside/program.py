"""One program in a container: its start, or its run by a preforked guest; its output; and the kill of its processes.

Theory of operation of the preforked guest (`PreforkedGuest`): it is an interpreter that was forked before an order
arrived and has done a warm-up run. Forking takes most of a short run's time on gVisor, and needs no order, so a warm
container may get an order `expect` for a Python program. The preforked guest has closed all of our descriptors except
three: a pipe for its order, a pipe for its report that it has begun, and a memfd for its standard input. It closes the
two pipes before it runs code of the caller. It knows nothing of earlier runs.

It is used at most once. If it died before it had begun, it has run nothing, and a guest is forked as usual. Its report
before it begins comes from our own code; afterwards it has no descriptor to report on.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import resource
import select
import signal
import sys
import time

from .files import WORKSPACE
from .link import (
    CHUNK,
    ENDED,
    ERR,
    KILL,
    OUT,
    SHARES_SANDBOX,
    SHM,
    VALUE,
    CallerLink,
    Counters,
    has_come,
    is_full,
    programs,
    stored,
    write_all,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MAX_TOLD = 32 << 20
LOOK_S = 0.02
# Output of a program that prints line by line is read after this pause, not once per line.
REST_S, SMALL_BYTES = (
    0.002,
    4096,
)  # a larger piece is not from such a program, and the pipe could fill up during a pause
GRACE_S = 5.0  # after a run's time-out, if the caller does not end it
CANNOT_RUN, NOT_FOUND = 126, 127
PR_SET_DUMPABLE = 4
prctl = ctypes.CDLL(None).prctl
FOR_EVER = float("inf")
LINK, ANSWERS = 3, 4  # descriptors of a session's driver: its link, and the pipe for its answers
archive: Any = __spec__.loader  # the finder of our modules and the interpreter's

# The preforked guest.
LENGTH_BYTES = 8
NO_ORDER: dict[str, Any] = {"python": {"path": "", "argv": []}, "env": {"A": "b"}, "has_stdin": False}


class Attempt:
    """Run one command to its end and pass on its output."""

    def __init__(
        self,
        caller: CallerLink,
        order: dict[str, Any],
        stdin: int,
        wake: int,
        end: float,
        counters: Counters,
        weight: int = 0,
    ):
        """`weight` is the memory that the program already uses, in bytes."""
        self.caller, self.order, self.stdin, self.wake = caller, order, stdin, wake
        self.end, self.counters = end, counters
        self.cause = ""
        self.ended_at: float | None = None  # when the program ended, even if the main loop was blocked then
        self.is_last = self.is_under_load = False
        self.told = self.passed = 0
        self.resting: dict[int, float] = {}  # time until which a descriptor is not read
        self.status: int | None = None
        self.pid = 0
        self.base = counters.held()[0] - weight, stored()
        self.poll, self.look_s = select.poll(), LOOK_S
        self.unused = used_by_children()  # CPU times of earlier children

    def go(self, index: int, preforked: PreforkedGuest | None = None) -> int:
        """Return the wait status of command number `index`, which a preforked guest may run."""
        self.is_last, self.ended_at = index >= len(self.order["commands"]) - 1, None
        tags = (OUT if self.is_last else ERR, ERR, VALUE)
        if preforked is not None and preforked.take(self.order):
            self.pid = preforked.pid
            status = self.relay(dict(zip(preforked.readers, tags, strict=True)))
            begun = preforked.beginning()
            if begun is not None or self.cause:
                self.unused = tuple(map(sum, zip(self.unused, begun or (0.0, 0.0), strict=True)))
                return status
            self.status = self.ended_at = None  # the preforked guest died before it had run anything
            self.unused = used_by_children()
        pipes = [os.pipe() for _ in range(3)]
        self.start(index, [theirs for _, theirs in pipes])
        return self.relay({ours: tag for (ours, _), tag in zip(pipes, tags, strict=True)})

    def start(self, index: int, theirs: list[int]) -> None:
        """Start command number `index` with its ends of the pipes for output, error and value."""
        self.pid = os.fork()
        if self.pid == 0:
            become_guest(self.order, index, self.stdin, theirs)
        for fd in theirs:
            os.close(fd)

    def relay(self, readers: dict[int, bytes]) -> int:
        """Pass on the program's output until its end, kill leftover processes, and return its wait status."""
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

    def warm_up(self, reader: int) -> None:
        """Exercise the relay of output once, and close the reader."""
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
            for fd, _ in self.poll.poll((REST_S if self.resting else self.look_s) * 1000):
                if fd in readers:
                    self._pass_on_then_rest(fd, readers)
                elif fd == self.wake:
                    os.read(fd, CHUNK)
                    self._reap()
                else:
                    self._listen()
            self._end_rests()
            self._look()
        self.poll, self.resting = select.poll(), {}

    def _pass_on_then_rest(self, fd: int, readers: dict[int, bytes]) -> None:
        """Pass on available output; after a small piece, pause reading: the program may print line by line.

        Pending output is passed on before a displayed value, to keep their order.
        """
        before, tag = self.passed, readers[fd]
        for resting_fd in self.resting if tag == VALUE else ():
            self._pass_on(resting_fd, readers[resting_fd])
        if not self._pass_on(fd, tag):
            self.poll.unregister(fd)
        elif tag in (OUT, ERR) and self.passed - before < SMALL_BYTES:
            self.poll.unregister(fd)
            self.resting[fd] = time.monotonic() + REST_S

    def _end_rests(self) -> None:
        if self.resting:
            now = time.monotonic()
            for fd in [fd for fd, until in self.resting.items() if until <= now]:
                del self.resting[fd]
                self.poll.register(fd, select.POLLIN)

    def _pass_on(self, fd: int, tag: bytes) -> bool:
        """Pass on available output.

        Returns False at the end of file, and when the pipe is empty after the program's end.
        """
        try:
            data = os.read(fd, CHUNK)
        except BlockingIOError:
            return self.status is None
        if tag == VALUE:
            self.told += len(data)
        if data and self.told <= MAX_TOLD:
            self.caller.send(tag, data)
        self.passed += len(data)
        return bool(data)

    def _note_end(self, *_: object) -> None:
        """Record the time of the program's end, in the signal handler.

        Passing on output may block until the caller reads, and then the main loop would notice the end too late.
        """
        try:
            if self.ended_at is None and os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                self.ended_at = time.monotonic()
        except OSError:
            pass  # it has been reaped, or its pid is not set yet

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
            if frame[0] == KILL and not (self.is_last and self.ended_at):  # otherwise the kill comes too late
                self._kill("asked")
        if self.caller.is_gone:
            os._exit(0)

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
        self.is_under_load = self.is_under_load or count_processes() >= self.order["pids"]


def memory_file() -> int:
    """Return a file in memory for a program's standard input."""
    try:
        return os.memfd_create("stdin", os.MFD_CLOEXEC)
    except OSError:
        if not SHARES_SANDBOX:  # a provider of sandboxes may refuse memfd_create
            raise
        return os.open(SHM, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)


def kill_all() -> None:
    """Kill every other process of the namespace."""
    try:
        os.kill(-1, signal.SIGKILL)
    except ProcessLookupError:
        pass


def count_processes() -> int:
    """Count the other processes, and the program, which has just ended."""
    if SHARES_SANDBOX:
        return len(programs()) + 1
    return sum(name.isdigit() for name in os.listdir("/proc"))


def sweep() -> None:
    """Kill all other processes and reap them."""
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
        value = os.dup2(ends[2], order["nofile"] - 1, inheritable=False)
        os.closerange(3, value)
        if order["commands"]:
            os.close(value)
            execute(order["commands"][index], order["env"])
        oneshot = sys.modules["interpreter.oneshot"]
        forget_ours()
        oneshot.run(order["python"], order["env"], oneshot.prepare(), oneshot.Privileges(archive), value)
    finally:
        os._exit(1)


def leave_first() -> None:
    """Drop, in a fork, the properties that only the first process has."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    if SHARES_SANDBOX:
        os.setresuid(os.geteuid(), os.geteuid(), os.geteuid())
    prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:
        if not SHARES_SANDBOX:  # otherwise /proc is ours and the write must succeed
            raise
    os.umask(0o022)


def execute(argv: list[str], env: dict[str, str]) -> None:
    """Execute a command; never returns."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    try:
        name, value = sys.modules["interpreter.oneshot"].output_variable()
        os.execvpe(argv[0], argv, {**env, name: value})  # noqa: S606 - the container's purpose
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        why = (missing and missing_interpreter(argv[0], env)) or os.strerror(error.errno or 0)
        os.write(2, f"cloche: cannot run {argv[0]!r}: {why}\n".encode("utf-8", "surrogateescape"))
        os._exit(NOT_FOUND if missing else CANNOT_RUN)


def missing_interpreter(program: str, env: dict[str, str]) -> str:
    """Return the message about a script's missing interpreter; "" if it is no script or has its interpreter."""
    folders = [""] if "/" in program else [f"{folder}/" for folder in env.get("PATH", os.defpath).split(":")]
    for folder in folders:
        try:
            with open(folder + program, "rb") as file:
                line = file.readline(256)
        except OSError:
            continue
        interpreter = os.fsdecode(line[2:]).split() if line.startswith(b"#!") else []
        if interpreter and not os.path.exists(interpreter[0]):
            return f"its interpreter {interpreter[0]!r}, which its first line names, is not there"
    return ""


def forget_ours() -> None:
    """Remove our modules and their finder from the interpreter."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ("inside", "interpreter", "init")]:
        del sys.modules[name]
    sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not archive]


def write_generated(order: dict[str, Any]) -> None:
    """Write the generated files of a compiler, or of a session's engine."""
    if order["build"]:
        os.makedirs(order["build"], exist_ok=True)
    for path, text in order["generated"].items():
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)


def used_by_children() -> tuple[float, ...]:
    """Return the user and system CPU time of all children that have ended, in seconds."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime, used.ru_stime


def set_up(settings: dict[str, Any]) -> Any:
    """Protect the first process, preload modules, and return those that could not be loaded."""
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.modules.pop("ctypes", None)
    write_startup(settings["startup"])
    return importlib.import_module("interpreter.preload").warm_up(settings)["failed"]


def write_startup(files: dict[str, str]) -> None:
    """Write the startup file of Python interpreters. If that fails, they buffer their output in blocks."""
    try:
        for path, text in files.items():
            write_generated({"build": os.path.dirname(path), "generated": {path: text}})
    except OSError:
        pass


class RunReport:
    """Report how a program ended, and which resources it and its children used."""

    def __init__(self, caller: CallerLink, counters: Counters):
        self.caller, self.counters = caller, counters
        self.hits, self.started = counters.hits(), time.monotonic()
        self.unreachable = counters.unreachable()

    def close(self, attempt: Attempt, status: int) -> None:
        """Send the report."""
        wall_s = (attempt.ended_at or time.monotonic()) - self.started
        used = [now - then for now, then in zip(used_by_children(), attempt.unused, strict=True)]
        oom, pids = (now - then for now, then in zip(self.counters.hits(), self.hits, strict=True))
        if not self.counters.counts_processes:  # then the number of processes at the end is used
            pids = int(attempt.is_under_load)
        peak = self.counters.read("peak").strip()
        unreachable = self.counters.unreachable() - self.unreachable if status else 0
        self.caller.send_json(
            ENDED, wait_status=status, cause=attempt.cause, oom_kills=oom, pids_hits=pids, full=is_full(),
            unreachable=unreachable, wall_s=wall_s, cpu_user_s=max(0.0, used[0]), cpu_system_s=max(0.0, used[1]),
            peak_bytes=int(peak) if peak.isdigit() else None,
        )  # fmt: skip


class PreforkedGuest:
    """One preforked guest. `readers` are our ends of its pipes for output, errors and value."""

    def __init__(self, nofile: int, counters: Counters):
        self.counters, self.held = counters, counters.held()[0]
        self.is_taken = False
        self.stdin = memory_file()
        pipes = [os.pipe() for _ in range(3)]
        order_fd, self.orders = os.pipe()
        self.begun, begun_fd = os.pipe()
        self.readers = [ours for ours, _ in pipes]
        theirs = [end for _, end in pipes]
        self.pid = os.fork()
        if self.pid == 0:
            become_preforked(nofile, self.stdin, theirs, order_fd, begun_fd)
        for fd in (*theirs, order_fd, begun_fd):
            os.close(fd)

    def is_alive(self) -> bool:
        """Return whether it still waits. If it has ended, it is reaped."""
        try:
            return os.waitpid(self.pid, os.WNOHANG)[0] == 0
        except ChildProcessError:
            return False

    def weight(self) -> int:
        """Return its private memory in bytes, which counts as its run's."""
        return max(0, self.counters.held()[0] - self.held)

    def take(self, order: dict[str, Any]) -> bool:
        """Send it the order, once; returns False if it has ended."""
        try:
            give(order, self.orders)
        except BrokenPipeError:
            return False
        self.is_taken = True
        return True

    def beginning(self) -> tuple[float, float] | None:
        """Return its CPU times before it began; None if it never began. Called after it has ended."""
        os.set_blocking(self.begun, False)
        try:
            report = os.read(self.begun, CHUNK)
        except BlockingIOError:
            report = b""
        if not report:
            return None
        user_s, system_s = json.loads(report)
        return user_s, system_s

    def discard(self) -> None:
        """Close our descriptors of it; kill it if it never got an order."""
        if not self.is_taken:
            if self.is_alive():
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
            for fd in self.readers:
                os.close(fd)
        for fd in (self.stdin, self.begun, self.orders):
            os.close(fd)


def become_preforked(nofile: int, stdin: int, ends: list[int], order_fd: int, begun_fd: int) -> None:
    """Become a preforked guest, and then the program; never returns."""
    try:
        leave_first()
        value = nofile - 1
        order_at, begun_at = value - 1, value - 2
        for fd, number in ((ends[2], value), (order_fd, order_at), (begun_fd, begun_at)):
            os.dup2(fd, number, inheritable=False)
        for number, fd in enumerate((stdin, ends[0], ends[1])):
            os.dup2(fd, number)
        os.closerange(3, begun_at)
        oneshot = sys.modules["interpreter.oneshot"]
        forget_ours()
        if not has_come(order_at):
            warm_up(oneshot)
        order = begin(order_at, begun_at)
        os.closerange(begun_at, value)
        if not order["has_stdin"]:
            null = os.open(os.devnull, os.O_RDONLY)
            os.dup2(null, 0)
            os.close(null)
        os.chdir(WORKSPACE)
        oneshot.run(order["python"], order["env"], oneshot.prepare(), oneshot.Privileges(archive), value)
    finally:
        os._exit(1)  # after an error before the order, the run gets another guest


def warm_up(oneshot: Any) -> None:
    """Do a warm-up run, with streams of the same kinds as a run's."""
    saved_fds = [os.dup(number) for number in (1, 2)]
    reading, writing = os.pipe()
    try:
        for number in (1, 2):
            os.dup2(writing, number)
        oneshot.warm_up_fork()
        if has_come(reading):
            os.read(reading, CHUNK)  # the warm-up's output
        give(NO_ORDER, writing)
        begin(reading, writing)
    finally:
        for number, fd in zip((1, 2), saved_fds, strict=True):
            os.dup2(fd, number)
        for fd in (*saved_fds, reading, writing):
            os.close(fd)
    preloaded = oneshot.prepare()
    if any(path.startswith(WORKSPACE) for path in preloaded.paths or ()):
        preloaded.paths = None  # the run itself must look at the workspace


def give(order: dict[str, Any], fd: int) -> None:
    """Write the part of an order that a guest needs. Raises BrokenPipeError."""
    body = json.dumps({name: order[name] for name in ("python", "env", "has_stdin")}).encode()
    write_all(fd, len(body).to_bytes(LENGTH_BYTES, "big") + body)


def begin(order_fd: int, begun_fd: int) -> dict[str, Any]:
    """Wait for the order, and report that it has arrived and the CPU time that this process has used so far."""
    order = receive_order(order_fd)
    used = resource.getrusage(resource.RUSAGE_SELF)
    os.write(begun_fd, json.dumps([used.ru_utime, used.ru_stime]).encode())
    return order


def receive_order(fd: int) -> dict[str, Any]:
    """Wait for the order. At the end of file this process exits."""
    data = bytearray()
    while len(data) < LENGTH_BYTES or len(data) < LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "big"):
        piece = os.read(fd, CHUNK)
        if not piece:
            os._exit(0)
        data += piece
    order: dict[str, Any] = json.loads(data[LENGTH_BYTES:])
    return order
