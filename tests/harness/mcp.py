"""Servers for the Model Context Protocol as they are started for real, and the package's own client for them."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
from mcp import Client
from mcp.client.stdio import StdioServerParameters
from mcp.client.streamable_http import streamable_http_client
from mcp_types import CallToolResult, ElicitResult, ImageContent, TextContent

from tests.harness.commands import imported_once

# The rest sets up logging when it is imported, which is for the command to do first.
MODULES = ("cloche.mcp.command", "mcp.server.lowlevel.server", "mcp.server.stdio")
COMMAND = (sys.executable, "-m", "cloche", "mcp")
MODES = ("legacy", "2026-07-28")  # 2025-11-25 by its handshake, and the revision where every request stands alone
START_S, END_S = 60, 30


def environment(home: Path) -> dict[str, str]:
    """Return variables that keep the machine's own configuration out of a server."""
    return {"PATH": os.environ["PATH"], "HOME": str(home), "XDG_CONFIG_HOME": str(home), "LANG": "C.UTF-8"}


@dataclass
class User:
    """Answer a client's questions: by `says`, or not at all. Keeps what was asked."""

    says: Callable[[str], ElicitResult] | None = None
    asked: list[str] = field(default_factory=list)

    async def __call__(self, _: Any, params: Any) -> ElicitResult:
        self.asked.append(params.message)
        if self.says is None:
            await asyncio.Event().wait()
            raise AssertionError
        return self.says(params.message)


def accept(**content: Any) -> Callable[[str], ElicitResult]:
    """Answer everything with the same form."""
    return lambda _: ElicitResult(action="accept", content=content)


def yes(message: str) -> ElicitResult:
    """Approve, and confirm what is asked for again."""
    name = "confirm" if message.startswith("Confirm") else "approve"
    return ElicitResult(action="accept", content={name: True})


def no(_: str) -> ElicitResult:
    """Decline."""
    return ElicitResult(action="decline")


@dataclass(frozen=True)
class Place:
    """Say where a server is: a URL and a token, or the arguments of one to start."""

    url: str = ""
    token: str = ""
    args: tuple[str, ...] = ()
    home: Path = Path("/")

    @asynccontextmanager
    async def client(self, mode: str, user: User | None = None, **more: Any) -> AsyncIterator[Client]:
        """Give a client of the package that has shaken hands."""
        more["elicitation_callback"] = user
        if not self.url:
            program = str(imported_once(*MODULES).folder / "cloche")
            process = StdioServerParameters(command=program, args=["mcp", *self.args], env=environment(self.home))
            async with Client(process, mode=mode, **more) as client:
                yield client
            return
        headers = {"authorization": f"Bearer {self.token}"} if self.token else {}
        timeout = httpx2.Timeout(30, read=300)
        async with (
            httpx2.AsyncClient(headers=headers, timeout=timeout) as http,
            Client(streamable_http_client(self.url, http_client=http), mode=mode, **more) as client,
        ):
            yield client


@contextmanager
def http_server(args: Sequence[str], home: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Start `cloche mcp --http` at a free port; give the process and its URL, and end it by SIGTERM."""
    with server_process([*COMMAND, "--http", "--port", "0", *args], home) as found:
        yield found


@contextmanager
def server_process(command: Sequence[str], home: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Start a server that says where it is; give the process and its URL, and end it by SIGTERM."""
    log = home / f"{time.monotonic_ns()}.log"  # a pipe that nobody empties would stop it
    with log.open("wb") as stderr:
        process = subprocess.Popen(command, env=environment(home), stderr=stderr, stdin=subprocess.DEVNULL)
    try:
        end = time.monotonic() + START_S
        while not (found := re.search(r"http://\S+(?=\n)", log.read_text())):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.02)
        yield process, found[0]
    finally:
        process.terminate()
        try:
            code = process.wait(END_S)
        finally:
            process.kill()
            process.wait()
        assert code in (143, -15), log.read_text()


def text_of(result: CallToolResult) -> str:
    """Return what the model reads."""
    return "\n".join(part.text for part in result.content if isinstance(part, TextContent))


def images_of(result: CallToolResult) -> list[ImageContent]:
    """Return the figures."""
    return [part for part in result.content if isinstance(part, ImageContent)]


def run(work: Callable[[], Any]) -> Any:
    """Do something async, with a bound."""

    async def bounded() -> Any:
        async with asyncio.timeout(120):
            return await work()

    return asyncio.run(bounded())


def token_file(folder: Path, *tokens: str) -> str:
    """Write tokens where only their owner reads them."""
    path = folder / "tokens"
    path.touch(mode=0o600)
    path.write_text("".join(f"{token}\n" for token in tokens))
    return str(path)


async def until(there: Callable[[], Any], seconds: float = 60) -> Any:
    """Wait until something is so, and return it."""
    end = time.monotonic() + seconds
    while not (found := there()) and time.monotonic() < end:  # noqa: ASYNC110 - other processes tell no one
        await asyncio.sleep(0.05)
    return found
