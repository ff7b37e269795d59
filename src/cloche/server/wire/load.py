"""How much all wires of a worker may hold together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from cloche.core.errors import NotFound
from cloche.core.escape import escape_name
from cloche.core.record import dataclass, field
from cloche.execution.sandbox import AsyncSandbox
from cloche.records.ids import new_id

from ..problems import Refused

MOST_CONNECTIONS = 32  # each with a window for every channel of its calls
MOST_HELD = 128 << 20  # bytes of fields and files that are held whole
MOST_WORKSPACES, MOST_OF_PROJECT = 64, 32


@dataclass(slots=True)
class WireLoad:
    """Count what all wires of a worker hold together: connections, workspaces, and bytes that are held whole."""

    connections: int = 0
    held: int = 0
    _workspaces: dict[str, tuple[str, AsyncSandbox]] = field(default_factory=dict)  # by id, with the project

    @contextmanager
    def connection(self) -> Iterator[None]:
        """Count a connection for the body. Raises Refused (503) for one too many."""
        if self.connections >= MOST_CONNECTIONS:
            raise Refused(
                503, "busy", f"{MOST_CONNECTIONS} wires are open already; one carries many calls at once",
                headers={"Retry-After": "5"},
            )  # fmt: skip
        self.connections += 1
        try:
            yield
        finally:
            self.connections -= 1

    def hold(self, size: int) -> None:
        """Count bytes that are held. Raises Refused (503) where there are too many."""
        if self.held + size > MOST_HELD:
            raise Refused(503, "busy", "other calls hold all memory there is for them", headers={"Retry-After": "2"})
        self.held += size

    @contextmanager
    def workspace(self, project: str, sandbox: AsyncSandbox) -> Iterator[str]:
        """Let calls of a project find a workspace for the body, by the id that this yields. Raises Refused (429)."""
        own = sum(owner == project for owner, _ in self._workspaces.values())
        if len(self._workspaces) >= MOST_WORKSPACES or own >= MOST_OF_PROJECT:
            raise Refused(
                429, "too-many-workspaces",
                f"{len(self._workspaces)} workspaces are open, {own} of them of this project (at most "
                f"{MOST_WORKSPACES} and {MOST_OF_PROJECT}); close one before another",
            )  # fmt: skip
        number = new_id("ws")
        self._workspaces[number] = project, sandbox
        try:
            yield number
        finally:
            del self._workspaces[number]

    def find_workspace(self, number: str, project: str) -> AsyncSandbox:
        """Return one. Raises NotFound."""
        found = self._workspaces.get(number)
        if found is None or found[0] != project:
            raise NotFound(f"there is no workspace {escape_name(number[:64])} in this worker, or none any more")
        return found[1]
