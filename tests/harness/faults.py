"""Induced faults, and what each must come to: exactly that, every time.

What the guest does is a status; what we cannot do is an exception, and which one says whether the code may have run.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from cloche.backends.enforcement import local_controls
from cloche.backends.host import Host, measure_host
from cloche.backends.local.backend import LocalBackend
from cloche.backends.local.helper_link import Connection
from cloche.backends.local.plan import build_spec, choose_places
from cloche.backends.local.prefork import pool_for
from cloche.backends.local.sandbox import LocalOpenSandbox
from cloche.core.enforcement import Enforcement, Level
from cloche.core.errors import OutcomeUnknown, StartFailed
from cloche.core.events import Event, Started
from cloche.core.limits import MIB, Limits
from cloche.core.policy import Policy
from cloche.core.request import Request
from cloche.core.result import Status
from cloche.jail.messages import Run, Spec
from tests.harness.processes import kill_and_wait

# Piece by piece: a sum that is taken every 20 ms must be able to see it grow.
GROWS = """
import time
hoard = []
for _ in range(200):
    hoard.append(b"x" * (2 << 20))
    time.sleep(0.005)
time.sleep(60)
"""
GROWS_IN_CHILDREN = """
import os, time
for _ in range(8):
    if os.fork() == 0:
        hoard = b"x" * (24 << 20)
        time.sleep(60)
        os._exit(0)
    time.sleep(0.02)
time.sleep(60)
"""
# Held until it is seen, also by a look that comes late.
HOARDS = """
import time
x = []
try:
    for _ in range(1000):
        x.append(b"x" * 1_000_000)
except MemoryError:
    pass
time.sleep(60)
"""
FORKS = """
import os, sys, time
try:
    for _ in range(200):
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
except OSError:
    time.sleep(0.3)
    sys.exit(3)
sys.exit(77)
"""
FILLS = """
for number in range(64):
    with open(f"fill{number}", "wb", 0) as file:
        file.write(bytes(1 << 20))
        file.write(b"x")
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestFault:
    """Say what a guest does under which limits, and the status and exit code of its result."""

    request: Request
    limits: Mapping[str, Any] = field(default_factory=dict)
    status: Status
    exit_code: int


def _python(code: str) -> Request:
    return Request(code=code)


GUEST_FAULTS: Mapping[str, GuestFault] = {
    "timeout": GuestFault(
        request=_python("import time; time.sleep(60)"), limits={"timeout_s": 0.5}, status=Status.TIMEOUT, exit_code=-1
    ),
    "busy timeout": GuestFault(
        request=_python("while True: pass"), limits={"timeout_s": 0.5}, status=Status.TIMEOUT, exit_code=-1
    ),
    "memory in one process": GuestFault(
        request=_python(GROWS), limits={"memory_bytes": 64 * MIB}, status=Status.OUT_OF_MEMORY, exit_code=137
    ),
    "memory in children": GuestFault(
        request=_python(GROWS_IN_CHILDREN),
        limits={"memory_bytes": 96 * MIB},
        status=Status.OUT_OF_MEMORY,
        exit_code=137,
    ),
    "pids": GuestFault(request=_python(FORKS), limits={"pids": 16}, status=Status.PIDS_LIMIT, exit_code=3),
    "disk": GuestFault(request=_python(FILLS), limits={"disk_bytes": 8 * MIB}, status=Status.DISK_LIMIT, exit_code=1),
    "output flood": GuestFault(
        request=Request(argv=("cat", "/dev/zero")),
        limits={"flood_bytes": 4 * MIB},
        status=Status.OUTPUT_LIMIT,
        exit_code=137,
    ),
    "killed by a signal": GuestFault(
        request=_python("import os; os.kill(os.getpid(), 9)"), status=Status.SIGNALED, exit_code=137
    ),
    "abort": GuestFault(request=_python("import os; os.abort()"), status=Status.SIGNALED, exit_code=134),
    "exit 1": GuestFault(request=_python("raise SystemExit(1)"), status=Status.ERROR, exit_code=1),
    "missing program": GuestFault(request=Request(argv=("no-such-program",)), status=Status.ERROR, exit_code=127),
}


async def induce(fault: GuestFault, *, use_cgroups: bool) -> tuple[Status | None, int, str]:
    """Let a guest do it in a jail of its own, and return status, exit code and its last words."""
    limits = Limits(cpus=2, timeout_s=60).with_changes(**fault.limits)
    async with LocalBackend(use_cgroups=use_cgroups).open(Policy(level=Level.JAIL), limits) as sandbox:
        result = await sandbox.run(fault.request)
    return result.status, result.exit_code, result.stderr[-300:]


def _host(*, use_cgroups: bool) -> Host:
    return measure_host() if use_cgroups else measure_host().without_cgroups()


def _sandbox(host: Host, level: Level, *, warm: bool = False) -> LocalOpenSandbox:
    enforcement = Enforcement(level=level, controls=local_controls(level, host))
    return LocalOpenSandbox(policy=Policy(level=level, warm=warm), limits=Limits(), enforcement=enforcement, host=host)


async def _run_and_close(sandbox: LocalOpenSandbox) -> None:
    try:
        await sandbox.run(_python("print('it ran')"))
    finally:
        await sandbox.close()


async def cgroup_refused(host: Host) -> None:
    """Ask for a control group where the kernel makes none."""
    nowhere = {name: f"/proc/nowhere/{name}" for name in ("memory", "pids", "cpu")}
    await _run_and_close(_sandbox(replace(host, cgroup_version=1, cgroup_folders=nowhere), Level.JAIL))


async def mount_refused(host: Host) -> None:
    """Ask for a mount whose source does not exist."""
    sandbox = _sandbox(host, Level.JAIL)
    sandbox._spec.mounts = [*sandbox._spec.mounts, ("bind", "/no/such/source", "mnt")]
    await _run_and_close(sandbox)


async def folder_refused(host: Host) -> None:
    """Ask for a work folder where there can be none."""
    sandbox = _sandbox(host, Level.CONFINED)
    sandbox._spec.folder = "/proc/nowhere/folder"
    await _run_and_close(sandbox)


async def _run_over(connection: Connection, *, then: Callable[[], None] = lambda: None) -> None:
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    try:
        await connection.start()
        then()
        connection.send_run(Run(commands=[["true"]]), (null, null, null, null))
        await connection.attend(_close_all)
    finally:
        os.close(null)
        await connection.close()


def _close_all(_tag: str, _body: dict[str, Any], fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def _spec(host: Host) -> Spec:
    return build_spec(Level.JAIL, Policy(), Limits(), host, choose_places(Level.JAIL))


async def interpreter_missing(host: Host) -> None:
    """Start the helper with an interpreter that does not exist."""
    await _run_over(Connection(_spec(host), "/no/such/python"))


async def interpreter_broken(host: Host) -> None:
    """Start the helper with a program that is no interpreter and ends at once."""
    await _run_over(Connection(_spec(host), "/bin/false"))


async def helper_killed_before_start(host: Host) -> None:
    """Kill the helper before it was told to run anything."""
    connection = Connection(_spec(host), sys.executable)
    await _run_over(connection, then=lambda: _kill_helper(connection))


async def helper_killed_while_running(host: Host) -> None:
    """Kill the helper of a jail when its code has begun."""
    await _kill_while_running(_sandbox(host, Level.JAIL))


async def confined_helper_killed_while_running(host: Host) -> None:
    """Kill the helper of a confined sandbox when its code has begun."""
    await _kill_while_running(_sandbox(host, Level.CONFINED))


async def _kill_while_running(sandbox: LocalOpenSandbox) -> None:
    def kill_when_started(event: Event) -> None:
        if isinstance(event, Started) and sandbox._connection is not None:
            _kill_helper(sandbox._connection)

    try:
        await asyncio.wait_for(sandbox.run_streaming(_python("import time; time.sleep(60)"), kill_when_started), 30)
    finally:
        await sandbox.close()


def _kill_helper(connection: Connection) -> None:
    slot = connection._slot
    if slot is not None and not slot.pid:
        slot.look()  # it told its number before its guest started, on a link that nobody need have read by then
    assert connection.helper_pid
    kill_and_wait([connection.helper_pid])


async def _warm_sandbox(host: Host) -> LocalOpenSandbox:
    """Return a sandbox that will take a warm helper; there is one as soon as its template has loaded."""
    pool = pool_for(Policy(), host)
    pool.start()
    sandbox = _sandbox(host, Level.JAIL, warm=True)
    for _ in range(3000):
        if pool.is_ready():
            return sandbox
        await asyncio.sleep(0.02)
    raise AssertionError("the template was not ready within a minute")


async def warm_helper_killed_while_running(host: Host) -> None:
    """Kill a helper that a template forked when its code has begun."""
    await _kill_while_running(await _warm_sandbox(host))


OUR_FAULTS: Mapping[str, tuple[Callable[[Host], Awaitable[None]], type[Exception]]] = {
    "control group refused": (cgroup_refused, StartFailed),
    "mount refused": (mount_refused, StartFailed),
    "work folder refused": (folder_refused, StartFailed),
    "interpreter missing": (interpreter_missing, StartFailed),
    "interpreter broken": (interpreter_broken, StartFailed),
    "helper killed before the start": (helper_killed_before_start, StartFailed),
    "helper killed while the code runs": (helper_killed_while_running, OutcomeUnknown),
    "warm helper killed while the code runs": (warm_helper_killed_while_running, OutcomeUnknown),
    "confined helper killed while the code runs": (confined_helper_killed_while_running, OutcomeUnknown),
}


async def fail(name: str, *, use_cgroups: bool) -> str:
    """Induce one of our own faults and return the name of what was raised, with its message."""
    try:
        await OUR_FAULTS[name][0](_host(use_cgroups=use_cgroups))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"
