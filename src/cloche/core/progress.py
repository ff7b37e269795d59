"""Work that takes long enough to be watched: a backend tells, whoever put a watcher here shows it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Say how far a piece of work is, in bytes; a `total` of 0 is not known yet. The last one has `is_over`."""

    what: str
    done: int = 0
    total: int = 0
    is_over: bool = False


Watcher = Callable[[Progress], None]
watchers: list[Watcher] = []


def tell(progress: Progress) -> None:
    """Tell every watcher; may be called in any thread."""
    for watch in tuple(watchers):
        watch(progress)
