"""The section `autofix` of configuration: which endpoint may be sent code, with which key, and for how long."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from cloche.core.errors import InvalidRequest
from cloche.core.units import parse_count, parse_duration

MOST_ROUNDS = 100
# Whose own variable may be taken for a key: that of this host alone, so that it goes nowhere else.
OPENAI_HOST, OPENAI_KEY = "api.openai.com", "OPENAI_API_KEY"


class Secret(str):
    """Be text that shows itself to nobody; `reveal` is the only way to it."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "(hidden)" if len(self) else "none"

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def reveal(self) -> str:
        """Return the text."""
        return "".join(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoFixSettings:
    """Hold whom auto-fix asks and what it may cost: seconds and tokens, of all rounds together."""

    base_url: str = ""
    model: str = ""
    api_key: Secret = field(default=Secret(), repr=False)
    max_rounds: int = 4
    token_budget: int = 100_000
    time_budget_s: float = 300.0

    def key_for_endpoint(self) -> str:
        """Return the key, that of the environment's OPENAI_API_KEY where none is set and the endpoint is OpenAI's."""
        if self.api_key or urlsplit(self.base_url).hostname != OPENAI_HOST:
            return self.api_key.reveal()
        return os.environ.get(OPENAI_KEY, "")

    def as_rows(self) -> dict[str, str]:
        """Return each key with its value as text; of the key only whether there is one."""
        return {
            "autofix.base_url": self.base_url or "none",
            "autofix.model": self.model or "none",
            "autofix.api_key": "set (hidden)" if self.api_key else "none",
            "autofix.max_rounds": str(self.max_rounds),
            "autofix.token_budget": str(self.token_budget),
            "autofix.time_budget": f"{self.time_budget_s:g}s",
        }


def parse_rounds(value: object, *, name: str) -> int:
    """Return how often a model may be asked."""
    rounds = parse_count(value, name=name)
    if rounds > MOST_ROUNDS:
        raise InvalidRequest(f"{name}: {rounds} rounds are more than the most, {MOST_ROUNDS}")
    return rounds


def parse_tokens(value: object, *, name: str) -> int:
    """Return a number of tokens."""
    return parse_count(value, name=name)


def _text(value: object, *, name: str) -> str:
    if not isinstance(value, str) or not value.strip() or not value.strip().isprintable():
        raise InvalidRequest(f"{name}: this is no text of one line")
    return value.strip()


def _key(value: object, *, name: str) -> Secret:
    if not isinstance(value, str) or not value.strip().isascii() or not value.strip().isprintable():
        raise InvalidRequest(f"{name}: this is no key; it is one word of plain characters")
    return Secret(value.strip())


FIELDS: Mapping[str, tuple[str, Callable[..., Any]]] = {
    "base_url": ("base_url", _text),
    "model": ("model", _text),
    "api_key": ("api_key", _key),
    "max_rounds": ("max_rounds", parse_rounds),
    "maxRounds": ("max_rounds", parse_rounds),
    "token_budget": ("token_budget", parse_tokens),
    "time_budget": ("time_budget", parse_duration),
}
NUMBERS = ("autofix.max_rounds", "autofix.token_budget", "autofix.time_budget")
WORDS = tuple(dict.fromkeys(f"autofix.{word}" for word, _ in FIELDS.values()))


def read_autofix(value: object, *, name: str) -> Mapping[str, Any]:
    """Read the section."""
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{name}: this is not a mapping of names to values")
    words: dict[str, Any] = {}
    for key, item in value.items():
        if key not in FIELDS:
            raise InvalidRequest(f"{name}: unknown key {str(key)[:80]!r}; known keys: {', '.join(FIELDS)}")
        words.update(read_one(item, name=f"{name}.{key}", key=key))
    return words


def read_one(value: object, *, name: str, key: str) -> Mapping[str, Any]:
    """Read one key of the section, as a variable of the environment gives it too."""
    word, read = FIELDS[key]
    return {f"autofix.{word}": read(value, name=name)}


def settings_of(values: Mapping[str, Any]) -> AutoFixSettings:
    """Return the section's settings from the words that hold; `time_budget` is in seconds."""
    plain = {word.partition(".")[2]: value for word, value in values.items()}
    return AutoFixSettings(time_budget_s=plain.pop("time_budget"), **plain)


def defaults() -> dict[str, Any]:
    """Return what holds where nobody says anything, by word."""
    held = AutoFixSettings()
    return {
        f"autofix.{word}": held.time_budget_s if word == "time_budget" else getattr(held, word)
        for word in (name.partition(".")[2] for name in WORDS)
    }
