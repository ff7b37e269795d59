"""Run attempts to reach an internet, some at once, each in a child of its own: the inside of egress.py.

This text runs wherever attempts run, so it imports nothing of ours. `TOLD` is put before it: JSON with rows, each a
name, a token and code. The code is a function's body: it has the token as `T` and what is defined here, and returns
what it heard. One line of JSON says what came of each row.
"""

import json
import os
import select
import signal
import socket
import ssl
import struct
import sys
import textwrap
import time
import traceback
import urllib.request  # noqa: F401 - for rows: each would load it anew

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    TOLD = ""

AT_ONCE = 24
ROW_S = 12.0
WAIT_S = 4.0
QUIET_S = 0.3
HEARD_BYTES = 2000
RESULT_BYTES = 1 << 16
TO_MANY = ("255.255.255.255", "224.0.0.251")  # answers come from another address
NEVER = OSError("there is nobody")


class Escaped(Exception):
    """Say that it succeeded, where no server could tell."""


def connect(host: str, port: int, timeout: float = WAIT_S) -> socket.socket:
    """Connect by TCP, to the first address that takes it."""
    return socket.create_connection((host, port), timeout)


def listen(connection: socket.socket) -> bytes:
    """Return what comes until the end, or until nothing came for a while."""
    heard = b""
    connection.settimeout(QUIET_S)
    try:
        while len(heard) < HEARD_BYTES and (data := connection.recv(4096)):
            heard += data
    except TimeoutError:
        pass
    return heard


def say(connection: socket.socket, *pieces: bytes) -> bytes:
    """Send pieces, each in a packet of its own, and return what comes back."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for piece in pieces:
        connection.sendall(piece)
    return listen(connection)


def http(host: str, raw: str, port: int = 80) -> bytes:
    """Send a text, each character a byte, and return what comes back."""
    with connect(host, port) as connection:
        return say(connection, raw.encode("latin-1"))


def get(host: str, path: str, port: int = 80, name: str = "") -> bytes:
    """Ask for a path, by plain HTTP, with a name of a host."""
    return http(host, f"GET /{path} HTTP/1.1\r\nHost: {name or host}\r\nConnection: close\r\n\r\n", port)


def tls(host: str, path: str, port: int = 443, name: str | None = None) -> bytes:
    """Ask for a path by TLS, whoever answers; `name` is the server name, empty for none."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    name = host if name is None else name
    with connect(host, port) as connection, context.wrap_socket(connection, server_hostname=name or None) as inside:
        inside.sendall(f"GET /{path} HTTP/1.1\r\nHost: {name or host}\r\nConnection: close\r\n\r\n".encode())
        return listen(inside)


def client_hello(names: list[bytes], session: bytes = b"", padding: int = 0) -> bytes:
    """Return the handshake message of a ClientHello with these server names, those last behind the padding."""
    entries = b"".join(b"\0" + struct.pack("!H", len(name)) + name for name in names)
    key = struct.pack("!HH", 29, 32) + os.urandom(32)
    extensions = [
        (21, bytes(padding)),
        (10, struct.pack("!HH", 2, 29)),
        (13, struct.pack("!HHH", 4, 0x0403, 0x0804)),
        (43, b"\x02\x03\x04"),
        (51, struct.pack("!H", len(key)) + key),
        (0, struct.pack("!H", len(entries)) + entries),
    ]
    if not names:
        extensions.pop()
    packed = b"".join(struct.pack("!HH", kind, len(data)) + data for kind, data in extensions)
    body = b"\x03\x03" + os.urandom(32) + bytes([len(session)]) + session + struct.pack("!HHH", 4, 0x1301, 0x1302)
    body += b"\x01\0" + struct.pack("!H", len(packed)) + packed
    return b"\x01" + struct.pack("!I", len(body))[1:] + body


def other(token: str) -> list[bytes]:
    """Return the server name that is not allowed, for a ClientHello."""
    return [f"{token}.other.example".encode()]


def record(data: bytes, kind: int = 22) -> bytes:
    """Return a TLS record."""
    return bytes([kind]) + b"\x03\x01" + struct.pack("!H", len(data)) + data


def resolver() -> str:
    """Return the address of the name server that programs here ask."""
    with open("/etc/resolv.conf") as file:
        return next(line.split()[1] for line in file if line.startswith("nameserver"))


def question(name: str, kind: int = 1, options: bytes = b"", opcode: int = 0) -> bytes:
    """Return a query for a name, with options of EDNS if any."""
    labels = b"".join(bytes([len(label)]) + label.encode("latin-1") for label in name.split("."))
    head = os.urandom(2) + struct.pack("!HHHHH", 0x0100 | opcode << 11, 1, 0, 0, bool(options))
    extra = b"\0" + struct.pack("!HHIH", 41, 1232, 0, len(options)) + options if options else b""
    return head + labels + b"\0" + struct.pack("!HH", kind, 1) + extra


def datagram(host: str, port: int, data: bytes, family: int = socket.AF_INET) -> bytes:
    """Send a datagram and return what comes back."""
    with socket.socket(family, socket.SOCK_DGRAM) as caller:
        caller.settimeout(1.0)
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
        if host not in TO_MANY:
            caller.connect((host, port))  # so that the kernel says that nobody is there
        caller.sendto(data, (host, port))
        return caller.recv(4096)


def ask(name: str, kind: int = 1, server: str = "", **more: "Any") -> bytes:
    """Ask a name server by UDP, the one of this place if none is named."""
    return datagram(server or resolver(), 53, question(name, kind, **more))


def ask_by_tcp(name: str, kind: int = 1, server: str = "") -> bytes:
    """Ask a name server by TCP."""
    data = question(name, kind)
    with connect(server or resolver(), 53) as connection:
        return say(connection, struct.pack("!H", len(data)) + data)


def netlink(kind: int, flags: int, body: bytes) -> None:
    """Ask the kernel to change its network; raise its error."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as kernel:
        kernel.send(struct.pack("=IHHII", 16 + len(body), kind, flags | 5, 1, 0) + body)
        (code,) = struct.unpack_from("=i", kernel.recv(4096), 16)
    if code:
        raise OSError(-code, os.strerror(-code))


def attribute(kind: int, data: bytes) -> bytes:
    """Return an attribute of a netlink message."""
    return struct.pack("=HH", 4 + len(data), kind) + data + bytes(-len(data) % 4)


def devices() -> list[tuple[int, str]]:
    """Return the network devices that lead somewhere."""
    found = [(number, name) for number, name in socket.if_nameindex() if name != "lo"]
    if not found:
        raise NEVER
    return found


def attempt(row: "dict[str, str]") -> "dict[str, str]":
    """Run a row, and say what came of it. Its lines are indented: no string of it may go over more than one."""
    places = {**globals(), "T": row["token"]}
    try:
        exec("def body():\n" + textwrap.indent(textwrap.dedent(row["code"]).strip(), " " * 4), places)
        heard = places["body"]()
    except Escaped as escaped:
        return {"escaped": str(escaped)}
    except (OSError, UnicodeError, EOFError) as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    except BaseException:
        return {"crashed": traceback.format_exc()}
    return {"heard": heard[:HEARD_BYTES].decode("latin-1") if isinstance(heard, bytes) else str(heard)}


def start(row: "dict[str, str]") -> "tuple[int, int]":
    """Run a row in a child; return it and the end of the pipe where it says what came."""
    hears, says = os.pipe()
    child = os.fork()
    if child:
        os.close(says)
        return child, hears
    os.setpgid(0, 0)
    os.dup2(2, 1)
    own, came = os.getpid(), attempt(row)
    if os.getpid() == own:  # a row may fork
        os.write(says, json.dumps(came).encode()[:RESULT_BYTES])
    os._exit(0)


def main() -> None:
    """Run all rows."""
    waiting, came = list(TOLD_ROWS), {}
    running: dict[int, tuple[str, int, float]] = {}
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            row = waiting.pop(0)
            child, hears = start(row)
            running[hears] = row["name"], child, time.monotonic() + ROW_S
        ready, _, _ = select.select(list(running), [], [], 0.2)
        for hears, (name, child, until) in list(running.items()):
            if hears in ready:
                came[name] = json.loads(os.read(hears, RESULT_BYTES) or b'{"crashed": "it said nothing"}')
            elif time.monotonic() > until:
                came[name] = {"refused": "it still waits"}
            else:
                continue
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(hears)
            del running[hears]
    print(json.dumps(came), flush=True)


TOLD_ROWS = json.loads(TOLD)
if __name__ == "__main__":
    sys.stdout.flush()
    main()
