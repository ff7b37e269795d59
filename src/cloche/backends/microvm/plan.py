"""What a virtual machine is made of, decided purely: its size, its devices, and the words of its monitor.

One table of facts for every monitor: the disk, the kernel's own words and the settings of the first process do not
depend on who boots them. Only `arguments` speaks QEMU's language; another monitor adds a function beside it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from cloche.core.limits import Limits
from cloche.core.policy import Policy
from cloche.core.units import MIB

from ..containers.guest import REAPER_BYTES, REAPERS, ULIMITS

Acceleration = Literal["kvm", "tcg"]

GUEST_ID, NOBODY = 1000, 65_534
KERNEL_BYTES = 160 * MIB  # what the kernel, the first process and the cache of the root disk need besides
MEMORY_PER_DESCRIPTION = 64  # bytes of memory, of which the kernel takes one to describe them
MOST_CPUS = 16
MOST_SESSIONS = 6  # at once
# A run's place, and one that is on its way out while its successor is made, besides those of sessions.
PLACES = MOST_SESSIONS + 2
# So many places can have all of their memory at once: a run's and two sessions'. More share it.
FULL_PLACES = 3
TRANSLATED_MIB = 128  # of the software emulation's own translations
# `panic=-1` and `reboot=t` end the machine at once, for the monitor is told to take a restart for the end.
KERNEL_WORDS = (
    "console=ttyS0", "quiet", "loglevel=3", "reboot=t", "panic=-1", "random.trust_cpu=on", "cryptomgr.notests",
    "no_timer_check", "8250.nr_uarts=1", "rcupdate.rcu_expedited=1",
)  # fmt: skip
# Emulated, a guest never speculates in the way that these protect from, and each level of page tables costs.
EMULATED_WORDS = ("mitigations=off", "no5lvl", "tsc=reliable")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Describe one virtual machine. An emulated processor must be told how fast it counts.

    `memory_bytes` is what one place may take, `all_bytes` what all of them together may.
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

    @property
    def processors(self) -> int:
        """Return how many the machine has; emulated it is one.

        A kernel changes its own code while it runs, and QEMU 7.2 sometimes goes on with the old translation of what
        another processor has changed: then that one takes the same breakpoint for ever, and the machine hangs.
        """
        if self.acceleration == "tcg":
            return 1
        return min(MOST_CPUS, max(1, math.ceil(self.cpus)))

    def settings(self, *, now: float, seed: bytes) -> dict[str, Any]:
        """Return what the first process is told."""
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
        }

    def kernel_words(self) -> str:
        """Return the kernel's command line."""
        if self.acceleration == "kvm":
            return " ".join(KERNEL_WORDS)
        return " ".join((*KERNEL_WORDS, *EMULATED_WORDS, f"tsc_early_khz={self.counter_khz}"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Descriptors:
    """Name the open files that a monitor gets: it is given no path of the host's. The first port is the machine's."""

    kernel: int
    initrd: int
    disk: int
    ports: tuple[int, ...]


def plan_machine(policy: Policy, limits: Limits, acceleration: Acceleration, counter_khz: int = 0) -> Plan:
    """Return the plan of one machine; its memory has room for all that its file systems may hold."""
    own = limits.memory_bytes + 2 * limits.tmp_bytes + REAPER_BYTES
    everything = FULL_PLACES * own + limits.disk_bytes
    return Plan(
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
    )


def arguments(program: str, plan: Plan, given: Descriptors) -> list[str]:
    """Return the words that start QEMU.

    No network device, no path of the host's but the firmware's. The disk is opened for reading alone, and stays so
    whatever the guest does to its own mounts. Memory is taken from the host as it is used, and not set aside.
    """
    size = f"{math.ceil(plan.machine_bytes / MIB)}M"
    accelerator = "kvm" if plan.acceleration == "kvm" else f"tcg,tb-size={TRANSLATED_MIB}"
    return [
        program, "-name", "cloche", "-nodefaults", "-no-user-config", "-no-reboot", "-display", "none",
        "-machine", "microvm,rtc=on,memory-backend=memory", "-accel", accelerator,
        "-cpu", "host" if plan.acceleration == "kvm" else "max",
        "-m", size, "-object", f"memory-backend-ram,id=memory,size={size},reserve=off", "-smp", str(plan.processors),
        "-global", "virtio-mmio.force-legacy=false",
        "-kernel", f"/proc/self/fd/{given.kernel}", "-initrd", f"/proc/self/fd/{given.initrd}",
        "-append", plan.kernel_words(),
        "-add-fd", f"fd={given.disk},set=1",
        "-blockdev", "driver=file,node-name=file,filename=/dev/fdset/1,read-only=on,locking=off",
        "-blockdev", "driver=raw,node-name=root,file=file,read-only=on",
        "-device", "virtio-blk-device,drive=root",
        "-device", f"virtio-serial-device,max_ports={len(given.ports) + 1}",
        *(word for number, fd in enumerate(given.ports, 1) for word in _port(number, fd)),
        "-chardev", "stdio,id=console,signal=off", "-serial", "chardev:console",
        "-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
    ]  # fmt: skip


def _port(number: int, fd: int) -> tuple[str, ...]:
    return "-chardev", f"socket,id=port{number},fd={fd}", "-device", f"virtserialport,chardev=port{number},nr={number}"
