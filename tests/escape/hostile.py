"""A session's guest that obeys nobody: text for its first cell, which puts its own hands into its interpreter.

`ON_BIRTH` is what a clone does between its birth and the moment when somebody outside looks at it; `instead` leaves
out that it lets go of its parent's things. Whatever the interpreter would refuse by itself, it no longer does.
"""

from textwrap import dedent

TAKE_OVER = """
import ctypes, fcntl, os, signal, socket, struct, sys, threading, time
frame = sys._getframe()
while type(frame.f_locals.get("self")).__name__ != "Session":
    frame = frame.f_back
SESSION = frame.f_locals["self"]
del frame
FORKING = type(SESSION).__init__.__globals__["forking"]
FORKING.look_for_obstacles = lambda ours, clones: ([], [])
LET_GO = FORKING.Clone.let_go
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.syscall.restype = ctypes.c_long

def syscall(number, *arguments):
    plain = bytes, ctypes.Array
    passed = [a if isinstance(a, plain) else ctypes.c_void_p(a & (1 << 64) - 1) for a in arguments]
    result = LIBC.syscall(ctypes.c_long(number), *passed)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result

def say(frame):
    os.write(SESSION.link, len(frame).to_bytes(4, "big") + frame)

def refused(act):
    try:
        return f"worked: {act()!r}"
    except OSError as error:
        return f"refused: {error.strerror}"
"""
BIRTH = """
def let_go(self, give_up):
{before}
    LET_GO(self, {give_up})
{after}
FORKING.Clone.let_go = let_go
"""


def at_birth(before: str = "pass", after: str = "pass", give_up: str = "give_up") -> str:
    """Return a first cell whose clones do more, at their birth, than they should."""
    indented = {
        name: "\n".join(f"    {line}" for line in dedent(text).strip().splitlines())
        for name, text in {"before": before, "after": after}.items()
    }
    return TAKE_OVER + BIRTH.format(give_up=give_up, **indented)
