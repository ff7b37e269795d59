"""The owner of a call, and its scopes."""

from __future__ import annotations

from cloche.core.record import dataclass

from .problems import Refused

BROWSER = "browser"  # the name of a human in a browser


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Hold an authenticated caller: a key, or a human in a browser (`key_id` None)."""

    project: str
    scopes: tuple[str, ...]
    key_id: str | None = None
    session_hash: bytes | None = None
    address: str = ""

    @property
    def name(self) -> str:
        """Return the caller's name in records and in the audit log."""
        return self.key_id or BROWSER

    def has(self, scope: str) -> bool:
        """Tell whether the caller has a scope. `admin` includes all of them."""
        return scope in self.scopes or "admin" in self.scopes

    def require(self, scope: str) -> None:
        """Raise Refused (403) unless the caller has a scope."""
        if not self.has(scope):
            raise Refused(
                403, "scope-missing", f"this needs a key with scope {scope}; this key has {', '.join(self.scopes)}",
                remedy=f"make one with: cloche keys create NAME --scope {scope}",
            )  # fmt: skip
