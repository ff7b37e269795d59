"""A private root for a monitor that takes paths: its files, read-only, and one writable tmpfs folder.

Run by `jailer.py`, without Cloche. Everything is in a mount namespace and disappears with it.
"""

from __future__ import annotations

import array
import ctypes
import os
import socket
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

NEWNS, NEWUSER, NEWIPC, NEWPID, NEWNET = 0x20000, 0x10000000, 0x8000000, 0x20000000, 0x40000000
READ_ONLY, NO_SUID, NO_DEVICES, NO_EXEC = 1, 2, 4, 8
REMOUNT, BIND, RECURSIVE, PRIVATE, DETACH = 1 << 5, 1 << 12, 1 << 14, 1 << 18, 2
KEPT = READ_ONLY | NO_SUID | NO_DEVICES | NO_EXEC | 1 << 10 | 1 << 11  # the last two: MS_NOATIME and MS_NODIRATIME
SYS_PIVOT_ROOT = 155
# A folder that exists on every host and that no monitor needs.
NEW_ROOT = "/tmp"


def call(libc: Any, name: str, *arguments: Any) -> None:
    """Call a function of the C library. Raises OSError with its name."""
    if getattr(libc, name)(*arguments) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def mount(libc: Any, source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    """Mount a file system. Raises OSError with the target."""
    kind_bytes = kind.encode() if kind else None
    try:
        call(libc, "mount", source.encode(), target.encode(), kind_bytes, ctypes.c_ulong(flags), options.encode())
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror} of {target}") from error


def enter(libc: Any, order: dict[str, Any]) -> None:
    """Move this process, and the monitor that it becomes, into the new root; send its folder to the caller."""
    cell, user = order["cell"], order["user"]
    os.umask(0o022)
    unshare(libc, user)
    mount(libc, "none", "/", None, RECURSIVE | PRIVATE)
    devices = [path for path in cell["devices"] if os.path.exists(path)]
    sources = {path: path for path in (*cell["folders"], *(() if user else devices)) if os.path.exists(path)}
    held = {target: os.open(path, os.O_PATH) for target, path in {**sources, **cell["files"]}.items()}
    numbers = {path: os.stat(path).st_rdev for path in devices}
    mount(libc, "cell", NEW_ROOT, "tmpfs", NO_SUID, "size=1m,mode=0755")
    for target, fd in held.items():
        show(libc, fd, NEW_ROOT + target, is_device=target in devices)
    for path, number in numbers.items() if user else ():
        make_device(NEW_ROOT + path, number, user)
    run = NEW_ROOT + cell["run"]
    os.mkdir(run)
    mount(libc, "run", run, "tmpfs", NO_SUID | NO_DEVICES | NO_EXEC, "size=64k,mode=0700")
    if user:
        os.chown(run, user, user)
    hand_over(cell["hand"], run)
    mount(libc, "none", NEW_ROOT, None, REMOUNT | BIND | READ_ONLY | NO_SUID)
    os.chdir(NEW_ROOT)
    call(libc, "syscall", SYS_PIVOT_ROOT, b".", b".")
    call(libc, "umount2", b".", DETACH)
    os.chdir("/")


def unshare(libc: Any, user: int) -> None:
    """Leave the host's namespaces. An ordinary user needs a new user namespace for that."""
    spaces = NEWNS | NEWNET | NEWIPC | NEWPID
    own, group = os.geteuid(), os.getegid()
    call(libc, "unshare", spaces if user else spaces | NEWUSER)
    if not user:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{own} {own} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)


def show(libc: Any, fd: int, target: str, *, is_device: bool) -> None:
    """Bind-mount a file or folder of the host, read-only. A device stays usable as a device."""
    if stat.S_ISDIR(os.fstat(fd).st_mode):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o600))
    mount(libc, f"/proc/self/fd/{fd}", target, None, BIND | RECURSIVE)
    os.close(fd)
    locked_flags = (
        os.statvfs(target).f_flag & KEPT
    )  # mount_namespaces(7): flags set in a more privileged namespace are locked
    flags = NO_SUID | (0 if is_device else NO_DEVICES | READ_ONLY)
    mount(libc, "none", target, None, REMOUNT | BIND | flags | locked_flags)


def make_device(target: str, number: int, user: int) -> None:
    """Create a device node owned by the monitor's user."""
    os.makedirs(os.path.dirname(target), exist_ok=True)
    os.mknod(target, stat.S_IFCHR | 0o600, number)
    os.chown(target, user, user)


def hand_over(hand: int, folder: str) -> None:
    """Send the caller a descriptor of a folder."""
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    with socket.socket(fileno=hand) as link:
        link.sendmsg([b"r"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))])
    os.close(fd)
