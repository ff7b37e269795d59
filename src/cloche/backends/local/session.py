"""A live session of the local backend: an interpreter in a jail of its own, in the workspace of its sandbox.

It is one long run: the same helper, reaper, walls and limits; what is added is a link on which the interpreter is
given cells. The clock of a cell is kept here. A cell that is over its time is interrupted, as by Ctrl-C, which keeps
what the session knows; one that does not let itself be interrupted is killed with the whole session.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any

from cloche.core.errors import BackendUnavailable, ClocheError, InvalidRequest, StartFailed
from cloche.core.events import Sink, Started
from cloche.core.limits import Limits
from cloche.core.outcome import KillCause, Observed, Verdict, decide
from cloche.core.result import EXIT_TIMEOUT, TIMEOUT_NOTE, Output, Result, Status, Usage

from .connection import Connection
from .dialogue import Dialogue, Heard, read_output
from .family import ORIGIN, Family, Node
from .reports import finish, observed, usage

if TYPE_CHECKING:
    from cloche.jail.spec import Spec

    from .sandbox import LocalOpenSandbox
    from .session_program import SessionProgram, Word

Attend = Callable[[Callable[[str, Mapping[str, Any]], None]], Coroutine[Any, Any, dict[str, Any]]]

INTERRUPT_PATIENCE_S = 3.0
AGAIN_S = 0.5  # between one interrupt and the next, where one may not be enough
LAST_WORDS_S = 0.3
LONG_S = 0.01  # a cell that takes longer has its memory watched closely
DRAIN_S = 0.3
START_PATIENCE_S = 60.0
FOR_EVER_S = 1e9
INTERRUPTED = 130


class LocalSession:
    """Run one cell at a time; see core.protocols.OpenSession."""

    def __init__(self, sandbox: LocalOpenSandbox, program: SessionProgram, limits: Limits):
        self._sandbox, self._program, self._limits = sandbox, program, limits
        self._family: Family | None = None
        self._node = Node(ORIGIN, None, self._new_dialogue(), sandbox.workspace, is_fork=False)
        self._node.is_runner = True
        self._checkpoints: dict[str, Node] = {}
        self._turn = asyncio.Lock()
        self._cause: KillCause | None = None
        self._is_interrupted = self._is_running = self.is_closed = False
        self._request_id = 0
        self._verdict: Verdict | None = None
        self.start = "cold"
        self.runtime = program.language.name

    def _new_dialogue(self) -> Dialogue:
        return Dialogue(self._limits, self._program.new_codec(), self._on_flood)

    @property
    def _dialogue(self) -> Dialogue:
        return self._node.dialogue

    @property
    def is_alive(self) -> bool:
        """Tell whether it can still run anything."""
        return self._family is not None and not self._family.end.done() and not self._dialogue.lost.done()

    @property
    def has_ended(self) -> bool:
        """Tell whether no process of it is left: one that has only closed its link may still be at work."""
        return self.is_closed or self._family is None or self._family.end.done()

    async def open(self, connection: Connection, spec: Spec, send: Callable[[list[int]], None], attend: Attend) -> None:
        """Send the run that the session is, with `send`, and wait until the interpreter says that it is ready."""
        family = Family(connection, spec, self._node)
        send(self._dialogue.guest_ends())
        self._family = family  # whose end can be waited for, now that there will be one
        self._dialogue.close_guest_ends()
        family.end = asyncio.ensure_future(attend(family.hear))
        waiting: list[asyncio.Future[Any]] = [self._dialogue.ready, self._dialogue.lost, family.end]
        await asyncio.wait(waiting, timeout=START_PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
        if not self._dialogue.ready.done():
            raise await self._why_not_started()
        self.runtime = str(self._dialogue.ready.result().get("runtime") or self.runtime)[:100]
        self._dialogue.catch_up()
        self._dialogue.renew()
        connection.tell("pace", is_busy=False)

    async def _why_not_started(self) -> ClocheError:
        """Return the error of a session that did not start."""
        end = self._family.end if self._family is not None else None
        if end is not None and not end.done():
            await asyncio.wait([end], timeout=1.0)
        if end is not None and end.done() and isinstance(error := end.exception(), ClocheError):
            return error
        self._dialogue.catch_up()
        said = self._dialogue.kept("stderr").decode("utf-8", "replace").strip()[-400:]
        return StartFailed(f"the {self._program.language.name} session did not start{f': {said}' if said else ''}")

    async def run(self, code: str, *, timeout_s: float, sink: Sink) -> Result:
        """Run one cell; see core.protocols.OpenSession."""
        async with self._turn:
            if not self.is_alive:
                raise InvalidRequest(f"this session has ended{self._why()}; restart it, or open another one")
            return await self._run(code, timeout_s, sink)

    async def _run(self, code: str, timeout_s: float, sink: Sink) -> Result:
        await self._go_on()
        self._request_id += 1
        self._cause, self._is_interrupted, self._is_running = None, False, True
        heard = self._dialogue.begin(sink)
        started = time.monotonic()
        loop = asyncio.get_running_loop()
        timers = [loop.call_later(LONG_S, self._set_pace), loop.call_later(timeout_s, self._on_timeout)]
        try:
            sink(Started())
            answer = await self._dialogue.ask(self._request_id, code)
            try:
                frame = await self._wait_for(answer)
            except asyncio.CancelledError:  # as with a time-out: interrupted, and killed only if it resists
                self._interrupt(KillCause.CANCELLED)
                await finish(self._wait_for(answer))
                self._dialogue.catch_up()
                self._dialogue.renew()
                self._tell("pace", is_busy=False)
                raise
        finally:
            for timer in timers:
                timer.cancel()
            self._is_running = False
        duration = time.monotonic() - started
        if duration > LONG_S:
            self._tell("pace", is_busy=False)
        return await self._result(frame, heard, duration)

    async def _go_on(self) -> None:
        """Go on where this session goes on after a fork."""
        if self._family is not None and self._node.reserve is not None:
            self._stand_at(await finish(self._family.go_on(self._node)))

    def _stand_at(self, node: Node) -> None:
        self._node = node
        node.is_runner = True
        self._sandbox.move_to(node.workspace)

    async def _wait_for(self, answer: asyncio.Future[dict[str, Any]]) -> dict[str, Any] | None:
        """Wait for the answer or for the session's end; None when it has ended without one."""
        if self._family is None:
            return None
        if not answer.done():
            await _any_of(answer, self._family.end, self._dialogue.lost)
        if answer.done():
            return answer.result()
        await self._stop()
        return None

    async def _stop(self) -> None:
        """End the interpreter, and wait until the kernel's word on it is there."""
        family = self._family
        if family is None:
            return
        if self._node.number != ORIGIN:
            if self._cause is None:  # it has ended by itself; the helper says what it knows
                await asyncio.wait([family.end], timeout=LAST_WORDS_S)
            self._node.is_runner = False
            await family.prune()
            return
        if self._cause is not None:
            family.connection.kill(self._cause)
        elif not family.end.done():
            await asyncio.wait([family.end], timeout=1.0)
            family.connection.kill(KillCause.CANCELLED)  # its link is gone, and it lives: nobody can use it
        with contextlib.suppress(Exception):  # the verdict reads how it ended; here it is waited for
            await finish(family.end)

    def _tell(self, tag: str, **body: bool | int) -> None:
        if self._family is not None:
            self._family.connection.tell(tag, **body)

    def _set_pace(self) -> None:
        self._tell("pace", is_busy=True)

    def _on_timeout(self) -> None:
        self._interrupt(KillCause.TIMEOUT)

    def _on_flood(self) -> None:
        """Interrupt who says too much; who does so between two cells is killed."""
        if self._is_running:
            self._interrupt(KillCause.OUTPUT_LIMIT)
        else:
            self._cause = KillCause.OUTPUT_LIMIT
            self._kill()

    def _interrupt(self, cause: KillCause | None) -> None:
        """Interrupt the cell, and kill the session if that does not help."""
        if not self._is_running:
            return
        self._cause = self._cause or cause
        self._tell_interrupt(self._request_id, self._program.interrupt.first)
        asyncio.get_running_loop().call_later(INTERRUPT_PATIENCE_S, self._lose_patience, self._request_id)

    def _tell_interrupt(self, request_id: int, words: tuple[Word, ...]) -> None:
        if not words or not self._is_running or self._request_id != request_id:
            return
        for tag, body in words:
            self._tell(tag, node=self._node.number, **body)
        again = self._program.interrupt.again
        asyncio.get_running_loop().call_later(AGAIN_S, self._tell_interrupt, request_id, again)

    def _lose_patience(self, request_id: int) -> None:
        """Kill what did not let itself be interrupted; its end is then heard like any other."""
        if not self._is_running or self._request_id != request_id:
            return
        self._cause = self._cause or KillCause.CANCELLED
        self._kill()

    def _kill(self) -> None:
        """Kill the interpreter; its end is heard on its link."""
        if self._family is None:
            return
        if self._node.number == ORIGIN:
            self._family.connection.kill(self._cause or KillCause.CANCELLED)
        else:
            self._family.kill(self._node)

    async def interrupt(self) -> None:
        """Interrupt the cell that runs; see core.protocols.OpenSession."""
        if self._is_running:
            self._is_interrupted = True
            self._interrupt(None)

    async def checkpoint(self, name: str) -> None:
        """Remember memory and workspace under `name`; see core.protocols.SupportsFork."""
        async with self._turn:
            family = self._forkable()
            await finish(self._checkpoint(family, name))

    async def _checkpoint(self, family: Family, name: str) -> None:
        await self._go_on()
        node = self._node
        async with self._sandbox.alone(self):
            clone = await family.clone(node, self._new_dialogue)
        node.is_runner, node.is_held = False, True
        replaced = self._checkpoints.pop(name, None)
        self._checkpoints[name] = node
        self._stand_at(clone)
        if replaced is not None and replaced not in self._checkpoints.values():
            replaced.is_held = False
            await family.prune()

    async def rollback(self, name: str) -> None:
        """Go back to a checkpoint, which stays; see core.protocols.SupportsFork."""
        async with self._turn:
            family, node = self._forkable(needs_life=False), self._checkpoints.get(name)
            if node is None:
                have = ", ".join(self._checkpoints) or "none"
                raise InvalidRequest(f"there is no checkpoint {name!r} in this session; there is: {have}")
            if node.dialogue.lost.done():
                raise InvalidRequest(f"the checkpoint {name!r} was lost: its process has ended")
            if family.others_below(node, self._node):
                raise InvalidRequest(
                    f"a fork that was made after the checkpoint {name!r} is still open; close it first"
                )
            await finish(self._go_back(family, node, name))

    async def _go_back(self, family: Family, node: Node, name: str) -> None:
        async with self._sandbox.alone(self):
            for other in [other for other in self._checkpoints if _is_after(self._checkpoints, other, name)]:
                self._checkpoints.pop(other).is_held = False
            self._node.is_runner = False
            await family.prune()
            clone = await family.clone(node, self._new_dialogue)
            self._verdict = None
            self._stand_at(clone)

    async def fork(self, count: int) -> list[LocalSession]:
        """Return sessions that begin as this one is; see core.protocols.SupportsFork."""
        async with self._turn:
            family = self._forkable()
            forking = asyncio.ensure_future(self._fork(family, count))
            try:
                return await finish(forking)
            except asyncio.CancelledError:
                if not forking.cancelled() and forking.exception() is None:
                    for fork in forking.result():  # nobody else knows of them
                        await finish(fork.sandbox.close())
                raise

    async def _fork(self, family: Family, count: int) -> list[LocalSession]:
        await self._go_on()
        async with self._sandbox.alone(self):
            forks = await family.fork(self._node, self._new_dialogue, count)
        return [self._twin(family, fork) for fork in forks]

    def _twin(self, family: Family, node: Node) -> LocalSession:
        """Return the session that goes on in a fork."""
        session = LocalSession.__new__(LocalSession)
        session.__dict__.update(self.__dict__)
        session._sandbox = self._sandbox.twin(session, node.workspace)
        session._checkpoints, session._turn, session._request_id = {}, asyncio.Lock(), 0
        session.is_closed = session._is_running = False
        node.dialogue.on_flood = session._on_flood
        session._stand_at(node)
        session.start = "forked"
        family.members += 1
        return session

    def _forkable(self, *, needs_life: bool = True) -> Family:
        """Return the family. Raises where this session cannot be cloned."""
        if not self._program.is_forkable:
            raise BackendUnavailable(
                f"a {self._program.language.name} session has no checkpoints and no forks; Python's have"
            )
        if self._family is None or not self._sandbox.can_fork:
            raise BackendUnavailable(
                "checkpoints and forks need level jail and a writable /tmp; this sandbox has not both"
            )
        if needs_life and not self.is_alive:
            raise InvalidRequest(f"this session has ended{self._why()}; roll it back, restart it, or open another one")
        return self._family

    async def close(self) -> None:
        """Kill and remove everything, for good."""
        if self.is_closed:
            return
        self.is_closed = True
        if self._family is None:
            self._node.close()
            return
        await finish(self._family.leave([self._node, *self._checkpoints.values()]))

    @property
    def sandbox(self) -> LocalOpenSandbox:
        """Return the sandbox in whose workspace it works; a fork's is its own."""
        return self._sandbox

    def _why(self) -> str:
        """Say how it ended, as far as that is known."""
        ended = self._ended()
        if self._verdict is None and ended:
            self._verdict = self._last_verdict(ended)
        return f" ({self._verdict.status}, exit code {self._verdict.exit_code})" if self._verdict is not None else ""

    async def _result(self, frame: dict[str, Any] | None, heard: Heard, duration: float) -> Result:
        is_kept = frame is not None
        seen = Usage(wall_s=duration)
        if frame is not None:
            self._dialogue.catch_up()
            verdict = self._verdict_of(frame)
        else:
            await self._dialogue.drain(DRAIN_S)
            ended = self._ended()
            verdict = self._verdict = self._last_verdict(ended) if ended else self._verdict_of_node()
            seen = dataclasses.replace(usage(ended), wall_s=duration) if ended else seen
        is_truncated = self._dialogue.is_truncated
        out, err = self._dialogue.kept("stdout"), self._dialogue.kept("stderr")
        self._dialogue.renew()
        if verdict.status is Status.TIMEOUT:
            err += (b"" if not err or err.endswith(b"\n") else b"\n") + TIMEOUT_NOTE.encode()
        found = await self._sandbox.collected()
        value, is_repr = _value(frame or {})
        return Result(
            out.decode("utf-8", "replace"),
            err.decode("utf-8", "replace"),
            verdict.exit_code,
            duration,
            truncated=is_truncated,
            timed_out=verdict.status is Status.TIMEOUT,
            status=verdict.status,
            value=value,
            value_is_repr=is_repr,
            outputs=(*heard.outputs, *_shown(frame or {})),
            files=found.changed if found else (),
            usage=seen,
            enforcement=self._sandbox.enforcement_with(verdict.hits),
            stdout_bytes=out,
            stderr_bytes=err,
            save_files=self._sandbox.saver(found) if found else None,
            meta=self._meta(duration, is_kept=is_kept, is_cut=heard.is_cut, error=(frame or {}).get("error")),
        )

    def _ended(self) -> dict[str, Any]:
        end = self._family.end if self._family is not None else None
        if end is None or not end.done() or end.cancelled() or end.exception() is not None:
            return {}
        return end.result()

    def _verdict_of(self, frame: dict[str, Any]) -> Verdict:
        """Judge a cell that was answered: by what we did to it, then by what it says of itself."""
        code = frame.get("exit_code")
        code = code if type(code) is int and 0 <= code <= 255 else 1
        if self._cause is KillCause.TIMEOUT:
            return Verdict(status=Status.TIMEOUT, exit_code=EXIT_TIMEOUT)
        if self._cause is KillCause.OUTPUT_LIMIT:
            return Verdict(status=Status.OUTPUT_LIMIT, exit_code=INTERRUPTED, hits={"output": 1})
        if self._is_interrupted and code:
            return Verdict(status=Status.SIGNALED, exit_code=INTERRUPTED)
        return Verdict(status=Status.ERROR if code else Status.OK, exit_code=code)

    def _last_verdict(self, ended: dict[str, Any]) -> Verdict:
        """Judge a cell that ended its session."""
        seen = observed(ended)
        return self._as_lost(decide(dataclasses.replace(seen, cause=seen.cause or self._cause)))

    def _verdict_of_node(self) -> Verdict:
        """Judge a cell that ended a clone: pid 1 around it is the guest's, so the code is the guest's word."""
        status = self._dialogue.wait_status
        cause = KillCause.OUT_OF_MEMORY if self._node.is_exceeded else self._cause
        seen = Observed(
            exit_code=os.WEXITSTATUS(status) if status is not None and os.WIFEXITED(status) else None,
            signal=os.WTERMSIG(status) if status is not None and os.WIFSIGNALED(status) else None,
            cause=cause,
            oom_kills=self._node.counters.get("oom_kills", 0),
        )
        return self._as_lost(decide(seen))

    def _as_lost(self, verdict: Verdict) -> Verdict:
        if verdict.status is Status.OK:  # it left on its own, in the middle of a cell
            return Verdict(status=Status.ERROR, exit_code=verdict.exit_code, hits=verdict.hits)
        return verdict

    def _meta(self, duration: float, *, is_kept: bool, is_cut: bool, error: object) -> dict[str, Any]:
        name = self._program.language.name
        meta: dict[str, Any] = {
            "runtime": name,
            "versions": {name: self.runtime},
            "limits": self._limits.as_dict(),
            "duration": duration,
            "backend": "local",
            "level": str(self._sandbox.level),
            "start": self.start,
            "run": self._request_id,
            "state": "kept" if is_kept else "lost",
        }
        if isinstance(error, dict):
            meta["error"] = {key: str(error[key])[:2000] for key in ("name", "message") if key in error}
        if is_cut:
            meta["outputs_cut"] = True
        return meta


def _value(frame: dict[str, Any]) -> tuple[Any, bool]:
    if "value" in frame:
        return frame["value"], False
    text = frame.get("value_repr")
    return (text, True) if isinstance(text, str) else (None, False)


def _shown(frame: dict[str, Any]) -> list[Output]:
    output = read_output(frame)
    return [output] if output is not None else []


def _is_after(checkpoints: Mapping[str, Node], name: str, other: str) -> bool:
    """Tell whether checkpoint `name` was made after `other`, on the way that led on from there."""
    above: Node | None = checkpoints[name].parent
    while above is not None and above is not checkpoints[other]:
        above = above.parent
    return above is not None


async def _any_of(*futures: asyncio.Future[Any]) -> None:
    """Wait until one of them is done; cheaper than `asyncio.wait`, which every cell would pay for."""
    woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def wake(_: object) -> None:
        if not woken.done():
            woken.set_result(None)

    for one in futures:
        one.add_done_callback(wake)
    try:
        await woken
    finally:
        for one in futures:
            one.remove_done_callback(wake)
