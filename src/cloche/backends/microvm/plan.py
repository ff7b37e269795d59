"""Settings of a virtual machine (a pure decision): size, limits, image; and the interface of a monitor.

The disk, the kernel's arguments and the settings of pid 1 are the same for each monitor. `qemu.py` and `firecracker.py`
translate them. An image is a folder with a kernel, an initial file system and a root disk. A monitor runs behind the
jailer (`start_jailer`) and provides the machine's streams.
"""

from __future__ import annotations

import json
import math
import os
import random
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, Protocol

from cloche.core.errors import BackendUnavailable, StartFailed
from cloche.core.languages import Engine, Language
from cloche.core.limits import MIB, Limits
from cloche.core.policy import Policy
from cloche.core.record import dataclass
from cloche.jail.setup.seccomp import first_process_filter

from ..containers.program import REAPER_BYTES, REAPERS, ULIMITS, engine_of
from ..host import KVM

Acceleration = Literal["kvm", "tcg"]

GUEST_ID, NOBODY = 1000, 65_534
KERNEL_BYTES = 160 * MIB  # for the kernel, pid 1 and the page cache of the root disk
MEMORY_PER_DESCRIPTION = 64  # the kernel uses one byte per 64 bytes of memory to describe its pages (struct page)
MOST_CPUS = 16
MOST_SESSIONS = 6  # at once
# Containers of sessions, one of a run, and one that is ending while its successor is made.
CONTAINERS = MOST_SESSIONS + 2
# This many containers can use their full memory limit at once: a run's and two sessions'. More share it.
FULL_CONTAINERS = 3
TRANSLATED_MIB = 128  # QEMU's cache of translated code (tb-size)
# `panic=-1` and `reboot=t` end the machine at once, because the monitor exits on a restart (`-no-reboot`).
KERNEL_ARGUMENTS = (
    "console=ttyS0", "quiet", "loglevel=3", "reboot=t", "panic=-1", "random.trust_cpu=on", "cryptomgr.notests",
    "no_timer_check", "8250.nr_uarts=1", "rcupdate.rcu_expedited=1",
)  # fmt: skip
# An emulated processor does not execute speculatively, so mitigations are useless; each page table level costs time.
EMULATED_ARGUMENTS = ("mitigations=off", "no5lvl", "tsc=reliable")

# Images.
FORMAT = 5  # version of the folder, of pid 1's settings and of its behaviour
KERNEL, INITRD, DISK, MANIFEST, POINTER = "kernel", "initrd", "root.ext4", "manifest.json", "current"
VARIABLE = "CLOCHE_MICROVM_IMAGE"
BUILD_IT = 'Build them of the distribution\'s packages: "cloche images build".'

# Monitors.
PLAIN_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
# Ids that no user of a host has.
FIRST_ID, IDS = 1_950_000_000, 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class MachinePlan:
    """Settings of one virtual machine. `counter_khz` is needed by emulated processors only.

    `memory_bytes` is the memory limit of one container, `all_bytes` that of all containers together.
    """

    acceleration: Acceleration
    machine_bytes: int
    all_bytes: int
    memory_bytes: int
    cpus: float
    pids: int
    disk_bytes: int
    inodes: int
    tmp_bytes: int
    counter_khz: int = 0
    user: int = GUEST_ID
    is_tmp_writable: bool = True
    is_live: bool = False  # one container for a sandbox that lives
    homes: tuple[str, ...] = ()  # additional writable folders, which share the workspace's size limit

    @property
    def processors(self) -> int:
        """Return the number of processors; 1 if emulated.

        A kernel patches its own code while it runs. QEMU 7.2 sometimes keeps using the old translation of code that
        another processor patched; that processor then takes the same breakpoint for ever, and the machine hangs.
        """
        if self.acceleration == "tcg":
            return 1
        return min(MOST_CPUS, max(1, math.ceil(self.cpus)))

    def settings(self, *, now: float, seed: bytes) -> dict[str, Any]:
        """Return the settings sent to pid 1."""
        return {
            "time": now,
            "seed": seed.hex(),
            "user": self.user,
            "memory_bytes": self.memory_bytes,
            "all_bytes": self.all_bytes,
            "cpus": self.cpus,
            "pids": self.pids,
            "disk_bytes": self.disk_bytes,
            "inodes": self.inodes,
            "tmp_bytes": self.tmp_bytes,
            "is_tmp_writable": self.is_tmp_writable,
            "ulimits": dict(ULIMITS),
            "homes": list(self.homes),
            "has_terminals": self.is_live,
            "filter": first_process_filter("x86_64").hex() if self.is_live else "",
        }

    def kernel_arguments(self) -> str:
        """Return the kernel's command line."""
        if self.acceleration == "kvm":
            return " ".join(KERNEL_ARGUMENTS)
        return " ".join((*KERNEL_ARGUMENTS, *EMULATED_ARGUMENTS, f"tsc_early_khz={self.counter_khz}"))


def plan_machine(
    policy: Policy,
    limits: Limits,
    acceleration: Acceleration,
    counter_khz: int = 0,
    *,
    is_live: bool = False,
    homes: tuple[str, ...] = (),
) -> MachinePlan:
    """Return the plan of one machine. Its memory includes the maximum content of its file systems."""
    own = limits.memory_bytes + 2 * limits.tmp_bytes + REAPER_BYTES
    everything = (1 if is_live else FULL_CONTAINERS) * own + limits.disk_bytes
    return MachinePlan(
        acceleration=acceleration,
        machine_bytes=everything + everything // MEMORY_PER_DESCRIPTION + KERNEL_BYTES,
        all_bytes=everything,
        memory_bytes=own + limits.disk_bytes,
        cpus=limits.cpus,
        pids=limits.pids + REAPERS,
        disk_bytes=limits.disk_bytes,
        inodes=limits.inodes,
        tmp_bytes=limits.tmp_bytes,
        counter_khz=counter_khz,
        user=NOBODY if policy.user == "nobody" else GUEST_ID,
        is_tmp_writable="/tmp" in policy.writable_paths,
        is_live=is_live,
        homes=homes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineImage:
    """An image: its folder, its id, and the programs on its disk with paths and versions."""

    folder: Path
    id: str
    python: str
    programs: Mapping[str, str]
    versions: Mapping[str, str]

    @property
    def name(self) -> str:
        return self.id[:16]

    def engine(self, language: Language) -> Engine:
        """Return the first engine that the disk can run. Raises BackendUnavailable that names the missing program."""
        engine = engine_of(language, self.programs, self.versions)
        if engine is not None:
            return engine
        package = language.engines[0].package.rpartition(" ")[2]
        raise BackendUnavailable(
            f"the microVM's root disk cannot run {language.name}: it has no {language.engines[0].programs[0]}.",
            remedy=f'Build one that has: "cloche images build --package {package}".',
        )

    def version(self, engine: Engine) -> str:
        """Return the version of the engine's main program, else its name."""
        return self.versions.get(engine.programs[0]) or engine.programs[0]


def place_of_images() -> Path:
    """Return the folder of the images that this user built."""
    from platformdirs import user_cache_path

    return user_cache_path("cloche") / "microvm"


def point_to(name: str) -> None:
    """Make an image the current one, atomically."""
    beside = place_of_images() / f".{POINTER}-{os.getpid()}"
    beside.write_text(name)
    beside.replace(place_of_images() / POINTER)


def find_image(backend: str = "microvm") -> MachineImage:
    """Return the current image: the folder in CLOCHE_MICROVM_IMAGE, else the last one that was built.

    Raises BackendUnavailable with the remedy.
    """
    named = os.environ.get(VARIABLE)
    try:
        folder = Path(named) if named else place_of_images() / (place_of_images() / POINTER).read_text().strip()
        return _read(folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        where = f" in {named} ({VARIABLE})" if named else ""
        why = "" if isinstance(error, FileNotFoundError) else f": {error}"
        raise BackendUnavailable(
            f'backend "{backend}": there is no kernel and root disk{where}{why}.', remedy=BUILD_IT
        ) from error


def _read(folder: Path) -> MachineImage:
    manifest = json.loads((folder / MANIFEST).read_bytes())
    if manifest["format"] != FORMAT:
        raise ValueError(f"{folder} was built by another version of Cloche")
    for name in (KERNEL, INITRD, DISK):
        (folder / name).stat()
    return MachineImage(
        folder=folder,
        id=str(manifest["id"]),
        python=str(manifest["python"]),
        programs={str(name): str(path) for name, path in manifest["programs"].items()},
        versions={str(name): str(version) for name, version in manifest["versions"].items()},
    )


@dataclass(slots=True, kw_only=True)
class Launched:
    """Connections to a started machine: its own port, the containers' ports, its console's output, and its jailer."""

    own: socket.socket
    ports: list[socket.socket]
    console: int
    process: subprocess.Popen[bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlPipe:
    """The jailer's end of the pipe that it watches, and the function that requests the kill and closes the other
    end.
    """

    read_end: int
    kill: Callable[[], None]


class Monitor(Protocol):
    """Start virtual machines."""

    @property
    def engine(self) -> str:
        """Return the name for results and file names."""
        ...

    @property
    def program(self) -> str:
        """Return the path of its program."""
        ...

    def boot_s(self, plan: MachinePlan) -> float:
        """Return the maximum seconds until a machine is ready."""
        ...

    def slowness(self, plan: MachinePlan) -> float:
        """Return the factor for the time-outs of programs inside."""
        ...

    def launch(self, plan: MachinePlan, image: MachineImage, control: ControlPipe, timeout_s: float) -> Launched:
        """Start a machine. Raises StartFailed; nothing is left then, once the control pipe is closed."""
        ...

    def argv(self, plan: MachinePlan) -> Sequence[str]:
        """Return the arguments that start it, for messages."""
        ...


def start_jailer(
    order: Mapping[str, Any], control: ControlPipe, output: int, passed: Sequence[int]
) -> subprocess.Popen[bytes]:
    """Start a jailer, which starts a monitor. Raises StartFailed."""
    argv = [sys.executable, "-I", "-S", str(Path(__file__).with_name("jailer.py")), json.dumps(order)]
    try:
        return subprocess.Popen(
            argv, stdin=control.read_end, stdout=output, stderr=output, cwd="/", env={}, pass_fds=tuple(passed)
        )
    except OSError as error:
        control.kill()
        raise StartFailed(f"the jailer of a virtual machine cannot be started: {error}") from error


def identity(*, has_kvm: bool) -> dict[str, Any]:
    """Return the monitor's identity: for root, an unused id with its own devices; else the current user."""
    if os.geteuid() != 0:
        return {"user": 0, "devices": {}}
    user = FIRST_ID + random.SystemRandom().randrange(IDS)
    shown = (KVM, *PLAIN_DEVICES) if has_kvm else ()
    return {"user": user, "devices": {os.path.basename(path): os.stat(path).st_rdev for path in shown}}


def opened(stack: ExitStack, path: Path) -> int:
    """Open a file of an image for reading. Raises StartFailed."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise StartFailed(f"{path.name} of the microVM's image cannot be read: {error.strerror}") from error
    stack.callback(os.close, fd)
    return fd


@dataclass(frozen=True, slots=True, kw_only=True)
class HostAcceleration:
    """The acceleration of machines on this host, why it is not KVM, and the frequency of the time-stamp counter."""

    kind: Acceleration
    reason: str = ""
    counter_khz: int = 0
