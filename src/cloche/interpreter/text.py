"""MIME bundles as JSON can hold them."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def as_text(data: dict[str, Any]) -> dict[str, Any]:
    """Return a bundle that JSON can hold: bytes become base64, as notebooks have it."""
    if not any(isinstance(content, bytes) for content in data.values()):
        return data
    import base64

    return {
        mime: base64.b64encode(content).decode("ascii") if isinstance(content, bytes) else content
        for mime, content in data.items()
    }
