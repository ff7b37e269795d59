"""Measure E2B's protocol: `python -m bench.e2b [--rounds N] [--seconds N] [--json FILE]`, as root.

E2B's own SDK against `cloche serve --e2b`, each figure beside its reference in one run, turn by turn:
`Sandbox.create()` and `docker run` of an image of this system until its HTTP port answers; `run_code("1+1")` and the
same cell in jupyter-server with ipykernel (requirements/frameworks/jupyter.txt); `commands.run("true")` and the same
words without a sandbox; `files.write` and `read` of 10 MB and the library's; then 32 clients in loops, each with a
sandbox of its own.
How many idle sandboxes there is room for is `bench.e2b_density`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from e2b_code_interpreter import AsyncSandbox, Sandbox
from websockets.sync.client import ClientConnection, connect

import cloche
from tests.harness.containers import Daemon, open_daemon
from tests.harness.e2b import E2BService, serving, variables

ROOT = Path(__file__).parents[1]
JUPYTER = ROOT / "build/frameworks/jupyter"
IMAGE = "cloche-test:python"
WARM_UP, LARGE = 3, os.urandom(10_000_000)
CLIENTS, PROCESSES = 32, 4
READY_S = 60.0
# What is wanted of the ratio to the reference, and of the milliseconds.
WANTED: Mapping[str, tuple[float | None, float | None]] = {
    "Sandbox.create()": (0.1, 30.0),
    'run_code("1+1")': (0.5, 8.0),
    "the same, acknowledged at once": (None, 8.0),
    'commands.run("true")': (None, 12.0),
    "files.write and read, 10 MB": (2.0, None),
}
Work = Callable[[], object]


def main() -> int:
    options = _options()
    subprocess.run([ROOT / "scripts/frameworks.sh", "jupyter", JUPYTER], check=True)
    report: dict[str, Any] = {"processors": os.cpu_count(), "rows": {}, "clients": []}
    with tempfile.TemporaryDirectory(prefix="bench-e2b-") as folder, serving(Path(folder)) as e2b, variables(e2b):
        with _rows(Path(folder)) as rows:
            for name, (ours, theirs) in rows.items():
                report["rows"][name] = _turns(ours, theirs, options.rounds)
        report["clients"] = _clients(e2b, options.seconds)
    _show(report)
    if options.json:
        options.json.write_text(f"{json.dumps(report)}\n")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.e2b", description=__doc__)
    parser.add_argument("--rounds", type=int, default=40, help="turns of each row (default 40)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of the 32 clients (default 20)")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    return parser.parse_args()


@contextmanager
def _rows(folder: Path) -> Iterator[Mapping[str, tuple[Work, Work]]]:
    """Yield what is timed: by E2B's SDK, and its reference."""
    with (
        open_daemon() as daemon,
        _jupyter(folder) as notebook,
        Sandbox.create(timeout=3600) as sandbox,
        cloche.Sandbox(live=True, disk="64m") as library,
    ):
        daemon.image(IMAGE)

        def files() -> None:
            sandbox.files.write("large", LARGE)
            assert len(sandbox.files.read("large", format="bytes")) == len(LARGE)

        def library_files() -> None:
            library.write_file("large", LARGE)
            assert len(library.read_file("large")) == len(LARGE)

        words = ["/bin/bash", "-l", "-c", "true"]
        yield {
            "Sandbox.create()": (_creation(Sandbox), _container(daemon)),
            'run_code("1+1")': (lambda: sandbox.run_code("1+1"), lambda: _cell(notebook)),
            "the same, acknowledged at once": (
                lambda: sandbox.run_code("1+1"),
                lambda: _cell(notebook, is_acknowledged=True),
            ),
            'commands.run("true")': (
                lambda: sandbox.commands.run("true"),
                lambda: subprocess.run(words, check=True, env={"HOME": str(folder), "PATH": os.defpath}),
            ),
            "files.write and read, 10 MB": (files, library_files),
        }


def _turns(ours: Work, theirs: Work, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of both, in turns; a work that returns seconds has timed itself."""
    times: dict[str, list[float]] = {"e2b": [], "reference": []}
    for turn in range(WARM_UP + rounds):
        for name, work in (("e2b", ours), ("reference", theirs)):
            began = time.perf_counter()
            own = work()
            seconds = own if isinstance(own, float) else time.perf_counter() - began
            if turn >= WARM_UP:
                times[name].append(seconds)
    return times


def _creation(sandbox_kind: type[Sandbox]) -> Work:
    def create() -> float:
        began = time.perf_counter()
        sandbox = sandbox_kind.create(timeout=60)
        seconds = time.perf_counter() - began
        sandbox.kill()
        return seconds

    return create


def _container(daemon: Daemon) -> Work:
    """Return a work that starts a container with a server, until its port answers; what follows is not timed."""

    def run() -> float:
        port, name = _free_port(), f"bench-{secrets.token_hex(4)}"
        server = ["python3", "-m", "http.server", str(port)]
        words = daemon.words("run", "--detach", "--rm", "--network=host", f"--name={name}", IMAGE, *server)
        began = time.perf_counter()
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
        _until(lambda: urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5))
        seconds = time.perf_counter() - began
        daemon.docker("kill", name)
        return seconds

    return run


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def _until(answers: Callable[[], IO[bytes]]) -> IO[bytes]:
    ends = time.monotonic() + READY_S
    while True:
        try:
            return answers()
        except OSError:
            if time.monotonic() > ends:
                raise
            time.sleep(0.002)


@contextmanager
def _jupyter(folder: Path) -> Iterator[ClientConnection]:
    """Yield the channels of a kernel of jupyter-server, started by its REST API."""
    port, token = _free_port(), secrets.token_hex(16)
    words = [
        f"{JUPYTER}/bin/python", "-m", "jupyter_server", f"--ServerApp.port={port}", "--allow-root",
        "--ServerApp.open_browser=False", f"--IdentityProvider.token={token}", f"--ServerApp.root_dir={folder}",
    ]  # fmt: skip
    environ = {**os.environ, "HOME": str(folder), "JUPYTER_RUNTIME_DIR": str(folder / "jupyter")}
    address, headers = f"127.0.0.1:{port}/api/kernels", {"Authorization": f"token {token}"}
    with (
        open(folder / "jupyter.log", "wb") as log,
        subprocess.Popen(words, env=environ, stdout=log, stderr=log) as server,
    ):
        try:
            request = urllib.request.Request(f"http://{address}", data=b"{}", headers=headers, method="POST")
            kernel = json.load(_until(lambda: urllib.request.urlopen(request, timeout=READY_S)))["id"]
            with connect(f"ws://{address}/{kernel}/channels", additional_headers=headers, proxy=None) as channels:
                yield channels
        finally:
            server.terminate()


def _cell(channels: ClientConnection, *, is_acknowledged: bool = False) -> None:
    """Run the cell and read all of its messages, up to the kernel's idle one.

    The server sends a message once the one before is acknowledged, which Linux does after up to 40 ms, unless asked.
    """
    number = uuid.uuid4().hex
    content = {"code": "1+1", "silent": False, "store_history": True, "user_expressions": {}, "allow_stdin": False}
    header = {
        "msg_id": number,
        "msg_type": "execute_request",
        "session": "bench",
        "username": "bench",
        "version": "5.3",
    }
    message = {"header": header, "parent_header": {}, "metadata": {}, "content": content, "channel": "shell"}
    channels.send(json.dumps(message))
    has_result = False
    while True:
        if is_acknowledged:
            channels.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        answer = json.loads(channels.recv(READY_S))
        if answer["parent_header"].get("msg_id") != number:
            continue
        has_result = has_result or answer["msg_type"] == "execute_result"
        if answer["msg_type"] == "status" and answer["content"]["execution_state"] == "idle":
            assert has_result
            return


def _clients(e2b: E2BService, seconds: float) -> dict[str, list[float]]:
    """Return the seconds of each request of 32 clients in loops, by what is asked."""
    told = json.dumps([CLIENTS // PROCESSES, seconds])
    words = [sys.executable, "-m", "bench.e2b", told]
    environ = {**os.environ, **e2b.variables}
    processes = [subprocess.Popen(words, env=environ, stdout=subprocess.PIPE) for _ in range(PROCESSES)]
    all_times: dict[str, list[float]] = {}
    for process in processes:
        printed, _ = process.communicate()
        assert process.returncode == 0
        for name, times in json.loads(printed).items():
            all_times.setdefault(name, []).extend(times)
    return all_times


async def _client_process(count: int, seconds: float) -> dict[str, list[float]]:
    sandboxes = [await AsyncSandbox.create(timeout=600) for _ in range(count)]
    times: dict[str, list[float]] = {"run_code": [], "commands.run": []}
    for sandbox in sandboxes:
        await sandbox.run_code("1+1")
    ends = time.perf_counter() + seconds

    async def loop(sandbox: AsyncSandbox) -> None:
        while time.perf_counter() < ends:
            for name, work in (("run_code", sandbox.run_code), ("commands.run", sandbox.commands.run)):
                began = time.perf_counter()
                await work("1+1" if name == "run_code" else "true")
                times[name].append(time.perf_counter() - began)

    await asyncio.gather(*map(loop, sandboxes))
    await asyncio.gather(*(sandbox.kill() for sandbox in sandboxes))
    return times


def _show(report: Mapping[str, Any]) -> None:
    print(f"{report['processors']} processors")
    for name, times in report["rows"].items():
        ours, theirs = (statistics.median(times[kind]) * 1e3 for kind in ("e2b", "reference"))
        most, most_ms = WANTED[name]
        wanted = [f"{most}" if most else "", f"{most_ms:.0f} ms" if most_ms else ""]
        print(
            f"{name:30} p50 {ours:8.2f} ms   reference {theirs:8.2f} ms   ratio {ours / theirs:6.3f}"
            f"   at most {', '.join(filter(None, wanted))}"
        )
    for name, times in report["clients"].items():
        p50, p99 = statistics.median(times), statistics.quantiles(times, n=100)[98]
        row = f"p50 {p50 * 1e3:8.2f} ms   p99 {p99 * 1e3:8.2f} ms   ratio {p99 / p50:.2f}   at most 6"
        print(f"{CLIENTS} clients, {name:14} {row}")


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("["):
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(asyncio.run(_client_process(*json.loads(sys.argv[1])))))
    else:
        sys.exit(main())
