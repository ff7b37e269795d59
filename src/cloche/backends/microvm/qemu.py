"""QEMU as the monitor: a machine of its `microvm` kind, with virtio ports over socket pairs."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from cloche.core.errors import BackendUnavailable

from .image import DISK, INITRD, KERNEL, Image
from .monitor import Launched, Leash, identity, opened, start_keeper
from .plan import PLACES, Descriptors, Plan, arguments

PROGRAM = "qemu-system-x86_64"
BOOT_S: Mapping[str, float] = {"kvm": 20.0, "tcg": 120.0}
# A cell of Node.js that shows without end takes up to 19 s to be interrupted, with half a processor, emulated.
SLOWNESS: Mapping[str, float] = {"kvm": 1.0, "tcg": 8.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Qemu:
    """Run machines under QEMU; `program` is its path."""

    program: str
    engine: str = "qemu"
    can_emulate: bool = True

    def boot_s(self, plan: Plan) -> float:
        """Return how long a machine may take to get ready, in seconds."""
        return BOOT_S[plan.acceleration]

    def slowness(self, plan: Plan) -> float:
        """Return how many times longer than usual one must be patient with what runs inside."""
        return SLOWNESS[plan.acceleration]

    def launch(self, plan: Plan, image: Image, leash: Leash, patience_s: float) -> Launched:
        """Start a machine; it boots after this returns. Raises StartFailed."""
        with ExitStack() as always, ExitStack() as on_failure:
            files = {name: opened(always, image.folder / name) for name in (KERNEL, INITRD, DISK)}
            pairs = [socket.socketpair() for _ in range(1 + PLACES)]
            for ours, theirs in pairs:
                ours.settimeout(patience_s)  # for a machine to take what it is sent
                on_failure.callback(ours.close)
                always.callback(theirs.close)
            console, said = os.pipe()
            on_failure.callback(os.close, console)
            always.callback(os.close, said)
            ports = tuple(theirs.fileno() for _, theirs in pairs)
            given = Descriptors(kernel=files[KERNEL], initrd=files[INITRD], disk=files[DISK], ports=ports)
            order = {
                "argv": arguments(self.program, plan, given),
                **identity(has_kvm=plan.acceleration == "kvm"),
            }
            process = start_keeper(order, leash, said, (*files.values(), *ports))
            on_failure.pop_all()
        own, *others = (ours for ours, _ in pairs)
        return Launched(own=own, ports=others, console=console, process=process)

    def words(self, plan: Plan) -> Sequence[str]:
        """Return QEMU's words, with the files that it gets as descriptors."""
        given = Descriptors(kernel=3, initrd=4, disk=5, ports=tuple(range(6, 7 + PLACES)))
        return arguments(self.program, plan, given)


def find_qemu() -> Qemu:
    """Return QEMU. Raises BackendUnavailable with the remedy."""
    found = shutil.which(PROGRAM)
    if found is None:
        raise BackendUnavailable(
            f'backend "microvm": {PROGRAM} is not on PATH.',
            remedy='Install it, on Debian and Ubuntu: "apt-get install qemu-system-x86".',
        )
    return Qemu(program=found)
