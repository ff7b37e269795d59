"""Program that runs as root in an E2B sandbox: it makes a container and becomes the container's first process.

The machine and the other processes on it belong to the provider. A guest therefore gets its own namespaces, tmpfs
folders of bounded size, a read-only root, an unprivileged id, and no way to become root again. The rest of standard
input is for the first process (`containers.container.boot_message`).
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import resource
import signal
import socket
import stat
import struct
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

WORKSPACE, GROUPS = "/workspace", "/sys/fs/cgroup"
NEWNS, NEWUTS, NEWIPC, NEWPID, NEWNET = 0x20000, 0x4000000, 0x8000000, 0x20000000, 0x40000000
READ_ONLY, NO_SUID, NO_DEVICES, NO_EXEC = 1, 2, 4, 8
REMOUNT, BIND, RECURSIVE, PRIVATE = 1 << 5, 1 << 12, 1 << 14, 1 << 18
KEPT_FLAGS = {"nosuid": NO_SUID, "nodev": NO_DEVICES, "noexec": NO_EXEC}
PR_SET_PDEATHSIG, PR_CAPBSET_DROP, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 24, 22, 38
SECCOMP_MODE_FILTER, LAST_CAPABILITY, MOST_TERMINALS = 2, 63, 64
SET_FLAGS, IS_UP = 0x8914, 1
USER, USUAL_ID = "user", 1000
NODES = {"null": (1, 3), "zero": (1, 5), "full": (1, 7), "random": (1, 8), "urandom": (1, 9), "tty": (5, 0)}
LINKS = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2", "ptmx": "pts/ptmx"}

_libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: Any) -> None:
    """Call a function of the C library. Raises OSError with its name."""
    if getattr(_libc, name)(*arguments) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}{arguments}: {os.strerror(number)}")


def mount(kind: str, target: str, flags: int, options: str = "") -> None:
    """Mount a file system that has no device."""
    call("mount", kind.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode())


def remount(target: str, flags: int) -> None:
    """Change the flags of one mount."""
    call("mount", b"none", target.encode(), None, ctypes.c_ulong(REMOUNT | BIND | flags), None)


def user_id() -> int:
    """Return the id of the sandbox's own user."""
    with open("/etc/passwd", errors="replace") as file:
        rows = [line.split(":") for line in file]
    return next((int(row[2]) for row in rows if row[0] == USER and len(row) > 2 and row[2].isdigit()), USUAL_ID)


def make_workspace(user: int, settings: dict[str, Any]) -> None:
    """Mount the workspace, once per sandbox.

    With `homes`, they and the workspace are folders of that one file system.
    """
    homes = settings["homes"]
    owner = "mode=0755" if homes else f"uid={user},gid={user},mode=0700"
    os.makedirs(WORKSPACE, exist_ok=True)
    options = f"size={settings['disk_bytes']},nr_inodes={settings['inodes']},{owner}"
    mount("tmpfs", WORKSPACE, NO_SUID | NO_DEVICES, options)
    for path in (*homes, WORKSPACE) if homes else ():
        folder = f"{WORKSPACE}/{path[1:].replace('/', '-')}"
        os.mkdir(folder, 0o700)
        os.chown(folder, user, user)
        os.makedirs(path, exist_ok=True)
        call("mount", folder.encode(), path.encode(), None, ctypes.c_ulong(BIND), None)


def close_root(but: tuple[str, ...]) -> None:
    """Remount everything read-only, except the targets in `but`."""
    with open("/proc/self/mountinfo") as file:
        rows = [line.split() for line in file]
    for row in rows:
        target = row[4].encode().decode("unicode_escape")
        flags = sum(KEPT_FLAGS.get(option, 0) for option in row[5].split(","))
        if target not in but:
            try:
                remount(target, READ_ONLY | flags)
            except OSError:
                if target == "/":
                    raise


def furnish(settings: dict[str, Any]) -> None:
    """Make the mounts and devices of one container."""
    call("mount", b"none", b"/", None, ctypes.c_ulong(RECURSIVE | PRIVATE), None)
    close_root((WORKSPACE, *settings["homes"]))
    if os.path.isdir(GROUPS):  # hide the machine's control groups, which are not this container's
        mount("tmpfs", GROUPS, READ_ONLY | NO_SUID | NO_DEVICES | NO_EXEC, "size=4k")
    mount("proc", "/proc", NO_SUID | NO_DEVICES | NO_EXEC)
    common = f"size={settings['tmp_bytes']},nr_inodes={settings['inodes']},mode=1777"
    mount("tmpfs", "/tmp", NO_SUID | NO_DEVICES | (0 if settings["is_tmp_writable"] else READ_ONLY), common)
    mount("tmpfs", "/dev", NO_SUID | NO_EXEC, "size=64k,mode=0755")
    for name, (major, minor) in NODES.items():
        os.mknod(f"/dev/{name}", stat.S_IFCHR | 0o666, os.makedev(major, minor))
        os.chmod(f"/dev/{name}", 0o666)  # noqa: S103 - as everywhere
    for name, target in LINKS.items():
        os.symlink(target, f"/dev/{name}")
    for name in ("shm", "pts"):
        os.mkdir(f"/dev/{name}")
    mount("tmpfs", "/dev/shm", NO_SUID | NO_DEVICES | NO_EXEC, common)
    mount("devpts", "/dev/pts", NO_SUID | NO_EXEC, f"newinstance,ptmxmode=0666,mode=0620,max={MOST_TERMINALS}")
    remount("/dev", READ_ONLY | NO_SUID | NO_EXEC)
    call("sethostname", b"sandbox", 7)
    if not settings["has_network"]:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as anything:
            fcntl.ioctl(anything, SET_FLAGS, struct.pack("16sh14x", b"lo", IS_UP))


def give_up(user: int, settings: dict[str, Any]) -> None:
    """Drop all privileges of root for good, and have the kernel kill this process when its parent ends."""
    for capability in range(LAST_CAPABILITY + 1):
        _libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    for name, limit in settings["ulimits"].items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name.upper()}"), (limit, limit))
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    program = bytes.fromhex(settings["filters"].get(os.uname().machine, ""))
    if program:
        instructions = ctypes.create_string_buffer(program, len(program))
        shape = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(instructions))
        call("prctl", PR_SET_SECCOMP, SECCOMP_MODE_FILTER, shape, 0, 0)


def main(settings: dict[str, Any]) -> None:
    """Make the container, run its first process, and exit when it ends. Never returns."""
    try:
        user = settings["user"] or user_id()
        if settings["makes_workspace"]:
            make_workspace(user, settings)
        call("unshare", NEWPID)
        first = os.fork()
        if first:
            os._exit(os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]) & 0xFF)
        call("unshare", NEWNS | NEWUTS | NEWIPC | (0 if settings["has_network"] else NEWNET))
        furnish(settings)
        os.setsid()
        os.chdir("/")
        os.closerange(3, 1024)
        give_up(user, settings)
        os.execve(sys.executable, [sys.executable, *settings["arguments"]], settings["env"])  # noqa: S606
    except BaseException as error:
        os.write(2, f"cloche: {type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(1)
