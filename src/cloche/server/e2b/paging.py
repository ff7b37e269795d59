"""Pages of the lists of templates, snapshots and secrets."""

from __future__ import annotations

from .calls import Call
from .errors import E2BError

MOST_LIMIT, LIMIT = 100, 100


def page_of(call: Call) -> tuple[int, str | None]:
    """Return the limit and the token of a list. Raises E2BError (400)."""
    query = call.request.query_params
    text = query.get("limit", str(LIMIT))
    if not (text.isascii() and text.isdigit() and len(text) < 5 and 1 <= int(text) <= MOST_LIMIT):
        raise E2BError(400, f"limit: {text[:20]!r} is not a number from 1 to {MOST_LIMIT}")
    token = query.get("nextToken")
    if token is not None and not (token.isascii() and len(token) <= 64):
        raise E2BError(400, "nextToken: this is not one of ours")
    return int(text), token or None
