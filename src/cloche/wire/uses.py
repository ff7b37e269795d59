"""The use of one sandbox by one call: the caller, and the sandbox, held until the call has ended."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from cloche.audit.log import act_for
from cloche.core.record import dataclass
from cloche.execution.sandbox import AsyncSandbox

from .attachments import Attachment
from .callers import Caller
from .host import SandboxHost


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """Hold the caller and the sandbox of a request."""

    caller: Caller
    service: SandboxHost
    held: Attachment

    @property
    def sandbox(self) -> AsyncSandbox:
        """Return the sandbox."""
        return self.held.sandbox


@asynccontextmanager
async def using(service: SandboxHost, caller: Caller, sandbox_id: str) -> AsyncIterator[Use]:
    """Yield a sandbox of the caller's project. Raises NotFound, Refused (409), ClocheError."""
    act_for(sandbox=sandbox_id)
    async with service.sandboxes.held(sandbox_id, caller.project) as held:
        yield Use(caller=caller, service=service, held=held)
