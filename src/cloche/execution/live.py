"""What the parts of `AsyncSandbox` for a sandbox that lives (`processes`, `paths`, `ports`) have in common."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import cast

from cloche.core.errors import BackendUnavailable, InvalidRequest
from cloche.core.protocols import OpenLiveSandbox, OpenSandbox, SupportsLive

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

    def _opening(self) -> AbstractAsyncContextManager[OpenSandbox]:
        """Return what opens it. Raises BackendUnavailable where it shall live, and the backend has none that do."""
        backend, policy, limits = self._prepared.backend, self._prepared.policy, self._prepared.limits
        if not self._is_live:
            return backend.open(policy, limits)
        if not isinstance(backend, SupportsLive):
            raise BackendUnavailable(
                f"backend {backend.name!r} has no sandboxes that live.",
                remedy='Use backend "local", "docker" or "gvisor", or leave live=True out: then runs take turns.',
            )
        return backend.open_live(policy, limits)
