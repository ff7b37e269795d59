"""`cloche gc`: remove what processes that died left on engines of this host."""

from __future__ import annotations

import json

from cloche.core.plain import plain
from cloche.runtime.factory import clear_remains


def clear(*, as_json: bool) -> int:
    """Print a line for everything that was removed."""
    found = clear_remains()
    if as_json:
        print(json.dumps({backend: list(lines) for backend, lines in found.items()}, indent=2))
        return 0
    for backend, lines in found.items():
        for line in lines:
            print(plain(f"{backend}: removed {line}"))
    if not any(found.values()):
        print("nothing to remove")
    return 0
