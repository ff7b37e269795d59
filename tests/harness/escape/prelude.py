"""The first lines of every attempt in Python: system calls by number, and the words the judge listens for.

This text is put before the attempt's own and runs wherever the attempt runs, so it imports nothing of ours. `T` tells
where the canaries are; their secrets are told to nobody.
"""

import ctypes
import json
import os
import re
import sys
import traceback


class Told(dict):
    """Say so when a holder does not hold what is asked for: its own walls kept it from that."""

    def __missing__(self, name):
        contained(f"there is no {name} to be reached")


T = json.loads(sys.argv[1])
T.update({owner: Told(T[owner]) for owner in ("host", "neighbour")})
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.syscall.restype = ctypes.c_long
EPERM, EACCES, ENOSYS = 1, 13, 38


# What the host finds this process by, and its children: the command line is the attempt's own only outside.
LIBC.prctl(15, T["token"][-15:].encode(), 0, 0, 0)
LINK = -1  # the one descriptor that a cell has besides those of a program: see cells.py
leave = os._exit


def say(word, detail):
    """Give the verdict and end at once, whichever process or thread this is."""
    os.write(1, f"{word} {detail}\n".encode(errors="replace"))
    leave(0)


def escaped(detail=""):
    """Claim a success."""
    say("ESCAPED", detail)


def contained(why):
    """Admit a refusal."""
    say("CONTAINED", why)


def saw(data):
    """Show each canary found in what was read; the judge knows which are real."""
    data = data.encode(errors="surrogateescape") if isinstance(data, str) else data
    for canary in sorted(set(re.findall(rb"canary-[0-9a-f]{32}", data))):
        os.write(1, b"SAW " + canary + b"\n")


def is_of(owner, pid):
    """Say whether a process is the holder of an owner's canaries, by its name or command line."""
    mark = T[owner]["mark"]
    try:
        with open(f"/proc/{pid}/comm") as name, open(f"/proc/{pid}/cmdline", "rb") as line:
            words = line.read()
            return name.read().strip() == mark[-15:] or (mark.encode() in words and T["token"].encode() not in words)
    except OSError:
        return False


def syscall(number, *arguments):
    """Call the kernel; raise OSError when it refuses."""
    plain = (bytes, ctypes.Array, ctypes.Structure)
    passed = [a if isinstance(a, plain) else ctypes.c_void_p(a & (1 << 64) - 1) for a in arguments]
    result = LIBC.syscall(ctypes.c_long(number), *passed)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def reaches(number, *arguments):
    """Claim a success when the call gets past every gate, even if the kernel then finds its arguments wrong."""
    try:
        escaped(f"system call {number} returned {syscall(number, *arguments)}")
    except OSError as error:
        if error.errno not in (EPERM, EACCES, ENOSYS):
            escaped(f"system call {number} reached the kernel: {error}")
        raise


def _ended(kind, error, trace):
    """A refusal by the kernel is a containment; any other exception is a broken attempt and no verdict at all."""
    refusals = "can't start new thread", "not allowed to raise maximum limit"
    if issubclass(kind, OSError | MemoryError) or str(error) in refusals:
        contained(f"{kind.__name__}: {error}")
    traceback.print_exception(kind, error, trace)
    sys.stderr.flush()
    leave(70)


sys.excepthook = _ended
