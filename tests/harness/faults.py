"""Induced faults of ours, and the exception that each must come to, which says whether the code may have run.

What a guest does is a status: that is in the conformance checks.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

from cloche.backends.enforcement import local_controls
from cloche.backends.host import Host, measure_host
from cloche.backends.local.helper_link import HelperConnection
from cloche.backends.local.plan import build_spec, choose_guest_paths
from cloche.backends.local.prefork import pool_for
from cloche.backends.local.sandbox import LocalOpenSandbox
from cloche.core.enforcement import Enforcement, Level
from cloche.core.errors import OutcomeUnknown, StartFailed
from cloche.core.events import Event, Started
from cloche.core.limits import Limits
from cloche.core.policy import Policy
from cloche.jail.messages import Run, Spec
from cloche.testing.conformance.subject import python
from tests.harness.processes import kill_and_wait


def _host(*, use_cgroups: bool) -> Host:
    return measure_host() if use_cgroups else measure_host().without_cgroups()


def _sandbox(host: Host, level: Level, *, warm: bool = False) -> LocalOpenSandbox:
    enforcement = Enforcement(level=level, controls=local_controls(level, host))
    return LocalOpenSandbox(policy=Policy(level=level, warm=warm), limits=Limits(), enforcement=enforcement, host=host)


async def _run_and_close(sandbox: LocalOpenSandbox) -> None:
    try:
        await sandbox.run(python("print('it ran')"))
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


async def _run_over(connection: HelperConnection, *, then: Callable[[], None] = lambda: None) -> None:
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
    return build_spec(Level.JAIL, Policy(), Limits(), host, choose_guest_paths(Level.JAIL))


async def interpreter_missing(host: Host) -> None:
    """Start the helper with an interpreter that does not exist."""
    await _run_over(HelperConnection(_spec(host), "/no/such/python"))


async def interpreter_broken(host: Host) -> None:
    """Start the helper with a program that is no interpreter and ends at once."""
    await _run_over(HelperConnection(_spec(host), "/bin/false"))


async def helper_killed_before_start(host: Host) -> None:
    """Kill the helper before it was told to run anything."""
    connection = HelperConnection(_spec(host), sys.executable)
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
        await asyncio.wait_for(sandbox.run_streaming(python("import time; time.sleep(60)"), kill_when_started), 30)
    finally:
        await sandbox.close()


def _kill_helper(connection: HelperConnection) -> None:
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
