"""Attempts of a virtual machine's own root: a guest that took over the kernel inside, as far as that is possible.

The image is one of the tests' own, whose first process gives nothing up: what runs in a place is root of the machine,
with every capability and in no namespace of users. What it does in there is its own affair; what is tried is the wall
around the machine. Some attempts are those of the table that are after something of the host's, the others are here.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import cloche
from cloche.backends.microvm import qemu
from cloche.backends.microvm.plan import DISK, INITRD, KERNEL
from cloche.backends.microvm.qemu import arguments
from cloche.core.errors import ClocheError
from tests.harness.escape.attempts import Attempt, Verdict, key_of
from tests.harness.escape.batch import Batch
from tests.harness.escape.checks import COMMANDS
from tests.harness.escape.controls import Controls, all_attempts
from tests.harness.escape.runners import show_on_terminal
from tests.harness.machines import monitors, with_root

pytestmark = [pytest.mark.root, pytest.mark.soak, pytest.mark.timeout(300)]

SLOWNESS = 4.0
MACHINE: Mapping[str, Any] = {"backend": "microvm", "require": "vm", "timeout": 60}
FORGED_S = 40.0
LOST = ("StartFailed", "OutcomeUnknown", "InternalError", "error", "signaled")
OF_THE_HOST = (
    "files/write to a file of the host",
    "files/leave a file in the host's tmp",
    "files/a file at home",
    "files/a file in the host's tmp",
    "files/a file by its handle",
    "files/the root of every process",
    "leaks/the environment of all processes",
    "leaks/shared memory by key (host)",
    "leaks/a file in shared memory (host)",
    "leaks/keys of the caller's user",
    "network/loopback, version 4 (host)",
    "network/the address of any interface (host)",
    "network/an abstract socket (host)",
    "network/interfaces besides loopback",
    "processes/signal (host)",
    "processes/read memory",
    "processes/enter the namespaces of a process",
)
ROOT_DISK = """
import fcntl, stat
steps = []
def step(act):
    try:
        act()
        steps.append("done")
    except OSError as error:
        steps.append(error.strerror)
def write(path, at=0):
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_SYNC)
    os.pwrite(file, b"harm" * 1024, at)
    os.fsync(file)
major, minor = map(int, open("/sys/class/block/vda/dev").read().split(":"))
os.path.exists("/dev/vda") or os.mknod("/dev/vda", stat.S_IFBLK | 0o600, os.makedev(major, minor))
writable = ctypes.byref(ctypes.c_int(0))
step(lambda: fcntl.ioctl(os.open("/dev/vda", os.O_RDONLY), 0x125D, b"\\0\\0\\0\\0"))
"""
within = partial(Attempt, family="virtual machine")
OWN = (
    within(
        name="remount the root disk and write to it",
        code=ROOT_DISK
        + """
def remount(path):
    if LIBC.mount(None, path.encode(), None, 32, None):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
step(lambda: remount("/"))
step(lambda: write("/usr/harm"))
os.mkdir("/dev/again")
def mount_again():
    if LIBC.mount(b"/dev/vda", b"/dev/again", b"ext4", 0, None):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
step(mount_again)
step(lambda: os.path.ismount("/dev/again") and write("/dev/again/harm"))
os.sync()
contained(f"only the image can tell: {steps}")
""",
    ),
    within(
        name="write to the root disk itself",
        code=ROOT_DISK
        + """
step(lambda: write("/dev/vda", (os.stat("/usr").st_ino and 4096) * 8))
os.sync()
contained(f"only the image can tell: {steps}")
""",
    ),
    within(
        name="devices besides a disk and ports",
        code="""
        bus = "/sys/bus/virtio/devices"
        kinds = {open(f"{bus}/{one}/device").read().strip() for one in os.listdir(bus)}
        if not kinds:
            escaped("sees no device at all, not even its disk")
        others = kinds - {"0x0002", "0x0003"}
        if others:
            escaped(f"devices {others}")
        pci = os.listdir("/sys/bus/pci/devices") if os.path.exists("/sys/bus/pci/devices") else []
        if pci:
            escaped(f"buses {pci}")
        contained("a disk, and ports")
        """,
    ),
    within(
        name="a connection to the host past all networks",
        code="""
        import socket
        for host in (socket.VMADDR_CID_HOST, 0, 1):
            for port in (1, 22, 52, 80, 1024, 9999):
                with socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM) as one:
                    one.settimeout(1)
                    try:
                        one.connect((host, port))
                        escaped(f"reaches port {port} of {host}")
                    except OSError:
                        pass
        contained("nobody answers")
        """,
    ),
    within(
        name="folders that the host might share",
        code="""
        os.makedirs("/dev/share", exist_ok=True)
        kinds = [line.split()[-1] for line in open("/proc/filesystems") if not line.startswith("nodev")]
        for kind in ("9p", "virtiofs", "vboxsf", "nfs", "cifs", "drvfs"):
            for source in ("share", "host", "hostshare", "root", "/", "127.0.0.1:/"):
                if LIBC.mount(source.encode(), b"/dev/share", kind.encode(), 0, b"trans=virtio") == 0:
                    escaped(f"mounted {source} as {kind}")
        contained("none of them")
        """,
    ),
    within(
        name="what the monitor tells its firmware",
        code="""
        import mmap, struct
        syscall(172, 3)
        def program(code):
            page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
            page.write(bytes.fromhex(code))
            address = ctypes.addressof(ctypes.c_char.from_buffer(page))
            return page, ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)(address)
        choose_page, choose = program("ba10050000 89f8 66ef c3")
        next_page, next_byte = program("ba11050000 31c0 ec c3")
        def read(item, size):
            choose(item)
            return bytes(next_byte(0) for _ in range(size))
        if read(0, 4) != b"QEMU":
            contained("there is no such device")
        (count,) = struct.unpack(">I", read(0x19, 4))
        table = read(0x19, 4 + 64 * count)[4:]
        names = []
        for at in range(0, len(table), 64):
            size, item, _, name = struct.unpack(">IHH56s", table[at : at + 64])
            names.append(name.rstrip(b"\\0").decode())
            saw(read(item, min(size, 4096)))
        contained(f"was told of {names}")
        """,
    ),
    within(
        name="memory that is not the machine's",
        code="""
        import stat
        os.mknod("/dev/mem", stat.S_IFCHR | 0o600, os.makedev(1, 1))
        memory = os.open("/dev/mem", os.O_RDWR)
        seen = 0
        for at in (0, 0x9F000, 0xE0000, 0xF0000, 0xFEB00000, 0xFED40000, 0xFEE00000, 1 << 32, 1 << 36, 1 << 40):
            try:
                data = os.pread(memory, 4096, at)
            except OSError:
                continue
            seen += len(data)
            saw(data)
        contained(f"read {seen} bytes")
        """,
    ),
    within(
        name="fill the ports of other places",
        code="""
        import stat
        sent = 0
        for name in sorted(os.listdir("/sys/class/virtio-ports")):
            major, minor = map(int, open(f"/sys/class/virtio-ports/{name}/dev").read().split(":"))
            os.mknod(f"/dev/{name}", stat.S_IFCHR | 0o600, os.makedev(major, minor))
            try:
                port = os.open(f"/dev/{name}", os.O_WRONLY | os.O_NONBLOCK)
            except OSError:  # somebody has it: ours, and the machine's own
                continue
            try:
                for _ in range(4096):
                    sent += os.write(port, b"R\\0\\0\\0\\4junk" * 4096)
            except BlockingIOError:
                pass
        if not sent:
            escaped("there was no port to be written to, so nothing was tried")
        contained(f"sent {sent} bytes, which nobody takes")
        """,
    ),
    within(
        name="flood the console with what terminals obey",
        code="""
        import stat
        os.mknod("/dev/ttyS0", stat.S_IFCHR | 0o600, os.makedev(4, 64))
        console = os.open("/dev/ttyS0", os.O_WRONLY | os.O_NOCTTY)
        for _ in range(16):
            os.write(console, b"\\x1b]0;harm\\x07\\x1b[2J\\x1bc" * 64)
        contained("said it")
        """,
    ),
)
# Frames on the machine's own port, where its first process alone should speak. Our test's image leaves it open in the
# first process of the place.
FORGE = """
import ctypes, json, os, sys, time
libc = ctypes.CDLL(None, use_errno=True)
fd = next(int(n) for n in os.listdir("/proc/1/fd") if os.readlink(f"/proc/1/fd/{n}").endswith("p1"))
port = libc.syscall(438, os.pidfd_open(1), fd, 0)
assert port >= 0, "the port is out of reach, so nothing was tried"
def send(tag, body, length=None):
    data = tag + (len(body) if length is None else length).to_bytes(4, "big") + body
    while data:
        data = data[os.write(port, data):]
for number in range(200):
    send(b"L", json.dumps({"number": number + 1000, "status": 0, "oom_kills": 10**30}).encode())
send(b"H", b"{}")
send(b"?", b"")
print("sent what means nothing", flush=True)
time.sleep(5)  # until that was heard: what follows ends the machine
if sys.argv[1] == "its end":
    for number in range(64):
        send(b"L", json.dumps({"number": number, "status": 0}).encode())
elif sys.argv[1] == "no number":
    send(b"L", b'{"number": "1"}')
elif sys.argv[1] == "no end":
    send(b"L", b"[" * 100_000)
elif sys.argv[1] == "no room":
    send(b"L", b"x", 0xFFFFFFFF)
time.sleep(50)
"""
# The end of a machine by its own kernel, after words that a terminal would obey.
PANIC = """
import os, stat
os.mknod("/dev/ttyS0", stat.S_IFCHR | 0o600, os.makedev(4, 64))
console = os.open("/dev/ttyS0", os.O_WRONLY | os.O_NOCTTY)
os.write(console, b"\\x1b]0;harm\\x07\\x1b[2J\\x1bc\\n")
os.sync()
open("/proc/sysrq-trigger", "w").write("c")
"""
LOOK = """
import os
row = next(line for line in open("/proc/self/status") if line.startswith("CapEff"))
print(os.getuid(), int(row.split()[1], 16) & (1 << 21) > 0)
"""


@pytest.fixture(scope="module")
def rooted(microvm_image: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Give an image in which programs are root, and let Cloche find it; no machine is left afterwards."""
    before = monitors()
    with pytest.MonkeyPatch.context() as patch:
        image = with_root(microvm_image, tmp_path_factory.mktemp("rooted"))
        patch.setenv("CLOCHE_MICROVM_IMAGE", str(image))
        patch.setenv("XDG_CACHE_HOME", str(microvm_image.parents[2]))
        yield image
    assert monitors() <= before


@dataclass(frozen=True, slots=True, kw_only=True)
class Rooted:
    """Hold a machine whose root has tried everything once, and what came of it."""

    sandbox: cloche.Sandbox
    verdicts: Mapping[str, Verdict]
    before: str
    held: Mapping[str, str]


def attempts() -> list[Attempt]:
    """Return what is tried."""
    known = {key_of(attempt): attempt for attempt in all_attempts()}
    return [*(known[key] for key in OF_THE_HOST), *OWN]


def digest(image: Path) -> str:
    """Return what changes with the root disk, kernel or first file system."""
    names = sorted(path for path in image.iterdir() if path.is_file())
    return hashlib.sha256(b"".join(hashlib.sha256(path.read_bytes()).digest() for path in names)).hexdigest()


@pytest.fixture(scope="module")
def machine(controls: Controls, rooted: Path) -> Iterator[Rooted]:
    """Run everything in one machine."""
    running, before = monitors(), digest(rooted)
    with cloche.Sandbox(live=False, **MACHINE) as sandbox:
        assert sandbox.run(LOOK).stdout == "0 True\n", "the guest is not root, so nothing would be tried"
        (monitor,) = monitors() - running
        verdicts = Batch(sandbox, controls.canaries, slowness=SLOWNESS).verdicts(attempts())
        yield Rooted(sandbox=sandbox, verdicts=verdicts, before=before, held=opened_by(monitor))


def opened_by(monitor: int) -> Mapping[str, str]:
    """Return the files that a process has open, and how."""
    found = {}
    for number in os.listdir(f"/proc/{monitor}/fd"):
        try:
            path = os.readlink(f"/proc/{monitor}/fd/{number}")
            rows = Path(f"/proc/{monitor}/fdinfo/{number}").read_text().splitlines()
        except OSError:  # it was closed meanwhile
            continue
        flags = next(int(row.split()[1], 8) for row in rows if row.startswith("flags:"))
        if path.startswith("/"):
            found[path] = "read" if flags & os.O_ACCMODE == os.O_RDONLY else "write"
    return found


@pytest.mark.parametrize("attempt", [pytest.param(one, id=f"{one.family}: {one.name}") for one in attempts()])
def test_the_root_of_a_machine_is_held(controls: Controls, machine: Rooted, attempt: Attempt) -> None:
    """It reaches nothing of the host's, and nothing that it was not given."""
    if attempt not in OWN:
        assert controls.control(attempt).breach, "it does not work outside"
    verdict = machine.verdicts[key_of(attempt)]
    assert not verdict.breach, f"escaped from a virtual machine: {verdict.breach}"
    assert verdict.stopped_by, f"broke instead of trying: {verdict.trace}"


def test_a_remount_changes_nothing_outside(machine: Rooted, rooted: Path) -> None:
    """The image is what it was, byte for byte: the monitor itself holds it for reading alone, and no other file."""
    assert digest(rooted) == machine.before
    assert machine.held[str(rooted / DISK)] == "read"
    ours = {str(rooted / name) for name in (KERNEL, INITRD, DISK)}
    others = {path: how for path, how in machine.held.items() if path not in ours and not path.startswith("/dev/")}
    assert not others


def forge(sandbox: cloche.Sandbox, what: str) -> str:
    """Speak for the machine's first process, and return how the run ended: its status, or the kind of error."""
    heard: list[bytes] = []
    began = time.monotonic()
    try:
        end = str(sandbox.run(FORGE, argv=[what], on_output=lambda _, data: heard.append(data)).status)
    except ClocheError as error:
        end = type(error).__name__
    assert b"sent what means nothing" in b"".join(heard), end
    assert time.monotonic() - began < FORGED_S, "it was not the forgery that ended the run"
    return end


def test_forged_words_end_their_own_machine(machine: Rooted) -> None:
    """Root may tell the host that its place has ended, or nonsense: the run is lost, and nobody waits."""
    assert forge(machine.sandbox, "no room") in LOST
    with pytest.raises(ClocheError):
        machine.sandbox.run("print(1)")


@pytest.mark.soak
@pytest.mark.parametrize("what", ["its end", "no number", "no end"])
def test_other_forgeries_do_no_more(rooted: Path, what: str) -> None:
    """However it is done, what is lost is that machine's."""
    with cloche.Sandbox(live=False, **MACHINE) as sandbox:
        assert forge(sandbox, what) in LOST


@pytest.mark.soak
def test_last_words_do_not_reach_a_terminal(rooted: Path, tmp_path: Path) -> None:
    """A kernel that dies with commands for terminals on its console is an error, in which they are harmless."""
    program = tmp_path / "panic.py"
    program.write_text(PANIC)
    began = time.monotonic()
    seen = show_on_terminal([sys.executable, "-m", "cloche", "run", "--backend=microvm", "--timeout=100", str(program)])
    assert b"virtual machine" in seen
    assert not [command for command in COMMANDS if command in seen]
    assert time.monotonic() - began < FORGED_S


@pytest.mark.soak
def test_a_write_to_the_disk_would_be_seen(
    controls: Controls, rooted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the monitor may write to the disk, the same attempts change the image."""
    image = tmp_path / "image"
    shutil.copytree(rooted, image)
    (image / DISK).chmod(0o666)
    before = digest(image)
    monkeypatch.setenv("CLOCHE_MICROVM_IMAGE", str(image))
    monkeypatch.setattr(qemu, "arguments", writable_arguments)
    monkeypatch.setattr(qemu, "opened", opened_for_writing)
    with cloche.Sandbox(live=False, **MACHINE) as sandbox:
        Batch(sandbox, controls.canaries, slowness=SLOWNESS).run_all(OWN[:2], lambda *_: None)
    assert digest(image) != before


def writable_arguments(*given: Any) -> list[str]:
    """Return the monitor's words with a disk that it may write to."""
    return [word.replace("read-only=on", "read-only=off") for word in arguments(*given)]


def opened_for_writing(stack: ExitStack, path: Path) -> int:
    """Open a file of an image for reading and writing."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    stack.callback(os.close, fd)
    return fd
