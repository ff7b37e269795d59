"""Firecracker as the monitor: its API calls (a pure decision), its sockets, and the start of a machine.

Theory of operation: the jailer makes a root with the image's files (read-only), the monitor itself, and one writable
tmpfs folder (`cell.py`). It sends the caller a descriptor of that folder; the caller uses it to connect to the sockets
inside. No path of the host leads to them, so nothing must be removed later. The machine is configured and started over
the API socket. When its pid 1 is up, it connects to the host over the vsock; then the host connects to the ports of all
containers. From then on a machine is used as under QEMU.
"""

from __future__ import annotations

import array
import http.client
import json
import math
import os
import select
import shutil
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from cloche.core.errors import BackendUnavailable, StartFailed
from cloche.core.limits import MIB
from cloche.core.record import dataclass, field

from .plan import (
    CONTAINERS,
    DISK,
    INITRD,
    KERNEL,
    KERNEL_ARGUMENTS,
    ControlPipe,
    Launched,
    MachineImage,
    MachinePlan,
    identity,
    start_jailer,
)

LOOK_S = 0.005
CHUNK_BYTES, OUTPUT_KEPT_BYTES, LINE_BYTES = 65_536, 4096, 64
DONE = 204

PROGRAM, VARIABLE = "firecracker", "CLOCHE_FIRECRACKER"
INSTALL = "Install Firecracker 1.8 or later and put it on PATH, or name the file in CLOCHE_FIRECRACKER."
BOOT_S = 20.0
# Inside the monitor's own root.
RUN, FILES = "/run", "/image"
API_SOCKET, VSOCK_SOCKET = "api", "vsock"
OWN_PORT, GUEST_CID = 1, 3
EVEN_FROM = 2
FOUND_BY_LINKER = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache")  # for a dynamically linked program
# A guest shuts down by a reset of Firecracker's i8042 keyboard controller; there is no PCI bus.
OWN_ARGUMENTS = ("reboot=k", "pci=off", "i8042.noaux", "i8042.nomux", "i8042.dumbkbd")
_ELF, _PROGRAM_HEADERS_AT, _INTERPRETER = b"\x7fELF", 32, 3


@dataclass(slots=True, kw_only=True)
class Deadline:
    """Time limit for the start of a machine. While waiting, the console's output is read."""

    console: int
    s: float
    console_output: bytes = b""
    is_over: bool = False
    _until: float = field(init=False)

    def __post_init__(self) -> None:
        self._until = time.monotonic() + self.s

    def left_s(self) -> float:
        """Return the remaining seconds. Raises TimeoutError if none remain."""
        left_s = self._until - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(f"not ready within {self.s:g} s")
        return left_s

    def wait(self, fd: int | None = None, most_s: float | None = None) -> bool:
        """Wait until `fd` is readable, for at most `most_s`; return whether it is.

        Raises OSError if the machine has ended.
        """
        poll = select.poll()
        for watched_fd in (self.console, fd):
            if watched_fd is not None:
                poll.register(watched_fd, select.POLLIN)
        until = time.monotonic() + (self.left_s() if most_s is None else min(most_s, self.left_s()))
        while (left_s := until - time.monotonic()) > 0:
            ready = {ready_fd for ready_fd, _ in poll.poll(left_s * 1000)}
            if self.console in ready:
                self._listen()
            if fd in ready:
                return True
        return False

    def _listen(self) -> None:
        data = os.read(self.console, CHUNK_BYTES)
        self.console_output = (self.console_output + data)[-OUTPUT_KEPT_BYTES:]
        if not data:
            self.is_over = True
            raise ConnectionError("it has ended")

    def output(self) -> str:
        """Return the end of the console's output, for messages."""
        while not self.is_over and select.select([self.console], [], [], 0)[0]:
            try:
                self._listen()
            except ConnectionError:
                break
        text = self.console_output.decode("utf-8", "replace").strip()
        return f": {text[-600:]}" if text else ""


def received_folder(hand: socket.socket, deadline: Deadline) -> int:
    """Return the folder descriptor that the jailer sends. Raises OSError if the root could not be made."""
    hand.settimeout(deadline.left_s())
    _, ancillary, _, _ = hand.recvmsg(1, socket.CMSG_SPACE(4))
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds = array.array("i")
            fds.frombytes(data[:4])
            os.set_inheritable(fds[0], False)
            return fds[0]
    raise ConnectionError("no root could be made for it")


def _path(folder: int, name: str) -> str:
    return f"/proc/self/fd/{folder}/{name}"


def listening(folder: int, name: str) -> socket.socket:
    """Return a socket that listens for one connection of the monitor. Raises OSError."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(_path(folder, name))
        os.chmod(_path(folder, name), 0o666)  # noqa: S103 - only the monitor can enter the folder
        listener.listen(1)
    except BaseException:
        listener.close()
        raise
    return listener


def joined(folder: int, name: str, deadline: Deadline) -> socket.socket:
    """Return a connection to a socket of the monitor, as soon as the socket exists. Raises OSError."""
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.settimeout(deadline.left_s())
            connection.connect(_path(folder, name))
            return connection
        except (FileNotFoundError, ConnectionRefusedError):
            connection.close()
            deadline.wait(most_s=LOOK_S)
        except BaseException:
            connection.close()
            raise


def put(api: socket.socket, path: str, body: Mapping[str, Any], deadline: Deadline) -> None:
    """Make one API call. Raises StartFailed with the monitor's message if it refuses, OSError if it has ended."""
    api.settimeout(deadline.left_s())
    text = json.dumps(body)
    head = (f"PUT {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", f"Content-Length: {len(text)}")
    api.sendall("\r\n".join((*head, "", text)).encode())
    try:
        with http.client.HTTPResponse(api, method="PUT") as answer:
            answer.begin()
            content = answer.read(LINE_BYTES * 64)
    except http.client.HTTPException as error:
        raise ConnectionError(f"no answer to PUT {path} ({type(error).__name__})") from error
    if answer.status != DONE:
        raise StartFailed(
            f"Firecracker refuses PUT {path} ({answer.status}): {_fault(content)}{deadline.output()}", step="boot"
        )


def _fault(body: bytes) -> str:
    try:
        return str(json.loads(body)["fault_message"])
    except (ValueError, KeyError, TypeError):
        return body.decode("utf-8", "replace")


def accepted(listener: socket.socket, folder: int, name: str, deadline: Deadline) -> socket.socket:
    """Accept the one expected connection, and remove the socket. Raises OSError."""
    if not deadline.wait(listener.fileno()):
        deadline.left_s()
    connection, _ = listener.accept()
    os.unlink(_path(folder, name))
    connection.settimeout(deadline.s)
    return connection


def called_port(folder: int, name: str, port: int, deadline: Deadline) -> socket.socket:
    """Connect to a port in the machine. Raises OSError if no process listens there."""
    connection = joined(folder, name, deadline)
    try:
        connection.sendall(f"CONNECT {port}\n".encode())
        line = b""
        while not line.endswith(b"\n"):  # byte by byte: data after the line belongs to the machine
            data = connection.recv(1)
            if not data or len(line) > LINE_BYTES:
                raise ConnectionError(f"nobody listens at port {port} of the machine")
            line += data
        if not line.startswith(b"OK "):
            raise ConnectionError(f"port {port} of the machine answers {line!r}")
        connection.settimeout(deadline.s)
    except BaseException:
        connection.close()
        raise
    return connection


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiCall:
    """One call of the API; the method is always PUT."""

    path: str
    body: Mapping[str, Any]


def kernel_arguments() -> str:
    """Return the kernel's command line."""
    return " ".join(
        (*(argument for argument in KERNEL_ARGUMENTS if not argument.startswith("reboot=")), *OWN_ARGUMENTS)
    )


def processors(plan: MachinePlan) -> int:
    """Return the machine's number of processors. Firecracker accepts 1 or an even number."""
    count = plan.processors
    return count if count < EVEN_FROM else count + count % 2


def calls(plan: MachinePlan) -> Sequence[ApiCall]:
    """Return the calls that configure and start a machine: no network device, a read-only disk."""
    return (
        ApiCall(
            path="/machine-config",
            body={"vcpu_count": processors(plan), "mem_size_mib": math.ceil(plan.machine_bytes / MIB), "smt": False},
        ),
        ApiCall(
            path="/boot-source",
            body={
                "kernel_image_path": f"{FILES}/{KERNEL}",
                "initrd_path": f"{FILES}/{INITRD}",
                "boot_args": kernel_arguments(),
            },
        ),
        ApiCall(
            path="/drives/root",
            body={
                "drive_id": "root",
                "path_on_host": f"{FILES}/{DISK}",
                "is_root_device": False,  # the initramfs mounts it
                "is_read_only": True,
                "cache_type": "Unsafe",
                "io_engine": "Sync",
            },
        ),
        ApiCall(path="/vsock", body={"guest_cid": GUEST_CID, "uds_path": f"{RUN}/{VSOCK_SOCKET}"}),
        ApiCall(path="/actions", body={"action_type": "InstanceStart"}),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Firecracker:
    """Run machines under Firecracker. `program` is its path; `pace` is how many times slower than on KVM they run."""

    program: str
    pace: float = field(default=1.0)
    engine: str = "firecracker"

    def boot_s(self, plan: MachinePlan) -> float:  # noqa: ARG002 - it runs on KVM only
        """Return the maximum seconds until a machine is ready."""
        return BOOT_S * self.pace

    def slowness(self, plan: MachinePlan) -> float:  # noqa: ARG002
        """Return the factor for the time-outs of programs inside."""
        return self.pace

    def argv(self, plan: MachinePlan) -> Sequence[str]:  # noqa: ARG002
        """Return the arguments that start it."""
        return (f"/{PROGRAM}", "--api-sock", f"{RUN}/{API_SOCKET}", "--id", "cloche")

    def order(self, plan: MachinePlan, image: MachineImage, hand: int) -> dict[str, Any]:
        """Return the jailer's order: the monitor's user, and the contents of its root."""
        files = {f"{FILES}/{name}": str(image.folder / name) for name in (KERNEL, INITRD, DISK)}
        return {
            "argv": list(self.argv(plan)),
            **identity(has_kvm=False),
            "cell": {
                "hand": hand,
                "run": RUN,
                "files": {**files, f"/{PROGRAM}": self.program},
                "folders": [] if _is_whole(self.program) else list(FOUND_BY_LINKER),
                "devices": ["/dev/kvm", "/dev/null", "/dev/zero", "/dev/urandom"],
            },
        }

    def launch(self, plan: MachinePlan, image: MachineImage, control: ControlPipe, timeout_s: float) -> Launched:
        """Start a machine and wait until it has booted. Raises StartFailed."""
        with ExitStack() as always, ExitStack() as on_failure:
            hand, theirs = socket.socketpair()
            always.callback(hand.close)
            console, console_writer = os.pipe()
            on_failure.callback(os.close, console)
            try:
                process = start_jailer(
                    self.order(plan, image, theirs.fileno()), control, console_writer, (theirs.fileno(),)
                )
            finally:
                theirs.close()
                os.close(console_writer)
            on_failure.callback(process.wait)
            on_failure.callback(control.kill)
            deadline = Deadline(console=console, s=timeout_s)
            try:
                streams = _streams(hand, plan, deadline, always, on_failure)
            except (OSError, ValueError) as error:
                raise StartFailed(f"Firecracker does not answer: {error}{deadline.output()}", step="boot") from error
            on_failure.pop_all()
        own, *ports = streams
        return Launched(own=own, ports=ports, console=console, process=process)


def _streams(
    hand: socket.socket, plan: MachinePlan, deadline: Deadline, always: ExitStack, on_failure: ExitStack
) -> list[socket.socket]:
    """Configure a machine at a monitor that has just started, and return the connections to its ports."""
    folder = received_folder(hand, deadline)
    always.callback(os.close, folder)
    listener = listening(folder, f"{VSOCK_SOCKET}_{OWN_PORT}")
    always.callback(listener.close)
    with joined(folder, API_SOCKET, deadline) as api:
        for call in calls(plan):
            put(api, call.path, call.body, deadline)
    streams = [accepted(listener, folder, f"{VSOCK_SOCKET}_{OWN_PORT}", deadline)]
    on_failure.callback(streams[0].close)
    for port in range(OWN_PORT + 1, OWN_PORT + 1 + CONTAINERS):
        streams.append(called_port(folder, VSOCK_SOCKET, port, deadline))
        on_failure.callback(streams[-1].close)
    return streams


def find_firecracker() -> Firecracker:
    """Return Firecracker: the file in CLOCHE_FIRECRACKER, else the one on PATH. Raises BackendUnavailable."""
    named = os.environ.get(VARIABLE)
    path = shutil.which(named or PROGRAM)
    if path is None:
        where = f"{named} ({VARIABLE}) is no program" if named else f"{PROGRAM} is not on PATH"
        raise BackendUnavailable(f'backend "firecracker": {where}.', remedy=INSTALL)
    return Firecracker(program=str(Path(path).resolve()))


def _is_whole(program: str) -> bool:
    """Return whether a program is a static ELF file (no PT_INTERP segment), as Firecracker's releases are."""
    with open(program, "rb") as file:
        head = file.read(4096)
    if not head.startswith(_ELF):
        return False
    start = int.from_bytes(head[_PROGRAM_HEADERS_AT : _PROGRAM_HEADERS_AT + 8], "little")
    size, count = (int.from_bytes(head[offset : offset + 2], "little") for offset in (54, 56))
    kinds = (int.from_bytes(head[offset : offset + 4], "little") for offset in range(start, start + size * count, size))
    return _INTERPRETER not in kinds
