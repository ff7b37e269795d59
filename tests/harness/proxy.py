"""A small reverse proxy on loopback, which has a service below a path of its own."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

CHUNK = 1 << 16
NOT_FOUND = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


@dataclass
class Proxy:
    """Hold one: its address, and the paths that it was asked for which are not below its own."""

    address: str
    lost: list[str] = field(default_factory=list)


@contextmanager
def proxying(service: str, root: str, *, strips: bool) -> Iterator[Proxy]:
    """Pass on what is below `root` to the service at an address, for the body; where it `strips`, without `root`."""
    target = urlsplit(service)
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        found = Proxy(address=f"http://127.0.0.1:{listener.getsockname()[1]}{root}")

        def take(client: socket.socket) -> None:
            with client, suppress(OSError):
                head, rest = _read_head(client)
                method, path, version = head[0].split(" ")
                if path.partition("?")[0] != root and not path.startswith(f"{root}/"):
                    found.lost.append(path)
                    client.sendall(NOT_FOUND)
                    return
                if strips:
                    path = path.removeprefix(root) or "/"
                kept = [line for line in head[1:] if not line.lower().startswith("connection:")]
                is_upgrade = any(line.lower().startswith("upgrade:") for line in kept)
                kept.append(f"Connection: {'Upgrade' if is_upgrade else 'close'}")
                with socket.create_connection((target.hostname or "", target.port or 0)) as upstream:
                    upstream.sendall("\r\n".join([f"{method} {path} {version}", *kept, "", ""]).encode() + rest)
                    there = threading.Thread(target=_copy, args=(client, upstream))
                    there.start()
                    _copy(upstream, client)
                    there.join()

        def serve() -> None:
            with suppress(OSError):
                while True:
                    threading.Thread(target=take, args=(listener.accept()[0],), daemon=True).start()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield found
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def _read_head(client: socket.socket) -> tuple[list[str], bytes]:
    data = b""
    while b"\r\n\r\n" not in data:
        piece = client.recv(CHUNK)
        if not piece:
            raise ConnectionError("no request")
        data += piece
    head, _, rest = data.partition(b"\r\n\r\n")
    return head.decode("latin-1").split("\r\n"), rest


def _copy(source: socket.socket, target: socket.socket) -> None:
    """Pass bytes on until one side ends, and then tell both."""
    with suppress(OSError):
        while data := source.recv(CHUNK):
            target.sendall(data)
    for one in (source, target):
        with suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
