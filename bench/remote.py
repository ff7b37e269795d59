"""Measure the backend `cloche` over loopback TLS: `python -m bench.remote [--rounds N] [--mib N] [--json FILE]`.

A run over a connection that is kept against the same run of backend `local`, in turns. Then a file of so many MiB up
into a live sandbox and down again, against the same bytes by plain HTTPS between two processes, in turns.
Transfers of a sandbox of this host are the floor below that: the same work inside, without a service.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import http.client
import json
import os
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import cloche
from cloche.backends.cloche import ClocheBackend
from cloche.core.remote import RemoteAccount
from tests.harness.remote import serving_tls

CODE, WARM_UP, PIECE = "print(1)", 20, 1 << 18
# Plain HTTPS: a threaded server of the standard library that keeps what was put, in a process of its own.
SERVER = """
import http.server, ssl, sys
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_PUT(self):
        left = int(self.headers["Content-Length"])
        with open("kept", "wb") as file:
            while left:
                piece = self.rfile.read(min(left, 1 << 18))
                file.write(piece)
                left -= len(piece)
        self.send_response(201)
        self.send_header("Content-Length", "0")
        self.end_headers()
    def do_GET(self):
        with open("kept", "rb") as file:
            self.send_response(200)
            self.send_header("Content-Length", str(file.seek(0, 2)))
            self.end_headers()
            file.seek(0)
            while piece := file.read(1 << 18):
                self.wfile.write(piece)
    def log_message(self, *_): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain(*sys.argv[1:3])
server.socket = context.wrap_socket(server.socket, server_side=True)
print(server.server_address[1], flush=True)
server.serve_forever()
"""


def main() -> int:
    options = _options()
    report: dict[str, Any] = {"user": "root" if os.geteuid() == 0 else "an ordinary user"}
    with tempfile.TemporaryDirectory(prefix="bench-remote-") as folder, serving_tls(Path(folder)) as (_, account):
        backend = ClocheBackend(account)
        report["runs"] = _runs(backend, options.rounds)
        report["runs in one loop"] = asyncio.run(_runs_in_loop(backend, options.rounds))
        server = Path(folder) / "certificates" / "server"
        report["files"] = _files(backend, account, server, options.mib << 20, options.transfers)
    report["mib"] = options.mib
    _show(report)
    if options.json:
        Path(options.json).write_text(f"{json.dumps(report)}\n")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.remote", description=__doc__)
    parser.add_argument("--rounds", type=int, default=300, help="turns of single runs (default 300)")
    parser.add_argument("--mib", type=int, default=100, help="size of the file (default 100)")
    parser.add_argument("--transfers", type=int, default=5, help="turns of transfers (default 5)")
    parser.add_argument("--json", help="write all figures to this file")
    return parser.parse_args()


def _runs(backend: ClocheBackend, rounds: int) -> dict[str, list[float]]:
    """Time blocking runs in turns."""
    rows: dict[str, list[float]] = {"local": [], "cloche": []}
    for turn in range(WARM_UP + rounds):
        for name, kind in (("local", "local"), ("cloche", backend)):
            began = time.perf_counter()
            result = cloche.run(CODE, backend=kind)
            if turn >= WARM_UP:
                rows[name].append(time.perf_counter() - began)
            assert result.stdout == "1\n", result
    return rows


async def _runs_in_loop(backend: ClocheBackend, rounds: int) -> dict[str, list[float]]:
    """Time runs of one event loop in turns."""
    rows: dict[str, list[float]] = {"local": [], "cloche": []}
    for turn in range(WARM_UP + rounds):
        for name, kind in (("local", "local"), ("cloche", backend)):
            began = time.perf_counter()
            await cloche.arun(CODE, backend=kind)
            if turn >= WARM_UP:
                rows[name].append(time.perf_counter() - began)
    return rows


def _files(
    backend: ClocheBackend, account: RemoteAccount, server: Path, size: int, turns: int
) -> dict[str, dict[str, list[float]]]:
    """Time transfers in turns: up and down, each in seconds."""
    data = hashlib.shake_128(b"cloche").digest(1 << 20) * (size >> 20)
    rows: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory(prefix="bench-https-") as folder:
        program = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(server / "cert.pem"), str(server / "key.pem")], cwd=folder,
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            assert program.stdout is not None
            port = int(program.stdout.readline())
            for _ in range(turns):
                for name, (up, down) in (
                    ("plain HTTPS", _plain(port, account.ca_file, data)),
                    ("cloche", asyncio.run(_living(backend, data))),
                    ("local", asyncio.run(_living("local", data))),
                ):
                    row = rows.setdefault(name, {"up": [], "down": []})
                    row["up"].append(up)
                    row["down"].append(down)
        finally:
            program.kill()
            program.wait()
    return rows


def _plain(port: int, ca_file: str, data: bytes) -> tuple[float, float]:
    connection = http.client.HTTPSConnection("127.0.0.1", port, context=ssl.create_default_context(cafile=ca_file))
    connection.connect()
    began = time.perf_counter()
    connection.request("PUT", "/", data)
    connection.getresponse().read()
    middle = time.perf_counter()
    connection.request("GET", "/")
    answer, size = connection.getresponse(), 0
    while piece := answer.read(PIECE):
        size += len(piece)
    ended = time.perf_counter()
    connection.close()
    assert size == len(data)
    return middle - began, ended - middle


async def _living(backend: ClocheBackend | str, data: bytes) -> tuple[float, float]:
    async with cloche.AsyncSandbox(backend=backend, live=True, disk="512m", memory="1g") as sandbox:
        live = sandbox._require_live("this")
        await sandbox.write_file("small", b"1")
        began = time.perf_counter()
        await live.write_path("big", data)
        middle = time.perf_counter()
        size = 0
        pieces: AsyncIterator[bytes] = live.read_stream("big")  # type: ignore[attr-defined]
        async for piece in pieces:
            size += len(piece)
        ended = time.perf_counter()
    assert size == len(data)
    return middle - began, ended - middle


def _show(report: dict[str, Any]) -> None:
    print(f"as {report['user']}, {os.cpu_count()} processors")
    for kind in ("runs", "runs in one loop"):
        found = {}
        for name, times in report[kind].items():
            found[name] = statistics.median(times)
            p99 = statistics.quantiles(times, n=100)[98]
            print(f"{kind}: {name:8} p50 {found[name] * 1e3:7.2f} ms   p99 {p99 * 1e3:7.2f} ms")
        print(f"{kind}: cloche - local: {(found['cloche'] - found['local']) * 1e3:.2f} ms at the median (5)")
    rates = {
        name: {way: report["mib"] / statistics.median(times) for way, times in row.items()}
        for name, row in report["files"].items()
    }
    for name, row in rates.items():
        print(f"{report['mib']} MiB: {name:12} up {row['up']:6.0f} MiB/s   down {row['down']:6.0f} MiB/s")
    for way in ("up", "down"):
        print(f"{way}: cloche / plain HTTPS {rates['cloche'][way] / rates['plain HTTPS'][way]:.2f} (0.5)")


if __name__ == "__main__":
    sys.exit(main())
