"""The sentence of what is refused in the network: what is not allowed, why, and what would allow it. Pure."""

from __future__ import annotations

ALLOW_IT = "allow it with network_allow"


def not_allowed(what: str, why: str, remedy: str) -> str:
    """Return the sentence; `why` is the rule or the fact behind it."""
    return f"{what} is not allowed; {why}; {remedy}"


def allowed_by(rule: str) -> str:
    """Return the remedy of a refusal that a rule would lift."""
    return f'{ALLOW_IT} "{rule}"'
