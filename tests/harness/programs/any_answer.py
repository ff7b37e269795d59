"""A server that answers a request with the bytes that its target asks for, with its own head, or with frames.

`/raw?...` sends these bytes and closes, `/hang?...` sends them and waits, `/flood?...` sends them without end; `/sum`
counts a body; `/ws` echoes frames of a web socket as they are; others answer with the head of the request.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import pathlib
import ssl
import struct
import sys
from collections.abc import Mapping
from urllib.parse import unquote_to_bytes

GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


async def echo_frames(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Echo each frame, unmasked; a ping as a pong. Ends after a close."""
    opcode = 0
    while opcode != 8:
        head = await reader.readexactly(2)
        size = head[1] & 127
        if size == 126:
            size = struct.unpack(">H", await reader.readexactly(2))[0]
        elif size == 127:
            size = struct.unpack(">Q", await reader.readexactly(8))[0]
        mask = await reader.readexactly(4)
        data = await reader.readexactly(size)
        key = (mask * (size // 4 + 1))[:size]
        data = (int.from_bytes(data, "big") ^ int.from_bytes(key, "big")).to_bytes(size, "big")
        if size < 126:
            length = bytes([size])
        else:
            length = b"\x7e" + struct.pack(">H", size) if size < 1 << 16 else b"\x7f" + struct.pack(">Q", size)
        opcode = head[0] & 15
        writer.write(bytes([(head[0] & 0xF0) | (10 if opcode == 9 else opcode)]) + length + data)
        await writer.drain()


async def read_body(reader: asyncio.StreamReader, headers: Mapping[bytes, bytes]) -> int:
    """Return the size of a body."""
    if b"content-length" in headers:
        return len(await reader.readexactly(int(headers[b"content-length"])))
    total = 0
    while size := int(await reader.readline(), 16):
        total += size
        await reader.readexactly(size + 2)
    await reader.readline()
    return total


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer one request."""
    head = await reader.readuntil(b"\r\n\r\n")
    method, target, _ = head.split(b"\r\n")[0].split(b" ")
    path, _, query = target.partition(b"?")
    lines = [line.partition(b": ") for line in head.split(b"\r\n")[1:] if line]
    headers = {name.lower(): value for name, _, value in lines}
    told = unquote_to_bytes(query)
    if path in (b"/raw", b"/hang", b"/flood"):
        writer.write(told)
        await writer.drain()
        while path == b"/flood":
            writer.write(told * 1000)
            await writer.drain()
        if path == b"/hang":
            await reader.read()
    elif path == b"/ws":
        key = base64.b64encode(hashlib.sha1(headers[b"sec-websocket-key"] + GUID).digest())
        offered = headers.get(b"sec-websocket-protocol", b"").split(b",")[0]
        agreed = b"Sec-WebSocket-Protocol: %s\r\n" % offered if offered else b""
        begin = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        writer.write(begin + b"%sSec-WebSocket-Accept: %s\r\n\r\n" % (agreed, key))
        await echo_frames(reader, writer)
    else:
        body = str(await read_body(reader, headers)).encode() if path == b"/sum" else head
        shown = b"" if method == b"HEAD" else body
        writer.write(b"HTTP/1.1 200 OK\r\nX-Seen: yes\r\nContent-Length: %d\r\n\r\n%s" % (len(body), shown))
    await writer.drain()


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Serve a connection."""
    try:
        await answer(reader, writer)
    except (ConnectionError, asyncio.IncompleteReadError):
        pass
    finally:
        writer.close()


async def main() -> None:
    """Listen on port 8000; with a key and a certificate as argument, on port 8443 by TLS, too."""
    plain = await asyncio.start_server(serve, "127.0.0.1", 8000, limit=1 << 22)
    if sys.argv[1:]:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain("/tmp/server.pem")
        await asyncio.start_server(serve, "127.0.0.1", 8443, ssl=context)
    await plain.serve_forever()


if sys.argv[1:]:
    pathlib.Path("/tmp/server.pem").write_text(sys.argv[1])
asyncio.run(main())
