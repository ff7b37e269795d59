"""What is served over HTTP: an index of Python packages, an npm registry, Go modules, git repositories, WebSockets.

Each package is called `harmless` and says so; a Python one needs another, `harmless-more`. `reaching-source` has no
wheel: its build tries to reach `good.example`, by name and by address, and its wheel says whether it did.
"""

from __future__ import annotations

import base64
import functools
import gzip
import hashlib
import io
import json
import os
import struct
import subprocess
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote, unquote, urlencode

from tests.harness import model_servers
from tests.harness.packages import make_source

from .logins import account, token_server
from .providers import answers, run_backend
from .web import Reader, Request, Response, Site

PIECE = bytes(1 << 18)
REACHES = """
def reaches():
    import socket, urllib.request
    worked = []
    for try_it in (
        lambda: urllib.request.urlopen("https://good.example/", timeout=5).close(),
        lambda: socket.create_connection(("93.184.216.34", 443), timeout=5).close(),
        lambda: socket.getaddrinfo("good.example", 443),
    ):
        try:
            try_it()
            worked.append(True)
        except OSError:
            worked.append(False)
    return worked
"""
BUILDS = """
plain = build_wheel
def build_wheel(*given):
    said = json.load(open("content.json"))
    said["files"]["reaching_source.py"] = f"REACHED = {reaches()!r}"
    json.dump(said, open("content.json", "w"))
    return plain(*given)
"""
# Hosts that send a request's headers back, credentials among them.
ECHOING = ("api.anthropic.com", "api.openai.com", "github.com")
# What a login's answer has; the refresh token too, with other ends.
BORN = "sk-ant-oat01-BornInAnAnswer0123456789abcdef"
FORMS: dict[str, Callable[[bytes], bytes]] = {
    "plain": bytes,
    "hex": lambda text: text.hex().encode(),
    "base64": base64.b64encode,
    "percent": lambda text: quote(text, safe="").encode(),
    "json": lambda text: json.dumps({"head": text.decode()}).encode(),
}
NOT_FOUND = Response(b"there is no such thing\n", "404 Not Found")
FOUND = "302 Found"
WEBSOCKET_KEY = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
DATE = (2024, 1, 1, 0, 0, 0)


def site_of(folder: Path) -> Site:
    """Return what answers for all names; repositories are made below the folder when they are asked for."""
    sites: dict[str, Site] = {
        "index.example": index,
        "files.example": index,
        "registry.example": registry,
        "modules.example": modules,
        "git.example": functools.partial(repository, folder),
        **dict.fromkeys(ECHOING, echo_head),
        "platform.claude.com": login,
        "auth.openai.com": lambda request, _: token_server(request),
        "oauth2.googleapis.com": lambda request, _: token_server(request),
    }

    stand_ins = answers(folder, registry, index)

    def answer(request: Request, reader: Reader) -> Response | None:
        if (scripted := model_servers.answer(request)) is not None:
            return scripted
        upgrade = request.headers.get("upgrade", "").lower()
        if upgrade == "websocket" and "sec-websocket-key" in request.headers:
            return websocket(request, reader)
        prefix, stand_in = stand_ins.get(request.host, (None, None))
        if stand_in is not None and request.path.startswith(prefix):
            return stand_in(request)
        return sites.get(request.host, plain)(request, reader)

    return answer


def plain(request: Request, _reader: Reader) -> Response:
    """Say who answers; `/redirect/HEX` leads to that URL, `/bytes/N` is so long.

    `/echo` is the request's body, and `/target` its target.
    """
    what, _, argument = request.path.removeprefix("/").partition("/")
    if what == "redirect":
        return Response(b"", FOUND, {"Location": bytes.fromhex(argument).decode()})
    if what == "bytes":
        return Response(_zeros(int(argument)), headers={"Content-Length": argument})
    if what in ("echo", "target"):
        return Response(request.body if what == "echo" else request.target.encode())
    return Response(f"HELLO from {request.address}:{request.port} for {request.host}\n".encode())


def echo_head(request: Request, reader: Reader) -> Response:
    """Send a request's headers back, in the form that its path names; `/redirect/HEX` leads to that URL."""
    what, _, argument = request.path.removeprefix("/").partition("/")
    if what == "api":
        return account(request)
    if what == "me" and "authorization" not in request.headers:  # git shows none before it is asked for
        return Response(b"", "401 Unauthorized", {"WWW-Authenticate": 'Basic realm="tests"'})
    text = "\n".join(f"{name}: {value}" for name, value in request.headers.items()).encode()
    if what == "only":  # with a token that ends so
        ends_so = request.headers.get("authorization", "").endswith(argument)
        return Response(text, "200 OK" if ends_so else "401 Unauthorized")
    if what == "gzip":
        return Response(gzip.compress(text), headers={"Content-Encoding": "gzip"})
    if what == "header":
        return Response(b"", headers={"X-Echo": text.decode().replace("\n", " ")})
    if what == "chunked":
        return Response(_in_chunks(text), headers={"Transfer-Encoding": "chunked"})
    if what == "trailer":
        return Response(iter([b"0\r\nX-Echo: " + text.replace(b"\n", b" ") + b"\r\n\r\n"]), headers={
            "Transfer-Encoding": "chunked"
        })  # fmt: skip
    return Response(FORMS[what](text)) if what in FORMS else plain(request, reader)


def login(request: Request, reader: Reader) -> Response:
    """Answer with tokens, at any path whose end is `token`, in the form that the request's `X-Form` names.

    Without that header a login is that of the token server.
    """
    form = request.headers.get("x-form", "")
    if (not form and b"grant_type" in request.body) or request.path in ("/state", "/v1/oauth/revoke"):
        return token_server(request)
    tokens = {"access_token": BORN, "refresh_token": f"{BORN}-refresh", "expires_in": 3600}
    if not unquote(request.path).rstrip("/").endswith("token"):
        return plain(request, reader)
    if form == "form":
        text = urlencode(tokens)
        return Response(text.encode(), headers={"Content-Type": "application/x-www-form-urlencoded"})
    text = json.dumps({"account": {"id_token": BORN, "again": f"is {BORN}"}} if form == "nested" else tokens)
    if form == "escaped":
        text = text.replace(BORN, "".join(f"\\u{ord(character):04X}" for character in BORN))
    return Response(text.encode(), headers={"Content-Type": "text/plain" if form == "text" else "application/json"})


def _in_chunks(text: bytes) -> Iterator[bytes]:
    for at in range(0, len(text), 7):
        piece = text[at : at + 7]
        yield b"%x\r\n%b\r\n" % (len(piece), piece)
    yield b"0\r\n\r\n"


def _zeros(size: int) -> Iterator[bytes]:
    view = memoryview(PIECE)
    while size > 0:
        yield bytes(view[:size]) if size < len(PIECE) else PIECE
        size -= len(PIECE)


def websocket(request: Request, reader: Reader) -> None:
    """Take a WebSocket and send each message back."""
    key = hashlib.sha1(request.headers["sec-websocket-key"].encode() + WEBSOCKET_KEY).digest()  # as RFC 6455 has it
    head = "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: "
    if request.host in ECHOING:
        _tell_head(request, reader, head.encode() + base64.b64encode(key) + b"\r\n")
        return
    reader.stream.send(head.encode() + base64.b64encode(key) + b"\r\n\r\n")
    while len(start := reader.exactly(2)) == 2:
        code, size = start[0] & 15, start[1] & 127
        if size > 125:
            size = int.from_bytes(reader.exactly(2 if size == 126 else 8), "big")
        mask = reader.exactly(4)
        data = bytes(byte ^ mask[at % 4] for at, byte in enumerate(reader.exactly(size)))
        length = bytes([size]) if size < 126 else b"\x7e" + struct.pack("!H", size)
        reader.stream.send(bytes([0x80 | code]) + length + data)
        if code == 8:
            return


def _tell_head(request: Request, reader: Reader, head: bytes) -> None:
    """Send a request's headers as a message in parts, with a ping between; compressed in one where that is offered."""
    text = "\n".join(f"{name}: {value}" for name, value in request.headers.items()).encode()
    if "permessage-deflate" in request.headers.get("sec-websocket-extensions", ""):
        packer = zlib.compressobj(wbits=-15)
        packed = (packer.compress(text) + packer.flush(zlib.Z_SYNC_FLUSH)).removesuffix(b"\0\0\xff\xff")
        frames = b"\xc1\x7e" + struct.pack("!H", len(packed)) + packed
        head += b"Sec-WebSocket-Extensions: permessage-deflate\r\n"
    else:
        parts = [text[at : at + 7] for at in range(0, len(text), 7)]
        frames = b"".join(bytes([0 if at else 1, len(part)]) + part + b"\x89\0" for at, part in enumerate(parts))
        frames += b"\x80\0"
    reader.stream.send(head + b"\r\n" + frames)
    while reader.more():
        pass


def index(request: Request, _reader: Reader | None = None) -> Response:
    """Serve PEP 503's pages at `index.example`, with hashes, and the files at `files.example`.

    Who accepts nothing but PEP 691's JSON has what Cloche's own step reads of that.
    """
    name = request.path.strip("/").rpartition("/")[2]
    if request.host == "files.example" or request.path.startswith("/files/"):
        found = wheels().get(name.removesuffix(".metadata"))
        if found is None:
            return NOT_FOUND
        return Response(_metadata(name) if name.endswith(".metadata") else found)
    base = "https://files.example" if request.host == "index.example" else f"https://{request.host}/files"
    files = [file for file in wheels() if file.startswith(f"{name.replace('-', '_')}-")]
    if not files:
        return NOT_FOUND
    if request.headers.get("accept") == "application/vnd.pypi.simple.v1+json":
        rows = [{"filename": file, "url": f"{base}/{file}"} for file in files]
        return Response(json.dumps({"files": rows}).encode(), headers={"Content-Type": "application/json"})
    links = (
        f'<a href="{base}/{file}#sha256={hashlib.sha256(wheels()[file]).hexdigest()}"{_beside(file)}>{file}</a>'
        for file in files
    )
    page = f"<!DOCTYPE html><html><body>{''.join(links)}</body></html>"
    return Response(page.encode(), headers={"Content-Type": "text/html"})


def _beside(file: str) -> str:
    is_wheel = file.endswith(".whl")
    return f' data-core-metadata="sha256={hashlib.sha256(_metadata(file)).hexdigest()}"' if is_wheel else ""


def _metadata(file: str) -> bytes:
    name = file.partition("-")[0]
    needs = "Requires-Dist: harmless-more\n" if name == "harmless" else ""
    return f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 1.0\n{needs}".encode()


@functools.cache
def wheels() -> dict[str, bytes]:
    """Return the wheels by their names, and a source."""
    found = {f"{name}-1.0-py3-none-any.whl": _wheel(name) for name in ("harmless", "harmless_more")}
    source = make_source("reaching_source", backend=REACHES + BUILDS, build_requires=("harmless-more",))
    return {**found, "reaching_source-1.0.tar.gz": source}


def _wheel(name: str) -> bytes:
    inside = f"{name}-1.0.dist-info"
    files = {
        f"{name}.py": b"WORD = 'harmless'\n",
        f"{inside}/METADATA": _metadata(name),
        f"{inside}/WHEEL": b"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = []
    for path, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        rows.append(f"{path},sha256={digest},{len(data)}\n")
    return _zip({**files, f"{inside}/RECORD": "".join([*rows, f"{inside}/RECORD,,\n"]).encode()})


def _zip(files: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for path, data in files.items():
            archive.writestr(zipfile.ZipInfo(path, DATE), data)
    return packed.getvalue()


def registry(request: Request, _reader: Reader | None = None) -> Response:
    """Serve one package as npm's registry does."""
    if request.path.endswith(".tgz"):
        return Response(package(), headers={"Content-Type": "application/octet-stream"})
    if request.path != "/harmless":
        return NOT_FOUND
    digests = {
        "shasum": hashlib.sha1(package()).hexdigest(),
        "integrity": "sha512-" + base64.b64encode(hashlib.sha512(package()).digest()).decode(),
    }
    tarball = f"https://{request.host}/harmless/-/harmless-1.0.0.tgz"
    version = {"name": "harmless", "version": "1.0.0", "dist": {"tarball": tarball, **digests}}
    found = {"name": "harmless", "dist-tags": {"latest": "1.0.0"}, "versions": {"1.0.0": version}}
    return Response(json.dumps(found).encode(), headers={"Content-Type": "application/json"})


@functools.cache
def package() -> bytes:
    """Return the tarball of the npm package."""
    packed = io.BytesIO()
    files = {"package.json": b'{"name": "harmless", "version": "1.0.0"}', "index.js": b'module.exports = "harmless"\n'}
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, data in files.items():
            entry = tarfile.TarInfo(f"package/{name}")
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return packed.getvalue()


def modules(request: Request, _reader: Reader) -> Response:
    """Serve one Go module as a module proxy does."""
    module = "harmless.example/harmless"
    mod = f"module {module}\n\ngo 1.19\n".encode()
    inside = f"{module}@v1.0.0/"
    files = {
        "list": b"v1.0.0\n",
        "v1.0.0.info": b'{"Version": "v1.0.0", "Time": "2024-01-01T00:00:00Z"}',
        "v1.0.0.mod": mod,
        "v1.0.0.zip": _zip({
            f"{inside}go.mod": mod,
            f"{inside}harmless.go": b'package harmless\n\nconst Word = "harmless"\n',
        }),
    }  # fmt: skip
    found = files.get(request.path.removeprefix(f"/{module}/@v/"))
    return Response(found) if found else NOT_FOUND


def repository(folder: Path, request: Request, _reader: Reader) -> Response:
    """Serve git repositories by git's own program."""
    return run_backend(_made_repositories(folder), request, {})


@functools.cache
def _made_repositories(folder: Path) -> Path:
    """Make a repository with one commit."""
    root, work = folder / "git", folder / "work"
    env = {"PATH": os.environ["PATH"], "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1", "HOME": "/"}
    words = ("git", "-c", "user.name=Tests", "-c", "user.email=tests@git.example")
    subprocess.run([*words, "init", "--quiet", str(work)], env=env, check=True)
    (work / "harmless.txt").write_text("harmless\n")
    for rest in (["add", "."], ["commit", "--quiet", "--message=First"]):
        subprocess.run([*words, "-C", str(work), *rest], env=env, check=True)
    subprocess.run([*words, "clone", "--quiet", "--bare", str(work), str(root / "harmless.git")], env=env, check=True)
    return root
