"""The caller's end of one helper, on an event loop: start it or take a warm one over, send runs, hear their ends.

Theory of operation: messages of a run come from the helper's own link and, where a prefork jail is used, from the
handoff socket first; `run_report.RunEnd` decides which of them is the end.

When the end of a throwaway sandbox's run is reported, its code is dead and its streams are read. What is left to do,
the helper does alone: it waits for the reaper and removes the control group. Nobody waits for that but the end of this
process; the next start takes note of it (`collect`).
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import logging
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any

from cloche.core.errors import StartFailed
from cloche.core.loops import is_single_call_loop
from cloche.core.suppressed import suppress_logged
from cloche.forkserver.slot import send_packed
from cloche.jail import messages
from cloche.jail.messages import Building, Run, Spec
from cloche.jail.setup.launch import make_cgroup, start_helper
from cloche.jail.setup.plan import compile_building, compile_files
from cloche.jail.work_folder import clear_remains

from . import run_report
from .prefork import Start, WarmJail
from .run_report import Conclusion, RunEnd, Source

if TYPE_CHECKING:
    from cloche.forkserver.slot import Door, Slot

log = logging.getLogger("cloche.local")
CLOSE_PATIENCE_S = 10.0
LEFT_EMPTY = "what is left of a helper stays, which is named after us and empty"
PATIENCE_S, NAP_S = 10.0, 0.002
_helpers: list[tuple[subprocess.Popen[bytes], Spec]] = []
_lock = threading.Lock()

UNHEARD_S = 0.003  # a handoff socket tells all that matters of a short run: a reader more costs more
_numbers = itertools.count(1)  # of runs, for a helper that hears of the end of one when the next has begun
END = ("ended", "failed", "lost", "")  # tags of the helper's that may end a run
OnWord = Callable[[str, dict[str, Any], list[int]], None]


async def until_end(link: socket.socket) -> None:
    """Wait until the other end is closed; messages are dropped."""
    while True:
        try:
            tag, _, fds = messages.receive(link.fileno())
        except BlockingIOError:
            await _until_readable(link.fileno())
            continue
        except OSError:
            return
        for fd in fds:
            os.close(fd)
        if not tag:
            return


async def _until_readable(fd: int) -> None:
    loop = asyncio.get_running_loop()
    readable: asyncio.Future[None] = loop.create_future()
    loop.add_reader(fd, _settle, readable)
    try:
        await readable
    finally:
        loop.remove_reader(fd)


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def wait_for_exit(process: subprocess.Popen[bytes]) -> None:
    """Wait by a pidfd: `Popen.wait` with a time-out polls."""
    fd = os.pidfd_open(process.pid)
    try:
        await asyncio.wait_for(_until_readable(fd), CLOSE_PATIENCE_S)
    except TimeoutError:
        process.kill()
    finally:
        os.close(fd)
    process.wait()


def add(process: subprocess.Popen[bytes], spec: Spec) -> None:
    """Take over a helper that was told to end."""
    with _lock:
        _helpers.append((process, spec))


def collect() -> bool:
    """Take note of those that have ended, and clear up after one that did not end by itself; tell whether all have."""
    with _lock:
        waiting = _helpers[:]
        _helpers.clear()
    still_here = [(process, spec) for process, spec in waiting if process.poll() is None]
    with _lock:
        _helpers.extend(still_here)
    for process, spec in waiting:
        if process.returncode not in (None, 0):
            with suppress_logged(log, LEFT_EMPTY, OSError):
                clear_remains(spec)
    return not still_here


def _see_all_out() -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not collect() and time.monotonic() < deadline:
        time.sleep(NAP_S)


def _forget_after_fork() -> None:
    global _lock
    _lock = threading.Lock()
    _helpers.clear()


os.register_at_fork(after_in_child=_forget_after_fork)
atexit.register(_see_all_out)


class Connection:
    """Hold one helper: start it or take a warm one over, run in it, end it. Use from one event loop."""

    _run = RunEnd()  # of the run that was sent last; this one is of none

    def __init__(self, spec: Spec, executable: str, slot: Slot | None = None, claim: int = -1, namespace: int = -1):
        """Take a sandbox's spec, perhaps a warm slot, and perhaps the descriptor that holds its outside id.

        `namespace` is what a helper of our own enters, -1 for nothing.
        """
        self._spec, self._claim = spec, [claim] if claim >= 0 else []
        self._executable = executable
        self._slot, self._namespace = slot, namespace
        self._process: subprocess.Popen[bytes] | None = None
        self._link: socket.socket | None = None
        self._is_lost = False
        self._lent: list[int] | None = None  # the workspace of the guest for which they are, once that is known
        self._end: asyncio.Future[dict[str, Any]] | None = None
        self._questions = 0
        self._is_attended = False
        self._answers: dict[int, asyncio.Future[list[int]]] = {}

    @property
    def is_alive(self) -> bool:
        return self._link is not None

    @property
    def helper_pid(self) -> int:
        """Return the helper's process, 0 when it is not known yet."""
        return self._process.pid if self._process is not None else self._slot.pid if self._slot is not None else 0

    async def start(self) -> None:
        """Start the helper and tell it what to build. Raises StartFailed."""
        collect()
        slot = self._slot
        if slot is not None:
            self._link = slot.link
            self._checked(lambda: slot.open(self._spec, self._claim))
            return
        cgroup = self._spec.cgroup
        place = {"version": cgroup["version"], "folders": cgroup["folders"]} if cgroup else {}
        try:
            self._process, self._link = start_helper(self._executable, **place, namespace=self._namespace)
        except OSError as error:
            raise StartFailed(f"cannot start the helper process: {error}", step="helper", errno=error.errno) from error
        self._link.setblocking(False)
        if cgroup is not None:
            self._make_cgroup(cgroup)
        self._send("open", {}, self._spec.as_wire(), self._claim)

    def _make_cgroup(self, cgroup: Mapping[str, Any]) -> None:
        """Make the control group here and now, while the helper's interpreter starts on the other processor."""
        try:
            make_cgroup(cgroup)
        except OSError as error:
            raise StartFailed(f"cannot make the control group: {error}", step="cgroup", errno=error.errno) from error

    def send_run(self, run: Run, streams: Sequence[int], *, workspace: int = -1, is_last: bool = False) -> Building:
        """Send one run with its descriptors: standard input, output, error, and the value's pipe; return its plan.

        `workspace` is the mount that an earlier one left, which the sandbox attaches: it comes back as another one.
        After the last one, a helper of our own clears up and ends by itself.
        """
        has_workspace = workspace >= 0
        building = compile_building(self._spec, run, has_workspace=has_workspace)
        if self._slot is not None:
            self._slot.invalidate()
            self._slot.change_door(None)
        body = {"private": run.private, "wants_python": run.python is not None, "is_prefork": False}
        body |= {"has_workspace": has_workspace, "generation": 0}
        self._send("prepare", body, building.as_wire(), [workspace] if has_workspace else [])
        self._send_order(run, streams, is_last=is_last, again=False)
        return building

    def send_warm_run(
        self,
        run: Run,
        streams: Sequence[int],
        jail: WarmJail,
        slot: Slot,
        start: Start,
        *,
        workspace: int,
        is_awaited: bool,
        shares_workspace: bool,
    ) -> Building:
        """Send a run into a jail that was built ahead, or that is built now; another guest follows.

        That the program starts is reported at once when it `is_awaited`, else with its end. It `shares_workspace` with
        a live session where one works in the same files.
        """
        is_kept = start.kind == "kept"
        if start.word != "pooled":
            self._checked(lambda: jail.prepare_kept(slot, workspace) if is_kept else jail.prepare(slot))
        if slot.door is None:
            self._send_order(run, streams, is_last=False, again=True)
        else:
            self._send_to_door(
                slot,
                slot.door,
                run,
                streams,
                rebuilds=not is_kept,
                is_awaited=is_awaited,
                shares_workspace=shares_workspace,
            )
        return jail.building_of_kept(has_workspace=workspace >= 0) if is_kept else jail.building()

    def _send_to_door(
        self,
        slot: Slot,
        door: Door,
        run: Run,
        streams: Sequence[int],
        *,
        rebuilds: bool,
        is_awaited: bool,
        shares_workspace: bool,
    ) -> None:
        """Send the guest its orders; the helper keeps the clock without being told."""
        self._close_lent()
        self._lent = door.take_guest() if door.has_guest else None
        number, clock, is_counted = next(_numbers), run.timeout_s, slot.cgroup is not None
        self._end = None
        self._run = RunEnd(number, clock, generation=door.generation, is_counted=is_counted)
        steps = compile_files(self._spec, run, is_first=rebuilds) if run.has_files else []
        body = {"order": run.as_order(), "steps": steps, "is_awaited": is_awaited}

        def talk() -> None:
            slot.refill_quota(self._spec)
            door.order(
                body, streams, number=number, timeout_s=clock, rebuilds=rebuilds,
                is_under_load=run_report.is_here(), shares_workspace=shares_workspace,
            )  # fmt: skip

        self._checked(talk)

    def _send_order(self, run: Run, streams: Sequence[int], *, is_last: bool, again: bool) -> None:
        self._end, self._run = None, RunEnd(next(_numbers))
        files = messages.pack({"steps": compile_files(self._spec, run)}) if run.has_files else -1
        body = {"number": self._run.number, "timeout_s": run.timeout_s, "has_files": run.has_files}
        body |= {"is_last": is_last, "again": again, "rebuilds": again}
        try:
            self._send("run", body, run.as_order(), [*([files] if files >= 0 else []), *streams])
        finally:
            if files >= 0:
                os.close(files)

    async def attend(self, on_word: OnWord, on_wait: Callable[[float], None] | None = None) -> dict[str, Any]:
        """Wait for the end of the run that was sent; every earlier word goes to `on_word`.

        Where that is not soon, `on_wait` is called first, with the seconds after which the run is no short one.

        Who was cancelled while waiting may wait again, and does not miss the end if it came meanwhile.
        Raises StartFailed when the sandbox could not be set up, OutcomeUnknown when the helper is gone although the
        code had been started.
        """
        loop = asyncio.get_running_loop()
        end = self._end
        if end is not None and end.done() and not end.cancelled():
            return end.result()
        if self._link is None:
            raise self._loss()
        end = self._end = loop.create_future()
        door = self._slot.door if self._slot is not None else None
        unheard_s = UNHEARD_S
        if door is not None and is_single_call_loop(loop):
            self._wait_at(door, end, on_word)
            unheard_s = 0.0
            if end.done():
                return end.result()
        if door is not None:
            loop.add_reader(door.fileno(), self._listen_at, door, end, on_word)
        link = self._link.fileno()
        hearing = loop.call_later(unheard_s, loop.add_reader, link, self._listen, end, on_word)
        if door is None:
            hearing.cancel()
            loop.add_reader(link, self._listen, end, on_word)
        self._is_attended = True
        try:
            if on_wait is not None:
                on_wait(unheard_s)
            return await end
        finally:
            self._is_attended = False
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_exception(OSError("the session has ended"))
            hearing.cancel()
            if self._link is not None:
                loop.remove_reader(link)
            if door is not None and door.fileno() >= 0:
                loop.remove_reader(door.fileno())

    def _wait_at(self, door: Door, end: asyncio.Future[dict[str, Any]], on_word: OnWord) -> None:
        """Read the handoff socket right here for as long as nothing else need be heard: a loop would take longer."""
        until = monotonic() + UNHEARD_S
        while not end.done() and door.wait(until - monotonic()):
            self._listen_at(door, end, on_word)

    def _given_back(self, fds: list[int]) -> list[int]:
        """Return the workspace after a failure: what a guest had attached, if one had, else the helper's."""
        slot = self._slot
        if slot is None or slot.door is None:
            return fds
        slot.account_failure()
        found = self._take_lent() or fds
        for fd in set(fds) - set(found):
            os.close(fd)
        return found

    def _listen_at(self, door: Door, end: asyncio.Future[dict[str, Any]], on_word: OnWord) -> None:
        """Hear what is said at the handoff socket."""
        run = self._run
        try:
            while not end.done():
                tag, body = door.hear()
                if tag == "ready":
                    if self._lent is None and body["generation"] == run.generation:
                        self._lent = door.take_guest()
                elif tag in ("started", "ended") and body["number"] == run.number:
                    self._note_start(door, on_word)
                    self._conclude("jail", run.take("jail", tag, body), body, end)
        except BlockingIOError:
            return
        except ConnectionResetError:  # the helper is gone, and its own end will say so
            asyncio.get_running_loop().remove_reader(door.fileno())
        except Exception as error:
            if not end.done():
                end.set_exception(error)

    def _conclude(
        self,
        source: Source,
        found: Conclusion | None,
        body: dict[str, Any],
        end: asyncio.Future[dict[str, Any]],
    ) -> None:
        """Act upon what a message says of the end."""
        if found is None or end.done():
            return
        if isinstance(found, dict):
            if source == "jail":
                found["wall_s"] = monotonic() - self._run.started_at
            if self._slot is not None:
                self._slot.account(found, is_watched=source == "helper")
            end.set_result(found)
        elif isinstance(found, Exception):
            end.set_exception(found)
        else:
            self.tell("over", number=self._run.number, ended=body)

    def _note_start(self, door: Door, on_word: OnWord) -> None:
        """Take note of the start of the program, if it has started, and take over the workspace of its guest."""
        run = self._run
        if run.started_at:
            return
        at = door.start_of(run.number)
        if at:
            body = {"at": at}
            run.take("status", "started", body)
            on_word("ready", {"seconds": door.seconds}, self._take_lent())
            on_word("started", body, [])

    def _take_lent(self) -> list[int]:
        """Return the workspace of the guest that was given orders, to be owned by who asks."""
        found, self._lent = self._lent or [], []
        return found

    def _close_lent(self) -> None:
        for fd in self._take_lent():
            os.close(fd)

    def _listen(self, end: asyncio.Future[dict[str, Any]], on_word: OnWord) -> None:
        """Hear what there is to hear."""
        try:
            while self._link is not None and not end.done():
                self._hear(end, on_word, *messages.receive(self._link.fileno()))
        except BlockingIOError:
            return
        except Exception as error:
            if not end.done():
                end.set_exception(error)

    def _hear(
        self, end: asyncio.Future[dict[str, Any]], on_word: OnWord, tag: str, body: dict[str, Any], fds: list[int]
    ) -> None:
        """Take one message of the helper's, after what was said at the handoff socket before it."""
        run, slot = self._run, self._slot
        door = slot.door if slot is not None else None
        if tag == "failed" and run.is_of_earlier(body):
            for fd in fds:
                os.close(fd)
            return
        if tag in END and door is not None:
            self._listen_at(door, end, on_word)
            self._note_start(door, on_word)
        found = run.take("helper", tag, body)
        if tag == "ended":
            self._note_end(body, on_word)
        elif tag == "failed":
            on_word(tag, body, self._given_back(fds))
        elif tag in END:
            self._lose()
        elif tag == "here" and slot is not None:
            slot.hear(tag, body)
        elif tag == "answer":
            self._take_answer(body, fds)
        else:
            on_word(tag, body, fds)
        self._conclude("helper", found, body, end)

    def _note_end(self, body: dict[str, Any], on_word: OnWord) -> None:
        """Take note, with a prefork jail, of what the end of a run means for it, and take over an unused workspace."""
        slot, run = self._slot, self._run
        if slot is None or slot.door is None:
            return
        slot.hear("ended", body)
        if body["number"] == run.number and not run.started_at and (fds := self._take_lent()):
            on_word("ready", {"seconds": slot.door.seconds}, fds)

    def _lose(self) -> None:
        """Take note that the helper is gone."""
        asyncio.get_running_loop().remove_reader(self._link.fileno() if self._link else -1)
        self._drop()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(OSError("the helper process is gone"))
        self._is_lost = True

    def kill(self, cause: str) -> None:
        """Ask the helper to kill the run; the end is still reported by `attend`, and is the helper's word then."""
        if self._end is not None and self._end.done() and not self._end.cancelled():
            return
        self._run.was_killed = True
        self.tell("kill", cause=str(cause), number=self._run.number)

    def tell(self, tag: str, **body: str | bool | int | dict[str, Any]) -> None:
        """Tell the helper something that needs no answer; one that is gone need not hear it."""
        if self._link is not None:
            with suppress_logged(log, "the helper is gone, as its link will say", OSError):
                messages.send(self._link.fileno(), tag, body)

    async def ask(self, tag: str, payload: Mapping[str, Any] | None = None, **body: Any) -> list[int]:  # noqa: ANN401
        """Ask the helper something while a run is attended; return the descriptors of its answer.

        Raises OSError with what it says went wrong.
        """
        if not self._is_attended:
            raise OSError("the session has ended")
        self._questions += 1
        answer: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        self._answers[self._questions] = answer
        told = {**body, "id": self._questions}
        if payload is None:
            self.tell(tag, **told)
        else:
            self._send(tag, told, dict(payload))
        return await answer

    def _take_answer(self, body: Mapping[str, Any], fds: list[int]) -> None:
        answer = self._answers.pop(body["id"], None)
        if answer is None or answer.done():
            for fd in fds:
                os.close(fd)
        elif "error" in body:
            answer.set_exception(OSError(body["error"]))
        else:
            answer.set_result(fds)

    def leave(self) -> None:
        """Let a helper that ends by itself do so unattended: nothing of the guest's is left but its emptied places."""
        self._close_lent()
        self._drop()
        if self._process is not None:
            add(self._process, self._spec)
            self._process = None

    async def close(self) -> None:
        """Let the helper clear up, and wait until it is gone; one that was killed is cleared up after."""
        self._close_lent()
        if self._slot is not None:
            await self._close_slot()
            return
        self._drop()
        if self._process is not None:
            await wait_for_exit(self._process)
            if self._process.returncode != 0:
                with suppress_logged(log, LEFT_EMPTY, OSError):
                    await asyncio.to_thread(clear_remains, self._spec)
            self._process = None

    async def _close_slot(self) -> None:
        """Close the link and wait until the helper has closed it too."""
        link, self._link = self._link, None
        loop = asyncio.get_running_loop()
        if link is not None:
            loop.remove_reader(link.fileno())
        if self._end is not None and not self._end.done():
            self._end.set_exception(self._loss())
        if self._slot is not None:
            if self._slot.door is not None:
                loop.remove_reader(self._slot.door.fileno())
            self._slot.stop_counting()
            self._slot.change_door(None)
        if link is not None:
            with suppress_logged(log, "the helper had hung up first", OSError):
                link.shutdown(socket.SHUT_WR)
            with suppress_logged(log, "the helper takes its time to end", TimeoutError):
                await asyncio.wait_for(until_end(link), CLOSE_PATIENCE_S)
            link.close()
        if self._is_lost and self._slot is not None and self._slot.spec is not None:
            with suppress_logged(log, LEFT_EMPTY, OSError):
                await asyncio.to_thread(clear_remains, Spec(**self._slot.spec))

    def _loss(self) -> Exception:
        door, run = self._slot.door if self._slot is not None else None, self._run
        if door is not None and not run.started_at and (at := door.start_of(run.number)):
            run.take("status", "started", {"at": at})
        return run.loss()

    def _drop(self) -> None:
        if self._link is not None:
            with suppress_logged(log, "the helper had hung up first", OSError):
                self._link.shutdown(socket.SHUT_WR)  # a forked child of ours may hold it, too
            self._link.close()
            self._link = None

    def _send(self, tag: str, body: dict[str, Any], payload: dict[str, Any], fds: Sequence[int] = ()) -> None:
        self._checked(lambda: send_packed(self._link.fileno() if self._link else -1, tag, body, payload, fds))

    def _checked(self, talk: Callable[[], None]) -> None:
        try:
            talk()
        except OSError as error:
            self._is_lost = self._slot is not None  # what it made has nobody else to remove it
            raise StartFailed(f"cannot reach the helper process: {error}", step="helper", errno=error.errno) from error
