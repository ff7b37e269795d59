"""A live sandbox: one workspace, many runs."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from cloche.core.errors import InvalidRequest, SandboxFileNotFound, SandboxFileTooLarge, StartFailed
from cloche.core.events import Ended, OutputChunk, Started
from cloche.core.result import Result
from cloche.execution.sandbox import AsyncSandbox
from cloche.testing.fake import FakeBackend


@pytest.fixture(autouse=True)
def _settings_of_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the machine's own configuration out of these tests."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name in ("SANDBOX_TYPE", "SANDBOX_TIMEOUT_SEC", "CLOCHE_CONFIG"):
        monkeypatch.delenv(name, raising=False)


def answers(count: int) -> FakeBackend:
    """Return a backend that answers `count` runs with their number."""
    return FakeBackend([Result(str(number), "", 0, 0.0) for number in range(count)])


def in_loop(work: Coroutine[Any, Any, None]) -> None:
    """Run a scenario."""
    asyncio.run(work)


def test_runs_share_one_sandbox() -> None:
    """Two runs open one sandbox, and leaving the block closes it."""
    backend = answers(2)

    async def scenario() -> None:
        async with AsyncSandbox(backend=backend) as sandbox:
            assert (await sandbox.run("a")).stdout == "0"
            assert (await sandbox.run("b")).stdout == "1"
            assert backend.sandboxes[0].is_open

    in_loop(scenario())
    assert [sandbox.is_open for sandbox in backend.sandboxes] == [False]


def test_files_go_in_and_out() -> None:
    """Text and bytes are written, read back whole, bounded, and listed."""

    async def scenario() -> None:
        async with AsyncSandbox(backend=answers(0), files={"start.txt": "s"}) as sandbox:
            await sandbox.write_file("a/b.txt", "ä")
            assert await sandbox.read_file("a/b.txt") == "ä".encode()
            assert await sandbox.list_files() == ("a/b.txt", "start.txt")
            with pytest.raises(SandboxFileTooLarge):
                await sandbox.read_file("a/b.txt", max_bytes=1)
            with pytest.raises(SandboxFileNotFound):
                await sandbox.read_file("nothing")
            with pytest.raises(InvalidRequest):
                await sandbox.write_file("../x", b"")

    in_loop(scenario())


def test_the_environment_of_the_sandbox_holds_for_every_run() -> None:
    """A run's own variables are added to the sandbox's and win over them."""
    backend = answers(1)

    async def scenario() -> None:
        async with AsyncSandbox(backend=backend, env={"A": "1", "B": "1"}) as sandbox:
            await sandbox.run("x", env={"B": "2"})

    in_loop(scenario())
    assert dict(backend.requests[0].env) == {"A": "1", "B": "2"}


def test_a_run_may_have_its_own_timeout_within_the_operators_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """One run's time-out replaces the sandbox's; the global override wins over both."""
    backend = answers(3)

    async def scenario() -> None:
        async with AsyncSandbox(backend=backend, timeout=9) as sandbox:
            await sandbox.run("x")
            await sandbox.run("x", timeout="1500ms")
            monkeypatch.setenv("SANDBOX_TIMEOUT_SEC", "7")
            await sandbox.run("x", timeout=100)

    in_loop(scenario())
    assert [request.timeout_s for request in backend.requests] == [None, 1.5, 7.0]


def test_a_stream_yields_start_output_and_end() -> None:
    """The last event carries the result."""

    async def scenario() -> None:
        async with AsyncSandbox(backend=answers(1)) as sandbox:
            events = [event async for event in sandbox.stream("x")]
        assert [type(event) for event in events] == [Started, OutputChunk, Ended]
        assert isinstance(events[-1], Ended)
        assert events[-1].result.stdout == "0"

    in_loop(scenario())


def test_a_stream_raises_what_the_run_raised() -> None:
    """A run that could not start is an exception in the iteration."""

    async def scenario() -> None:
        async with AsyncSandbox(backend=FakeBackend([StartFailed("no")])) as sandbox:
            with pytest.raises(StartFailed):
                [event async for event in sandbox.stream("x")]

    in_loop(scenario())


def test_a_stream_that_is_left_early_leaves_a_usable_sandbox() -> None:
    """Closing the iterator ends its run and nothing else."""

    async def scenario() -> None:
        async with AsyncSandbox(backend=answers(2)) as sandbox:
            stream = sandbox.stream("x")
            assert isinstance(await anext(stream), Started)
            await stream.aclose()  # type: ignore[attr-defined]  # an async generator in truth
            assert (await sandbox.run("y")).ok

    in_loop(scenario())


def test_a_closed_sandbox_says_so() -> None:
    """Use outside of the block is the caller's error."""

    async def scenario() -> None:
        sandbox = AsyncSandbox(backend=answers(1))
        with pytest.raises(InvalidRequest, match="not open"):
            await sandbox.run("x")
        async with sandbox:
            pass
        with pytest.raises(InvalidRequest, match="not open"):
            await sandbox.read_file("x")

    in_loop(scenario())


def test_a_sandbox_that_cannot_get_its_files_is_closed_again(tmp_path: Path) -> None:
    """A failure while opening leaves nothing open."""
    backend = answers(0)

    async def scenario() -> None:
        with pytest.raises(InvalidRequest, match="missing"):
            async with AsyncSandbox(backend=backend, files=[tmp_path / "missing"]):
                pass

    in_loop(scenario())
    assert [sandbox.is_open for sandbox in backend.sandboxes] == [False]


def test_an_unknown_keyword_is_a_type_error() -> None:
    """A typo in a keyword is told, not ignored."""
    with pytest.raises(TypeError, match="memmory"):
        AsyncSandbox(memmory="1g")  # type: ignore[call-arg]
