"""Start the helper: a fresh interpreter that shares nothing with the caller but one socket."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# The folder of this package goes first so that `jail` and `interpreter` are found as top-level packages.
_BOOT_HELPER = """\
import sys
sys.path.insert(0, {package!r})
import jail.helper, interpreter.oneshot
_guest = jail.helper.main({fd}, {package!r})
if _guest: _guest()
"""
_BOOT_PROBE = """\
import sys
sys.path.insert(0, {package!r})
import jail.probe
jail.probe.main()
"""
EMPTY_ENVIRONMENT = {"LANG": "C.UTF-8"}


def probe_boot() -> str:
    """Return the program of the probe process."""
    return _BOOT_PROBE.format(package=PACKAGE)


def start_helper(executable: str = sys.executable) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a helper and return its process and our end of its socket. Raises OSError."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        os.set_inheritable(theirs.fileno(), True)
        process = subprocess.Popen(
            [executable, "-I", "-S", "-c", _BOOT_HELPER.format(package=PACKAGE, fd=theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=EMPTY_ENVIRONMENT,
            cwd="/",
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
        )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return process, ours


def settle_cgroup_lock(pid: int) -> None:
    """Pay for the kernel's cgroup migration lock early, while the helper is still starting.

    The first migration after a pause waits for an RCU grace period (about 10 ms); the ones right after it do not.
    Moving `pid` to where it already is takes the lock and changes nothing. Best done in another thread.
    """
    try:
        with open("/proc/self/cgroup", encoding="utf-8") as file:
            rows = [line.rstrip("\n").split(":", 2) for line in file]
        path = next((path for _, names, path in rows if names == "memory"), None)
        if path is not None:
            with open(f"/sys/fs/cgroup/memory{path}/cgroup.procs", "w", encoding="ascii") as file:
                file.write(str(pid))
    except OSError:
        pass  # only speed is lost: the helper's own migration pays instead
