"""MIME bundles as JSON can hold them."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MAX_DEPTH = 100  # of metadata; the caller reads no frame that is twice as deep
TOO_DEEP = 1 << 30


def as_text(data: dict[str, Any]) -> dict[str, Any]:
    """Return a bundle that JSON can hold: bytes become base64, as notebooks have it."""
    if not any(isinstance(content, bytes) for content in data.values()):
        return data
    import base64

    return {
        mime: base64.b64encode(content).decode("ascii") if isinstance(content, bytes) else content
        for mime, content in data.items()
    }


def parts_of(value: Any) -> int:
    """Return of how many lists, objects and members JSON is, or `TOO_DEEP`: the caller reads only so many."""
    level, parts = [value], 0
    for _ in range(MAX_DEPTH):
        level = [one for one in level if isinstance(one, (dict, list))]
        if not level:
            return parts
        parts += sum(1 + len(one) for one in level)
        level = [inner for one in level for inner in (one.values() if isinstance(one, dict) else one)]
    return TOO_DEEP
