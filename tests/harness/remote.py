"""A service for the backend `cloche`: `cloche serve` with TLS in a process of its own, and accounts that lead there."""

from __future__ import annotations

import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response
from websockets.sync.server import ServerConnection, serve

from cloche.core.remote import SERVICE_WIRE, HiddenText, RemoteAccount

from .containers import make_certificates
from .service import END_S, Service, serving


def account_at(url: str, key: str, ca_file: Path | str = "", **more: object) -> RemoteAccount:
    """Return an account of the backend."""
    account = RemoteAccount(provider="cloche", api_key=HiddenText(key), url=url, ca_file=str(ca_file))
    return replace(account, **more)  # type: ignore[arg-type]


def tls_words(certificates: Path) -> tuple[str, ...]:
    """Return the options with which a service shows a certificate of the tests' own."""
    server = certificates / "server"
    return "--tls-certificate", str(server / "cert.pem"), "--tls-key", str(server / "key.pem")


@contextmanager
def serving_tls(home: Path, *words: str, **variables: str) -> Iterator[tuple[Service, RemoteAccount]]:
    """Serve over TLS for the body, which gets the service and the account of its first key."""
    certificates = make_certificates(home / "certificates")
    with serving(home, *tls_words(certificates), *words, **variables) as service:
        _wait_until_it_listens(urlsplit(service.address).port or 443)
        yield service, account_at(service.address, service.key, certificates / "ca.pem")


def _wait_until_it_listens(port: int) -> None:
    """Wait for a moment: it says where it is before it listens there."""
    ends = time.monotonic() + END_S
    while time.monotonic() < ends:
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", port)).close()
            return
        time.sleep(0.02)
    raise AssertionError(f"nobody listens at {port}")


class Relay:
    """Pass TCP on to a port of loopback, and count, record and cut what passes."""

    def __init__(self, port: int):
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self.connections = 0
        self.passed = threading.Event()  # set as soon as the next answer has passed
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def port(self) -> int:
        """Return where it listens."""
        return int(self._listener.getsockname()[1])

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client = self._listener.accept()[0]
                self.connections += 1
                server = socket.create_connection(("127.0.0.1", self._target))
                self._pairs.append((client, server))
                threading.Thread(target=self._pass, args=(client, server, None), daemon=True).start()
                threading.Thread(target=self._pass, args=(server, client, self.passed), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, passed: threading.Event | None) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
                if passed is not None:
                    passed.set()
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        """Cut all connections."""
        pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for one in pair:
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
                one.close()

    def close(self) -> None:
        """Cut all, and take no more."""
        self._listener.close()
        self.cut()


@contextmanager
def relayed(account: RemoteAccount) -> Iterator[tuple[Relay, RemoteAccount]]:
    """Put a relay before a service for the body, which gets it and the account that leads through it."""
    relay = Relay(urlsplit(account.url).port or 443)
    try:
        yield relay, replace(account, url=f"https://127.0.0.1:{relay.port}")
    finally:
        relay.close()


@contextmanager
def posing(
    certificates: Path,
    talk: Callable[[ServerConnection], None],
    answer: tuple[int, dict[str, str], bytes] | None = None,
    *,
    version: int = SERVICE_WIRE,
    streamed: int | None = None,
    tools: int | None = None,
) -> Iterator[tuple[RemoteAccount, list[str]]]:
    """Pose as a service over TLS: greet with a `version` of the wire, then `talk`.

    It takes `streamed` bytes of files with a run, and `tools` functions of a caller; None is an older one without.

    Or `answer` the first request by status, headers and body. The list has the path of each request.
    """
    seen: list[str] = []

    def process(_: ServerConnection, request: Request) -> Response | None:
        seen.append(request.path)
        if answer is None:
            return None
        status, headers, body = answer
        return Response(status, "said", Headers({**headers, "Content-Length": str(len(body))}), body)

    def handle(connection: ServerConnection) -> None:
        with suppress(ConnectionClosed, OSError):
            further = {"streamed": streamed, "tools": tools}
            bounds = {"frame": 65536, "window": 262144, "calls": 64}
            bounds |= {name: bound for name, bound in further.items() if bound is not None}
            connection.send(json.dumps({"hello": {"wire": version, "version": "1", "bounds": bounds}}))
            talk(connection)

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server = certificates / "server"
    context.load_cert_chain(server / "cert.pem", server / "key.pem")
    with serve(handle, "127.0.0.1", 0, ssl=context, process_request=process, compression=None) as listener:
        threading.Thread(target=listener.serve_forever, daemon=True).start()
        port = listener.socket.getsockname()[1]
        yield account_at(f"https://127.0.0.1:{port}", "cloche_posed", certificates / "ca.pem"), seen
        listener.shutdown()
