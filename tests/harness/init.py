"""Operations of `init.files` as a sandbox does them: each in a forked process, with an ordinary user's rights."""

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
