"""Make a server: its sandbox, its approver, its tools, its bearer tokens.

Tokens are the operator's, compared in constant time, and never logged.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from os import PathLike
from typing import Unpack

from mcp.server.auth.provider import AccessToken
from mcp.server.auth.settings import AuthSettings
from mcp.server.mcpserver import MCPServer
from mcp.server.request_state import RequestStateSecurity
from pydantic import AnyHttpUrl

from cloche import __version__
from cloche.agent.approval import PATIENCE_S, ApprovalEvent, Approver, check_patience
from cloche.agent.interpreters import MOST_INTERPRETERS, Room, Share
from cloche.agent.toolbox import Toolbox
from cloche.config.options import SandboxOptions
from cloche.core.errors import InvalidRequest

from .approvals import NotedStates, Spent, answered
from .sessions import IDLE_S, MOST_SESSIONS, Sessions, quota
from .table import DESCRIPTION, INSTRUCTIONS, NAME, TITLE, catalog_rows
from .tools import Serving, offered, session_tools

FEWEST_CHARS = 16


class StaticTokens:
    """Verify tokens against a list. Each is a separate client. Raises InvalidRequest for a short one."""

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
        """Return the client of a token, None for an unknown one. Every known token is compared, for constant time."""
        digest = hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
        matched = None
        for known in self._digests:
            if hmac.compare_digest(known, digest):
                matched = known
        if matched is None:
            return None
        return AccessToken(token="", client_id=matched.hex()[:16], scopes=[])


def create_server(
    *,
    approve: Approver | None = None,
    patience_s: float = PATIENCE_S,
    roots: Mapping[str, str | PathLike[str]] | None = None,
    tools: Sequence[str] | None = None,
    tokens: Sequence[str] = (),
    most_sessions: int = MOST_SESSIONS,
    idle_s: float = IDLE_S,
    interpreters: int = MOST_INTERPRETERS,
    is_single_client: bool = False,
    on_event: Callable[[ApprovalEvent], None] = lambda _: None,
    workspace: str | PathLike[str] | None = None,
    workspace_disk: int | str | None = None,
    workspace_hide: Sequence[str] | None = None,
    **options: Unpack[SandboxOptions],
) -> MCPServer[Serving]:
    """Return a server that offers the tools of a tier; `create_app` serves it over HTTP, `serve_stdio` over pipes.

    `approve` decides about HIGH and CRITICAL calls; without it the client's user decides, and a client without
    elicitation is refused. Each answer may take `patience_s` seconds. `tools` are the names to offer, by default all of
    the tier. `tokens` are the bearer tokens that HTTP requests must have one of. At most `most_sessions` workspaces are
    open at once, with several tokens an equal share of them for each; a client's unused one is closed after `idle_s`
    seconds. In them `interpreters` go on between calls, at most so many at once in all; above that the least recently
    used one is ended, and so is one unused for `idle_s` seconds. With 0 every call begins anew. The other keywords are
    those of `Toolbox`. Raises InvalidRequest for settings that contradict each other.
    """
    patience_s = check_patience(patience_s)
    if interpreters:
        Room(most=interpreters, idle_s=idle_s)  # raises for what is no number now, and not when it serves

    def make(share: bool | Share, *, lives: bool = True) -> Toolbox:
        approver = answered if approve is None else approve
        return Toolbox(
            approve=approver, patience_s=patience_s, roots=roots, on_event=on_event, interpreters=share,
            live=None if lives or workspace is not None else False, workspace=workspace,
            workspace_disk=workspace_disk, workspace_hide=workspace_hide, **options,
        )  # fmt: skip

    @asynccontextmanager
    async def lifespan(_: MCPServer[Serving]) -> AsyncIterator[Serving]:
        pool = Room(most=interpreters, idle_s=idle_s) if interpreters else None

        def make_for(owner: str | None, is_kept: bool) -> Toolbox:
            if not is_kept:  # one call, for which no machine need be started
                return make(False, lives=False)
            return make(pool.share_of(owner) if pool is not None else False)

        most_each = quota(most_sessions, len(set(tokens)))
        async with Sessions(make_for, most=most_sessions, idle_s=idle_s, most_each=most_each) as sessions:
            yield Serving(
                sessions=sessions, spent=Spent(patience_s), asks_client=approve is None, patience_s=patience_s,
                is_single_client=is_single_client,
            )  # fmt: skip

    verifier = StaticTokens(tokens) if tokens else None
    return MCPServer(
        NAME,
        title=TITLE,
        description=DESCRIPTION,
        instructions=INSTRUCTIONS,
        version=__version__,
        tools=[*(offered(tool, row) for tool, row in catalog_rows(make(bool(interpreters)), tools)), *session_tools()],
        log_level="WARNING",
        lifespan=lifespan,
        request_state_security=RequestStateSecurity(codec=NotedStates([os.urandom(32)]), ttl=patience_s),
        token_verifier=verifier,
        auth=_auth() if verifier else None,
    )


def _auth() -> AuthSettings:
    """Return the protocol package's settings for tokens without an issuer: no metadata is served."""
    return AuthSettings(issuer_url=AnyHttpUrl("http://localhost"), resource_server_url=None)
