"""`cloche mcp`: serve as the command line says, until the client leaves or a signal arrives.

Over standard streams one client is served, and nothing but the protocol is written to standard output. `early` answers
the first messages. After that a daemon thread reads standard input: a read that blocks must not keep the process from
ending.

The protocol package is imported in functions: `require_extra` must come first, and logging, which it would set up.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import stat
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

from cloche.agent.approval import Approver, auto, check_patience, deny
from cloche.agent.interpreters import MOST_INTERPRETERS
from cloche.agent.queue import ApprovalQueue
from cloche.agent.toolbox import Toolbox
from cloche.config.options import SandboxOptions
from cloche.core.errors import InvalidRequest
from cloche.core.record import dataclass, field
from cloche.serving.process import log_plainly, until_signal

from . import has_extra, require_extra
from .early import HandedOver, WithoutAnswer, serve_early
from .table import tool_rows

if TYPE_CHECKING:
    from mcp.server.mcpserver import MCPServer

TOKEN_VARIABLE = "CLOCHE_MCP_TOKEN"  # noqa: S105 - a name
MOST_TOKEN_BYTES = 65_536
_APPROVERS: Mapping[str, Approver | None] = {"client": None, "deny": deny, "high": auto("high")}
MOST_LINE_BYTES = 16 << 20
CHUNK_BYTES = 1 << 16
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
TOO_LONG = "{}"  # in place of a line that is too long: no message, and answered as such


@dataclass(frozen=True, slots=True, kw_only=True)
class McpCommand:
    """Hold the command line of `cloche mcp`, parsed and not yet checked."""

    over_http: bool = False
    host: str = "127.0.0.1"
    port: int = 8000
    path: str = "/mcp"
    token_file: str | None = None
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    approve: str = "client"
    approvals: str | None = None
    patience_s: float = 300.0
    tools: tuple[str, ...] = ()
    interpreters: int = MOST_INTERPRETERS
    roots: Mapping[str, str] = field(default_factory=dict)
    options: SandboxOptions = field(default_factory=SandboxOptions)
    folder: Mapping[str, Any] = field(default_factory=dict)


_PLAIN = McpCommand()


def serve(command: McpCommand) -> int:
    """Serve, and return the exit code: 0 when the client has left."""
    # Before the protocol package does it, in colours and boxes. Nothing where the caller did.
    log_plainly()
    return _serve_http(command) if command.over_http else _serve_stdio(command)


def _serve_stdio(command: McpCommand) -> int:
    """Answer the first messages by ourselves, the rest by the protocol package."""
    if not has_extra():
        require_extra()
    _check_stdio(command)
    os.environ.pop(TOKEN_VARIABLE, None)
    if os.isatty(0):
        print("cloche: serving MCP on this terminal; a client starts it so, see docs/mcp.md", file=sys.stderr)  # noqa: T201
    rows = tool_rows(_toolbox_of(command), command.tools or None)
    rest = serve_early(_split(_take_stdin()), 1, rows, _load)
    if rest is None:
        return 0
    require_extra()
    return until_signal(serve_stdio(_server_of(command), rest))


def _load() -> None:
    with suppress(ImportError):  # reported by `require_extra`
        import_module(f"{__package__}.server")


def _toolbox_of(command: McpCommand) -> Toolbox:
    """Return a toolbox whose tools are those of the server. Raises InvalidRequest, as `create_server` does."""
    check_patience(command.patience_s)
    return Toolbox(
        approve=approver_of(command) or deny, roots=command.roots or None, interpreters=bool(command.interpreters),
        **command.folder, **command.options,
    )  # fmt: skip


def _server_of(command: McpCommand, tokens: Sequence[str] = ()) -> MCPServer[Any]:
    from .server import create_server

    return create_server(
        approve=approver_of(command), patience_s=command.patience_s, roots=command.roots or None,
        tools=command.tools or None, tokens=tokens, interpreters=command.interpreters,
        is_single_client=not command.over_http, **command.folder, **command.options,
    )  # fmt: skip


def _serve_http(command: McpCommand) -> int:
    require_extra()
    tokens = read_tokens(command.token_file)
    server = _server_of(command, tokens)
    from .http import create_app, serve_http

    app = create_app(
        server, host=command.host, path=command.path, allowed_hosts=command.allowed_hosts,
        allowed_origins=command.allowed_origins,
    )  # fmt: skip
    return until_signal(
        serve_http(app, host=command.host, port=command.port, path=command.path, has_tokens=bool(tokens))
    )


def _check_stdio(command: McpCommand) -> None:
    """Raise InvalidRequest for what only HTTP has: a token that guards nothing, say."""
    for name in ("host", "port", "path", "token_file", "allowed_hosts", "allowed_origins"):
        if getattr(command, name) != getattr(_PLAIN, name):
            option = name.replace("_", "-").replace("allowed", "allow").removesuffix("s")
            raise InvalidRequest(f"--{option} is for --http; add that, or leave it out")


def approver_of(command: McpCommand) -> Approver | None:
    """Return who approves, None for the client's user. Raises InvalidRequest."""
    if command.approvals is not None:
        if command.approve not in ("client", "queue"):
            raise InvalidRequest(f"--approvals and --approve {command.approve} exclude each other; give one")
        return ApprovalQueue(command.approvals, patience_s=command.patience_s)
    if command.approve not in _APPROVERS:
        raise InvalidRequest(f"--approve {command.approve}: use one of {', '.join(_APPROVERS)}, or --approvals FILE")
    return _APPROVERS[command.approve]


def read_tokens(path: str | None) -> tuple[str, ...]:
    """Return the tokens of a file, one a line, or of the environment. Raises InvalidRequest.

    The variable is taken away from what this process starts.
    """
    from_environment = os.environ.pop(TOKEN_VARIABLE, None)
    if path is None:
        if from_environment == "":  # who sets it wants a token: an empty one must not mean none
            raise InvalidRequest(f"{TOKEN_VARIABLE} is set and empty; put a token in it, or unset it to have none")
        return () if from_environment is None else (from_environment,)
    try:
        with open(path, encoding="utf-8") as file:
            mode, text = os.fstat(file.fileno()).st_mode, file.read(MOST_TOKEN_BYTES + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"--token-file {path}: cannot be read: {getattr(error, 'strerror', error)}") from error
    if stat.S_ISREG(mode) and mode & 0o077:
        raise InvalidRequest(f"--token-file {path}: others may read it; chmod 600 {path}")
    if len(text) > MOST_TOKEN_BYTES:  # the last one would be cut, and hold
        raise InvalidRequest(f"--token-file {path}: has more than {MOST_TOKEN_BYTES} characters; is it the right file?")
    tokens = tuple(line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#"))
    if not tokens:
        raise InvalidRequest(f"--token-file {path}: there is no token in it; write one a line")
    return tokens


async def serve_stdio(server: MCPServer[Any], rest: HandedOver) -> None:
    """Serve the rest of a client's messages until it closes its end, or this is cancelled."""
    from mcp.server.stdio import stdio_server

    async with stdio_server(stdin=cast("Any", _Lines(rest.lines))) as (incoming, outgoing):
        lowlevel = server._lowlevel_server  # what `run_stdio_async` runs, with an input of its own
        answers = WithoutAnswer(outgoing, rest.answered)
        await lowlevel.run(incoming, cast("Any", answers), lowlevel.create_initialization_options())


def _take_stdin() -> int:
    """Return standard input under another number; the former number is an empty file."""
    private = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return private


class _Lines:
    """Yield lines as they come, without blocking the event loop."""

    def __init__(self, lines: Iterator[str]):
        self._lines = lines
        self._queue: asyncio.Queue[str | None] = asyncio.Queue(1)

    def __aiter__(self) -> AsyncIterator[str]:
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._read, args=(loop,), name="cloche-mcp-stdin", daemon=True).start()
        return self._taken()

    async def _taken(self) -> AsyncIterator[str]:
        while (line := await self._queue.get()) is not None:
            yield line

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        with suppress(RuntimeError, CancelledError):  # the loop has ended
            for line in self._lines:
                asyncio.run_coroutine_threadsafe(self._queue.put(line), loop).result()
            asyncio.run_coroutine_threadsafe(self._queue.put(None), loop).result()


def _split(fd: int) -> Iterator[str]:
    rest, is_too_long = bytearray(), False
    while data := _read_some(fd):
        *lines, end = data.split(b"\n")
        for line in lines:
            rest += line
            yield TOO_LONG if is_too_long or len(rest) > MOST_LINE_BYTES else _text(rest)
            rest, is_too_long = bytearray(), False
        rest += end
        if len(rest) > MOST_LINE_BYTES:
            rest, is_too_long = bytearray(), True
    if rest and not is_too_long:
        yield _text(rest)


def _text(line: bytearray) -> str:
    """Return a line that can be taken apart: halves of character pairs, which some clients send, become `?`."""
    text = line.decode("utf-8", "replace")
    if SURROGATE.search(text) is None:
        return text
    try:
        return json.dumps(json.loads(text), ensure_ascii=False).encode("utf-8", "replace").decode()
    except (ValueError, RecursionError):
        return text  # no message; answered as such


def _read_some(fd: int) -> bytes:
    try:
        return os.read(fd, CHUNK_BYTES)
    except OSError:  # a terminal that hung up
        return b""
