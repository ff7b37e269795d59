"""Run a command and adopt what is orphaned below it, as a service manager does: nothing of it outlives this.

A suite of tests looks for what it left behind among the orphans that go where its own go (tests/leftovers.py), so
suites of one user that run beside each other find nothing of one another's.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
PATIENCE_S = 60


def main(command: list[str]) -> int:
    """Return the exit code of a command, after all that it started has ended. Signals to stop are passed on."""
    libc = ctypes.CDLL(None, use_errno=True)
    for option, value in ((PR_SET_CHILD_SUBREAPER, 1), (PR_SET_PDEATHSIG, signal.SIGTERM)):
        if libc.prctl(option, value, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), f"prctl({option}) failed")
    # A group of its own hears a Ctrl-C at the terminal once, from us.
    child = os.posix_spawnp(command[0], command, os.environ, setpgroup=0)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: os.killpg(child, number))
    while True:
        ended, status = os.waitpid(-1, 0)
        if ended == child:
            break
    _end_the_others()
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _end_the_others() -> None:
    """Kill what is left; the command has said that it is, if that was its task."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        for one in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
            with contextlib.suppress(OSError):
                os.kill(int(one), signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.02)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
