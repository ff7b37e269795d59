"""Attempts to be another name than the one that was connected to: by Host, by server name, by odd HTTP and TLS."""

from __future__ import annotations

from typing import Any

from tests.harness.escape.egress import Row
from tests.harness.world import METADATA, PUBLIC


def sends(row: str, text: str) -> Row:
    """Return an attempt by plain HTTP at a name that is allowed.

    Lines end as HTTP has it; a bare line feed is written as a pilcrow.
    """
    raw = text.replace("\n", "\r\n").replace("¶", "\n")
    return Row(name=row, code=f'return http("good.example", {raw!r}.format(T=T))')


def smuggles(row: str, head: str, rest: str = "") -> Row:
    """Return a request that two readers understand differently, and one for another name where only one sees it."""
    return sends(f"smuggling: {row}", f"{head}\n\n{rest}GET /{{T}} HTTP/1.1\nHost: other.example\n\n")


def refused_head(row: str, head: str) -> Row:
    """Return a head that no proxy may pass on, whose token is in it."""
    return sends(f"HTTP: {row}", f"{head}\n\n")


TO_H2C = "Connection: Upgrade, HTTP2-Settings\nUpgrade: h2c\nHTTP2-Settings: AAMAAABkAAQAAP__"
POST = "POST /a HTTP/1.1\nHost: good.example\n"
OTHER_NAMES = (
    Row(name="a name that is not listed", code='return get(f"{T}.other.example", T)'),
    Row(name="a name that ends like a listed one", code='return get(f"{T}good.example", T)'),
    Row(name="a name that begins like a listed one", code='return get(f"good.example.{T}.other.example", T)'),
    Row(name="the apex of a wildcard", code='return get("wild.example", T)'),
    Row(name="a denied name below a wildcard", code='return get("x.denied.wild.example", T)', also_open=True),
    Row(name="another Host", code='return get("good.example", T, name=f"{T}.other.example")'),
    Row(name="a denied Host", code='return get("a.wild.example", T, name=f"x.denied.wild.example")', also_open=True),
    Row(name="another allowed Host", code='return get("good.example", T, name="a.wild.example")', also_open=True),
    Row(
        name="another Host in the second request",
        code="""
        with connect("good.example", 80) as connection:
            connection.sendall(b"GET / HTTP/1.1\\r\\nHost: good.example\\r\\n\\r\\n")
            connection.recv(4096)
            return say(connection, f"GET /{T} HTTP/1.1\\r\\nHost: other.example\\r\\n\\r\\n".encode())
        """,
        also_open=True,
    ),
    Row(
        name="another Host in a request sent along",
        code="""
        first = "GET / HTTP/1.1\\r\\nHost: good.example\\r\\n\\r\\n"
        return http("good.example", first + f"GET /{T} HTTP/1.1\\r\\nHost: other.example\\r\\n\\r\\n")
        """,
    ),
    Row(name="another server name", code='return tls("good.example", T, name=f"{T}.other.example")', also_open=True),
    Row(name="another allowed server name", code='return tls("good.example", T, name="a.wild.example")'),
    Row(
        name="a denied server name at an address",
        code='return tls("8.8.8.8", T, name="x.denied.wild.example")',
        also_open=True,
    ),
    Row(name="no server name", code='return tls("good.example", T, name="")', also_open=True),
    Row(name="the allowed name's own address", code=f'return get("{PUBLIC}", T, name="good.example")'),
    Row(name="the allowed name's own address by TLS", code=f'return tls("{PUBLIC}", T, name="good.example")'),
    Row(name="plain text where TLS is", code='return get("good.example", T, 443)', also_open=True),
    Row(name="a protocol of its own where TLS is", code='return http("good.example", f"SSH-2.0-{T}\\r\\n", 443)'),
    Row(name="TLS where plain text is", code='return tls("good.example", T, 80)', also_open=True),
    Row(name="another server name in a stream", code='return tls("db.example", T, 5432, name=f"{T}.other.example")'),
    Row(name="an upper-case name that is denied", code='return get("X.DENIED.Wild.Example", T)', also_open=True),
    Row(name="a denied name with a dot behind it", code='return get("x.denied.wild.example.", T)', also_open=True),
    *(
        Row(name=f"a port that is not listed: {port}", code=f'return get("good.example", T, {port})', also_open=True)
        for port in (22, 81, 8080, 6379)
    ),
    Row(name="a port of another rule", code='return get("db.example", T)'),
    Row(name="a port of a literal's rule", code='return get("10.1.2.4", T)'),
    Row(
        name="the addresses that names have in there",
        code="""
        for address in ("198.18.0.1", "198.18.0.9", "198.19.255.255", *(f"198.18.1.{last}" for last in range(9))):
            for reach in (get, tls):
                try:
                    reach(address, T, name=f"{T}.other.example")
                except OSError:
                    continue
        """,
    ),
)


def hello(row: str, code: str, **more: Any) -> Row:
    """Return an attempt to begin TLS with bytes of its own."""
    return Row(name=f"TLS: {row}", code=f'with connect("good.example", 443) as c:\n    return say(c, {code})', **more)


ODD_HELLOS = (
    hello("two server names", 'record(client_hello([b"good.example", *other(T)]))', also_open=True),
    hello("two server names, the allowed one last", 'record(client_hello([*other(T), b"good.example"]))'),
    hello("an address for a server name", f'record(client_hello([b"{METADATA}"], T.encode()))', also_open=True),
    hello("a name with a null byte", 'record(client_hello([b"good.example\\0." + T.encode()]))'),
    hello("a name that is not text", 'record(client_hello([b"\\xff\\xfe" + T.encode()]))'),
    hello("an empty name", 'record(client_hello([b""], T.encode()))'),
    hello("no name at all", "record(client_hello([], T.encode()))"),
    hello("two records", "*[record(p) for h in [client_hello(other(T))] for p in (h[:40], h[40:])]"),
    hello("a byte in each packet", "*[bytes([b]) for b in record(client_hello(other(T)))]"),
    hello(
        "a name behind more than anybody reads",
        "*[record(p) for h in [client_hello(other(T), padding=20000)] for p in (h[:16000], h[16000:])]",
    ),
    hello("another record first", 'record(b"\\x01", 20) + record(client_hello(other(T)))'),
    hello("an alert first", 'record(b"\\x01\\0", 21) + record(client_hello(other(T)))'),
    hello("an empty record first", 'record(b"") + record(client_hello(other(T)))'),
    hello("a length that lies", 'record(client_hello(other(T)) + b"GET /")'),
    hello("version 2", 'bytes.fromhex("802b01030100030000001f010080") + b"x" * 18 + T.encode()'),
    hello("another message", 'record(b"\\x02" + client_hello([T.encode()])[1:])'),
)
HEADS = (
    refused_head("a tunnel", "CONNECT {T}.other.example:443 HTTP/1.1\nHost: good.example"),
    refused_head("a tunnel to the allowed name", "CONNECT good.example:443 HTTP/1.1\nHost: good.example\nX: {T}"),
    refused_head("a target with another name", "GET http://{T}.other.example/ HTTP/1.1\nHost: good.example"),
    refused_head("a target with another port", "GET http://good.example:8080/{T} HTTP/1.1\nHost: good.example"),
    refused_head("a target with a user", "GET http://good.example@other.example/{T} HTTP/1.1\nHost: good.example"),
    refused_head("a target of another kind", "GET ftp://good.example/{T} HTTP/1.1\nHost: good.example"),
    refused_head("two hosts", "GET /{T} HTTP/1.1\nHost: good.example\nHost: other.example"),
    refused_head("the same host twice", "GET /{T} HTTP/1.1\nHost: good.example\nHost: good.example"),
    refused_head("no host", "GET /{T} HTTP/1.1\nX: y"),
    refused_head("an empty host", "GET /{T} HTTP/1.1\nHost:"),
    refused_head("two hosts in one", "GET /{T} HTTP/1.1\nHost: good.example, other.example"),
    refused_head("a host with a user", "GET /{T} HTTP/1.1\nHost: good.example@other.example"),
    refused_head("a host with a path", "GET /{T} HTTP/1.1\nHost: good.example/.other.example"),
    refused_head("a host with another port", "GET /{T} HTTP/1.1\nHost: good.example:8080"),
    refused_head("a host behind a space", "GET /{T} HTTP/1.1\nHost : other.example\nHost: good.example"),
    refused_head("a host in a folded line", "GET /{T} HTTP/1.1\nHost: good.example\n\tother.example"),
    refused_head("a header in a folded line", "GET /{T} HTTP/1.1\nHost: good.example\nX: y\n Host: other.example"),
    refused_head("a bare line feed", "GET /{T} HTTP/1.1\nX: y¶Host: other.example\nHost: good.example"),
    refused_head("a bare carriage return", "GET /{T} HTTP/1.1\nX: y\rHost: other.example\nHost: good.example"),
    refused_head("a null byte", "GET /{T} HTTP/1.1\nHost: good.example\0.other.example"),
    refused_head("HTTP/0.9", "GET /{T}"),
    refused_head("HTTP/2 without TLS", "PRI * HTTP/2.0\n\nSM\n\n{T}"),
    refused_head("an upgrade to h2c", "GET /{T} HTTP/1.1\nHost: good.example\n" + TO_H2C),
    refused_head("a version of its own", "GET /{T} HTTP/3.7\nHost: good.example"),
    refused_head("no name of a header", "GET /{T} HTTP/1.1\nHost: good.example\n: other.example"),
    refused_head("a line that is not a header", "GET /{T} HTTP/1.1\nHost: good.example\nother.example"),
    Row(
        name="HTTP: a head without an end",
        code="""
        head = "GET / HTTP/1.1\\r\\nHost: good.example\\r\\n" + "X: yyyyyyyyyyyyyyyy\\r\\n" * 5000
        return http("good.example", head + f"Y: {T}\\r\\n\\r\\n")
        """,
    ),
)
SMUGGLED = (
    smuggles("a length and chunks", POST + "Content-Length: 5\nTransfer-Encoding: chunked", "0\n\n"),
    smuggles("chunks and a length", POST + "Transfer-Encoding: chunked\nContent-Length: 4", "0\n\n"),
    smuggles("two lengths", POST + "Content-Length: 0\nContent-Length: 0000"),
    smuggles("two different lengths", POST + "Content-Length: 60\nContent-Length: 0"),
    smuggles("a list of lengths", POST + "Content-Length: 0, 0"),
    smuggles("a length with a sign", POST + "Content-Length: +0"),
    smuggles("a length that is not a number", POST + "Content-Length: 0x0"),
    smuggles("an encoding that is none", POST + "Transfer-Encoding: xchunked", "0\n\n"),
    smuggles("chunks within another encoding", POST + "Transfer-Encoding: identity, chunked", "0\n\n"),
    smuggles("chunks twice", POST + "Transfer-Encoding: chunked, chunked", "0\n\n"),
    smuggles("two encodings", POST + "Transfer-Encoding: chunked\nTransfer-Encoding: identity", "0\n\n"),
    smuggles("an encoding behind a space", POST + "Transfer-Encoding : chunked", "0\n\n"),
    smuggles("an encoding in a folded line", POST + "Transfer-Encoding:\n chunked", "0\n\n"),
    smuggles("an encoding behind a control character", POST + "Transfer-Encoding: \x0bchunked", "0\n\n"),
    smuggles("a chunk whose size lies", POST + "Transfer-Encoding: chunked", "1\nxyz\n0\n\n"),
    smuggles("a chunk with a size of its own", POST + "Transfer-Encoding: chunked", "0x0\n\n"),
    smuggles("a chunk of a negative size", POST + "Transfer-Encoding: chunked", "-1\n\n"),
    smuggles("a chunk of a size beyond all", POST + "Transfer-Encoding: chunked", "f" * 40 + "\n"),
    smuggles("a chunk that ends with a bare line feed", POST + "Transfer-Encoding: chunked", "0¶¶"),
    Row(
        name="smuggling: behind a WebSocket that nobody took",
        code="""
        with connect("good.example", 80) as connection:
            connection.sendall(b"GET / HTTP/1.1\\r\\nHost: good.example\\r\\n")
            connection.sendall(b"Connection: Upgrade\\r\\nUpgrade: websocket\\r\\n\\r\\n")
            connection.recv(4096)
            return say(connection, f"GET /{T} HTTP/1.1\\r\\nHost: other.example\\r\\n\\r\\n".encode())
        """,
    ),
)

ROWS = (*OTHER_NAMES, *ODD_HELLOS, *HEADS, *SMUGGLED)
