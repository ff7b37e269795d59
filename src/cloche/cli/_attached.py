"""A process of a sandbox that has our standard streams, or our terminal: raw, of the same size, and restored always.

All of it goes on in one thread: a descriptor is written to when it takes something, and a signal ends whatever waits.
"""

from __future__ import annotations

import asyncio
import os
import re
import select
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from cloche.core.errors import InvalidRequest
from cloche.execution.processes import SHELL

from ._review import tell_folder
from ._terminal import TerminalFilter, TerminalModes
from .output import Writer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from cloche.core.protocols import OpenStream
    from cloche.core.result import Result
    from cloche.execution.processes import AsyncProcess
    from cloche.execution.sandbox import AsyncSandbox

READ_BYTES = 1 << 16
WRITE_BYTES = 4096  # PIPE_BUF: what a pipe that takes anything takes at once
USUAL_SIZE = (24, 80)
IDENTIFY, IDENTITY = b"\x1b[c", re.compile(rb"\x1b\[\?[0-9;]*c")  # a question that every terminal answers
ANSWER_S = 1.0  # for a terminal to do so


def check_terminal() -> None:
    """Raise InvalidRequest where there is no terminal to pass on."""
    if not os.isatty(0):
        raise InvalidRequest("-t passes your terminal on, but standard input is none; leave -t out")


async def run_attached(
    sandbox: AsyncSandbox,
    command: Sequence[str] | None,
    *,
    cwd: str | None,
    user: str | None,
    env: Mapping[str, str],
    timeout: Any,  # noqa: ASYNC109, ANN401 - an option, as `start` reads it
    reads: bool,
    has_terminal: bool,
    is_raw: bool = False,
    settle: Callable[[AsyncSandbox], Awaitable[None]] | None = None,
) -> Result:
    """Run a command, or a shell, with our streams, or with our terminal; `reads` says whether it gets what comes in.

    `settle` is called with the sandbox before that is left.
    """
    async with sandbox:
        tell_folder(sandbox.notes)
        if has_terminal:
            result = await _run_with_terminal(
                sandbox, command, cwd=cwd, user=user, env=env, timeout=timeout, reads=reads, is_raw=is_raw
            )
        else:
            async with await sandbox.start(
                SHELL if command is None else command, cwd=cwd, env=env, user=user, timeout=timeout
            ) as process:
                result = await _carry(process, reads=reads)
        if settle is not None:
            await settle(sandbox)
    return result


async def _run_with_terminal(
    sandbox: AsyncSandbox,
    command: Sequence[str] | None,
    *,
    cwd: str | None,
    user: str | None,
    env: Mapping[str, str],
    timeout: Any,  # noqa: ASYNC109, ANN401 - an option, as `start` reads it
    reads: bool,
    is_raw: bool,
) -> Result:
    rows, columns = _size()
    own = {"TERM": os.environ["TERM"]} if os.environ.get("TERM") else {}
    process = await sandbox.terminal(
        command, rows=rows, columns=columns, cwd=cwd, env={**own, **env}, user=user, timeout=timeout
    )
    async with process:
        with _raw_terminal(), _resizing(process):
            shown = TerminalFilter(is_raw=is_raw) if os.isatty(1) else None
            try:
                return await _carry(process, reads=reads, shown=shown, has_terminal=True)
            finally:
                if shown is not None:
                    _put_back(shown.modes)


async def _carry(
    process: AsyncProcess, *, reads: bool, shown: TerminalFilter | None = None, has_terminal: bool = False
) -> Result:
    sending = asyncio.ensure_future(_pass_in(process, is_raw=has_terminal)) if reads else None
    if sending is None and not has_terminal:
        await process.close_stdin()
    try:
        await asyncio.gather(
            _pass_out(process.stdout, Writer(1, is_raw=has_terminal), shown),
            _pass_out(process.stderr, Writer(2, is_raw=has_terminal)),
        )
        return await process.wait()
    finally:
        if sending is not None:
            sending.cancel()


def _put_back(modes: TerminalModes) -> None:
    """Set back what the program has set on our terminal, and swallow what that still answers to it.

    The terminal is asked last who it is: what comes before that answer is none for whoever reads next.
    """
    with suppress(OSError):  # it is gone
        os.write(1, modes.reset() + (IDENTIFY if modes.has_asked else b""))
        received, ends = b"", time.monotonic() + ANSWER_S
        while modes.has_asked and not IDENTITY.search(received) and (seconds := ends - time.monotonic()) > 0:
            if not select.select([0], [], [], seconds)[0] or not (data := os.read(0, READ_BYTES)):
                break
            received = (received + data)[-2 * READ_BYTES :]


async def _pass_in(process: AsyncProcess, *, is_raw: bool) -> None:
    while data := await _read():
        if not await process.write(data):
            return
    if is_raw:  # Ctrl-D is a character then, so our terminal is gone, though nobody may have told us by a signal
        await process.kill()
    else:
        await process.close_stdin()


async def _read() -> bytes:
    await _until(asyncio.get_running_loop().add_reader, asyncio.get_running_loop().remove_reader, 0)
    try:
        return os.read(0, READ_BYTES)
    except OSError:  # closed, a directory, a terminal that is gone
        return b""


async def _pass_out(stream: OpenStream, writer: Writer, shown: TerminalFilter | None = None) -> None:
    loop = asyncio.get_running_loop()
    async for piece in stream:
        data = piece if shown is None else shown.feed(piece)
        for offset in range(0, len(data), WRITE_BYTES):
            await _until(loop.add_writer, loop.remove_writer, writer.fd)
            writer.write(data[offset : offset + WRITE_BYTES])
    writer.finish()


async def _until(add: Callable[..., Any], remove: Callable[[int], Any], fd: int) -> None:
    """Wait until a descriptor can be read or written; one that cannot be waited for, a file, always can."""
    ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    try:
        add(fd, _set, ready)
    except OSError:
        return
    try:
        await ready
    finally:
        remove(fd)


def _set(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


def _size() -> tuple[int, int]:
    with suppress(OSError):
        size = os.get_terminal_size(0)
        if size.lines and size.columns:
            return size.lines, size.columns
    return USUAL_SIZE


@contextmanager
def _raw_terminal() -> Iterator[None]:
    """Pass every key on, Ctrl-C too, and leave the terminal as it was."""
    import termios
    import tty

    before = termios.tcgetattr(0)
    try:
        tty.setraw(0, termios.TCSADRAIN)
        yield
    finally:
        with suppress(termios.error):  # it is gone
            termios.tcsetattr(0, termios.TCSADRAIN, before)


@contextmanager
def _resizing(process: AsyncProcess) -> Iterator[None]:
    """Give the process's terminal the size that ours has, whenever that changes."""
    loop = asyncio.get_running_loop()
    resizing: set[asyncio.Future[None]] = set()

    def resize() -> None:
        task = asyncio.ensure_future(process.resize(*_size()))
        resizing.add(task)
        task.add_done_callback(resizing.discard)

    loop.add_signal_handler(signal.SIGWINCH, resize)
    try:
        resize()  # it may have changed meanwhile
        yield
    finally:
        loop.remove_signal_handler(signal.SIGWINCH)
