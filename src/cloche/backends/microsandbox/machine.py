"""One machine of microsandbox: its settings (a pure decision), the programs in it, and calls of the package.

Every choice of the caller that the package supports is passed on: memory, processors, sizes of tmpfs folders, rlimits,
environment, labels. The machine has no network, no files of the host, and guests are not root.

All calls of the package are coroutines, and their results belong to the event loop they ran in. One loop in a thread
therefore serves all calls (`OwnLoop`). Methods block and are thread-safe.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import math
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from cloche.core.errors import BackendUnavailable, StartFailed
from cloche.core.limits import MIB, Limits
from cloche.core.policy import Policy
from cloche.core.record import dataclass
from cloche.core.suppressed import suppress_logged

from ..containers.container import ARGUMENTS, OUTPUT
from ..containers.machines import LookedInto
from ..containers.program import ENVIRONMENT, IMAGE_PATH, LOOK, PROGRAMS, REAPER_BYTES, REAPERS, ULIMITS
from ..own_loop import OwnLoop

log = logging.getLogger("cloche.microsandbox")
OWNER_LABEL = "cloche.owner"
GUEST_ID, NOBODY = 1000, 65_534
KERNEL_BYTES = 128 * MIB  # for the kernel and microsandbox's agent
ROOT_BYTES = 16 * MIB  # writable layer of the image's root; guests are not root and cannot write to it
MOST_CPUS = 16
COMMAND = "python3"

NAME = "microsandbox"
INSTALL = 'Install the extra that brings it: "pip install cloche[microsandbox]".'
T = TypeVar("T")

CREATE_S = 300.0  # an image may have to be downloaded
ANSWER_S, STALL_S, END_S, MARGIN_S = 30.0, 60.0, 20.0, 5.0
ERROR = 2
# Run as the guest's user: kills its other processes, and deletes files in temporary folders.
SWEEP = """
import os, shutil
try: os.kill(-1, 9)
except ProcessLookupError: pass
for place in ("/tmp", "/dev/shm"):
    for entry in os.scandir(place):
        if entry.is_dir(follow_symlinks=False): shutil.rmtree(entry.path, ignore_errors=True)
        else:
            try: os.unlink(entry.path)
            except OSError: pass
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrosandboxPlan:
    """Settings of one machine, and the limits of each program in it."""

    image: str
    memory_mib: int
    processors: int
    disk_mib: int
    tmp_mib: int
    data_bytes: int  # RLIMIT_DATA of one process
    pids: int
    user: int
    is_tmp_writable: bool
    labels: Mapping[str, str]

    def creation(self, package: Any) -> dict[str, Any]:
        """Return the arguments of `Sandbox.create`, except the name."""
        sizes = {"/workspace": self.disk_mib, "/tmp": self.tmp_mib, "/dev/shm": self.tmp_mib}
        return {
            "image": package.Image.oci(self.image),
            "memory": self.memory_mib,
            "cpus": self.processors,
            "workdir": "/",
            "hostname": "sandbox",
            "user": "0",  # for the preparation only; programs run as `user`
            "security": package.SecurityProfile.RESTRICTED,
            "network": package.Network.none(),
            "volumes": {
                target: package.Volume.tmpfs(size_mib=size, nosuid=True, nodev=True, noexec=target == "/dev/shm")
                for target, size in sizes.items()
            },
            "labels": dict(self.labels),
            "pull_policy": package.PullPolicy.IF_MISSING,
            "ephemeral": True,
            "detached": False,
        }

    def preparation(self) -> list[str]:
        """Return the arguments of the command that root runs once: it gives the file systems to the guest's user."""
        tmp = "chmod 1777 /tmp /dev/shm" if self.is_tmp_writable else "chmod 0755 /tmp && chmod 1777 /dev/shm"
        return ["-c", f"chown {self.user}:{self.user} /workspace && chmod 0700 /workspace && {tmp}"]

    def execution(self, package: Any) -> dict[str, Any]:
        """Return the options of `exec_stream` for the first process of one run."""
        limits = {**ULIMITS, "nproc": self.pids, "data": self.data_bytes}
        return {
            "cwd": "/",
            "user": str(self.user),
            "env": {"PATH": IMAGE_PATH, **ENVIRONMENT},
            "stdin": package.Stdin.pipe(),
            "tty": False,
            "rlimits": [package.Rlimit(package.RlimitResource(name), limit, limit) for name, limit in limits.items()],
        }


def plan_machine(policy: Policy, limits: Limits, *, image: str, labels: Mapping[str, str]) -> MicrosandboxPlan:
    """Return the plan of one machine. Its memory includes the maximum content of its file systems."""
    everything = limits.memory_bytes + limits.disk_bytes + 2 * limits.tmp_bytes + REAPER_BYTES
    return MicrosandboxPlan(
        image=image,
        memory_mib=math.ceil((everything + KERNEL_BYTES + ROOT_BYTES) / MIB),
        processors=min(MOST_CPUS, max(1, math.ceil(limits.cpus))),
        disk_mib=max(1, limits.disk_bytes // MIB),
        tmp_mib=max(1, limits.tmp_bytes // MIB),
        data_bytes=limits.memory_bytes + REAPER_BYTES,
        pids=limits.pids + REAPERS,
        user=NOBODY if policy.user == "nobody" else GUEST_ID,
        is_tmp_writable="/tmp" in policy.writable_paths,
        labels=labels,
    )


def find_package() -> Any:
    """Return the package. Raises BackendUnavailable with the remedy."""
    try:
        return importlib.import_module(NAME)
    except ImportError as error:
        raise BackendUnavailable(
            f'backend "microsandbox": the package {NAME} cannot be imported ({error}).', remedy=INSTALL
        ) from error


call = OwnLoop("cloche-microsandbox", margin_s=MARGIN_S)


class MicrosandboxMachine:
    """One machine. It ends by `end`, or with its caller."""

    def __init__(self, package: Any, plan: MicrosandboxPlan):
        self.package, self.plan = package, plan
        self.name = f"cloche-{uuid.uuid4().hex[:16]}"
        self.is_lost = False
        self._turn = threading.Lock()
        self._sandbox: Any = None

    def create(self) -> LookedInto:
        """Create the machine and list its image's programs. Raises StartFailed; nothing is left then."""
        try:
            arguments = self.plan.creation(self.package)
            self._sandbox = call(lambda: self.package.Sandbox.create(self.name, **arguments), CREATE_S)
            self._run("/bin/sh", self.plan.preparation(), "0")
            output = self._run("/bin/sh", ["-c", LOOK, "look", *PROGRAMS], str(self.plan.user))
        except (self.package.MicrosandboxError, OSError) as error:
            self.end()
            raise StartFailed(
                f"a machine of microsandbox did not become ready: {_message(error)}", step="boot"
            ) from error
        except BaseException:
            self.end()
            raise
        name = self.plan.image
        return LookedInto.of(
            name, output.decode("utf-8", "replace"), shown=f"image {name!r}", remedy="Name one that has: --image."
        )

    def _run(self, program: str, arguments: Sequence[str], user: str) -> bytes:
        """Run a program to its end and return its standard output. Raises OSError if it fails."""
        sandbox, more = self._sandbox, {"cwd": "/", "user": user, "env": {"PATH": IMAGE_PATH}, "timeout": ANSWER_S}
        output = call(lambda: sandbox.exec(program, list(arguments), **more), 2 * ANSWER_S)
        if output.exit_code != 0:
            raise OSError(f"{program} failed with exit code {output.exit_code}: {output.stderr_text[-600:]}")
        return bytes(output.stdout_bytes)

    def start(self) -> ExecWire:
        """Start a first process. Raises OSError."""
        try:
            sandbox, more = self._sandbox, self.plan.execution(self.package)
            handle = call(lambda: sandbox.exec_stream(COMMAND, list(ARGUMENTS), **more), ANSWER_S)
        except self.package.MicrosandboxError as error:
            raise ConnectionError(_message(error)) from error
        return ExecWire(self.package, handle)

    def sweep(self) -> None:
        """Kill the processes that programs left, and delete their files in /tmp and /dev/shm. Raises OSError."""
        try:
            self._run(COMMAND, ["-I", "-S", "-c", SWEEP], str(self.plan.user))
        except self.package.MicrosandboxError as error:
            raise ConnectionError(_message(error)) from error

    def end(self) -> None:
        """Kill and destroy the machine. Later calls wait for the first."""
        with self._turn:
            sandbox, self._sandbox, self.is_lost = self._sandbox, None, True
            if sandbox is None:
                return
            for end in (sandbox.kill, functools.partial(sandbox.destroy, force=True)):
                with suppress_logged(
                    log, "a machine of microsandbox may be left", self.package.MicrosandboxError, OSError
                ):
                    call(functools.partial(end, timeout=END_S / 2), END_S)


def _message(error: BaseException) -> str:
    return str(error) or type(error).__name__


class ExecWire:
    """Carry the streams of a program in a machine; see containers.container.ContainerWire."""

    def __init__(self, package: Any, handle: Any):
        self._package, self._handle = package, handle
        self._sink = handle.take_stdin()
        self._turn = threading.Lock()
        self._is_shut_down = False

    def send(self, data: bytes) -> None:
        """Send all of `data`. Raises OSError if the machine has ended or reads nothing for `STALL_S`."""
        if self._is_shut_down or self._sink is None:
            raise ConnectionError("the machine was ended")
        try:
            call(lambda: self._sink.write(data), STALL_S)
        except self._package.MicrosandboxError as error:
            raise ConnectionError(_message(error)) from error

    def pieces(self) -> Iterator[tuple[int, bytes]]:
        """Yield the program's output until it ends. Raises OSError."""
        kinds = self._package.ExecEventType
        streams = {kinds.STDOUT: OUTPUT, kinds.STDERR: ERROR}
        while True:
            try:
                event = call(self._handle.recv, None)
            except self._package.MicrosandboxError as error:
                raise ConnectionError(_message(error)) from error
            if event is None or event.event_type in (kinds.EXITED, kinds.FAILED):
                return
            stream = streams.get(event.event_type)
            if stream is not None and event.data:
                yield stream, bytes(event.data)

    def shutdown(self) -> None:
        """Close standard input."""
        with self._turn:
            is_first, self._is_shut_down = not self._is_shut_down, True
        if is_first and self._sink is not None:
            with contextlib.suppress(self._package.MicrosandboxError, OSError):
                call(self._sink.close, ANSWER_S)

    def close(self) -> None:
        """Close standard input and kill the program."""
        self.shutdown()
        with contextlib.suppress(self._package.MicrosandboxError, OSError):
            call(self._handle.kill, ANSWER_S)
