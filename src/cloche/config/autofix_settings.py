"""The settings of auto-fix: a model's endpoint, and budgets."""

from __future__ import annotations

import os

from cloche.core.record import dataclass, field
from cloche.core.remote import HiddenText

# OPENAI_API_KEY is only sent to this host, over TLS.
OPENAI_HOST, OPENAI_KEY = "api.openai.com", "OPENAI_API_KEY"


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoFixSettings:
    """The model endpoint of auto-fix, and its limits: seconds and tokens of all rounds together."""

    base_url: str = ""
    model: str = ""
    api_key: HiddenText = field(default=HiddenText(), repr=False)
    max_rounds: int = 4
    token_budget: int = 100_000
    time_budget_s: float = 300.0

    def key_for_endpoint(self) -> str:
        """Return the key, or, if none is set and the endpoint is OpenAI's, the value of OPENAI_API_KEY."""
        if self.api_key or not _is_openai(self.base_url):
            return self.api_key.reveal()
        return os.environ.get(OPENAI_KEY, "")


def _is_openai(base_url: str) -> bool:
    from urllib.parse import urlsplit

    try:
        url = urlsplit(base_url)
    except ValueError:
        return False  # the request refuses an invalid address
    return url.scheme == "https" and url.hostname == OPENAI_HOST
