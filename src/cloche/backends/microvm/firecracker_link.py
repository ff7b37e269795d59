"""The sockets between a caller and Firecracker: its API, and its vsock, which is a socket of the host's.

All are reached by a descriptor of the folder that they lie in, which is in a file system of the monitor's own.
"""

from __future__ import annotations

import array
import http.client
import json
import os
import select
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cloche.core.errors import StartFailed

LOOK_S = 0.005
CHUNK_BYTES, WORDS_KEPT_BYTES, LINE_BYTES = 65_536, 4096, 64
DONE = 204


@dataclass(slots=True, kw_only=True)
class Patience:
    """Hold how long one waits for a machine, and listen meanwhile to what is said on its console."""

    console: int
    s: float
    said: bytes = b""
    is_over: bool = False
    _until: float = field(init=False)

    def __post_init__(self) -> None:
        self._until = time.monotonic() + self.s

    def left_s(self) -> float:
        """Return what is left. Raises TimeoutError when nothing is."""
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"not ready within {self.s:g} s")
        return left

    def wait(self, fd: int | None = None, most_s: float | None = None) -> bool:
        """Wait until something is there to read, or for so long; tell whether it is. Raises OSError when it is gone."""
        poll = select.poll()
        for one in (self.console, fd):
            if one is not None:
                poll.register(one, select.POLLIN)
        until = time.monotonic() + (self.left_s() if most_s is None else min(most_s, self.left_s()))
        while (left_s := until - time.monotonic()) > 0:
            ready = {one for one, _ in poll.poll(left_s * 1000)}
            if self.console in ready:
                self._listen()
            if fd in ready:
                return True
        return False

    def _listen(self) -> None:
        data = os.read(self.console, CHUNK_BYTES)
        self.said = (self.said + data)[-WORDS_KEPT_BYTES:]
        if not data:
            self.is_over = True
            raise ConnectionError("it has ended")

    def words(self) -> str:
        """Return what was said last, for messages; what is there already is taken along."""
        while not self.is_over and select.select([self.console], [], [], 0)[0]:
            try:
                self._listen()
            except ConnectionError:
                break
        text = self.said.decode("utf-8", "replace").strip()
        return f": {text[-600:]}" if text else ""


def received_folder(hand: socket.socket, patience: Patience) -> int:
    """Return the descriptor of a folder that the keeper hands over. Raises OSError when it cannot make one."""
    hand.settimeout(patience.left_s())
    _, parts, _, _ = hand.recvmsg(1, socket.CMSG_SPACE(4))
    for level, kind, data in parts:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds = array.array("i")
            fds.frombytes(data[:4])
            os.set_inheritable(fds[0], False)
            return fds[0]
    raise ConnectionError("no root could be made for it")


def _path(folder: int, name: str) -> str:
    return f"/proc/self/fd/{folder}/{name}"


def listening(folder: int, name: str) -> socket.socket:
    """Return a socket that takes one call of the monitor's. Raises OSError."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(_path(folder, name))
        os.chmod(_path(folder, name), 0o666)  # noqa: S103 - nobody but the monitor gets into the folder
        listener.listen(1)
    except BaseException:
        listener.close()
        raise
    return listener


def joined(folder: int, name: str, patience: Patience) -> socket.socket:
    """Return a connection to a socket of the monitor's, as soon as it is there. Raises OSError."""
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.settimeout(patience.left_s())
            connection.connect(_path(folder, name))
            return connection
        except (FileNotFoundError, ConnectionRefusedError):
            connection.close()
            patience.wait(most_s=LOOK_S)
        except BaseException:
            connection.close()
            raise


def put(api: socket.socket, path: str, body: Mapping[str, Any], patience: Patience) -> None:
    """Make one call of the API. Raises StartFailed with the monitor's own words when it refuses, OSError when gone."""
    api.settimeout(patience.left_s())
    text = json.dumps(body)
    head = (f"PUT {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", f"Content-Length: {len(text)}")
    api.sendall("\r\n".join((*head, "", text)).encode())
    try:
        with http.client.HTTPResponse(api, method="PUT") as answer:
            answer.begin()
            said = answer.read(LINE_BYTES * 64)
    except http.client.HTTPException as error:
        raise ConnectionError(f"no answer to PUT {path} ({type(error).__name__})") from error
    if answer.status != DONE:
        raise StartFailed(
            f"Firecracker refuses PUT {path} ({answer.status}): {_fault(said)}{patience.words()}", step="boot"
        )


def _fault(said: bytes) -> str:
    try:
        return str(json.loads(said)["fault_message"])
    except (ValueError, KeyError, TypeError):
        return said.decode("utf-8", "replace")


def accepted(listener: socket.socket, folder: int, name: str, patience: Patience) -> socket.socket:
    """Take the one call that is waited for, and have no other come. Raises OSError."""
    if not patience.wait(listener.fileno()):
        patience.left_s()
    connection, _ = listener.accept()
    os.unlink(_path(folder, name))
    connection.settimeout(patience.s)
    return connection


def called_port(folder: int, name: str, port: int, patience: Patience) -> socket.socket:
    """Call a port in the machine. Raises OSError when nobody listens there."""
    connection = joined(folder, name, patience)
    try:
        connection.sendall(f"CONNECT {port}\n".encode())
        line = b""
        while not line.endswith(b"\n"):  # byte by byte: what follows the line is the machine's
            data = connection.recv(1)
            if not data or len(line) > LINE_BYTES:
                raise ConnectionError(f"nobody listens at port {port} of the machine")
            line += data
        if not line.startswith(b"OK "):
            raise ConnectionError(f"port {port} of the machine answers {line!r}")
        connection.settimeout(patience.s)
    except BaseException:
        connection.close()
        raise
    return connection
