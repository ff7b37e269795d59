"""Wheels made in a test, and an index that serves them: the simple API with hashes, on loopback."""

from __future__ import annotations

import hashlib
import io
import threading
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TAG = "py3-none-any"


def make_wheel(
    name: str,
    version: str = "1.0",
    files: Mapping[str, str | bytes] | None = None,
    *,
    requires: tuple[str, ...] = (),
    scripts: Mapping[str, str] | None = None,
    odd: Mapping[zipfile.ZipInfo, bytes] | None = None,
) -> bytes:
    """Return a wheel with these files; `odd` entries are written as they are."""
    info = f"{name}-{version}.dist-info"
    metadata = "".join(f"Requires-Dist: {one}\n" for one in requires)
    entry_points = "".join(f"{command} = {target}\n" for command, target in (scripts or {}).items())
    whole: dict[str, str | bytes] = {
        **(files or {f"{name}.py": f"NAME = {name!r}\nVERSION = {version!r}\n"}),
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{metadata}",
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {TAG}\n",
        f"{info}/entry_points.txt": f"[console_scripts]\n{entry_points}",
        f"{info}/RECORD": "",
    }
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as wheel:
        for path, content in whole.items():
            wheel.writestr(path, content)
        for entry, data in (odd or {}).items():
            wheel.writestr(entry, data)
    return buffer.getvalue()


@dataclass
class PackageIndex:
    """Be an index: its address, its wheels by file name, and what it was asked for, with who asked."""

    url: str = ""
    wheels: dict[str, bytes] = field(default_factory=dict)
    sent: dict[str, bytes] = field(default_factory=dict)  # in place of the wheel that is listed
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    password: str = ""  # that is needed, if any

    def add(self, name: str, version: str = "1.0", files: Mapping[str, str | bytes] | None = None, **more: Any) -> str:
        """Add a wheel; return the name of its file."""
        file = f"{name}-{version}-{TAG}.whl"
        self.wheels[file] = make_wheel(name, version, files, **more)
        return file

    def downloads(self) -> list[str]:
        """Return the names of the files that were downloaded whole."""
        paths = [path for path, _ in self.asked if path.startswith("/files/") and path.endswith(".whl")]
        return [path.rpartition("/")[2] for path in paths]


def metadata_of(wheel: bytes) -> bytes:
    """Return the metadata of a wheel, which an index serves beside it."""
    with zipfile.ZipFile(io.BytesIO(wheel)) as opened:
        return next(opened.read(name) for name in opened.namelist() if name.endswith(".dist-info/METADATA"))


def sha256_of(data: bytes) -> str:
    """Return a hash as an index lists it."""
    return hashlib.sha256(data).hexdigest()


@contextmanager
def serving_packages() -> Iterator[PackageIndex]:
    """Serve an index while the block runs."""
    index = PackageIndex()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            index.asked.append((self.path, self.headers.get("Authorization")))
            if index.password and self.headers.get("Authorization") is None:
                self.answer(401, b"", {"WWW-Authenticate": 'Basic realm="packages"'})
                return
            _, kind, name, *_ = [*self.path.split("/"), "", ""]
            if kind == "files":
                whole = name.removesuffix(".metadata")
                file = index.wheels.get(whole) if name != whole else index.sent.get(name, index.wheels.get(name))
                file = metadata_of(file) if file is not None and name != whole else file
                self.answer(404 if file is None else 200, file or b"", {"Content-Type": "application/zip"})
                return
            found = [file for file in index.wheels if file.partition("-")[0].replace("_", "-") == name]
            rows = "".join(
                f'<a href="/files/{file}#sha256={sha256_of(index.wheels[file])}" '
                f'data-core-metadata="sha256={sha256_of(metadata_of(index.wheels[file]))}">{file}</a>\n'
                for file in found
            )
            page = f"<!DOCTYPE html><html><body>{rows}</body></html>".encode()
            self.answer(200 if found else 404, page, {"Content-Type": "text/html"})

        def do_HEAD(self) -> None:
            self.answer(405, b"", {})

        def answer(self, code: int, body: bytes, headers: Mapping[str, str]) -> None:
            self.send_response(code)
            for key, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(key, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    index.url = f"http://127.0.0.1:{server.server_port}/simple"
    try:
        yield index
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
