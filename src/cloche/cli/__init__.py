"""The command line: a thin door. `main` is the console script."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from typing import Any, NoReturn

COMES_BACK = ("microsandbox._microsandbox",)
EXIT_UNFLUSHED = 120


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
    try:
        app(prog_name="cloche")
    except SystemExit as end:
        if any(name in sys.modules for name in COMES_BACK):
            leave(end.code)
        raise


def leave(code: object) -> NoReturn:
    """End the process as the interpreter does, with its threads, exit functions and streams, but do not take it apart.

    A library with threads of its own may come back into it meanwhile; Rust's aborts the process then.
    """
    this: Any = threading
    this._shutdown()
    ending: Any = atexit
    ending._run_exitfuncs()
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # nobody is there to be told
            code = code or EXIT_UNFLUSHED
    os._exit((code or 0) & 0xFF)


def _occupy_standard_streams() -> None:
    """Put /dev/null where a stream is closed: else the next descriptor opened gets the guest's output."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
            mode, name = ("r", "stdin") if fd == 0 else ("w", ("stdout", "stderr")[fd - 1])
            setattr(sys, name, open(fd, mode, closefd=False))  # noqa: SIM115 - as long as the process
