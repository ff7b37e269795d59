"""What those verbs do that no route does in the same way: above all those whose content passes on streams."""

from __future__ import annotations

import asyncio
import base64
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from cloche.core.errors import InvalidRequest
from cloche.core.events import Sink
from cloche.core.processes import Detached
from cloche.core.record import replace
from cloche.core.remote import MOST_FIELDS
from cloche.core.result import Result
from cloche.execution.paths import file_time
from cloche.execution.ports import AsyncConnection
from cloche.execution.processes import MOST_CELLS, AsyncProcess
from cloche.execution.sandbox import AsyncSandbox
from cloche.keeper.attach import find_kept
from cloche.records.results import camel

from ..attachments import SharedProcess, encode_result
from ..events import HEARTBEAT_S, LiveRun
from ..exec_options import Amount, ExecRequest, RunFields, WireModel, Word
from ..problems import Refused
from ..routes import sandbox_files as files
from ..routes import sandbox_processes as processes
from ..routes import sandbox_sessions as sessions
from ..routes import sandboxes
from ..routes.code import allowed_options, make_order
from ..runs import RunOrder
from ..sandbox_use import Use
from ..sandboxes import sandbox_name
from .calls import ERR, IN, OUT, Asked, Call

Cells = Annotated[int, Field(ge=1, le=MOST_CELLS)]
PIECE = 1 << 18  # of a file that is read


class Listing(WireModel):
    """Which sandboxes to list."""

    label: list[Word] = Field(default_factory=list, max_length=8)
    state: list[Word] = Field(default_factory=list, max_length=4)
    name: Word | None = None
    limit: Annotated[int, Field(ge=1, le=200)] = 50
    cursor: Word | None = None


class WireRun(RunFields):
    """What is run; with `stream`, what happens is told as it goes on."""

    stream: bool = False


class WireExec(ExecRequest, WireRun):
    """A run in a sandbox of its own."""


class WorkspaceRun(WireRun):
    """A run in a workspace."""

    timeout: Amount | None = None


class StartedProcess(processes.NewProcess):
    """A process to start; with `terminal`, rows and columns. One to `keep` goes on when its call ends."""

    keep: bool = False
    terminal: tuple[Cells, Cells] | None = None


class Patience(WireModel):
    """For how long to wait."""

    seconds: Annotated[float, Field(ge=0, le=processes.MOST_WAIT_S)] = 30.0


class Size(WireModel):
    """The size of a terminal."""

    rows: Cells
    columns: Cells


class AtPath(WireModel):
    """A path inside; one that is no UTF-8 in base64."""

    path: files.GuestPath | None = None
    path_base64: Annotated[str, StringConstraints(max_length=2 * files.MOST_PATH)] | None = None

    def read(self) -> str:
        """Return it. Raises InvalidRequest."""
        return files.read_path(self.path, self.path_base64)


class AtPathInTime(AtPath):
    """A path, and what the call may take."""

    timeout: Amount | None = None


class AtPathBelow(AtPathInTime):
    """A path, and whether what is below counts."""

    recursive: bool = False


class Part(AtPath):
    """A file, or `count` bytes of it from `offset` on."""

    offset: Annotated[int, Field(ge=0)] = 0
    count: Annotated[int, Field(ge=0)] | None = None


class NewContent(AtPathInTime):
    """A file to write: in place of what is there, at its end, or only where nothing is."""

    how: Literal["replace", "append", "new"] = "replace"
    mode: Annotated[str, StringConstraints(pattern="^0?[0-7]{3}$")] | None = None


class WholeFile(AtPath):
    """A file to read as a whole, of `most` bytes at the most."""

    most: Annotated[int, Field(ge=0)] = MOST_FIELDS


class Port(WireModel):
    """A TCP port on loopback inside."""

    port: Annotated[int, Field(ge=1, le=65535)]


def _use(asked: Asked) -> Use:
    assert asked.use is not None  # noqa: S101 - a verb's table says that it is inside
    return asked.use


# Sandboxes.


async def open_sandbox(_: Call, asked: Asked) -> object:
    """Open one."""
    return (await sandboxes.open_sandbox(asked.fields, asked.caller, asked.service)).as_dict()


async def list_sandboxes(_: Call, asked: Asked) -> object:
    """List them."""
    which: Listing = asked.fields
    return await sandboxes.sandboxes(
        caller=asked.caller, service=asked.service, label=which.label, state=which.state, name=which.name,
        limit=which.limit, cursor=which.cursor,
    )  # fmt: skip


async def look(_: Call, asked: Asked) -> object:
    """Describe one."""
    return await sandboxes.look(asked.ids["sandbox"], asked.caller, asked.service)


async def end(_: Call, asked: Asked) -> object:
    """End one."""
    return await sandboxes.end(asked.ids["sandbox"], asked.caller, asked.service)


async def attach(_: Call, asked: Asked) -> object:
    """Describe one with all that a client needs to offer it as its own: limits, rules, what is in force."""
    use = _use(asked)
    facts = await asked.service.sandboxes.describe(use.held.id, asked.caller.project)
    kept = await asyncio.to_thread(find_kept, sandbox_name(use.held.id))
    said = kept.enforcement.as_dict()
    limits = {camel(name): value for name, value in kept.limits.as_dict().items()}
    policy = {"network": kept.policy.network, "users": kept.policy.users, "languages": list(kept.policy.languages)}
    return {**facts, "level": said["level"], "enforcement": said["controls"], "limits": limits, "policy": policy}


# Code, commands and processes.


async def run_apart(call: Call, asked: Asked) -> object:
    """Run code or a command in a sandbox of its own, as `POST /api/code/exec` does; its files are sent before it ends.

    It is in the list of runs, under the id that the first event has.
    """
    return await _queued(call, asked, await make_order(asked.service, asked.caller, asked.fields, size=call.held))


async def _queued(call: Call, asked: Asked, order: RunOrder) -> str:
    one: WireRun = asked.fields
    results: list[Result] = []

    async def start(sink: Sink | None) -> Result:
        results.append(await order.start(sink))
        return results[0]

    live = await asked.service.runs.submit(
        replace(order, start=start, returns_files=False, has_events=one.stream, noted_beside=True)
    )
    async with _ended_with(live):
        await call.event("run", {"id": live.id})
        if one.stream:
            await _tell_events(call, live)
        await live.wait()
        if one.return_files and results[0].files:
            await call.send_all(OUT, _contents(results[0]))
    if results[0].files or len(results[0].stdout_bytes) > PIECE:
        return await asyncio.to_thread(encode_result, live.id, results[0])
    return encode_result(live.id, results[0], live.plain)


async def open_workspace(call: Call, asked: Asked) -> object:
    """Keep a workspace, in which runs are one fresh process after the other, until the call is cancelled."""
    options = await allowed_options(asked.service, asked.caller, asked.fields.options())
    sandbox = await asyncio.to_thread(lambda: AsyncSandbox(live=False, **options))
    with asked.service.wire.workspace(asked.caller, sandbox) as number:
        async with sandbox:
            await call.event("opened", {"id": number})
            await asyncio.Event().wait()
    return {}


def _workspace(asked: Asked) -> AsyncSandbox:
    return asked.service.wire.find_workspace(asked.ids["workspace"], asked.caller.project)


async def run_in_workspace(call: Call, asked: Asked) -> object:
    """Run code or a command in a workspace, as `code.exec` does in a sandbox of its own."""
    one: WorkspaceRun = asked.fields
    sandbox, arguments = _workspace(asked), await one.run_arguments()
    if one.timeout is not None:
        await allowed_options(asked.service, asked.caller, {"timeout": one.timeout})

    async def start(sink: Sink | None) -> Result:
        return await sandbox.run(**arguments, timeout=one.timeout, on_event=sink)

    order = RunOrder(
        project=asked.caller.project, api_key=asked.caller.key_id, session_id=one.session_id, start=start,
        size=call.held, summary={"sessionId": one.session_id, "language": one.language}, asked=one.kept(),
    )  # fmt: skip
    return await _queued(call, asked, order)


async def read_in_workspace(call: Call, asked: Asked) -> object:
    """Send a file of a workspace."""
    return await _send_whole(call, asked, _workspace(asked).read_file)


async def write_in_workspace(call: Call, asked: Asked) -> object:
    """Write a file of a workspace."""
    write_file = _workspace(asked).write_file
    await asked.service.record("sandbox", what="upload", workspace=asked.ids["workspace"], path=asked.fields.read())
    return await _take_whole(call, asked, write_file)


async def read_of_session(call: Call, asked: Asked) -> object:
    """Send a file of a session's workspace, which may be one of its own."""
    return await _send_whole(call, asked, _use(asked).held.session(asked.ids["session"]).session.read_file)


async def write_of_session(call: Call, asked: Asked) -> object:
    """Write a file there."""
    write_file = _use(asked).held.session(asked.ids["session"]).session.write_file
    await asked.service.record("sandbox", what="upload", session=asked.ids["session"], path=asked.fields.read())
    return await _take_whole(call, asked, write_file)


async def _send_whole(call: Call, asked: Asked, read: Callable[..., Awaitable[bytes]]) -> object:
    data = await read(asked.fields.read(), max_bytes=min(asked.fields.most, MOST_FIELDS))
    call.hold(asked.service, len(data))
    await call.send(OUT, data)
    await call.end_stream(OUT)
    return {"size": len(data)}


async def _take_whole(call: Call, asked: Asked, write: Callable[[str, bytes], Awaitable[None]]) -> object:
    """Write what the client sends, which is held until it is whole."""
    found = bytearray()
    async for piece in call.content():
        if len(found) + len(piece) > MOST_FIELDS:
            raise Refused(413, "body-too-large", f"more than {MOST_FIELDS} bytes, which are held as a whole here")
        call.hold(asked.service, len(piece))
        found += piece
    await write(asked.fields.read(), bytes(found))
    return {"size": len(found)}


async def _contents(result: Result) -> AsyncIterator[bytes]:
    """Yield what the files of a result have in them, one after the other."""
    with tempfile.TemporaryDirectory(prefix="cloche-files-") as folder:
        for path in await asyncio.to_thread(result.save, folder):
            with open(os.path.join(folder, path), "rb") as source:  # noqa: ASYNC230 - a file that was just written
                while piece := await asyncio.to_thread(source.read, PIECE):
                    yield piece


async def run(call: Call, asked: Asked) -> object:
    """Run code or a command to its end; its output comes as events, and is in the result."""
    return await _tell(call, asked, await sandboxes.exec_work(_use(asked), asked.fields))


async def run_cell(call: Call, asked: Asked) -> object:
    """Run a cell in the same way."""
    return await _tell(call, asked, await sessions.cell_work(_use(asked), asked.ids["session"], asked.fields))


async def _tell(call: Call, asked: Asked, work: Callable[[Sink], Awaitable[Result]]) -> str:
    live = _use(asked).held.begin(asked.caller.project, work)
    async with _ended_with(live):
        await _tell_events(call, live)
        return await live.wait()


async def _tell_events(call: Call, live: LiveRun) -> None:
    async for event in live.events.read(0, heartbeat_s=HEARTBEAT_S):
        if event is not None and event.name not in ("result", "error"):  # which end the call
            await call.event(event.name, event.data)


@asynccontextmanager
async def _ended_with(live: LiveRun) -> AsyncIterator[None]:
    """Kill it where it goes on after the body."""
    try:
        yield
    finally:
        if live.task is not None and not live.task.done():
            live.cancel()
            await asyncio.wait({live.task})


async def execute(call: Call, asked: Asked) -> object:
    """Run a command to its end, its streams on the call's streams."""
    one: processes.NewProcess = asked.fields
    use = _use(asked)
    timeout = use.sandbox.timeout_s(await sandboxes.allowed_timeout(use, one.timeout))
    process = await use.sandbox.start(
        one.argv, shell=one.shell, cwd=one.cwd, env=one.env, user=one.user, timeout=timeout
    )
    return await _carry(call, use, process)


async def start(call: Call, asked: Asked) -> object:
    """Start a process, its streams carried by the call until it ends, or is let go."""
    one: StartedProcess = asked.fields
    sandbox = _use(asked).sandbox
    if one.terminal is None:
        process = await sandbox.start(
            one.argv, shell=one.shell, cwd=one.cwd, env=one.env, user=one.user, timeout=one.timeout, keep=one.keep
        )
    elif one.shell is not None or one.keep:
        raise InvalidRequest("terminal: it takes argv, and no keep; let its process go by process.detach")
    else:
        rows, columns = one.terminal
        process = await sandbox.terminal(
            one.argv, rows=rows, columns=columns, cwd=one.cwd, env=one.env, user=one.user, timeout=one.timeout
        )
    return await _carry(call, _use(asked), process)


async def _carry(call: Call, use: Use, process: AsyncProcess) -> object:
    async with use.held.shared(process) as shared:
        await call.event("started", {"id": process.id, "pid": process.pid})
        return await _follow(call, shared)


async def follow(call: Call, asked: Asked) -> object:
    """Carry the streams of a process that is there; the call's end lets it go on."""
    use, process_id = _use(asked), asked.ids["process"]
    found = await processes.find(use, process_id)
    async with use.held.process(process_id) as shared:
        with processes.followed(shared, process_id):
            await call.event("started", {"id": found.id, "pid": found.pid})
            return await _follow(call, shared)


async def _follow(call: Call, shared: SharedProcess) -> object:
    """Carry input and output of a process, and return its result; of one that was let go, that."""
    process = shared.process
    feeding = asyncio.ensure_future(_feed(call, process))
    errors = asyncio.ensure_future(call.send_all(ERR, aiter(process.stderr)))
    try:
        await call.send_all(OUT, aiter(process.stdout))
        await errors
        result = await process.wait()
    except Detached:
        return {"id": process.id, "isDetached": True}
    finally:
        feeding.cancel()
        errors.cancel()
        await asyncio.gather(feeding, errors, return_exceptions=True)
    return await asyncio.to_thread(encode_result, process.id, result)


async def _feed(call: Call, process: AsyncProcess) -> None:
    """Pass input on as fast as it is read; what nobody reads any more is dropped."""
    is_read = True
    async for data in call.pieces(IN):
        is_read = is_read and await process.write(data)
    await process.close_stdin()


async def logs(_: Call, asked: Asked) -> object:
    """Return the last output that nobody has read."""
    use, process_id = _use(asked), asked.ids["process"]
    await processes.find(use, process_id)
    stdout, stderr = await use.sandbox.logs(process_id)
    return {"stdoutBase64": base64.b64encode(stdout).decode(), "stderrBase64": base64.b64encode(stderr).decode()}


async def wait(_: Call, asked: Asked) -> object:
    """Wait for an end."""
    return await processes.wait(asked.ids["process"], _use(asked), asked.fields.seconds)


async def resize(_: Call, asked: Asked) -> object:
    """Set the size of a terminal."""
    use, process_id = _use(asked), asked.ids["process"]
    await processes.find(use, process_id)
    async with use.held.process(process_id) as shared:
        await shared.process.resize(asked.fields.rows, asked.fields.columns)
    return {}


async def detach(_: Call, asked: Asked) -> object:
    """Let a process go on by itself."""
    use, process_id = _use(asked), asked.ids["process"]
    await processes.find(use, process_id)
    await use.held.let_go(process_id)
    return {}


# Files.


async def stat(_: Call, asked: Asked) -> object:
    """Describe what is at a path."""
    return await files.stat(_use(asked), asked.fields.read(), asked.fields.timeout)


async def list_folder(_: Call, asked: Asked) -> object:
    """List a folder."""
    return await files.entries(_use(asked), asked.fields.read(), asked.fields.recursive, asked.fields.timeout)


async def remove(_: Call, asked: Asked) -> object:
    """Remove what is at a path."""
    return await files.remove(_use(asked), asked.fields.read(), asked.fields.recursive, asked.fields.timeout)


async def read(call: Call, asked: Asked) -> object:
    """Send a file, or a part of it."""
    part: Part = asked.fields
    pieces = _use(asked).held.live.read_stream(part.read(), offset=part.offset, count=part.count)
    return await _sent(call, pieces)


async def pack(call: Call, asked: Asked) -> object:
    """Send a folder as an archive."""
    skipped: list[int] = []
    sent = await _sent(call, files.packed(_use(asked), asked.fields.read(), skipped.append))
    return {**sent, "leftOut": sum(skipped)}


async def _sent(call: Call, pieces: Any) -> dict[str, int]:  # noqa: ANN401 - a generator, though it is not said so
    async with aclosing(pieces):
        return {"size": await call.send_all(OUT, pieces)}


async def write(call: Call, asked: Asked) -> object:
    """Write a file of what the client sends; what is half sent replaces nothing."""
    new: NewContent = asked.fields
    use, path = _use(asked), new.read()
    bits = None if new.mode is None else int(new.mode, 8)
    await use.service.record("sandbox", what="upload", path=path)
    async with file_time(path, new.timeout):
        await use.held.live.write_path(path, call.content(), how=new.how, mode=bits)
        return files.as_dict(await use.sandbox.stat(path))


async def unpack(call: Call, asked: Asked) -> object:
    """Unpack an archive that the client sends."""
    use, path = _use(asked), asked.fields.read()
    await use.service.record("sandbox", what="upload", path=path)
    async with file_time(path, asked.fields.timeout):
        await use.held.live.unpack_path(path, call.content())
        return files.as_dict(await use.sandbox.stat(path))


async def watch(call: Call, asked: Asked) -> object:
    """Tell what changes, until the call is cancelled."""
    one: AtPathBelow = asked.fields
    watch = await _use(asked).sandbox.watch(one.read(), recursive=one.recursive, timeout=one.timeout)
    async with watch as changes:
        await call.event("watching", {})
        while (change := await changes.next()) is not None:
            await call.event("change", files.change_as_dict(change))
    return {}


# Ports.


async def connect(call: Call, asked: Asked) -> object:
    """Connect to a server inside; the call ends when both halves have."""
    try:
        connection = await _use(asked).sandbox.connect(asked.fields.port)
    except OSError as error:
        raise Refused(409, "connection-refused", str(error)) from error
    async with connection:
        await call.event("connected", {})
        sending = asyncio.ensure_future(_pass_in(call, connection))
        try:
            await call.send_all(OUT, _received(connection))
            await sending
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
    return {}


async def _received(connection: AsyncConnection) -> AsyncIterator[bytes]:
    while data := await connection.read():
        yield data


async def _pass_in(call: Call, connection: AsyncConnection) -> None:
    is_taken = True
    async for data in call.pieces(IN):
        try:
            if is_taken:
                await connection.write(data)
        except BrokenPipeError:  # it takes no more; what it sends may still come
            is_taken = False
    await connection.end()
