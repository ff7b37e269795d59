"""Layers of packages: the interpreter they are for, their digests, and the protocols of backends that show them.

A layer's key and the choice of wheels depend on the interpreter.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

from .policy import Policy
from .record import asdict, dataclass


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

    def fits(self, target: dict[str, object]) -> bool:
        """Tell whether wheels that were chosen for another interpreter do for this one, wherever it is."""
        return (self.tag, self.platform, self.libc.partition(" ")[0]) == (
            target.get("tag"), target.get("platform"), str(target.get("libc", "")).partition(" ")[0]
        )  # fmt: skip


def packages_digest(requirements: Iterable[str], locked: str = "") -> str:
    """Return the digest of a layer: of its requirements in one spelling, and of their lock, if there is one."""
    text = json.dumps([locked, *sorted(requirements)])
    return f"packages:{hashlib.sha256(text.encode()).hexdigest()[:32]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Interpreter:
    """Hold what packages are chosen for, and the top-level modules that it has without them."""

    target: Target
    modules: frozenset[str] = frozenset()


@runtime_checkable
class SupportsLayers(Protocol):
    """Show layers of packages (`Policy.layers`)."""

    def check_layers(self, policy: Policy) -> None:
        """Raise BackendUnavailable where a sandbox with these rules would not show them."""
        ...


@runtime_checkable
class SupportsNodeModules(Protocol):
    """Show layers of npm's packages, too: programs find them in a `node_modules` above their own folder."""

    def check_node_modules(self, policy: Policy) -> None:
        """Raise BackendUnavailable where a sandbox with these rules would not show them."""
        ...


@runtime_checkable
class SupportsAddedLayers(Protocol):
    """Let a live sandbox see packages that are added to a layer's folder during its life."""

    def check_added_layers(self, policy: Policy) -> None:
        """Raise BackendUnavailable where a sandbox with these rules would not find it."""
        ...


@runtime_checkable
class InstallsPackages(Protocol):
    """Have packages installed where the code runs, by its own index and rules: `Policy.packages`, `packages_lock`."""

    installs_packages: bool


@runtime_checkable
class SupportsImageDigests(Protocol):
    """List the images that are here by their digests."""

    def image_digests(self) -> Sequence[str]:
        """Return `image_digest` of each (see `core.ceilings`), the newest first. Blocks. Raises BackendUnavailable."""
        ...


@runtime_checkable
class SupportsOwnInterpreter(Protocol):
    """Run Python by an interpreter that is not the caller's: packages are for that one, and kept where it is."""

    def find_interpreter(self) -> Interpreter:
        """Return it; may fetch and start something, and blocks. Raises BackendUnavailable."""
        ...

    def prune_layers(self, folder: str) -> list[str]:
        """Remove the copies of layers whose folder is gone from the host; return a line for each. Blocks.

        Raises BackendUnavailable where the backend does not answer.
        """
        ...
