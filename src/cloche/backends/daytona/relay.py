"""Program that runs as root in a sandbox of Daytona, behind a terminal: it prepares the sandbox and starts a first
process.

It is sent as text (`terminal.boot`) to an interpreter in the sandbox, and imports nothing of Cloche. Its standard input
and output are a raw terminal, which carries frames in both directions: a kind of one byte, a length of four, a body.

Theory of operation: a sender may have at most `WINDOW` unacknowledged bytes. Neither the terminal nor the server behind
it therefore has to buffer more, and urgent frames are never queued behind waiting data. If the caller sends nothing for
`LEASE_S`, it counts as dead, and everything ends.

The terminal belongs to root; programs run with another id. The first process has two ids: its real id is its own, its
effective id is that of the programs. It may therefore kill them, and they cannot kill, trace or inspect it
(`inside.program.leave_first` drops the first id). execve(2) copies the effective id to the saved one, and under
no_new_privs it sets the effective id to the real one (security/commoncap.c). Both are therefore set after the execution
(`KEEP_IDS`).
"""

from __future__ import annotations

import ctypes
import json
import os
import pwd
import resource
import select
import signal
import stat
import subprocess
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

DATA, END, TAKEN, KILL = b"D", b"E", b"T", b"K"  # received: input, its end, acknowledged output bytes, kill all
OUT, ERR, FOUND, FAILED, EXITED = b"O", b"R", b"S", b"F", b"X"  # sent, and TAKEN: acknowledged input bytes
WINDOW = 256 * 1024  # unacknowledged bytes in each direction
PIECE = 16 * 1024
LEASE_S = 60.0
PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 4, 36, 38
KEEP_IDS = (
    f"import ctypes,os\nr,e,_=os.getresuid()\nos.setresuid(r,e,r)\n"
    f"if ctypes.CDLL(None).prctl({PR_SET_NO_NEW_PRIVS},1,0,0,0):os._exit(126)\n"
)
FIRST_ID, LAST_ID = 61_184, 65_000  # systemd's dynamic users (61184 to 65519, systemd.io/UIDS-GIDS)
MS_NOSUID, MS_NODEV, MS_NOEXEC = 2, 4, 8
libc = ctypes.CDLL(None, use_errno=True)


class RelayRefused(Exception):
    """Raised if the sandbox cannot be used."""


def send(kind: bytes, body: bytes = b"") -> None:
    """Send a frame; blocks until it is written."""
    view = memoryview(kind + len(body).to_bytes(4, "big") + body)
    while view:
        view = view[os.write(1, view) :]


def read_exactly(count: int) -> bytes:
    """Return `count` bytes of input. At the end of input this process exits."""
    data = b""
    while len(data) < count:
        piece = os.read(0, count - len(data))
        if not piece:
            os._exit(0)
        data += piece
    return data


def free_ids() -> tuple[int, int]:
    """Return two unused ids: that of programs, and the first process's own. Raises RelayRefused."""
    used_ids = {row.pw_uid for row in pwd.getpwall()} | {row.pw_gid for row in pwd.getpwall()}
    free = [number for number in range(FIRST_ID, LAST_ID) if number not in used_ids][:2]
    if len(free) < 2:
        raise RelayRefused("every id is in use")
    return free[0], free[1]


def become(real: int, effective: int) -> None:
    """Give up root, for good."""
    os.setgroups([])
    os.setresgid(effective, effective, effective)
    os.setresuid(real, effective, real)


def prepare(settings: dict[str, Any], uid: int) -> list[str]:
    """Make the writable folders; return those that are tmpfs mounts with a size."""
    mounted = []
    for path, size, flags in settings["places"]:
        is_new = not os.path.isdir(path)
        if is_new:
            os.makedirs(path, mode=0o755)
        options = f"size={size},mode=1777".encode()
        if size and not libc.mount(b"tmpfs", path.encode(), b"tmpfs", MS_NOSUID | MS_NODEV | flags, options):
            mounted.append(path)
    for path in settings["own"]:
        os.makedirs(path, exist_ok=True)
        os.chown(path, uid, uid)
        os.chmod(path, 0o700)
    for path, mode in settings["modes"]:
        if stat.S_IMODE(os.stat(path).st_mode) != mode:
            os.chmod(path, mode)
    return mounted


def clear(folder: str) -> None:
    """Remove the entries of a folder, as far as possible. No other process changes it meanwhile."""
    for entry in os.scandir(folder):
        try:
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.path)
                continue
            os.chmod(entry.path, 0o700)
            clear(entry.path)
            os.rmdir(entry.path)
        except (OSError, RecursionError):
            continue


def sweep(uid: int, settings: dict[str, Any]) -> None:
    """Kill all programs, and if requested, delete their temporary files."""
    pid = os.fork()
    if pid == 0:
        try:
            become(uid, uid)
            try:
                os.kill(-1, signal.SIGKILL)
            except ProcessLookupError:
                pass
            for folder in settings["temporary"] if settings["clears"] else ():
                clear(folder)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


def look(settings: dict[str, Any], uid: int) -> str:
    """Return the script's list of programs in the sandbox."""
    process = subprocess.run(
        ["/bin/sh", "-c", settings["look"], "look", *settings["programs"]], preexec_fn=lambda: become(uid, uid),
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=settings["env"], cwd="/",
        timeout=30, check=False,
    )  # fmt: skip
    return process.stdout[:65_536].decode("utf-8", "replace")


def start_first(settings: dict[str, Any], uid: int, own: int) -> tuple[int, int, int, int]:
    """Start the first process; return its pid, and our ends of its input, output and error."""
    pipes = [os.pipe() for _ in range(3)]
    pid = os.fork()
    if pid == 0:
        try:
            for number, fd in ((0, pipes[0][0]), (1, pipes[1][1]), (2, pipes[2][1])):
                os.dup2(fd, number)
            os.closerange(3, 64)
            os.setsid()
            for name, limit in settings["rlimits"].items():
                _, hard = resource.getrlimit(getattr(resource, name))
                capped = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
                resource.setrlimit(getattr(resource, name), (capped, capped))
            os.chdir("/")
            os.umask(0o022)
            libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            become(own, uid)
            *flags, text = settings["arguments"]
            os.execve(sys.executable, [sys.executable, *flags, KEEP_IDS + text], settings["env"])  # noqa: S606
        except BaseException as error:
            os.write(2, str(error).encode())
        os._exit(127)
    for fd in (pipes[0][0], pipes[1][1], pipes[2][1]):
        os.close(fd)
    for fd in (pipes[0][1], pipes[1][0], pipes[2][0]):
        os.set_blocking(fd, False)
    return pid, pipes[0][1], pipes[1][0], pipes[2][0]


class Relay:
    """Pass data to and from the first process until one side ends."""

    def __init__(self, pid: int, stdin: int, out: int, err: int):
        self.pid, self.stdin, self.readers = pid, stdin, {out: OUT, err: ERR}
        self.received, self.unwritten = bytearray(), bytearray()
        self.left, self.taken = WINDOW, 0
        self.has_end = self.is_over = False
        self.heard_at = time.monotonic()

    def run(self) -> None:
        """Relay until the first process closes its output or must be killed."""
        while self.readers and not self.is_over:
            for fd, events in self.poll():
                if fd == 0:
                    self.receive()
                elif fd == self.stdin:
                    self.feed(events)
                elif fd in self.readers:
                    self.pass_on(fd)
            if time.monotonic() - self.heard_at > LEASE_S:
                return

    def poll(self) -> list[tuple[int, int]]:
        poll = select.poll()
        poll.register(0, select.POLLIN)
        for fd in self.readers if self.left >= PIECE else ():
            poll.register(fd, select.POLLIN)
        if self.stdin >= 0 and self.unwritten:
            poll.register(self.stdin, select.POLLOUT)
        return poll.poll(1000)

    def pass_on(self, fd: int) -> None:
        data = os.read(fd, PIECE)
        if not data:
            del self.readers[fd]
            return
        self.left -= len(data)
        send(self.readers[fd], data)

    def feed(self, events: int) -> None:
        try:
            count = 0 if events & select.POLLERR else os.write(self.stdin, self.unwritten[:PIECE])
        except BlockingIOError:
            return
        except OSError:
            count = 0
        if not count:  # the first process has closed its input
            self.unwritten.clear()
            self.close_stdin()
            return
        del self.unwritten[:count]
        self.taken += count
        if self.taken >= WINDOW // 4 or not self.unwritten:
            send(TAKEN, str(self.taken).encode())
            self.taken = 0
        if self.has_end and not self.unwritten:
            self.close_stdin()

    def close_stdin(self) -> None:
        if self.stdin >= 0:
            os.close(self.stdin)
            self.stdin = -1

    def receive(self) -> None:
        data = os.read(0, 65_536)
        self.heard_at, self.is_over = time.monotonic(), not data
        self.received += data
        while len(self.received) >= 5:
            end = 5 + int.from_bytes(self.received[1:5], "big")
            if end > WINDOW * 2:
                self.is_over = True
            if len(self.received) < end or self.is_over:
                return
            kind, body = bytes(self.received[:1]), bytes(self.received[5:end])
            del self.received[:end]
            self.take(kind, body)

    def take(self, kind: bytes, body: bytes) -> None:
        if kind == DATA and self.stdin >= 0:
            self.unwritten += body
        elif kind == TAKEN:
            self.left += int(body)
        elif kind == END:
            self.has_end = True
            if not self.unwritten:
                self.close_stdin()
        elif kind == KILL:
            self.is_over = True


def main() -> None:
    """Read settings, prepare, start the first process, and serve until it ends; then kill everything."""
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP, signal.SIGTTOU, signal.SIGTTIN):
        signal.signal(number, signal.SIG_IGN)
    settings = json.loads(read_exactly(int(read_exactly(9))))
    try:
        if os.getuid() != 0:
            raise RelayRefused("the user there is not root, so programs could not be isolated from their supervisor")
        if sys.version_info[:2] < tuple(settings["least_python"]):
            raise RelayRefused(f"its Python is {sys.version.split()[0]}, which is too old")
        uid, own = free_ids()
        mounted = prepare(settings, uid) if settings["prepares"] else []
        sweep(uid, settings)
        programs = look(settings, uid) if settings["prepares"] else ""
        relay = Relay(*start_first(settings, uid, own))
    except (RelayRefused, OSError, ValueError, KeyError, subprocess.SubprocessError) as error:
        send(FAILED, str(error).encode())
        return
    send(FOUND, json.dumps({"programs": programs, "mounted": mounted, "uid": uid}).encode())
    try:
        relay.run()
    finally:
        try:
            os.kill(relay.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        _, status = os.waitpid(relay.pid, 0)
        sweep(uid, {**settings, "clears": False})
    send(EXITED, str(status).encode())


if __name__ == "cloche_boot":
    main()
