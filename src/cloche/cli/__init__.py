"""The command line: a thin door. `main` is the console script."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the `cloche` command and exit with its code."""
    _occupy_standard_streams()
    from cloche.runtime.audit import switch_on

    from .app import app
    from .exits import say_losses
    from .skill_verbs import skill

    app.add_typer(skill, name="skill")
    switch_on("cli")
    say_losses()
    app(prog_name="cloche")


def _occupy_standard_streams() -> None:
    """Put /dev/null where a stream is closed: else the next descriptor opened gets the guest's output."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
            mode, name = ("r", "stdin") if fd == 0 else ("w", ("stdout", "stderr")[fd - 1])
            setattr(sys, name, open(fd, mode, closefd=False))  # noqa: SIM115 - as long as the process
