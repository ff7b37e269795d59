"""Who may read or write a file by `/files`: whoever has the sandbox's token, or a URL that was signed with it.

A signature is `v1_` and the SHA-256 of `PATH:read|write:USER:TOKEN[:EXPIRATION]`, in base64 without its padding. A URL
that names no sandbox is for the one whose token fits: tokens of all living ones are tried.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import re
import time
from collections import OrderedDict
from collections.abc import Sequence

from cloche.core.record import dataclass
from cloche.records import sandboxes as records
from cloche.records.tables import DEFAULT_PROJECT
from cloche.serving.http import SLOW_BODY

from .. import states
from ..calls import E2B, TOKEN_HEADER, Call, e2b_id
from ..errors import E2BError
from ..target import ENVD, Target

READ, WRITE = "read", "write"
UNAUTHORIZED = 401
LIVING = (states.RUNNING, states.PAUSED)
INVALID = "invalid signature"
MOST_SIGNATURE = 128
MOST_FOUND = 4096
LISTED_S = 0.05  # how old the list of living sandboxes may be where none of them fits
IS_EXPIRATION = re.compile(r"-?[0-9]{1,18}").fullmatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Signed:
    """Hold what a URL for `/files` says about itself."""

    path: str
    operation: str
    user: str
    signature: str | None
    expiration: int | None

    def fits(self, token: str) -> bool:
        """Tell whether the signature was made with a token, in a time that does not depend on where it differs."""
        words = [self.path, self.operation, self.user, token]
        if self.expiration is not None:
            words.append(str(self.expiration))
        digest = hashlib.sha256(":".join(words).encode("utf-8", "surrogatepass")).digest()
        expected = b"v1_" + base64.b64encode(digest).rstrip(b"=")
        return hmac.compare_digest(expected, (self.signature or "").encode("utf-8", "surrogatepass"))

    def check_time(self) -> None:
        """Raise E2BError (401) for a signature whose time is over."""
        if self.expiration is not None and self.expiration < int(time.time()):
            raise E2BError(UNAUTHORIZED, "signature is already expired")


def signed(call: Call, operation: str) -> Signed:
    """Return what the URL of a request says. Raises E2BError (400)."""
    query = call.request.query_params
    expiration = query.get("signature_expiration")
    if expiration is not None and IS_EXPIRATION(expiration) is None:
        raise E2BError(400, "Invalid format for parameter signature_expiration: give seconds since 1970")
    return Signed(
        path=query.get("path", ""), operation=operation, user=query.get("username", ""),
        signature=query.get("signature"), expiration=None if expiration is None else int(expiration),
    )  # fmt: skip


async def authorize(call: Call, operation: str) -> Call:
    """Return the call for the sandbox that it may work on. Raises E2BError (401)."""
    url = signed(call, operation)
    if call.target is None:
        call = await _with_target(call, url)
    assert call.target is not None  # noqa: S101 - it was found
    token, sent = call.e2b.access_token(call.target.sandbox_id), call.request.headers.get(TOKEN_HEADER, "")
    if sent:
        if not hmac.compare_digest(sent.encode(), token.encode()):
            raise E2BError(UNAUTHORIZED, "access token present in header but does not match")
    elif url.signature is None:
        raise E2BError(UNAUTHORIZED, "missing signature query parameter")
    elif not url.fits(token):
        raise E2BError(UNAUTHORIZED, INVALID)
    else:
        url.check_time()
    call.request.scope[SLOW_BODY] = True
    return call


async def _with_target(call: Call, url: Signed) -> Call:
    """Return the call with the sandbox whose token was used. Raises E2BError (401)."""
    sent = call.request.headers.get(TOKEN_HEADER, "")
    if not sent and url.signature is None:
        raise E2BError(UNAUTHORIZED, "missing signature query parameter")
    if len(sent) > MOST_SIGNATURE or len(url.signature or "") > MOST_SIGNATURE:
        raise E2BError(UNAUTHORIZED, INVALID)
    finder: Finder = call.e2b.parts.setdefault("signatures", Finder(call.e2b))
    sandbox_id = await finder.find(url, sent)
    if sandbox_id is None or not await _lives(call, sandbox_id):
        raise E2BError(UNAUTHORIZED, INVALID)
    return Call(e2b=call.e2b, request=call.request, target=Target(sandbox_id=sandbox_id, port=ENVD))


async def _lives(call: Call, sandbox_id: str) -> bool:
    try:
        return states.state_of(await call.facts(sandbox_id, DEFAULT_PROJECT)) in LIVING
    except E2BError:
        return False


class Finder:
    """Find the sandbox whose token made a signature, or is the one that was sent."""

    def __init__(self, e2b: E2B):
        self._e2b = e2b
        self._found: OrderedDict[Signed | str, str] = OrderedDict()
        self._living: Sequence[tuple[str, str]] = ()  # ids and tokens
        self._listed_at = float("-inf")
        self._turn = asyncio.Lock()

    async def find(self, url: Signed, sent: str) -> str | None:
        """Return the sandbox's id; None for no living one."""
        key = sent or url
        if key in self._found:
            self._found.move_to_end(key)
            return self._found[key]
        listed_at = self._listed_at
        sandbox_id = await asyncio.to_thread(self._match, url, sent)
        if sandbox_id is None:
            await self._list(listed_at)
            sandbox_id = await asyncio.to_thread(self._match, url, sent)
        if sandbox_id is not None:
            self._found[key] = sandbox_id
            while len(self._found) > MOST_FOUND:
                self._found.popitem(last=False)
        return sandbox_id

    def _match(self, url: Signed, sent: str) -> str | None:
        matching = [
            sandbox_id
            for sandbox_id, token in self._living
            if (hmac.compare_digest(token.encode(), sent.encode()) if sent else url.fits(token))
        ]
        return matching[0] if matching else None

    async def _list(self, unless_after: float) -> None:
        """List the living sandboxes, unless that was just done: for all requests that wait for it together."""
        async with self._turn:
            if self._listed_at > unless_after or time.monotonic() - self._listed_at < LISTED_S:
                return
            rows = await asyncio.to_thread(self._read)
            self._living, self._listed_at = rows, time.monotonic()

    def _read(self) -> Sequence[tuple[str, str]]:
        with self._e2b.service.database.reading() as session:
            living = [facts for facts in records.living(session) if "e2b" in facts.document]
        ids = [e2b_id(facts.id) for facts in living if states.state_of(facts) in LIVING]
        return [(sandbox_id, self._e2b.access_token(sandbox_id)) for sandbox_id in ids]
