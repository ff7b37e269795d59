"""`map`: the blocking twin of `amap`.

The programs run in the shared loop, also while the caller works with a result. The input and `on_result` run in the
caller's thread, between two steps.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from types import TracebackType
from typing import Any, Generic, Literal, Self, Unpack, cast, overload

from .blocking import calls
from .config.options import SandboxOptions
from .config.settings import list_options_in_signature
from .core.batch import Outcome
from .core.errors import InternalError, InvalidRequest
from .core.result import Result
from .execution.batch import BatchRuns, BatchSettings, OnResult, T, deliver, pull, read_input
from .execution.inputs import Files
from .execution.prepare import prepare


class Batch(Generic[T]):
    """Iterate over the results of a batch; closing it, leaving its `with` block, or dropping it ends everything."""

    def __init__(self, programs: Iterable[Any], settings: BatchSettings) -> None:
        self._input, feed = read_input(programs)
        if feed is not None:
            raise InvalidRequest("programs: this iterable is asynchronous; use cloche.amap")
        self._settings, self._runs = settings, BatchRuns(settings, calls_in_loop=False)
        self._has_begun = self._has_room = self._is_closed = False
        self._pid = os.getpid()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        """Return the next result. Raises the error of a program instead if `return_errors` is off."""
        if self._is_closed:
            raise StopIteration
        try:
            outcome = self._next_outcome()
        except BaseException:  # Ctrl-C included
            self.close()
            raise
        if outcome is None:
            self._is_closed = True
            raise StopIteration
        return cast("T", outcome)

    def _next_outcome(self) -> Outcome | None:
        if self._pid != os.getpid():
            raise InvalidRequest("a forked process cannot go on with the batch of its parent; call cloche.map there")
        if not self._has_begun:
            self._has_begun = self._has_room = True
            calls.call(self._runs.begin, is_eager=True)
        while True:
            program, is_last = pull(self._input, has_room=self._has_room)
            step = calls.call(lambda: self._runs.step(program, is_last=is_last), is_eager=True)  # noqa: B023 - called at once
            self._has_room = step.has_room
            deliver(step, self._settings)
            if step.outcome is not None or step.is_over:
                return step.outcome

    def close(self) -> None:
        """End everything that runs and wait until it is killed. Later calls do nothing."""
        self._is_closed = True
        self._input = iter(())
        if self._pid == os.getpid() and self._runs.is_active:  # a forked child does not own it
            calls.call(self._runs.cancel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_pid", None) != os.getpid():
            return
        try:
            self.close()
        except InternalError:  # collected in the loop, which cannot wait for itself
            self._runs.cancel_soon()


@overload
def map(  # noqa: A001 - the public name
    programs: Iterable[Any],
    *,
    return_errors: Literal[True],
    **keywords: Any,  # noqa: ANN401 - those of the other overload
) -> Batch[Outcome]: ...


@overload
def map(  # noqa: A001
    programs: Iterable[Any],
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
) -> Batch[Result]: ...


@list_options_in_signature
def map(  # noqa: A001
    programs: Iterable[Any],
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
) -> Batch[Any]:
    """Run many programs, each in its own throwaway sandbox, and iterate over their results.

    A program is text, or a mapping with `code` or `argv` and, as it needs them, `language`, `stdin`, `env`, `files`,
    `timeout`, `id` and `idempotent`; these replace the call's own. `programs` may be endless: a program is pulled, in
    the caller's thread, when it can start. At most `concurrency` run at once (default: four for each processor; up to
    there they share the places of all runs). Results come in the order of the programs, or as they come with
    `in_order=False`; `result.meta["program"]` has `index`, `id` and `attempts`. A result that is due waits until it is
    taken; with 1,024 such results, or 64 MiB of them, no further program starts.

    A program that never ran (StartFailed, a provider with too many requests) is tried again up to `retries` times; one
    that may have run (OutcomeUnknown) only if it is `idempotent`. The error that remains is raised in the program's
    place and ends the batch; with `return_errors` the iterator gives the error instead, and goes on. A program's own
    failure is a status of its result. `on_result` gets each result as soon as it is there, in the caller's thread,
    before the iterator gives it. The other keywords are those of `cloche.run`.

    Leaving the loop (break, an exception, Ctrl-C) ends everything once the iterator is dropped; `with cloche.map(...)
    as results:` or `results.close()` end it at once, and wait until everything is killed.

    Raises InvalidRequest, PolicyDenied and BackendUnavailable at once for the keywords of the call.
    """
    keywords = {"language": language, "argv": argv, "stdin": stdin, "env": env, "files": files}
    settings = BatchSettings(
        concurrency=concurrency, in_order=in_order, retries=retries, idempotent=idempotent,
        return_errors=return_errors, on_result=on_result, keywords=keywords, options=options,
    )  # fmt: skip
    prepare(**options)
    return Batch(programs, settings)
