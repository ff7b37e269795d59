"""One call, one throwaway sandbox: rules, request, queue, events, result."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from cloche.core.enforcement import Control, Level
from cloche.core.errors import BackendUnavailable, InvalidRequest, PolicyDenied, StartFailed
from cloche.core.events import Event, OutputChunk, Started
from cloche.core.protocols import Backend
from cloche.core.request import Request
from cloche.core.result import Result, Status
from cloche.execution.run import arun
from cloche.testing.fake import FakeBackend


@pytest.fixture(autouse=True)
def _settings_of_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the machine's own configuration out of these tests."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name in ("SANDBOX_TYPE", "SANDBOX_TIMEOUT_SEC", "CLOCHE_CONFIG"):
        monkeypatch.delenv(name, raising=False)


def answer(stdout: str = "", stderr: str = "", exit_code: int = 0) -> Result:
    """Return a plain result."""
    return Result(stdout, stderr, exit_code, 0.25)


def run(*args: Any, **kwargs: Any) -> Result:
    """Run in a loop of its own."""
    return asyncio.run(arun(*args, **kwargs))


def test_a_call_becomes_one_request() -> None:
    """Every argument of one run reaches the backend."""
    backend = FakeBackend([answer("4\n")])
    result = run("print(4)", argv=["a"], stdin="in", env={"K": "V"}, files={"x": "y"}, backend=backend)
    request = backend.requests[0]
    assert (request.code, request.language, request.argv) == ("print(4)", "python", ("a",))
    assert (request.stdin, dict(request.env), request.files[0].data) == (b"in", {"K": "V"}, b"y")
    assert result.stdout == "4\n"
    assert not backend.sandboxes[0].is_open


def test_limits_and_rules_reach_the_backend() -> None:
    """Sizes, times and requirements arrive in the backend's units."""
    backend = FakeBackend([answer()])
    run(
        "1",
        timeout="2s",
        memory="64m",
        cpus=2,
        pids=9,
        disk="32m",
        output_limit="1k",
        require="jail,memory",
        backend=backend,
    )
    limits, policy = backend.sandboxes[0].limits, backend.sandboxes[0].policy
    assert (limits.timeout_s, limits.memory_bytes, limits.cpus, limits.pids) == (2.0, 64 << 20, 2.0, 9)
    assert (limits.disk_bytes, limits.output_bytes) == (32 << 20, 1024)
    assert (policy.require_level, policy.require_controls) == (Level.JAIL, (Control.MEMORY,))


def test_the_result_says_where_it_ran() -> None:
    """Meta names backend, level, limits and duration whatever the backend filled in."""
    meta = run("1", backend=FakeBackend([answer()])).meta
    assert (meta["backend"], meta["level"], meta["duration"]) == ("fake", "jail", 0.25)
    assert meta["limits"]["timeout_s"] == 30.0


def test_a_failing_program_is_a_result() -> None:
    """What the guest did is a status, not an exception."""
    result = run("1", backend=FakeBackend([answer(exit_code=3)]))
    assert (result.status, result.exit_code) == (Status.ERROR, 3)


def test_our_own_failure_is_an_exception() -> None:
    """What we could not do is raised."""
    with pytest.raises(StartFailed, match="no room"):
        run("1", backend=FakeBackend([StartFailed("no room")]))


def test_requirements_that_cannot_hold_are_refused() -> None:
    """Less than what is required is an error before anything runs."""
    backend = FakeBackend([answer()], level=Level.CONFINED)
    with pytest.raises(BackendUnavailable, match="jail is required"):
        run("1", require="jail", backend=backend)
    assert backend.requests == []


def test_csharp_is_not_allowed_by_default() -> None:
    """C# needs a policy that names it; the error says so."""
    backend = FakeBackend([answer()])
    with pytest.raises(PolicyDenied, match=r"csharp.*not allowed"):
        run("1", language="csharp", backend=backend)
    assert run("1", language="csharp", languages=["csharp"], backend=backend).ok


def test_an_unknown_language_is_the_callers_error() -> None:
    """A language nobody knows is refused by name."""
    with pytest.raises(InvalidRequest, match="cobol"):
        run("1", language="cobol", backend=FakeBackend())


def test_a_bare_command_is_allowed_where_a_shell_is() -> None:
    """Without code, argv is the command; it can do what a shell can."""
    backend = FakeBackend([answer()])
    run(argv=["ls", "-l"], backend=backend)
    assert (backend.requests[0].code, backend.requests[0].argv) == (None, ("ls", "-l"))
    with pytest.raises(PolicyDenied, match="bash"):
        run(argv=["ls"], languages=["python"], backend=backend)


def test_nothing_to_run_is_refused() -> None:
    """Neither code nor command is the caller's error."""
    with pytest.raises(InvalidRequest, match="nothing to run"):
        run(backend=FakeBackend())


@pytest.mark.parametrize("code", [b"print(1)", 3])
def test_code_is_text(code: object) -> None:
    """Bytes and numbers are not code."""
    with pytest.raises(InvalidRequest, match="give text"):
        run(code, backend=FakeBackend())


def test_the_screen_blocks_before_anything_runs() -> None:
    """Screened code that uses a blocked module never reaches the backend."""
    backend = FakeBackend([answer(), answer()])
    with pytest.raises(PolicyDenied, match="os"):
        run("import os", screen="block", backend=backend)
    assert backend.requests == []
    assert run("import os", screen="warn", backend=backend).meta["screen"]
    assert "screen" not in run("import os", backend=backend).meta


def test_packages_are_refused_where_a_backend_cannot_show_them() -> None:
    """With what works instead, and before anything is looked for."""
    with pytest.raises(BackendUnavailable, match='Use backend "local"'):
        run("1", packages=["numpy"], backend=FakeBackend())


def test_an_image_for_a_backend_without_images_is_refused() -> None:
    """An image that would be ignored is an error."""
    with pytest.raises(InvalidRequest, match="takes no image"):
        run("1", image="python:3.12-alpine", backend="local")


def test_tier_one_runs_no_code() -> None:
    """In tiers 1 and 2 the tool does not exist."""
    with pytest.raises((PolicyDenied, InvalidRequest), match="tier"):
        run("1", tier=1)


def test_something_that_is_no_backend_is_refused() -> None:
    """A wrong kind is the caller's error."""
    with pytest.raises(InvalidRequest, match="backend"):
        run("1", backend=5)


def test_output_and_events_arrive_in_order() -> None:
    """The callbacks see the start, then each chunk as bytes."""
    events: list[Event] = []
    chunks: list[tuple[str, bytes]] = []
    run(
        "1",
        backend=FakeBackend([answer("out", "err")]),
        on_output=lambda stream, data: chunks.append((stream, data)),
        on_event=events.append,
    )
    assert chunks == [("stdout", b"out"), ("stderr", b"err")]
    assert [type(event) for event in events] == [Started, OutputChunk, OutputChunk]


def test_a_callback_that_raises_ends_the_run() -> None:
    """The caller's exception comes back, and the sandbox is closed."""
    backend = FakeBackend([answer("out")])

    def fail(stream: str, data: bytes) -> None:
        raise ZeroDivisionError(stream)

    with pytest.raises(ZeroDivisionError, match="stdout"):
        run("1", backend=backend, on_output=fail)
    assert not backend.sandboxes[0].is_open


def test_cancelling_the_call_closes_the_sandbox() -> None:
    """A cancelled run is killed, and its cleanup is done when the call ends."""
    backend = _SlowBackend()

    async def scenario() -> None:
        task = asyncio.create_task(arun("1", backend=backend))
        await asyncio.wait_for(backend.is_running.wait(), 30)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert backend.closed == 1

    asyncio.run(scenario())


def test_a_backend_without_streaming_reports_its_output_at_the_end() -> None:
    """Streaming is an optional power; the callback works without it."""
    chunks: list[bytes] = []
    run("1", backend=_SlowBackend(delay_s=0), on_output=lambda _, data: chunks.append(data))
    assert chunks == [b"done"]


def test_out_receives_the_files(tmp_path: Path) -> None:
    """Files are saved while the sandbox still has them."""
    result = answer()
    saved: list[str] = []

    def save(directory: Any) -> tuple[str, ...]:
        saved.append(str(directory))
        return ()

    result.save_files = save
    run("1", backend=FakeBackend([result]), out=tmp_path / "out")
    assert saved == [str(tmp_path / "out")]


def test_what_was_left_out_of_a_directory_is_said(tmp_path: Path) -> None:
    """A file that was not copied is listed in the result's meta."""
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "link").symlink_to("/etc/passwd")
    meta = run("1", backend=FakeBackend([answer()]), files=[tmp_path / "d"]).meta
    assert meta["files_left_out"] == [str(tmp_path / "d" / "link")]


class _SlowSandbox:
    """Run without streaming, slowly."""

    def __init__(self, backend: _SlowBackend) -> None:
        self.backend = backend

    async def run(self, request: Request) -> Result:
        self.backend.is_running.set()
        await asyncio.sleep(self.backend.delay_s)
        return answer("done")

    async def read_file(self, path: str, *, max_bytes: int) -> bytes:
        return b""

    async def write_file(self, path: str, data: bytes) -> None:
        return None


class _SlowBackend(FakeBackend):
    """Open sandboxes that take their time, and count the closed ones."""

    def __init__(self, delay_s: float = 60) -> None:
        super().__init__()
        self.delay_s = delay_s
        self.is_running = asyncio.Event()
        self.closed = 0

    @asynccontextmanager
    async def open(self, policy: Any, limits: Any) -> Any:
        try:
            yield _SlowSandbox(self)
        finally:
            await asyncio.sleep(0.01)
            self.closed += 1


def test_the_fake_is_a_backend() -> None:
    """What tests use has the shape of the real thing."""
    backend: Backend = FakeBackend()
    assert backend.capabilities().available


def test_best_effort_that_comes_to_level_process_is_screened() -> None:
    """Where a host has no more, it is read as strictly as where that was asked for by name (R2b)."""
    backend = FakeBackend([answer(), answer()], level=Level.PROCESS)
    with pytest.raises(PolicyDenied, match="import of os"):
        run("import os", backend=backend, best_effort="filesystem")
    assert run("print(1)", backend=backend, best_effort="filesystem").ok
    assert run("import os", backend=backend, best_effort="filesystem", screen="off").ok
    assert run("import os", backend=FakeBackend([answer()]), best_effort="filesystem").ok
