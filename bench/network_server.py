"""Serve HTTP where `bench.network` has its servers: `/bytes/N` is so long. `python -m bench.network_server`.

Each connection has a thread, and answers go out in pieces that are large enough for TLS and the kernel to take most of
the time.
"""

from __future__ import annotations

import json
import socket
import ssl
import sys
import threading
import time

PIECE = bytes(1 << 20)
EVENTS, EVENT_PAUSE_S = 5, 0.02
BACKLOG = 512

# Answers that go on until the client is gone, and whose every few bytes are a part of their own.
ENDLESS = {
    "/continue": (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 2000),
    "/chunks": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n" * 10_000),
}


def main(ports: list[int], tls_port: int, certificate: str, key: str) -> None:
    """Listen at these ports, with TLS at one of them; the line `ready` says that all do."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    context.set_alpn_protocols(["h2", "http/1.1"])
    for port in ports:
        listener = socket.create_server(("0.0.0.0", port), backlog=BACKLOG)
        told = (listener, context if port == tls_port else None)
        threading.Thread(target=_accept, args=told).start()
    print("ready", flush=True)


def _accept(listener: socket.socket, context: ssl.SSLContext | None) -> None:
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_serve, args=(connection, context), daemon=True).start()


def _serve(connection: socket.socket, context: ssl.SSLContext | None) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        with context.wrap_socket(connection, server_side=True) if context else connection as stream:
            if isinstance(stream, ssl.SSLSocket) and stream.selected_alpn_protocol() == "h2":
                _serve_http2(stream)
                return
            while target := _next_target(stream):
                _answer(stream, target)
    except OSError:
        pass  # the client is gone


def _serve_http2(stream: socket.socket) -> None:
    """Serve `/bytes/N` by HTTP/2."""
    from h2.config import H2Configuration
    from h2.connection import H2Connection  # not every benchmark has it
    from h2.events import RequestReceived

    h2, left = H2Connection(H2Configuration(client_side=False)), {}
    h2.initiate_connection()
    stream.sendall(h2.data_to_send())
    while data := stream.recv(1 << 16):
        for event in h2.receive_data(data):
            if isinstance(event, RequestReceived) and event.stream_id:
                size = int(dict(event.headers or ())[b":path"].removeprefix(b"/bytes/"))
                h2.send_headers(event.stream_id, [(":status", "200"), ("content-length", str(size))])
                left[event.stream_id] = size
        for stream_id, size in list(left.items()):
            unsent = size
            while room := min(h2.local_flow_control_window(stream_id), h2.max_outbound_frame_size, unsent):
                unsent -= room
                h2.send_data(stream_id, PIECE[:room], end_stream=not unsent)
                stream.sendall(h2.data_to_send())
            left[stream_id] = unsent
            if not unsent:
                del left[stream_id]
        stream.sendall(h2.data_to_send())


def _next_target(stream: socket.socket) -> str:
    """Return what the next request is for, nothing at the end; clients send one, and no body, at a time."""
    head = b""
    while b"\r\n\r\n" not in head:
        more = stream.recv(1 << 16)
        if not more:
            return ""
        head += more
    return head.split()[1].decode()


def _answer(stream: socket.socket, target: str) -> None:
    if target in ENDLESS:
        head, piece = ENDLESS[target]
        stream.sendall(head)
        while True:
            stream.sendall(piece)
    if target == "/events":
        _stream_events(stream)
        return
    left = int(target.removeprefix("/bytes/"))
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\nContent-Length: {left}\r\n\r\n".encode()
    first = PIECE[:left] if left < len(PIECE) else b""
    stream.sendall(head + first)
    left -= len(first)
    while left > 0:
        stream.sendall(PIECE if left >= len(PIECE) else PIECE[:left])
        left -= len(PIECE)


def _stream_events(stream: socket.socket) -> None:
    """Send an event at once, and others later, as a model's answer is streamed."""
    stream.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
    for number in range(EVENTS):
        event = b'event: delta\ndata: {"text": "word %d"}\n\n' % number
        stream.sendall(b"%x\r\n%s\r\n" % (len(event), event))
        time.sleep(EVENT_PAUSE_S)
    stream.sendall(b"0\r\n\r\n")


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
