"""What the parts of `AsyncSandbox` for a sandbox that lives (`processes`, `paths`, `ports`) have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from cloche.core.errors import InvalidRequest
from cloche.core.protocols import OpenLiveSandbox, OpenSandbox

from .prepare import Prepared


class LiveOperations:
    """Hold what all of them use."""

    _prepared: Prepared
    _env: Mapping[str, str]
    _opened: OpenSandbox | None
    _is_live: bool

    def _require_open(self) -> OpenSandbox:
        if self._opened is None:
            raise InvalidRequest("this sandbox is not open; use it inside its with block")
        return self._opened

    def _require_live(self, what: str) -> OpenLiveSandbox:
        """Return the open sandbox. Raises InvalidRequest where it is not one that lives."""
        opened = self._require_open()
        if not self._is_live:
            raise InvalidRequest(f"{what} needs a sandbox that lives; open it with live=True")
        return cast("OpenLiveSandbox", opened)
