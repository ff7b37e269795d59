"""Run a command and adopt what is orphaned below it, as a service manager does: nothing of it outlives this.

A suite of tests looks for what it left behind among the orphans that go where its own go (tests/harness/leaks.py), so
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
GRACE_S = 2.0
STOPS = frozenset({signal.SIGINT, signal.SIGTERM})
# What a command finds as it usually is, whatever an interpreter or a shell that started us in the background ignores.
USUAL = STOPS | {signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ}


def main(command: list[str]) -> int:
    """Return the exit code of a command, after all that it started has ended. Signals to stop are passed on.

    They are blocked from the first, and waited for: none is lost between the command's start and our being ready for
    it, nor just before we wait.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # whose children are ignored never hears of their end
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS | {signal.SIGCHLD})
    libc = ctypes.CDLL(None, use_errno=True)
    for option, value in ((PR_SET_CHILD_SUBREAPER, 1), (PR_SET_PDEATHSIG, signal.SIGTERM)):
        if libc.prctl(option, value, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), f"prctl({option}) failed")
    # A group of its own hears a Ctrl-C at the terminal once, from us.
    child = os.posix_spawnp(command[0], command, os.environ, setpgroup=0, setsigmask=before - STOPS, setsigdef=USUAL)
    status = _attend(child)
    _end_the_others()
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _attend(child: int) -> int:
    """Pass on what asks to stop until a child has ended, and return its status; whoever else ends is adopted."""
    while True:
        number = signal.sigwait(STOPS | {signal.SIGCHLD})
        if number != signal.SIGCHLD:
            os.killpg(child, number)
            continue
        ended = -1
        while ended != 0:  # one signal may stand for the end of many
            ended, status = os.waitpid(-1, os.WNOHANG)
            if ended == child:
                return status


def _end_the_others() -> None:
    """End what is left; the command has said that it is, if that was its task.

    Each is asked first: a holder of the escape tests (tests/harness/escape/holder.py) has message queues and segments
    that the kernel would keep.
    """
    began = time.monotonic()
    asked: set[str] = set()
    while (passed := time.monotonic() - began) < PATIENCE_S:
        for one in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
            if passed < GRACE_S and one in asked:
                continue
            asked.add(one)
            with contextlib.suppress(OSError):
                os.kill(int(one), signal.SIGTERM if passed < GRACE_S else signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.02)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
