"""Show long text that others wrote in the user's pager: escaped, with Cloche's own colours alone."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from types import FrameType

from cloche.core.escape import escape

COLOURS = {"+": "\x1b[32m", "-": "\x1b[31m", "@": "\x1b[36m", "!": "\x1b[33m"}
PLAIN = "\x1b[0m"
OWN_LESS = "FRX"  # as git sets it: quit if it fits on one screen, raw colours, no clearing
_OF_LESS = ("LESSOPEN", "LESSCLOSE")  # programs that would read the text first


def page(lines: Iterable[str]) -> None:
    """Show lines in $PAGER, less or more; without a terminal, print them. A line's first character is its colour."""
    command = os.environ.get("PAGER") or next(filter(shutil.which, ("less", "more")), "")
    has_pager = bool(command) and command != "cat" and sys.stdout.isatty()
    environment = {name: value for name, value in os.environ.items() if name not in _OF_LESS}
    less = environment.setdefault("LESS", OWN_LESS)
    is_coloured = has_pager and _is_less(command) and "R" in less and not os.environ.get("NO_COLOR")
    text = "".join(f"{_shown(line, is_coloured=is_coloured)}\n" for line in lines)
    if not has_pager:
        print(text, end="")
        return
    _feed(command, environment, text.encode("utf-8", "backslashreplace"))


def _is_less(command: str) -> bool:
    return os.path.basename(command.split(maxsplit=1)[0]) == "less"


def _shown(line: str, *, is_coloured: bool) -> str:
    colour = COLOURS.get(line[:1]) if is_coloured else None
    shown = escape(line)
    return f"{colour}{shown}{PLAIN}" if colour else shown


def _feed(command: str, environment: dict[str, str], data: bytes) -> None:
    before = signal.signal(signal.SIGINT, _leave_it)  # SIG_IGN would be inherited
    try:
        pager = subprocess.Popen(["/bin/sh", "-c", command], stdin=subprocess.PIPE, env=environment)
        with suppress(BrokenPipeError):  # it was left before the end
            pager.communicate(data)
        pager.wait()
    finally:
        signal.signal(signal.SIGINT, before)


def _leave_it(_number: int, _frame: FrameType | None) -> None:
    """Leave Ctrl-C to the pager."""
