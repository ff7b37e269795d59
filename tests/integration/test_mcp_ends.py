"""How the MCP server ends, and that standard output has the protocol on it and nothing else."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.harness.leaks import Snapshot, wait_for_leftovers
from tests.harness.mcp import COMMAND, END_S, Place, environment, http_server, run

CALL_ID = 7


@contextmanager
def wire(home: Path, *args: str, env: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """Start a server whose standard streams are ours."""
    with (home / "stderr").open("wb") as stderr:
        process = subprocess.Popen(
            [*COMMAND, *args], env={**environment(home), **(env or {})}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=stderr,
        )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()


def send(process: subprocess.Popen[bytes], *messages: Mapping[str, Any] | bytes) -> None:
    """Write messages, one a line."""
    assert process.stdin is not None
    for message in messages:
        process.stdin.write((message if isinstance(message, bytes) else json.dumps(message).encode()) + b"\n")
    process.stdin.flush()


def answer(process: subprocess.Popen[bytes], number: int) -> dict[str, Any]:
    """Return the answer to a request; every line before it is a message of the protocol, too."""
    assert process.stdout is not None
    while line := process.stdout.readline():
        message: dict[str, Any] = json.loads(line)
        assert message["jsonrpc"] == "2.0"
        if message.get("id") == number:
            return message
    raise AssertionError("the server left")


HELLO = (
    {"jsonrpc": "2.0", "id": 1, "method": "initialize",
     "params": {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}},
    {"jsonrpc": "2.0", "method": "notifications/initialized"},
)  # fmt: skip


def call(name: str, number: int = CALL_ID, **arguments: Any) -> dict[str, Any]:
    """Return the request to call a tool."""
    params = {"name": name, "arguments": arguments, "_meta": {"progressToken": number}}
    return {"jsonrpc": "2.0", "id": number, "method": "tools/call", "params": params}


def _close(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.close()


def _is_running(word: str) -> bool:
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and word.encode() in (entry / "cmdline").read_bytes().split(b"\0"):
                return True
        except OSError:
            continue
    return False


def _wait_until(word: str, *, runs: bool) -> None:
    end = time.monotonic() + END_S
    while _is_running(word) is not runs:
        assert time.monotonic() < end, f"{word}: is {'not ' if runs else ''}there"
        time.sleep(0.02)


@pytest.mark.parametrize("way", ["the client leaves", pytest.param("SIGTERM", marks=pytest.mark.soak), "SIGKILL"])
def test_an_end_leaves_nothing(way: str, tmp_path: Path) -> None:
    """However it ends, a call that runs is ended first; the exit code says how."""
    before = Snapshot.take()
    word = f"5{time.monotonic_ns() % 10**9}.5"
    with wire(tmp_path, "--approve", "high") as process:
        send(process, *HELLO, call("os_execute_sandboxed", command=f"sleep {word} & wait", timeout=60))
        _wait_until(word, runs=True)
        if way == "the client leaves":
            _close(process)
        else:
            process.send_signal(getattr(signal, way))
        code = {"the client leaves": 0, "SIGTERM": 143, "SIGKILL": -9}[way]
        assert process.wait(END_S) == code, (tmp_path / "stderr").read_text()
        assert process.stdout is not None
        for line in process.stdout:
            assert json.loads(line)["jsonrpc"] == "2.0"
    _wait_until(word, runs=False)
    assert wait_for_leftovers(before, patience_s=10) == []
    assert (tmp_path / "stderr").read_text() == ""


def test_an_end_over_http_leaves_nothing(tmp_path: Path) -> None:
    """SIGTERM ends the calls of all clients, and what they run."""
    before = Snapshot.take()
    word = f"5{time.monotonic_ns() % 10**9}.5"

    async def work(process: subprocess.Popen[bytes], url: str) -> None:
        async with Place(url=url).client("2026-07-28") as client:
            calling = asyncio.ensure_future(client.call_tool("os_execute_sandboxed", {"command": f"sleep {word}"}))
            await asyncio.to_thread(_wait_until, word, runs=True)
            process.terminate()
            await asyncio.to_thread(_wait_until, word, runs=False)
            await asyncio.wait({calling})
            assert calling.exception() is not None

    with http_server(["--approve", "high"], tmp_path) as (process, url):
        run(lambda: work(process, url))
    assert wait_for_leftovers(before, patience_s=10) == []


def test_standard_output_has_the_protocol_alone(tmp_path: Path) -> None:
    """Neither code nor commands on the host nor rubbish from the client put anything else there."""
    with wire(tmp_path, "--tier", "4", "--backend", "local", "--approve", "high") as process:
        send(process, *HELLO)
        assert answer(process, 1)["result"]["serverInfo"]["name"] == "cloche"
        send(process, b"rubbish", b"\xff\xfe\x00", b"[]", b"{}", b'"' + b"a" * 200_000 + b'"')
        noise = "import os, sys; [os.write(fd, b'noise\\n') for fd in (1, 2)]; print('noise', file=sys.__stderr__)"
        send(process, call("run_code", 2, code=noise))
        said = answer(process, 2)["result"]
        assert said["content"][0]["text"].count("noise") == 3
        send(process, call("os_execute", 3, command="echo noise; echo noise >&2; cat"))
        denied = answer(process, 3)["result"]  # nobody may approve CRITICAL calls beforehand
        assert denied["isError"]
        assert "critical is above high" in denied["content"][0]["text"]
        _close(process)
        assert process.stdout is not None
        assert process.stdout.read() == b""
        assert process.wait(END_S) == 0


@pytest.mark.soak
def test_a_client_that_takes_no_answers_keeps_no_server(tmp_path: Path) -> None:
    """A server that cannot get rid of what it has to say ends at a signal all the same."""
    before = Snapshot.take()
    with wire(tmp_path) as process:
        lists = [{"jsonrpc": "2.0", "id": number, "method": "tools/list", "params": {}} for number in range(2, 60)]
        send(process, *HELLO, *lists)
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        end = time.monotonic() + END_S
        while not _is_full(process) and time.monotonic() < end:
            time.sleep(0.05)
        process.terminate()
        assert process.wait(END_S) == 143
    assert wait_for_leftovers(before, patience_s=10) == []


def _is_full(process: subprocess.Popen[bytes]) -> bool:
    """Tell whether a thread of the server waits to write."""
    for task in Path(f"/proc/{process.pid}/task").iterdir():
        try:
            if (task / "syscall").read_text().startswith("1 "):
                return True
        except OSError:
            continue
    return False
