"""Let a guest try to survive, end its sandbox in one of the three ways of `cloche.jail.ending`, and report.

    python ended.py WAY NAME UID    WAY is scope, id or walk; NAME is one of GUESTS; UID is the guest's

Prints as JSON: how many processes `outlived` the plain end of a run (a kill of the first process and its group), how
many are `left` after ours, how often ours `searched` for all of them, and its `seconds`. Each ends by itself when its
time is up.
"""

import contextlib
import json
import mmap
import os
import resource
import signal
import socket
import sys
import tempfile
import threading
import time
from typing import Any

from cloche.jail import ending, messages, procfs
from cloche.jail.syscalls import PR_SET_CHILD_SUBREAPER, call, prctl

CLONE_PARENT, CLONE_VFORK, SIGCHLD = 0x8000, 0x4000, 17
SETTLED_S = 0.1
BOMB = 400
WRITERS, HELD_BYTES = 40, 64 << 20
ENDS_AT = time.monotonic() + 30  # inherited by all: none of them may outlast that, whoever is killed


def be_killed() -> None:
    """Wait for whoever ends us."""
    time.sleep(max(0.0, ENDS_AT - time.monotonic()))
    os._exit(0)


def double_fork() -> None:
    """Leave the parent, and its session."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            be_killed()
        os._exit(0)


def own_subreaper() -> None:
    """Keep what dies below, and stop."""
    if os.fork() == 0:
        os.setsid()
        prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        if os.fork() == 0 and os.fork():
            os._exit(0)
        os.kill(os.getpid(), signal.SIGSTOP)


def sibling() -> None:
    """Be a child of the parent's."""
    if call("clone", CLONE_PARENT | SIGCHLD) == 0:
        os.setsid()
        be_killed()


def vfork() -> None:
    """Have a parent that the kernel holds until we are gone."""
    if os.fork() == 0:
        os.setsid()
        if call("clone", CLONE_VFORK | SIGCHLD) == 0:
            be_killed()


def run_away(count: int) -> None:
    """Fork, end in the parent, and go on."""
    for _ in range(count):
        if os.fork() == 0:
            os.setsid()
            while time.monotonic() < ENDS_AT:
                if os.fork():
                    os._exit(0)
            os._exit(0)


def bomb() -> None:
    """Have as many processes as may be, each of which makes others for as long as it can."""
    resource.setrlimit(resource.RLIMIT_NPROC, (BOMB + 5, BOMB + 5))
    if os.fork() == 0:
        os.setsid()
        while time.monotonic() < ENDS_AT:
            try:
                os.fork()
            except OSError:
                time.sleep(0.001)
        os._exit(0)


def kill_others() -> None:
    """Kill those who could end us, first by name."""
    if os.fork() == 0:
        os.setsid()
        for pid in (os.getppid(), int(os.environ["ENDER"]), 1, -1):
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass
        be_killed()


def write_without_end() -> None:
    """Hold the lock of a file whose mode the reaper is changing, in turns."""
    if os.fork():
        return
    os.setsid()
    file = os.open(held_file(), os.O_RDWR)
    zeros = mmap.mmap(-1, HELD_BYTES, prot=mmap.PROT_READ)

    def write() -> None:
        while time.monotonic() < ENDS_AT:
            os.pwrite(file, zeros, 0)

    for _ in range(WRITERS):
        threading.Thread(target=write, daemon=True).start()
    be_killed()


def held_file() -> str:
    """Return the file that the reaper and its guests share."""
    return os.path.join(tempfile.gettempdir(), f"held-{os.environ['ENDER']}")


GUESTS = {
    "double fork": double_fork,
    "own subreaper": own_subreaper,
    "sibling": sibling,
    "vfork": vfork,
    "runner": lambda: run_away(1),
    "20 runners": lambda: run_away(20),
    "bomb": bomb,
    "kills others": kill_others,
    "does not stop writing": write_without_end,
}


def be_reaper(link: int, way: str, name: str, uid: int) -> None:
    """Be what a reaper is to its guests: one with their uid, and a scope of its own."""
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if way == "scope":
        ending.enter_scope(6)
    if os.geteuid() != uid:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    with open(held_file(), "wb"):
        pass
    guest = os.fork()
    if guest == 0:
        os.close(link)
        if way == "scope":
            ending.enter_scope(6)  # inside of it, as a guest's whole Landlock domain is
        os.setpgid(0, 0)
        GUESTS[name]()
        os.kill(os.getpid(), signal.SIGSTOP)
    os.waitpid(guest, os.WUNTRACED)  # by when it has done what it can
    messages.send(link, "ready", {"guest": guest})
    while name == "does not stop writing":
        os.chmod(held_file(), 0o600)
    messages.receive(link)
    ending.end_scope(lambda _: None)
    os._exit(0)


class CountedSearches:
    """Stand for the module `procfs`, and count the searches for all processes below one."""

    count = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(procfs, name)

    def descendants(self, pid: int) -> list[int]:
        """Search."""
        self.count += 1
        return procfs.descendants(pid)


def main(way: str, name: str, uid: int) -> None:
    """Be the helper: start a reaper, let its guest try, end them."""
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    os.environ["ENDER"] = str(os.getpid())
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    reaper = os.fork()
    if reaper == 0:
        ours.close()
        be_reaper(theirs.fileno(), way, name, uid)
    theirs.close()
    tag, body, _ = messages.receive(ours.fileno())
    if tag == "ready":  # else the guest has killed the reaper
        with contextlib.suppress(ProcessLookupError):  # one that has killed all in its reach may have met its own
            os.killpg(body["guest"], signal.SIGKILL)
        while name == "bomb" and len(procfs.descendants(os.getpid())) < BOMB and time.monotonic() < ENDS_AT - 15:
            time.sleep(SETTLED_S)
        time.sleep(SETTLED_S)
    outlived = set(procfs.descendants(os.getpid())) - {reaper, body.get("guest")}
    begun, searches = time.monotonic(), CountedSearches()
    ending.procfs = searches  # type: ignore[attr-defined,assignment]

    def kill_by_id() -> bool:
        if way == "id":
            ending.kill_by_id(uid, uid + 1)
        return way == "id"

    ending.end(reaper, ours.fileno(), is_alone=False, is_scoped=way == "scope", kill_by_id=kill_by_id)
    seconds = time.monotonic() - begun
    os.unlink(held_file())
    left = procfs.descendants(os.getpid())
    print(json.dumps({"outlived": len(outlived), "left": len(left), "searched": searches.count, "seconds": seconds}))


main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
