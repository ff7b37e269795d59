"""Measure the service: `python -m bench.service [--rounds N] [--seconds N] [--minutes N] [--json FILE]`.

Side by side, in turns: a request on a connection that is kept against `python -c` as a child process; the processor
time of a run in the library's process, and in the service's, by a request and by the wire (at most 2.2 of the
library's); then requests of 8 and 32 connections, and as many calls of one wire, against the library's own runs of as
many tasks (at least 0.55), and requests as SandboxFusion's callers send them (at least 0.5); then pages of lists of
20,000 runs (at most 50 ms). With --minutes, mixed load for so long, and what memory and descriptors the service has
at the beginning and at the end. As whoever runs it; the figures say who.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from sqlalchemy import insert, select

from cloche.records.database import Database
from cloche.records.ids import new_id
from cloche.records.tables import StoredRun
from tests.harness.service import Service, serving
from tests.harness.wire_client import WireClient, wired

CODE, CLIENTS, WARM_UP = "print(1)", (8, 32), 20
TURNS, RUNS = 5, 100  # of processor time
BODY = json.dumps({"code": CODE}).encode()
# As verl sends it.
FUSION_BODY = json.dumps({
    "compile_timeout": 10, "run_timeout": 10, "code": CODE, "stdin": None, "memory_limit_MB": 1024,
    "language": "python", "files": {}, "fetch_files": [],
}).encode()  # fmt: skip
REQUESTS = {"REST": ("/api/code/exec", BODY), "run_code": ("/run_code", FUSION_BODY)}
WANTED = {"REST": 0.55, "wire": 0.55, "run_code": 0.5}
SAMPLE_S = 5.0
LISTED, LIST_ROUNDS = 20_000, 100
LAST = "?limit=200&cursor="  # is followed to the last page
LISTS = ("", "?limit=200", "?status=timeout", "?sessionId=one", "?sessionId=none", LAST)
# Of the mixed load: code, and what is sent beside it.
MIXED: tuple[dict[str, Any], ...] = (
    {"code": "print(1)"},
    {"code": "x = list(range(100_000)); sum(x)"},
    {"code": "raise SystemExit(3)"},
    {"code": "print('x' * 200_000)"},
    {"code": "open('out', 'wb').write(b'x' * 100_000)", "returnFiles": True},
    {"code": "import json; print(json.load(open('in.json')))", "files": [{"path": "in.json", "text": "[1, 2]"}]},
    {"code": "import time; time.sleep(60)", "timeout": "200ms"},
    {"code": "echo shell", "language": "bash"},
)


def main() -> int:
    options = _options()
    report: dict[str, Any] = {"user": "root" if os.geteuid() == 0 else "an ordinary user", "rows": {}}
    with (
        tempfile.TemporaryDirectory(prefix="bench-service-") as folder,
        serving(Path(folder), "--sandbox-fusion") as service,
    ):
        connection = _connect(service)
        report["rows"] = {"plain subprocess": [], "service": []}
        for turn in range(WARM_UP + options.rounds):
            plain, served = _timed(_run_plain), _timed(lambda: _post(connection, service.key, BODY))
            if turn >= WARM_UP:
                report["rows"]["plain subprocess"].append(plain)
                report["rows"]["service"].append(served)
        connection.close()
        report["processor"] = [_processor_turn(service) for _ in range(TURNS)]
        report["throughput"] = {
            count: [_rates(service, count, options.seconds / TURNS) for _ in range(TURNS)] for count in CLIENTS
        }
        if options.minutes:
            report["load"] = asyncio.run(_load(service, options.minutes * 60))
        _add_runs(service, LISTED)
        report["lists"] = {query: _list_times(service, query) for query in LISTS}
    _show(report)
    if options.json:
        Path(options.json).write_text(f"{json.dumps(report)}\n")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.service", description=__doc__)
    parser.add_argument("--rounds", type=int, default=300, help="turns of single requests (default 300)")
    parser.add_argument("--seconds", type=float, default=10.0, help="of throughput, each (default 10)")
    parser.add_argument("--minutes", type=float, default=0.0, help="of mixed load (default none)")
    parser.add_argument("--json", help="write all figures to this file")
    return parser.parse_args()


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _run_plain() -> None:
    subprocess.run([sys.executable, "-c", CODE], stdout=subprocess.PIPE, check=True)


def _connect(service: Service) -> http.client.HTTPConnection:
    address = urlsplit(service.address)
    return http.client.HTTPConnection(str(address.hostname), address.port, timeout=60)


def _post(connection: http.client.HTTPConnection, key: str, body: bytes) -> None:
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    connection.request("POST", "/api/code/exec", body, headers)
    answer = connection.getresponse()
    content = answer.read()
    assert answer.status == 200, content


def _processor_turn(service: Service) -> dict[str, float]:
    """Return seconds of processor time a run, of the library's process and of the service's."""
    found = {"library": _library(1, runs=RUNS)[1]}
    for way in ("REST", "wire"):
        _served(service, way, 1, runs=WARM_UP)
        before = _processor_s(service.process.pid)
        _served(service, way, 1, runs=RUNS)
        found[way] = (_processor_s(service.process.pid) - before) / RUNS
    return found


def _processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _rates(service: Service, count: int, seconds: float) -> dict[str, float]:
    """Return runs a second with so many at once."""
    found = {"library": _library(count, seconds=seconds)[0]}
    return found | {way: _served(service, way, count, seconds=seconds) for way in WANTED}


def _library(count: int, *, seconds: float = 0.0, runs: int = 1) -> tuple[float, float]:
    """Return runs a second of the library with so many tasks, in a process of its own, and its seconds of a run."""
    program = f"""
import asyncio, time, cloche
async def main():
    await asyncio.gather(*(cloche.arun({CODE!r}) for _ in range(max({count}, {WARM_UP}))))
    begun, used, done = time.perf_counter(), time.process_time(), 0
    async def work():
        nonlocal done
        while done < {runs} or time.perf_counter() < begun + {seconds}:
            done += 1
            await cloche.arun({CODE!r})
    await asyncio.gather(*(work() for _ in range({count})))
    print(done / (time.perf_counter() - begun), (time.process_time() - used) / done)
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, check=True)
    rate, used = map(float, done.stdout.split())
    return rate, used


def _served(service: Service, way: str, count: int, *, seconds: float = 0.0, runs: int = 1) -> float:
    """Return runs a second of so many clients, or calls of one wire, in a process of its own."""
    told = json.dumps([service.address, service.key, way, count, seconds, runs])
    done = subprocess.run([sys.executable, "-m", __spec__.name, told], stdout=subprocess.PIPE, check=True)
    return float(done.stdout)


async def _clients(address: str, key: str, way: str, count: int, seconds: float, runs: int) -> float:
    begun = time.perf_counter()
    if way == "wire":
        async with wired(address, key) as wire:
            done = await asyncio.gather(*(_calls(wire, begun + seconds, runs // count) for _ in range(count)))
    else:
        path, body = REQUESTS[way]
        each = runs // count
        done = await asyncio.gather(
            *(_client(address, key, seconds, [body], runs=each, path=path) for _ in range(count))
        )
    return sum(done) / (time.perf_counter() - begun)


async def _calls(wire: WireClient, ends: float, runs: int) -> int:
    count = 0
    while count < max(1, runs) or time.perf_counter() < ends:
        result = await wire.do("code.exec", code=CODE)
        assert result["status"] == "ok", result
        count += 1
    return count


async def _client(
    address: str, key: str, seconds: float, bodies: list[bytes], *, runs: int = 1, path: str = REQUESTS["REST"][0]
) -> int:
    """Send requests on one connection until the time is over, so many at least."""
    where = urlsplit(address)
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    heads = [
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        + body
        for body in bodies
    ]
    ends, count = time.perf_counter() + seconds, 0
    while count < max(1, runs) or time.perf_counter() < ends:
        writer.write(heads[count % len(heads)])
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        await reader.readexactly(int(length.partition(b":")[2]))
        count += 1
    writer.close()
    return count


def _add_runs(service: Service, count: int) -> None:
    """Write runs down as a worker does, with the result of a real one; every hundredth timed out, in one session."""
    database = Database(service.database)
    with database.reading() as session:
        row = session.scalars(select(StoredRun).where(StoredRun.status == "ok").limit(1)).one()
    common = {"project": row.project, "worker": row.worker, "document": row.document, "created_at": row.created_at}
    kinds: list[dict[str, Any]] = [
        {"status": "timeout", "session_id": "one"},
        *[{"status": "ok", "session_id": None}] * 99,
    ]
    with database.writing() as session:
        session.execute(insert(StoredRun), [{**common, **kinds[n % 100], "id": new_id("run")} for n in range(count)])
    database.close()


def _list_times(service: Service, query: str) -> list[float]:
    """Return the seconds that one page of a list takes, each time."""
    with service.client() as client:
        cursor = "" if query == LAST else None
        while cursor is not None:
            query = LAST + cursor if cursor else "?limit=200"
            cursor = client.get(f"/api/runs{query}").raise_for_status().json()["nextCursor"]
        return [_timed(lambda: client.get(f"/api/runs{query}").raise_for_status()) for _ in range(LIST_ROUNDS)]


async def _load(service: Service, seconds: float) -> dict[str, Any]:
    """Run mixed load and sample the service's memory (MiB) and descriptors."""
    bodies = [json.dumps(one).encode() for one in MIXED]
    clients = [
        asyncio.ensure_future(_client(service.address, service.key, seconds, bodies[n:] + bodies[:n]))
        for n in range(len(bodies))
    ]
    samples: list[tuple[float, float, int]] = []
    began = time.monotonic()
    while not all(client.done() for client in clients):
        await asyncio.sleep(SAMPLE_S)
        samples.append((time.monotonic() - began, _resident_mib(service.process.pid), _descriptors(service)))
    part = max(1, len(samples) // 5)
    first, last = samples[part : 2 * part], samples[-part:]
    return {
        "runs": sum(await asyncio.gather(*clients)), "seconds": seconds,
        **{
            name: [statistics.median(one[at] for one in rows) for rows in (first, last)]
            for name, at in (("mib", 1), ("descriptors", 2))
        },
    }  # fmt: skip


def _resident_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def _descriptors(service: Service) -> int:
    return len(os.listdir(f"/proc/{service.process.pid}/fd"))


def _show(report: dict[str, Any]) -> None:
    print(f"as {report['user']}, {os.cpu_count()} processors")
    found = {}
    for name, times in report["rows"].items():
        cuts = statistics.quantiles(times, n=100)
        found[name] = statistics.median(times), cuts[98]
        print(f"{name:20} p50 {found[name][0] * 1e3:7.2f} ms   p99 {found[name][1] * 1e3:7.2f} ms")
    (plain, plain_p99), (served, served_p99) = found["plain subprocess"], found["service"]
    print(f"service / plain: p50 {served / plain:.2f} (1), p99 of the service / p50 of plain {served_p99 / plain:.2f}")
    print(f"p99 / p99 {served_p99 / plain_p99:.2f} (3)")
    turns = report["processor"]
    for way in ("REST", "wire"):
        ratio = statistics.median(turn[way] / turn["library"] for turn in turns)
        used = statistics.median(turn[way] for turn in turns) * 1e3
        print(f"processor time of a run, {way}: {used:.2f} ms, of the library's {ratio:.2f} (2.2)")
    for count, turns in report["throughput"].items():
        for way, wanted in WANTED.items():
            ratio = statistics.median(turn[way] / turn["library"] for turn in turns)
            print(f"{count} at once, runs a second: {way} {ratio:.2f} of the library's ({wanted})")
    for query, times in report["lists"].items():
        cuts = statistics.quantiles(times, n=100)
        name = f"GET /api/runs{query} of {LISTED}"
        print(f"{name:45} p50 {statistics.median(times) * 1e3:7.2f} ms   p99 {cuts[98] * 1e3:7.2f} ms (50)")
    if "load" in report:
        load = report["load"]
        print(f"{load['runs']} runs in {load['seconds']:.0f} s: MiB {load['mib']}, descriptors {load['descriptors']}")


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("["):
        print(asyncio.run(_clients(*json.loads(sys.argv[1]))))
    else:
        sys.exit(main())
