"""The parts of `init` outside of a sandbox: operations on files with an ordinary user's rights, and its server."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cloche.init import wire

PACKAGES = Path(__file__).parents[2] / "src" / "cloche"
USER = 61235  # who has no name, and nothing
# Fork for each order, which comes with the descriptors of its streams.
SERVER = """
import _ctypes, json, os, signal, socket, sys
sys.path.insert(0, sys.argv[1])
from init.files import serve
link = socket.socket(fileno=int(sys.argv[2]))
if os.geteuid() == 0:
    os.setgroups([])
    os.setresgid(*3 * [int(sys.argv[3])])
    os.setresuid(*3 * [int(sys.argv[3])])
os.umask(0o022)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
while True:
    data, fds, _, _ = socket.recv_fds(link, 1 << 20, 3)
    if not data:
        break
    pid = os.fork()
    if pid == 0:
        for fd, number in zip(fds, (20, 21, 23)):
            os.dup2(fd, number)
        for number in (20, 21, 23):
            os.dup2(number, number - 20)
        os.closerange(4, 100)
        serve(json.loads(data))
        os._exit(0)
    link.send(str(pid).encode())
    for fd in fds:
        os.close(fd)
"""


class Refused(Exception):
    """Hold why an operation was not done."""

    def __init__(self, error: Mapping[str, Any]):
        super().__init__(f"{error['kind']}: {error['message']}: {error['path']}")
        self.kind, self.path = error["kind"], error["path"]


class Operation:
    """Hold one operation that goes on."""

    def __init__(self, link: socket.socket, order: Mapping[str, Any]):
        (theirs_in, self.into), (self.out, theirs_out), (self.answered, theirs_answer) = (os.pipe() for _ in range(3))
        fds = [theirs_in, theirs_out, theirs_answer]
        socket.send_fds(link, [json.dumps(order).encode()], fds)
        self.pid = int(link.recv(100))
        for fd in fds:
            os.close(fd)

    def finish(self, content: bytes = b"") -> tuple[dict[str, Any], bytes]:
        """Write all content, read all that comes, and return the answer with it. Raises Refused."""
        sending = threading.Thread(target=self._send, args=(content,))
        sending.start()
        try:
            with os.fdopen(self.out, "rb") as out, os.fdopen(self.answered, "rb") as answered:
                found, answer = out.read(), json.loads(answered.read())
        finally:
            sending.join()
        if "error" in answer:
            raise Refused(answer["error"])
        return answer, found

    def _send(self, content: bytes) -> None:
        try:
            with os.fdopen(self.into, "wb") as into:
                into.write(content)
        except BrokenPipeError:
            pass  # it has refused


class Files:
    """Do operations on files, in a folder that their user owns."""

    def __init__(self, folder: str, link: socket.socket):
        self.folder, self.link = folder, link

    def begin(self, do: str, path: str | Mapping[str, str] = "", **order: object) -> Operation:
        """Begin an operation on a path below the folder, or an absolute one."""
        named = os.path.join(self.folder, path) if isinstance(path, str) else path
        return Operation(self.link, {"do": do, "path": named, **order})

    def do(self, do: str, path: str = "", content: bytes = b"", **order: object) -> tuple[dict[str, Any], bytes]:
        """Do an operation; return its answer, and what came."""
        return self.begin(do, path, **order).finish(content)

    def write(self, path: str, content: bytes = b"", **order: object) -> None:
        """Write a file."""
        self.do("write", path, content, **order)

    def read(self, path: str, **order: object) -> bytes:
        """Read a file."""
        return self.do("read", path, **order)[1]

    def refused(self, do: str, path: str = "", content: bytes = b"", **order: object) -> str:
        """Return the kind of the error that an operation comes to."""
        try:
            answer, _ = self.do(do, path, content, **order)
        except Refused as error:
            return str(error.kind)
        raise AssertionError(f"{do} {path} was not refused: {answer}")

    def __truediv__(self, name: str) -> str:
        return f"{self.folder}/{name}"

    def own(self, name: str) -> str:
        """Give what is at a path to the user, and return the path."""
        path = self / name
        if os.geteuid() == 0:
            os.chown(path, USER, USER, follow_symlinks=False)
        return path


@contextmanager
def serving_files() -> Iterator[Files]:
    """Start what does operations, and end it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    words = [sys.executable, "-I", "-c", SERVER, str(PACKAGES), str(theirs.fileno()), str(USER)]
    folder = tempfile.mkdtemp(prefix="files-", dir="/dev/shm")
    if os.geteuid() == 0:
        os.chown(folder, USER, USER)
    server = subprocess.Popen(words, pass_fds=[theirs.fileno()])
    theirs.close()
    try:
        yield Files(folder, ours)
    finally:
        ours.close()
        server.wait(30)
        shutil.rmtree(folder)


# Be init with a host that forks plain processes; what belongs to one is all of its session.
INIT = """
import os, signal, socket, sys
sys.path.insert(0, sys.argv[1])
from init import files, server
class Mark:
    count = 0
    def __init__(self, pid):
        self.number = pid
        Mark.count += 1
    def close(self):
        Mark.count -= 1
class Forked:
    def __init__(self, pid):
        self.pid, self.mark, self.denied = pid, Mark(pid), 0
    def signal(self, number, group=0):
        os.killpg(group, number) if group else os.kill(self.pid, number)
    def conclude(self):
        return {}
class Host:
    ender = None
    def fork(self, order, streams):
        pid = os.fork()
        if pid:
            return Forked(pid)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        for number, fd in streams.items():
            os.dup2(fd, 20 + number)
        for number in streams:
            os.dup2(20 + number, number)
        os.closerange(4, 200)
        if "do" in order:
            files.serve(order)
        elif order["argv"] != ["nothing"]:
            os.execvp(order["argv"][0], order["argv"])
        os._exit(0)
    def look(self):
        for name in os.listdir("/proc"):
            try:
                if name.isdigit():
                    with open(f"/proc/{name}/stat") as file:
                        if file.read().rpartition(")")[2].split()[0] not in "ZX":
                            yield int(name), os.getsid(int(name))
            except OSError:
                pass
    def members(self, mark):
        return [pid for pid, number in self.look() if number == mark.number]
    def note_orphan(self, pid): pass
    def other_pids(self):
        return [pid for one in serving.processes.values() for pid in self.members(one.mark)]
    def signal_others(self, number):
        for pid in self.other_pids():
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pass
    def hold_others(self): return False
    def note_busy(self, *, is_busy): pass
    def hand_out(self, channel, fd): return False
    def why_failed(self, take): take("why", 0)
    def is_full(self): return False
    def disk(self): return 0, 0
host = Host()
serving = server.Server(int(sys.argv[2]), host, {"marks": 0})
serving.serve()
for process in serving.processes.values():
    for pid in {process.pid, *host.members(process.mark)}:  # it may not have begun its session yet
        try:
            os.kill(pid, 9)
        except ProcessLookupError:
            pass
"""


class Client:
    """Be a client of init, that waits for each frame."""

    def __init__(self, link: socket.socket, pid: int):
        self.link, self.pid = link, pid
        self.number = 0
        self.frames = wire.FrameBuffer()
        self.pending: list[tuple[int, int, bytes]] = []
        self.hello = self.receive(0)[1]
        self.link.sendall(wire.json_frame(wire.HELLO, 0, version=wire.VERSION))

    def open(self, op: str, **order: object) -> int:
        """Begin an operation; return its channel."""
        self.number += 1
        self.link.sendall(wire.json_frame(wire.OPEN, self.number, op=op, **order))
        return self.number

    def start(self, *argv: str, **order: object) -> int:
        """Start a process, and wait until it has started."""
        channel = self.open("start", argv=argv, **{"streams": [0, 1, 2], **order})
        self.event(channel, "started")
        return channel

    def send(self, kind: int, channel: int, body: bytes = b"") -> None:
        """Send a frame."""
        self.link.sendall(wire.frame(kind, channel, body))

    def ask(self, channel: int, **body: object) -> None:
        """Ask something of an operation that goes on."""
        self.link.sendall(wire.json_frame(wire.ASK, channel, **body))

    def receive(self, channel: int) -> tuple[int, bytes]:
        """Return the next frame of a channel. Raises EOFError where the link is closed."""
        while True:
            for at, (kind, number, body) in enumerate(self.pending):
                if number == channel:
                    del self.pending[at]
                    return kind, body
            data = self.link.recv(1 << 18)
            if not data:
                raise EOFError
            self.pending += self.frames.feed(data)

    def event(self, channel: int, name: str) -> dict[str, Any]:
        """Return the next event of a channel, past all else."""
        while True:
            kind, body = self.receive(channel)
            if kind == wire.EVENT and wire.read_object(body)["event"] == name:
                return wire.read_object(body)
            if kind == wire.CLOSE:
                raise AssertionError(f"the channel was closed: {body!r}")

    def closed(self, channel: int) -> dict[str, Any]:
        """Return with what error a channel is closed."""
        while True:
            kind, body = self.receive(channel)
            if kind == wire.CLOSE:
                return dict(wire.read_object(body).get("error", {}))

    def read(self, channel: int, count: int) -> bytes:
        """Return so many bytes of content, and grant nothing."""
        found = b""
        while len(found) < count:
            kind, body = self.receive(channel)
            if kind == wire.DATA:
                found += body[1:]
            elif kind != wire.WINDOW:
                raise AssertionError(f"a frame of kind {kind} after {len(found)} bytes: {body[:200]!r}")
        return found

    def is_quiet(self, channel: int) -> bool:
        """Tell whether nothing more of a channel comes before what is asked for now."""
        self.event(self.open("processes"), "processes")
        return not any(number == channel and kind == wire.DATA for kind, number, _ in self.pending)

    def has_ended(self) -> bool:
        """Wait until init closes the link."""
        try:
            while self.link.recv(1 << 18):
                pass
        except ConnectionResetError:
            pass
        return True


@contextmanager
def serving_init() -> Iterator[Client]:
    """Start init, and end it."""
    ours, theirs = socket.socketpair()
    words = [sys.executable, "-I", "-S", "-c", INIT, str(PACKAGES), str(theirs.fileno())]
    server = subprocess.Popen(words, pass_fds=[theirs.fileno()])
    theirs.close()
    ours.settimeout(60)
    try:
        yield Client(ours, server.pid)
    finally:
        ours.close()
        server.wait(60)
