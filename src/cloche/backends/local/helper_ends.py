"""The ends of helpers: wait for them, reap them, and give up one that is late.

When the end of a throwaway sandbox's run is reported, its code is dead and its streams are read. The helper alone does
the remaining work: it waits for the reaper and removes the control group. Only the exit of this process waits for that;
until then, the next start reaps helpers that have ended (`collect`).

The helper keeps the clock of a run. One that is stopped (SIGSTOP, a frozen control group) does not: `is_overdue` says
when the caller gives it up and kills it, whereupon the first process of the sandbox ends all others.
"""

from __future__ import annotations

import asyncio
import atexit
import errno
import logging
import os
import signal
import socket
import subprocess
import threading
import time

from cloche.core.loops import until_readable
from cloche.core.suppressed import suppress_logged
from cloche.jail import messages
from cloche.jail.messages import Spec
from cloche.jail.work_folder import clear_remains

log = logging.getLogger("cloche.jail")
CLOSE_TIMEOUT_S = 10.0
LEFT_EMPTY = "an empty control group of a helper remains"
EXIT_TIMEOUT_S, POLL_S = 10.0, 0.002
STOPPED_S = 1.0  # after the time-out of a run, when its helper is given up if it is stopped
LATE_S = 90.0  # the same in any case: building a sandbox may take 60 s, and its clock starts with the program
_helpers: list[tuple[subprocess.Popen[bytes], Spec]] = []
_released: list[subprocess.Popen[bytes]] = []  # held by another process: they may outlive this one
_lock = threading.Lock()


async def until_end(link: socket.socket) -> None:
    """Wait until the other end is closed, dropping messages."""
    while True:
        try:
            tag, _, fds = messages.receive(link.fileno())
        except BlockingIOError:
            await until_readable(link.fileno())
            continue
        except OSError:
            return
        for fd in fds:
            os.close(fd)
        if not tag:
            return


async def end_slot(link: socket.socket, pid: int) -> bool:
    """Wait until the helper of a slot has ended, and kill one that is stopped; tell whether it was. TimeoutError."""
    try:
        await asyncio.wait_for(until_end(link), CLOSE_TIMEOUT_S)
    except TimeoutError:
        if not _is_stopped(pid):
            raise
        kill_helper(pid, link)
        return True
    return False


async def wait_for_exit(process: subprocess.Popen[bytes]) -> None:
    """Wait for a process by a pidfd, or by polling on kernels without pidfd_open(2) (before Linux 5.3)."""
    try:
        fd = os.pidfd_open(process.pid)
    except OSError as error:
        if error.errno != errno.ENOSYS:
            raise
        await asyncio.to_thread(_wait_by_polling, process)
        return
    try:
        await asyncio.wait_for(until_readable(fd), CLOSE_TIMEOUT_S)
    except TimeoutError:
        process.kill()
        with suppress_logged(log, "a helper that was killed does not end: it is frozen", TimeoutError):
            await asyncio.wait_for(until_readable(fd), CLOSE_TIMEOUT_S)
    finally:
        os.close(fd)
    if process.poll() is None:
        release(process)


def release(process: subprocess.Popen[bytes]) -> None:
    """Leave a helper to another process, which holds its link now."""
    with _lock:
        _released.append(process)


def _wait_by_polling(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(CLOSE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def add(process: subprocess.Popen[bytes], spec: Spec) -> None:
    """Take over a helper that is about to end."""
    with _lock:
        _helpers.append((process, spec))


def collect() -> bool:
    """Reap helpers that have ended, and clear up after those that failed; tell whether all have ended."""
    with _lock:
        _released[:] = [process for process in _released if process.poll() is None]
        waiting = _helpers[:]
        _helpers.clear()
    still_here = [(process, spec) for process, spec in waiting if process.poll() is None]
    with _lock:
        _helpers.extend(still_here)
    for process, spec in waiting:
        if process.returncode not in (None, 0):
            with suppress_logged(log, LEFT_EMPTY, OSError):
                clear_remains(spec)
    return not still_here


def _wait_for_all() -> None:
    deadline = time.monotonic() + EXIT_TIMEOUT_S
    while not collect() and time.monotonic() < deadline:
        time.sleep(POLL_S)


def is_overdue(late_s: float, pid: int) -> bool:
    """Tell whether to give up the helper `pid`, which has not reported a run `late_s` after its time-out."""
    return late_s >= LATE_S or (late_s >= STOPPED_S and _is_stopped(pid))


def _is_stopped(pid: int) -> bool:
    """Tell whether a signal has stopped a process; it may be any other's by now."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] == b"T"
    except (OSError, IndexError):
        return False


def kill_helper(pid: int, link: socket.socket) -> None:
    """Kill the helper at the other end of `link`, whose process id is `pid`; nobody else.

    As long as its link is open it lives, and keeps its number.
    """
    with suppress_logged(log, "the helper is gone", OSError):
        process = os.pidfd_open(pid)
        try:
            link.setblocking(False)
            if _is_open(link):
                signal.pidfd_send_signal(process, signal.SIGKILL)
        finally:
            os.close(process)


def _is_open(link: socket.socket) -> bool:
    try:
        return bool(link.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return True
    except OSError:
        return False


def _forget_after_fork() -> None:
    global _lock
    _lock = threading.Lock()
    _helpers.clear()
    _released.clear()


os.register_at_fork(after_in_child=_forget_after_fork)
atexit.register(_wait_for_all)
