"""Attempts on secrets by HTTP/2 and web sockets; what is heard of HTTP/2 are frames, with headers that are packed."""

from __future__ import annotations

import struct

from hpack import Decoder, HPACKError

from tests.escape.secrets_rows import Row

HTTP2_ROWS = (
    Row("an echo by HTTP/2", "reads", "return http2(key)"),
    Row("an echo in a header of HTTP/2", "reads", 'return http2(key, path="/header")'),
    Row("an echo in trailers of HTTP/2", "reads", 'return http2(key, path="/trailer")'),
    Row("an echo of a web socket by HTTP/2", "reads", """
        return http2({"x-api-key": K}, method="CONNECT", protocol="websocket", path="/")
        """),
    Row("a name of a header in capitals by HTTP/2", "brings", 'return http2({"X-Api-Key": FOREIGN})'),
    Row("a foreign key by HTTP/2", "brings", 'return http2({"x-api-key": FOREIGN})'),
    Row("a foreign key, too, by HTTP/2", "brings", 'return http2(key, more=[("x-api-key", FOREIGN)])'),
    Row("a foreign key behind a line end in HTTP/2", "brings", 'return http2({"x": f"1\\r\\nx-api-key: {FOREIGN}"})'),
    Row("a foreign key in trailers of HTTP/2", "brings", """
        return http2(key, method="POST", trailers={"x-api-key": FOREIGN})
        """),
    Row("a foreign key by CONNECT", "brings", """
        return http2({"x-api-key": FOREIGN}, method="CONNECT", protocol="websocket", path="/")
        """),
    Row("another authority in HTTP/2", "sends", "return http2(key, authority=OTHER)"),
    Row("another Host beside the authority", "sends", 'return http2({**key, "host": OTHER})'),
    Row("another authority behind the first", "sends", 'return http2(key, more=[(":authority", OTHER)])'),
    Row("another host in the path of HTTP/2", "sends", 'return http2(key, path=f"https://{OTHER}/")'),
    Row("a tunnel by CONNECT", "sends", """
        return http2(key, method="CONNECT", authority=f"{OTHER}:443", path="", scheme="")
        """),
    Row("a request in the path of HTTP/2", "sends", """
        return http2(key, path=f"/ HTTP/1.1\\r\\nHost: {OTHER}\\r\\n\\r\\n")
        """),
    Row("an echo in messages", "reads", "return web_socket(key)"),
    Row("an echo in compressed messages", "reads", """
        return web_socket({**key, "Sec-WebSocket-Extensions": "permessage-deflate"})
        """),
)  # fmt: skip


def shown(heard: bytes) -> str:
    """Return frames with their headers unpacked, and what is no HTTP/2 as it is."""
    texts, at, decoder = [heard], 0, Decoder()
    while at + 9 <= len(heard):
        size = int.from_bytes(heard[at : at + 3], "big")
        kind = heard[at + 3]
        try:
            rows = decoder.decode(heard[at + 9 : at + 9 + size], raw=True) if kind == 1 else ()
        except (HPACKError, struct.error):
            break
        texts += [b": ".join(row) for row in rows]
        at += 9 + size
    return b"\n".join(texts).decode("latin-1")
