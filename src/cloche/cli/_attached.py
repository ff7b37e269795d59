"""Connects a process of a sandbox to the standard streams or to the terminal of this command.

The terminal is put into raw mode, its size is passed on, and its settings are always restored. Everything runs in one
thread: the event loop waits until a descriptor is ready, and a signal interrupts each wait.
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
from .output import GuestWriter

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from cloche.core.protocols import OpenStream
    from cloche.core.result import Result
    from cloche.execution.processes import AsyncProcess
    from cloche.execution.sandbox import AsyncSandbox

READ_BYTES = 1 << 16
WRITE_BYTES = 4096  # PIPE_BUF: a writable pipe takes this much without blocking, see pipe(7)
USUAL_SIZE = (24, 80)
IDENTIFY, IDENTITY = b"\x1b[c", re.compile(rb"\x1b\[\?[0-9;]*c")  # Primary Device Attributes: every terminal answers it
ANSWER_S = 1.0  # how long to wait for the terminal's answer


def check_terminal() -> None:
    """Raise InvalidRequest if standard input is not a terminal."""
    if not os.isatty(0):
        raise InvalidRequest("-t needs a terminal, and standard input is not one; leave -t out")


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
    """Run a command, or a shell if it is None, with the standard streams or the terminal; `reads` passes stdin on.

    `settle` is called with the sandbox before the sandbox is closed.
    """
    async with sandbox:
        tell_folder(sandbox.notes)
        result = await run_in(
            sandbox, command, cwd=cwd, user=user, env=env, timeout=timeout, reads=reads, has_terminal=has_terminal,
            is_raw=is_raw,
        )  # fmt: skip
        if settle is not None:
            await settle(sandbox)
    return result


async def run_in(
    sandbox: AsyncSandbox,
    command: Sequence[str] | None,
    *,
    cwd: str | None,
    env: Mapping[str, str],
    has_terminal: bool,
    user: str | None = None,
    timeout: Any = None,  # noqa: ASYNC109, ANN401 - an option, as `start` reads it
    reads: bool = True,
    is_raw: bool = False,
) -> Result:
    """Do the same in an open sandbox."""
    if has_terminal:
        return await _run_with_terminal(
            sandbox, command, cwd=cwd, user=user, env=env, timeout=timeout, reads=reads, is_raw=is_raw
        )
    async with await sandbox.start(
        SHELL if command is None else command, cwd=cwd, env=env, user=user, timeout=timeout
    ) as process:
        return await _carry(process, reads=reads)


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
            _pass_out(process.stdout, GuestWriter(1, is_raw=has_terminal), shown),
            _pass_out(process.stderr, GuestWriter(2, is_raw=has_terminal)),
        )
        return await process.wait()
    finally:
        if sending is not None:
            sending.cancel()


def _put_back(modes: TerminalModes) -> None:
    """Reset the terminal modes that the program has set, and discard the terminal's pending answers.

    The last query asks for the terminal's identity. All input before that answer belongs to the program's queries, not
    to the next reader of the terminal.
    """
    with suppress(OSError):  # the terminal is gone
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
    if is_raw:
        # In raw mode Ctrl-D is a character: the end of input means that the terminal is gone, maybe without SIGHUP.
        await process.kill()
    else:
        await process.close_stdin()


async def _read() -> bytes:
    await _until(asyncio.get_running_loop().add_reader, asyncio.get_running_loop().remove_reader, 0)
    try:
        return os.read(0, READ_BYTES)
    except OSError:  # closed, a directory, a terminal that is gone
        return b""


async def _pass_out(stream: OpenStream, writer: GuestWriter, shown: TerminalFilter | None = None) -> None:
    loop = asyncio.get_running_loop()
    async for piece in stream:
        data = piece if shown is None else shown.feed(piece)
        for offset in range(0, len(data), WRITE_BYTES):
            await _until(loop.add_writer, loop.remove_writer, writer.fd)
            writer.write(data[offset : offset + WRITE_BYTES])
    writer.finish()


async def _until(add: Callable[..., Any], remove: Callable[[int], Any], fd: int) -> None:
    """Wait until a descriptor can be read or written; a regular file, which epoll refuses, always can."""
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
    """Pass every key on, including Ctrl-C, and restore the terminal's settings at the end."""
    import termios
    import tty

    before = termios.tcgetattr(0)
    try:
        tty.setraw(0, termios.TCSADRAIN)
        yield
    finally:
        with suppress(termios.error):  # the terminal is gone
            termios.tcsetattr(0, termios.TCSADRAIN, before)


@contextmanager
def _resizing(process: AsyncProcess) -> Iterator[None]:
    """Give the process's terminal the size of this terminal, now and after each change."""
    loop = asyncio.get_running_loop()
    resizing: set[asyncio.Future[None]] = set()

    def resize() -> None:
        task = asyncio.ensure_future(process.resize(*_size()))
        resizing.add(task)
        task.add_done_callback(resizing.discard)

    loop.add_signal_handler(signal.SIGWINCH, resize)
    try:
        resize()  # the size may have changed since the start
        yield
    finally:
        loop.remove_signal_handler(signal.SIGWINCH)
