"""Many processes at once in a container: its first process runs the loop of `init`, and is the loop's host.

Theory of operation: the first process has the same id as all others, and no capability. It is protected because it is
pid 1 of its namespace (no signal from inside can kill it, pid_namespaces(7)), because it is not dumpable, and because
the container's filter lets no process change another's limits or priority. A fork can be inspected once it is dumpable;
before that it closes the caller's streams.

The processes that belong to a started process are found by a mark: an RLIMIT_RSS with a number unique to each started
process. The kernel does not enforce that limit (getrlimit(2): no effect since Linux 2.4.30), passes it on by fork and
exec, and shows it to any process. A seccomp filter, which cannot be removed, refuses to change it. (If a provider of
sandboxes refuses filters, a process that lowers the limit is found only when the sandbox ends.) A process can leave its
parent, process group, session and environment and is still found.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import errno
import gc
import importlib
import io
import json
import os
import resource
import signal
import struct
import sys
import tarfile
import zlib

from .files import WORKSPACE, Seen, hand_files
from .link import CHUNK, DATA, SHARES_SANDBOX, Counters, FrameWriter, stored, write_all
from .program import ANSWERS, LINK, LOOK_S, execute, forget_ours, leave_first, prctl, set_up

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

STDIN_FD, STDOUT_FD = 0, 1  # the caller's link
OUTPUT, REPORT, REQUESTS, HOST_CALLS, HOST_ANSWERS = 1, 3, 4, 5, 6  # numbers of streams, as in `init.wire`
ANSWER_FD = 3  # of our own process that works on files, as in `init.files`
INIT = 1
MOST_MESSAGE = 4096
IDLE_LOOK_S = 0.5
FREEING_S, MOST_FREEING_S = 0.1, 2.0  # time for memory to become free: after the end of its process, and until that end
SHOWN_BY_DAEMON = ("etc/hosts", "etc/hostname", "etc/resolv.conf")
OUT_OF_MEMORY = "out_of_memory"
LOOK = "look"  # an operation on files, for sandboxes whose runs take turns
MOST_PASSES = 50  # of a signal to all; a guest that forks faster is not waited for

# Marks are far above any program's memory, because programs may size themselves by this limit.
FIRST_MARK = 1 << 50
PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
BPF_LOAD, BPF_JEQ, BPF_JGE, BPF_RETURN = 0x20, 0x15, 0x35, 0x06
ALLOW, DENY = 0x7FFF0000, 0x00050000
NUMBER_AT, MACHINE_AT, ARGUMENTS_AT = 0, 4, 16  # offsets in `struct seccomp_data` (seccomp(2))
FOREIGN_NUMBER = 0x40000000  # __X32_SYSCALL_BIT: numbers of the x32 ABI
# By machine: AUDIT_ARCH_* (linux/audit.h), and the numbers of setrlimit and prlimit64.
MACHINES = {"x86_64": (0xC000003E, 160, 302), "aarch64": (0xC00000B7, 164, 261)}
LIMITS_NAME = b"Max resident set"


def mark_filter(machine: str) -> bytes:
    """Return the seccomp program that refuses to change RLIMIT_RSS. Raises OSError for an unknown machine."""
    if machine not in MACHINES:
        raise OSError(errno.ENOSYS, f"processes cannot be marked on {machine}")
    name, setrlimit, prlimit = MACHINES[machine]
    first, second, third = ARGUMENTS_AT, ARGUMENTS_AT + 8, ARGUMENTS_AT + 16
    rows = [
        (BPF_LOAD, 0, 0, MACHINE_AT),
        (BPF_JEQ, 0, 14, name),  # another architecture's calls: ENOSYS
        (BPF_LOAD, 0, 0, NUMBER_AT),
        (BPF_JGE, 12, 0, FOREIGN_NUMBER),
        (BPF_JEQ, 0, 2, setrlimit),
        (BPF_LOAD, 0, 0, first),
        (BPF_JEQ, 7, 8, resource.RLIMIT_RSS),
        (BPF_JEQ, 0, 7, prlimit),
        (BPF_LOAD, 0, 0, third),
        (BPF_JEQ, 0, 2, 0),  # prlimit64 without a new limit only reads
        (BPF_LOAD, 0, 0, third + 4),
        (BPF_JEQ, 3, 0, 0),
        (BPF_LOAD, 0, 0, second),
        (BPF_JEQ, 0, 1, resource.RLIMIT_RSS),
        (BPF_RETURN, 0, 0, DENY | errno.EPERM),
        (BPF_RETURN, 0, 0, ALLOW),
        (BPF_RETURN, 0, 0, DENY | errno.ENOSYS),
    ]
    return b"".join(struct.pack("HBBI", *row) for row in rows)


class Marker:
    """Mark processes, and find marked processes."""

    def __init__(self) -> None:
        program = mark_filter(os.uname().machine)
        self.instructions = ctypes.create_string_buffer(program, len(program))
        shape = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(self.instructions))
        self.program = ctypes.create_string_buffer(shape, len(shape))
        self.is_in_files = os.path.exists("/proc/self/limits")  # gVisor lacks it; there prlimit reads the limit
        self.newest = FIRST_MARK

    def next(self) -> int:
        self.newest += 1
        return self.newest

    def put(self, mark: int) -> None:
        """Mark this process and its descendants. Raises OSError."""
        resource.setrlimit(resource.RLIMIT_RSS, (mark, mark))
        if prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, self.program, 0, 0) and not SHARES_SANDBOX:
            raise OSError(errno.EPERM, "the mark of a process cannot be fixed")

    def of(self, pid: int) -> int:
        """Return the mark of a process; 0 if the process has ended."""
        try:
            if not self.is_in_files:
                return resource.prlimit(pid, resource.RLIMIT_RSS)[1]
            with open(f"/proc/{pid}/limits", "rb", buffering=0) as file:
                text = file.read(CHUNK)
            fields = text[text.index(LIMITS_NAME) + len(LIMITS_NAME) :].split(None, 2)
            return int(fields[1]) if fields[1].isdigit() else 0
        except (OSError, ValueError, IndexError):
            return 0

    def all(self) -> dict[int, int]:
        """Return the marks of all marked processes, by pid."""
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        marks = {pid: self.of(pid) for pid in pids if pid != INIT}
        return {pid: mark for pid, mark in marks.items() if mark >= FIRST_MARK}


class ProcessMark:
    """The mark of a started process and its descendants. Numbers are never reused."""

    def __init__(self, number: int):
        self.number = number

    def close(self) -> None:
        """Release nothing: a mark holds no resource."""


class ForkedGuest:
    """A fork as the first process knows it: its mark, and the pipe over which it reports a failed start."""

    def __init__(self, host: ContainerHost, pid: int, number: int, errors_fd: int):
        self.host, self.pid, self.mark, self.errors_fd = host, pid, ProcessMark(number), errors_fd
        self.failure = bytearray()
        self.denied = 0  # not counted here
        os.set_blocking(errors_fd, False)
        host.server.loop.watch(errors_fd, host.POLLIN, self.receive)

    def signal(self, number: int, group: int = 0) -> None:
        """Send a signal to the process, or to a process group. Raises OSError."""
        if group:
            os.killpg(group, number)
        else:
            os.kill(self.pid, number)

    def receive(self, _: int = 0) -> bool:
        """Read the process's report; return whether there was data."""
        try:
            data = os.read(self.errors_fd, MOST_MESSAGE)
        except BlockingIOError:
            return False
        self.failure += data[: MOST_MESSAGE - len(self.failure)]
        if not data:
            self.host.server.loop.ignore(self.errors_fd)
            os.close(self.errors_fd)
            self.errors_fd = -1
        return bool(data)

    def conclude(self) -> dict[str, Any]:
        """Return the error of a failed start, {} if the program was executed. Called after the process has ended."""
        while self.errors_fd >= 0 and self.receive():
            pass
        if self.errors_fd >= 0:  # a descendant still has the other end open
            self.host.server.loop.ignore(self.errors_fd)
            os.close(self.errors_fd)
            self.errors_fd = -1
        try:
            failure = json.loads(self.failure) if self.failure else {}
        except ValueError:
            return {"kind": "start", "step": "start", "message": "it did not become a program"}
        return {"kind": "start", **failure} if isinstance(failure, dict) and failure else {}


class BecomeGuest(BaseException):
    """Raised in a fork to leave the loop of init, so that no frame of the loop is on the stack below the program."""

    def __init__(self, guest: ContainerGuest):
        super().__init__()
        self.guest = guest


class ContainerHost:
    """The parts of init's loop that differ in a container; see `init.server.Host`."""

    POLLIN = 1
    ender = None  # set to `init.tree`, which ends the processes of a mark
    server: Any

    def __init__(self, settings: dict[str, Any]):
        self.memory_bytes, self.nofile = settings["memory_bytes"], settings["nofile"]
        self.places = tuple(settings["in_memory"])
        self.counters, self.marker = Counters(), Marker()
        self.oom_kills, self.pids_hits = self.counters.hits()
        self.base = self._held()[0], stored(self.places)
        self.is_busy = False
        self.ended_mark, self.ended_at = 0, 0.0  # the mark last ended for memory
        self.users: dict[str, Any] | None = settings.get("users")
        self.seen = Seen() if settings.get("is_looked_at") else None  # the files of the workspace
        self.before: dict[str, tuple[int, int, int]] = {}  # their states when they were looked at last

    def fork(self, order: dict[str, Any], streams: dict[int, int]) -> ForkedGuest:
        """Fork a process that becomes a guest."""
        if order.get("user") is not None and self.users is None:
            raise refusal("unsupported", "a container has one user; leave user out, or use the local backend")
        number = self.marker.next()
        errors_fd, errors_writer = os.pipe2(os.O_CLOEXEC)
        try:
            pid = os.fork()
        except OSError:
            os.close(errors_fd)
            os.close(errors_writer)
            raise
        if pid == 0:
            signal.set_wakeup_fd(-1)
            raise BecomeGuest(ContainerGuest(self, number, errors_writer, order, streams))
        os.close(errors_writer)
        return ForkedGuest(self, pid, number, errors_fd)

    def look(self) -> Iterator[tuple[int, int]]:
        """Yield (pid, mark) of all marked processes, newest first, and of started processes stopped before they were
        marked.
        """
        for name in reversed(os.listdir("/proc")):
            if name.isdigit() and int(name) != INIT:
                pid, mark = int(name), self.marker.of(int(name))
                process = self.server.by_pid.get(pid) if mark < FIRST_MARK else None
                if mark >= FIRST_MARK or process is not None:
                    yield pid, mark if process is None else process.mark.number

    def note_orphan(self, pid: int) -> None:
        """Record nothing: orphans are found by their mark."""

    def other_pids(self) -> list[int]:
        """Return the pids of all marked processes."""
        return list(self.marker.all())

    def signal_others(self, number: int) -> None:
        """Send a signal to all marked processes. Repeats until no new ones appear, at most `MOST_PASSES` times."""
        signalled: set[int] = set()
        for _ in range(MOST_PASSES):
            new = set(self.other_pids()) - signalled
            if not new:
                break
            for pid in new:
                try:
                    os.kill(pid, number)
                except OSError:
                    pass  # it has gone meanwhile
            signalled |= new

    def hold_others(self) -> bool:
        """Return False: one call cannot stop them all, because processes that are not ours may run in this
        namespace.
        """
        return False

    def note_busy(self, *, is_busy: bool) -> None:
        """Start checking the memory; the checks are less frequent while only leftover processes run."""
        self.is_busy = is_busy
        if is_busy:
            self._look_later(LOOK_S)

    def _held(self) -> tuple[int, int]:
        """Return the bytes of private memory, and of shared memory including tmpfs files."""
        return self.counters.held() if self.counters.sees_memory else held_in_gvisor()

    def is_full(self) -> bool:
        """Return whether the workspace has no free block or inode."""
        state = os.statvfs(WORKSPACE)
        return not state.f_bavail or not state.f_favail

    def disk(self) -> tuple[int, int]:
        """Return how many bytes of the workspace are used, and how many it has."""
        state = os.statvfs(WORKSPACE)
        return (state.f_blocks - state.f_bfree) * state.f_frsize, state.f_blocks * state.f_frsize

    def why_failed(self, take: Callable[[str, int], None]) -> None:
        """Report whether the kernel killed for memory or refused a process since the last call."""
        kills, refused = self.counters.hits()
        is_more, hits = kills > self.oom_kills, refused - self.pids_hits
        self.oom_kills, self.pids_hits = kills, refused
        take(OUT_OF_MEMORY if is_more else "", hits)

    def _look_later(self, seconds: float) -> None:
        self.server.loop.call_at("memory", importlib.import_module("init.loop").now() + seconds, self._look)

    def _look(self) -> None:
        """End the process that uses most memory if the total exceeds the limit. Files in tmpfs do not count."""
        private, shared = self._held()
        hidden = max(0, shared - max(0, stored(self.places) - self.base[1]))
        if private - self.base[0] + hidden > self.memory_bytes and not self._frees_memory():
            self._end_largest()
        if self.is_busy or self.marker.all():
            self._look_later(LOOK_S if self.is_busy else IDLE_LOOK_S)

    def _frees_memory(self) -> bool:
        """Return whether the process last ended for memory may still be releasing it, which takes the kernel a
        moment.
        """
        moment: float = importlib.import_module("init.loop").now()
        is_ending = moment < self.ended_at + MOST_FREEING_S
        if self.ended_mark and is_ending and self.ended_mark in self.marker.all().values():
            return True
        if self.ended_mark:
            self.ended_mark, self.ended_at = 0, moment
        return moment < self.ended_at + FREEING_S

    def _end_largest(self) -> None:
        sums: dict[int, int] = {}
        for pid, mark in self.marker.all().items():
            sums[mark] = sums.get(mark, 0) + held_by(pid)
        largest = max(sums, key=lambda mark: sums[mark], default=0)
        self.ended_mark, self.ended_at = largest, importlib.import_module("init.loop").now()
        largest_processes = [process for process in self.server.processes.values() if process.mark.number == largest]
        for process in largest_processes:
            process.kill(OUT_OF_MEMORY)
        if not largest_processes and largest:  # the started process has ended, its descendants have not
            self.server.ender.end(largest)


def held_in_gvisor() -> tuple[int, int]:
    """Return the same as `_held` for a gVisor kernel of this container alone, which shows no control group."""
    with open("/proc/meminfo", "rb", buffering=0) as file:
        rows = dict(line.split(b":", 1) for line in file.read(CHUNK).splitlines() if b":" in line)
    anonymous, shared = (int(rows[name].split()[0]) * 1024 for name in (b"AnonPages", b"Shmem"))
    return anonymous - shared, shared


def held_by(pid: int) -> int:
    """Return the memory of a process without file pages, in KiB; on gVisor, its resident memory."""
    try:
        with open(f"/proc/{pid}/status", "rb", buffering=0) as file:
            rows = dict(line.split(b":", 1) for line in file.read(CHUNK).splitlines() if b":" in line)
        names = (b"RssAnon", b"RssShmem") if b"RssAnon" in rows else (b"VmRSS",)
        return sum(int(rows[name].split()[0]) for name in names)
    except (OSError, ValueError, KeyError, IndexError):
        return 0


def refusal(kind: str, message: str) -> Exception:
    """Return the error that a client receives."""
    error: Exception = importlib.import_module("init.wire").Refused(kind, message)
    return error


class GuestStartFailed(Exception):
    """Raised if a step before the execution of a program fails."""

    def __init__(self, step: str, path: str, error: OSError):
        super().__init__(step)
        message = f"{step} {path}: {os.strerror(error.errno or 0) if error.errno else error}"
        self.failure = {"step": step, "path": path, "message": message, "errno": error.errno or 0}


class ContainerGuest:
    """A process that a client started, in the fork."""

    def __init__(
        self,
        host: ContainerHost,
        number: int,
        errors_writer: int,
        order: dict[str, Any],
        streams: dict[int, int],
    ):
        self.host, self.number, self.errors_writer = host, number, errors_writer
        self.order, self.streams = order, streams
        self.account: dict[str, str] = {}  # variables of the requested user

    def become(self) -> None:
        """Do all steps and execute the program; never returns."""
        try:
            inherited = self._take_streams()
            self._get_ready()
            if self.order.get("op") == "files":
                os.dup2(inherited[0], ANSWER_FD)
                if self.order["do"] == LOOK:
                    hand_files(AnswerWriter(), self.host.before, *bounds_of(self.order))
                else:
                    importlib.import_module("init.files").serve(self.order)
                os._exit(0)
            self._start_program(inherited)
        except GuestStartFailed as error:
            os.write(self.errors_writer, json.dumps(error.failure).encode()[:MOST_MESSAGE])
        except OSError as error:
            failure = GuestStartFailed("start", "", error).failure
            os.write(self.errors_writer, json.dumps(failure).encode()[:MOST_MESSAGE])
        finally:
            os._exit(1)

    def _take_streams(self) -> list[int]:
        """Close all descriptors except the process's streams; return those besides the standard ones, moved to the
        top.
        """
        for number in range(3):
            os.dup2(self.streams[number], number)
        more = [fd for number, fd in sorted(self.streams.items()) if number >= REPORT]
        last = self.host.nofile - 1
        inherited = [
            os.dup2(fd, last - index, inheritable=False) for index, fd in enumerate((*more, self.errors_writer))
        ]
        os.closerange(3, inherited[-1])
        self.errors_writer = inherited.pop()
        return inherited

    def _get_ready(self) -> None:
        order = self.order
        self.host.marker.put(
            self.number
        )  # first: once it is dumpable (`leave_first`), others can inspect and change it
        if self.host.users is not None:
            self._become_user(self.host.users)
        leave_first()
        if order.get("terminal"):
            importlib.import_module("init.terminal").take(0)
        for path in order.get("remove") or ():
            with contextlib.suppress(OSError):
                os.unlink(str(path))
        for path in order.get("folders") or ():
            os.makedirs(str(path), exist_ok=True)
        for path, mode, text in order.get("files") or ():
            write_file(str(path), int(mode), bytes.fromhex(text))
        folder = order.get("cwd") or WORKSPACE
        if folder == "~" or folder.startswith("~/"):  # of a requested user; that of the own one is known outside
            folder = self.account.get("HOME", "/") + folder[1:]
        try:
            os.chdir(folder)
        except OSError as error:
            raise GuestStartFailed("cwd", folder, error) from error

    def _become_user(self, users: dict[str, Any]) -> None:
        """Take the identity that the order names, or the sandbox's own user. Only root keeps capabilities."""
        name = self.order.get("user")
        uid = gid = int(users["uid"])
        groups = [gid]
        try:
            if name is not None:
                account = importlib.import_module("init.accounts").find(name)
                uid, gid, groups = account.uid, account.gid, account.groups
                self.account = {**users["env"], "HOME": account.home, "USER": account.name}
                self.account |= {"LOGNAME": account.name, "SHELL": account.shell}
            os.setgroups(groups)
            os.setresgid(gid, gid, gid)
            os.setresuid(uid, uid, uid)
        except OSError as error:
            raise GuestStartFailed("user", str(name), error) from error

    def _start_program(self, inherited: list[int]) -> None:
        order = self.order
        env = {**self.account, **{str(name): str(value) for name, value in (order.get("env") or {}).items()}}
        python: Any = order.get("python")
        if python is None:
            numbers = {REPORT: ANSWERS, REQUESTS: LINK, HOST_CALLS: HOST_CALLS, HOST_ANSWERS: HOST_ANSWERS}
            for fd, stream in zip(inherited, [number for number in numbers if number in self.streams], strict=True):
                os.dup2(fd, numbers[stream])
            execute([str(argument) for argument in order["argv"]], env)
        else:
            os.close(self.errors_writer)
            run_python(dict(python), env, inherited or [-1])


class AnswerWriter(FrameWriter):
    """Send files on standard output, and the answer as `init.files` does."""

    def send(self, tag: bytes, body: bytes = b"") -> None:
        write_all(OUTPUT if tag == DATA else ANSWER_FD, body)


class HeldAnswer(FrameWriter):
    """Hold files and an answer that fit in one window. Raises Overflow."""

    def __init__(self, most: int):
        self.most, self.files, self.answer = most, bytearray(), b""

    def send(self, tag: bytes, body: bytes = b"") -> None:
        if tag != DATA:
            self.answer = body
            return
        self.files += body
        if len(self.files) > self.most:
            raise Overflow


class Overflow(Exception):
    """Raised if an answer is larger than a window."""


def bounds_of(order: dict[str, Any]) -> tuple[int, float]:
    """Return the maximum of bytes and seconds of a look."""
    return int(order["most"]), float(order["walk_s"])


def look_or(files: Callable[[Any, int, dict[str, Any]], None]) -> Callable[[Any, int, dict[str, Any]], None]:
    """Return the operation `files` of init, with a look at the workspace."""

    def work(server: Any, number: int, order: dict[str, Any]) -> None:
        if order.get("do") != LOOK or not look(server, number, order):
            files(server, number, order)

    return work


def look(server: Any, number: int, order: dict[str, Any]) -> bool:
    """Send the files of the workspace that have changed since the last look, if they fit in one window.

    This process does that itself, because a fork takes most of a short look's time; otherwise return False.
    """
    host, wire = server.host, importlib.import_module("init.wire")
    max_bytes, walk_s = bounds_of(order)
    host.before = host.seen.renew(walk_s)
    held = HeldAnswer(wire.WINDOW_BYTES)
    try:
        hand_files(held, host.before, max_bytes, walk_s)
    except Overflow:
        return False
    for offset in range(0, len(held.files), CHUNK):
        server.loop.send(wire.data_frame(number, OUTPUT, held.files[offset : offset + CHUNK]))
    server.loop.send(wire.data_frame(number, REPORT, held.answer))
    server.close(number)
    return True


def make_accounts(users: dict[str, Any]) -> None:
    """Fill our own /etc from the image, except files mounted by the daemon, and add the sandbox's user."""
    data = zlib.decompress(base64.b64decode(users["etc"]))
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
        for member in archive:
            if member.name not in SHOWN_BY_DAEMON and member.name not in users["shown"]:
                extract(archive, member)
    name, uid, home = users["name"], int(users["uid"]), users["home"]
    rows = {"passwd": f"{name}:x:{uid}:{uid}:{name}:{home}:/bin/sh\n", "group": f"{name}:x:{uid}:\n"}
    for file, row in rows.items():
        with open(f"/etc/{file}", "a+", encoding="utf-8", errors="surrogateescape") as lines:
            lines.seek(0)
            text = lines.read()
            if not any(line.split(":")[0] == name for line in text.splitlines()):
                lines.write(row if not text or text.endswith("\n") else f"\n{row}")
    os.makedirs(home, exist_ok=True)
    os.chown(home, uid, uid)


def extract(archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
    """Extract a member of an archive from the daemon unchanged, with its owner and mode."""
    if hasattr(tarfile, "fully_trusted_filter"):
        archive.extract(member, "/", numeric_owner=True, filter="fully_trusted")
    else:
        archive.extract(member, "/", numeric_owner=True)


def write_file(path: str, mode: int, data: bytes) -> None:
    """Write a file of the program, and create its parent folders."""
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
        with open(fd, "wb", buffering=0) as file:
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]
    except OSError as error:
        raise GuestStartFailed("files", path, error) from error


def run_python(settings: dict[str, Any], env: dict[str, str], inherited: list[int]) -> None:
    """Remove our modules from the interpreter, then run a script or serve a session."""
    oneshot = sys.modules["interpreter.oneshot"]
    is_session = bool(settings.pop("is_session", False))
    if isinstance(settings.get("source"), str):
        settings["source"] = settings["source"].encode("utf-8", "surrogateescape")
    work = importlib.import_module("interpreter.session").serve if is_session else oneshot.run
    archive: Any = __spec__.loader
    forget_ours()
    work(settings, env, oneshot.prepare(), oneshot.Privileges(archive), *inherited)


def main(settings: dict[str, Any]) -> None:
    """Set up, and serve. Never returns."""
    serve(settings["live"], set_up(settings))


def serve(settings: dict[str, Any], failed: Any, received: bytes = b"") -> None:
    """Serve the wire of `init`, of which `received` has been read already. Never returns."""
    init = importlib.import_module("init.server")
    for name in ("files", "terminal"):
        importlib.import_module(f"init.{name}")
    host = ContainerHost(settings)
    if host.users is not None:
        make_accounts(host.users)
    if host.seen is not None:
        init.OPERATIONS["files"] = look_or(init.OPERATIONS["files"])
    writable = [path for path in settings["places"] if os.access(path, os.W_OK)]
    greeting = {"kernel": os.uname().release, "python": sys.version.split()[0], "failed": failed, "writable": writable}
    host.server = init.Server(STDIN_FD, host, greeting, out=STDOUT_FD, blocks=bool(settings.get("blocks")))
    if received:
        host.server.receive(received)
    gc.collect()
    gc.freeze()
    guest = None
    try:
        host.server.serve()
    except BecomeGuest as fork:
        guest = fork.guest
    if guest is not None:  # outside the except block, so that the program's exceptions have no __context__
        guest.become()
    os._exit(0)
