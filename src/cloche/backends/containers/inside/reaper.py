"""The first process of a container: it receives files, runs one program, waits for its end, and sends files back.

Its code arrives as text over standard input, in an interpreter of the image, and imports nothing of Cloche. It
exchanges frames: a tag of one byte, a length of four, a body.

Theory of operation: the program is a child with its own pipes, so its output cannot be mistaken for a frame, and it
cannot read or trace this process. When the program ends or must end, all other processes of the namespace are killed in
one call, and only then are files read. When standard input ends, the caller has ended, and this process exits, which
ends the container. For a session it hands its streams over to `live`, once, and the guest is then one of the processes
of `init`.

After it has preforked a guest it does a warm-up run (`warm_up`): a fork shares every page, and the first write to a
page copies it, which takes most of a short run's time in gVisor. The warm-up goes through a run's steps without side
effects: it opens no file for writing, kills no process, and sends frames only to itself.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import tarfile

from .files import (
    TEXT,
    WORKSPACE,
    FileRequestRefused,
    file_states,
    hand_file,
    hand_files,
    list_files,
    prepare_workspace,
    remove_file,
    take_files,
)
from .link import (
    CHUNK,
    DATA,
    DONE,
    FAILED,
    ORDER,
    READY,
    STARTED,
    CallerLink,
    Counters,
    IncomingData,
    OutgoingData,
    write_all,
)
from .program import (
    FOR_EVER,
    GRACE_S,
    NO_ORDER,
    Attempt,
    PreforkedGuest,
    RunReport,
    archive,
    give,
    memory_file,
    set_up,
    write_generated,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, ClassVar


class Loopback(CallerLink):
    """Receive the frames that are sent here."""

    def send(self, tag: bytes, body: bytes = b"") -> None:
        """Buffer a frame until it is received."""
        self.buffer += tag + len(body).to_bytes(4, "big") + body


def warm_up(counters: Counters) -> None:
    """Exercise the steps without side effects: orders, incoming files, a program's output, the report, outgoing
    files.
    """
    loopback = Loopback()
    out: Any = OutgoingData(loopback)
    loopback.send_json(ORDER, **NO_ORDER)
    with tarfile.open(fileobj=out, mode="w|", format=tarfile.GNU_FORMAT, **TEXT) as archive:
        archive.addfile(tarfile.TarInfo("main.py"))
    loopback.send(DATA)
    _, body = loopback.receive()
    order = {**json.loads(body), "commands": [], "memory_bytes": 0, "pids": 0}
    incoming: Any = IncomingData(loopback)
    with tarfile.open(fileobj=incoming, mode="r|", **TEXT) as archive:
        for member in archive:
            archive.extractfile(member)
    incoming.drain()
    report = RunReport(loopback, counters)
    attempt = Attempt(loopback, order, -1, -1, FOR_EVER, counters)
    reading, writing = os.pipe()
    give(order, writing)
    os.close(writing)
    attempt.warm_up(reading)
    report.close(attempt, 0)
    if not os.listdir(WORKSPACE):  # an existing workspace would take time
        hand_files(loopback, file_states(), 0)


class OrderServer:
    """Carry out orders one after the other until input ends: see `ORDERS`."""

    def __init__(self, caller: CallerLink):
        self.caller, self.counters = caller, Counters()
        self.preforked: PreforkedGuest | None = None  # the guest forked ahead of the next run
        self.successor: dict[str, Any] | None = None
        self.wake, waker = os.pipe()
        for fd in (self.wake, waker):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> dict[str, Any]:
        """Handle orders until one says that a sandbox lives from now on, and return that one."""
        while self.successor is None:
            tag, body = self.caller.receive()
            if tag == ORDER:  # other frames are the rest of a failed order
                self.handle(json.loads(body))
        return self.successor

    def handle(self, order: dict[str, Any]) -> None:
        """Carry out one order, or send the reason of its failure."""
        try:
            self.ORDERS[order["do"]](self, order)
        except FileRequestRefused as error:
            self.caller.send_json(FAILED, kind=error.kind, path=error.path, why=error.why)
        except OSError as error:
            path = order.get("path", WORKSPACE)
            self.caller.send_json(FAILED, kind="refused", path=path, why=os.strerror(error.errno or 0))

    def run(self, order: dict[str, Any]) -> None:
        """Do one run, with the preforked guest if there is one and it can be the program."""
        if order["python"] is None or (self.preforked is not None and not self.preforked.is_alive()):
            self._dismiss()
        try:
            self._run(order)
        finally:
            self._dismiss()

    def _run(self, order: dict[str, Any]) -> None:
        """Receive files, run the program, report, and send files back."""
        caller, counters, preforked = self.caller, self.counters, self.preforked
        weight = preforked.weight() if preforked is not None else 0
        self._take_files()
        stdin = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        if order["has_stdin"]:
            os.close(stdin)
            stdin = os.dup(preforked.stdin) if preforked is not None else memory_file()
            take_stdin(IncomingData(caller), stdin)
        before = file_states()
        write_generated(order)
        report = RunReport(caller, counters)
        caller.send(STARTED)
        end = report.started + order["timeout_s"] + GRACE_S
        attempt = Attempt(caller, order, stdin, self.wake, end, counters, weight)
        status = 0
        for index in range(max(1, len(order["commands"]))):
            status = attempt.go(index, preforked)
            attempt.status = None
            if status or attempt.cause:
                break
        report.close(attempt, status)
        os.close(stdin)
        prepare_workspace()
        if order["own_file"]:
            remove_file(order["own_file"])
        hand_files(caller, before, order["disk_bytes"], order["walk_s"])

    def _dismiss(self) -> None:
        """End the preforked guest."""
        preforked, self.preforked = self.preforked, None
        if preforked is not None:
            preforked.discard()

    def expect(self, order: dict[str, Any]) -> None:
        """Prefork a guest and do a warm-up run. There is no answer."""
        try:
            if self.preforked is None:
                self.preforked = PreforkedGuest(order["nofile"], self.counters)
            if not self.caller.has_input():
                warm_up(self.counters)
        except OSError:
            pass  # without room for it, the run forks its own guest

    def live(self, order: dict[str, Any]) -> None:
        """End this server: the host of `init` takes its place."""
        self._dismiss()
        self.successor = order

    def read(self, order: dict[str, Any]) -> None:
        """Send one file."""
        hand_file(self.caller, order["path"], order["max_bytes"])

    def write(self, _order: dict[str, Any]) -> None:
        """Receive files, without a run."""
        self._take_files()
        self.caller.send_json(DONE)

    def _take_files(self) -> None:
        prepare_workspace()
        incoming = IncomingData(self.caller)
        take_files(incoming)
        incoming.drain()

    def list_files(self, _order: dict[str, Any]) -> None:
        """Send the paths of all files."""
        list_files(self.caller)

    def leave(self, _order: dict[str, Any]) -> None:
        """End this process, and with it the container."""
        os._exit(0)

    ORDERS: ClassVar[dict[str, Callable[[OrderServer, dict[str, Any]], None]]] = {
        "run": run,
        "expect": expect,
        "live": live,
        "read": read,
        "write": write,
        "list": list_files,
        "leave": leave,
    }


def take_stdin(incoming: IncomingData, fd: int) -> None:
    """Fill a file in memory with the program's standard input."""
    while data := incoming.read(CHUNK):
        write_all(fd, data)
    os.lseek(fd, 0, os.SEEK_SET)


def main(settings: dict[str, Any]) -> None:
    """Set up, report READY, and serve."""
    failed = set_up(settings)
    gc.collect()
    gc.freeze()
    caller = CallerLink()
    caller.send_json(READY, version=sys.version.split()[0], failed=failed, kernel=os.uname().release)
    order = OrderServer(caller).serve()
    archive.sources |= order["sources"]
    from .live import serve  # sent with the order, as few containers hold a session

    serve(order["live"], failed, bytes(caller.buffer))
