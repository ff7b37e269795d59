"""The command line: a thin door. `main` is the console script."""

from __future__ import annotations


def main() -> None:
    """Run the `cloche` command and exit with its code."""
    from .app import app

    app(prog_name="cloche")
