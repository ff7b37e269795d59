"""Start a virtual machine's monitor with minimal privileges, and kill it when the caller ends.

The caller runs `python -I -S jailer.py ORDER`, without Cloche. Standard input is a pipe that the caller holds: a byte
or its end requests the kill of the monitor. So does the caller's end, because forked children of the caller may still
hold the pipe. The monitor also dies with this process.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import signal
import stat
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, PR_SET_DUMPABLE = 1, 38, 4
NEWNS, NEWUSER, NEWIPC, NEWNET = 0x20000, 0x10000000, 0x8000000, 0x40000000
NO_SUID, NO_EXEC, RECURSIVE, PRIVATE = 2, 8, 1 << 14, 1 << 18
CANNOT_START = 127


def become_monitor(order: dict[str, Any], jailer: int) -> None:
    """Become the monitor, unless the jailer (pidfd `jailer`) is already dead. Never returns."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        user = order["user"]
        if "cell" in order:
            if user:
                become_user(user)
        elif user:
            is_apart = (
                libc.unshare(NEWNS | NEWNET | NEWIPC) == 0
            )  # a root without CAP_SYS_ADMIN can still change its id
            if is_apart and order["devices"]:
                show_devices(libc, order["devices"], user)
            become_user(user)
        else:
            libc.unshare(NEWUSER | NEWNET | NEWIPC)  # if user namespaces are refused, QEMU's own seccomp filter remains
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
        libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)  # last: a change of id clears it (prctl(2))
        if select.select([jailer], [], [], 0)[
            0
        ]:  # a pidfd, because getppid() is 0 for a parent outside the pid namespace
            os._exit(1)
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.execve(order["argv"][0], order["argv"], {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"})  # noqa: S606 - the order's words
    except OSError as error:
        os.write(2, f"cannot start {order['argv'][0]}: {error}\n".encode())
    finally:
        os._exit(CANNOT_START)


def become_user(user: int) -> None:
    """Become `user`, with that group and no others."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def show_devices(libc: Any, devices: dict[str, int], user: int) -> None:
    """Mount a new /dev with only these devices, owned by the monitor's user."""
    calls = (
        (b"none", b"/", None, ctypes.c_ulong(RECURSIVE | PRIVATE), None),
        (b"tmpfs", b"/dev", b"tmpfs", ctypes.c_ulong(NO_SUID | NO_EXEC), b"size=64k,mode=0755"),
    )
    for call in calls:
        if libc.mount(*call) < 0:
            number = ctypes.get_errno()
            raise OSError(number, f"mount: {os.strerror(number)}")
    for name, device in devices.items():
        os.mknod(f"/dev/{name}", stat.S_IFCHR | 0o600, device)
        os.chown(f"/dev/{name}", user, user)


def caller_watch() -> list[int]:
    """Return a pidfd of the caller, or [] if it is in another pid namespace."""
    try:
        return [os.pidfd_open(os.getppid())]
    except OSError:
        return []


def has_cell(order: dict[str, Any]) -> bool:
    """Make the monitor's root; return whether that succeeded."""
    import runpy  # imported here, because only monitors with a cell need it

    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "cell.py")
    try:
        runpy.run_path(path)["enter"](ctypes.CDLL(None, use_errno=True), order)
    except OSError as error:
        os.write(2, f"cannot make a root for {order['argv'][0]}: {error}\n".encode())
        return False
    return True


def main() -> int:
    """Start the monitor and wait until it or the caller ends."""
    order = json.loads(sys.argv[1])
    jailer = os.pidfd_open(os.getpid())
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)  # the caller decides about signals of its terminal
    watched = [0, *caller_watch()]
    if "cell" in order and not has_cell(
        order
    ):  # before PR_SET_DUMPABLE 0, which makes its own /proc/self files root's (proc(5))
        return CANNOT_START
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    child = os.fork()
    if child == 0:
        become_monitor(order, jailer)
    monitor = os.pidfd_open(child)
    watched.append(monitor)
    poll = select.poll()
    for fd in watched:
        poll.register(fd, select.POLLIN)
    for fd in range(3, 1024):
        if fd not in watched:
            os.closerange(fd, fd + 1)
    ready = {fd for fd, _ in poll.poll()}
    if monitor not in ready:
        signal.pidfd_send_signal(monitor, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) & 0xFF


if __name__ == "__main__":
    sys.exit(main())
