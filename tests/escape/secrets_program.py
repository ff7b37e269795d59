"""Make attempts on a secret: the inside of test_secrets.py, which puts constants before this text.

It imports nothing of ours. Each row's code is a function's body; what it returns is printed as text.
"""

import base64
import gzip  # noqa: F401 - for rows
import json
import os
import socket
import ssl
import textwrap
import threading
import urllib.error
import urllib.parse
import urllib.request

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    HOST = OTHER = FOREIGN = ADDRESS = MAPS = LAB = LOGIN = FORM = ""
    TOLD: "list[dict[str, str]]" = []

K = os.environ["ANTHROPIC_API_KEY"]
OPENAI, M = os.environ["OPENAI_API_KEY"], os.environ["MAPS_KEY"]
WAIT_S, QUIET_S = 8.0, 1.0
MARK = threading.local()
key = {"x-api-key": K}


def request(
    target: str, headers: "dict[str, str]", *, host: str = HOST, method: str = "GET", ends: bool = True,
    more: "tuple[str, str] | None" = None,
) -> bytes:  # fmt: skip
    """Write a request; a header marks the attempt."""
    rows = [("Host", host), ("X-Mark", MARK.text), *headers.items(), *([more] if more else [])]
    lines = "".join(f"{name}: {value}\r\n" for name, value in rows)
    return f"{method} {target} HTTP/1.1\r\n{lines}\r\n".encode("latin-1")


def raw(host: str, data: bytes, *, port: int = 443, name: str = "", protocols: "list[str] | None" = None) -> bytes:
    """Send bytes and return what comes back; on port 443 in TLS, whoever answers there."""
    connection: Any = socket.create_connection((host, port), WAIT_S)
    if port == 443:
        context = ssl.create_default_context()
        context.check_hostname = False
        if protocols:
            context.set_alpn_protocols(protocols)
            data += MARK.text.encode()
        connection = context.wrap_socket(connection, server_hostname=name or host)
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


def ask(path: str, headers: "dict[str, str]") -> bytes:
    """Ask the secret's host, as programs do, and return the body of the answer."""
    asked = urllib.request.Request(f"https://{HOST}{path}", headers={"X-Mark": MARK.text, **headers})
    try:
        with urllib.request.urlopen(asked, timeout=WAIT_S) as answer:
            return answer.read()
    except urllib.error.HTTPError as error:
        return b"%d %b" % (error.code, error.read())


def post(
    host: str, target: str, body: "bytes | str | dict[str, Any]", kind: str = "application/json", **more: str
) -> bytes:  # fmt: skip
    """Send a body to a host, and return the body of its answer."""
    if isinstance(body, dict):
        body = json.dumps(body)
    body = body.encode() if isinstance(body, str) else body
    headers = {"Content-Type": kind, "Content-Length": str(len(body)), "Connection": "close"}
    headers |= {name.replace("_", "-"): value for name, value in more.items()}
    return raw(host, request(target, headers, host=host, method="POST") + body).partition(b"\r\n\r\n")[2]


def tokens(target: str = "/v1/oauth/token", **more: str) -> "dict[str, Any]":
    """Log in, and return the tokens of the answer."""
    return json.loads(
        post(LOGIN, target, {"grant_type": "authorization_code", "code": "abc"}, **{"X_Form": "plain", **more})
    )


def basic(user: str, password: str) -> str:
    """Return Basic credentials."""
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def unpacked(text: bytes) -> bytes:
    """Return Basic credentials of an echo as they were packed."""
    return base64.b64decode(
        text.lower().partition(b"authorization: basic ")[2] and text.partition(b"asic ")[2].split()[0]
    )


def everything() -> bytes:
    """Return all environments, and all files that a value could be in."""
    found = b""
    for folder in ("/proc/self", "/proc/1", "/etc/cloche", "/dev/shm", os.getcwd()):
        for at, _, names in os.walk(folder):
            for name in names if at == folder else ():
                try:
                    with open(os.path.join(at, name), "rb") as file:
                        found += file.read(1 << 20) if name in ("environ", "cmdline") or at[:5] != "/proc" else b""
                except OSError:
                    continue
    return found


def attempt(row: "dict[str, str]", printed: "dict[str, str]") -> None:
    """Make one."""
    MARK.text = row["mark"]
    code = f"def made():\n{textwrap.indent(textwrap.dedent(row['code']), '    ')}\n"
    try:
        exec(code, globals(), names := {})
        printed[row["name"]] = names["made"]().decode("latin-1")
    except Exception as error:
        printed[row["name"]] = f"{type(error).__name__}: {error}"


printed: "dict[str, str]" = {}
threads = [threading.Thread(target=attempt, args=(row, printed)) for row in TOLD]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(json.dumps(printed))
