"""Many programs, one result each: `amap`, and the runs behind it and behind the blocking `map`.

Theory of operation: `BatchRuns` belongs to one event loop, and all of its state changes there. Each program is a task;
`core.batch.BatchOrder` decides which may start and whose outcome is due. The iterators above it pull a program from the
input only if `step` says that there is room: `AsyncBatch` in the loop, `Batch` (`sync_batch.py`) in the caller's
thread. An input that is itself asynchronous is pulled by a task, so that its waiting delays no result.
"""

from __future__ import annotations

import asyncio
import copy
import os
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from os import PathLike
from types import TracebackType
from typing import Any, Generic, Literal, Self, TypeVar, Unpack, cast, overload

from cloche.config.options import SandboxOptions
from cloche.config.settings import list_options_in_signature
from cloche.core.batch import BatchOrder, Outcome, delay_s, may_try_again, read_program
from cloche.core.errors import ClocheError, InternalError, InvalidRequest
from cloche.core.languages import language_named
from cloche.core.loops import check_event_loop, finish
from cloche.core.record import dataclass, field
from cloche.core.request import InputFile, Request
from cloche.core.result import Result

from .concurrency import Slots, batch_slots, default_count
from .inputs import Files, read_argv, read_env, read_stdin
from .prepare import prepare_in_thread
from .run import arun, gather

T = TypeVar("T", bound=Outcome)

MOST_CONCURRENT = 10_000
NO_PROGRAM: Any = object()  # for `step`: there is no further program now
OnResult = Callable[[Outcome], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSettings:
    """Hold the keywords of a batch; `options` configure the sandboxes, `keywords` are the others of `arun`."""

    concurrency: int | None = None
    in_order: bool = True
    retries: int = 2
    idempotent: bool = False
    return_errors: bool = False
    on_result: OnResult | None = None
    keywords: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, least, most in (("concurrency", 1, MOST_CONCURRENT), ("retries", 0, 1_000)):
            value = getattr(self, name)
            if value is None and name == "concurrency":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
                raise InvalidRequest(f"{name}: give a whole number from {least} to {most}, not {value!r}")
        if self.on_result is not None and not callable(self.on_result):
            raise InvalidRequest("on_result: give a function that takes a result")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchStep:
    """Say what an iterator does next: give `outcome`, pull a program, or end. `ended` are the outcomes since the last
    step.
    """

    outcome: Outcome | None
    ended: Sequence[Outcome]
    has_room: bool
    is_over: bool


class BatchRuns:
    """Run the programs of one batch in one event loop."""

    def __init__(self, settings: BatchSettings, *, calls_in_loop: bool) -> None:
        """Prepare; with `calls_in_loop`, `on_result` is called in the loop, else it is left to who makes the steps."""
        self._settings, self._calls_in_loop = settings, calls_in_loop
        concurrency = settings.concurrency or default_count()
        self._order = BatchOrder(concurrency=concurrency, in_order=settings.in_order)
        # Up to the default, a batch queues for the slots that all runs share.
        self._slots = Slots(concurrency) if concurrency > default_count() else None
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended: deque[Outcome] = deque()
        self._failure: BaseException | None = None  # of the input, or a defect
        self._waiting: asyncio.Future[None] | None = None
        self._input_is_over = False
        self._room = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def is_active(self) -> bool:
        """Tell whether something of it runs."""
        return bool(self._tasks)

    async def begin(self, feed: AsyncIterator[Any] | None = None) -> None:
        """Check the sandbox's keywords; with `feed`, start the task that pulls from it."""
        self._loop = asyncio.get_running_loop()
        await check_keywords(self._settings.keywords, self._settings.options)
        if feed is not None:
            self._add(self._pull(feed))

    async def step(self, program: object = NO_PROGRAM, *, is_last: bool = False) -> BatchStep:
        """Start `program`, and wait until an outcome is due, a program may be pulled, or all is over.

        `is_last` says that the input has ended. Raises what the input or a program's task raised.
        """
        if program is not NO_PROGRAM:
            self._start(program)
        self._input_is_over = self._input_is_over or is_last
        while True:
            if self._failure is not None:
                raise self._failure
            has_room = self._order.has_room and not self._input_is_over
            due = self._order.take()
            self._note_room()
            is_over = due is None and not self._tasks and self._input_is_over
            if due or is_over or has_room or self._ended:
                ended, self._ended = tuple(self._ended), deque()
                return BatchStep(outcome=due[1] if due else None, ended=ended, has_room=has_room, is_over=is_over)
            await self._news()

    async def cancel(self) -> None:
        """End everything that runs, and wait until it is killed."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await finish(asyncio.wait(tasks))

    def cancel_soon(self) -> None:
        """Ask the loop to end everything; any thread may call this."""
        if self._loop is not None and self._tasks:
            with suppress(RuntimeError):  # the loop is closed, and nothing runs in it
                self._loop.call_soon_threadsafe(self._cancel_tasks)

    def _cancel_tasks(self) -> None:
        for task in tuple(self._tasks):
            task.cancel()

    def _start(self, program: object) -> None:
        self._add(self._run(self._order.start(), program))

    def _add(self, work: Any) -> None:  # noqa: ANN401 - a coroutine
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._note_end)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        self._failure = self._failure or error
        self._wake()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def _news(self) -> None:
        """Wait until a task has ended or a program has started."""
        self._waiting = asyncio.get_running_loop().create_future()
        try:
            await self._waiting
        finally:
            self._waiting = None

    async def _pull(self, feed: AsyncIterator[Any]) -> None:
        """Start the programs of an asynchronous input when there is room for them."""
        self._input_is_over = True  # for `step`: no caller pulls; this task is among those that it waits for
        while True:
            while not self._order.has_room:
                self._room.clear()
                await self._room.wait()
            try:
                program = await anext(feed)
            except StopAsyncIteration:
                return
            self._start(program)

    def _note_room(self) -> None:
        if self._order.has_room:
            self._room.set()

    async def _run(self, index: int, value: object) -> None:
        if self._slots is not None:
            batch_slots.set(self._slots)
        outcome: Outcome
        try:
            outcome = await self._attempt(index, value)
        except ClocheError as error:
            outcome = _named(error, index, value)
        except Exception as error:
            defect = InternalError(f"unexpected {type(error).__name__}: {error}")
            defect.__cause__ = error
            outcome = _named(defect, index, value)
        on_result = self._settings.on_result
        if on_result is not None and self._calls_in_loop:
            on_result(outcome)  # before another program can start in its place
        self._order.end(index, outcome)
        if on_result is not None and not self._calls_in_loop:
            self._ended.append(outcome)
        self._note_room()

    async def _attempt(self, index: int, value: object) -> Result:
        program = read_program(value)
        settings = self._settings
        keywords = {**settings.keywords, **settings.options, **program.keywords()}
        is_idempotent = settings.idempotent if program.idempotent is None else program.idempotent
        tried = 1
        while True:
            try:
                result = await arun(program.code, **keywords)
                break
            except ClocheError as error:
                if not may_try_again(error, tried=tried, retries=settings.retries, is_idempotent=is_idempotent):
                    raise
                await asyncio.sleep(delay_s(error, tried=tried))
            tried += 1
        result.meta["program"] = {**_name_of(index, program.id), "attempts": tried}
        return result


def _name_of(index: int, program_id: object) -> dict[str, Any]:
    return {"index": index} if program_id is None else {"index": index, "id": program_id}


def _named(error: ClocheError, index: int, value: object) -> ClocheError:
    """Return the error with its program; a copy if another program failed with the same object."""
    if error.program is not None:
        error = copy.copy(error)
    given = value.get("id") if isinstance(value, Mapping) else getattr(value, "id", None)
    error.program = _name_of(index, given)
    error.add_note(f"program {index} of the batch (counted from 0)")
    return error


class AsyncBatch(Generic[T]):
    """Iterate over the results of a batch; closing it, or leaving its `async with` block, ends everything."""

    def __init__(self, programs: Iterable[Any] | AsyncIterable[Any], settings: BatchSettings) -> None:
        self._input, self._feed = read_input(programs)
        self._settings, self._runs = settings, BatchRuns(settings, calls_in_loop=True)
        self._has_begun = self._has_room = self._is_closed = False
        self._pid = os.getpid()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        """Return the next result. Raises the error of a program instead if `return_errors` is off."""
        if self._is_closed:
            raise StopAsyncIteration
        try:
            outcome = await self._next_outcome()
        except BaseException:
            await self.aclose()
            raise
        if outcome is None:
            await self.aclose()
            raise StopAsyncIteration
        return cast("T", outcome)

    async def _next_outcome(self) -> Outcome | None:
        if not self._has_begun:
            check_event_loop()
            self._has_begun = True
            await self._runs.begin(self._feed)
            self._has_room = self._feed is None
        while True:
            program, is_last = pull(self._input, has_room=self._has_room)
            step = await self._runs.step(program, is_last=is_last)
            self._has_room = step.has_room
            deliver(step, self._settings)
            if step.outcome is not None or step.is_over:
                return step.outcome

    async def aclose(self) -> None:
        """End everything that runs and wait until it is killed. Later calls do nothing."""
        self._is_closed = True
        self._input = iter(())
        if self._pid == os.getpid():  # a forked child does not own it
            await self._runs.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if getattr(self, "_pid", None) == os.getpid() and self._runs.is_active:
            self._runs.cancel_soon()


@overload
def amap(
    programs: Iterable[Any] | AsyncIterable[Any],
    *,
    return_errors: Literal[True],
    **keywords: Any,  # noqa: ANN401 - those of the other overload
) -> AsyncBatch[Outcome]: ...


@overload
def amap(
    programs: Iterable[Any] | AsyncIterable[Any],
    *,
    concurrency: int | None = None,
    in_order: bool = True,
    retries: int = 2,
    idempotent: bool = False,
    return_errors: Literal[False] = False,
    on_result: OnResult | None = None,
    language: str = "python",
    argv: Sequence[str | PathLike[str]] = (),
    stdin: bytes | str = b"",
    env: Mapping[str, str] | None = None,
    files: Files | None = None,
    **options: Unpack[SandboxOptions],
) -> AsyncBatch[Result]: ...


@list_options_in_signature
def amap(
    programs: Iterable[Any] | AsyncIterable[Any],
    *,
    concurrency: int | None = None,
    in_order: bool = True,
    retries: int = 2,
    idempotent: bool = False,
    return_errors: bool = False,
    on_result: OnResult | None = None,
    language: str = "python",
    argv: Sequence[str | PathLike[str]] = (),
    stdin: bytes | str = b"",
    env: Mapping[str, str] | None = None,
    files: Files | None = None,
    **options: Any,
) -> AsyncBatch[Any]:
    """Run many programs and iterate over their results; the same as `cloche.map`, in an event loop.

    `programs` may also be an asynchronous iterable. `on_result` is called in the event loop, before
    another program starts. Leaving the `async with`
    block of the returned iterator ends everything and waits for it; without a block, `aclose()` does. Garbage
    collection ends it as well, without waiting.
    """
    keywords = {"language": language, "argv": argv, "stdin": stdin, "env": env, "files": files}
    settings = BatchSettings(
        concurrency=concurrency, in_order=in_order, retries=retries, idempotent=idempotent,
        return_errors=return_errors, on_result=on_result, keywords=keywords, options=options,
    )  # fmt: skip
    return AsyncBatch(programs, settings)


async def check_keywords(keywords: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, InputFile]:
    """Return the call's files by path. Raises InvalidRequest for a keyword that is wrong whatever the programs are."""
    prepared = await prepare_in_thread(**options)
    if prepared.settings.toolchains:
        from .toolchains import with_toolchains  # needed by some runs only

        await with_toolchains(prepared)
    inputs = await gather(keywords.get("files"), prepared)
    request = Request(
        code="",
        language=language_named(keywords.get("language", "python")).name,
        argv=read_argv(keywords.get("argv", ())),
        stdin=read_stdin(keywords.get("stdin")),
        env=read_env(keywords.get("env")),
        files=inputs.files,
    )
    return {file.path: file for file in request.files}


def read_input(programs: object) -> tuple[Iterator[Any], AsyncIterator[Any] | None]:
    """Return an input as an iterator, or an empty one and its asynchronous iterator. Raises InvalidRequest."""
    if isinstance(programs, str | bytes | Mapping):
        raise InvalidRequest("programs: give several programs, for example in a list; cloche.run runs a single one")
    if isinstance(programs, AsyncIterable):
        return iter(()), aiter(programs)
    if not isinstance(programs, Iterable):
        raise InvalidRequest(f"programs: give an iterable of programs, not {type(programs).__name__}")
    return iter(programs), None


def pull(programs: Iterator[Any], *, has_room: bool) -> tuple[object, bool]:
    """Return the next program if there is room, else NO_PROGRAM; and whether the input has ended."""
    if not has_room:
        return NO_PROGRAM, False
    try:
        return next(programs), False
    except StopIteration:
        return NO_PROGRAM, True


def deliver(step: BatchStep, settings: BatchSettings) -> None:
    """Call `on_result`, and raise an outcome that is an error and shall not be returned."""
    if settings.on_result is not None:
        for outcome in step.ended:
            settings.on_result(outcome)
    if isinstance(step.outcome, ClocheError) and not settings.return_errors:
        raise step.outcome
