"""Speak HTTP/2 and web sockets by hand: what test_secrets.py puts before its program, which has the other names."""

import socket
import ssl
import struct
import zlib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    HOST = ""
    MARK: "Any" = None
    WAIT_S, QUIET_S = 0.0, 0.0

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
UPGRADE = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Key": "eA==", "Sec-WebSocket-Version": "13"}


def connect(protocols: "list[str]") -> "Any":
    """Return a connection to the secret's host, which speaks one of these."""
    context = ssl.create_default_context()
    context.set_alpn_protocols(protocols)
    return context.wrap_socket(socket.create_connection((HOST, 443), WAIT_S), server_hostname=HOST)


def frame(kind: int, flags: int, content: bytes, stream_id: int = 1) -> bytes:
    """Write a frame."""
    return struct.pack("!I", len(content))[1:] + struct.pack("!BBI", kind, flags, stream_id) + content


def packed(rows: "list[tuple[str, str]]") -> bytes:
    """Write headers, none of which is to be kept in a table."""
    return b"".join(b"\x10" + text(name) + text(value) for name, value in rows)


def text(word: str) -> bytes:
    """Write a name or a value."""
    data = word.encode("latin-1")
    size = len(data)
    return (bytes([size]) if size < 127 else bytes([127, (size - 127) % 128 + 128, (size - 127) // 128])) + data


def http2(
    headers: "dict[str, str]", *, path: str = "/plain", more: "list[tuple[str, str]] | None" = None,
    trailers: "dict[str, str] | None" = None, **pseudo: str,
) -> bytes:  # fmt: skip
    """Make a request, and return the frames that come back, as they are."""
    first = {"method": "GET", "scheme": "https", "authority": HOST, "path": path, **pseudo}
    rows = [*((f":{name}", value) for name, value in first.items() if value), ("x-mark", MARK.text), *headers.items()]
    sent = frame(1, 4 if trailers else 5, packed([*rows, *(more or [])]))
    if trailers:
        sent += frame(0, 0, b"body") + frame(1, 5, packed([("x-mark", MARK.text), *trailers.items()]))
    with connect(["h2"]) as connection:
        if connection.selected_alpn_protocol() != "h2":
            raise OSError("no HTTP/2")
        connection.sendall(PREFACE + frame(4, 0, b"", 0))
        heard = connection.recv(1 << 16)  # the settings, which say whether there are web sockets
        connection.sendall(sent)
        return heard + heard_of(connection)


def heard_of(connection: "Any") -> bytes:
    """Return what comes until it is quiet."""
    heard = b""
    connection.settimeout(QUIET_S)
    try:
        while piece := connection.recv(1 << 16):
            heard += piece
    except TimeoutError:
        pass
    return heard


def web_socket(headers: "dict[str, str]", path: str = "/") -> bytes:
    """Return the messages of a web socket, one behind the other, unpacked where they are compressed."""
    rows = {"Host": HOST, "X-Mark": MARK.text, **UPGRADE, **headers}
    with connect(["http/1.1"]) as connection:
        lines = "".join(f"{name}: {value}\r\n" for name, value in rows.items())
        connection.sendall(f"GET {path} HTTP/1.1\r\n{lines}\r\n".encode())
        head, _, heard = heard_of(connection).partition(b"\r\n\r\n")
    texts, at = b"", 0
    while at + 2 <= len(heard):
        size, begin = heard[at + 1], at + 2
        if size == 126:
            size, begin = int.from_bytes(heard[at + 2 : at + 4], "big"), at + 4
        part = heard[begin : begin + size]
        if heard[at] & 0x40:
            part = zlib.decompressobj(-15).decompress(part + b"\0\0\xff\xff")
        texts += part if heard[at] & 0x0F < 8 else b""
        at = begin + size
    return texts or head + heard
