"""Pid 1 of a virtual machine: it makes the containers in which programs run, and removes everything they leave.

It lies on the root disk and imports nothing of Cloche. The first port carries messages from the host, each a length of
nine digits and a JSON text of that length: make a container, or end one. Each container has its own port. That port
first carries a mark, then the container's program (`containers.container.boot_message`), which exchanges frames over
the port afterwards. When a container ends, this process reports it in a frame. When the host closes the first port, the
machine ends.

Theory of operation: the machine does by hand what a container runtime does: a cgroup v2 group, new namespaces, new
`/tmp`, `/dev` and `/proc`, an unprivileged id, no capabilities. The workspace is a tmpfs that all containers of this
machine share. The machine is the security boundary; the container keeps a program from attacking the kernel that serves
it.

Ports are reused. A port may still hold data that the previous container did not read, or output of it that the host did
not read. In both directions everything before the mark is therefore ignored. The mark is new and secret for each
container.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import resource
import select
import signal
import socket
import stat
import struct
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

VSOCK = "/dev/vsock"
PORTS = ("/dev/vport0p", "/dev/vport1p", "/dev/vport2p")
FIRST_PORT = 1
VSOCK_PORTS = range(2, 10)  # of containers; as many as `plan.CONTAINERS`
GET_LOCAL_CID, NO_CID = 0x7B9, 0xFFFFFFFF
WORKSPACE, GROUPS = "/workspace", "/sys/fs/cgroup"
CONTAINERS = f"{GROUPS}/places"
CONTROLLERS = "+memory +pids +cpu"
PERIOD_US = 100_000
TRIED, CONTAINER_ENDED = b"H", b"L"
LENGTH_DIGITS, CHUNK = 9, 65_536
PORT_S = 15.0  # shorter than the host's time-outs
MOST_LOGGED_BYTES = 800  # in one record of /dev/kmsg
CRITICAL = 2  # KERN_CRIT; `loglevel=3` keeps less severe messages off the console
NEWNS, NEWCGROUP, NEWUTS, NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
NEWPID, NEWNET = 0x20000000, 0x40000000
READ_ONLY, NO_SUID, NO_DEVICES, NO_EXEC = 1, 2, 4, 8
DETACH, REMOUNT, BIND, RECURSIVE, PRIVATE = 2, 1 << 5, 1 << 12, 1 << 14, 1 << 18
PR_SET_NO_NEW_PRIVS, PR_CAPBSET_DROP = 38, 24
PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
LAST_CAPABILITY = 63
MOST_TERMINALS = 64
RESTART = 0x1234567
ADD_ENTROPY = 0x40085203
SET_FLAGS, IS_UP = 0x8914, 1
# Kernel features that unprivileged programs do not need and that many privilege escalations used.
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
    """Call a function of the C library. Raises OSError with its name."""
    if getattr(_libc, name)(*arguments) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}{arguments}: {os.strerror(number)}")


def mount(kind: str, target: str, flags: int = NO_SUID | NO_DEVICES, options: str = "") -> None:
    """Mount a file system that has no device."""
    call("mount", kind.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode())


def write(path: str, text: str) -> None:
    """Write to a file of the kernel."""
    with open(path, "w") as file:
        file.write(text)


def prepare() -> None:
    """Set up the machine, once."""
    mount("cgroup2", GROUPS, NO_SUID | NO_DEVICES | NO_EXEC)
    write(f"{GROUPS}/cgroup.subtree_control", CONTROLLERS)
    os.mkdir(CONTAINERS)
    write(f"{CONTAINERS}/cgroup.subtree_control", CONTROLLERS)
    for name, value in SYSCTLS.items():
        try:
            write(f"/proc/sys/{name}", value)
        except OSError:
            pass  # this kernel lacks the feature


class SerialPorts:
    """Ports of a monitor with virtio-serial, which have names.

    The kernel creates them one after the other, and learns only later whether the other end of each is open.
    """

    def __init__(self, name: str):
        self.name, self.first = name, open_port(f"{name}{FIRST_PORT}")
        wait_for_host(self.first)

    def open(self, number: int) -> int:
        """Open another port as soon as it exists. Raises OSError if it does not appear within `PORT_S`."""
        until = time.monotonic() + PORT_S
        while True:
            try:
                port = open_port(f"{self.name}{number}")
                break
            except OSError:
                if time.monotonic() > until:
                    raise
            time.sleep(0.005)
        wait_for_host(port)
        return port


class VsockPorts:
    """Ports of a monitor with a vsock.

    The first port is a connection to the host, made when all other ports listen. Port numbers are below 1024, which
    unprivileged programs cannot bind.
    """

    def __init__(self) -> None:
        with open(VSOCK, "rb") as device:
            (number,) = struct.unpack("I", fcntl.ioctl(device, GET_LOCAL_CID, bytes(4)))
        if number == NO_CID:
            raise OSError("there is no vsock device")
        self.listeners = {port: self._listen(port) for port in VSOCK_PORTS}
        with socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM) as own:
            own.connect((socket.VMADDR_CID_HOST, FIRST_PORT))
            self.first = own.detach()

    def _listen(self, port: int) -> socket.socket:
        listener = socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)
        listener.bind((socket.VMADDR_CID_ANY, port))
        listener.listen(1)
        return listener

    def open(self, number: int) -> int:
        """Accept the host's connection to a port. Each port accepts only one."""
        with self.listeners.pop(number) as listener:
            connection, _ = listener.accept()
        return connection.detach()


class HostChannel:
    """Read the host's messages."""

    def __init__(self) -> None:
        self.all = self._find()
        self.port = self.all.first
        self.ports = {FIRST_PORT: self.port}

    def _find(self) -> SerialPorts | VsockPorts:
        """Open the first port as soon as it exists."""
        while True:
            for name in (*PORTS, VSOCK):
                try:
                    return VsockPorts() if name == VSOCK else SerialPorts(name)
                except OSError:
                    continue
            time.sleep(0.005)

    def port_number(self, number: int) -> int:
        """Return the descriptor of another port. It stays open, so that it need not be opened and waited for again."""
        if number not in self.ports:
            self.ports[number] = self.all.open(number)
        return self.ports[number]

    def message(self) -> dict[str, Any]:
        """Return the next message. Ends the machine if the port is closed."""
        message: dict[str, Any] = json.loads(self._exactly(int(self._exactly(LENGTH_DIGITS))))
        return message

    def _exactly(self, size: int) -> bytes:
        received = b""
        while len(received) < size:
            data = os.read(self.port, size - len(received))
            if not data:
                end("nobody is at the other end any more")
            received += data
        return received

    def send(self, tag: bytes, **body: Any) -> None:
        """Send one frame."""
        text = json.dumps(body).encode()
        write_all(self.port, tag + len(text).to_bytes(4, "big") + text)


def open_port(path: str) -> int:
    """Open a port to the host."""
    return os.open(path, os.O_RDWR | os.O_CLOEXEC)


def wait_for_host(port: int) -> None:
    """Wait until the kernel knows that the port's other end is open. Until then the port reads as closed."""
    poll, until = select.poll(), time.monotonic() + PORT_S
    poll.register(port, 0)
    while poll.poll(0):  # POLLHUP: the other end is closed
        if time.monotonic() > until:
            raise RuntimeError("nobody is at the other end of a port")
        time.sleep(0.005)


def write_all(fd: int, data: bytes) -> None:
    """Write all of `data`."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def end(why: str) -> None:
    """End the machine by a restart, which its monitor treats as the end.

    The reason goes to the kernel's log: output to a terminal may not have left the machine when it restarts.
    """
    try:
        log = os.open("/dev/kmsg", os.O_WRONLY)
        os.write(log, f"<{CRITICAL}>cloche: {why}".encode("utf-8", "replace")[:MOST_LOGGED_BYTES])
    except OSError:
        pass  # the reason is lost
    _libc.reboot(RESTART)
    os._exit(0)


def take_time(settings: dict[str, Any]) -> None:
    """Set the host's clock and add random bytes, because a machine that just booted has little entropy."""
    time.clock_settime(time.CLOCK_REALTIME, settings["time"])
    seed = bytes.fromhex(settings["seed"])
    fd = os.open("/dev/urandom", os.O_WRONLY)
    fcntl.ioctl(fd, ADD_ENTROPY, struct.pack("ii", len(seed) * 8, len(seed)) + seed)
    os.close(fd)


def make_workspace(settings: dict[str, Any]) -> None:
    """Mount the workspace, once, and set the memory limit of all containers together.

    With `homes`, they and the workspace are folders of one file system; the workspace's mount then hides the others.
    """
    user, homes = settings["user"], settings["homes"]
    owner = "mode=0755" if homes else f"uid={user},gid={user},mode=0700"
    options = f"size={settings['disk_bytes']},nr_inodes={settings['inodes']},{owner}"
    mount("tmpfs", WORKSPACE, NO_SUID | NO_DEVICES, options)
    for path in (*homes, WORKSPACE) if homes else ():
        folder = f"{WORKSPACE}/{path[1:].replace('/', '-')}"
        os.mkdir(folder, 0o700)
        os.chown(folder, user, user)
        call("mount", folder.encode(), path.encode(), None, ctypes.c_ulong(BIND), None)
    write(f"{CONTAINERS}/memory.max", str(settings["all_bytes"]))


def make_group(number: int, settings: dict[str, Any]) -> str:
    """Make a control group with a container's limits, and return its folder."""
    group = f"{CONTAINERS}/{number}"
    os.mkdir(group)
    write(f"{group}/memory.max", str(settings["memory_bytes"]))
    write(f"{group}/memory.swap.max", "0")
    write(f"{group}/pids.max", str(settings["pids"]))
    write(f"{group}/cpu.max", f"{max(1000, round(settings['cpus'] * PERIOD_US))} {PERIOD_US}")
    return group


class Containers:
    """Make and end containers, and report their ends."""

    def __init__(self, host: HostChannel):
        self.host = host
        self.groups: dict[int, str] = {}  # by container number
        self.parents: dict[int, int] = {}  # container number by the pid that waits for its first process
        self.has_workspace = False

    def handle(self, order: dict[str, Any]) -> None:
        """Carry out an order of the host."""
        if order["do"] == "try":
            self.host.send(TRIED)
        elif order["do"] == "make":
            self.make(order)
        elif order["number"] in self.groups:
            kill_group(self.groups[order["number"]])

    def make(self, order: dict[str, Any]) -> None:
        """Start a program in a new container."""
        take_time(order)
        if not self.has_workspace:
            make_workspace(order)
            self.has_workspace = True
        number, port = order["number"], self.host.port_number(order["port"])
        self.groups[number] = group = make_group(number, order)
        parent = os.fork()
        if parent == 0:
            run_container(port, group, order)
        self.parents[parent] = number

    def reap(self) -> None:
        """Report all containers that have ended."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self.parents:
                self.report_end(self.parents.pop(pid), os.waitstatus_to_exitcode(status))

    def report_end(self, number: int, status: int) -> None:
        """Remove the rest of a container, and report its end."""
        group = self.groups.pop(number)
        with open(f"{group}/memory.events") as events:
            rows = dict(line.split() for line in events)
        remove_group(group)
        self.host.send(CONTAINER_ENDED, number=number, status=status, oom_kills=int(rows.get("oom_kill", 0)))


def kill_group(group: str) -> None:
    """Kill all processes of a control group. A process dies by running, so its CPU quota is lifted."""
    write(f"{group}/cgroup.kill", "1")
    write(f"{group}/cpu.max", "max")


def remove_group(group: str) -> None:
    """Remove a control group as soon as the kernel has released all of its processes."""
    kill_group(group)
    while True:
        try:
            os.rmdir(group)
            return
        except OSError:
            time.sleep(0.005)


def run_container(port: int, group: str, settings: dict[str, Any]) -> None:
    """Start a container's first process in a new pid namespace, and wait for its end. Never returns."""
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        call("unshare", NEWPID)
        first = os.fork()
        if first == 0:
            live(port, group, settings)
        os._exit(os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]) & 0xFF)
    finally:
        os._exit(1)


def live(port: int, group: str, settings: dict[str, Any]) -> None:
    """Become the first process of the container. Never returns."""
    try:
        write(f"{group}/cgroup.procs", "0")
        call("unshare", NEWNS | NEWCGROUP | NEWUTS | NEWIPC | NEWNET)
        furnish(settings)
        os.setsid()
        os.dup2(port, 0)
        os.dup2(port, 1)
        os.closerange(3, 1024)
        give_up(settings)
        program = take_program(bytes.fromhex(settings["mark"]))
        exec(compile(program, "<cloche>", "exec"), {"__name__": "cloche_boot"})
    except BaseException as error:
        os.write(2, f"cloche: {type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(1)


def take_program(mark: bytes) -> bytes:
    """Read up to the mark, then a length and the program; data after it is left for the program.

    The mark is also written to the host, before any output of the program.
    """
    data = b""
    while mark not in data:
        data = data[-len(mark) :] + read_some(len(mark))
    data, size = data.partition(mark)[2], LENGTH_DIGITS
    while True:
        if len(data) >= LENGTH_DIGITS:  # part of it may have been read with the mark
            size = LENGTH_DIGITS + int(data[:LENGTH_DIGITS])
        if len(data) >= size:
            break
        data += read_some(min(CHUNK, size - len(data)))
    write_all(1, mark)
    return data[LENGTH_DIGITS:]


def read_some(max_bytes: int) -> bytes:
    """Return available data, at most `max_bytes`. Raises EOFError if the port is closed."""
    data = os.read(0, max_bytes)
    if not data:
        raise EOFError("the host is gone")
    return data


def furnish(settings: dict[str, Any]) -> None:
    """Make the mounts and devices of one container."""
    call("mount", b"none", b"/", None, ctypes.c_ulong(RECURSIVE | PRIVATE), None)
    call("umount2", GROUPS.encode(), DETACH)  # the kernel refuses to mount cgroup2 on its own mount point (EBUSY)
    mount("cgroup2", GROUPS)
    flags = (
        REMOUNT | BIND | READ_ONLY | NO_SUID | NO_DEVICES | NO_EXEC
    )  # per-mount flags: cgroup2 has one superblock per kernel
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
    if settings["has_terminals"]:
        os.mkdir("/dev/pts")
        mount("devpts", "/dev/pts", NO_SUID | NO_EXEC, f"newinstance,ptmxmode=0666,mode=0620,max={MOST_TERMINALS}")
        os.symlink("pts/ptmx", "/dev/ptmx")
    call("sethostname", b"sandbox", 7)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as anything:
        fcntl.ioctl(anything, SET_FLAGS, struct.pack("16sh14x", b"lo", IS_UP))


def give_up(settings: dict[str, Any]) -> None:
    """Drop all privileges of root for good."""
    for capability in range(LAST_CAPABILITY + 1):
        _libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    for name, limit in settings["ulimits"].items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name.upper()}"), (limit, limit))
    user = settings["user"]
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    program = bytes.fromhex(settings["filter"])
    if program:
        instructions = ctypes.create_string_buffer(program, len(program))
        shape = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(instructions))
        call("prctl", PR_SET_SECCOMP, SECCOMP_MODE_FILTER, shape, 0, 0)


def main() -> None:
    """Serve the host until it closes the first port."""
    wake, waker = os.pipe()
    for fd in (wake, waker):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    prepare()
    host = HostChannel()
    containers = Containers(host)
    containers.handle(host.message())
    poll = select.poll()
    for fd in (host.port, wake):
        poll.register(fd, select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            if fd == wake:
                os.read(wake, CHUNK)
                containers.reap()
            else:
                containers.handle(host.message())


if __name__ == "__main__":
    try:
        main()
    except BaseException as error:
        end(f"the first process failed: {type(error).__name__}: {error}")
