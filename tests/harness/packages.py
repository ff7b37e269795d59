"""Wheels and sources made in a test, and an index that serves them: the simple API with hashes, on loopback."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
import threading
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

TAG = "py3-none-any"
# A backend that builds a wheel of its folder's "content.json": of this name and version, which needs this.
BACKEND = """
import json, zipfile

def build_wheel(folder, settings=None, metadata=None):
    said = json.load(open("content.json"))
    stem = f"{said['name']}-{said['version']}"
    with zipfile.ZipFile(f"{folder}/{stem}-py3-none-any.whl", "w") as wheel:
        for path, content in said["files"].items():
            wheel.writestr(path, content)
        lines = [f"Metadata-Version: 2.1", f"Name: {said['name']}", f"Version: {said['version']}"]
        lines += [f"Requires-Dist: {one}" for one in said["requires"]]
        wheel.writestr(f"{stem}.dist-info/METADATA", "\\n".join(lines) + "\\n")
        wheel.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(f"{stem}.dist-info/RECORD", "")
    return f"{stem}-py3-none-any.whl"
"""


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


def make_source(
    name: str,
    version: str = "1.0",
    *,
    backend: str = "",
    build_requires: tuple[str, ...] = (),
    requires: tuple[str, ...] = (),
    built: Mapping[str, str] | None = None,
) -> bytes:
    """Return a source distribution of which `BACKEND` makes a wheel, followed by the code of `backend`.

    `built` is what its wheel says, in place of `name` and so on. It has no metadata: only a build says what it needs.
    """
    files = {f"{name}.py": f"NAME = {name!r}\nVERSION = {version!r}\n"}
    content = {"name": name, "version": version, "requires": requires, "files": files, **(built or {})}
    system = f'[build-system]\nrequires = {json.dumps(build_requires)}\nbuild-backend = "own"\nbackend-path = ["."]\n'
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tarball:
        for path, text in {
            "PKG-INFO": f"Metadata-Version: 1.2\nName: {name}\nVersion: {version}\n", "pyproject.toml": system,
            "own.py": f"{BACKEND}\n{backend}\n", "content.json": json.dumps(content),
        }.items():  # fmt: skip
            entry = tarfile.TarInfo(f"{name}-{version}/{path}")
            entry.size = len(text.encode())
            tarball.addfile(entry, io.BytesIO(text.encode()))
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

    def add_source(self, name: str, version: str = "1.0", **more: Any) -> str:
        """Add a source distribution, by what `make_source` takes; return the name of its file."""
        file = f"{name}-{version}.tar.gz"
        self.wheels[file] = make_source(name, version, **more)
        return file

    def downloads(self) -> list[str]:
        """Return the names of the files that were downloaded whole."""
        paths = [path for path, _ in self.asked if path.startswith("/files/") and not path.endswith(".metadata")]
        return [path.rpartition("/")[2] for path in paths]


def metadata_of(wheel: bytes) -> bytes:
    """Return the metadata of a wheel, which an index serves beside it."""
    with zipfile.ZipFile(io.BytesIO(wheel)) as opened:
        return next(opened.read(name) for name in opened.namelist() if name.endswith(".dist-info/METADATA"))


def row_of(file: str, data: bytes) -> str:
    """Return a file as the page of an index lists it."""
    says = f' data-core-metadata="sha256={sha256_of(metadata_of(data))}"' if file.endswith(".whl") else ""
    return f'<a href="/files/{file}#sha256={sha256_of(data)}"{says}>{file}</a>\n'


def sha256_of(data: bytes) -> str:
    """Return a hash as an index lists it."""
    return hashlib.sha256(data).hexdigest()


@contextmanager
def own_index(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PackageIndex]:
    """Serve an index, which this user's environment alone names, and give an empty store below a folder."""
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_", "NETRC"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_DATA_HOME", str(folder / "data"))
    with serving_packages() as served:
        monkeypatch.setenv("UV_DEFAULT_INDEX", served.url)
        yield served


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
            rows = "".join(row_of(file, index.wheels[file]) for file in found)
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
