"""The client of `bench.network`, whose text runs in both places: what it is asked for, it times itself."""

from __future__ import annotations

import asyncio
import http.client
import socket
import ssl
import threading
import time

CONTEXT = ssl.create_default_context()
BUFFER = bytearray(1 << 18)


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
