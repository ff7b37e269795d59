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
import json
import os
import resource
import select
import signal
import stat
import sys
import tarfile
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

WORKSPACE, TMP, SHM = "/workspace", "/tmp", "/dev/shm"
ORDER, DATA, KILL = b"O", b"D", b"K"  # heard
READY, STARTED, OUT, ERR, VALUE, ENDED, DONE, FAILED = b"H", b"s", b"o", b"e", b"v", b"r", b"k", b"x"  # said
CHUNK = 65_536
MAX_FILES, MAX_DEPTH = 10_000, 64
MAX_TOLD = 32 << 20
LOOK_S = 0.02
GRACE_S = 5.0  # beyond a run's time, when nobody outside ends it
CANNOT_RUN, NOT_FOUND = 126, 127
PR_SET_DUMPABLE = 4
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_prctl = ctypes.CDLL(None).prctl
_archive: Any = None  # the finder of the interpreter's modules


class Refused(Exception):
    """Say why a request about files was not done: one of `refused`, `not_found`, `too_large`, `full`."""

    def __init__(self, kind: str, path: str, why: str):
        super().__init__(why)
        self.kind, self.path, self.why = kind, path, why


class Caller:
    """Speak frames with whoever started the container."""

    def __init__(self) -> None:
        self.buffer = bytearray()
        self.is_gone = False

    def say(self, tag: bytes, body: bytes = b"") -> None:
        """Send one frame, however long that takes."""
        view = memoryview(tag + len(body).to_bytes(4, "big") + body)
        while view:
            view = view[os.write(1, view) :]

    def say_json(self, tag: bytes, **body: Any) -> None:
        self.say(tag, json.dumps(body).encode())

    def hear(self) -> tuple[bytes, bytes]:
        """Wait for one frame. Ends this process, and with it the container, when nothing more will come."""
        while True:
            frame = self.next()
            if frame is not None:
                return frame
            self.read()
            if self.is_gone:
                os._exit(0)

    def read(self) -> None:
        data = os.read(0, CHUNK)
        self.buffer += data
        self.is_gone = not data

    def next(self) -> tuple[bytes, bytes] | None:
        """Return a frame that is already here."""
        if len(self.buffer) < 5:
            return None
        end = 5 + int.from_bytes(self.buffer[1:5], "big")
        if len(self.buffer) < end:
            return None
        frame = bytes(self.buffer[:1]), bytes(self.buffer[5:end])
        del self.buffer[:end]
        return frame


class Incoming:
    """Read the pieces that follow an order like a file; an empty one ends them."""

    def __init__(self, caller: Caller):
        self.caller, self.rest, self.is_over = caller, b"", False

    def read(self, size: int) -> bytes:
        while not self.is_over and len(self.rest) < size:
            _, piece = self.caller.hear()
            self.rest += piece
            self.is_over = not piece
        found, self.rest = self.rest[:size], self.rest[size:]
        return found

    def drain(self) -> None:
        """Leave out what is left."""
        self.rest = b""
        while not self.is_over:
            self.read(1)
            self.rest = b""


class Outgoing:
    """Write like to a file; it goes out in pieces."""

    def __init__(self, caller: Caller):
        self.caller = caller

    def write(self, data: bytes) -> int:
        for at in range(0, len(data), CHUNK):
            self.caller.say(DATA, data[at : at + CHUNK])
        return len(data)


def open_folder(folder: str, *, make: bool = False) -> int:
    """Open a folder of the workspace one name at a time, through no link."""
    here = os.open(WORKSPACE, FOLDER)
    for name in folder.split("/") if folder else ():
        try:
            if make:
                try:
                    os.mkdir(name, dir_fd=here)
                except FileExistsError:
                    pass
            there = os.open(name, FOLDER, dir_fd=here)
        finally:
            os.close(here)
        here = there
    return here


def open_file(path: str) -> tuple[int, os.stat_result]:
    """Open a regular file of the workspace for reading."""
    folder, _, name = path.rpartition("/")
    here = open_folder(folder)
    try:
        fd = os.open(name, FILE, dir_fd=here)
    finally:
        os.close(here)
    state = os.fstat(fd)
    if not stat.S_ISREG(state.st_mode):
        os.close(fd)
        raise Refused("refused", path, "it is not a regular file of the workspace")
    return fd, state


def walk() -> Iterator[tuple[str, os.stat_result | None]]:
    """Yield every entry that is no folder, with its state; None for what cannot be looked at or lies too deep."""
    pending = [""]
    while pending:
        folder = pending.pop()
        try:
            here = open_folder(folder)
        except OSError:
            yield folder, None
            continue
        try:
            for name in sorted(os.listdir(here)):
                path = f"{folder}/{name}" if folder else name
                try:
                    state = os.stat(name, dir_fd=here, follow_symlinks=False)
                except OSError:
                    yield path, None
                    continue
                if not stat.S_ISDIR(state.st_mode):
                    yield path, state
                elif path.count("/") < MAX_DEPTH:
                    pending.append(path)
                else:
                    yield path, None
        finally:
            os.close(here)


def identity(state: os.stat_result) -> tuple[int, int, int]:
    return state.st_ino, state.st_ctime_ns, state.st_size


def survey() -> dict[str, tuple[int, int, int]]:
    """Return every regular file's identity, which no guest can set."""
    return {path: identity(state) for path, state in walk() if state is not None and stat.S_ISREG(state.st_mode)}


def take_files(incoming: Incoming) -> None:
    """Unpack an archive of regular files into the workspace."""
    with tarfile.open(fileobj=incoming, mode="r|", encoding="utf-8", errors="surrogateescape") as archive:  # type: ignore[call-overload]
        for member in archive:
            source = archive.extractfile(member)
            try:
                place_file(member.name, member.mode, source)
            except OSError as error:
                kind = "full" if error.errno in (28, 122) else "refused"
                raise Refused(kind, member.name, os.strerror(error.errno or 0)) from error


def place_file(path: str, mode: int, source: Any) -> None:
    """Write beside, then rename over, so that a link in the way is replaced and not followed."""
    folder, _, name = path.rpartition("/")
    here = open_folder(folder, make=True)
    temporary = f".{os.urandom(8).hex()}.cloche"
    try:
        fd = os.open(temporary, NEW, 0o600, dir_fd=here)
        try:
            while data := source.read(CHUNK):
                view = memoryview(data)
                while view:
                    view = view[os.write(fd, view) :]
            os.fchmod(fd, mode & 0o777)
            os.close(fd)
            os.rename(temporary, name, src_dir_fd=here, dst_dir_fd=here)
        except BaseException:
            os.unlink(temporary, dir_fd=here)
            raise
    finally:
        os.close(here)


def hand_files(caller: Caller, before: dict[str, tuple[int, int, int]], max_bytes: int) -> None:
    """Send what is new or changed as an archive; then what was skipped, and what is gone."""
    skipped, left, count, seen = 0, max_bytes, 0, set()
    archive: tarfile.TarFile | None = None
    for path, state in walk():
        if state is None or not stat.S_ISREG(state.st_mode) or count >= MAX_FILES or state.st_size > left:
            skipped += 1
            continue
        count += 1
        seen.add(path)
        if before.get(path) == identity(state):
            continue
        try:
            fd, state = open_file(path)
        except (OSError, Refused):
            skipped += 1
            continue
        if archive is None:
            archive = tarfile.open(  # noqa: SIM115 - it is closed below, when there is one
                fileobj=Outgoing(caller), mode="w|", format=tarfile.GNU_FORMAT, encoding="utf-8",
                errors="surrogateescape",
            )  # type: ignore[call-overload]  # fmt: skip
        left -= state.st_size
        member = tarfile.TarInfo(path)
        member.size, member.mode = state.st_size, state.st_mode & 0o777
        with open(fd, "rb") as file:
            archive.addfile(member, file)
    if archive is not None:
        archive.close()
    caller.say(DATA)
    caller.say_json(DONE, skipped=skipped, gone=[path for path in before if path not in seen])


class Counters:
    """Read the container's control groups, of either version, where they can be seen."""

    PLACES = {
        "stat": ("memory/memory.stat", "memory.stat"),
        "oom": ("memory/memory.oom_control", "memory.events"),
        "pids": ("pids/pids.events", "pids.events"),
        "peak": ("memory/memory.max_usage_in_bytes", "memory.peak"),
    }

    def __init__(self) -> None:
        self.fds: dict[str, int] = {}
        for name, places in self.PLACES.items():
            for place in places:
                try:
                    self.fds[name] = os.open(f"/sys/fs/cgroup/{place}", os.O_RDONLY | os.O_CLOEXEC)
                    break
                except OSError:
                    continue

    def read(self, name: str) -> str:
        try:
            return os.pread(self.fds[name], CHUNK, 0).decode("ascii", "replace")
        except (KeyError, OSError):
            return ""

    def row(self, name: str, *keys: str) -> int:
        """Return the first of `keys` that a file of rows has, else 0."""
        rows = dict(line.split(None, 1) for line in self.read(name).splitlines() if " " in line)
        return next((int(rows[key]) for key in keys if key in rows), 0)

    def hits(self) -> tuple[int, int]:
        return self.row("oom", "oom_kill"), self.row("pids", "max")

    def held(self) -> tuple[int, int]:
        """Return the bytes of private memory, and of shared memory with all files of a tmpfs."""
        text = self.read("stat")
        rows = dict(line.split(None, 1) for line in text.splitlines() if " " in line)
        return (
            int(rows.get("total_rss", rows.get("anon", 0))),
            int(rows.get("total_shmem", rows.get("shmem", 0))),
        )


def stored() -> int:
    """Return the bytes in the container's own file systems."""
    total = 0
    for place in (WORKSPACE, TMP, SHM):
        try:
            state = os.statvfs(place)
        except OSError:
            continue
        if os.access(place, os.W_OK):
            total += (state.f_blocks - state.f_bfree) * state.f_frsize
    return total


def is_full() -> bool:
    state = os.statvfs(WORKSPACE)
    return state.f_bfree == 0 or state.f_ffree == 0


class Attempt:
    """Run one command to its end and pass on what it writes."""

    def __init__(self, caller: Caller, order: dict[str, Any], stdin: int, wake: int, end: float, counters: Counters):
        self.caller, self.order, self.stdin, self.wake = caller, order, stdin, wake
        self.end, self.counters = end, counters
        self.cause = ""
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
            become_guest(self.order, index, self.stdin, [theirs for _, theirs in pipes], self.wake)
        for _, theirs in pipes:
            os.close(theirs)
        tags = (OUT if is_last else ERR, ERR, VALUE)
        readers = {ours: tag for (ours, _), tag in zip(pipes, tags, strict=True)}
        for fd in readers:
            os.set_blocking(fd, False)
        self._attend(readers)
        sweep()
        for fd, tag in readers.items():
            while self._pass_on(fd, tag):
                pass
            os.close(fd)
        assert self.status is not None
        return self.status

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
        self.cause = self.cause or cause
        kill_all()


def kill_all() -> None:
    """Kill every process of the namespace but this one."""
    try:
        os.kill(-1, signal.SIGKILL)
    except ProcessLookupError:
        pass


def sweep() -> None:
    """Kill what is left and wait until it is gone."""
    kill_all()
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def become_guest(order: dict[str, Any], index: int, stdin: int, ends: list[int], wake: int) -> None:
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
    oneshot.archive = _archive
    for name in [name for name in sys.modules if name.partition(".")[0] == "interpreter"]:
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
    for index in range(max(1, len(order["commands"]))):
        status = attempt.go(index)
        attempt.status = None
        if status or attempt.cause:
            break
    wall_s = time.monotonic() - started
    os.close(stdin)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    oom, pids = (now - then for now, then in zip(counters.hits(), hits, strict=True))
    peak = counters.read("peak").strip()
    caller.say_json(
        ENDED, wait_status=status, cause=attempt.cause, oom_kills=oom, pids_hits=pids, full=is_full(), wall_s=wall_s,
        cpu_user_s=used.ru_utime, cpu_system_s=used.ru_stime, peak_bytes=int(peak) if peak.isdigit() else None,
    )  # fmt: skip
    prepare_workspace()
    hand_files(caller, before, order["disk_bytes"])


def prepare_workspace() -> None:
    """Undo what a guest may have done to the folder itself."""
    try:
        os.chmod(WORKSPACE, 0o700)
    except OSError:
        pass  # it is another's, who lets everybody in


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
    if order["build"]:
        os.makedirs(order["build"], exist_ok=True)
    for path, text in order["generated"].items():
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)


def read(caller: Caller, order: dict[str, Any]) -> None:
    """Hand back one file."""
    path = order["path"]
    try:
        fd, _ = open_file(path)
    except FileNotFoundError:
        raise Refused("not_found", path, "there is no such file") from None
    with open(fd, "rb") as file:
        data = file.read(order["max_bytes"] + 1)
    if len(data) > order["max_bytes"]:
        raise Refused("too_large", path, f"it is larger than {order['max_bytes']} bytes")
    Outgoing(caller).write(data)
    caller.say(DATA)
    caller.say_json(DONE)


def write(caller: Caller) -> None:
    prepare_workspace()
    incoming = Incoming(caller)
    take_files(incoming)
    incoming.drain()
    caller.say_json(DONE)


def listing(caller: Caller) -> None:
    caller.say_json(DONE, paths=sorted(survey()))


def serve(caller: Caller) -> None:
    """Do what is asked, one order after the other, until nobody asks any more."""
    wake, waker = os.pipe()
    for fd in (wake, waker):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    counters = Counters()
    verbs = {
        "run": lambda order: run(caller, order, wake, counters),
        "read": lambda order: read(caller, order),
        "write": lambda order: write(caller),
        "list": lambda order: listing(caller),
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
    from interpreter import oneshot  # type: ignore[import-not-found]

    failed = oneshot.warm_up(settings)["failed"]
    gc.collect()
    gc.freeze()
    caller = Caller()
    caller.say_json(READY, version=sys.version.split()[0], failed=failed)
    serve(caller)
