"""Debug namespaces: one logger each (`cloche.jail`, …), switched on and off by name.

Handlers are left alone: the application that configures logging decides where lines go. No line quotes code, output or
secrets of a guest.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from .errors import InvalidRequest
from .escape import escape_name
from .record import dataclass, field

VARIABLE, EVERYTHING = "CLOCHE_DEBUG", "*"
# Name -> what its lines are about.
NAMESPACES: Mapping[str, str] = {
    "jail": "building, using and ending jails",
    "warm": "warm starts: the fork server and its slots",
    "docker": "what the docker daemon is asked for",
    "egress": "the network served from outside",
    "service": "requests and runs of `cloche serve`",
    "records": "the database of the service",
    "runtime": "which backend is chosen, and how runs end",
    "live": "live sandboxes, and their keepers",
    "packages": "packages installed as layers",
    "workspace": "views of folders of the host, and commits to them",
    "containers": "containers of docker and gVisor",
    "gvisor": "gVisor without a daemon",
    "microvm": "virtual machines of QEMU and Firecracker",
    "microsandbox": "virtual machines of microsandbox",
    "remote": "sandboxes at providers and at other services",
    "fleet": "nodes of a fleet, and leases on them",
    "audit": "the audit log and what is kept beside it",
    "agent": "tools, approvals and repair by a model",
    "agents": "coding agents: archives and watchers",
}
# When a switch takes effect. Helpers, egress processes and keepers write no lines themselves: who starts them does.
APPLIES_TO: Mapping[str, str] = {
    "workers": "within 1 second",
    "helpers": "at their next start",
    "egress": "at its next start",
    "keepers": "at their next start",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DebugState:
    """Hold who switched what on: an argument, the environment, the database; the first two switch nothing off."""

    argument: frozenset[str] = frozenset()
    environment: frozenset[str] = frozenset()
    stored: Mapping[str, bool] = field(default_factory=dict)

    @property
    def on(self) -> frozenset[str]:
        """Return the namespaces that are on."""
        return self.argument | self.environment | {name for name, is_on in self.stored.items() if is_on}

    @property
    def source(self) -> str:
        """Return the sources of the setting, the strongest first; `default` if there is none."""
        sources = {"argument": self.argument, "environment": self.environment, "stored": self.stored}
        return ", ".join(name for name, names in sources.items() if names) or "default"

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, as the wire has it."""
        on = self.on
        return {
            "enabled": bool(on), "namespaces": {name: name in on for name in NAMESPACES}, "source": self.source,
            "appliesTo": dict(APPLIES_TO),
        }  # fmt: skip


def read_namespaces(text: str, *, where: str = VARIABLE) -> frozenset[str]:
    """Return the namespaces of a list with commas; `*` stands for all. Raises InvalidRequest for another name."""
    return check_namespaces((name.strip() for name in text.split(",") if name.strip()), where=where)


def check_namespaces(names: Iterable[str], *, where: str) -> frozenset[str]:
    """Return the namespaces in `names`; `*` stands for all. Raises InvalidRequest for an unknown name."""
    namespaces: set[str] = set()
    for name in names:
        if name == EVERYTHING:
            namespaces.update(NAMESPACES)
        elif name in NAMESPACES:
            namespaces.add(name)
        else:
            raise InvalidRequest(
                f"{where}: {escape_name(name[:80])} is not a debug namespace; use * or some of {', '.join(NAMESPACES)}"
            )
    return frozenset(namespaces)


def logger_of(namespace: str) -> logging.Logger:
    """Return the logger of a namespace."""
    return logging.getLogger(f"cloche.{namespace}")


def switch(on: Collection[str]) -> None:
    """Set exactly these namespaces to level debug; the others inherit the level that the application configured."""
    for name in NAMESPACES:
        logger_of(name).setLevel(logging.DEBUG if name in on else logging.NOTSET)
