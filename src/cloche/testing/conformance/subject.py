"""Tools of the conformance checks: the subject under test, a check, expectations, the search for leaks.

A check uses a backend only through `core.protocols`. Inside the sandbox it relies on `python`, `bash`, `TMPDIR`, and
the workspace as the working directory, never on paths of one backend. `leaks` lists what this process's sandboxes may
have left on this host.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from cloche.core.enforcement import Control, Enforcement, Level, State
from cloche.core.errors import SandboxFileNotFound
from cloche.core.events import Event, OutputChunk, Sink, discard
from cloche.core.limits import MIB, Limits
from cloche.core.policy import Policy
from cloche.core.protocols import (
    Backend,
    OpenSandbox,
    SupportsLive,
    SupportsPool,
    SupportsSingleRun,
    SupportsStreaming,
)
from cloche.core.record import dataclass, field, replace
from cloche.core.request import InputFile, Request
from cloche.core.result import Result, Status

# Wide enough for a machine that does other things too; a check that waits for a limit sets its own.
GENEROUS = Limits(timeout_s=60, memory_bytes=256 * MIB, cpus=2, disk_bytes=64 * MIB)
# How long a program is given, one try after the other, to do what it does first, where nothing but time can tell.
TRIES_S = (2.0, 4.0, 8.0, 16.0, 32.0)
FIRST_OUTPUT_S = 50.0  # how long a program's first word is waited for that then goes on for longer
# Where sandboxes of this process leave their name: `cloche-<pid>-...`, see `backends.garbage_collection`.
_FOLDERS = ("/dev/shm", "/run", "/var/tmp")

# Write the time into the workspace for two minutes, whatever is sent or closed.
HEART = """
import os, signal, sys, time
def beat():
    for number in (1, 2, 13, 15):
        signal.signal(number, signal.SIG_IGN)
    for _ in range(1200):
        with open("heartbeat", "w") as file:
            file.write(str(time.time()))
        time.sleep(0.1)
    os._exit(0)
def wait_for_beat():
    while not os.path.exists("heartbeat"):
        time.sleep(0.02)
"""
HEART_IN_CHILD = "if os.fork() == 0:\n    os.setsid()\n    beat()\nwait_for_beat()\n"


class Broken(Exception):
    """Report which claim is broken, and the observation."""


class Skipped(Exception):
    """Report why a claim does not apply to a backend: it does not offer the feature."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """Hold the backend under test, and the rules of its sandboxes. With `is_live` they are live sandboxes."""

    backend: Backend
    policy: Policy = field(default_factory=Policy)
    limits: Limits = GENEROUS
    is_live: bool = False

    def open(
        self,
        *,
        policy: Policy | None = None,
        **limits: Any,  # noqa: ANN401 - checked by Limits
    ) -> AbstractAsyncContextManager[OpenSandbox]:
        """Open a sandbox of the backend with some limits changed."""
        rules = policy or self.policy, self.limits.with_changes(**limits)
        if not self.is_live:
            return self.backend.open(*rules)
        if not isinstance(self.backend, SupportsLive):
            raise Skipped("it gives no live sandboxes")
        return self.backend.open_live(*rules)

    async def run(
        self,
        request: Request,
        *,
        sink: Sink = discard,
        **limits: Any,  # noqa: ANN401 - checked by Limits
    ) -> Result:
        """Run one request in a fresh sandbox. `sink` receives its events if the sandbox streams."""
        async with self.open(**limits) as sandbox:
            if isinstance(sandbox, SupportsSingleRun):
                sandbox.expect_single_run()
            return await run_with_events(sandbox, request, sink)

    async def drain(self) -> None:
        """Let the backend end its pool of warm sandboxes, which are not leftovers."""
        if isinstance(self.backend, SupportsPool):
            await asyncio.to_thread(self.backend.drain)

    def at(self, level: Level | None) -> Subject:
        """Return the same subject at a level; None leaves the choice to the backend."""
        return replace(self, policy=self.policy.with_changes(level=level))


Attempt = Callable[[Subject], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Hold one claim and its test.

    `attempt` raises Broken if the claim does not hold, Skipped if the backend does not offer the feature. `rests_on`
    names the control without which no backend could pass. A check that is `alone` runs by itself: it looks at the whole
    host, or counts this user's processes.
    """

    name: str
    family: str
    claim: str
    attempt: Attempt
    rests_on: Control | None = None
    alone: bool = False


def python(
    code: str,
    *argv: str,
    stdin: bytes = b"",
    env: Mapping[str, str] | None = None,
    files: Mapping[str, bytes] | None = None,
    timeout_s: float | None = None,
) -> Request:
    """Return a request to run Python code."""
    inputs = tuple(InputFile(path=path, data=data) for path, data in (files or {}).items())
    return Request(code=code, argv=argv, stdin=stdin, env=env or {}, files=inputs, timeout_s=timeout_s)


def bash(code: str) -> Request:
    """Return a request to run a shell script."""
    return Request(code=code, language="bash")


def command(*argv: str) -> Request:
    """Return a request to run a program."""
    return Request(argv=argv)


def expect(name: str, actual: object, expected: object) -> None:
    """Break the claim unless `actual` equals `expected`."""
    if actual != expected:
        raise Broken(f"{name} is {short_repr(actual)}, not {short_repr(expected)}")


def expect_that(holds: object, otherwise: str) -> None:
    """Break the claim with the sentence `otherwise` unless `holds` is true."""
    if not holds:
        raise Broken(otherwise)


async def refuses(attempt: Awaitable[object], error: type[Exception], action: str) -> None:
    """Break the claim unless the attempt raises this error."""
    try:
        await attempt
    except error:
        return
    except Exception as other:
        raise Broken(f"{action} raised {type(other).__name__} ({other}), not {error.__name__}") from other
    raise Broken(f"{action} was not refused")


def expect_ok(result: Result) -> Result:
    """Break the claim unless the program succeeded; its output is the reason."""
    if result.status is not Status.OK:
        raise Broken(f"the run ended with {describe(result)}")
    return result


def describe(result: Result) -> str:
    """Describe in one line how a run ended."""
    return f"{result.status} (exit code {result.exit_code}): {short_repr(result.stderr or result.stdout)}"


def short_repr(value: object) -> str:
    """Return a value's repr, at most a line long, with the end of a long one, where a traceback has its error."""
    text = repr(value)
    return text if len(text) <= 300 else f"{text[:60]} ... {text[-230:]}"


async def run_with_events(sandbox: OpenSandbox, request: Request, sink: Sink) -> Result:
    """Run one request. `sink` receives its events if the sandbox streams."""
    if sink is not discard and isinstance(sandbox, SupportsStreaming):
        return await sandbox.run_streaming(request, sink)
    return await sandbox.run(request)


@asynccontextmanager
async def at_work(
    sandbox: OpenSandbox, request: Request, *, sink: Sink = discard, patience_s: float = TRIES_S[0]
) -> AsyncIterator[asyncio.Future[Result]]:
    """Run a program in the background; yield once it has printed something; cancel it on exit.

    Without streaming, `patience_s` is waited instead. The run may already have ended.
    """
    has_printed = asyncio.Event()

    def listen(event: Event) -> None:
        sink(event)
        if isinstance(event, OutputChunk):
            has_printed.set()

    running = asyncio.ensure_future(run_with_events(sandbox, request, listen))
    first_output = asyncio.ensure_future(has_printed.wait())
    try:
        seconds = FIRST_OUTPUT_S if isinstance(sandbox, SupportsStreaming) else patience_s
        await asyncio.wait([running, first_output], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        yield running
    finally:
        first_output.cancel()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def timed_out(sandbox: OpenSandbox, code: str, *, mark: str) -> tuple[Result, float]:
    """Let code time out after it has created the file `mark`; return the result and the time-out.

    If the file is missing, retry with a longer time-out, since machines and programs may be slow.
    """
    for seconds in TRIES_S:
        result = await sandbox.run(python(code, timeout_s=seconds))
        expect_that(result.status is Status.TIMEOUT, f"the run ended with {describe(result)}")
        if await has_file(sandbox, mark):
            return result, seconds
    raise Broken(f"a program did not come to make its file {mark!r} in {TRIES_S[-1]:g} s")


async def has_file(sandbox: OpenSandbox, path: str) -> bool:
    """Tell whether the workspace has a small file of this name."""
    try:
        await sandbox.read_file(path, max_bytes=1000)
    except SandboxFileNotFound:
        return False
    return True


async def expect_no_heartbeat(sandbox: OpenSandbox) -> None:
    """Break the claim unless the heartbeat has stopped."""
    code = "import time\nfirst = open('heartbeat').read(); time.sleep(2)\nprint(first == open('heartbeat').read())"
    result = expect_ok(await sandbox.run(python(code)))
    expect("the heartbeat has stopped", result.stdout, "True\n")


async def least_s(subject: Subject) -> float:
    """Return the duration of a run that does nothing; a machine may have to boot."""
    started = time.monotonic()
    expect_ok(await subject.run(python("pass")))
    return time.monotonic() - started


async def eventually(holds: Callable[[], bool], *, patience_s: float = 60.0) -> bool:
    """Wait until a condition holds, since processes take time to end."""
    deadline = time.monotonic() + patience_s
    while not holds():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.05)
    return True


async def enforcement_of(subject: Subject) -> Enforcement:
    """Return the enforcement that the subject's sandboxes report."""
    return (await subject.run(python("pass"))).enforcement


async def claims(subject: Subject, control: Control) -> bool:
    """Tell whether the subject reports a control as enforced."""
    return (await enforcement_of(subject))[control].state is State.ENFORCED


def ends(
    name: str,
    claim: str,
    request: Callable[[], Request],
    *,
    family: str,
    status: Status = Status.OK,
    exit_code: int | None = 0,
    stdout: str | None = None,
    hits: str = "",
    rests_on: Control | None = None,
    alone: bool = False,
    **limits: Any,  # noqa: ANN401 - checked by Limits
) -> Check:
    """Return a check that one run ends as stated. An `exit_code` or `stdout` of None accepts any value."""

    async def attempt(subject: Subject) -> None:
        result = await subject.run(request(), **limits)
        if result.status is not status or exit_code not in (None, result.exit_code):
            expected = f"{status}, exit code {'any' if exit_code is None else exit_code}"
            raise Broken(f"the run ended with {describe(result)}; wanted {expected}")
        if stdout is not None:
            expect("stdout", result.stdout, stdout)
        if hits:
            expect_that(result.enforcement.hits.get(hits), f"hits are {dict(result.enforcement.hits)}, without {hits}")

    return Check(name=name, family=family, claim=claim, attempt=attempt, rests_on=rests_on, alone=alone)


def leaks() -> frozenset[str]:
    """Return a line for every process, mount, control group and folder that this process's sandboxes left."""
    return frozenset([*_descendants(os.getpid()), *_mounts(), *_folders()])


def named_processes(token: str) -> list[int]:
    """Return the processes whose command line contains `token`, including those of other PID namespaces."""
    return [pid for pid in _pids() if token.encode() in _read(f"/proc/{pid}/cmdline")]


def status_of(pid: int) -> dict[str, str]:
    """Return the rows of a process's status file, empty if it is gone."""
    rows = (line.split(":", 1) for line in _read(f"/proc/{pid}/status").decode(errors="replace").splitlines())
    return {row[0]: row[1].strip() for row in rows if len(row) == 2}


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()] if os.path.isdir("/proc") else []


def _descendants(root: int) -> list[str]:
    parents = {pid: int(status_of(pid).get("PPid", 0)) for pid in _pids()}
    descendants: list[int] = []
    queue = [root]
    while queue:
        parent = queue.pop()
        children = [pid for pid, its_parent in parents.items() if its_parent == parent]
        descendants += children
        queue += children
    return [f"process {pid}: {_read(f'/proc/{pid}/cmdline')[:80]!r}" for pid in descendants]


def _mounts() -> list[str]:
    lines = _read("/proc/self/mountinfo").decode(errors="replace").splitlines()
    return [f"mount {line}" for line in lines if f"cloche-{os.getpid()}-" in line]


def _folders() -> list[str]:
    prefix = f"cloche-{os.getpid()}-"
    folders = {tempfile.gettempdir(), *_FOLDERS}
    paths = [f"{folder}/{name}" for folder in folders for name in _listed(folder) if name.startswith(prefix)]
    for folder, names, _ in os.walk("/sys/fs/cgroup"):
        paths += [f"{folder}/{name}" for name in names if name.startswith(prefix)]
    return paths


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""
