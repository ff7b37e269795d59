"""One program in a container: started, or run by a preforked guest; its output passed on; all of it ended.

Theory of operation of the preforked guest (`PreforkedGuest`): it is an interpreter that was forked before there was an
order, and has done a warm-up run. Forking takes gVisor most of a short run's time, and needs no order. So a
container that was started in advance may be told to expect a Python program. The preforked guest has closed all of
our descriptors but three: where its order comes from, where it reports that it has begun, and a file in memory that
will hold its standard input. It closes the first two before anything of the caller's runs. It knows nothing of any
earlier run.

It is used once, or not at all. One that died before it had begun has run nothing: then a guest is forked as if there
had been none. What it says before it begins is our own code's word; afterwards it can say nothing here.
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
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MAX_TOLD = 32 << 20
LOOK_S = 0.02
# Of a program that prints line by line, what comes is read after such a rest, not once for each line.
REST_S, SMALL_BYTES = 0.002, 4096  # more than that at once is no such program's, and would fill the pipe meanwhile
GRACE_S = 5.0  # beyond a run's time, when nobody outside ends it
CANNOT_RUN, NOT_FOUND = 126, 127
PR_SET_DUMPABLE = 4
prctl = ctypes.CDLL(None).prctl
FOR_EVER = float("inf")
LINK, ANSWERS = 3, 4  # where the driver of a session finds its link and the pipe of its answers
archive: Any = __spec__.loader  # the finder of our modules and the interpreter's, which has found this one

# The preforked guest.
LENGTH_BYTES = 8
NO_ORDER: dict[str, Any] = {"python": {"path": "", "argv": []}, "env": {"A": "b"}, "has_stdin": False}


class Attempt:
    """Run one command to its end and pass on what it writes."""

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
        """Take what it needs; `weight` is the memory that the program already has."""
        self.caller, self.order, self.stdin, self.wake = caller, order, stdin, wake
        self.end, self.counters = end, counters
        self.cause = ""
        self.ended_at: float | None = None  # when the program ended, also where nobody could attend to it then
        self.is_last = self.is_under_load = False
        self.told = self.passed = 0
        self.resting: dict[int, float] = {}  # descriptors, and until when they are not read
        self.status: int | None = None
        self.pid = 0
        self.base = counters.held()[0] - weight, stored()
        self.poll, self.look_s = select.poll(), LOOK_S
        self.unused = used_by_children()  # CPU times that are not this program's

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
            self.status = self.ended_at = None  # it ended before it had run anything
            self.unused = used_by_children()
        pipes = [os.pipe() for _ in range(3)]
        self.start(index, [theirs for _, theirs in pipes])
        return self.relay({ours: tag for (ours, _), tag in zip(pipes, tags, strict=True)})

    def start(self, index: int, theirs: list[int]) -> None:
        """Start command number `index` with its ends of output, error and the value's pipe, or those of a session."""
        self.pid = os.fork()
        if self.pid == 0:
            become_guest(self.order, index, self.stdin, theirs)
        for fd in theirs:
            os.close(fd)

    def relay(self, readers: dict[int, bytes]) -> int:
        """Pass on its output until its end, and leave nothing of it; return its wait status."""
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
            for fd, _ in self.poll.poll((REST_S if self.resting else self.look_s) * 1000):
                if fd in readers:
                    self._pass_on_then_rest(fd, readers)
                elif fd == self.wake:
                    os.read(fd, CHUNK)
                    self._reap()
                elif fd == 0:
                    self._listen()
                else:
                    self._push()
            self._end_rests()
            self._look()
        self.poll, self.resting = select.poll(), {}

    def _pass_on_then_rest(self, fd: int, readers: dict[int, bytes]) -> None:
        """Pass on what is there; nothing more for a moment if it was little: more may be coming line by line.

        What was printed before something was shown goes before that.
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
            self.caller.send(tag, data)
        self.passed += len(data)
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

    def _take(self, tag: bytes, body: bytes) -> None:  # noqa: ARG002 - sessions receive more
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
        self.is_under_load = self.is_under_load or count_processes() >= self.order["pids"]


def memory_file() -> int:
    """Return a file in memory for a program's standard input."""
    try:
        return os.memfd_create("stdin", os.MFD_CLOEXEC)
    except OSError:
        if not SHARES_SANDBOX:  # else a provider may refuse it
            raise
        return os.open(SHM, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)


def kill_all() -> None:
    """Kill every process of the namespace but this one."""
    try:
        os.kill(-1, signal.SIGKILL)
    except ProcessLookupError:
        pass


def count_processes() -> int:
    """Count the processes besides this one, and the program, which has just ended."""
    if SHARES_SANDBOX:
        return len(programs()) + 1
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
        inherited = [os.dup2(fd, last - index, inheritable=False) for index, fd in enumerate(ends[2:])]
        os.closerange(3, inherited[-1])
        commands = order["commands"]
        if commands and order["is_session"]:
            for fd, number in zip(inherited, (ANSWERS, LINK), strict=True):
                os.dup2(fd, number)
        if commands:
            os.closerange(inherited[-1], last + 1)
            execute(commands[index], order["env"])
        run_python(order, inherited)
    finally:
        os._exit(1)


def leave_first() -> None:
    """Lay aside, in a fork, what is the first process's own."""
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
        if not SHARES_SANDBOX:  # elsewhere /proc is ours
            raise
    os.umask(0o022)


def execute(argv: list[str], env: dict[str, str]) -> None:
    """Become a command."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    try:
        name, value = sys.modules["interpreter.oneshot"].output_variable()
        os.execvpe(argv[0], argv, {**env, name: value})  # noqa: S606 - this is what the container is for
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        why = (missing and missing_interpreter(argv[0], env)) or os.strerror(error.errno or 0)
        os.write(2, f"cloche: cannot run {argv[0]!r}: {why}\n".encode("utf-8", "surrogateescape"))
        os._exit(NOT_FOUND if missing else CANNOT_RUN)


def missing_interpreter(program: str, env: dict[str, str]) -> str:
    """Say which interpreter a script lacks; empty for what is no script, or has one."""
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


def run_python(order: dict[str, Any], inherited: list[int]) -> None:
    """Let the interpreter forget what it was, and run a script, or serve a session."""
    oneshot = sys.modules["interpreter.oneshot"]
    work = importlib.import_module("interpreter.session").serve if order["is_session"] else oneshot.run
    forget_ours()
    work(order["python"], order["env"], oneshot.prepare(), oneshot.Privileges(archive), *inherited)


def forget_ours() -> None:
    """Let the interpreter find no module of ours any more."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ("inside", "interpreter", "init")]:
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


def write_startup(files: dict[str, str]) -> None:
    """Write what interpreters of Python find at their start; where that cannot be, they print in blocks."""
    try:
        for path, text in files.items():
            write_generated({"build": os.path.dirname(path), "generated": {path: text}})
    except OSError:
        pass


class RunReport:
    """Report how a program ended, and what it and its children used and hit."""

    def __init__(self, caller: CallerLink, counters: Counters):
        self.caller, self.counters = caller, counters
        self.hits, self.started = counters.hits(), time.monotonic()
        self.unreachable = counters.unreachable()

    def close(self, attempt: Attempt, status: int) -> None:
        """Send the report."""
        wall_s = (attempt.ended_at or time.monotonic()) - self.started
        used = [now - then for now, then in zip(used_by_children(), attempt.unused, strict=True)]
        oom, pids = (now - then for now, then in zip(self.counters.hits(), self.hits, strict=True))
        if not self.counters.counts_processes:  # then what was there at the end tells
            pids = int(attempt.is_under_load)
        peak = self.counters.read("peak").strip()
        unreachable = self.counters.unreachable() - self.unreachable if status else 0
        self.caller.send_json(
            ENDED, wait_status=status, cause=attempt.cause, oom_kills=oom, pids_hits=pids, full=is_full(),
            unreachable=unreachable, wall_s=wall_s, cpu_user_s=max(0.0, used[0]), cpu_system_s=max(0.0, used[1]),
            peak_bytes=int(peak) if peak.isdigit() else None,
        )  # fmt: skip


class PreforkedGuest:
    """Hold one preforked guest. `readers` are where its output, errors and value come from."""

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
        """Tell whether it still waits; one that has ended is reaped."""
        try:
            return os.waitpid(self.pid, os.WNOHANG)[0] == 0
        except ChildProcessError:
            return False

    def weight(self) -> int:
        """Return the private memory that it has taken, which counts as its run's."""
        return max(0, self.counters.held()[0] - self.held)

    def take(self, order: dict[str, Any]) -> bool:
        """Give it its order; False when it has ended. Once only."""
        try:
            give(order, self.orders)
        except BrokenPipeError:
            return False
        self.is_taken = True
        return True

    def beginning(self) -> tuple[float, float] | None:
        """Return the CPU times that it had used before it began; None when it never did. For when it has ended."""
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
        """Close what is left open of it here; and if it was given no order, kill it."""
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
        os._exit(1)  # whatever went wrong before the order, the run then gets another guest


def warm_up(oneshot: Any) -> None:
    """Do a warm-up run, with streams of the same kinds as a run's that nobody reads."""
    saved_fds = [os.dup(number) for number in (1, 2)]
    reading, writing = os.pipe()
    try:
        for number in (1, 2):
            os.dup2(writing, number)
        oneshot.warm_up_fork()
        if has_come(reading):
            os.read(reading, CHUNK)  # what was printed
        give(NO_ORDER, writing)
        begin(reading, writing)
    finally:
        for number, fd in zip((1, 2), saved_fds, strict=True):
            os.dup2(fd, number)
        for fd in (*saved_fds, reading, writing):
            os.close(fd)
    preloaded = oneshot.prepare()
    if any(path.startswith(WORKSPACE) for path in preloaded.paths or ()):
        preloaded.paths = None  # what is there then is for the run to see


def give(order: dict[str, Any], fd: int) -> None:
    """Write what a guest needs of an order. Raises BrokenPipeError."""
    body = json.dumps({name: order[name] for name in ("python", "env", "has_stdin")}).encode()
    view = memoryview(len(body).to_bytes(LENGTH_BYTES, "big") + body)
    while view:
        view = view[os.write(fd, view) :]


def begin(order_fd: int, begun_fd: int) -> dict[str, Any]:
    """Wait for the order, and report that it has come, and the CPU time that this process has used until then."""
    order = receive_order(order_fd)
    used = resource.getrusage(resource.RUSAGE_SELF)
    os.write(begun_fd, json.dumps([used.ru_utime, used.ru_stime]).encode())
    return order


def receive_order(fd: int) -> dict[str, Any]:
    """Wait for the order. Ends this process when none will come."""
    data = bytearray()
    while len(data) < LENGTH_BYTES or len(data) < LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "big"):
        piece = os.read(fd, CHUNK)
        if not piece:
            os._exit(0)
        data += piece
    order: dict[str, Any] = json.loads(data[LENGTH_BYTES:])
    return order
