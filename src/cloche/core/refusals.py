"""The sentence of what is refused in the network: what is not allowed, why, and what would allow it. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

ALLOW_IT = "allow it with network_allow"


def not_allowed(what: str, why: str, remedy: str) -> str:
    """Return the sentence; `why` is the rule or the fact behind it."""
    return f"{what} is not allowed; {why}; {remedy}"


def allowed_by(rule: str) -> str:
    """Return the remedy of a refusal that a rule would lift."""
    return f'{ALLOW_IT} "{rule}"'


def listed(texts: Iterable[str], count: int) -> str:
    """Join the first few of so many texts, within a bound, and say how many more there are. No other is looked at."""
    shown: list[str] = []
    for text in islice(texts, 5):
        if sum(map(len, shown)) + len(text) > 200:
            break
        shown.append(text)
    more = count - len(shown)
    if not shown:
        return f"{more} rules that are too long to list"
    return ", ".join(shown) + (f", and {more} more" if more else "")
