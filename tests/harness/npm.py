"""Packages of npm made in a test, and a registry that serves them as npm's does, on loopback."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import tarfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

Odd = Sequence[tuple[tarfile.TarInfo, bytes]]


def make_tarball(description: Mapping[str, Any], files: Mapping[str, str], *, odd: Odd = ()) -> bytes:
    """Return a tarball with these files; `odd` entries are written as they are."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, text in {"package.json": json.dumps(description), **files}.items():
            entry = tarfile.TarInfo(f"package/{name}")
            entry.size = len(text.encode())
            archive.addfile(entry, io.BytesIO(text.encode()))
        for entry, data in odd:
            entry.size = entry.size or len(data)
            archive.addfile(entry, io.BytesIO(data) if entry.isreg() else None)
    return packed.getvalue()


@dataclass
class NpmRegistry:
    """Be a registry: its address, its packages by name and version, and what it was asked for, with who asked."""

    url: str = ""
    descriptions: dict[str, dict[str, Any]] = field(default_factory=dict)
    times: dict[str, dict[str, str]] = field(default_factory=dict)
    tarballs: dict[str, bytes] = field(default_factory=dict)
    sent: dict[str, bytes] = field(default_factory=dict)  # in place of the tarball that is listed
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    token: str = ""  # that is needed, if any
    files_at: str = ""  # where it says that its tarballs are, if not at itself

    def add(
        self, name: str, version: str = "1.0.0", files: Mapping[str, str] | None = None, *, odd: Odd = (),
        time: str = "2020-01-01T00:00:00.000Z", **more: Any,
    ) -> str:  # fmt: skip
        """Add a package with what its package.json says more; return the path of its tarball."""
        description = {"name": name, "version": version, **more}
        whole = files or {"index.js": f"module.exports = {json.dumps([name, version])};\n"}
        tarball = make_tarball(description, whole, odd=odd)
        path = f"/{name}/-/{name.rpartition('/')[2]}-{version}.tgz"
        self.tarballs[path] = tarball
        integrity = "sha512-" + base64.b64encode(hashlib.sha512(tarball).digest()).decode()
        dist = {"tarball": path, "integrity": integrity, "shasum": hashlib.sha1(tarball).hexdigest()}
        self.descriptions.setdefault(name, {})[version] = {**description, "dist": dist}
        self.times.setdefault(name, {})[version] = time
        return path

    def downloads(self) -> list[str]:
        """Return the paths of the tarballs that were asked for."""
        return [path for path, _ in self.asked if path.endswith(".tgz")]

    def page(self, name: str) -> bytes | None:
        """Return what the registry says of a package."""
        found = self.descriptions.get(name)
        if found is None:
            return None
        at = self.files_at or self.url
        versions = {
            version: {**one, "dist": {**one["dist"], "tarball": at + one["dist"]["tarball"]}}
            for version, one in found.items()
        }
        said = {
            "name": name, "dist-tags": {"latest": list(found)[-1]}, "versions": versions, "time": self.times[name],
        }  # fmt: skip
        return json.dumps(said).encode()


@contextmanager
def serving_npm() -> Iterator[NpmRegistry]:
    """Serve a registry while the block runs."""
    registry = NpmRegistry()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = unquote(self.path.partition("?")[0])
            registry.asked.append((path, self.headers.get("Authorization")))
            if registry.token and self.headers.get("Authorization") != f"Bearer {registry.token}":
                self.answer(401, b"{}")
            elif path in registry.tarballs:
                self.answer(200, registry.sent.get(path, registry.tarballs[path]))
            else:
                page = registry.page(path.removeprefix("/"))
                self.answer(404 if page is None else 200, page or b'{"error": "not found"}')

        def answer(self, code: int, body: bytes) -> None:
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    registry.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield registry
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
