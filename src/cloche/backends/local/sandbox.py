"""One open sandbox of the local backend: a workspace that lives, and every run a fresh process in it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from cloche.core.enforcement import Enforcement
from cloche.core.errors import InvalidRequest, SandboxFileRefused, StartFailed
from cloche.core.events import Event, PlanStep, Sink, Started, discard
from cloche.core.languages import limits_note
from cloche.core.levels import Level
from cloche.core.limits import Limits
from cloche.core.outcome import KillCause, Observed, decide
from cloche.core.policy import Policy
from cloche.core.request import InputFile, Request
from cloche.core.result import TIMEOUT_NOTE, Result, SaveFiles, Status, Usage
from cloche.jail.spec import Run

from .collect import Collection, Known, collect, list_paths, read_regular
from .connection import Connection
from .host import Host
from .keep import keep_copies, keep_mount
from .pipes import Pipes
from .plan import build_spec, choose_places, show_toolchain
from .program import Program, build_program
from .warm import KEPT_BYTES, WarmJail, pool_for, warm_jail

if TYPE_CHECKING:
    from cloche.jail.calls import Step
    from cloche.zygote.pool import Slot

T = TypeVar("T")

log = logging.getLogger("cloche.local")

SMALL_BYTES, SMALL_FILES = 256 * 1024, 32


class LocalOpenSandbox:
    """Run requests one at a time; see core.protocols.OpenSandbox."""

    def __init__(self, *, policy: Policy, limits: Limits, enforcement: Enforcement, host: Host):
        self._policy, self._limits, self._enforcement, self._host = policy, limits, enforcement, host
        self._pool = pool_for(policy, host) if policy.warm and enforcement.level is Level.JAIL else None
        self._slot: Slot | None = None
        self._start = "cold"
        self._places = choose_places(enforcement.level)
        self._spec = build_spec(enforcement.level, policy, limits, host, self._places)
        self._connection: Connection | None = None
        self._workspace_fd = -1
        self._known: dict[str, Known] = {}
        self._turn = asyncio.Lock()
        self._is_closed = False
        self._is_last = self._is_over = False

    def expect_single_run(self) -> None:
        """Say that the next run is the last one; the helper then clears up while its result is being put together."""
        self._is_last = True

    async def run(self, request: Request) -> Result:
        """Run code or a command and return what came of it."""
        return await self.run_streaming(request, discard)

    async def run_streaming(self, request: Request, sink: Sink) -> Result:
        """Run like `run`, handing `Started` and `OutputChunk` events to `sink` as they happen."""
        program = build_program(request, self._places, request.timeout_s or self._limits.timeout_s)
        async with self._turn:
            return await self._run(request, program, sink)

    async def read_file(self, path: str, *, max_bytes: int) -> bytes:
        """Return a regular file of the workspace. Raises the SandboxFile errors."""
        async with self._turn:
            await self._have_workspace()
            return await asyncio.to_thread(read_regular, self._workspace_fd, path, max_bytes=max_bytes)

    async def list_files(self, path: str = ".") -> tuple[str, ...]:
        """Return the paths of all regular files below `path`, relative to the workspace."""
        async with self._turn:
            await self._have_workspace()
            return await asyncio.to_thread(list_paths, self._workspace_fd, path)

    async def write_file(self, path: str, data: bytes) -> None:
        """Create or replace a file of the workspace, with its folders. Raises the SandboxFile errors."""
        await self.write_files([InputFile(path=path, data=data)])

    async def write_files(self, files: Sequence[InputFile]) -> None:
        """Create or replace all of `files`."""
        async with self._turn:
            await self._write(files)

    async def close(self) -> None:
        """Kill and remove everything, for good."""
        self._is_closed = True
        connection, self._connection = self._connection, None
        try:
            if connection is not None and self._is_over and self._slot is None:
                connection.leave()
            elif connection is not None and not self._can_go_back():
                self._is_over = False
                await finish(connection.close())
        finally:
            if connection is not None or self._slot is not None:
                self._release()
            self._drop_workspace()

    def _can_go_back(self) -> bool:
        return self._is_over and self._slot is not None and self._slot.kept_bytes <= KEPT_BYTES

    def _drop_workspace(self) -> None:
        if self._workspace_fd >= 0:
            os.close(self._workspace_fd)
            self._workspace_fd = -1

    def _release(self) -> None:
        """Give the pool its slot back, or tell it that there is one less; and make sure that it has begun."""
        slot, self._slot = self._slot, None
        if self._pool is None:
            return
        if slot is None:
            self._pool.start()
        elif self._is_over:
            self._pool.give_back(slot)
        else:
            self._pool.write_off(slot)

    async def _write(self, files: Sequence[InputFile]) -> None:
        run = Run(files=[(file.path, file.mode, file.data) for file in files], timeout_s=self._limits.timeout_s)
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        try:
            await self._attend(run, (null, null, null, null), discard)
        finally:
            os.close(null)
        await self._collected({})

    async def _have_workspace(self) -> None:
        if self._workspace_fd < 0:
            await self._write(())

    async def _run(self, request: Request, program: Program, sink: Sink) -> Result:
        """Run, and start afresh when a warm helper turns out to be unfit before anything of the program was started."""
        was_open = self._connection is not None
        try:
            return await self._run_once(request, program, sink)
        except StartFailed as error:
            if was_open or self._slot is None or self._is_closed:
                raise
            log.warning("a warm start failed, starting afresh: %s", error)
        connection, self._connection = self._connection, None
        if connection is not None:
            await finish(connection.close())
        self._release()
        self._pool = None
        self._drop_workspace()
        self._spec = build_spec(self._enforcement.level, self._policy, self._limits, self._host, self._places)
        return await self._run_once(request, program, sink)

    async def _run_once(self, request: Request, program: Program, sink: Sink) -> Result:
        show_toolchain(program.run, self._spec, program.paths(), self._host)
        sink = sink if sink is discard else started_first(sink)
        pipes = Pipes(request.stdin, self._limits, self._kill, sink)
        try:
            ended = await self._attend(program.run, pipes.guest_ends(), sink, pipes.close_guest_ends)
            await pipes.drain()
        finally:
            pipes.close()
        found = await self._collected(program.given)
        return await self._result(program, pipes, ended, found)

    async def _attend(
        self, run: Run, streams: Sequence[int], sink: Sink, on_sent: Callable[[], None] | None = None
    ) -> dict[str, Any]:
        """Send a run and wait for its end; when cancelled, kill it and wait until it is dead."""
        connection, steps = await self._send(run, streams)
        if on_sent is not None:
            on_sent()
        plan: list[PlanStep] = []

        def hear(tag: str, body: dict[str, Any], fds: list[int]) -> None:
            if tag == "ready":
                self._keep_workspace(fds)
                timed = () if sink is discard else zip(steps, body["seconds"], strict=False)
                plan.extend(PlanStep(name=step[0], description=step[1], seconds=spent) for step, spent in timed)
            elif tag == "started" and (run.commands or run.python):
                sink(Started(plan=tuple(plan)))

        attending = asyncio.ensure_future(connection.attend(hear))
        try:
            ended = await asyncio.shield(attending)
            self._is_over = self._is_last and self._spec.level == "jail"
            return ended
        except asyncio.CancelledError:
            connection.kill(KillCause.CANCELLED)
            with contextlib.suppress(Exception):  # whatever came of it, nobody waits for it any more
                await finish(attending)
            raise
        except StartFailed as error:
            if error.step == "files":
                raise SandboxFileRefused(f"cannot write the input files: {error}", path="/workspace") from error
            raise

    async def _send(self, run: Run, streams: Sequence[int]) -> tuple[Connection, tuple[Step, ...]]:
        """Send a run to the helper: a warm one where there is one, and then into a jail built ahead if it can be."""
        jail = warm_jail(self._policy, self._limits, self._spec, run)
        connection = await self._connected(jail)
        if self._slot is not None and self._is_last:
            self._start = "pooled" if self._slot.key == jail.key else "forked"
            return connection, connection.send_warm_run(run, streams, jail, self._slot)
        self._start = "cold" if self._slot is None else "forked"
        is_jail = self._spec.level == "jail"
        has_workspace = self._workspace_fd >= 0 and is_jail
        steps = connection.send_run(run, streams, has_workspace=has_workspace, is_last=self._is_last and is_jail)
        return connection, steps

    async def _connected(self, jail: WarmJail) -> Connection:
        if self._is_closed:
            raise InvalidRequest("this sandbox is closed; open another one")
        if self._connection is None:
            if self._slot is not None:  # of a start that failed
                self._release()
            self._slot = self._pool.take(jail) if self._pool is not None else None
            connection = Connection(self._spec, sys.executable, self._slot)
            try:
                await connection.start()
            except BaseException:
                await connection.close()
                raise
            self._connection = connection
        if not self._connection.is_alive:
            lost = "the helper process of this sandbox is gone, and the workspace with it; open another sandbox"
            raise StartFailed(lost, step="helper")
        return self._connection

    def _kill(self, cause: KillCause) -> None:
        if self._connection is not None:
            self._connection.kill(cause)

    def _keep_workspace(self, fds: Sequence[int]) -> None:
        """Hold the workspace as the latest run left it; below level jail it is a folder that stays the same."""
        fresh = fds[0] if fds else -1
        if fresh < 0 and self._workspace_fd < 0:
            fresh = os.open(self._places.workspace, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        if fresh >= 0:
            if self._workspace_fd >= 0:
                os.close(self._workspace_fd)
            self._workspace_fd = fresh

    async def _collected(self, given: Mapping[str, str]) -> Collection:
        """Look at the workspace; in a thread when there is much of it."""
        found = self._collect(given) if self._is_small() else await asyncio.to_thread(self._collect, given)
        self._known = dict(found.known)
        return found

    def _is_small(self) -> bool:
        """Tell whether hashing the whole workspace takes less time than handing the work to a thread."""
        state = os.fstatvfs(self._workspace_fd)
        return self._stored_bytes() < SMALL_BYTES and state.f_files - state.f_ffree < SMALL_FILES

    def _stored_bytes(self) -> int:
        state = os.fstatvfs(self._workspace_fd)
        return (state.f_blocks - state.f_bfree) * state.f_frsize

    def _collect(self, given: Mapping[str, str]) -> Collection:
        return collect(self._workspace_fd, self._known, given, max_bytes=self._limits.disk_bytes)

    async def _result(self, program: Program, pipes: Pipes, ended: dict[str, Any], found: Collection) -> Result:
        verdict = decide(observed(ended))
        out, err = pipes.kept("stdout"), pipes.kept("stderr")
        if verdict.status is Status.TIMEOUT:
            err += (b"" if not err or err.endswith(b"\n") else b"\n") + TIMEOUT_NOTE.encode()
        value, is_repr = pipes.value()
        enforcement = dataclasses.replace(self._enforcement, hits=verdict.hits)
        save = self._saver(found) if found.changed else None
        if save is not None and self._slot is not None:
            self._slot.kept_bytes += self._stored_bytes()  # all of it, whether it was found or not
        runtime = program.runtime() if program.has_value else await asyncio.to_thread(program.runtime)
        return Result(
            out.decode("utf-8", "replace"),
            err.decode("utf-8", "replace"),
            verdict.exit_code,
            ended["wall_s"],
            truncated=pipes.is_truncated,
            timed_out=verdict.status is Status.TIMEOUT,
            status=verdict.status,
            value=value,
            value_is_repr=is_repr,
            files=found.changed,
            usage=_usage(ended),
            enforcement=enforcement,
            stdout_bytes=out,
            stderr_bytes=err,
            save_files=save,
            meta=self._meta(program, runtime, ended, found),
        )

    def _meta(self, program: Program, runtime: str, ended: dict[str, Any], found: Collection) -> dict[str, Any]:
        engine = program.toolchain.engine if program.toolchain else None
        meta: dict[str, Any] = {
            "runtime": engine.name if engine else "command",
            "versions": {engine.name: runtime} if engine else {},
            "limits": self._limits.as_dict(),
            "duration": ended["wall_s"],
            "backend": "local",
            "level": str(self._enforcement.level),
            "start": self._start,
        }
        if engine is not None and engine.stand_in:
            meta["stand_in"] = engine.stand_in
        if engine is not None and (advice := limits_note(engine, self._limits)):
            meta["advice"] = advice
        if found.skipped:
            meta["files_skipped"] = found.skipped
        return meta

    def _saver(self, found: Collection) -> SaveFiles:
        """Keep what `Result.save` needs as long as the result lives."""
        keep = keep_mount if self._spec.level == "jail" else keep_copies
        return keep(self._workspace_fd, found.changed)


async def finish(work: Awaitable[T]) -> T:
    """Wait until `work` is done, however often the waiting is cancelled; then be cancelled."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    return task.result()


def started_first(sink: Sink) -> Sink:
    """Hold output back until `Started` was handed on: it comes another way, and may be faster."""
    held: list[Event] | None = []

    def hand_on(event: Event) -> None:
        nonlocal held
        if held is None:
            sink(event)
        elif not isinstance(event, Started):
            held.append(event)
        else:
            early, held = held, None
            for one in (event, *early):
                sink(one)

    return hand_on


def observed(ended: dict[str, Any]) -> Observed:
    """Read the helper's report of an end."""
    report = ended["ended"]
    status = report["wait_status"] if report else None
    signal = os.WTERMSIG(status) if status is not None and os.WIFSIGNALED(status) else None
    counters = ended["counters"]
    return Observed(
        exit_code=os.WEXITSTATUS(status) if status is not None and signal is None else None,
        signal=signal,
        cause=KillCause(ended["cause"]) if ended["cause"] else None,
        oom_kills=counters.get("oom_kills", 0),
        pids_hits=counters.get("pids_hits", 0) + int(ended["is_task_limit_seen"]),
        workspace_full=bool(ended["is_folder_over"] or (report and report["full"])),
    )


def _usage(ended: dict[str, Any]) -> Usage:
    return Usage(
        wall_s=ended["wall_s"],
        cpu_user_s=ended["cpu_user_s"],
        cpu_system_s=ended["cpu_system_s"],
        peak_memory_bytes=ended["peak_bytes"],
        processes=max(1, ended["tasks"]),
    )
