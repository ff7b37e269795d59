"""The client of `bench.network` and `bench.secrets`, whose text runs in all places; what it does, it times itself.

Where it has a secret, it sends the placeholder, and outside as many other characters.
"""

from __future__ import annotations

import asyncio
import http.client
import os
import socket
import ssl
import threading
import time
from typing import Any

CONTEXT = ssl.create_default_context()
BUFFER = bytearray(1 << 18)
WINDOW_BYTES = 1 << 24  # of HTTP/2, so that the clients' own is not what is measured
KEY = {"x-api-key": os.environ.get("API_KEY", "0123456789abcdefghij")}
kept: dict[str, Any] = {}  # connections, by host


def fetch(scheme: str, host: str, port: int, path: str) -> list[float]:
    """Connect, ask, and read the answer to its end; return the milliseconds and the bytes of the body."""
    started = time.perf_counter()
    if scheme == "https":
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(host, port, context=CONTEXT)
    else:
        connection = http.client.HTTPConnection(host, port)
    connection.request("GET", path)
    response, count = connection.getresponse(), 0
    while more := response.readinto(BUFFER):
        count += more
    connection.close()
    return [(time.perf_counter() - started) * 1000, count]


def first_byte(host: str, port: int, path: str) -> list[float]:
    """Connect, ask, and read one byte of the answer's body; return the milliseconds and the bytes."""
    started = time.perf_counter()
    connection = http.client.HTTPSConnection(host, port, context=CONTEXT)
    connection.request("GET", path, headers=KEY)
    response = connection.getresponse()
    count = len(response.read(1))
    ms = (time.perf_counter() - started) * 1000
    connection.close()
    return [ms, count]


def fetch_again(host: str, port: int, path: str) -> list[float]:
    """Ask on a connection that is kept; return the milliseconds and the bytes of the body."""
    connection = kept.get(host)
    if connection is None:
        connection = kept[host] = http.client.HTTPSConnection(host, port, context=CONTEXT)
        connection.connect()
    started = time.perf_counter()
    connection.request("GET", path, headers=KEY)
    count = len(connection.getresponse().read())
    return [(time.perf_counter() - started) * 1000, count]


def fetch_http2(host: str, port: int, path: str) -> list[float]:
    """Ask by HTTP/2 on a connection that is kept; return the milliseconds and the bytes of the body."""
    stream, h2 = kept.get("h2") or kept.setdefault("h2", _connect_http2(host, port))
    started, count = time.perf_counter(), 0
    stream_id, has_ended = h2.get_next_available_stream_id(), False
    pseudo = {":method": "GET", ":scheme": "https", ":authority": host, ":path": path}
    h2.send_headers(stream_id, [*pseudo.items(), *KEY.items()], end_stream=True)
    while not has_ended:
        stream.sendall(h2.data_to_send())
        for event in h2.receive_data(stream.recv(1 << 18)):
            if hasattr(event, "flow_controlled_length"):
                count += len(event.data)
                h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            has_ended = has_ended or type(event).__name__ == "StreamEnded"
    stream.sendall(h2.data_to_send())
    return [(time.perf_counter() - started) * 1000, count]


def _connect_http2(host: str, port: int) -> tuple[ssl.SSLSocket, Any]:
    from h2.connection import H2Connection
    from h2.settings import SettingCodes

    context, h2 = ssl.create_default_context(), H2Connection()
    context.set_alpn_protocols(["h2"])
    stream = context.wrap_socket(socket.create_connection((host, port)), server_hostname=host)
    h2.initiate_connection()
    h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: WINDOW_BYTES})
    h2.increment_flow_control_window(WINDOW_BYTES)
    return stream, h2


def fetch_many(scheme: str, host: str, port: int, path: str, connections: int) -> list[float]:
    """Do so on many connections at once, none of which ends before all have an answer; return how many had one."""

    async def one() -> asyncio.StreamWriter:
        reader, writer = await asyncio.open_connection(host, port, ssl=CONTEXT if scheme == "https" else None)
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode())
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(head.partition(b"Content-Length: ")[2].split()[0]))
        return writer

    async def every() -> list[float]:
        started = time.perf_counter()
        found = await asyncio.gather(*(one() for _ in range(connections)), return_exceptions=True)
        ms = (time.perf_counter() - started) * 1000
        writers = [writer for writer in found if not isinstance(writer, BaseException)]
        for writer in writers:
            writer.close()
        await asyncio.gather(*(writer.wait_closed() for writer in writers), return_exceptions=True)
        return [ms, len(writers)]

    return asyncio.run(every())


def hold(host: str, port: int, path: str, connections: int) -> list[float]:
    """Ask on so many connections, and go on reading the answers, which have no end."""

    def read(connection: socket.socket) -> None:
        while connection.recv_into(bytearray(1 << 16)):
            pass

    for _ in range(connections):
        connection = socket.create_connection((host, port))
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        threading.Thread(target=read, args=(connection,), daemon=True).start()
    return [0, connections]
