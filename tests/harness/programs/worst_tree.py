"""Be what is worst for the first process of a sandbox, of the kind that is named; print `up` when all is there.

It begins when it has read a line.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

SYS_EXIT = 60 if os.uname().machine == "x86_64" else 93


def rest() -> NoReturn:
    """Do nothing, until the end."""
    while True:
        time.sleep(3600)


def forked(count: int, child: Callable[[int], object]) -> None:
    """Have so many children."""
    for number in range(count):
        if not os.fork():
            child(number)
            rest()


def hide(count: int) -> None:
    """Be a chain of parents and children that run a program which nobody may read, so that nobody may look at them."""
    shutil.copy("/bin/sleep", "/tmp/hidden")
    os.chmod("/tmp/hidden", 0o111)
    reading, writing = os.pipe()
    for number in range(count):
        if not os.fork():
            continue
        os.close(writing)
        if number == 0:
            os.read(reading, 1)
            return
        os.close(reading)
        os.execv("/tmp/hidden", ["hidden", "100000"])
    os.close(writing)
    rest()


def lose_leaders(count: int) -> None:
    """Have processes whose first thread has ended, and others of them not."""
    libc = ctypes.CDLL(None)

    def lose_leader(_: int) -> None:
        threading.Thread(target=rest, daemon=True).start()
        libc.syscall(SYS_EXIT, 0)

    forked(count, lose_leader)


def processes() -> None:
    """Have many processes, of each kind that takes long to look at."""
    forked(150, lambda _: os._exit(0))
    forked(150, lambda _: os.kill(os.getpid(), signal.SIGSTOP))
    lose_leaders(75)
    hide(150)


def listeners() -> None:
    """Listen on tens of thousands of ports."""
    reading, writing = os.pipe()

    def listen(number: int) -> None:
        held = [socket.create_server((f"127.0.{number}.1", 1024 + port)) for port in range(1000)]
        os.write(writing, b"x")
        rest_with(held)

    def rest_with(_: object) -> None:
        rest()

    forked(30, listen)
    for _ in range(30):
        os.read(reading, 1)


def storm() -> None:
    """Start and end processes, and ask for what is denied, as fast as that goes."""

    def fork_on(_: int) -> None:
        while True:
            with contextlib.suppress(OSError):
                if os.fork():
                    os._exit(0)

    def leave_behind(_: int) -> None:
        while True:
            with contextlib.suppress(OSError):
                child = os.fork()
                if not child:
                    with contextlib.suppress(OSError):
                        os.fork()
                    os._exit(0)
                os.waitpid(child, 0)

    def ask(_: int) -> None:
        libc = ctypes.CDLL(None)
        while True:
            libc.mount(b"a", b"/tmp", b"tmpfs", 0, 0)

    for kind in (fork_on, leave_behind, ask):
        forked(10, kind)


def files() -> None:
    """Have a folder with many names, and one that is deep."""
    os.mkdir("/tmp/worst")
    for number in range(20_000):
        os.close(os.open(f"/tmp/worst/{number}", os.O_CREAT | os.O_WRONLY))
    here = os.open("/tmp/worst", os.O_RDONLY)
    for _ in range(2_000):
        os.mkdir("d", dir_fd=here)
        here, above = os.open("d", os.O_RDONLY, dir_fd=here), here
        os.close(above)


KINDS = {one.__name__: one for one in (processes, listeners, storm, files)}

if __name__ == "__main__":
    sys.stdin.readline()
    KINDS[sys.argv[1]]()
    print("up", flush=True)
    rest()
