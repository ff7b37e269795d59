"""`python -m tests.harness.other_host serve …`: the command line on what is another host by its name; needs root."""

from __future__ import annotations

import ctypes
import os
import runpy
import socket
import sys

CLONE_NEWUTS = 0x04000000

if __name__ == "__main__":
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWUTS):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    socket.sethostname("other")
    sys.argv[0] = "cloche"
    runpy.run_module("cloche", run_name="__main__")
