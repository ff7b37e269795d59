"""Which interpreter packages are for: what a layer's key and the choice of wheels depend on."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Name an interpreter: its path, version and bytecode tag, the platform, and the C library.

    `folder` is where it finds layers, each below its key; empty where it is the caller's own and sees the host's.
    """

    python: str
    version: str
    tag: str
    platform: str
    libc: str
    folder: str = ""

    def as_dict(self) -> dict[str, str]:
        """Return plain data, ready for JSON."""
        return asdict(self)

    def fits(self, other: dict[str, object]) -> bool:
        """Tell whether wheels that were chosen for another interpreter do for this one, wherever it is."""
        return (self.tag, self.platform, self.libc.partition(" ")[0]) == (
            other.get("tag"), other.get("platform"), str(other.get("libc", "")).partition(" ")[0]
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Interpreter:
    """Hold what packages are chosen for, and the top-level modules that it has without them."""

    target: Target
    modules: frozenset[str] = frozenset()
