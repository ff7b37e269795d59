"""Measure what a request's body costs: `python -m bench.bodies [--json FILE]`.

Bodies of every shape are sent to every route that takes JSON, and over the wire, to a service that measures itself: for
how long its event loop was held (<= 50 ms; of wall and processor time the less, so that other programs do not count),
and what its memory came to beyond what it was (<= 5 times the body and 4 MiB). Exits with 1 where one is above.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import re
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

from websockets.exceptions import ConnectionClosed

from cloche.init import wire as frames
from tests.harness import wire_client
from tests.harness.service import Service, start

MOST_HELD_MS, MOST_TIMES, MOST_MORE_MIB = 50.0, 5.0, 4.0
MIB = 1 << 20
WITH_FILES = ("/api/code/exec", "/api/sandboxes", "/api/sandboxes/1/exec")
TICK_S = 0.001


@dataclass(frozen=True, slots=True)
class Row:
    """Hold one figure: what was sent where, the answer, milliseconds that the loop was held, and MiB."""

    where: str
    shape: str
    status: str
    sent_mib: float
    held_ms: float
    mib: float

    @property
    def is_above(self) -> bool:
        """Tell whether it is more than it may be."""
        return self.held_ms > MOST_HELD_MS or self.mib > MOST_TIMES * self.sent_mib + MOST_MORE_MIB


def _many(item: bytes, count: int, opening: bytes = b"[", closing: bytes = b"]") -> bytes:
    return opening + b",".join([item] * count) + closing


def _keys(count: int) -> bytes:
    return b'{"code":"1",' + b",".join(b'"k%d":0' % number for number in range(count)) + b"}"


def _code(text: bytes) -> bytes:
    return b'{"wrong":0,"code":"' + text + b'"}'


def _files(count: int, file: bytes) -> bytes:
    return b'{"wrong":0,"code":"1","files":' + _many(file, count) + b"}"


# Of each kind one below the bounds, as large as it may be, and one above. Nothing of it may be run.
SHAPES: Mapping[str, Callable[[], bytes]] = {
    "19,000 unknown keys": lambda: _keys(9_500),
    "64,000 unknown keys with long names": lambda: b"{" + b",".join(b'"%064d":0' % n for n in range(15_000)) + b"}",
    "200,000 unknown keys": lambda: _keys(200_000),
    "the same key": lambda: _many(b'"wrong":"1"', 9_000, b"{", b"}"),
    "empty lists": lambda: _many(b"[]", 9_000),
    "a million empty lists": lambda: _many(b"[]", 300_000),
    "deep": lambda: b'{"code":' + b"[" * 9_000 + b"]" * 9_000 + b"}",
    "wrong arguments": lambda: b'{"code":"1","argv":' + _many(b"0", 19_000) + b"}",
    "long arguments": lambda: b'{"wrong":0,"argv":' + _many(b'"%050d"' % 0, 18_000) + b"}",
    "wrong variables": lambda: b'{"code":"1","env":{' + b",".join(b'"k%d":0' % n for n in range(9_000)) + b"}}",
    "wrong files": lambda: _files(9_000, b"{}"),
    "many files": lambda: _files(3_000, b'{"path":"a","text":"b"}'),
    "fractions": lambda: b'{"code":"1","x":' + _many(b"1.5", 19_000) + b"}",
    "long numbers": lambda: b'{"code":"1","x":' + _many(b"1" * 4_000, 250) + b"}",
    "a number of a million digits": lambda: b'{"code":' + b"1" * 1_000_000 + b"}",
    "no numbers": lambda: b'{"code":"1","timeout":' + _many(b"NaN", 19_000) + b"}",
    "line ends": lambda: _code(rb"\n" * 500_000),
    "surrogates": lambda: _code(rb"\ud83d\ude00" * 80_000),
    "half surrogates": lambda: _code(rb"\ud83d" * 160_000),
    "one emoji in a MiB": lambda: _code("😀".encode() + b"a" * (MIB - 100)),
    "spaces": lambda: b'{"code":' + b" " * (MIB - 100) + b"1}",
    "not UTF-8": lambda: _code(b"\xff" * (MIB - 100)),
}
# On routes that carry files, and over the wire in pieces.
LARGE_SHAPES: Mapping[str, Callable[[], bytes]] = {
    "65,000 unknown keys": lambda: b'{"x":"' + b"a" * 2 * MIB + b'",' + _keys(32_000)[1:],
    "long text": lambda: _code(b"a" * (31 * MIB)),
    "an emoji in long text": lambda: _code("😀".encode() + b"a" * (7 * MIB)),
    "an emoji at the end": lambda: _code(b"a" * (7 * MIB) + "😀".encode()),
    "long text of emojis": lambda: _code("😀".encode() * (2 * MIB - 100)),
    "long Chinese text": lambda: _code("中".encode() * (2 * MIB)),
    "a million line ends": lambda: _code(rb"\n" * (MIB - 2)),
    "a million escapes": lambda: _code(rb"\u4e2d" * (MIB - 2)),
    "ten thousand files": lambda: _files(9_000, b'{"path":"a","text":"%0100d"}' % 0),
    "long spaces": lambda: b'{"code":' + b" " * (31 * MIB) + b"1}",
    "long base64": lambda: _files(1, b'{"path":"a","base64":"' + b"YWJj" * (7 * MIB) + b'"}'),
    "base64 that is none": lambda: b'{"code":"1","files":[{"path":"a","base64":"' + b"YWJj" * (7 * MIB) + b'Y"}]}',
    "28 MB of unknown keys": lambda: _keys(2_000_000),
}
_FIELD = b'--b\r\nContent-Disposition: form-data; name="request"\r\n\r\n{"wrong":0}\r\n'
_FILE = b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n'
# As forms to `POST /api/code/exec`.
FORMS: Mapping[str, Callable[[], bytes]] = {
    "almost the boundary": lambda: _form(_FILE + b"\r\n" + b"\r\n--" * MIB + b"\r\n"),
    "carriage returns": lambda: _form(_FILE + b"\r\n" + b"\r" * 4 * MIB + b"\r\n"),
    "many files": lambda: _form((_FILE + b"\r\nx\r\n") * 990),
    "too many files": lambda: _form((_FILE + b"\r\nx\r\n") * 100_000),
    "many heads": lambda: _form(_FILE + b"a: b\r\n" * 500_000 + b"\r\nx\r\n"),
    "one long head": lambda: _form(_FILE + b"a: " + b"b" * 4 * MIB + b"\r\n\r\nx\r\n"),
    "before the first part": lambda: b"\r\n" * MIB + _form(b""),
    "a long field": lambda: _form(_FIELD.replace(b"0", b"0" * 4 * MIB)),
    "a field of many keys": lambda: _form(_FIELD.replace(b'{"wrong":0}', _keys(100_000))),
}


def _form(parts: bytes) -> bytes:
    return _FIELD + parts + b"--b--\r\n"


class Gauge:
    """Measure the service from inside of its own process: a task that is to have a turn each millisecond."""

    def __init__(self) -> None:
        self._held_s = 0.0
        self._before_mib = 0.0

    async def beat(self) -> None:
        """Note the longest time between two turns."""
        while True:
            wall, used = time.monotonic(), time.process_time()
            await asyncio.sleep(TICK_S)
            held = min(time.monotonic() - wall, time.process_time() - used)
            self._held_s = max(self._held_s, held)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Tell whoever asks what was since the last question."""
        while await reader.readline():
            peak = _status_mib("VmHWM")
            writer.write(f"{self._held_s * 1e3} {peak - self._before_mib}\n".encode())
            _begin_peak()
            self._held_s, self._before_mib = 0.0, _status_mib("VmRSS")


def _begin_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _status_mib(name: str) -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) / 1024


def _serve(words: list[str], place: str) -> int:
    """Serve as `cloche serve` does, and be measured."""
    from cloche.server import command
    from cloche.server.log import configure_log
    from cloche.serving.process import until_signal

    async def both() -> None:
        gauge = Gauge()
        server = await asyncio.start_unix_server(gauge.answer, place)
        beating = asyncio.ensure_future(gauge.beat())
        async with server:
            await command.serving(command.ServeCommand(port=0, database=words[words.index("--database") + 1]))
        beating.cancel()

    configure_log()
    return until_signal(both(), exit_timeout_s=30)


class Meter:
    """Ask the service for its figures."""

    def __init__(self, place: Path):
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(place))
        self._lines = self._socket.makefile("r")

    def ask(self) -> tuple[float, float]:
        """Return milliseconds held and MiB since the last question."""
        self._socket.sendall(b"\n")
        held, more = self._lines.readline().split()
        return float(held), float(more)

    def close(self) -> None:
        """Ask nothing more."""
        self._lines.close()
        self._socket.close()


def measure(folder: Path) -> Iterator[Row]:
    """Yield the figure of each shape on each route and over the wire."""
    place = folder / "gauge"
    program = ("bench.bodies", "--serve", str(place))
    service = start(folder, program=program, PYTHONPATH=str(Path(__file__).parents[1]))  # it starts elsewhere
    try:
        with closing(Meter(place)) as meter:
            key = service.new_key("run", "read", "approve")
            yield from _over_http(service, key, meter)
            yield from asyncio.run(_over_wire(service, key, meter))
    finally:
        service.end()


def routes(service: Service) -> list[tuple[str, str]]:
    """Return method and path of each route that takes JSON, ids filled in."""
    with service.client() as client:
        paths = client.get("/api/openapi.json").json()["paths"]
    return [
        (method.upper(), re.sub(r"\{\w+\}", "1", path))
        for path, methods in paths.items()
        for method, said in methods.items()
        if "application/json" in said.get("requestBody", {}).get("content", {})
    ]


def _over_http(service: Service, key: str, meter: Meter) -> Iterator[Row]:
    for method, path in routes(service):
        shapes = {**SHAPES, **(LARGE_SHAPES if path in WITH_FILES else {})}
        for name, make in shapes.items():
            body = make()
            meter.ask()
            status = _send(service, key, method, path, body)
            yield Row(f"{method} {path}", name, status, len(body) / MIB, *meter.ask())
    for name, make in FORMS.items():
        body = make()
        meter.ask()
        status = _send(service, key, "POST", "/api/code/exec", body, "multipart/form-data; boundary=b")
        yield Row("POST /api/code/exec, a form", name, status, len(body) / MIB, *meter.ask())


def _send(service: Service, key: str, method: str, path: str, body: bytes, kind: str = "application/json") -> str:
    address = urlsplit(service.address)
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=120)
    headers = {"Authorization": f"Bearer {key}", "Content-Type": kind}
    try:
        connection.request(method, path, body, headers)
        return str(connection.getresponse().status)
    except OSError:  # it was closed before all was sent
        return "closed"
    finally:
        connection.close()


async def _over_wire(service: Service, key: str, meter: Meter) -> list[Row]:
    rows = []
    for name, make in {**SHAPES, **LARGE_SHAPES}.items():
        body = make()
        for where, send in (("wire", _in_frame), ("wire, in pieces", _in_pieces)):
            if where == "wire" and len(body) > MIB:
                continue
            meter.ask()
            status = "closed"
            with suppress(ConnectionClosed):
                async with wire_client.wired(service.address, key) as wire:
                    status = await send(wire, body)
            rows.append(Row(where, name, status, len(body) / MIB, *meter.ask()))
    return rows


async def _in_frame(wire: wire_client.WireClient, body: bytes) -> str:
    """Send a call with its fields; what is no object as it is."""
    call = wire.calls[1] = wire_client.WireCall(wire, 1)
    text = b'{"verb":"code.exec",' + body[1:] if body.startswith(b"{") else body
    await wire.socket.send(frames.frame(frames.OPEN, 1, text))
    return await _status(wire, call)


async def _in_pieces(wire: wire_client.WireClient, body: bytes) -> str:
    call = await wire.begin("code.exec", fieldsOn=wire_client.JSON)
    sending = asyncio.ensure_future(call.send(body, channel=wire_client.JSON))
    try:
        return await _status(wire, call)
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)


async def _status(wire: wire_client.WireClient, call: wire_client.WireCall) -> str:
    closed = asyncio.ensure_future(wire.socket.wait_closed())
    try:
        await asyncio.wait({closed, call.result}, return_when=asyncio.FIRST_COMPLETED)
        if not call.result.done():
            return "closed"
        error = call.result.exception()
        return str(error.problem["status"]) if isinstance(error, wire_client.CallFailed) else "200"
    finally:
        closed.cancel()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.bodies", description=__doc__)
    parser.add_argument("--json", help="write all figures to this file")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options, more = parser.parse_known_args()
    if options.serve:
        return _serve(more, options.serve)
    with tempfile.TemporaryDirectory(prefix="bench-bodies-") as folder:
        rows = list(measure(Path(folder)))
    for row in sorted(rows, key=lambda row: -row.held_ms)[:20]:
        print(
            f"{row.where:44} {row.shape:32} {row.status:>6} {row.sent_mib:5.1f} MiB {row.held_ms:5.1f} ms "
            f"{row.mib:5.1f} MiB"
        )
    above = [row for row in rows if row.is_above]
    for row in above:
        print(f"above: {row}")
    print(f"{len(rows)} bodies: held {max(row.held_ms for row in rows):.1f} ms at most (50); {len(above)} above")
    if options.json:
        Path(options.json).write_text(f"{json.dumps([asdict(row) for row in rows])}\n")
    return 1 if above else 0


if __name__ == "__main__":
    sys.exit(main())
