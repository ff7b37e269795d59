"""The user of a request to envd: the name in its Basic authentication, or the template's. No password is asked for."""

from __future__ import annotations

from cloche.wire.uses import Use

from ..calls import Call
from ..defaults import ACCOUNT
from ..errors import E2BError
from .entries import basic_user

MOST_NAME = 256  # characters


def user_of(call: Call) -> str:
    """Return the name of a request's user. `call.use()` has looked up the sandbox."""
    own = call.row.document["e2b"] if call.row is not None else {}
    return basic_user(call) or own.get("user") or ACCOUNT


def sandbox_user(use: Use, name: str) -> str | None:
    """Return the user as sandboxes name it: None for the ordinary one. Raises E2BError (401)."""
    policy = use.sandbox.policy
    if name in (ACCOUNT, policy.account):
        return policy.account if name == policy.account else None
    if not policy.users:
        raise invalid_user(name, ": sandboxes of this server have one user")
    return name


def invalid_user(name: str, why: str = "") -> E2BError:
    """Return envd's error for a user that the sandbox does not have."""
    return E2BError(401, f"invalid username: '{name[:MOST_NAME]}'{why}")


def folder_of(path: str, user: str) -> str:
    """Return a folder as sandboxes read it: `~` is the home of its user, where relative ones begin. Raises E2BError."""
    if path == "~" or path.startswith(("/", "~/")):
        return path
    if path.startswith("~"):
        why = "cannot expand user-specific home dir"
        raise E2BError(400, f"failed to expand path '{path[:4096]}' for user '{user}': {why}")
    return f"~/{path}" if path else "~"


def home_of(user: str) -> str:
    """Return the home of an account, as far as it is known outside."""
    return "/root" if user == "root" else f"/home/{user}"
