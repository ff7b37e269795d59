"""What a machine needs of whoever runs it: a monitor is started behind a keeper, and gives a machine its streams."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from cloche.core.errors import StartFailed

from .image import Image
from .plan import Plan

KVM = Path("/dev/kvm")
PLAIN_DEVICES = (Path("/dev/null"), Path("/dev/zero"), Path("/dev/urandom"))
# Ids that no user of a host has.
FIRST_ID, IDS = 1_950_000_000, 100_000


@dataclass(slots=True, kw_only=True)
class Launched:
    """Hold what leads to a machine: its own port, those of places, what its console says, and the keeper."""

    own: socket.socket
    ports: list[socket.socket]
    console: int
    process: subprocess.Popen[bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Leash:
    """Hold a keeper: its end of the lifeline, and what lets go of the other end."""

    lifeline: int
    kill: Callable[[], None]


class Monitor(Protocol):
    """Run machines."""

    @property
    def engine(self) -> str:
        """Name it in results and file names."""
        ...

    @property
    def program(self) -> str:
        """Name its file."""
        ...

    @property
    def can_emulate(self) -> bool:
        """Tell whether it runs machines without KVM, slowly."""
        ...

    def boot_s(self, plan: Plan) -> float:
        """Return how long a machine may take to get ready, in seconds."""
        ...

    def slowness(self, plan: Plan) -> float:
        """Return how many times longer than usual one must be patient with what runs inside."""
        ...

    def launch(self, plan: Plan, image: Image, leash: Leash, patience_s: float) -> Launched:
        """Start a machine. Raises StartFailed; then nothing of it is left, once its leash is let go."""
        ...

    def words(self, plan: Plan) -> Sequence[str]:
        """Return the words that start it, for messages."""
        ...


def start_keeper(order: Mapping[str, Any], leash: Leash, said: int, passed: Sequence[int]) -> subprocess.Popen[bytes]:
    """Start a keeper that starts a monitor. Raises StartFailed."""
    words = [sys.executable, "-I", "-S", str(Path(__file__).with_name("keeper.py")), json.dumps(order)]
    try:
        return subprocess.Popen(
            words, stdin=leash.lifeline, stdout=said, stderr=said, cwd="/", env={}, pass_fds=tuple(passed)
        )
    except OSError as error:
        leash.kill()
        raise StartFailed(f"the keeper of a virtual machine cannot be started: {error}") from error


def identity(*, has_kvm: bool) -> dict[str, Any]:
    """Return who the monitor is to be: from root an id that nobody has, with its own devices, else whoever we are."""
    if os.geteuid() != 0:
        return {"user": 0, "devices": {}}
    user = FIRST_ID + random.SystemRandom().randrange(IDS)
    shown = (KVM, *PLAIN_DEVICES) if has_kvm else ()
    return {"user": user, "devices": {path.name: path.stat().st_rdev for path in shown}}


def opened(stack: ExitStack, path: Path) -> int:
    """Open a file of an image for reading. Raises StartFailed."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise StartFailed(f"{path.name} of the microVM's image cannot be read: {error.strerror}") from error
    stack.callback(os.close, fd)
    return fd
