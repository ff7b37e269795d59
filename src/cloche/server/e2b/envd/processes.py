"""`process.Process`: start processes, read, write, signal and list them, and their terminals."""

from __future__ import annotations

import asyncio
import base64
import binascii
import signal
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from cloche.core.errors import InvalidRequest, OutcomeUnknown, SandboxFileNotFound, StartFailed
from cloche.core.processes import Detached, ProcessInfo
from cloche.core.result import Result, Status
from cloche.execution.processes import AsyncProcess
from cloche.wire.outputs import OutputReader, TooSlow
from cloche.wire.uses import Use

from ..calls import Call
from ..errors import Dropped, E2BError
from ..new_sandbox import environment_of
from .connect import client_stream, messages, server_stream, timeout_of, unary
from .users import folder_of, home_of, invalid_user, sandbox_user, user_of

SERVICE = "process.Process"
PING_HEADER, PING_S, LONGEST_PING_S = "keepalive-ping-interval", 50.0, 3600.0
GONE_S = (0.0, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)  # between looks whether a killed process has ended
NOTED_S = 5.0  # for the end of a sandbox to be noted, after that of its processes
INPUT_S = 300.0  # for a process to read its input, where the request sets no time
SIGNALS = {"SIGNAL_SIGTERM": signal.SIGTERM, "SIGNAL_SIGKILL": signal.SIGKILL, 15: signal.SIGTERM, 9: signal.SIGKILL}
KILLED = (Status.TIMEOUT, Status.OUT_OF_MEMORY, Status.OUTPUT_LIMIT)
Message = Mapping[str, Any]


# Reading what clients send.


def _object(body: Message, name: str) -> Message:
    value = body.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise E2BError(400, f"{name}: give an object")
    return value


def _text(value: object, name: str) -> str:
    if not isinstance(value, str) or "\0" in value:
        raise E2BError(400, f"{name}: give text without NUL")
    return value


def _natural(value: object, name: str) -> int:
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 11:
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 32:
        raise E2BError(400, f"{name}: give a natural number of 32 bits")
    return value


def _bytes(value: object, name: str) -> bytes:
    text = _text(value, name).translate(str.maketrans("-_", "+/")).rstrip("=")
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except binascii.Error as error:
        raise E2BError(400, f"{name}: this is not base64") from error


def _key(body: Message) -> dict[str, str | int]:
    """Return the process that a message names. Raises E2BError."""
    selector = _object(body, "process")
    if "pid" in selector:
        return {"pid": _natural(selector["pid"], "pid")}
    if "tag" in selector:
        return {"tag": _text(selector["tag"], "tag")}
    raise E2BError(501, "process: give a pid or a tag", connect="unimplemented")


def _size(pty: Message) -> tuple[int, int]:
    size = _object(pty, "size")
    rows, columns = (_natural(size.get(name, 0), name) for name in ("rows", "cols"))
    return min(rows, 4096) or 24, min(columns, 4096) or 80


def _no_process(key: Mapping[str, str | int]) -> E2BError:
    ((name, value),) = key.items()
    return E2BError(404, f"process with {name} {str(value)[:256]} not found")


# Start and Connect: streams of events.


async def start(call: Call, body: Message, stack: AsyncExitStack) -> AsyncGenerator[Message]:
    """Start a process; answer with its output and its end. It goes on if the client leaves."""
    timeout_s = timeout_of(call)
    use = await stack.enter_async_context(call.use())
    tag = _text(body.get("tag") or "", "tag")
    process = await _started(call, use, body, tag, timeout_s)
    reader = await stack.enter_async_context(use.held.outputs.started(process, tag))
    return await _events(call, reader, stack, timeout_s, is_starter=True)


async def _started(call: Call, use: Use, body: Message, tag: str, timeout_s: float | None) -> AsyncProcess:
    config, name = _object(body, "process"), user_of(call)
    args = config.get("args") or []
    if not isinstance(args, list):
        raise E2BError(400, "args: give a list")
    argv = [_text(word, "cmd") for word in (config.get("cmd"), *args)]
    if not argv[0]:
        raise E2BError(400, "cmd: give the path or name of a program")
    own = call.row.document["e2b"] if call.row is not None else {}
    cwd = folder_of(_text(config.get("cwd") or own.get("workdir") or "", "cwd"), name)
    env = {key: _text(value, "envs") for key, value in _object(config, "envs").items()}
    options: dict[str, Any] = {
        "cwd": cwd, "env": {**(environment_of(call.row) if call.row is not None else {}), **env},
        "user": sandbox_user(use, name), "timeout": timeout_s, "keep": True, "tag": tag, "alone": True,
    }  # fmt: skip
    try:
        if body.get("pty") is not None:
            rows, columns = _size(_object(body, "pty"))
            return await use.sandbox.terminal(argv, rows=rows, columns=columns, **options)
        return await use.sandbox.start(argv, has_input=body.get("stdin") is not False, **options)
    except SandboxFileNotFound as error:
        folder = f"{home_of(name)}{cwd[1:]}" if cwd.startswith("~") else cwd
        raise E2BError(400, f"cwd '{folder[:4096]}' does not exist") from error
    except InvalidRequest as error:
        if str(error).startswith("user: "):
            raise invalid_user(name) from error
        raise
    except StartFailed as error:
        if error.step == "pids":
            raise E2BError(429, f"error starting process '{argv[0][:256]}': {error}") from error
        raise


async def connect(call: Call, body: Message, stack: AsyncExitStack) -> AsyncGenerator[Message]:
    """Answer with the further output and the end of a process, which may have ended recently."""
    timeout_s, key = timeout_of(call), _key(body)
    use = await stack.enter_async_context(call.use())
    try:
        reader = await stack.enter_async_context(use.held.outputs.found(key, use.sandbox.process))
    except InvalidRequest as error:
        raise _no_process(key) from error
    return await _events(call, reader, stack, timeout_s)


async def _events(
    call: Call, reader: OutputReader, stack: AsyncExitStack, timeout_s: float | None, *, is_starter: bool = False
) -> AsyncGenerator[Message]:
    assert call.target is not None  # noqa: S101 - of envd
    cut = stack.enter_context(call.e2b.readers(call.target.sandbox_id).reading())
    cut.add_done_callback(lambda cut: None if cut.cancelled() else reader.fail(Dropped(cut.result())))
    stack.callback(cut.cancel)
    if timeout_s is not None:
        timer = asyncio.get_running_loop().call_later(timeout_s, reader.fail, _too_late())
        stack.callback(timer.cancel)
    return _sent(reader, _ping_s(call), cut, is_starter=is_starter)


async def _sent(
    reader: OutputReader, ping_s: float, cut: asyncio.Future[str], *, is_starter: bool
) -> AsyncGenerator[Message]:
    yield {"event": {"start": {"pid": reader.process.pid}}}
    is_terminal, begun = reader.process.is_terminal, {"stdout": b"", "stderr": b""}
    try:
        while not isinstance(piece := await reader.next(ping_s), Result):
            if piece is None:
                yield {"event": {"keepalive": {}}}
                continue
            name, data = piece
            if not is_terminal:
                data, begun[name] = at_character(begun[name] + data)
            if data:
                yield _data("pty" if is_terminal else name, data)
    except OutcomeUnknown as error:  # the sandbox has ended; SDKs ask `/health` why, once the row says so
        await asyncio.wait([cut], timeout=NOTED_S)
        raise Dropped(str(error)) from error
    except TooSlow as error:
        raise E2BError(429, str(error)) from error
    except Detached as error:
        raise E2BError(409, str(error), connect="aborted") from error
    for name, data in begun.items():
        if data:
            yield _data(name, data)
    if is_starter and piece.status is Status.TIMEOUT:
        raise _too_late()
    yield {"event": {"end": _end_of(piece)}}


def _data(name: str, data: bytes) -> Message:
    return {"event": {"data": {name: base64.b64encode(data).decode()}}}


def at_character(data: bytes) -> tuple[bytes, bytes]:
    """Return bytes up to the last whole character of UTF-8, and the beginning of one that may follow.

    Older SDKs decode each piece for itself. What is no UTF-8 is not held up.
    """
    for size in range(1, min(4, len(data) + 1)):
        byte = data[-size]
        if byte < 0x80 or byte > 0xF4:
            break
        if byte >= 0xC0:
            length = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return (data[:-size], data[-size:]) if size < length else (data, b"")
    return data, b""


def _end_of(result: Result) -> Message:
    """Return the end of a process in envd's words."""
    number = signal.SIGKILL if result.status in KILLED else result.exit_code - 128
    if result.status in (*KILLED, Status.SIGNALED):
        text = f"signal: {_name_of(number)}"
        return {"exitCode": -1, "exited": False, "status": text, "error": text}
    text = f"exit status {result.exit_code}"
    error = {"error": text} if result.exit_code else {}
    return {"exitCode": result.exit_code, "exited": True, "status": text, **error}


def _name_of(number: int) -> str:
    try:
        return (signal.strsignal(number) or f"signal {number}").lower()
    except ValueError:
        return f"signal {number}"


def _too_late() -> E2BError:
    return E2BError(504, "context deadline exceeded", connect="deadline_exceeded")


def _ping_s(call: Call) -> float:
    text = call.request.headers.get(PING_HEADER, "")
    is_number = text.isascii() and text.isdigit() and len(text) < 8
    return min(max(float(text), 1.0), LONGEST_PING_S) if is_number and int(text) else PING_S


# Requests about a process, whose output stays with its readers.


@asynccontextmanager
async def _reached(call: Call, body: Message) -> AsyncIterator[tuple[Use, AsyncProcess]]:
    key = _key(body)
    async with call.use() as use:
        try:
            process = await use.sandbox.process(**key, reads=False)  # type: ignore[arg-type]
        except InvalidRequest as error:
            raise _no_process(key) from error
        async with process:
            yield use, process


async def list_processes(call: Call, body: Message) -> Message:
    """List the running processes that were started here."""
    del body
    async with call.use() as use:
        infos = await use.sandbox.processes()
    own = environment_of(call.row) if call.row is not None else {}
    return {"processes": [_listed(info, own) for info in infos if info.status is None and info.argv]}


def _listed(info: ProcessInfo, own: Mapping[str, str]) -> Message:
    envs = {name: value for name, value in info.env.items() if own.get(name) != value}
    config: dict[str, Any] = {"cmd": info.argv[0], "args": list(info.argv[1:]), "envs": envs}
    config |= {"cwd": info.cwd} if info.cwd not in (None, "~") else {}
    return {"config": config, "pid": info.pid, **({"tag": info.tag} if info.tag else {})}


async def send_signal(call: Call, body: Message) -> Message:
    """Send SIGTERM or SIGKILL to a process."""
    number = SIGNALS.get(body.get("signal", ""))
    if number is None:
        raise E2BError(501, f"invalid signal: {str(body.get('signal', 'SIGNAL_UNSPECIFIED'))[:64]}")
    async with _reached(call, body) as (use, process):
        await process.signal(int(number))
        if number == signal.SIGKILL:
            await _wait_gone(use, process.id)
    return {}


async def _wait_gone(use: Use, process_id: str) -> None:
    """Wait until a killed process has ended, for a moment at most: so it is neither listed nor there afterwards."""
    for pause_s in GONE_S:
        await asyncio.sleep(pause_s)
        if not any(info.id == process_id and info.status is None for info in await use.sandbox.processes()):
            return


async def update(call: Call, body: Message) -> Message:
    """Set the size of a terminal."""
    async with _reached(call, body) as (_, process):
        if body.get("pty") is not None:
            if not process.is_terminal:
                raise E2BError(500, "error resizing tty: tty not assigned to process", connect="internal")
            await process.resize(*_size(_object(body, "pty")))
    return {}


async def send_input(call: Call, body: Message) -> Message:
    """Write to a process."""
    async with _reached(call, body) as (_, process):
        await _write(process, _object(body, "input"))
    return {}


async def _write(process: AsyncProcess, sent: Message) -> None:
    """Write one message's input, when the process has read it all. Raises E2BError."""
    kind = "pty" if "pty" in sent else "stdin"
    if kind not in sent:
        raise E2BError(501, "input: give stdin or pty", connect="unimplemented")
    data = _bytes(sent[kind], kind)
    if process.is_terminal and kind == "stdin":
        raise _unready("stdin", "tty assigned to process — input should be written to the pty, not the stdin")
    if not process.is_terminal and kind == "pty":
        raise _unready("tty", "tty not assigned to process — input should be written to the stdin, not the tty")
    if not process.has_input or not await process.write(data):
        raise _unready("stdin", "stdin not enabled or closed")


def _unready(what: str, why: str) -> E2BError:
    return E2BError(400, f"error writing to {what}: {why}", connect="failed_precondition")


async def close_stdin(call: Call, body: Message) -> Message:
    """End a process's standard input."""
    async with _reached(call, body) as (_, process):
        if process.is_terminal:
            why = "cannot close stdin for PTY process — send Ctrl+D (0x04) instead"
            raise E2BError(400, f"error closing stdin: {why}", connect="failed_precondition")
        await process.close_stdin()
    return {}


async def stream_input(call: Call) -> Message:
    """Write what a client's stream has: first the process, then its input, in order."""
    assert call.target is not None  # noqa: S101 - of envd
    with call.e2b.readers(call.target.sandbox_id).reading() as cut:
        writing = asyncio.ensure_future(_write_all(call))
        await asyncio.wait((writing, cut), return_when=asyncio.FIRST_COMPLETED)
        if not writing.done():
            writing.cancel()
            await asyncio.wait((writing,))
            raise Dropped(cut.result())
        return await writing


async def _write_all(call: Call) -> Message:
    async with AsyncExitStack() as stack:
        process: AsyncProcess | None = None
        async for message in messages(call):
            if "start" in message:
                _, process = await stack.enter_async_context(_reached(call, _object(message, "start")))
            elif "data" in message and process is not None:
                await _write(process, _object(_object(message, "data"), "input"))
            elif "keepalive" not in message:
                raise E2BError(400, "send start, then data and keepalive")
    return {}


ROWS = (
    server_stream(SERVICE, "Start", start),
    server_stream(SERVICE, "Connect", connect),
    client_stream(SERVICE, "StreamInput", stream_input),
    unary(SERVICE, "List", list_processes),
    unary(SERVICE, "SendSignal", send_signal),
    unary(SERVICE, "Update", update),
    unary(SERVICE, "SendInput", send_input, longest_s=INPUT_S),
    unary(SERVICE, "CloseStdin", close_stdin),
)
