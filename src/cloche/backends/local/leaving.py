"""Helpers that are on their way out, after the last run of a sandbox.

When the end of a throwaway sandbox's run is reported, its code is dead and its streams are read. What is left to do,
the helper does alone: see the reaper out and remove the control group. Nobody waits for that but the end of this
process; the next start takes note of it.
"""

from __future__ import annotations

import atexit
import logging
import os
import subprocess
import threading
import time

from cloche.jail.remains import clear_remains
from cloche.jail.spec import Spec

from ..noting import noted

log = logging.getLogger("cloche.local")
LEFT_EMPTY = "what is left of a helper stays, which is named after us and empty"
PATIENCE_S, NAP_S = 10.0, 0.002
_helpers: list[tuple[subprocess.Popen[bytes], Spec]] = []
_lock = threading.Lock()


def add(process: subprocess.Popen[bytes], spec: Spec) -> None:
    """Take over a helper that was told to end."""
    with _lock:
        _helpers.append((process, spec))


def collect() -> bool:
    """Take note of those that have ended, and clear up after one that did not end by itself; tell whether all have."""
    with _lock:
        waiting = _helpers[:]
        _helpers.clear()
    still_here = [(process, spec) for process, spec in waiting if process.poll() is None]
    with _lock:
        _helpers.extend(still_here)
    for process, spec in waiting:
        if process.returncode not in (None, 0):
            with noted(log, LEFT_EMPTY, OSError):
                clear_remains(spec)
    return not still_here


def _see_all_out() -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not collect() and time.monotonic() < deadline:
        time.sleep(NAP_S)


def _forget_after_fork() -> None:
    global _lock
    _lock = threading.Lock()
    _helpers.clear()


os.register_at_fork(after_in_child=_forget_after_fork)
atexit.register(_see_all_out)
