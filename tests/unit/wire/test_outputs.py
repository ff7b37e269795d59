"""Several readers of one process's output: each gets all of it, and one that stops reading costs the others little."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from cloche.core.errors import OutcomeUnknown
from cloche.core.result import Result
from cloche.execution.processes import AsyncProcess
from cloche.wire import outputs
from cloche.wire.outputs import MOST_BEHIND, OutputReader, SharedOutputs, TooSlow

PIECE = b"x" * 65_536


class Source:
    """Be a process whose output is what is put into it."""

    id, pid, is_terminal = "1", 7, False

    def __init__(self) -> None:
        self.pieces: asyncio.Queue[bytes] = asyncio.Queue()
        self.stdout, self.stderr = self, Source.Empty()
        self.taken = self.detached = 0
        self.error: Exception | None = None

    class Empty:
        """Be a stream without content."""

        async def read(self) -> bytes:
            """Return nothing."""
            return b""

    async def read(self) -> bytes:
        """Return the next piece."""
        piece = await self.pieces.get()
        self.taken += 1
        if self.error is not None:
            raise self.error
        return piece

    async def wait(self) -> Result:
        """Return how it ended."""
        return Result("", "", 0, 0.0)

    async def detach(self) -> None:
        """Count it."""
        self.detached += 1

    def put(self, count: int) -> None:
        """Write so many pieces, and end."""
        for piece in [PIECE] * count + [b""]:
            self.pieces.put_nowait(piece)


def as_process(source: Source) -> AsyncProcess:
    """Return it as what it stands for."""
    return cast("AsyncProcess", source)


async def all_of(reader: OutputReader) -> int:
    """Return how many bytes came until the end."""
    count = 0
    while not isinstance(piece := await reader.next(10), Result):
        assert piece is not None
        count += len(piece[1])
    return count


def run(scenario: Any) -> None:
    """Run a scenario with a source and the readers' side of it."""

    async def main() -> None:
        async with asyncio.timeout(30):
            await scenario(Source(), SharedOutputs())

    asyncio.run(main())


def test_a_reader_that_is_behind_makes_the_process_wait() -> None:
    """It is read no further than the bound, and all of it comes."""

    async def scenario(source: Source, shared: SharedOutputs) -> None:
        source.put(100)
        async with shared.started(as_process(source)) as reader:
            while source.taken * len(PIECE) <= MOST_BEHIND:  # noqa: ASYNC110 - other tasks of this loop
                await asyncio.sleep(0)
            await asyncio.sleep(0.05)
            assert source.taken <= MOST_BEHIND // len(PIECE) + 1
            assert await all_of(reader) == 100 * len(PIECE)

    run(scenario)


def test_one_that_takes_nothing_is_dropped_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one goes on; alone it is waited for longer."""
    monkeypatch.setattr(outputs, "AMONG_OTHERS_S", 0.05)
    monkeypatch.setattr(outputs, "ALONE_S", 0.3)

    async def scenario(source: Source, shared: SharedOutputs) -> None:
        async with shared.started(as_process(source)) as idle, shared.found({"pid": 7}, find) as busy:
            source.put(100)
            assert await all_of(busy) == 100 * len(PIECE)
            with pytest.raises(TooSlow, match=r"nothing for 0\.05 s"):
                await idle.next(1)
        other = Source()
        async with shared.started(as_process(other)) as alone:
            other.put(100)
            while alone in alone.output.readers:  # noqa: ASYNC110 - as above
                await asyncio.sleep(0.01)
            with pytest.raises(TooSlow, match=r"nothing for 0\.3 s"):
                await alone.next(1)
            while not other.pieces.empty():  # noqa: ASYNC110 - as above; it goes on
                await asyncio.sleep(0.01)

    run(scenario)


async def find(**_: object) -> AsyncProcess:
    """Fail: it is known already."""
    raise AssertionError("it was attached to again")


def test_without_readers_the_process_is_let_go_and_found_again() -> None:
    """Whoever leaves last lets it go; the next one attaches, and one reader that fails fails all."""

    async def scenario(source: Source, shared: SharedOutputs) -> None:
        async with shared.started(as_process(source), "tag") as first:
            async with shared.found({"tag": "tag"}, find) as second:
                source.pieces.put_nowait(b"piece")
                assert await second.next(1) == await first.next(1) == ("stdout", b"piece")
            assert source.detached == 0
        assert source.detached == 1

        async def again(**_: object) -> AsyncProcess:
            return as_process(source)

        async with shared.found({"pid": 7}, again) as third:
            assert await third.next(0.01) is None
            source.error = OutcomeUnknown("the sandbox has ended")
            source.pieces.put_nowait(b"")
            with pytest.raises(OutcomeUnknown):
                await third.next(1)

    run(scenario)
