"""`cloche node` whose steps with a network run outside (see `serve_outside`), and which looks often what it has."""

from __future__ import annotations

from cloche.cli import main
from cloche.node import digests

from . import serve_outside as serve_outside  # noqa: PLC0414 - for what its import changes

digests.LOOK_EVERY_S = 0.5
if __name__ == "__main__":
    main()
