"""Runs whose files and input are sent on a stream, as they are too large for the fields.

Stream 0 carries a tar archive of `archiveSize` bytes, then `stdinSize` bytes of input. All of it is written to an
unnamed file of this machine and checked before the run is queued: a slow client occupies no place of the queue. A run
with an archive has a live sandbox of its own, which unpacks it piece by piece: only the input is held in memory as a
whole, while the run goes on.
"""

from __future__ import annotations

import asyncio
import tarfile
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, BinaryIO

from cloche import hostfs
from cloche.core.errors import InvalidRequest, SandboxFileError
from cloche.core.escape import escape_name
from cloche.core.events import Sink
from cloche.core.limits import Limits
from cloche.core.loops import finish
from cloche.core.request import MAX_STDIN_BYTES, workspace_path
from cloche.core.result import Result
from cloche.core.tar import members, read_at
from cloche.execution.run import arun
from cloche.execution.sandbox import AsyncSandbox

from . import work
from .calls import IN, STALL_S, Call, CallRequest
from .problems import Refused
from .queue import RunOrder

PER_FILE_BYTES = 8192  # of an archive, beside a file's content: headers, a long name, padding
MOST_DEPTH = 64  # folders above a file
FILE_KINDS = (tarfile.REGTYPE, tarfile.AREGTYPE)


async def run_apart(call: Call, request: CallRequest) -> object:
    """Run in a fresh sandbox, with files and input from the fields or from stream 0."""
    fields: work.WireExec = request.fields
    if not fields.has_stream:
        return await work.run_apart(call, request)
    options = await request.service.allowed_options(request.caller, fields.options())
    sandbox = await asyncio.to_thread(lambda: AsyncSandbox(live=True, **options))
    check_sizes(fields, sandbox.limits)
    async with received(call, request, fields) as spool:
        await asyncio.to_thread(check_archive, spool, fields.archive_size, sandbox.limits)
        return await work.queued(call, request, _order(request, options, sandbox, spool, call.held))


def _order(
    request: CallRequest, options: dict[str, Any], sandbox: AsyncSandbox, spool: BinaryIO, size: int
) -> RunOrder:
    fields: work.WireExec = request.fields

    async def start(sink: Sink | None) -> Result:
        arguments = {**await fields.run_arguments(), "stdin": await read_input(spool, fields)}
        if not fields.archive_size:
            return await arun(**arguments, on_event=sink, **options)
        async with sandbox:
            fields.check(sandbox)
            await _unpack(sandbox, pieces_of(spool, fields.archive_size))
            collect = ["**"] if fields.return_files else None
            result = await sandbox.run(**arguments, collect=collect, on_event=sink)
        for note in ("files_shared", "network_shared"):  # nobody else used the sandbox
            result.meta.pop(note, None)
        return result

    return RunOrder(
        project=request.caller.project, api_key=request.caller.key_id, session_id=fields.session_id, start=start,
        size=size, amounts=options, summary={"sessionId": fields.session_id, "language": fields.language},
        asked=fields.stored_fields() if request.service.keeps_runs else None,
    )  # fmt: skip


async def _unpack(sandbox: AsyncSandbox, archive: AsyncIterator[bytes]) -> None:
    try:
        await sandbox._require_live("files").unpack_path("/workspace", archive)
    except SandboxFileError as error:
        raise InvalidRequest(f"files: {error}; nothing has run") from error


async def run_in_workspace(call: Call, request: CallRequest) -> object:
    """Run in a workspace, with input from the fields or from stream 0."""
    fields: work.WorkspaceRun = request.fields
    if not fields.has_stream:
        return await work.run_in_workspace(call, request)
    if fields.archive_size:
        raise Refused(
            422, "invalid-request", "archiveSize: files of a workspace are written by workspace.write",
            field="archiveSize",
        )  # fmt: skip
    check_sizes(fields, None)
    async with received(call, request, fields) as spool:
        return await work.run_in_workspace(call, request, lambda: read_input(spool, fields))


async def read_input(spool: BinaryIO, fields: work.WireRun) -> bytes:
    """Return the input, which follows the archive."""
    return await finish(asyncio.to_thread(read_at, spool, fields.archive_size, fields.stdin_size))


def check_sizes(fields: work.WireRun, limits: Limits | None) -> None:
    """Raise Refused for more than a sandbox with these limits can take, and for content in the fields as well."""
    for size, name, is_given in (
        (fields.archive_size, "archiveSize", bool(fields.files)),
        (fields.stdin_size, "stdinSize", fields.stdin is not None or fields.stdin_base64 is not None),
    ):
        if size and is_given:
            raise Refused(422, "invalid-request", f"{name}: the fields have the same content, too", field=name)
    if fields.stdin_size > MAX_STDIN_BYTES:
        raise Refused(413, "body-too-large", f"stdin: {fields.stdin_size} bytes exceed the limit of {MAX_STDIN_BYTES}")
    if limits is None:
        return
    most = limits.disk_bytes + PER_FILE_BYTES * limits.inodes
    if fields.archive_size > most:
        raise Refused(
            413, "body-too-large",
            f"files: an archive of {fields.archive_size} bytes exceeds the sandbox's disk of {limits.disk_bytes}; "
            "raise disk or send fewer",
        )  # fmt: skip


@asynccontextmanager
async def received(call: Call, request: CallRequest, fields: work.WireRun) -> AsyncIterator[BinaryIO]:
    """Receive the content into an unnamed file, kept and accounted for the body. Raises Refused if sizes differ."""
    size, wire = fields.archive_size + fields.stdin_size, request.service.wire
    wire.spool(call.whose, size)
    try:
        with tempfile.TemporaryFile(prefix="cloche-", dir=hostfs.temporary_folder(), buffering=0) as spool:
            await _receive(call, spool, size)
            yield spool
    finally:
        wire.spooled.give_back(call.whose, size)


async def _receive(call: Call, spool: BinaryIO, size: int) -> None:
    try:
        await _write_pieces(call, spool, size)
    except OSError as error:
        raise Refused(
            503, "busy", f"the service cannot hold the files of the run ({error.strerror}); nothing has run",
            headers={"Retry-After": "5"},
        ) from error  # fmt: skip


async def _write_pieces(call: Call, spool: BinaryIO, size: int) -> None:
    count, pieces = 0, call.pieces(IN)
    while (piece := await _next(pieces)) is not None:
        count += len(piece)
        if count > size:
            raise Refused(413, "body-too-large", f"more came on stream {IN} than the {size} bytes that were declared")
        await finish(asyncio.to_thread(hostfs.write_whole, spool.fileno(), piece))
    if count < size:
        raise Refused(422, "invalid-request", f"stream {IN} ended after {count} of {size} bytes; nothing has run")


async def _next(pieces: AsyncIterator[bytes]) -> bytes | None:
    try:
        async with asyncio.timeout(STALL_S):
            return await anext(pieces, None)
    except TimeoutError:
        raise Refused(409, "not-sent", f"nothing came on stream {IN} for {STALL_S:g} s; nothing has run") from None


def check_archive(spool: BinaryIO, size: int, limits: Limits) -> None:
    """Raise InvalidRequest for an archive with other entries than files below /workspace, or with too many."""
    room, count = limits.disk_bytes, 0
    try:
        for member in members(spool, size):
            _check_member(member.name, member.kind)
            room, count = room - member.size, count + 1
            if room < 0:
                raise InvalidRequest(f"files: they exceed the sandbox's disk of {limits.disk_bytes} bytes")
            if count > limits.inodes:
                raise InvalidRequest(f"files: more than {limits.inodes} files, which the sandbox has inodes for")
    except InvalidRequest:
        raise
    except (tarfile.TarError, ValueError) as error:
        raise InvalidRequest(f"files: this is no tar archive ({error})") from error


def _check_member(name: str | None, kind: bytes) -> None:
    if name is None or kind not in FILE_KINDS:
        shown = escape_name(name[:64]) if name else "an entry"
        raise InvalidRequest(f"files: {shown} is no regular file; an archive has files with names in GNU headers alone")
    if workspace_path(name).count("/") > MOST_DEPTH:
        raise InvalidRequest(f"files: {escape_name(name[:64])} is deeper than {MOST_DEPTH} folders")


async def pieces_of(spool: BinaryIO, size: int) -> AsyncIterator[bytes]:
    """Yield the first `size` bytes of a file."""
    spool.seek(0)
    while size and (piece := await finish(asyncio.to_thread(spool.read, min(size, work.PIECE)))):
        size -= len(piece)
        yield piece
