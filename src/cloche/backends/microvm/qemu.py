"""QEMU as the monitor: a machine of type `microvm`, with virtio-serial ports over socket pairs."""

from __future__ import annotations

import math
import os
import shutil
import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from cloche.core.errors import BackendUnavailable
from cloche.core.limits import MIB
from cloche.core.record import dataclass

from .plan import (
    CONTAINERS,
    DISK,
    INITRD,
    KERNEL,
    TRANSLATED_MIB,
    ControlPipe,
    Launched,
    MachineImage,
    MachinePlan,
    identity,
    opened,
    start_jailer,
)

PROGRAM = "qemu-system-x86_64"
BOOT_S: Mapping[str, float] = {"kvm": 20.0, "tcg": 120.0}
# Interrupting a Node.js cell that displays endlessly takes up to 19 s, emulated with half a processor.
SLOWNESS: Mapping[str, float] = {"kvm": 1.0, "tcg": 8.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Descriptors:
    """Numbers of the open files passed to QEMU, which gets no path of the host. The first port is the machine's own."""

    kernel: int
    initrd: int
    disk: int
    ports: tuple[int, ...]


def arguments(program: str, plan: MachinePlan, descriptors: Descriptors) -> list[str]:
    """Return the arguments that start QEMU.

    There is no network device, and no path of the host except the firmware's. The disk is opened read-only, which the
    guest cannot change by its own mounts. The host's memory is allocated on use and not reserved.
    """
    size = f"{math.ceil(plan.machine_bytes / MIB)}M"
    accelerator = "kvm" if plan.acceleration == "kvm" else f"tcg,tb-size={TRANSLATED_MIB}"
    return [
        program, "-name", "cloche", "-nodefaults", "-no-user-config", "-no-reboot", "-display", "none",
        "-machine", "microvm,rtc=on,memory-backend=memory", "-accel", accelerator,
        "-cpu", "host" if plan.acceleration == "kvm" else "max",
        "-m", size, "-object", f"memory-backend-ram,id=memory,size={size},reserve=off", "-smp", str(plan.processors),
        "-global", "virtio-mmio.force-legacy=false",
        "-kernel", f"/proc/self/fd/{descriptors.kernel}", "-initrd", f"/proc/self/fd/{descriptors.initrd}",
        "-append", plan.kernel_arguments(),
        "-add-fd", f"fd={descriptors.disk},set=1",
        "-blockdev", "driver=file,node-name=file,filename=/dev/fdset/1,read-only=on,locking=off",
        "-blockdev", "driver=raw,node-name=root,file=file,read-only=on",
        "-device", "virtio-blk-device,drive=root",
        "-device", f"virtio-serial-device,max_ports={len(descriptors.ports) + 1}",
        *(argument for number, fd in enumerate(descriptors.ports, 1) for argument in _port(number, fd)),
        "-chardev", "stdio,id=console,signal=off", "-serial", "chardev:console",
        "-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
    ]  # fmt: skip


def _port(number: int, fd: int) -> tuple[str, ...]:
    return "-chardev", f"socket,id=port{number},fd={fd}", "-device", f"virtserialport,chardev=port{number},nr={number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Qemu:
    """Run machines under QEMU; `program` is its path."""

    program: str
    engine: str = "qemu"

    def boot_s(self, plan: MachinePlan) -> float:
        """Return the maximum seconds until a machine is ready."""
        return BOOT_S[plan.acceleration]

    def slowness(self, plan: MachinePlan) -> float:
        """Return the factor for the time-outs of programs inside."""
        return SLOWNESS[plan.acceleration]

    def launch(self, plan: MachinePlan, image: MachineImage, control: ControlPipe, timeout_s: float) -> Launched:
        """Start a machine, and return before it has booted. Raises StartFailed."""
        with ExitStack() as always, ExitStack() as on_failure:
            files = {name: opened(always, image.folder / name) for name in (KERNEL, INITRD, DISK)}
            pairs = [socket.socketpair() for _ in range(1 + CONTAINERS)]
            for ours, theirs in pairs:
                ours.settimeout(timeout_s)  # for sending
                on_failure.callback(ours.close)
                always.callback(theirs.close)
            console, console_writer = os.pipe()
            on_failure.callback(os.close, console)
            always.callback(os.close, console_writer)
            ports = tuple(theirs.fileno() for _, theirs in pairs)
            descriptors = Descriptors(kernel=files[KERNEL], initrd=files[INITRD], disk=files[DISK], ports=ports)
            order = {
                "argv": arguments(self.program, plan, descriptors),
                **identity(has_kvm=plan.acceleration == "kvm"),
            }
            process = start_jailer(order, control, console_writer, (*files.values(), *ports))
            on_failure.pop_all()
        own, *containers = (ours for ours, _ in pairs)
        return Launched(own=own, ports=containers, console=console, process=process)

    def argv(self, plan: MachinePlan) -> Sequence[str]:
        """Return QEMU's arguments, with descriptors for its files."""
        descriptors = Descriptors(kernel=3, initrd=4, disk=5, ports=tuple(range(6, 7 + CONTAINERS)))
        return arguments(self.program, plan, descriptors)


def find_qemu() -> Qemu:
    """Return QEMU. Raises BackendUnavailable with the remedy."""
    path = shutil.which(PROGRAM)
    if path is None:
        raise BackendUnavailable(
            f'backend "microvm": {PROGRAM} is not on PATH.',
            remedy='Install it, on Debian and Ubuntu: "apt-get install qemu-system-x86".',
        )
    return Qemu(program=path)
