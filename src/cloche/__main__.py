"""`python -m cloche` is the `cloche` command."""

from __future__ import annotations

from .cli import main

main()
