"""Make attempts on rules with methods and paths: the inside of test_request_rules.py, which puts constants before it.

It imports nothing of ours. Where `IS_NAIVE`, each first goes by a check that compares what is written, as a proxy
might that compares prefixes; what that one refuses is not sent.
"""

import fnmatch
import json
import socket
import ssl
import threading
import urllib.parse

TYPE_CHECKING = False
if TYPE_CHECKING:
    HOST = ADDRESS = OTHER = ""
    IS_NAIVE = False
    TOLD: "list[dict[str, str]]" = []

WAIT_S, QUIET_S = 8.0, 0.7
MARK = threading.local()


def request(target: str, *headers: str, method: str = "GET", host: str = HOST, more: str = "") -> bytes:
    """Write a request; a header marks the attempt."""
    rows = [f"Host: {host}", f"X-Mark: {MARK.text}", *headers]
    return "\r\n".join([f"{method} {target} HTTP/1.1", *rows, "", more]).encode("latin-1")


def is_let_through(data: bytes) -> bool:
    """Compare a request with the rules, as it is written."""
    method, target, _ = data.decode("latin-1").split(" ", 2)
    path = urllib.parse.urlsplit(target).path if target.startswith("http") else target.partition("?")[0]
    is_mine = method in ("GET", "POST") and path.startswith("/repos/me/")
    return is_mine or (method == "GET" and fnmatch.fnmatchcase(path, "/users/*/keys"))


def send(data: bytes, host: str = HOST, *, port: int = 443, name: str = HOST, is_seen: bool = True) -> bytes:
    """Send bytes and return what comes back; `is_seen` by a naive proxy, which sees requests in TLS to the name."""
    if IS_NAIVE and is_seen and not is_let_through(data):
        return b"refused"
    connection: ssl.SSLSocket | socket.socket = socket.create_connection((host, port), WAIT_S)
    if port == 443:
        context = ssl.create_default_context()
        context.check_hostname = False
        connection = context.wrap_socket(connection, server_hostname=name)
    heard = b""
    with connection:
        connection.sendall(data)
        connection.settimeout(QUIET_S)
        try:
            while piece := connection.recv(1 << 16):
                heard += piece
        except TimeoutError:
            pass
    return heard


def attempt(row: "dict[str, str]", printed: "dict[str, str]") -> None:
    """Make one."""
    MARK.text = row["mark"]
    try:
        printed[row["name"]] = eval(row["code"]).decode("latin-1")
    except Exception as error:
        printed[row["name"]] = f"{type(error).__name__}: {error}"


printed: "dict[str, str]" = {}
threads = [threading.Thread(target=attempt, args=(row, printed)) for row in TOLD]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(json.dumps(printed))
