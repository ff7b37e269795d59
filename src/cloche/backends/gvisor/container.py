"""One container of gVisor: its start, kill and release; and the client of its shim.

The shim (`jail.container_shim`) holds the namespaces and one workspace as long as our socket is open. If the caller is
killed, the socket closes and nothing is left. A caller that closes the socket only waits, in the background, for the
shim to end.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from cloche.core.errors import StartFailed
from cloche.core.result import KillCause, Observed
from cloche.core.suppressed import suppress_logged
from cloche.egress.client import SandboxNetwork
from cloche.jail import messages
from cloche.jail.cgroups import Cgroup
from cloche.jail.setup.launch import start_shim

from ..containers.container import CHUNK_BYTES, OUTPUT, START_S, ByteReceiver, Container
from ..garbage_collection import Background, clear_groups, group_name
from ..host import Host
from ..toolchain import has_customization, user_site
from .plan import HostView, RunscPlan

if TYPE_CHECKING:
    from ..secrets import ContainerSecrets

OPEN_S, SHIM_S = 30.0, 10.0
KIND = "gvisor"  # of control groups
log = logging.getLogger("cloche.gvisor")
_background = Background("cloche-runsc-end", 2 * SHIM_S)
wait_for_all = _background.wait_for_all
KILLED = {"number": 0, "status": 9, "cause": ""}
OnEnd = Callable[[Mapping[str, Any]], None]

ERROR = 2
ENDED_S = 5.0  # wait for the report of a container's end
STALL_S = 60.0  # without progress in sending to a container
# The prefix of runsc's log lines, and the lines about a fatal error or an unknown option.
_LOGGED = re.compile(r"[DIWEF]\d{4} [\d:.]+ +\d+ [\w.]+:\d+\] ?")
_FATAL = re.compile(r"FATAL ERROR: (.+)|(flag provided but not defined: .+)")
_MOST_REASON = 300


class ShimClient:
    """Start one shim and talk to it. All methods block and are thread-safe."""

    def __init__(self, plan: RunscPlan, host: Host):
        """Start the shim. Raises StartFailed; nothing is left then."""
        self._host = host
        self._numbers = itertools.count(1)
        self._waiting: dict[int, OnEnd] = {}
        self._answers: dict[int, threading.Event] = {0: threading.Event()}
        self._failed: dict[int, str] = {}
        self._folders: dict[int, Mapping[str, str]] = {}
        self._turn = threading.Lock()
        self.is_lost = False
        clear_groups(host, KIND)
        try:
            self._process, self._link = start_shim(sys.executable)
        except OSError as error:
            raise StartFailed(f"cannot start the shim: {error}", step="shim") from error
        self._reader = threading.Thread(target=self._read, name="cloche-runsc", daemon=True)
        self._reader.start()
        try:
            inside = 0 if plan.engine.is_rootless else None
            self._send("open", {"calls": plan.open_calls(), "inside_id": inside})
            self._await(0, "namespaces for gVisor cannot be made")
        except BaseException:
            self.close()
            raise

    def start(
        self, plan: RunscPlan, streams: Sequence[int], on_end: OnEnd, network: SandboxNetwork | None = None
    ) -> int:
        """Start a container with these standard streams and return its number. Raises StartFailed.

        `on_end` is called in another thread.
        """
        number = next(self._numbers)
        cgroup = _cgroup(plan, self._host)
        self._answers[number] = threading.Event()
        self._waiting[number] = on_end
        if cgroup is not None:
            self._folders[number] = cgroup["folders"]
        body = {
            "number": number,
            "calls": plan.start_calls(number),
            "folder": plan.folder(number),
            "argv": plan.argv(number),
            "env": {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"},
            "cgroup": cgroup,
            "watched_bytes": 0 if cgroup else plan.guest_bytes,
            "processors": 0 if cgroup else max(1, round(plan.cpus)),
        }
        if network is not None and plan.rules is not None:
            body["network"] = {"ports": list(plan.rules.served_ports)}
        self._send("start", body, [*streams, *([network.jail_end] if network is not None else [])])
        self._await(number, "gVisor's runsc cannot be started")
        return number

    def kill(self, number: int) -> None:
        """Kill a container and every process in it."""
        with suppress_logged(log, "a container ends with its shim, which takes no order to kill it", StartFailed):
            self._send("kill", {"number": number})

    def close(self) -> None:
        """End the shim and its containers, and wait for that in the background."""
        with suppress_logged(log, "the shim had closed its socket first", OSError):
            self._link.shutdown(socket.SHUT_RDWR)
        _background.begin(self._wait_for_end)

    def _send(self, tag: str, body: dict[str, Any], fds: Sequence[int] = ()) -> None:
        try:
            with self._turn:
                if not _can_take(self._link):  # `messages.send` may block for ever, and holds the GIL
                    raise TimeoutError(f"it takes no order within {SHIM_S:g} s")
                messages.send(self._link.fileno(), tag, body, fds)
        except OSError as error:
            raise StartFailed(f"the shim does not answer: {error}", step="shim") from error

    def _await(self, number: int, failure: str) -> None:
        has_answered = self._answers[number].wait(OPEN_S)
        del self._answers[number]
        if not has_answered:
            raise StartFailed(f"{failure}: no answer within {OPEN_S:g} s", step="runsc")
        why = self._failed.get(number) or ("the shim is gone" if self.is_lost else "")
        if why:
            raise StartFailed(f"{failure}: {why}", step="runsc")

    def _read(self) -> None:
        """Receive the shim's messages until its socket closes."""
        with suppress_logged(log, "nothing more comes from the shim", OSError):
            poll = select.poll()
            poll.register(self._link.fileno(), select.POLLIN)
            while poll.poll():  # poll releases the GIL; `messages.receive` does not
                tag, body, _ = messages.receive(self._link.fileno())
                if not tag:
                    break
                self._receive(tag, body)
        self.is_lost = True
        for number in list(self._waiting):
            self._waiting.pop(number)({**KILLED, "number": number})
        for answered in list(self._answers.values()):
            answered.set()

    def _receive(self, tag: str, body: Mapping[str, Any]) -> None:
        number = body["number"]
        if tag == "failed":
            self._failed[number] = str(body["why"])
        if tag in ("failed", "ended") and number in self._waiting:
            self._waiting.pop(number)(body)
        if tag == "ended":
            self._folders.pop(number, None)
        answered = self._answers.get(number)
        if answered is not None:
            answered.set()

    def _wait_for_end(self) -> None:
        try:
            try:
                self._process.wait(SHIM_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(SHIM_S)
            self._reader.join(SHIM_S)
            if self._reader.is_alive():
                log.warning("a shim's messages are still being read, so its link stays open")
            else:  # if closed earlier, the reader could read from a reused descriptor
                with self._turn:
                    self._link.close()
            if self._process.returncode != 0:  # a shim that was killed removed no control group; its processes are dead
                for folders in self._folders.values():
                    Cgroup(self._host.cgroup_version, folders).remove()
        except subprocess.TimeoutExpired:
            log.warning("the shim %d of a gVisor container was killed, and has not ended", self._process.pid)


def _cgroup(plan: RunscPlan, host: Host) -> dict[str, Any] | None:
    if not host.cgroup_version:
        return None
    name = group_name(KIND)
    folders = {controller: f"{folder}/{name}" for controller, folder in host.cgroup_folders.items()}
    return {"version": host.cgroup_version, "folders": folders, "amounts": plan.amounts()}


def _can_take(link: socket.socket) -> bool:
    poll = select.poll()
    poll.register(link.fileno(), select.POLLOUT)
    return bool(poll.poll(SHIM_S * 1000))


def reason_in(errors: str) -> str:
    """Return the line of runsc's standard error that says why it ended, without the log prefix."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    fatal = [match[1] or match[2] for line in lines if (match := _FATAL.search(line))]
    plain = [line for line in lines if not _LOGGED.match(line)]
    chosen = (fatal or plain or [_LOGGED.sub("", line) for line in lines])[-1:]
    return "".join(chosen)[:_MOST_REASON]


class PipeWire:
    """The pipes to a container's standard streams; see containers.container.ContainerWire."""

    def __init__(self, stall_s: float = STALL_S) -> None:
        """Open the pipes. Raises OSError if the process has no free descriptors; none is left open then."""
        self.stall_s = stall_s
        with ExitStack() as on_failure:
            (theirs_in, self._in), (self._out, theirs_out), (self._err, theirs_err) = (
                _pipe(on_failure) for _ in range(3)
            )
            on_failure.pop_all()
        os.set_blocking(self._in, False)
        self.theirs = (theirs_in, theirs_out, theirs_err)
        self._turn = threading.Lock()

    def send(self, data: bytes) -> None:
        """Send bytes. Raises OSError if the container has ended, TimeoutError if it reads nothing for `stall_s`."""
        view, poll = memoryview(data), select.poll()
        with self._turn:
            if self._in < 0:
                raise ConnectionError("the container was released")
            poll.register(self._in, select.POLLOUT)
            while view:
                if not poll.poll(self.stall_s * 1000):
                    raise TimeoutError(f"it did not read its input for {self.stall_s:g} s")
                with contextlib.suppress(BlockingIOError):
                    view = view[os.write(self._in, view) :]

    def pieces(self) -> Iterator[tuple[int, bytes]]:
        """Yield the container's output."""
        poll, streams = select.poll(), {self._out: OUTPUT, self._err: ERROR}
        for fd in streams:
            poll.register(fd, select.POLLIN)
        while streams:
            for fd, _ in poll.poll():
                data = os.read(fd, CHUNK_BYTES)
                if data:
                    yield streams[fd], data
                else:
                    poll.unregister(fd)
                    del streams[fd]

    def close_theirs(self) -> None:
        """Close our copies of the container's ends."""
        for fd in self.theirs:
            os.close(fd)

    def shutdown(self) -> None:
        """Close the container's standard input."""
        with self._turn:
            if self._in >= 0:
                os.close(self._in)
                self._in = -1

    def close(self) -> None:
        """Close all pipes."""
        self.shutdown()
        os.close(self._out)
        os.close(self._err)


def _pipe(on_failure: ExitStack) -> tuple[int, int]:
    ends = os.pipe()
    for fd in ends:
        on_failure.callback(os.close, fd)
    return ends


class RunscContainer(Container[HostView]):
    """One container below a shim. The shim may also hold the previous container."""

    step = "runsc"

    def __init__(
        self, shim: ShimClient, plan: RunscPlan, patience_s: float = START_S, secrets: ContainerSecrets | None = None
    ):
        super().__init__(secrets)
        self._patience_s = patience_s
        self.shim, self.plan, self.rootfs = shim, plan, plan.shown
        self.number = 0
        self._end: Mapping[str, Any] = {}
        self._has_ended = threading.Event()

    @property
    def label(self) -> str:
        """Return the name for messages."""
        return "container of gVisor"

    @property
    def ready_s(self) -> float:
        """Return the maximum seconds until its first process is ready."""
        return self._patience_s

    def sites(self) -> dict[str, Any]:
        """Return the packages of this host's interpreter, which the container shows."""
        return {"extra_paths": user_site(), "customizes": has_customization()}

    def _open(self, make_boot: Callable[[], bytes], receiver: ByteReceiver | None) -> None:
        try:
            wire = PipeWire(min(self._patience_s, STALL_S))
        except OSError as error:
            raise StartFailed(f"there are no pipes for a container of gVisor: {error}", step=self.step) from error
        try:
            if self.plan.rules is not None:
                self.network = self._new_network(self.plan.rules)
            self.number = self.shim.start(self.plan, wire.theirs, self._note_end, self.network)
        except BaseException:
            wire.close()
            raise
        finally:
            wire.close_theirs()
        self._connect(wire, receiver).send_raw(make_boot())

    def _await_ready(self) -> None:
        super()._await_ready()
        if self._ready_message.get("kernel") == os.uname().release:
            raise StartFailed("the program runsc is not gVisor: a container saw this host's kernel", step=self.step)

    def _abandon(self) -> None:
        self._close_network()
        if self.number:
            self.end()

    def _reason_in(self, errors: str) -> str:
        log.debug(
            "runsc wrote %d characters", len(errors)
        )  # the text contains the guest's arguments, so only its length is logged
        return reason_in(errors)

    def end(self) -> None:
        """End this container. The shim and its workspace stay."""
        self._close_network()
        self.shim.kill(self.number)
        self.shutdown()

    def kill(self) -> None:
        """Kill the container."""
        self.shim.kill(self.number)

    def release(self) -> None:
        """Remove the container and its shim."""
        self._close_network()
        self.shim.close()
        self.shutdown()

    def argv(self) -> Sequence[str]:
        """Return the arguments that started it."""
        return self.plan.argv(self.number)

    def end_by_guest(self) -> Observed | None:
        """Return the cause of its end if the guest caused it: memory, processes, or a signal sent to our first
        process.
        """
        if not self._has_ended.wait(ENDED_S):
            return None
        end = self._end
        if end.get("cause") == "out_of_memory" or end.get("oom_kills"):
            return Observed(cause=KillCause.OUT_OF_MEMORY)
        if end.get("pids_hits"):
            return Observed(signal=signal.SIGKILL, pids_hits=int(end["pids_hits"]))
        status = int(end.get("status", 0))
        is_killed_inside = os.WIFEXITED(status) and os.WEXITSTATUS(status) == 128 + signal.SIGKILL
        return Observed(signal=signal.SIGKILL) if is_killed_inside else None

    def _note_end(self, end: Mapping[str, Any]) -> None:
        self._end = end
        self._has_ended.set()
