"""What the wire needs of the program that serves it: the service with its records, or a node with its leases."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any, Protocol

from cloche.audit.log import Audit
from cloche.core.policy import Policy

from .attachments import Attachment
from .callers import Caller
from .load import WireLoad
from .queue import RunQueue


class CallTask(Protocol):
    """A call that goes on."""

    task: asyncio.Task[None] | None

    def cancel(self) -> None:
        """Cancel it, without effect the second time."""


class SandboxStore(Protocol):
    """Find the live sandboxes of a project."""

    listings: asyncio.Semaphore  # of folders; one may have megabytes of names

    def held(self, sandbox_id: str, project: str) -> AbstractAsyncContextManager[Attachment]:
        """Hold a sandbox for the body. Raises NotFound, Refused (409) for an ended one, ClocheError."""
        ...

    async def describe(self, sandbox_id: str, project: str) -> Mapping[str, Any]:
        """Return the facts of a sandbox in the wire's format. Raises NotFound."""
        ...

    async def change(
        self, held: Attachment, op: str, **order: Any  # noqa: ANN401 - JSON
    ) -> Mapping[str, Any]:  # fmt: skip
        """Do an operation of a keeper on a held sandbox, and return what it answers; see `held.change_held`."""
        ...


class SandboxHost(Protocol):
    """Decide about the work of callers in sandboxes, and record it."""

    @property
    def keeps_runs(self) -> bool:
        """Tell whether runs are stored, and can be looked up by their id."""
        ...

    @property
    def sandboxes(self) -> SandboxStore:
        """Return the live sandboxes."""
        ...

    @property
    def wire(self) -> WireLoad:
        """Return the bounds of all callers."""
        ...

    async def allowed_options(self, caller: Caller, own: Mapping[str, Any]) -> dict[str, Any]:
        """Return a sandbox's options, checked against the caller's permissions. Raises PolicyDenied, InvalidRequest."""
        ...

    async def audit(self) -> Audit | None:
        """Return the audit log, None if it is off."""
        ...

    async def record(self, kind: str, **fields: Any) -> None:  # noqa: ANN401 - JSON
        """Write an event before an action. Raises AuditFailed."""

    async def note_refusal(self, error: BaseException, **fields: Any) -> None:  # noqa: ANN401 - JSON
        """Record that a caller was refused. Raises nothing."""


class WireHost(SandboxHost, Protocol):
    """Serve the wire's calls."""

    @property
    def runs(self) -> RunQueue:
        """Return the queue of runs."""
        ...

    async def open_sandbox(self, fields: Any, caller: Caller) -> Mapping[str, Any]:  # noqa: ANN401 - a NewSandbox
        """Open a live sandbox and return its facts. Raises ClocheError, Refused."""
        ...

    async def list_sandboxes(self, listing: Any, caller: Caller) -> Mapping[str, Any]:  # noqa: ANN401 - a Listing
        """Return a page of the caller's sandboxes."""
        ...

    async def end_sandbox(self, sandbox_id: str, caller: Caller) -> Mapping[str, Any]:
        """End a sandbox, and return its facts when nothing of it is left. Raises NotFound."""
        ...

    def check_workspace(self, policy: Policy, /) -> None:
        """Raise PolicyDenied for a run in a workspace whose policy is no longer allowed."""

    def calling(self, caller: Caller, call: CallTask, /) -> AbstractContextManager[None]:
        """Count a call of a caller during the body. Raises Refused (429)."""
        ...

    def explain(self, error: Exception, project: str | None, /) -> Exception:
        """Return the error with which a call of a project ends; an error of its lease explains others."""
        ...

    def note_call(self, verb: str, status: int, seconds: float, caller: str | None) -> None:
        """Note that a call has ended."""
