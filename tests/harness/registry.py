"""A registry of images on loopback: as much of the distribution API as a pull takes, and ways to fail at it."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.harness.containers import IMAGES, ROOT

MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
CONFIG = "application/vnd.docker.container.image.v1+json"
LAYER = "application/vnd.docker.image.rootfs.diff.tar.gzip"  # which may be plain: docker looks
CHUNK_BYTES, PAUSE_S = 2 << 20, 0.02


class Registry:
    """Serve one image under any name and the tag `here`; `is_breaking` makes it hang up in the middle of a layer."""

    def __init__(self, image: Path):
        self.asked: list[str] = []
        self.is_breaking = False
        with tarfile.open(image) as archive:
            config, layer = (archive.extractfile(name) for name in ("config.json", "layer.tar"))
            assert config is not None
            assert layer is not None
            parts = {CONFIG: config.read(), LAYER: layer.read()}
        rows = {kind: {"mediaType": kind, "size": len(data), "digest": digest(data)} for kind, data in parts.items()}
        manifest = {"schemaVersion": 2, "mediaType": MANIFEST, "config": rows[CONFIG], "layers": [rows[LAYER]]}
        self.manifest = json.dumps(manifest).encode()
        self.blobs = {digest(data): data for data in parts.values()}
        self.digest = digest(self.manifest)
        registry = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                registry.answer(self)

            def do_HEAD(self) -> None:
                registry.answer(self)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name is the library's
                registry.asked.append(format % args)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.name = f"127.0.0.1:{self._server.server_address[1]}/cloche-test"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def answer(self, call: BaseHTTPRequestHandler) -> None:
        """Answer one request."""
        _, what, name = call.path.rsplit("/", 2)
        if call.path == "/v2/":
            self._send(call, b"{}", "application/json")
        elif what == "manifests" and name in ("here", self.digest):
            self._send(call, self.manifest, MANIFEST)
        elif what == "manifests" and name.startswith("sha256:"):  # a registry that lies
            self._send(call, self.manifest + b" ", MANIFEST)
        elif what == "blobs" and name in self.blobs:
            self._send(call, self.blobs[name], "application/octet-stream")
        else:
            said = {"errors": [{"code": "MANIFEST_UNKNOWN", "message": "manifest unknown"}]}
            self._send(call, json.dumps(said).encode(), "application/json", code=404)

    def _send(self, call: BaseHTTPRequestHandler, data: bytes, kind: str, *, code: int = 200) -> None:
        began = int(call.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        if began:  # docker goes on where a layer broke off
            code = 206
        call.send_response(code)
        if began:
            call.send_header("Content-Range", f"bytes {began}-{len(data) - 1}/{len(data)}")
        call.send_header("Content-Type", kind)
        call.send_header("Content-Length", str(len(data) - began))
        call.send_header("Docker-Distribution-Api-Version", "registry/2.0")
        if kind == MANIFEST:
            call.send_header("Docker-Content-Digest", digest(data))
        call.end_headers()
        if call.command == "HEAD":
            return
        for at in range(began, len(data), CHUNK_BYTES):
            if self.is_breaking and at > len(data) // 2:
                call.close_connection = True
                return
            call.wfile.write(data[at : at + CHUNK_BYTES])
            time.sleep(PAUSE_S)

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()


def digest(data: bytes) -> str:
    """Return what content is addressed by."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


@contextmanager
def open_registry(folder: Path, image: str) -> Iterator[Registry]:
    """Serve one of the tests' images."""
    target = folder / "image.tar"
    subprocess.run([sys.executable, ROOT / "scripts" / "sandbox_image.py", image, target, *IMAGES[image]], check=True)
    registry = Registry(target)
    target.unlink()
    try:
        yield registry
    finally:
        registry.close()
