"""Repair by a model: a failed program and its error go to a model, and the answer is run under the same rules.

In: a request that failed, its result, a fixer (`core.fixing`). Out: the last result, and a report of each round.
`loop` has the rounds: the prompt, the budgets of tokens and time, when to stop. `endpoint` is the HTTP client of
OpenAI-compatible servers: retries, server-sent events, limits, the key. `extract` finds the program in an answer and
applies diffs.

To be kept: an answer is hostile text and bounded before it is read; it changes the code of a request and nothing else;
the key is in no message. Prompts and heuristics may be changed without asking.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .endpoint import Endpoint
    from .loop import AutoFix

__all__ = ["AutoFix", "Endpoint"]
_HOMES = {"AutoFix": "loop", "Endpoint": "endpoint"}


def __getattr__(name: str) -> object:
    """Import the home of a name when it is first used: httpx takes its time."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
