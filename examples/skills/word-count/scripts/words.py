"""Take texts apart."""

import re
from collections import Counter


def words_of(text: str, common: set[str]) -> Counter[str]:
    """Return how often each word is there, common ones left out."""
    return Counter(word for word in re.findall(r"[a-z']+", text.lower()) if word not in common)
