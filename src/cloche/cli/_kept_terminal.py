"""A terminal process that is kept in a sandbox: attached to this terminal, detached from it, and attached again.

Theory of operation: the process has its own terminal inside, which never hangs up. This command only carries bytes
between the two; if it is killed, the process goes on, and the last 32 KiB of its output are kept. The modes that the
program has set are recorded in a file, since another terminal must be put into them: a program sets them once. A
program redraws when its terminal's size changes, so attaching changes the size and sets it right again.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from cloche.coding_agents.terminal_note import TerminalNote
from cloche.core.errors import InvalidRequest
from cloche.core.processes import Detached as TakenOver

from ._attached import READ_BYTES, WRITE_BYTES, _put_back, _read, _size, _until
from ._terminal import TerminalFilter
from .output import GuestWriter, OutputFailed, exit_code_of, say

if TYPE_CHECKING:
    from cloche.core.result import Result
    from cloche.execution.processes import AsyncProcess
    from cloche.execution.sandbox import AsyncSandbox

KEYS_VARIABLE, USUAL_KEYS = "CLOCHE_DETACH_KEYS", "ctrl-p,ctrl-q"
KEPT_BYTES = 1 << 15  # of output that no terminal has received, see `cloche.init.streams`
HOLD_S = 0.5  # how long the first detach key waits for the next one
REPLAY_S, REDRAW_S = 0.05, 0.3  # for kept output to come, and for a program to draw after a change of its size
STOPPED_S, LOOKS = 0.3, 4  # between two looks at whether Ctrl-Z has stopped the program
SUSPEND = re.compile(rb"\x1a|\x1b\[122;5(?::[12])?u|\x1b\[27;5;122~")
PASTE = re.compile(rb"\x1b\[20([01])~")


class Detached(NamedTuple):
    """Say why this terminal was detached from a process that goes on: `keys`, `lost`, `taken` or `signal`."""

    why: str
    signal: int = 0


class DetachKeys:
    """Find the keys that detach in what is typed; they are not found in pasted text."""

    def __init__(self, text: str):
        names = [name.strip().lower() for name in text.split(",")]
        if not text or not all(re.fullmatch(r"ctrl-[a-z@\[\]\\^_]|[a-z0-9]", name) for name in names):
            raise InvalidRequest(
                f"detach keys: {text!r} is not valid; give keys such as {USUAL_KEYS}: letters, digits, ctrl-LETTER"
            )
        keys = [_forms_of(name) for name in names]
        between = rb"(?:\x1b\[[0-9]+;[0-9]+:3u)*"  # releases, which some terminals report
        self._all = re.compile(between.join(keys))
        starts = (between.join(keys[:count]) for count in range(len(keys) - 1, 0, -1))
        self._start = re.compile(b"(?:" + b"|".join(starts) + rb")\Z") if keys[1:] else None
        self.held = b""
        self._is_paste = False

    def feed(self, data: bytes) -> tuple[bytes, bool]:
        """Return what is passed on, and whether the keys were typed; a beginning of them is held."""
        data, self.held = self.held + data, b""
        typed = self._without_paste(data)
        if (match := self._all.search(typed)) is not None:
            return data[: match.start()], True
        if self._start is not None and (match := self._start.search(typed)) is not None:
            data, self.held = data[: match.start()], data[match.start() :]
        return data, False

    def release(self) -> bytes:
        """Return what is held: no further key has come."""
        held, self.held = self.held, b""
        return held

    def _without_paste(self, data: bytes) -> bytes:
        """Return the data with blanks in place of pasted text."""
        typed, start = b"", 0
        for match in PASTE.finditer(data):
            piece = data[start : match.start()]
            typed += (b" " * len(piece) if self._is_paste else piece) + b" " * len(match[0])
            self._is_paste, start = match[1] == b"0", match.end()
        rest = data[start:]
        return typed + (b" " * len(rest) if self._is_paste else rest)


def _forms_of(name: str) -> bytes:
    """Return a pattern for a key in the forms in which terminals send it."""
    letter = name[-1].encode()
    if not name.startswith("ctrl-"):
        return re.escape(letter)
    code = b"%d" % letter[0]
    plain = re.escape(bytes((letter.upper()[0] & 31,)))
    return b"(?:" + plain + rb"|\x1b\[" + code + rb";5(?::[12])?u|\x1b\[27;5;" + code + b"~)"


def detach_keys() -> str:
    """Return the keys that detach: those of CLOCHE_DETACH_KEYS, or the usual ones."""
    return os.environ.get(KEYS_VARIABLE) or USUAL_KEYS


async def run_agent_terminal(
    sandbox: AsyncSandbox,
    argv: Sequence[str],
    env: Mapping[str, str],
    cwd: str,
    *,
    state: str,
    keys: str = "",
    is_raw: bool = False,
) -> int | Detached:
    """Start a kept process on this terminal, and carry it until it ends or this terminal is detached.

    `state` is a folder of Cloche's, in which the process is noted for `attach_agent_terminal`. Return the exit code.
    """
    rows, columns = _size()
    found = DetachKeys(keys or detach_keys())
    process = await sandbox.terminal(argv, rows=rows, columns=columns, cwd=cwd, env=env, keep=True)
    note = TerminalNote(state)
    note.keep({"process": process.id, "modes": ""})
    return await _carried(_Carrying(sandbox, process, found, note, is_raw=is_raw), note, is_new=True)


async def attach_agent_terminal(
    sandbox: AsyncSandbox, *, state: str, keys: str = "", is_raw: bool = False
) -> int | Detached:
    """Carry the process of `run_agent_terminal` on this terminal; it is taken from any other one.

    Raises InvalidRequest if there is none.
    """
    found, note = DetachKeys(keys or detach_keys()), TerminalNote(state)
    process = await sandbox.process(note.process())
    return await _carried(_Carrying(sandbox, process, found, note, is_raw=is_raw), note, is_new=False)


async def _carried(carrying: _Carrying, note: TerminalNote, *, is_new: bool) -> int | Detached:
    """Carry a process, and forget it when it has ended: what is still noted later was lost with its sandbox."""
    end = await carrying.run(is_new=is_new)
    if isinstance(end, int):
        note.keep({})
    return end


async def detach_agent_terminal(sandbox: AsyncSandbox, *, state: str) -> None:
    """Detach the terminal that is attached to the process of `run_agent_terminal`, from elsewhere."""
    await (await sandbox.process(TerminalNote(state).process())).detach()


class _Carrying:
    """Carry one process on this terminal."""

    def __init__(
        self, sandbox: AsyncSandbox, process: AsyncProcess, keys: DetachKeys, note: TerminalNote, *, is_raw: bool
    ) -> None:
        self._sandbox = sandbox
        self._process, self._keys, self._note = process, keys, note
        self._shown = TerminalFilter(is_raw=is_raw, notifies=True)
        self._detached: asyncio.Future[Detached] = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Future[Any]] = set()
        self._releasing: asyncio.TimerHandle | None = None

    async def run(self, *, is_new: bool) -> int | Detached:
        """Return the exit code of the process, or why it was detached."""
        from .run import conclude

        end = await self._carried(is_new=is_new)
        if isinstance(end, Detached):
            return end
        conclude(end, as_json=False, tells_network=False)
        return exit_code_of(end)

    async def _carried(self, *, is_new: bool) -> Result | Detached:
        with _RawTerminal() as self._terminal, self._signals():
            try:
                if not is_new:
                    await self._take_over()
                return await self._carry()
            finally:
                for task in self._tasks:
                    task.cancel()
                with suppress(OSError):  # the terminal is still raw: its answers to questions are not shown
                    _put_back(self._shown.modes)

    async def _carry(self) -> Result | Detached:
        ending = asyncio.ensure_future(self._end())
        self._start(self._pass_in())
        self._start(self._resized())
        try:
            await asyncio.wait((ending, self._detached), return_when=asyncio.FIRST_COMPLETED)
            if ending.done():
                return await ending
            await self._process.detach()
            return self._detached.result()
        finally:
            ending.cancel()

    async def _end(self) -> Result | Detached:
        await self._pass_out()
        try:
            return await self._process.wait()
        except TakenOver:
            return Detached("taken")

    def _start(self, work: Any) -> None:  # noqa: ANN401 - a coroutine
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._note_end)

    def _note_end(self, task: asyncio.Future[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:  # of a link that is lost, as the process reports
            self.detach("lost")

    def detach(self, why: str, number: int = 0) -> None:
        """Detach this terminal; the process goes on."""
        if not self._detached.done():
            self._detached.set_result(Detached(why, number))

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Resize on SIGWINCH; detach if the terminal hangs up, or this command is asked to end."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGWINCH, lambda: self._start(self._resized()))
        loop.add_signal_handler(signal.SIGHUP, self.detach, "lost", signal.SIGHUP)
        loop.add_signal_handler(signal.SIGTERM, self.detach, "signal", signal.SIGTERM)
        try:
            yield
        finally:
            for number in (signal.SIGWINCH, signal.SIGHUP, signal.SIGTERM):
                loop.remove_signal_handler(number)

    async def _resized(self) -> None:
        await self._process.resize(*_size())

    # What is typed.

    async def _pass_in(self) -> None:
        while data := await _read():
            if self._releasing is not None:
                self._releasing.cancel()
            passed, is_detach = self._keys.feed(data)
            if passed and not await self._process.write(passed):
                return
            if is_detach:
                self.detach("keys")
                return
            if self._keys.held:
                self._releasing = asyncio.get_running_loop().call_later(HOLD_S, self._release)
            if SUSPEND.search(passed):
                self._start(self._follow_suspend())
        self.detach("lost")  # in raw mode the end of input means that the terminal is gone, maybe without SIGHUP

    def _release(self) -> None:
        if held := self._keys.release():
            self._start(self._process.write(held))

    async def _follow_suspend(self) -> None:
        """Suspend this command where Ctrl-Z has stopped the program, which would else never go on."""
        for _ in range(LOOKS):
            await asyncio.sleep(STOPPED_S)
            if any(row.id == self._process.id and row.is_stopped for row in await self._sandbox.processes()):
                break
        else:
            return
        _put_back(self._shown.modes)
        self._terminal.restore()
        say("the agent has suspended itself; fg goes on with it")
        os.kill(0, signal.SIGTSTP)  # nothing happens where no shell could continue us
        self._terminal.set_raw()
        await self._process.signal("CONT", to="tree")
        os.write(1, self._shown.modes.entry())
        await self._redraw()

    # What is shown.

    async def _pass_out(self) -> None:
        try:
            async for piece in self._process.stdout:
                await self._write(self._shown.feed(piece))
                self._note.keep_modes(self._shown.modes.entry())
        except (OSError, OutputFailed):  # the terminal is gone
            self.detach("lost")
            await asyncio.Event().wait()

    async def _write(self, data: bytes) -> None:
        loop, writer = asyncio.get_running_loop(), GuestWriter(1, is_raw=True)
        for offset in range(0, len(data), WRITE_BYTES):
            await _until(loop.add_writer, loop.remove_writer, 1)
            writer.write(data[offset : offset + WRITE_BYTES])

    async def _take_over(self) -> None:
        """Show what was printed meanwhile, put this terminal into the program's modes, and have it draw."""
        self._shown.feed(self._note.modes())
        unread = await self._kept_output()
        shown = self._shown.feed(unread)
        os.write(1, self._shown.modes.entry() + (b"\x1b[H\x1b[2J" if self._shown.modes.is_alternate else b""))
        if not self._shown.modes.is_alternate:
            await self._write(shown)
        await self._redraw()

    async def _kept_output(self) -> bytes:
        """Return what was kept, from the first whole line or sequence on."""
        data = b""
        with suppress(TimeoutError):
            while len(data) < READ_BYTES:
                async with asyncio.timeout(REPLAY_S):
                    piece = await self._process.stdout.read()
                if not piece:
                    break
                data += piece
        begin = re.search(rb"[\n\x1b]", data)
        return data[begin.start() :] if begin is not None and len(data) >= KEPT_BYTES else data

    async def _redraw(self) -> None:
        """Have the program draw: a size that changes twice, since one that stays is not reported."""
        rows, columns = _size()
        await self._process.resize(max(1, rows - 1) if rows > 1 else 2, columns)
        await asyncio.sleep(REDRAW_S)
        await self._process.resize(rows, columns)


class _RawTerminal:
    """Have this terminal pass every key on, and restore its settings at the end."""

    def __enter__(self) -> _RawTerminal:
        import termios

        self._before = termios.tcgetattr(0)
        self.set_raw()
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def set_raw(self) -> None:
        """Pass every key on."""
        import termios
        import tty

        with suppress(termios.error):
            tty.setraw(0, termios.TCSADRAIN)

    def restore(self) -> None:
        """Restore the settings from before."""
        import termios

        with suppress(termios.error):  # the terminal is gone
            termios.tcsetattr(0, termios.TCSADRAIN, self._before)


def tell_detached(detached: Detached, name: str) -> int:
    """Say that an agent goes on, and how to go back to it; return the exit code."""
    with suppress(OSError):  # the terminal is gone
        if detached.why == "taken":
            say(f"{name} was attached, detached or stopped from another terminal; cloche agent status shows it")
        elif detached.why != "lost":
            say(f"detached; the agent goes on: cloche agent attach {name}")
    return 128 + detached.signal if detached.signal else 0
