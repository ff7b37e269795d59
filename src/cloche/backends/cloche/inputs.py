"""Files and input of a run that are too large for its fields: sent on stream 0 of its call before the run starts."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from cloche.core.errors import BackendUnavailable, InvalidRequest
from cloche.core.record import dataclass
from cloche.core.remote import RemoteAccount
from cloche.core.request import InputFile, Request

from ..archive import archive_pieces, archive_size
from ..remote.failures import remote_error
from .fields import MOST_FILES, MOST_SENT, fits_fields, run_fields
from .wire import IN, Call, LinkLost

PIECE = 1 << 20  # bytes read from disk at once


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedInputs:
    """Hold the files and the input of a run that go into a stream: an archive of the files, then the input."""

    files: tuple[InputFile, ...]
    stdin: bytes

    @property
    def archive_size(self) -> int:
        """Return the number of bytes of the archive; 0 without files."""
        return archive_size(self.files) if self.files else 0

    def blocks(self) -> Iterator[bytearray]:
        """Yield what is sent in blocks of at most twice `PIECE`. Reads from disk."""
        block = bytearray()
        for piece in self._pieces():
            block += piece
            _let_go(piece)
            if len(block) >= PIECE:
                yield block
                block = bytearray()
        if block:
            yield block

    def _pieces(self) -> Iterator[bytes | memoryview]:
        if self.files:
            yield from archive_pieces(self.files, PIECE)
        content = memoryview(self.stdin)
        for offset in range(0, len(content), PIECE):
            yield content[offset : offset + PIECE]


def streamed_fields(request: Request) -> tuple[StreamedInputs, dict[str, Any]]:
    """Return what of a run goes into a stream, and the fields of the rest. Raises InvalidRequest."""
    is_archived = not fits_fields(request.files)
    inputs = StreamedInputs(files=request.files if is_archived else (), stdin=request.stdin)
    fields = run_fields(request, () if is_archived else request.files, has_stdin=False)
    if inputs.files:
        fields["archiveSize"] = inputs.archive_size
    if inputs.stdin:
        fields["stdinSize"] = len(inputs.stdin)
    return inputs, fields


def check_taken(inputs: StreamedInputs, most: int, account: RemoteAccount) -> None:
    """Raise InvalidRequest for a service that takes no stream, or not so much: `most` bytes."""
    size = inputs.archive_size + len(inputs.stdin)
    if not most:
        raise InvalidRequest(
            f"files and stdin have more than {MOST_SENT} bytes, or are more than {MOST_FILES} files, which the older "
            f"Cloche at {account.host} does not take with a run; update it, or write them into a live sandbox"
        )
    if size > most:
        raise InvalidRequest(
            f"files and stdin are {size} bytes as an archive, and {account.host} takes {most} with a run; send fewer"
        )


async def send_inputs(call: Call, inputs: StreamedInputs, account: RemoteAccount) -> None:
    """Send everything as fast as the service takes it; stop if the service ends the call.

    Raises BackendUnavailable if the service stalls or the connection is lost: without the end, nothing runs.
    """
    blocks = inputs.blocks()
    while (block := await asyncio.to_thread(next, blocks, None)) is not None:
        try:
            async with asyncio.timeout(account.stall_s):
                is_sent = await call.send(IN, memoryview(block))
        except TimeoutError as late:
            raise BackendUnavailable(
                f"backend {account.provider!r}: {account.host} has taken no more of a run's files for "
                f"{account.stall_s:g} s; nothing has run."
            ) from late
        if not is_sent:
            error = call.closed.exception()
            if isinstance(error, LinkLost):
                detail = f"{error.detail}, while files were sent; nothing has run"
                raise remote_error(account.provider, error.failure, detail=detail, account=account) from error
            return
    call.end(IN)


def _let_go(piece: bytes | memoryview) -> None:
    """Unmap the pages of a mapped file that were read, so that they do not count as this process's memory."""
    mapping: Any = piece.obj if isinstance(piece, memoryview) else None
    if "mmap" in sys.modules and isinstance(mapping, sys.modules["mmap"].mmap):
        with contextlib.suppress(OSError):
            mapping.madvise(sys.modules["mmap"].MADV_DONTNEED)
