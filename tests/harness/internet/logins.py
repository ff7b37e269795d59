"""A token server that rotates: each refresh token is good once, and one that comes again ends the whole login.

It answers requests with a `grant_type`, as the providers of coding agents do, and tells its own state at `/state`.
"""

from __future__ import annotations

import base64
import json
import threading
import time
from typing import Any
from urllib.parse import parse_qsl

from .web import Request, Response

ACCESS, REFRESH = "sk-ant-oat01-AccessOfTheLogin0123456789", "sk-ant-ort01-RefreshOfTheLogin9876543"
SCOPES = "user:inference user:profile user:sessions:claude_code"
ACCOUNT = {"uuid": "0f0e0d0c-0000-4000-8000-000000000001", "email_address": "me@good.example"}
CLAIMS = {"email": "me@good.example", "https://api.openai.com/auth": {"chatgpt_account_id": "account-1"}}


class Logins:
    """Hold what a token server knows. `wait_s` is how long it takes for an answer to a refresh, which counts before.

    If it `has_ended`, the access token is good no more.

    With `is_web` the access token is a web token, and comes with another one about its user.
    """

    def __init__(self, *, is_web: bool = False) -> None:
        self.lock, self.is_web = threading.Lock(), is_web
        self.forget()

    def forget(self) -> None:
        """Begin anew."""
        self.number, self.refreshes, self.wait_s, self.is_revoked, self.has_ended = 0, 0, 0.0, False, False
        self.uses: list[bool] = []

    @property
    def tokens(self) -> dict[str, str]:
        """Return the tokens of now."""
        refresh = {"refresh_token": f"{REFRESH}{self.number:03}"}
        if not self.is_web:
            return {"access_token": f"{ACCESS}{self.number:03}", **refresh}
        claims = {**CLAIMS, "exp": 1_700_000_000, "number": self.number}
        return {"access_token": web_token(claims), "id_token": web_token({**claims, "aud": "me"}), **refresh}

    def exchange(self, asked: dict[str, Any]) -> dict[str, Any] | None:
        """Return the answer to a login or a refresh; None for a refused one."""
        with self.lock:
            if asked["grant_type"] == "refresh_token":
                if self.is_revoked or asked.get("refresh_token") != self.tokens["refresh_token"]:
                    self.is_revoked = True
                    return None
                self.refreshes += 1
            else:
                self.is_revoked = False
            self.number, self.has_ended = self.number + 1, False
            told = {**self.tokens, "expires_in": 28800, "token_type": "Bearer", "scope": SCOPES, "account": ACCOUNT}
        if asked["grant_type"] == "refresh_token":
            time.sleep(self.wait_s)
        return told

    def is_good(self, authorization: str) -> bool:
        """Tell whether a request has the access token of now."""
        is_over = self.is_revoked or self.has_ended
        return not is_over and authorization == f"Bearer {self.tokens['access_token']}"


STATE, WEB_STATE = Logins(), Logins(is_web=True)


def _json(told: object, status: str = "200 OK") -> Response:
    return Response(json.dumps(told).encode(), status, {"Content-Type": "application/json"})


def token_server(request: Request) -> Response:
    """Answer a request for tokens, or to revoke them; set and tell the state."""
    state = STATE if request.host == "platform.claude.com" else WEB_STATE
    if request.path == "/state":
        if request.body:
            vars(state).update(json.loads(request.body))
        return _json({name: vars(state)[name] for name in ("number", "refreshes", "is_revoked", "uses")})
    asked = _asked(request)
    if request.path.endswith("/revoke"):
        state.is_revoked = state.is_revoked or asked.get("token") in state.tokens.values()
        return _json({})
    told = state.exchange(asked) if "grant_type" in asked else None
    return _json({"error": "invalid_grant"}, "400 Bad Request") if told is None else _json(told)


def _asked(request: Request) -> dict[str, Any]:
    if request.body.startswith(b"{"):
        return dict(json.loads(request.body))
    return dict(parse_qsl(request.body.decode()))


def account(request: Request) -> Response:
    """Tell who has an access token, at any path: 401 without that of now."""
    is_good = STATE.is_good(request.headers.get("authorization", ""))
    STATE.uses.append(is_good)
    if not is_good:
        return _json({"error": "the token is not valid"}, "401 Unauthorized")
    organization = {"uuid": ACCOUNT["uuid"], "organization_type": "claude_max", "rate_limit_tier": "default_claude_max"}
    return _json({"account": {**ACCOUNT, "email": ACCOUNT["email_address"]}, "organization": organization})


def web_token(claims: dict[str, Any]) -> str:
    """Return a JSON web token with a signature that nobody checks."""
    parts = [base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in ({"a": 1}, claims)]
    return ".".join([*parts, "SignatureOfTheLogin0123456789"])
