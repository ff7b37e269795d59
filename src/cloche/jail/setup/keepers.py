"""Start keepers: the first one of this process as a fresh interpreter, further ones as forks of one.

A fork takes a tenth of the time, and shares most of its memory with the others. The process that forks keepers does
nothing else, ends with this one, and leaves them behind.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import threading

from .. import messages
from .launch import start_keeper, start_keeper_forks

log = logging.getLogger("cloche.live")
END_S = 5.0
# The process that forks keepers, and our link to it.
_forks: tuple[subprocess.Popen[bytes], socket.socket] | None = None
_has_started = False
_lock = threading.RLock()  # held also while this process is forked, so that no child has half of it


def start() -> tuple[subprocess.Popen[bytes] | None, socket.socket]:
    """Start a keeper; return its process, if it is a child of this one, and our end of its socket. Raises OSError."""
    global _has_started
    with _lock:
        is_first, _has_started = not _has_started, True
        if not is_first:
            try:
                return None, _fork()
            except OSError as error:
                log.warning("no keeper can be forked: %s", error)
                end()
    return start_keeper()


def _fork() -> socket.socket:
    """Return our end of the socket of a new fork. Raises OSError."""
    global _forks
    if _forks is not None and _forks[0].poll() is not None:
        end()
    if _forks is None:
        _forks = start_keeper_forks()
        _forks[1].setblocking(False)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        try:
            messages.send(_forks[1].fileno(), "fork", {}, [theirs.fileno()])
        except BaseException:
            ours.close()
            raise
    return ours


def end() -> None:
    """End the process that forks keepers; the next keeper but one starts another."""
    global _forks, _has_started
    with _lock:
        (forks, _forks), _has_started = (_forks, None), False
    if forks is not None:
        process, link = forks
        link.close()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _forget() -> None:
    """Close the link in a forked child, whose it is not."""
    global _forks, _has_started, _lock
    _lock = threading.RLock()
    if _forks is not None:
        _forks[1].close()
        _forks[0].returncode = 0
    _forks, _has_started = None, False


def _wait_for_start() -> None:
    _lock.acquire()


def _go_on() -> None:
    _lock.release()


os.register_at_fork(before=_wait_for_start, after_in_parent=_go_on, after_in_child=_forget)
