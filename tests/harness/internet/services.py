"""What answers at which port, at every address: websites, banners, names, a proxy, PostgreSQL."""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import struct
import subprocess
import time
from pathlib import Path

from . import web
from .build import FOLDER
from .listeners import Answerer, Replier
from .names import Names
from .record import Arrival
from .sites import site_of
from .streams import Plain, Stream, Tls, note_name, relay
from .web2 import Http2Server

HANDSHAKE = b"\x16"
WITH_HTTP2 = ("api.anthropic.com",)
WEB = (80, 81, 443, 444, 8080, 8443)
BANNERS = (22, 25)
ECHOES = (7, 853, 6379)
DATAGRAMS = (123, 443, 1900, 5353)
POSTGRES, POSTGRES_INSIDE, PROXY = 5432, 55432, 3128
NOBODY = 65534
LEFT_FREE = 444  # on the host
PATIENCE_S = 60


def tls_context() -> ssl.SSLContext:
    """Return what TLS is spoken with; some hosts take HTTP/2."""
    context, with_http2 = _tls_context(), _tls_context()
    with_http2.set_alpn_protocols(["h2", "http/1.1"])

    def choose(tls: ssl.SSLObject, name: str | None, given: ssl.SSLContext) -> None:
        note_name(tls, name, given)
        if name in WITH_HTTP2:
            tls.context = with_http2

    context.sni_callback = choose  # type: ignore[assignment]
    return context


def _tls_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(FOLDER / "server.pem", FOLDER / "server.key")
    context.load_verify_locations(FOLDER / "authority.pem")
    context.verify_mode = ssl.CERT_OPTIONAL
    return context


def tcp_services(names: Names | None) -> dict[int, Answerer]:
    """Return what answers connections, with a name server and a proxy where there are names."""
    context, site = tls_context(), site_of(FOLDER)

    def open_stream(connection: socket.socket, arrival: Arrival) -> Stream:
        stream = Plain(connection, arrival)
        return Tls(connection, arrival, context) if stream.first_byte() == HANDSHAKE else stream

    def answer_web(connection: socket.socket, arrival: Arrival) -> None:
        stream = open_stream(connection, arrival)
        if isinstance(stream, Tls) and stream.protocol == "h2":
            Http2Server(stream, site).serve()
        else:
            web.serve(stream, site)

    def echo(connection: socket.socket, arrival: Arrival) -> None:
        _echo(open_stream(connection, arrival))

    services: dict[int, Answerer] = dict.fromkeys(WEB, answer_web) | dict.fromkeys(ECHOES, echo)
    services |= dict.fromkeys(BANNERS, _greet)
    services[POSTGRES] = lambda connection, arrival: _pass_on(connection, arrival, echo)
    if names is None:
        del services[LEFT_FREE]
    else:
        services[53] = lambda connection, arrival: _answer_questions(Plain(connection, arrival), names)
        services[PROXY] = lambda connection, arrival: _forward(connection, arrival, names)
    return services


def udp_services(names: Names | None) -> dict[int, Replier]:
    """Return what answers datagrams."""
    services: dict[int, Replier] = dict.fromkeys(DATAGRAMS, _reply)
    return {**services, 53: names.reply} if names is not None else services


def _reply(data: bytes, arrival: Arrival) -> bytes:
    return f"HELLO from {arrival.address}:{arrival.port}: ".encode() + data


def _echo(stream: Stream) -> None:
    while data := stream.receive():
        stream.send(data)
    stream.end_sending()


def _greet(connection: socket.socket, arrival: Arrival) -> None:
    connection.sendall(f"HELLO from {arrival.address}:{arrival.port}\r\n".encode())
    _echo(Plain(connection, arrival))


def answer_by_name(connection: socket.socket, arrival: Arrival) -> None:
    """Answer at an abstract socket."""
    _echo(Plain(connection, arrival))


def _answer_questions(stream: Stream, names: Names) -> None:
    reader = web.Reader(stream)
    while len(size := reader.exactly(2)) == 2:
        answer = names.reply(reader.exactly(struct.unpack("!H", size)[0]), stream.arrival)
        stream.send(struct.pack("!H", len(answer)) + answer)


def _forward(connection: socket.socket, arrival: Arrival, names: Names) -> None:
    """Be a proxy: tunnels, and requests in absolute form."""
    stream = Plain(connection, arrival)
    reader = web.Reader(stream)
    request = web.read_request(reader)
    if request is None:
        return
    is_tunnel = request.method == "CONNECT"
    authority, _, path = request.target.removeprefix("http://").partition("/")
    host, _, port = authority.rpartition(":") if ":" in authority else (authority, "", "80")
    address = names.address_of(host)
    if address is None:
        stream.send(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n")
        return
    with socket.create_connection((address, int(port))) as upstream:
        if is_tunnel:
            stream.send(b"HTTP/1.1 200 Connection established\r\n\r\n")
            upstream.sendall(reader.rest())
        else:
            lines = [f"{request.method} /{path} HTTP/1.1", *(f"{n}: {v}" for n, v in request.headers.items())]
            upstream.sendall("\r\n".join([*lines, "", ""]).encode("latin-1") + request.body)
        relay(connection, upstream, arrival)


def _pass_on(connection: socket.socket, arrival: Arrival, otherwise: Answerer) -> None:
    """Relay to PostgreSQL, if it was started."""
    try:
        inside = socket.create_connection(("127.0.0.1", POSTGRES_INSIDE))
    except ConnectionRefusedError:
        otherwise(connection, arrival)
        return
    with inside:
        relay(connection, inside, arrival)


# As nobody, for it runs as no root; a user without a name gets one that only it sees.
_AS_ITS_USER = """
set -e
cp /etc/passwd "$1/passwd"
getent passwd "$2" >/dev/null || echo "server:x:$2:$2::/:/bin/sh" >>"$1/passwd"
mount --bind "$1/passwd" /etc/passwd
as_user="setpriv --pdeathsig=KILL"
[ "$(id -u)" = "$2" ] || as_user="$as_user --reuid=$2 --regid=$2 --clear-groups --inh-caps=-all"
$as_user "$3/initdb" -D "$1/data" -U postgres -A trust --no-sync --no-locale --encoding=UTF8 --no-instructions >&2
exec $as_user "$3/postgres" -D "$1/data" -p "$4" -c listen_addresses=127.0.0.1 \\
    -c unix_socket_directories= -c fsync=off -c dynamic_shared_memory_type=mmap \\
    -c ssl=on -c ssl_cert_file="$1/server.pem" -c ssl_key_file="$1/server.key"
"""


def start_postgres() -> str:
    """Start PostgreSQL where it is installed and return when it takes connections; else say what is missing."""
    if _listens(POSTGRES_INSIDE):
        return ""
    found = [program_folder for program_folder in _postgres_folders() if (program_folder / "initdb").exists()]
    if not found:
        return "missing: postgres and initdb (make setup-system)"
    folder, uid = FOLDER / "postgres", os.geteuid() or NOBODY
    folder.mkdir()
    for name in ("server.pem", "server.key"):
        (folder / name).write_bytes((FOLDER / name).read_bytes())
        (folder / name).chmod(0o600)
    if uid != os.geteuid():
        for path in (folder, *folder.iterdir()):
            os.chown(path, uid, uid)
    words = [
        "unshare",
        "--mount",
        "sh",
        "-c",
        _AS_ITS_USER,
        "sh",
        str(folder),
        str(uid),
        str(found[0]),
        str(POSTGRES_INSIDE),
    ]
    log = (folder / "log").open("wb")
    process = subprocess.Popen(words, stdout=log, stderr=log, cwd="/")
    deadline = time.monotonic() + PATIENCE_S
    while not _listens(POSTGRES_INSIDE):
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError((folder / "log").read_text())
        time.sleep(0.01)
    return ""


def _postgres_folders() -> list[Path]:
    on_path = shutil.which("postgres")
    folders = [Path(on_path).resolve().parent] if on_path else []
    return [*folders, *sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)]


def _listens(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port)):
            return True
    except OSError:
        return False
