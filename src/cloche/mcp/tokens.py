"""Bearer tokens that the operator wrote down: compared in constant time, never logged."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from mcp.server.auth.provider import AccessToken

from cloche.core.errors import InvalidRequest

FEWEST_CHARS = 16


class StaticTokens:
    """Verify tokens against a list. Each is a client of its own. Raises InvalidRequest for one that is short."""

    def __init__(self, tokens: Sequence[str]):
        for token in tokens:
            if len(token) < FEWEST_CHARS or not token.isascii() or any(char.isspace() for char in token):
                raise InvalidRequest(
                    f"a token has at least {FEWEST_CHARS} ASCII characters and no blanks; "
                    "make one with: python3 -c 'import secrets; print(secrets.token_urlsafe(32))'"
                )
        self._digests = [hashlib.sha256(token.encode()).digest() for token in tokens]

    @property
    def count(self) -> int:
        """Return how many different ones there are."""
        return len(set(self._digests))

    async def verify_token(self, token: str) -> AccessToken | None:
        """Return whose token it is, None for nobody's. Every known token is looked at, whichever fits."""
        digest = hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
        found = None
        for known in self._digests:
            if hmac.compare_digest(known, digest):
                found = known
        if found is None:
            return None
        return AccessToken(token="", client_id=found.hex()[:16], scopes=[])
