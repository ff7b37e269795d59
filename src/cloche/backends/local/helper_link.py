"""The caller's end of one helper, on an event loop: start or take over a helper, send runs, receive their ends.

Theory of operation: messages about a run arrive on the helper's own link. With a prefork jail, earlier ones arrive on
the handoff socket. `run_report.RunEnd` decides which of them is the end.

A helper that does not report the end of a run in time is given up, see `helper_ends`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import select
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any

from cloche.core.errors import OutcomeUnknown, StartFailed
from cloche.core.loops import is_single_call_loop
from cloche.core.suppressed import suppress_logged
from cloche.forkserver.slot import send_packed
from cloche.jail import messages
from cloche.jail.messages import Building, Run, Spec
from cloche.jail.setup.file_steps import compile_files
from cloche.jail.setup.launch import make_cgroup, start_helper
from cloche.jail.setup.plan import compile_building, compile_resident
from cloche.jail.work_folder import clear_remains

from ..host import with_limit
from . import helper_ends, run_report
from .helper_ends import LEFT_EMPTY, add, collect, wait_for_exit
from .prefork import Start, WarmJail
from .run_report import Conclusion, ReportSource, RunEnd

if TYPE_CHECKING:
    from cloche.forkserver.slot import HandoffSocket, Slot, SlotNetwork

log = logging.getLogger("cloche.jail")
WATCH_S = 0.5  # how often a longer run's helper is looked at
UNREAD_BY_HELPER_S = 0.006  # the same delay for a run whose order goes by the helper, which takes longer
UNREAD_S = 0.003  # delay before the helper's link is read: for a short run, the handoff socket has everything needed
_numbers = itertools.count(1)  # of runs: a helper may learn of one run's end after the next has begun
END = ("ended", "failed", "lost", "")  # tags of the helper's messages that may end a run
OnMessage = Callable[[str, dict[str, Any], list[int]], None]


def _fail(end: asyncio.Future[dict[str, Any]], error: Exception) -> None:
    """End a run by what went wrong as its messages were taken: its folder is gone, say, or no file can be opened.

    That a program has started may be among what could not be taken, so nobody may start it again.
    """
    if isinstance(error, OSError):
        why = OutcomeUnknown(with_limit(f"the run cannot be observed, and may have run: {error}", error.errno))
        why.__cause__, error = error, why
    if not end.done():
        end.set_exception(error)


class HelperConnection:
    """Hold one helper: start it or take over a warm one, send runs, end it. Use from one event loop."""

    _run = RunEnd()  # of the last run that was sent; this one stands for no run
    calls_fd = -1  # of the run's calls of the caller's functions, which only the event loop serves

    def __init__(self, spec: Spec, executable: str, slot: Slot | None = None, claim: int = -1, namespace: int = -1):
        """Take a sandbox's spec, a warm slot if there is one, and the descriptor that holds its outside id, or -1.

        `namespace` is the user namespace that a newly started helper enters, -1 for none.
        """
        self._spec, self._claim = spec, [claim] if claim >= 0 else []
        self._executable = executable
        self._slot, self._namespace = slot, namespace
        self._process: subprocess.Popen[bytes] | None = None
        self._link: socket.socket | None = None
        self._is_lost = False
        self._guest_workspace: list[int] | None = None  # of the guest that has the orders, once received
        self._end: asyncio.Future[dict[str, Any]] | None = None
        self._due_at: float | None = None  # when the run's end should be reported, None for a session without a clock
        self._watching: asyncio.TimerHandle | None = None
        self._questions = 0
        self._is_attended = False
        self._answers: dict[int, asyncio.Future[list[int]]] = {}

    @property
    def is_alive(self) -> bool:
        return self._link is not None

    @property
    def helper_pid(self) -> int:
        """Return the helper's process id, 0 before it is known."""
        return self._process.pid if self._process is not None else self._slot.pid if self._slot is not None else 0

    @property
    def groups(self) -> list[str]:
        """Return the folders of its control group, which the helper removes unless it is killed."""
        cgroup = self._slot.cgroup if self._slot is not None else self._spec.cgroup
        return sorted(set(cgroup["folders"].values())) if cgroup else []

    async def start(self) -> None:
        """Start the helper and tell it what to build. Raises StartFailed."""
        collect()
        slot = self._slot
        if slot is not None:
            self._link = slot.link
            if self._spec.level == "jail":  # otherwise sent with each jail, which has its own folder
                self._checked(lambda: slot.open(self._spec, self._claim))
            return
        cgroup = self._spec.cgroup
        group = {"version": cgroup["version"], "folders": cgroup["folders"]} if cgroup else {}
        try:
            self._process, self._link = start_helper(self._executable, **group, namespace=self._namespace)
        except OSError as error:
            message = with_limit(f"cannot start the helper process: {error}", error.errno)
            raise StartFailed(message, step="helper", errno=error.errno) from error
        self._link.setblocking(False)
        if cgroup is not None:
            self._make_cgroup(cgroup)
        self._send("open", {}, self._spec.as_wire(), self._claim)

    def _make_cgroup(self, cgroup: Mapping[str, Any]) -> None:
        """Make the control group here, while the helper's interpreter starts on another processor."""
        try:
            make_cgroup(cgroup)
        except OSError as error:
            raise StartFailed(f"cannot make the control group: {error}", step="cgroup", errno=error.errno) from error

    def send_run(
        self, run: Run, streams: Sequence[int], *, workspace: int = -1, network: int = -1, is_last: bool = False
    ) -> Building:
        """Send one run with its descriptors (standard input, output, error, and the report's pipe); return its plan.

        `workspace` is the mount left by an earlier run; the helper attaches it and returns another mount of it. Through
        `network`, pid 1 sends the sockets that the egress process serves. After the last run (`is_last`), a helper
        without a slot clears up and ends by itself.
        """
        has_workspace = workspace >= 0
        building = compile_building(self._spec, run, has_workspace=has_workspace)
        if self._slot is not None:
            self._slot.invalidate()
            self._slot.change_handoff(None)
            self._slot.change_network(None)
        body = {"private": run.private, "wants_python": run.python is not None, "is_prefork": False}
        body |= {"has_workspace": has_workspace, "has_network": network >= 0, "generation": 0}
        self._send("prepare", body, building.as_wire(), [fd for fd in (workspace, network) if fd >= 0])
        self._send_order(run, streams, is_last=is_last, again=False)
        return building

    def send_resident(self, run: Run, order: dict[str, Any], wire: int, network: int = -1) -> None:
        """Send the run of a live sandbox, with pid 1's end of the link to its client."""
        building = compile_resident(self._spec, run)
        if self._slot is not None:
            self._slot.invalidate()
            self._slot.change_handoff(None)
        body = {
            "private": run.private,
            "wants_python": True,
            "is_prefork": False,
            "is_resident": True,
            "owners": run.owners,
        }
        body |= {"has_workspace": False, "has_network": network >= 0, "generation": 0}
        self._send("prepare", body, building.as_wire(), [network] if network >= 0 else [])
        self._end, self._run = None, RunEnd(next(_numbers))
        body = {"number": self._run.number, "timeout_s": run.timeout_s, "has_files": False}
        body |= {"is_last": False, "again": False, "rebuilds": False}
        self._send("run", body, order, [wire])

    def prepare(self, jail: WarmJail, slot: Slot, start: Start, *, workspace: int, network: SlotNetwork | None) -> None:
        """Have a jail built now that a start needs. One that keeps a workspace serves the sandbox's own `network`."""
        is_kept = start.kind == "kept"
        self._checked(lambda: jail.prepare_kept(slot, workspace, network) if is_kept else jail.prepare(slot))

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
        """Send a run into a jail that was built ahead or is built now, and that is reused afterwards.

        With `is_awaited`, the program's start is reported at once, otherwise with its end. `shares_workspace` says that
        a live session works in the same files.
        """
        is_kept = start.kind == "kept"
        if slot.handoff is None:
            self._send_order(run, streams, is_last=False, again=True)
        else:
            self._send_to_guest(
                slot,
                slot.handoff,
                run,
                streams,
                rebuilds=not is_kept,
                is_awaited=is_awaited,
                shares_workspace=shares_workspace,
            )
        return jail.building_of_kept(has_workspace=workspace >= 0) if is_kept else jail.building()

    def _send_to_guest(
        self,
        slot: Slot,
        handoff: HandoffSocket,
        run: Run,
        streams: Sequence[int],
        *,
        rebuilds: bool,
        is_awaited: bool,
        shares_workspace: bool,
    ) -> None:
        """Send the orders to the guest; the helper enforces the time-out without a message."""
        self._close_guest_workspace()
        self._guest_workspace = handoff.take_guest() if handoff.has_guest else None
        number, clock, is_counted = next(_numbers), run.timeout_s, slot.cgroup is not None
        self._due_at = monotonic() + clock
        self._end = None
        self._run = RunEnd(number, clock, generation=handoff.generation, is_counted=is_counted)
        steps = compile_files(self._spec, run, is_first=rebuilds) if run.has_files else []
        body = {"order": run.as_order(), "steps": steps, "is_awaited": is_awaited}

        def send() -> None:
            slot.refill_quota(self._spec)
            handoff.order(
                body, streams, number=number, timeout_s=clock, rebuilds=rebuilds,
                is_under_load=run_report.is_under_load(), shares_workspace=shares_workspace,
            )  # fmt: skip

        self._checked(send)

    def _send_order(self, run: Run, streams: Sequence[int], *, is_last: bool, again: bool) -> None:
        self._end, self._run = None, RunEnd(next(_numbers))
        self._due_at = None if run.is_session else monotonic() + run.timeout_s
        # One program in a guest built ahead: no other process reads this run's files, see `Reaper.live`.
        is_single = again and bool(self._spec.folder) and run.has_one_process
        steps = compile_files(self._spec, run, is_first=is_single, is_by_guest=is_single) if run.has_files else []
        files = messages.pack({"steps": steps}) if run.has_files else -1
        body: dict[str, Any] = {"number": self._run.number, "timeout_s": run.timeout_s, "has_files": run.has_files}
        body |= {"is_last": is_last, "again": again, "rebuilds": again}
        if again and self._spec.folder:
            body |= {"folder": self._spec.folder, "is_single": is_single, "is_under_load": run_report.is_under_load()}
        try:
            self._send("run", body, run.as_order(), [*([files] if files >= 0 else []), *streams])
        finally:
            if files >= 0:
                os.close(files)

    async def attend(self, on_message: OnMessage, on_wait: Callable[[float], None] | None = None) -> dict[str, Any]:
        """Wait for the end of the last run that was sent; pass every earlier message to `on_message`.

        `on_wait` is called if the end does not come at once. Its argument is the time in seconds after which the run no
        longer counts as short.

        A caller that was cancelled may wait again, and gets an end that arrived meanwhile. Raises StartFailed if the
        sandbox could not be set up, and OutcomeUnknown if the helper is gone after the code was started.
        """
        loop = asyncio.get_running_loop()
        end = self._end
        if end is not None and end.done() and not end.cancelled():
            return end.result()
        if self._link is None:
            raise self._loss()
        end = self._end = loop.create_future()
        handoff = self._slot.handoff if self._slot is not None else None
        unread_s = UNREAD_S
        if self._slot is not None and is_single_call_loop(loop):
            if handoff is not None:
                self._wait_for_handoff(handoff, end, on_message)
            else:
                self._wait_for_link(self._link, end, on_message)
            unread_s = 0.0
            if end.done():
                return end.result()
        if handoff is not None:
            loop.add_reader(handoff.fileno(), self._read_handoff, handoff, end, on_message)
        link = self._link.fileno()
        delayed_reader = loop.call_later(unread_s, loop.add_reader, link, self._listen, end, on_message)
        if handoff is None:
            delayed_reader.cancel()
            loop.add_reader(link, self._listen, end, on_message)
        self._is_attended = True
        self._watching = loop.call_later(WATCH_S, self._watch, loop, end)
        try:
            if on_wait is not None:
                on_wait(unread_s)
            return await end
        finally:
            self._is_attended = False
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_exception(OSError("the session has ended"))
            self._watching.cancel()
            delayed_reader.cancel()
            if self._link is not None:
                loop.remove_reader(link)
            if handoff is not None and handoff.fileno() >= 0:
                loop.remove_reader(handoff.fileno())

    def _watch(
        self, loop: asyncio.AbstractEventLoop, end: asyncio.Future[dict[str, Any]], *, was_overdue: bool = False
    ) -> None:
        """Give the helper up when the end of the run, or of a killed session, is overdue at two looks.

        This process may have been stopped, too: then the helper goes on with it, and has the time between them.
        """
        if self._link is None or end.done():
            return
        late_s = monotonic() - self._due_at if self._due_at is not None else 0.0
        is_overdue = helper_ends.is_overdue(late_s, self.helper_pid)
        if is_overdue and was_overdue:
            self._run.is_given_up = True
            helper_ends.kill_helper(self.helper_pid, self._link)
            self._lose()
            _fail(end, self._run.loss())
        else:
            again = partial(self._watch, loop, end, was_overdue=is_overdue)
            self._watching = loop.call_later(WATCH_S, again)

    def _wait_for_handoff(
        self, handoff: HandoffSocket, end: asyncio.Future[dict[str, Any]], on_message: OnMessage
    ) -> None:
        """Read the handoff socket without the event loop, which would take longer, while no other descriptor need
        be read.
        """
        until = monotonic() + UNREAD_S
        while not end.done() and handoff.wait(until - monotonic(), self.calls_fd):
            self._read_handoff(handoff, end, on_message)

    def _wait_for_link(self, link: socket.socket, end: asyncio.Future[dict[str, Any]], on_message: OnMessage) -> None:
        """Do the same with the helper's link, where guests take their orders from it."""
        waiting = select.poll()
        waiting.register(link, select.POLLIN)
        if self.calls_fd >= 0:
            waiting.register(self.calls_fd, select.POLLIN)
        until = monotonic() + UNREAD_BY_HELPER_S
        while not end.done() and (left_s := until - monotonic()) > 0 and (events := waiting.poll(left_s * 1000)):
            if any(fd == self.calls_fd for fd, _ in events):
                return
            self._listen(end, on_message)

    def _given_back(self, fds: list[int]) -> list[int]:
        """Return the workspace after a failure: the mount that a guest had attached, otherwise the helper's."""
        slot = self._slot
        if slot is None or slot.handoff is None:
            return fds
        slot.account_failure()
        workspace_fds = self._take_guest_workspace() or fds
        for fd in set(fds) - set(workspace_fds):
            os.close(fd)
        return workspace_fds

    def _read_handoff(self, handoff: HandoffSocket, end: asyncio.Future[dict[str, Any]], on_message: OnMessage) -> None:
        run = self._run
        try:
            while not end.done():
                tag, body = handoff.receive()
                if tag == "ready":
                    if self._guest_workspace is None and body["generation"] == run.generation:
                        self._guest_workspace = handoff.take_guest()
                elif tag in ("started", "ended") and body["number"] == run.number:
                    self._note_start(handoff, on_message)
                    self._conclude("jail", run.take("jail", tag, body), body, end)
        except BlockingIOError:
            return
        except ConnectionResetError:  # the helper is gone, as the end of its link will show
            asyncio.get_running_loop().remove_reader(handoff.fileno())
        except Exception as error:
            _fail(end, error)

    def _conclude(
        self,
        source: ReportSource,
        conclusion: Conclusion | None,
        body: dict[str, Any],
        end: asyncio.Future[dict[str, Any]],
    ) -> None:
        if conclusion is None or end.done():
            return
        if isinstance(conclusion, dict):
            if source == "jail":
                conclusion["wall_s"] = monotonic() - self._run.started_at
            if self._slot is not None:
                self._slot.account(conclusion, is_watched=source == "helper")
            end.set_result(conclusion)
        elif isinstance(conclusion, Exception):
            end.set_exception(conclusion)
        else:
            self.notify("over", number=self._run.number, ended=body)

    def _note_start(self, handoff: HandoffSocket, on_message: OnMessage) -> None:
        """Record the program's start, if it has started, and take over its guest's workspace."""
        run = self._run
        if run.started_at:
            return
        started_at, device = handoff.start_of(run.number)
        if started_at:
            body = {"at": started_at}
            run.take("status", "started", body)
            if self._guest_workspace and os.fstat(self._guest_workspace[0]).st_dev != device:
                raise OutcomeUnknown("the workspace descriptor belongs to another guest; its files are not read")
            on_message("ready", {"seconds": handoff.seconds}, self._take_guest_workspace())
            on_message("started", body, [])

    def _take_guest_workspace(self) -> list[int]:
        """Return the workspace of the guest that has the orders; the caller owns the descriptors."""
        workspace_fds, self._guest_workspace = self._guest_workspace or [], []
        return workspace_fds

    def _close_guest_workspace(self) -> None:
        for fd in self._take_guest_workspace():
            os.close(fd)

    def _listen(self, end: asyncio.Future[dict[str, Any]], on_message: OnMessage) -> None:
        try:
            while self._link is not None and not end.done():
                self._take_message(end, on_message, *messages.receive(self._link.fileno()))
        except BlockingIOError:
            return
        except Exception as error:
            _fail(end, error)

    def _take_message(
        self, end: asyncio.Future[dict[str, Any]], on_message: OnMessage, tag: str, body: dict[str, Any], fds: list[int]
    ) -> None:
        """Handle one message from the helper, after older ones on the handoff socket."""
        run, slot = self._run, self._slot
        handoff = slot.handoff if slot is not None else None
        if tag == "failed" and run.is_of_earlier(body):
            for fd in fds:
                os.close(fd)
            return
        if tag in END and handoff is not None:
            self._read_handoff(handoff, end, on_message)
            self._note_start(handoff, on_message)
        conclusion = run.take("helper", tag, body)
        if tag == "ended":
            self._note_end(body, on_message)
        elif tag == "failed":
            on_message(tag, body, self._given_back(fds))
        elif tag in END:
            self._lose()
        elif tag == "here" and slot is not None:
            slot.take_message(tag, body)
        elif tag == "answer":
            self._take_answer(body, fds)
        else:
            on_message(tag, body, fds)
        self._conclude("helper", conclusion, body, end)

    def _note_end(self, body: dict[str, Any], on_message: OnMessage) -> None:
        """Tell the slot's prefork jail of the end of a run, and take over a workspace that the run did not use."""
        slot, run = self._slot, self._run
        if slot is None or slot.handoff is None:
            return
        slot.take_message("ended", body)
        if body["number"] == run.number and not run.started_at and (fds := self._take_guest_workspace()):
            on_message("ready", {"seconds": slot.handoff.seconds}, fds)

    def _lose(self) -> None:
        asyncio.get_running_loop().remove_reader(self._link.fileno() if self._link else -1)
        self._drop()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(OSError("the helper process is gone"))
        self._is_lost = True

    def kill(self, cause: str) -> None:
        """Ask the helper to kill the run. `attend` still reports the end, which the helper then decides."""
        if self._end is not None and self._end.done() and not self._end.cancelled():
            return
        self._run.was_killed = True
        self._due_at = min(monotonic(), self._due_at or monotonic())
        self.notify("kill", cause=str(cause), number=self._run.number)

    def notify(self, tag: str, **body: str | bool | int | dict[str, Any]) -> None:
        """Send the helper a message without an answer; a helper that is gone is ignored."""
        if self._link is not None:
            with suppress_logged(log, "the helper is gone; its link will report that", OSError):
                messages.send(self._link.fileno(), tag, body)

    async def ask(self, tag: str, payload: Mapping[str, Any] | None = None, **body: Any) -> list[int]:  # noqa: ANN401
        """Send the helper a request while a run is attended; return the descriptors of its answer.

        Raises OSError with the helper's error message.
        """
        if not self._is_attended:
            raise OSError("the session has ended")
        self._questions += 1
        answer: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        self._answers[self._questions] = answer
        numbered = {**body, "id": self._questions}
        if payload is None:
            self.notify(tag, **numbered)
        else:
            self._send(tag, numbered, dict(payload))
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

    def release(self) -> socket.socket:
        """Return the helper's socket to a new owner, whose closing ends the helper; this process stops attending it."""
        link, self._link = self._link, None
        if link is None:
            raise self._loss()
        if self._process is not None:
            helper_ends.release(self._process)
            self._process = None
        if self._slot is not None:
            self._slot.stop_counting()
            self._slot = None
        return link

    def detach(self) -> None:
        """Leave a helper that ends by itself unattended: of the guest, only emptied mounts are left."""
        self._close_guest_workspace()
        self._drop()
        if self._process is not None:
            add(self._process, self._spec)
            self._process = None

    async def close(self) -> None:
        """Let the helper clear up and wait until it is gone; clear up here if it was killed."""
        self._close_guest_workspace()
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
        link, self._link = self._link, None
        loop = asyncio.get_running_loop()
        if link is not None:
            loop.remove_reader(link.fileno())
        if self._end is not None and not self._end.done():
            self._end.set_exception(self._loss())
        if self._slot is not None:
            if self._slot.handoff is not None:
                loop.remove_reader(self._slot.handoff.fileno())
            self._slot.stop_counting()
            self._slot.change_handoff(None)
            self._slot.change_network(None)
        if link is not None:
            with suppress_logged(log, "the helper had closed its link first", OSError):
                link.shutdown(socket.SHUT_WR)
            with suppress_logged(log, "the helper is slow to end", TimeoutError):
                self._is_lost |= await helper_ends.end_slot(link, self.helper_pid)
            link.close()
        if self._is_lost and self._slot is not None and self._slot.spec is not None:
            with suppress_logged(log, LEFT_EMPTY, OSError):
                await asyncio.to_thread(clear_remains, Spec(**self._slot.spec))
                if self._spec.folder:
                    await asyncio.to_thread(clear_remains, self._spec)

    def _loss(self) -> Exception:
        handoff, run = self._slot.handoff if self._slot is not None else None, self._run
        if handoff is not None and not run.started_at and (started_at := handoff.start_of(run.number)[0]):
            run.take("status", "started", {"at": started_at})
        return run.loss()

    def _drop(self) -> None:
        if self._link is not None:
            with suppress_logged(log, "the helper had closed its link first", OSError):
                # close(2) is not enough: a forked child of this process may hold it, too.
                self._link.shutdown(socket.SHUT_WR)
            self._link.close()
            self._link = None

    def _send(self, tag: str, body: dict[str, Any], payload: dict[str, Any], fds: Sequence[int] = ()) -> None:
        self._checked(lambda: send_packed(self._link.fileno() if self._link else -1, tag, body, payload, fds))

    def _checked(self, send: Callable[[], None]) -> None:
        try:
            send()
        except OSError as error:
            self._is_lost = self._slot is not None  # then its control group and folder must be removed here
            message = with_limit(f"cannot reach the helper process: {error}", error.errno)
            raise StartFailed(message, step="helper", errno=error.errno) from error
