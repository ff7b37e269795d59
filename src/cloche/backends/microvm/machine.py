"""One virtual machine: how it is started, talked to, and ended; and the places in it that runs get.

Theory of operation: a keeper (`keeper.py`) is started, which starts the monitor as somebody who may do nothing, and
kills it when this process says so or dies. One socket pair leads to the only port of the machine, one pipe holds what
its console says. All else is the guest's side: `guest.py` makes a place for a run, and the first process in there is
the one of every container. A machine serves one sandbox; its runs come one after the other, each in a new place.
"""

from __future__ import annotations

import json
import os
import random
import select
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from cloche.core.errors import BackendUnavailable, StartFailed
from cloche.core.outcome import KillCause, Observed

from ..containers.boot import boot_message
from ..containers.container import Container
from ..containers.frames import OUTPUT, Link
from .image import DISK, INITRD, KERNEL, Image
from .plan import Descriptors, Plan, arguments

PROGRAM = "qemu-system-x86_64"
KVM = Path("/dev/kvm")
PLAIN_DEVICES = (Path("/dev/null"), Path("/dev/zero"), Path("/dev/urandom"))
LEFT = b"L"
# Ids that no user of a host has.
FIRST_ID, IDS = 1_950_000_000, 100_000
BOOT_S: Mapping[str, float] = {"kvm": 20.0, "tcg": 120.0}
LEAVE_S = 30.0
CHUNK_BYTES, CONSOLE = 65_536, 2


def monitor_path() -> str:
    """Return the path of QEMU. Raises BackendUnavailable with the remedy."""
    found = shutil.which(PROGRAM)
    if found is None:
        raise BackendUnavailable(
            f'backend "microvm": {PROGRAM} is not on PATH.',
            remedy='Install it, on Debian and Ubuntu: "apt-get install qemu-system-x86".',
        )
    return found


class SocketWire:
    """Carry a machine's port, and what its console says as another stream."""

    def __init__(self, port: socket.socket, console: int, process: subprocess.Popen[bytes], kill: Callable[[], None]):
        self._port, self._console, self._process, self._kill = port, console, process, kill

    def send(self, data: bytes) -> None:
        """Send all of `data`. Raises OSError when the machine is gone, or takes longer than a boot may."""
        self._port.sendall(data)

    def pieces(self) -> Iterator[tuple[int, bytes]]:
        """Yield what comes out of the port and the console, until both have ended."""
        poll = select.poll()
        for fd in (self._port.fileno(), self._console):
            poll.register(fd, select.POLLIN)
        left = 2
        while left:
            for fd, _ in poll.poll():
                try:
                    data = os.read(fd, CHUNK_BYTES)
                except ConnectionError:
                    data = b""
                if data:
                    yield (CONSOLE if fd == self._console else OUTPUT), data
                else:
                    poll.unregister(fd)
                    left -= 1

    def hang_up(self) -> None:
        """End the conversation."""
        self._port.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Let go of everything: kill the monitor, and wait until it is dead."""
        self._kill()
        self._port.close()
        os.close(self._console)
        self._process.wait()


class Machine:
    """Hold one running virtual machine. All methods but `kill` block, and are for any thread."""

    def __init__(self, plan: Plan, image: Image, monitor: str):
        self.plan, self.image, self._monitor = plan, image, monitor
        self.is_lost = False
        self.link: Link | None = None
        self._place: Place | None = None
        self._lifeline, self._is_killed = -1, False
        self._turn = threading.Lock()
        self._gone = threading.Event()

    def boot(self) -> None:
        """Start it. Raises StartFailed; then nothing is left."""
        with ExitStack() as stack:
            opened = {name: _opened(stack, self.image.folder / name) for name in (KERNEL, INITRD, DISK)}
            ours, theirs = socket.socketpair()
            ours.settimeout(BOOT_S[self.plan.acceleration])  # for a machine to take what it is sent
            stack.callback(theirs.close)
            lifeline = self._make_lifeline()
            stack.callback(os.close, lifeline)
            console, said = os.pipe()
            stack.callback(os.close, said)
            given = Descriptors(
                kernel=opened[KERNEL], initrd=opened[INITRD], disk=opened[DISK], link=theirs.fileno()
            )  # fmt: skip
            order = {"argv": arguments(self._monitor, self.plan, given), **_identity(self.plan)}
            try:
                process = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(Path(__file__).with_name("keeper.py")), json.dumps(order)],
                    stdin=lifeline, stdout=said, stderr=said, cwd="/", env={}, pass_fds=(*opened.values(), given.link),
                )  # fmt: skip
            except OSError as error:
                os.close(console)
                ours.close()
                self.kill()
                raise StartFailed(f"the keeper of a virtual machine cannot be started: {error}") from error
        self.link = Link(SocketWire(ours, console, process, self.kill), self._hear, self._lose)

    def _make_lifeline(self) -> int:
        """Make the pipe that the keeper watches, and return its end. Raises StartFailed once it was killed."""
        with self._turn:
            if self._is_killed:
                raise StartFailed("nobody waits for this virtual machine any more", step="boot")
            lifeline, self._lifeline = os.pipe()
            return lifeline

    def words(self) -> Sequence[str]:
        """Return QEMU's words, with the files that it gets as descriptors."""
        return arguments(self._monitor, self.plan, Descriptors(kernel=3, initrd=4, disk=5, link=6))

    def settle(self, place: Place, preload: Sequence[str]) -> None:
        """Make a place in it for a run. Raises OSError when the machine is gone."""
        self._place = place
        self._send_settings({})
        self._connected().send_raw(boot_message(preload))

    def try_out(self, place: Place) -> None:
        """Let the first process only say that it is there. Raises OSError when the machine is gone."""
        self._place = place
        self._send_settings({"is_trial": True})

    def _send_settings(self, more: Mapping[str, Any]) -> None:
        settings = self.plan.settings(now=time.time(), seed=os.urandom(32))
        text = json.dumps({**settings, **more}).encode()
        self._connected().send_raw(f"{len(text):09d}".encode() + text)

    def kill(self) -> None:
        """Kill it, at once; it is gone a moment later."""
        with self._turn:
            self._is_killed = True
            if self._lifeline >= 0:
                try:
                    os.write(self._lifeline, b"k")  # a forked child of ours may hold the other end, too
                except OSError:
                    pass  # it is dead already
                os.close(self._lifeline)
                self._lifeline = -1

    def wait(self) -> None:
        """Wait a bounded time until it is gone, once it was killed."""
        if self.link is not None:
            self._gone.wait(LEAVE_S)

    def last_words(self) -> str:
        """Return what its console and its monitor said last, for messages."""
        said = self.link.last_words.decode("utf-8", "replace").strip() if self.link is not None else ""
        return f": {said[-600:]}" if said else ""

    def _connected(self) -> Link:
        if self.link is None or self.is_lost:
            raise ConnectionError("the virtual machine is gone")
        return self.link

    def _hear(self, tag: bytes, body: bytes) -> None:
        place = self._place
        if place is None:
            return
        if tag == LEFT:
            found = json.loads(body)
            place.leave(found if isinstance(found, dict) else {})
        else:
            place.hear(tag, body)

    def _lose(self) -> None:
        self.is_lost = True
        self._gone.set()
        if self._place is not None:
            self._place.leave({})


def _opened(stack: ExitStack, path: Path) -> int:
    """Open a file of an image for reading. Raises StartFailed."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise StartFailed(f"{path.name} of the microVM's image cannot be read: {error.strerror}") from error
    stack.callback(os.close, fd)
    return fd


def _identity(plan: Plan) -> dict[str, Any]:
    """Return who the monitor is to be: from root an id that nobody has, with its own devices, else whoever we are."""
    if os.geteuid() != 0:
        return {"user": 0, "devices": {}}
    user = FIRST_ID + random.SystemRandom().randrange(IDS)
    shown = (KVM, *PLAIN_DEVICES) if plan.acceleration == "kvm" else ()
    return {"user": user, "devices": {path.name: path.stat().st_rdev for path in shown}}


class Place(Container[Image]):
    """Hold the place of one run in a machine: what is a container elsewhere."""

    def __init__(self, machine: Machine):
        super().__init__()
        self.machine, self.ground = machine, machine.image
        self._left: Mapping[str, Any] = {}
        self._over = threading.Event()

    def start(self, preload: Sequence[str]) -> None:
        """Boot the machine when it has not been, and make the place. Raises StartFailed; then nothing is left."""
        self._begin(lambda: self.machine.settle(self, preload), BOOT_S[self.machine.plan.acceleration])

    def try_out(self, patience_s: float) -> None:
        """Boot the machine, and see that its first process answers in time. Raises StartFailed."""
        self._begin(lambda: self.machine.try_out(self), patience_s)

    def _begin(self, settle: Callable[[], None], patience_s: float) -> None:
        machine = self.machine
        try:
            if machine.link is None:
                machine.boot()
            self._link = machine.link
            settle()
            self._ready.wait(patience_s)
            if self.is_lost or not self._ready.is_set():
                raise StartFailed(f"the virtual machine did not get ready{machine.last_words()}", step="boot")
            self.start_s = time.time() - self.started_at
        except OSError as error:
            machine.kill()
            machine.wait()
            raise StartFailed(f"the virtual machine is gone: {error}{machine.last_words()}", step="boot") from error
        except BaseException:
            machine.kill()
            machine.wait()
            raise

    def hear(self, tag: bytes, body: bytes) -> None:
        """Take one frame; in the machine's reading thread."""
        self._hear(tag, body)

    def leave(self, left: Mapping[str, Any]) -> None:
        """Learn how its first process ended; in the machine's reading thread."""
        self._left = left
        self._over.set()
        self._lose()

    def empty(self) -> None:
        """End what is left in it, and wait until that is done. Raises StartFailed when it is not."""
        if not self.is_lost:
            try:
                self.order({"do": "leave"})
            except OSError:
                pass  # it is lost, which is seen below
            self._over.wait(LEAVE_S)
        if self.machine.is_lost or not self._over.is_set():
            raise StartFailed(f"the workspace is gone with its machine{self.machine.last_words()}", step="boot")

    def kill(self) -> None:
        """Kill the machine."""
        self.machine.kill()

    def end_by_guest(self) -> Observed | None:
        """Say whether the kernel inside killed the first process for want of memory."""
        count = self._left.get("oom_kills")
        has_run_out = isinstance(count, int) and count > 0
        return Observed(cause=KillCause.OUT_OF_MEMORY) if has_run_out else None

    def see_out(self) -> None:
        """Let the machine go."""
        self.machine.kill()

    def words(self) -> Sequence[str]:
        """Return the words that start such a machine."""
        return self.machine.words()
