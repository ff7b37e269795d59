"""The logins of coding agents: one for each user and agent, which all sandboxes of the agent share.

Every sandbox of the agent has the same placeholders, in the agent's own file of credentials. The tokens are in a file
that `egress/login_server.py` opens.
"""

from __future__ import annotations

import base64
import binascii
import datetime as dt
import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from cloche.core.errors import BackendUnavailable, InvalidRequest
from cloche.core.kept_logins import KeptLogin
from cloche.core.record import dataclass, field
from cloche.core.secrets import Capture, Secret, read_text
from cloche.egress.login_file import LOG_IN_AGAIN, read_row

from .login_key import user_key
from .places import logins_folder
from .row import CodingAgent, Login

FAR_AHEAD_S = 365 * 86400
_FIELD = re.compile(r"\{([a-z_]+)\}")
_ACCOUNT = "https://api.openai.com/auth", "chatgpt_account_id"  # a claim, and a field of it


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentLogin:
    """Hold the secrets and files of a sandbox for an agent's login.

    `secrets` are captures: with a login that is kept, or of one that is made inside. `files` are texts by their paths
    in the home folder.
    """

    secrets: Mapping[str, Capture] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)

    def added_to(self, texts: Sequence[str] | None) -> Mapping[str, Secret | Capture] | None:
        """Return these with further secrets, texts of `--secret`; None for no secret at all."""
        return {**dict(map(read_text, texts or ())), **self.secrets} or None


def login_of(row: CodingAgent, *, takes_login: bool = False) -> AgentLogin:
    """Return secrets and files of a new sandbox of an agent; one that `takes_login` replaces the login by a new one.

    Raises InvalidRequest, BackendUnavailable for a login that cannot be opened. Blocks: a keyring may be asked.
    """
    login = row.login
    if login is None:
        return AgentLogin()
    name = f"{re.sub('[^A-Z0-9]', '_', row.name.upper())}_LOGIN"
    path = login_path(row.name)
    kept = None if takes_login else read_row(path)
    if kept is None and not takes_login:
        return AgentLogin(secrets={name: Capture(provider=login.provider)})
    key = user_key(makes=takes_login)
    if key is None:
        raise BackendUnavailable(
            f"the key of {path} is in a keyring that does not answer.",
            remedy=f"Unlock the keyring. {LOG_IN_AGAIN.replace('NAME', row.name)}",
        )
    capture = Capture(provider=login.provider, kept=KeptLogin(path=path, key=key.key, takes_login=takes_login))
    files = {} if kept is None else {login.file: _written(login, kept)}
    return AgentLogin(secrets={name: capture}, files=files)


def login_env(row: CodingAgent) -> Mapping[str, str]:
    """Return the variables with which an agent uses its login; none without one."""
    return row.login.env if row.login is not None and os.path.exists(login_path(row.name)) else {}


def login_path(name: str) -> str:
    """Return the path of the file of an agent's login."""
    return f"{logins_folder()}/{name}"


def login_state(name: str) -> tuple[int, str] | None:
    """Return the version of an agent's login, and when it was made or refreshed last; None without one.

    Raises InvalidRequest for one that cannot be read.
    """
    row = read_row(login_path(name))
    return None if row is None else (row["version"], row["changed_at"])


def forget_login(name: str) -> bool:
    """Remove an agent's login from this host; tell whether there was one. Its provider is not told."""
    try:
        os.unlink(login_path(name))
    except FileNotFoundError:
        return False
    return True


def _written(login: Login, kept: Mapping[str, Any]) -> str:
    """Return the agent's file of credentials, with placeholders. Raises InvalidRequest for one that lacks a field."""
    marks = kept["placeholders"]
    ends_at = kept.get("ends_at") or time.time() + FAR_AHEAD_S
    words = {
        **marks, "expires_ms": str(int(ends_at * 1000)), "now": dt.datetime.now(dt.UTC).isoformat(),
        "account_id": _account_of(marks.get("id_token", "")),
    }  # fmt: skip
    if missing := sorted({match[1] for match in _FIELD.finditer(login.template)} - set(words)):
        raise InvalidRequest(f"agent: the login has no {missing[0]}, which {login.file} needs; log in again")
    return _FIELD.sub(lambda match: json.dumps(words[match[1]])[1:-1], login.template)


def _account_of(token: str) -> str:
    """Return the account in the claims of a web token; empty without one."""
    claims = token.split(".")[1] if token.count(".") == 2 else ""
    try:
        told = json.loads(base64.urlsafe_b64decode(claims + "=" * (-len(claims) % 4)))
        return str(told[_ACCOUNT[0]][_ACCOUNT[1]])
    except (binascii.Error, ValueError, KeyError, TypeError):
        return ""
