"""The first process of a virtual machine: it makes the place in which programs run, and sees that nothing stays.

It lies on the root disk and imports nothing of Cloche. Over the only port there is it takes messages, each a length of
nine digits and that many bytes: settings as JSON, then the program that is to live in the place (`containers.boot`),
which from then on speaks frames over the same port. When that ends this process says so in a frame of its own,
and waits for the next settings. When nobody is at the other end any more, the machine ends.

Theory of operation: inside of the machine is what a container has, made by hand: a control group of version 2, new
namespaces, new `/tmp`, `/dev` and `/proc`, an id that is not root, no capabilities. The workspace is a tmpfs that all
runs of this machine share. The machine is the wall; this keeps a program off the kernel that serves it.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import resource
import socket
import stat
import struct
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

PORTS = ("/dev/vport0p1", "/dev/vport1p1", "/dev/vport2p1")
WORKSPACE, GROUPS = "/workspace", "/sys/fs/cgroup"
CONTROLLERS = "+memory +pids +cpu"
PERIOD_US = 100_000
LEFT = b"L"
LENGTH_DIGITS = 9
NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWPID = 0x20000, 0x2000000, 0x4000000, 0x8000000, 0x20000000
READ_ONLY, NO_SUID, NO_DEVICES, NO_EXEC = 1, 2, 4, 8
DETACH, REMOUNT, BIND, RECURSIVE, PRIVATE = 2, 1 << 5, 1 << 12, 1 << 14, 1 << 18
PR_SET_NO_NEW_PRIVS, PR_CAPBSET_DROP = 38, 24
LAST_CAPABILITY = 63
RESTART = 0x1234567
ADD_ENTROPY = 0x40085203
SET_FLAGS, IS_UP = 0x8914, 1
# What an unprivileged program has no use for, and what has let many of them become root of their kernel.
SYSCTLS = {
    "user/max_user_namespaces": "0",
    "kernel/unprivileged_bpf_disabled": "1",
    "kernel/dmesg_restrict": "1",
    "kernel/kptr_restrict": "2",
    "kernel/core_pattern": "",
}
NODES = {"null": (1, 3), "zero": (1, 5), "full": (1, 7), "random": (1, 8), "urandom": (1, 9), "tty": (5, 0)}
LINKS = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}

_libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: Any) -> None:
    """Make a call of the C library. Raises OSError naming it."""
    if getattr(_libc, name)(*arguments) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}{arguments}: {os.strerror(number)}")


def mount(kind: str, target: str, flags: int = NO_SUID | NO_DEVICES, options: str = "") -> None:
    """Mount a file system that needs no device."""
    call("mount", kind.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode())


def write(path: str, text: str) -> None:
    """Write to a file of the kernel's."""
    with open(path, "w") as file:
        file.write(text)


def prepare() -> None:
    """Put the machine in order, once."""
    mount("cgroup2", GROUPS, NO_SUID | NO_DEVICES | NO_EXEC)
    write(f"{GROUPS}/cgroup.subtree_control", CONTROLLERS)
    for name, value in SYSCTLS.items():
        try:
            write(f"/proc/sys/{name}", value)
        except OSError:
            pass  # a kernel without it has nothing to switch off
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as anything:
        fcntl.ioctl(anything, SET_FLAGS, struct.pack("16sh14x", b"lo", IS_UP))


def open_port() -> int:
    """Open the port to the host, as soon as it is there."""
    while True:
        for path in PORTS:
            try:
                return os.open(path, os.O_RDWR | os.O_CLOEXEC)
            except OSError:
                continue
        time.sleep(0.005)


class Host:
    """Read messages of whoever started the machine."""

    def __init__(self, port: int):
        self.port = port
        self.is_known = False

    def message(self) -> bytes:
        """Return the next message; ends the machine when there will be none."""
        return self._exactly(int(self._exactly(LENGTH_DIGITS)))

    def _exactly(self, size: int) -> bytes:
        found = b""
        while len(found) < size:
            data = os.read(self.port, size - len(found))
            if not data and self.is_known:
                end()
            if not data:  # nobody is connected yet
                time.sleep(0.005)
            self.is_known = self.is_known or bool(data)
            found += data
        return found

    def say(self, tag: bytes, **body: Any) -> None:
        """Send one frame."""
        text = json.dumps(body).encode()
        view = memoryview(tag + len(text).to_bytes(4, "big") + text)
        while view:
            view = view[os.write(self.port, view) :]


def end() -> None:
    """End the machine: its monitor takes a restart for the end."""
    _libc.reboot(RESTART)
    os._exit(0)


def take_time(settings: dict[str, Any]) -> None:
    """Take the host's clock, and random bytes, which a machine this young has few of."""
    time.clock_settime(time.CLOCK_REALTIME, settings["time"])
    seed = bytes.fromhex(settings["seed"])
    fd = os.open("/dev/urandom", os.O_WRONLY)
    fcntl.ioctl(fd, ADD_ENTROPY, struct.pack("ii", len(seed) * 8, len(seed)) + seed)
    os.close(fd)


def make_workspace(settings: dict[str, Any]) -> None:
    """Mount the workspace, once."""
    owner = f"uid={settings['user']},gid={settings['user']},mode=0700"
    options = f"size={settings['disk_bytes']},nr_inodes={settings['inodes']},{owner}"
    mount("tmpfs", WORKSPACE, NO_SUID | NO_DEVICES, options)


def make_group(number: int, settings: dict[str, Any]) -> str:
    """Make a control group with a run's limits, and return its folder."""
    group = f"{GROUPS}/run-{number}"
    os.mkdir(group)
    write(f"{group}/memory.max", str(settings["memory_bytes"]))
    write(f"{group}/memory.swap.max", "0")
    write(f"{group}/pids.max", str(settings["pids"]))
    write(f"{group}/cpu.max", f"{max(1000, round(settings['cpus'] * PERIOD_US))} {PERIOD_US}")
    return group


def run(host: Host, number: int, settings: dict[str, Any], program: bytes) -> None:
    """Let the program live in a place of its own until it ends, and tell of its end."""
    group = make_group(number, settings)
    keeper = os.fork()
    if keeper == 0:
        call("unshare", NEWPID)
        first = os.fork()
        if first == 0:
            live(host, group, settings, program)
        os._exit(os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]) & 0xFF)
    _, status = os.waitpid(keeper, 0)
    rows = dict(line.split() for line in open(f"{group}/memory.events").read().splitlines())  # noqa: SIM115 - read once
    remove_group(group)
    host.say(LEFT, status=os.waitstatus_to_exitcode(status), oom_kills=int(rows.get("oom_kill", 0)))


def remove_group(group: str) -> None:
    """Remove a control group, once the kernel has let go of all who were in it."""
    write(f"{group}/cgroup.kill", "1")
    while True:
        try:
            os.rmdir(group)
            return
        except OSError:
            time.sleep(0.005)


def live(host: Host, group: str, settings: dict[str, Any], program: bytes) -> None:
    """Become the first process of the place; never returns."""
    try:
        write(f"{group}/cgroup.procs", "0")
        call("unshare", NEWNS | NEWCGROUP | NEWUTS | NEWIPC)
        furnish(settings)
        os.setsid()
        os.dup2(host.port, 0)
        os.dup2(host.port, 1)
        os.closerange(3, 1024)
        give_up(settings)
        exec(compile(program, "<cloche>", "exec"), {"__name__": "cloche_boot"})
    except BaseException as error:
        os.write(2, f"cloche: {type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(1)


def furnish(settings: dict[str, Any]) -> None:
    """Mount what is new for each run."""
    call("mount", b"none", b"/", None, ctypes.c_ulong(RECURSIVE | PRIVATE), None)
    call("umount2", GROUPS.encode(), DETACH)  # it would not go on top of itself
    mount("cgroup2", GROUPS)
    flags = REMOUNT | BIND | READ_ONLY | NO_SUID | NO_DEVICES | NO_EXEC  # of this mount: the kernel has but one of them
    call("mount", b"none", GROUPS.encode(), None, ctypes.c_ulong(flags), None)
    mount("proc", "/proc", NO_SUID | NO_DEVICES | NO_EXEC)
    common = f"size={settings['tmp_bytes']},nr_inodes={settings['inodes']},mode=1777"
    mount("tmpfs", "/tmp", NO_SUID | NO_DEVICES | (0 if settings["is_tmp_writable"] else READ_ONLY), common)
    mount("tmpfs", "/dev", NO_SUID | NO_EXEC, "size=64k,mode=0755")
    for name, (major, minor) in NODES.items():
        os.mknod(f"/dev/{name}", stat.S_IFCHR | 0o666, os.makedev(major, minor))
        os.chmod(f"/dev/{name}", 0o666)  # noqa: S103 - as everywhere
    for name, target in LINKS.items():
        os.symlink(target, f"/dev/{name}")
    os.mkdir("/dev/shm")
    mount("tmpfs", "/dev/shm", NO_SUID | NO_DEVICES | NO_EXEC, common)
    call("sethostname", b"sandbox", 7)


def give_up(settings: dict[str, Any]) -> None:
    """Give up everything that root may do, for good."""
    for capability in range(LAST_CAPABILITY + 1):
        _libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    for name, most in settings["ulimits"].items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name.upper()}"), (most, most))
    user = settings["user"]
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def main() -> None:
    """Serve the host until it is gone."""
    prepare()
    host = Host(open_port())
    number = 0
    while True:
        settings = json.loads(host.message())
        take_time(settings)
        if settings.get("is_trial"):
            host.say(b"H")
            continue
        program = host.message()
        if number == 0:
            make_workspace(settings)
        number += 1
        run(host, number, settings, program)


if __name__ == "__main__":
    try:
        main()
    except BaseException as error:
        sys.stderr.write(f"cloche: the first process failed: {type(error).__name__}: {error}\n")
        end()
