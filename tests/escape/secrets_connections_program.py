"""Make attempts on secrets by connections: the inside of test_secrets_connections.py, which puts constants before this.

It imports nothing of ours. Each attempt is a function of its name; what it returns is printed as text.
"""

import glob
import json
import os
import socket
import ssl
import tempfile
import threading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    HOST = OTHER = REBOUND = STORE = FOREIGN = CERTIFICATE = ""

KEY, SECRET_KEY = os.environ["ANTHROPIC_API_KEY"], os.environ["AWS_SECRET_ACCESS_KEY"]
WAIT_S, QUIET_S = 8.0, 1.0
MARK = threading.local()


def request(host: str, headers: "dict[str, str]", target: str = "/") -> bytes:
    """Write a request; a header marks the attempt."""
    rows = {"Host": host, "Connection": "close", "X-Mark": MARK.text, **headers}
    lines = "".join(f"{name}: {value}\r\n" for name, value in rows.items())
    return f"GET {target} HTTP/1.1\r\n{lines}\r\n".encode("latin-1")


def exchange(connection: "Any", data: bytes) -> bytes:
    """Send bytes, and return all that comes back until it is quiet."""
    heard = b""
    connection.sendall(data)
    connection.settimeout(QUIET_S)
    try:
        while piece := connection.recv(1 << 16):
            heard += piece
    except TimeoutError:
        pass
    return heard


def context(**options: "Any") -> ssl.SSLContext:
    """Return a client's context, which takes any name."""
    made = ssl.create_default_context()
    made.check_hostname = False
    for name, value in options.items():
        setattr(made, name, value)
    return made


def ask(data: bytes, *, host: str = HOST, name: "str | None" = HOST, how: "ssl.SSLContext | None" = None) -> bytes:
    """Send a request in TLS to a host, with a server name or none."""
    connection = socket.create_connection((host, 443), WAIT_S)
    with (how or context()).wrap_socket(connection, server_hostname=name) as opened:
        return exchange(opened, data)


def resumed_session() -> bytes:
    """Connect twice, the second time with the ticket of the first."""
    how, session, said = context(), None, b""
    for _ in range(2):
        connection = socket.create_connection((HOST, 443), WAIT_S)
        with how.wrap_socket(connection, server_hostname=HOST, session=session) as opened:
            said += exchange(opened, request(HOST, {}))
            session, was_resumed = opened.session, opened.session_reused
    return b"DONE" if was_resumed else said


def client_certificate() -> bytes:
    """Show a certificate of one's own, in whose name is another's account."""
    how = context()
    with tempfile.NamedTemporaryFile("w", suffix=".pem") as file:
        file.write(CERTIFICATE)
        file.flush()
        how.load_cert_chain(file.name)
    return ask(request(HOST, {}), how=how)


def foreign_without_name() -> bytes:
    """Leave the server name out, by which a proxy would decide."""
    return ask(request(HOST, {"x-api-key": FOREIGN}), name=None)


def foreign_with_name_in_capitals() -> bytes:
    """Write the name otherwise."""
    return ask(request(HOST.upper(), {"x-api-key": FOREIGN}), host=HOST.upper(), name=HOST.upper())


def foreign_with_trailing_dot() -> bytes:
    """Write the name with the root's dot."""
    return ask(request(f"{HOST}.", {"x-api-key": FOREIGN}), host=f"{HOST}.")


def foreign_behind_pieces() -> bytes:
    """Send the first message of TLS in records and segments of a few bytes."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context().wrap_bio(incoming, outgoing, server_hostname=HOST)
    with socket.create_connection((HOST, 443), WAIT_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            tls.do_handshake()
        except ssl.SSLWantReadError:
            hello = outgoing.read()
        head, body = hello[:3], hello[5:]
        for at in range(0, len(body), 40):
            piece = body[at : at + 40]
            connection.sendall(head + len(piece).to_bytes(2, "big") + piece[:7])
            connection.sendall(piece[7:])
        finish(tls, connection, incoming, outgoing)
        tls.write(request(HOST, {"x-api-key": FOREIGN}))
        return exchange(connection, outgoing.read())


def finish(tls: ssl.SSLObject, connection: socket.socket, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO) -> None:
    """Shake hands to the end."""
    while True:
        incoming.write(connection.recv(1 << 16))
        try:
            tls.do_handshake()
        except ssl.SSLWantReadError:
            continue
        finally:
            connection.sendall(outgoing.read())
        return


def foreign_by_datagram() -> bytes:
    """Send to the port of TLS by UDP, as HTTP/3 does."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.settimeout(QUIET_S)
        sender.connect((HOST, 443))
        sender.send(request(HOST, {"x-api-key": FOREIGN}))
        return sender.recv(1 << 16)


def plain_on_the_port_of_tls() -> bytes:
    """Send the key without TLS to the port where it is expected."""
    with socket.create_connection((HOST, 443), WAIT_S) as connection:
        return exchange(connection, request(HOST, {"x-api-key": KEY}))


def rebound_name() -> bytes:
    """Ask again once the name leads elsewhere."""
    return b"".join(ask(request(REBOUND, {"x-api-key": KEY}), host=REBOUND, name=REBOUND) for _ in range(3))


def key_of_the_authority() -> bytes:
    """Search the files that a program sees for the private key of a certificate authority."""
    for pattern in ("/etc/cloche/**", "/etc/ssl/**", "/mnt/*", "/tmp/**", "/dev/shm/**", "/proc/self/fd/*", "/run/**"):
        for path in glob.glob(pattern, recursive=True):
            try:
                with open(path, "rb") as file:
                    if os.path.isfile(path) and b"PRIVATE KEY-----" in file.read(1 << 20):
                        return b"DONE"
            except OSError:
                continue
    return b""


def foreign_key_of_aws() -> bytes:
    """Sign with another's key."""
    scope, signature = "20300101/eu-central-1/s3/aws4_request", "0" * 64
    text = f"AWS4-HMAC-SHA256 Credential={FOREIGN}/{scope}, SignedHeaders=host;x-amz-date, Signature={signature}"
    rows = {"Authorization": text, "X-Amz-Date": "20300101T000000Z"}
    return ask(request(STORE, rows), host=STORE, name=STORE)


def foreign_token_of_aws() -> bytes:
    """Show another's session token."""
    return ask(request(STORE, {"X-Amz-Security-Token": FOREIGN}), host=STORE, name=STORE)


def foreign_presigned_address() -> bytes:
    """Use an address that another's key has signed."""
    target = f"/?X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz%2DCredential={FOREIGN}&X-Amz-Signature={'0' * 64}"
    return ask(request(STORE, {}, target), host=STORE, name=STORE)


def secret_key_of_aws_in_a_header() -> bytes:
    """Send the key that is there to sign."""
    return ask(request(STORE, {"X-Own": SECRET_KEY}), host=STORE, name=STORE)


def secret_key_of_aws_as_a_bearer() -> bytes:
    """Send it as a credential."""
    return ask(request(STORE, {"Authorization": f"Bearer {SECRET_KEY}"}), host=STORE, name=STORE)


def attempt(make: "Callable[[], bytes]", printed: "dict[str, str]") -> None:
    """Make one."""
    MARK.text = f"mark-{make.__name__}-"
    try:
        printed[make.__name__] = make().decode("latin-1")
    except Exception as error:
        printed[make.__name__] = f"{type(error).__name__}: {error}"


printed: "dict[str, str]" = {}
attempt(key_of_the_authority, printed)  # before another attempt writes a key of its own
threads = [threading.Thread(target=attempt, args=(globals()[name], printed)) for name in NAMES if name not in printed]  # noqa: F821
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(json.dumps(printed))
