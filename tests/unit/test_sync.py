"""The blocking face: from any thread, inside a loop, after a fork, under Ctrl-C."""

from __future__ import annotations

import asyncio
import inspect
import os
import pydoc
import re
import signal
import subprocess
import sys
import threading
import time
import typing
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import cloche
from cloche import sync
from cloche.backends.local.backend import LocalBackend
from cloche.blocking import calls
from cloche.core.fixing import Fixer
from cloche.core.limits import Limits
from cloche.core.policy import Policy
from cloche.execution.paths import AsyncWatch
from cloche.execution.ports import AsyncConnection, AsyncForward
from cloche.execution.processes import AsyncProcess
from cloche.execution.sandbox import AsyncSandbox, AsyncSession
from cloche.testing.fake import FakeBackend
from tests.harness.processes import interrupted


@pytest.fixture(autouse=True)
def _settings_of_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the machine's own configuration out of these tests."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name in ("SANDBOX_TYPE", "SANDBOX_TIMEOUT_SEC", "CLOCHE_CONFIG"):
        monkeypatch.delenv(name, raising=False)


def echo(count: int) -> FakeBackend:
    """Return a backend that prints the code it is given."""
    return FakeBackend([lambda request: cloche.Result(request.code or "", "", 0, 0.0)] * count)


def test_a_blocking_call_needs_no_loop() -> None:
    """`run` takes what `arun` takes and returns what it returns."""
    assert cloche.run("hello", backend=echo(1)).stdout == "hello"


def test_a_blocking_call_works_inside_a_running_loop() -> None:
    """The caller's own event loop is no obstacle (a notebook has one)."""

    async def scenario() -> str:
        return cloche.run("hello", backend=echo(1)).stdout

    assert asyncio.run(scenario()) == "hello"


def test_fifty_threads_share_one_loop() -> None:
    """Fifty callers at once each get their own answer."""
    backend, got = echo(50), {}

    def one(number: int) -> None:
        got[number] = cloche.run(str(number), backend=backend).stdout

    threads = [threading.Thread(target=one, args=(number,)) for number in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert got == {number: str(number) for number in range(50)}


def test_callbacks_run_in_the_calling_thread() -> None:
    """A slow or thread-bound callback is the caller's own business."""
    seen: list[int] = []
    cloche.run("x", backend=echo(1), on_output=lambda _stream, _data: seen.append(threading.get_ident()))
    assert seen == [threading.get_ident()]


def test_a_callback_may_run_code_itself() -> None:
    """A call from within a callback does not deadlock."""
    inner: list[str] = []
    cloche.run("a", backend=echo(1), on_output=lambda *_: inner.append(cloche.run("b", backend=echo(1)).stdout))
    assert inner == ["b"]


def test_a_callback_that_raises_ends_the_run() -> None:
    """The exception reaches the caller after the sandbox is closed."""
    backend = echo(1)

    def fail(stream: str, data: bytes) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        cloche.run("x", backend=backend, on_output=fail)
    assert not backend.sandboxes[0].is_open


def test_ctrl_c_waits_until_everything_is_closed() -> None:
    """KeyboardInterrupt is raised only after the slow cleanup of the sandbox."""
    backend = _StuckBackend()
    timer = threading.Thread(target=_interrupt_when_running, args=(backend,))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        cloche.run("x", backend=backend)
    assert backend.is_closed
    timer.join()


def test_a_sandbox_has_a_blocking_twin() -> None:
    """Runs, files and closing work without a loop."""
    backend = echo(2)
    with cloche.Sandbox(backend=backend, files={"a": "1"}) as sandbox:
        assert sandbox.run("x").stdout == "x"
        sandbox.write_file("b", b"2")
        assert sandbox.read_file("b", max_bytes=10) == b"2"
        assert sandbox.list_files() == ("a", "b")
        chunks: list[bytes] = []
        sandbox.run("y", on_output=lambda _, data: chunks.append(data))
        assert chunks == [b"y"]
    assert not backend.sandboxes[0].is_open


def test_a_sandbox_is_entered_and_left_by_one_task() -> None:
    """A backend may use scopes that only their own task can leave."""
    backend = _OneTaskBackend()
    with cloche.Sandbox(backend=backend):
        pass
    assert backend.tasks[0] is backend.tasks[1]


def test_a_sandbox_that_cannot_open_raises_that() -> None:
    """The reason reaches the caller of the with statement."""
    backend = FakeBackend(level=cloche.Level.PROCESS)
    with (
        pytest.raises(cloche.BackendUnavailable, match="jail"),
        cloche.Sandbox(backend=backend, require="jail"),
    ):
        pass


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_gets_its_own_loop() -> None:
    """After a fork the first call starts anew, and the parent's loop lives on."""
    cloche.run("before", backend=echo(1))
    pid = os.fork()
    if pid == 0:
        ok = cloche.run("child", backend=echo(1)).stdout == "child"
        os._exit(0 if ok else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert cloche.run("after", backend=echo(1)).stdout == "after"


def test_a_blocking_call_from_our_own_loop_is_refused_instead_of_hanging() -> None:
    """Code that runs in Cloche's loop must use the asynchronous calls."""

    async def scenario() -> None:
        with pytest.raises(cloche.InternalError, match="async"):
            cloche.run("x", backend=echo(1))

    calls.call(scenario)


def test_a_backend_of_ones_own_runs_in_a_task() -> None:
    """It may use time-outs and groups of tasks, which ours does without at first."""
    backend = _OneTaskBackend()
    with pytest.raises(cloche.ClocheError, match="no answer"):
        cloche.run("1", backend=backend)
    first, last = backend.tasks
    assert first is not None
    assert first is last


def test_a_backend_that_is_made_of_ours_runs_in_a_task() -> None:
    """Whoever inherits from it, or passes on what it has, may use time-outs where it needs no task."""

    class Derived(LocalBackend):
        def open(self, policy: Policy, limits: Limits) -> Any:
            assert asyncio.current_task() is not None
            raise cloche.BackendUnavailable("this is far enough")

    class Around:
        name = "around"

        def __getattr__(self, name: str) -> Any:
            return getattr(Derived(), name)

    for backend in (Derived(), Around()):
        with pytest.raises(cloche.BackendUnavailable, match="far enough"):
            cloche.run("1", backend=backend)  # type: ignore[arg-type]  # what passes everything on has no type


def test_importing_cloche_is_light() -> None:
    """`import cloche` brings neither asyncio nor anything outside of the standard library."""
    script = "import sys; before = set(sys.modules); import cloche; print(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=30)
    assert set(done.stdout.split()) <= {"cloche", "__future__"}


def test_the_public_names_are_these() -> None:
    """The surface changes on purpose only; every name can be had."""
    assert len(cloche.__all__) <= 32
    assert sorted(cloche.__all__) == cloche.__all__
    assert all(getattr(cloche, name) is not None for name in cloche.__all__)
    with pytest.raises(AttributeError, match="nothing"):
        _ = cloche.nothing  # type: ignore[attr-defined]


def _interrupt_when_running(backend: _StuckBackend) -> None:
    if backend.is_running.wait(60):
        os.kill(os.getpid(), signal.SIGINT)


class _StuckBackend(FakeBackend):
    """Never finish a run, and take a while to clean up."""

    def __init__(self) -> None:
        super().__init__()
        self.is_running = threading.Event()
        self.is_closed = False

    @asynccontextmanager
    async def open(self, policy: Any, limits: Any) -> Any:
        async with super().open(policy, limits) as sandbox:
            try:
                self.is_running.set()
                await asyncio.sleep(60)
                yield sandbox
            finally:
                await asyncio.sleep(0.3)
                self.is_closed = True


class _OneTaskBackend(FakeBackend):
    """Remember which tasks enter and leave."""

    def __init__(self) -> None:
        super().__init__()
        self.tasks: list[Any] = []

    @asynccontextmanager
    async def open(self, policy: Any, limits: Any) -> Any:
        self.tasks.append(asyncio.current_task())
        async with super().open(policy, limits) as sandbox:
            try:
                yield sandbox
            finally:
                self.tasks.append(asyncio.current_task())


def test_queue_time_is_nobodys_wall_clock() -> None:
    """With every slot taken a run waits outside, unopened."""
    backend = FakeBackend([lambda _: cloche.Result("", "", 0, 0.0)] * 100)
    started = time.monotonic()
    threads = [threading.Thread(target=lambda: cloche.run("x", backend=backend)) for _ in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(backend.requests) == 40
    assert time.monotonic() - started < 60


@pytest.mark.parametrize("how", ["__enter__", "open"])
def test_ctrl_c_while_a_sandbox_opens_leaves_none_open(how: str) -> None:
    """Wherever it comes, the sandbox is closed again before it is raised: nobody else could close it."""
    number, came = 0, True
    while came:
        number += 1
        opened: list[cloche.Sandbox] = []
        backend = _Counting()
        sandbox = cloche.Sandbox(backend=backend)
        enter = getattr(sandbox, how)
        came, was_raised = interrupted(sync, number, lambda: opened.append(enter()))  # noqa: B023 - called at once
        assert was_raised == came, f"at instruction {number}"
        assert backend.open_ones == len(opened), f"at instruction {number}"
        sandbox.close()
        assert backend.open_ones == 0
    assert number > 20


class _Counting(FakeBackend):
    """Count what is open."""

    def __init__(self) -> None:
        super().__init__([])
        self.open_ones = 0

    @asynccontextmanager
    async def open(self, policy: Policy, limits: Limits) -> AsyncIterator[Any]:
        async with super().open(policy, limits) as sandbox:
            self.open_ones += 1
            try:
                yield sandbox
            finally:
                self.open_ones -= 1


TWINS = [
    (
        sync.Sandbox,
        AsyncSandbox,
        (
            "run",
            "read_file",
            "write_file",
            "list_files",
            "append_file",
            "list_dir",
            "stat",
            "exists",
            "make_dir",
            "move",
            "remove",
            "upload",
            "download",
            "exec",
            "processes",
            "ports",
        ),
    ),
    (
        sync.Process,
        AsyncProcess,
        ("write", "close_stdin", "signal", "resize", "wait", "kill", "detach", "close"),
    ),
    (sync.Connection, AsyncConnection, ("read", "write", "end", "close")),
    (sync.Forward, AsyncForward, ("close",)),
    (sync.Watch, AsyncWatch, ("next", "close")),
    (
        sync.Session,
        AsyncSession,
        ("run", "interrupt", "checkpoint", "rollback", "restart", "end", "close", "read_file", "write_file"),
    ),
]


@pytest.mark.parametrize(
    ("blocking", "awaited", "name"), [(mine, theirs, name) for mine, theirs, names in TWINS for name in names]
)
def test_a_twin_shows_what_it_takes_and_does(blocking: type, awaited: type, name: str) -> None:
    """`help()` has the signature and the docstring of what is to be awaited; it is a plain method, and blocks."""
    mine, theirs = getattr(blocking, name), getattr(awaited, name)
    assert inspect.signature(mine) == inspect.signature(theirs)
    late = {"Fixer": Fixer}  # imported when it is used
    assert typing.get_type_hints(mine, localns=late) == typing.get_type_hints(theirs, localns=late)
    assert mine.__doc__ == theirs.__doc__
    assert (mine.__module__, mine.__qualname__) == ("cloche.sync", f"{blocking.__name__}.{name}")
    assert inspect.isfunction(mine)
    assert not inspect.iscoroutinefunction(mine)
    assert re.search(rf"\b{name}\([\s|]*self", pydoc.plain(pydoc.render_doc(blocking)))


@pytest.mark.parametrize("name", ["start", "terminal", "process", "connect", "forward", "watch"])
def test_a_twin_gives_the_twin_of_what_is_given(name: str) -> None:
    """What opens a thing has the same signature, but for the class of that thing."""
    mine, theirs = getattr(sync.Sandbox, name), getattr(AsyncSandbox, name)
    assert inspect.signature(mine).parameters == inspect.signature(theirs).parameters
    assert f"Async{inspect.signature(mine).return_annotation}" == inspect.signature(theirs).return_annotation
    assert (mine.__qualname__, mine.__doc__) == (f"Sandbox.{name}", theirs.__doc__)
    assert not inspect.iscoroutinefunction(mine)
