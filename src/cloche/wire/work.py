"""The work of verbs without an equivalent route, above all those that stream content."""

from __future__ import annotations

import asyncio
import base64
import errno
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import Annotated, Any

from pydantic import Field

from cloche import hostfs
from cloche.core.errors import InvalidRequest
from cloche.core.events import Sink
from cloche.core.letter_case import camel
from cloche.core.loops import finish
from cloche.core.processes import Detached
from cloche.core.record import replace
from cloche.core.remote import MOST_FIELDS
from cloche.core.result import Result
from cloche.execution.paths import file_time
from cloche.execution.ports import AsyncConnection
from cloche.execution.processes import MOST_CELLS, AsyncProcess
from cloche.execution.sandbox import AsyncSandbox
from cloche.keeper.attach import find_kept

from . import files, processes, sandboxes, sessions
from .at_path import AtPathBelow, AtPathBy, Listed, NewContent, Part, Watched
from .attachments import SharedProcess, encode_result, sandbox_name
from .calls import ERR, IN, OUT, Call, CallRequest
from .events import HEARTBEAT_S, ActiveRun
from .exec_options import Amount, ExecRequest, RunFields, WireModel, Word
from .host_calls import OffersTools, relaying
from .orders import make_order
from .problems import Refused
from .queue import RunOrder
from .uses import Use

Cells = Annotated[int, Field(ge=1, le=MOST_CELLS)]
PIECE = 1 << 18  # of a file that is read
MOST_OF_BYTE = 8  # bytes of JSON and of its copies


class Listing(WireModel):
    """Which sandboxes to list."""

    label: list[Word] = Field(default_factory=list, max_length=8)
    state: list[Word] = Field(default_factory=list, max_length=4)
    name: Word | None = None
    limit: Annotated[int, Field(ge=1, le=200)] = 50
    cursor: Word | None = None


class WireRun(RunFields, OffersTools):
    """What to run. With `stream`, its events are sent while it runs.

    `archive_size` bytes of a tar archive of its files and then `stdin_size` bytes of input come on stream 0.
    """

    stream: bool = False
    archive_size: Annotated[int, Field(ge=0)] = 0
    stdin_size: Annotated[int, Field(ge=0)] = 0

    @property
    def has_stream(self) -> bool:
        """Tell whether files or input come on stream 0."""
        return bool(self.archive_size or self.stdin_size)


class WireExec(ExecRequest, WireRun):
    """A run in a fresh sandbox."""


class WorkspaceRun(WireRun):
    """A run in a workspace."""

    timeout: Amount | None = None


class LiveRun(sandboxes.SandboxExec, OffersTools):
    """What to run in a live sandbox."""


class StartedProcess(processes.NewProcess):
    """A process to start, on a terminal of rows and columns if given. With `keep` it outlives its call."""

    keep: bool = False
    terminal: tuple[Cells, Cells] | None = None


class Patience(WireModel):
    """How long to wait."""

    seconds: Annotated[float, Field(ge=0, le=processes.MOST_WAIT_S)] = 30.0


class Size(WireModel):
    """The size of a terminal."""

    rows: Cells
    columns: Cells


class Port(WireModel):
    """A TCP port on loopback inside."""

    port: Annotated[int, Field(ge=1, le=65535)]


def use_of(request: CallRequest) -> Use:
    """Return the sandbox of a call in one."""
    assert request.use is not None  # noqa: S101 - a verb's table says that it is inside
    return request.use


# Sandboxes.


async def open_sandbox(_: Call, request: CallRequest) -> object:
    """Open a sandbox."""
    return await request.service.open_sandbox(request.fields, request.caller)


async def list_sandboxes(_: Call, request: CallRequest) -> object:
    """List sandboxes."""
    return await request.service.list_sandboxes(request.fields, request.caller)


async def look(_: Call, request: CallRequest) -> object:
    """Describe a sandbox."""
    return await request.service.sandboxes.describe(request.ids["sandbox"], request.caller.project)


async def end(_: Call, request: CallRequest) -> object:
    """End a sandbox."""
    return await request.service.end_sandbox(request.ids["sandbox"], request.caller)


async def attach(_: Call, request: CallRequest) -> object:
    """Describe a sandbox with everything that a client needs to use it: limits, policy, enforcement."""
    use = use_of(request)
    facts = await request.service.sandboxes.describe(use.held.id, request.caller.project)
    if use.held.is_held:
        policy, limits, enforcement = use.sandbox.policy, use.sandbox.limits, use.held.enforcement.as_dict()
    else:
        kept = await asyncio.to_thread(find_kept, sandbox_name(use.held.id))
        policy, limits, enforcement = kept.policy, kept.limits, kept.enforcement.as_dict()
    return {
        **facts,
        "level": enforcement["level"],
        "enforcement": enforcement["controls"],
        "limits": {camel(name): value for name, value in limits.as_dict().items()},
        "policy": {"network": policy.network, "users": policy.users, "languages": list(policy.languages)},
    }


async def hold(call: Call, request: CallRequest) -> object:
    """Use a sandbox until it ends, or the call is cancelled: its lease does not begin before."""
    use = use_of(request)
    await call.event("held", {"id": use.held.id})
    await asyncio.wait([use.held.lost])
    return {"id": use.held.id, "state": "ended"}


# Code, commands and processes.


async def run_apart(call: Call, request: CallRequest) -> object:
    """Run code or a command in a fresh sandbox, as `POST /api/code/exec` does; its files are sent before the end.

    It is in the list of runs, by the id in the first event.
    """
    return await queued(
        call, request, await make_order(request.service, request.caller, request.fields, size=call.held)
    )


async def queued(call: Call, request: CallRequest, order: RunOrder) -> str:
    """Queue a run, and send its events and files; return its result as JSON."""
    fields: WireRun = request.fields
    results: list[Result] = []
    await fields.record(request)

    async def start(sink: Sink | None) -> Result:
        async with relaying(call, fields.tools):
            results.append(await order.start(sink))
        await call.hold_result(request.service, json_size(results[0]))  # the run keeps its place meanwhile
        return results[0]

    kept = replace(order, start=start, returns_files=False, has_events=fields.stream, noted_beside=True)
    if fields.stream or request.service.keeps_runs:
        live = await request.service.runs.submit(kept)
        async with _ended_with(live):
            await call.event("run", {"id": live.id})
            if fields.stream:
                await _tell_events(call, live)
            await live.wait()
    else:
        live = await request.service.runs.run_here(kept)
    result = results[0]
    if fields.return_files and result.files:
        result = await _send_files(call, request, result)
    if result is not results[0] or result.files or len(result.stdout_bytes) > PIECE:
        return await asyncio.to_thread(encode_result, live.id, result)
    return encode_result(live.id, result, live.plain)


async def _send_files(call: Call, request: CallRequest, result: Result) -> Result:
    """Send a result's files and return it; without them if this machine's disk has no room for them in time."""
    load, size = request.service.wire, sum(file.size for file in result.files)
    without_files = replace(result, files=(), save_files=None, meta={**result.meta, "files_partial": "bytes"})
    if not await load.spool_later(call.whose, size):
        return without_files
    try:
        await call.send_all(OUT, _contents(result))
    except OSError as error:  # of the copy, before anything was sent
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        return without_files
    finally:
        load.spooled.give_back(call.whose, size)
    return result


async def open_workspace(call: Call, request: CallRequest) -> object:
    """Keep a workspace open until the call is cancelled. Each run in it is a fresh process."""
    options = await request.service.allowed_options(request.caller, request.fields.options())
    sandbox = await asyncio.to_thread(lambda: AsyncSandbox(live=False, **options))
    with request.service.wire.workspace(request.caller, sandbox) as number:
        async with sandbox:
            await call.event("opened", {"id": number})
            await asyncio.Event().wait()
    return {}


def _workspace(request: CallRequest) -> AsyncSandbox:
    return request.service.wire.find_workspace(request.ids["workspace"], request.caller.project)


async def run_in_workspace(
    call: Call, request: CallRequest, read_stdin: Callable[[], Awaitable[bytes]] | None = None
) -> object:
    """Run code or a command in a workspace, as `code.exec` does in a fresh sandbox."""
    fields: WorkspaceRun = request.fields
    sandbox, arguments = _workspace(request), await fields.run_arguments()
    fields.check(sandbox)
    if fields.timeout is not None:
        await request.service.allowed_options(request.caller, {"timeout": fields.timeout})

    async def start(sink: Sink | None) -> Result:
        request.service.check_workspace(sandbox.policy)
        if read_stdin is not None:
            arguments["stdin"] = await read_stdin()
        return await sandbox.run(**arguments, timeout=fields.timeout, on_event=sink)

    order = RunOrder(
        project=request.caller.project, api_key=request.caller.key_id, session_id=fields.session_id, start=start,
        size=call.held, amounts={"cpus": sandbox.limits.cpus, "memory": sandbox.limits.memory_bytes},
        summary={"sessionId": fields.session_id, "language": fields.language},
        asked=fields.stored_fields() if request.service.keeps_runs else None,
    )  # fmt: skip
    return await queued(call, request, order)


async def read_in_workspace(call: Call, request: CallRequest) -> object:
    """Send a file of a workspace."""
    return await _send_whole(call, request, _workspace(request).read_file)


async def write_in_workspace(call: Call, request: CallRequest) -> object:
    """Write a file of a workspace."""
    write_file = _workspace(request).write_file
    await request.service.record(
        "sandbox", what="upload", workspace=request.ids["workspace"], path=request.fields.read()
    )
    return await _take_whole(call, request, write_file)


async def read_of_session(call: Call, request: CallRequest) -> object:
    """Send a file of a session's workspace, which may be separate from the sandbox's."""
    return await _send_whole(call, request, use_of(request).held.session(request.ids["session"]).session.read_file)


async def write_of_session(call: Call, request: CallRequest) -> object:
    """Write a file of a session's workspace."""
    write_file = use_of(request).held.session(request.ids["session"]).session.write_file
    await request.service.record("sandbox", what="upload", session=request.ids["session"], path=request.fields.read())
    return await _take_whole(call, request, write_file)


async def _send_whole(call: Call, request: CallRequest, read: Callable[..., Awaitable[bytes]]) -> object:
    data = await read(request.fields.read(), max_bytes=min(request.fields.most, MOST_FIELDS))
    call.hold(request.service, len(data))
    await call.send(OUT, data)
    await call.end_stream(OUT)
    return {"size": len(data)}


async def _take_whole(call: Call, request: CallRequest, write: Callable[[str, bytes], Awaitable[None]]) -> object:
    """Write the client's data to a file, buffered until it is complete."""
    data = bytearray()
    async for piece in call.content():
        if len(data) + len(piece) > MOST_FIELDS:
            raise Refused(413, "body-too-large", f"more than {MOST_FIELDS} bytes, which are held as a whole here")
        call.hold(request.service, len(piece))
        data += piece
    await write(request.fields.read(), bytes(data))
    return {"size": len(data)}


async def _contents(result: Result) -> AsyncIterator[bytes]:
    """Yield the contents of a result's files, one after the other."""
    with tempfile.TemporaryDirectory(prefix="cloche-files-", dir=hostfs.temporary_folder()) as folder:
        for path in await finish(asyncio.to_thread(result.save, folder)):
            with open(os.path.join(folder, path), "rb") as source:  # noqa: ASYNC230 - a file that was just written
                while piece := await finish(asyncio.to_thread(source.read, PIECE)):
                    yield piece


async def run(call: Call, request: CallRequest) -> object:
    """Run code or a command to its end. Output is sent as events, and is also in the result."""
    fields: LiveRun = request.fields
    fields.check(use_of(request).sandbox)
    await fields.record(request)
    return await _tell(call, request, await sandboxes.exec_work(use_of(request), fields), fields.tools)


async def run_cell(call: Call, request: CallRequest) -> object:
    """Run a cell, with output as events and in the result."""
    return await _tell(call, request, await sessions.cell_work(use_of(request), request.ids["session"], request.fields))


async def _tell(
    call: Call, request: CallRequest, work: Callable[[Sink], Awaitable[Result]], names: Sequence[str] = ()
) -> str:
    async def bounded(sink: Sink) -> Result:
        async with relaying(call, names):
            result = await work(sink)
        await call.hold_result(request.service, json_size(result))
        return result

    live = use_of(request).held.begin(request.caller.project, bounded)
    async with _ended_with(live):
        await _tell_events(call, live)
        return await live.wait()


def json_size(result: Result) -> int:
    """Return about how many bytes a result takes at most while it is encoded: a control character has six in JSON."""
    return MOST_OF_BYTE * (len(result.stdout_bytes) + len(result.stderr_bytes))


async def _tell_events(call: Call, live: ActiveRun) -> None:
    async for event in live.events.read(0, heartbeat_s=HEARTBEAT_S):
        if event is not None and event.name not in ("result", "error"):  # these end the call
            await call.event(event.name, event.data)


@asynccontextmanager
async def _ended_with(live: ActiveRun) -> AsyncIterator[None]:
    """Kill the run if it is unfinished after the body."""
    try:
        yield
    finally:
        if live.task is not None and not live.task.done():
            live.cancel()
            await asyncio.wait({live.task})


async def execute(call: Call, request: CallRequest) -> object:
    """Run a command to its end, with its streams on the call's streams."""
    fields: processes.NewProcess = request.fields
    use = use_of(request)
    timeout = use.sandbox.timeout_s(await sandboxes.allowed_timeout(use, fields.timeout))
    process = await use.sandbox.start(
        fields.argv, shell=fields.shell, cwd=fields.cwd, env=fields.env, user=fields.user, timeout=timeout,
        tag=fields.tag, alone=fields.alone,
    )  # fmt: skip
    return await _carry(call, use, process)


async def start(call: Call, request: CallRequest) -> object:
    """Start a process, with its streams on the call's streams until it ends or is detached."""
    fields: StartedProcess = request.fields
    sandbox = use_of(request).sandbox
    if fields.terminal is None:
        process = await sandbox.start(
            fields.argv,
            shell=fields.shell,
            cwd=fields.cwd,
            env=fields.env,
            user=fields.user,
            timeout=fields.timeout,
            keep=fields.keep,
            tag=fields.tag,
            alone=fields.alone,
        )
    elif fields.shell is not None or fields.keep:
        raise InvalidRequest("terminal: it takes argv, and no keep; let its process go by process.detach")
    else:
        rows, columns = fields.terminal
        process = await sandbox.terminal(
            fields.argv,
            rows=rows,
            columns=columns,
            cwd=fields.cwd,
            env=fields.env,
            user=fields.user,
            timeout=fields.timeout,
            tag=fields.tag,
            alone=fields.alone,
        )
    return await _carry(call, use_of(request), process)


async def _carry(call: Call, use: Use, process: AsyncProcess) -> object:
    async with use.held.shared(process) as shared:
        await call.event("started", {"id": process.id, "pid": process.pid})
        return await _follow(call, shared)


async def follow(call: Call, request: CallRequest) -> object:
    """Attach the call's streams to a running process. It outlives the call."""
    use, process_id = use_of(request), request.ids["process"]
    info = await processes.find(use, process_id)
    async with use.held.process(process_id) as shared:
        with processes.followed(shared, process_id):
            await call.event("started", {"id": info.id, "pid": info.pid})
            return await _follow(call, shared)


async def _follow(call: Call, shared: SharedProcess) -> object:
    """Carry a process's input and output, and return its result, or that it was detached."""
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
    """Pass input on, at the pace of the process; drop it once the process no longer reads."""
    is_read = True
    async for data in call.pieces(IN):
        is_read = is_read and await process.write(data)
    await process.close_stdin()


async def logs(_: Call, request: CallRequest) -> object:
    """Return the last unread output."""
    use, process_id = use_of(request), request.ids["process"]
    await processes.find(use, process_id)
    stdout, stderr = await use.sandbox.logs(process_id)
    return {"stdoutBase64": base64.b64encode(stdout).decode(), "stderrBase64": base64.b64encode(stderr).decode()}


async def wait(_: Call, request: CallRequest) -> object:
    """Wait for a process to end."""
    return await processes.wait(use_of(request), request.ids["process"], request.fields.seconds)


async def resize(_: Call, request: CallRequest) -> object:
    """Set the size of a terminal."""
    use, process_id = use_of(request), request.ids["process"]
    async with processes.reached(use, process_id) as process:
        if process is not None:
            await process.resize(request.fields.rows, request.fields.columns)
    return {}


async def detach(_: Call, request: CallRequest) -> object:
    """Detach from a process, which runs on."""
    use, process_id = use_of(request), request.ids["process"]
    await processes.find(use, process_id)
    await use.held.let_go(process_id)
    return {}


# Files.


async def stat(_: Call, request: CallRequest) -> object:
    """Describe the file at a path."""
    fields: AtPathBy = request.fields
    return await files.stat(use_of(request), fields.read(), fields.timeout, fields.rights())


async def list_folder(_: Call, request: CallRequest) -> object:
    """List a folder."""
    at: Listed = request.fields
    return await files.entries(use_of(request), at.read(), at.recursive, at.timeout, at.depth, at.rights())


async def remove(_: Call, request: CallRequest) -> object:
    """Remove the file at a path."""
    at: AtPathBelow = request.fields
    return await files.remove(use_of(request), at.read(), at.recursive, at.timeout, at.rights())


async def space(_: Call, request: CallRequest) -> object:
    """Tell how much the files take."""
    return {"used": await use_of(request).held.live.disk_used()}


async def read(call: Call, request: CallRequest) -> object:
    """Send a file, or a range of it."""
    file_range: Part = request.fields
    live, by = use_of(request).held.live, file_range.rights()
    pieces = live.read_stream(file_range.read(), offset=file_range.offset, count=file_range.count, by=by)
    return await _sent(call, pieces)


async def pack(call: Call, request: CallRequest) -> object:
    """Send a folder as a tar archive."""
    skipped: list[int] = []
    sent = await _sent(call, files.packed(use_of(request), request.fields.read(), skipped.append))
    return {**sent, "leftOut": sum(skipped)}


async def _sent(call: Call, pieces: Any) -> dict[str, int]:  # noqa: ANN401 - a generator, though it is not said so
    async with aclosing(pieces):
        return {"size": await call.send_all(OUT, pieces)}


async def write(call: Call, request: CallRequest) -> object:
    """Write the client's data to a file. Incomplete data replaces nothing."""
    new: NewContent = request.fields
    use, path = use_of(request), new.read()
    bits = None if new.mode is None else int(new.mode, 8)
    await use.service.record("sandbox", what="upload", path=path)
    async with file_time(path, new.timeout):
        options: dict[str, Any] = {"how": new.how, "mode": bits, "metadata": new.metadata}
        written = await use.held.live.write_path(path, call.content(), by=new.rights(), **options)
        return files.as_dict(await use.held.live.stat_path(written, by=new.rights()))


async def unpack(call: Call, request: CallRequest) -> object:
    """Unpack an archive sent by the client."""
    use, path = use_of(request), request.fields.read()
    await use.service.record("sandbox", what="upload", path=path)
    async with file_time(path, request.fields.timeout):
        await use.held.live.unpack_path(path, call.content())
        return files.as_dict(await use.sandbox.stat(path))


async def watch(call: Call, request: CallRequest) -> object:
    """Send changes as events, until the call is cancelled."""
    at: Watched = request.fields
    options = {"recursive": at.recursive, "is_exact": at.is_exact, "describes": at.describes}
    async with AsyncExitStack() as stack:
        async with file_time(at.read(), at.timeout):
            live: Any = use_of(request).held.live
            watch = await stack.enter_async_context(live.watch_path(at.read(), by=at.rights(), **options))
        await call.event("watching", {"isDirectory": watch.is_directory, **files.named(watch.folder, "folder")})
        async for change in watch:
            await call.event("change", files.change_as_dict(change))
    return {}


# Ports.


async def connect(call: Call, request: CallRequest) -> object:
    """Connect to a server inside. The call ends when both directions have ended."""
    try:
        connection = await use_of(request).sandbox.connect(request.fields.port)
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
        except BrokenPipeError:  # it reads no more; its output may still arrive
            is_taken = False
    await connection.end()
