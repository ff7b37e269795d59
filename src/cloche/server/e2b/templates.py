"""Templates: what a sandbox of each begins with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cloche.core.record import dataclass, field
from cloche.wire.callers import Caller

from .calls import Call
from .defaults import sandbox_options


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """Hold a template: its id, its first name, the options of its sandboxes, and their variables."""

    id: str
    alias: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)


async def find_template(call: Call, caller: Caller, name: str) -> Template:
    """Return a template by its id or name. Raises E2BError (404)."""
    del caller
    return Template(id=name, alias=name, options=await sandbox_options(call.service))
