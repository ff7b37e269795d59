"""What every guest of a container gets, whoever starts the container."""

from __future__ import annotations

from collections.abc import Mapping

from cloche.core.units import KIB, MIB

WORKSPACE, BUILD = "/workspace", "/tmp/build"
NOFILE = 1024
# One byte, not none: with 0 the kernel still feeds a crashed guest to a program of the host's that takes core dumps.
ULIMITS: Mapping[str, int] = {"core": 1, "nofile": NOFILE, "memlock": 64 * KIB, "msgqueue": 819_200}
REAPERS = 1  # our first process
GVISOR_THREADS = 256  # gVisor's own, which the same control group counts
# What the first process itself needs, besides the guest: an interpreter with its usual modules.
REAPER_BYTES = 24 * MIB
ENVIRONMENT: Mapping[str, str] = {
    "HOME": WORKSPACE,
    "TMPDIR": "/tmp",
    "XDG_CACHE_HOME": "/tmp/.cache",
    "LANG": "C.UTF-8",
    "PYTHONDONTWRITEBYTECODE": "1",
}
