"""The first process of a container: takes files in, runs one program, sees it out, and hands files back.

It is sent over standard input as text, to an interpreter of the image's own, and imports nothing of Cloche. What it
hears and says are frames: a tag of one byte, a length of four, a body.

Theory of operation: the program is a child with pipes of its own, so nothing that it writes can be taken for a frame,
and this process cannot be read or traced by it. When the program ends, or when it must, everything else in the
process namespace is killed in one call, and only then files are looked at. When standard input ends, the caller is
gone, and so is the container.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import resource
import select
import signal
import sys
import time

from .reaper_counters import Counters, is_full, stored
from .reaper_files import (
    WORKSPACE,
    Refused,
    hand_file,
    hand_files,
    list_files,
    prepare_workspace,
    survey,
    take_files,
)
from .reaper_link import (
    CHUNK,
    DONE,
    ENDED,
    ERR,
    FAILED,
    KILL,
    ORDER,
    OUT,
    READY,
    STARTED,
    VALUE,
    Caller,
    Incoming,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

MAX_TOLD = 32 << 20
LOOK_S = 0.02
GRACE_S = 5.0  # beyond a run's time, when nobody outside ends it
CANNOT_RUN, NOT_FOUND = 126, 127
PR_SET_DUMPABLE = 4
_prctl = ctypes.CDLL(None).prctl
_archive: Any = None  # the finder of our modules and the interpreter's


class Attempt:
    """Run one command to its end and pass on what it writes."""

    def __init__(self, caller: Caller, order: dict[str, Any], stdin: int, wake: int, end: float, counters: Counters):
        self.caller, self.order, self.stdin, self.wake = caller, order, stdin, wake
        self.end, self.counters = end, counters
        self.cause = ""
        self.is_crowded = False
        self.told = 0
        self.status: int | None = None
        self.pid = 0
        self.base = counters.held()[0], stored()

    def go(self, index: int) -> int:
        """Return the wait status of command number `index`."""
        is_last = index >= len(self.order["commands"]) - 1
        pipes = [os.pipe() for _ in range(3)]
        self.pid = os.fork()
        if self.pid == 0:
            become_guest(self.order, index, self.stdin, [theirs for _, theirs in pipes])
        for _, theirs in pipes:
            os.close(theirs)
        tags = (OUT if is_last else ERR, ERR, VALUE)
        readers = {ours: tag for (ours, _), tag in zip(pipes, tags, strict=True)}
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

    def _attend(self, readers: dict[int, bytes]) -> None:
        """Pass on output until the program has ended."""
        poll = select.poll()
        for fd in (0, self.wake, *readers):
            poll.register(fd, select.POLLIN)
        while self.status is None:
            for fd, _ in poll.poll(LOOK_S * 1000):
                if fd in readers:
                    if not self._pass_on(fd, readers[fd]):
                        poll.unregister(fd)
                elif fd == self.wake:
                    os.read(fd, CHUNK)
                    self._reap()
                else:
                    self._listen()
            self._look()

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

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.pid:
                self.status = status

    def _listen(self) -> None:
        self.caller.read()
        while (frame := self.caller.next()) is not None:
            if frame[0] == KILL:
                self._kill("asked")
        if self.caller.is_gone:
            os._exit(0)

    def _look(self) -> None:
        if time.monotonic() > self.end:
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
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        _prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
        os.umask(0o022)
        os.chdir(WORKSPACE)
        for number, fd in enumerate((stdin, ends[0], ends[1])):
            os.dup2(fd, number)
        value = os.dup2(ends[2], order["nofile"] - 1, inheritable=False)
        os.closerange(3, value)
        commands = order["commands"]
        if commands:
            os.close(value)
            execute(commands[index], order["env"])
        run_python(order["python"], order["env"], value)
    finally:
        os._exit(1)


def execute(words: list[str], env: dict[str, str]) -> None:
    """Become a command."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvpe(words[0], words, env)  # noqa: S606 - this is what the container is for
    except OSError as error:
        os.write(2, f"cloche: cannot run {words[0]!r}: {os.strerror(error.errno or 0)}\n".encode())
        os._exit(NOT_FOUND if isinstance(error, FileNotFoundError) else CANNOT_RUN)


def run_python(settings: dict[str, Any], env: dict[str, str], value: int) -> None:
    """Let the interpreter forget what it was, and run a script."""
    oneshot = sys.modules["interpreter.oneshot"]
    oneshot.__dict__["archive"] = _archive
    for name in [name for name in sys.modules if name.partition(".")[0] in ("inside", "interpreter")]:
        del sys.modules[name]
    sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not _archive]
    oneshot.run(settings, env, value)


def run(caller: Caller, order: dict[str, Any], wake: int, counters: Counters) -> None:
    """Do one run: files in, program, report, files out."""
    prepare_workspace()
    incoming = Incoming(caller)
    take_files(incoming)
    incoming.drain()
    stdin = take_stdin(Incoming(caller)) if order["has_stdin"] else os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    before = survey()
    write_generated(order)
    hits = counters.hits()
    started = time.monotonic()
    caller.say(STARTED)
    attempt = Attempt(caller, order, stdin, wake, started + order["timeout_s"] + GRACE_S, counters)
    status = 0
    for index in range(max(1, len(order["commands"]))):
        status = attempt.go(index)
        attempt.status = None
        if status or attempt.cause:
            break
    wall_s = time.monotonic() - started
    os.close(stdin)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    oom, pids = (now - then for now, then in zip(counters.hits(), hits, strict=True))
    if not counters.counts_processes:  # then what was there at the end tells
        pids = int(attempt.is_crowded)
    peak = counters.read("peak").strip()
    caller.say_json(
        ENDED, wait_status=status, cause=attempt.cause, oom_kills=oom, pids_hits=pids, full=is_full(), wall_s=wall_s,
        cpu_user_s=used.ru_utime, cpu_system_s=used.ru_stime, peak_bytes=int(peak) if peak.isdigit() else None,
    )  # fmt: skip
    prepare_workspace()
    hand_files(caller, before, order["disk_bytes"])


def take_stdin(incoming: Incoming) -> int:
    """Return a descriptor to read the program's standard input from."""
    fd = os.memfd_create("stdin", os.MFD_CLOEXEC)
    while data := incoming.read(CHUNK):
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def write_generated(order: dict[str, Any]) -> None:
    """Write what a compiler needs besides the code."""
    if order["build"]:
        os.makedirs(order["build"], exist_ok=True)
    for path, text in order["generated"].items():
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)


def write(caller: Caller) -> None:
    """Take files in, without a run."""
    prepare_workspace()
    incoming = Incoming(caller)
    take_files(incoming)
    incoming.drain()
    caller.say_json(DONE)


def serve(caller: Caller) -> None:
    """Do what is asked, one order after the other, until nobody asks any more."""
    wake, waker = os.pipe()
    for fd in (wake, waker):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    counters = Counters()
    verbs: dict[str, Callable[[dict[str, Any]], None]] = {
        "run": lambda order: run(caller, order, wake, counters),
        "read": lambda order: hand_file(caller, order["path"], order["max_bytes"]),
        "write": lambda _: write(caller),
        "list": lambda _: list_files(caller),
        "leave": lambda _: os._exit(0),
    }
    while True:
        tag, body = caller.hear()
        if tag != ORDER:
            continue  # the rest of what a failed order left
        order = json.loads(body)
        try:
            verbs[order["do"]](order)
        except Refused as error:
            caller.say_json(FAILED, kind=error.kind, path=error.path, why=error.why)
        except OSError as error:
            caller.say_json(
                FAILED, kind="refused", path=order.get("path", WORKSPACE), why=os.strerror(error.errno or 0)
            )


def main(archive: Any, settings: dict[str, Any]) -> None:
    """Get ready, say so, and serve."""
    global _archive
    _archive = archive
    _prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.modules.pop("ctypes", None)
    failed = importlib.import_module("interpreter.oneshot").warm_up(settings)["failed"]
    gc.collect()
    gc.freeze()
    caller = Caller()
    caller.say_json(READY, version=sys.version.split()[0], failed=failed, kernel=os.uname().release)
    serve(caller)
