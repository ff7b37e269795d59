"""Which interpreter packages are for: what a layer's key and the choice of wheels depend on."""

from __future__ import annotations

import functools
import os
import platform
import sys
import sysconfig
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Name an interpreter: its path, version and bytecode tag, the platform, and the C library."""

    python: str
    version: str
    tag: str
    platform: str
    libc: str

    def as_dict(self) -> dict[str, str]:
        """Return plain data, ready for JSON."""
        return asdict(self)

    def fits(self, other: dict[str, object]) -> bool:
        """Tell whether wheels that were chosen for another interpreter do for this one, wherever it is."""
        return (self.tag, self.platform, self.libc.partition(" ")[0]) == (
            other.get("tag"), other.get("platform"), str(other.get("libc", "")).partition(" ")[0]
        )  # fmt: skip


@functools.cache
def own_target() -> Target:
    """Return the caller's own interpreter, which runs Python in the local jail."""
    is_environment = sys.prefix != sys.base_prefix
    name, version = platform.libc_ver()
    return Target(
        python=os.path.abspath(sys.executable) if is_environment else os.path.realpath(sys.executable),
        version=platform.python_version(),
        tag=sys.implementation.cache_tag or sys.implementation.name,
        platform=sysconfig.get_platform(),
        libc=f"{name} {version}" if name else "musl",
    )
