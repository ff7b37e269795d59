"""The firecracker backend over a stand-in for its program: real calls, real kernel and agent, real vsock, no KVM.

One machine, booted once, serves all that needs no other.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from cloche.backends.microvm.backend import find_acceleration
from cloche.backends.microvm.firecracker import Firecracker
from cloche.backends.microvm.plan import FIRST_ID, find_image
from cloche.backends.microvm.sandbox import MicroVMOpenSandbox
from cloche.core.enforcement import Level
from cloche.core.events import OutputChunk, discard
from cloche.core.limits import Limits
from cloche.core.policy import Policy
from cloche.core.request import InputFile, Request
from cloche.core.result import Status
from tests.harness.machines import are_there, machines_of, pack_stand_in, programs_of, stand_in_backend

pytestmark = pytest.mark.timeout(600)
LIMITS = Limits(memory_bytes=96 << 20, disk_bytes=16 << 20, pids=32, timeout_s=120)
CALLER = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from tests.harness.machines import stand_in_backend
from cloche.core.limits import Limits
from cloche.core.policy import Policy
from cloche.core.request import Request
async def main():
    async with stand_in_backend(Path(sys.argv[1])).open(Policy(), Limits()) as sandbox:
        await sandbox.run(Request(code="1"))
asyncio.run(main())
"""


@pytest.fixture(scope="module")
def program(microvm_image: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Have the stand-in, and an image that Cloche finds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CLOCHE_MICROVM_IMAGE", str(microvm_image))
        patch.setenv("XDG_CACHE_HOME", str(microvm_image.parents[2]))
        yield pack_stand_in(tmp_path_factory.mktemp("firecracker"))


@dataclass
class Setting:
    """Hold a sandbox, and the loop that it lives in."""

    loop: asyncio.Runner
    sandbox: MicroVMOpenSandbox


@asynccontextmanager
async def opened(program: Path) -> AsyncIterator[MicroVMOpenSandbox]:
    """Open a sandbox over the stand-in."""
    async with stand_in_backend(program).open(Policy(), LIMITS) as sandbox:
        yield sandbox


@pytest.fixture(scope="module")
def setting(program: Path) -> Iterator[Setting]:
    """Have one machine; afterwards it is gone, with its monitor."""
    with asyncio.Runner() as loop:
        opening = opened(program)
        yield Setting(loop, loop.run(opening.__aenter__()))
        machine = machines_of(os.getpid())
        loop.run(opening.__aexit__(None, None, None))
    assert len(machine) == 2  # the monitor, and what emulates for it
    _wait_until(lambda: not are_there(machine))


def run(setting: Setting, code: str, **more: object) -> str:
    """Run code there and return what it writes."""
    result = setting.loop.run(setting.sandbox.run(Request(code=code, **more)))  # type: ignore[arg-type]
    assert result.status is Status.OK, result.stderr
    return result.stdout


@pytest.mark.soak  # for its length
def test_a_run_and_a_session_share_a_machine(setting: Setting) -> None:
    """Files, input and output go through; a session keeps its state beside runs; more than a page at once arrives."""
    code = "import sys; print(open('a.txt').read(), len(sys.stdin.read())); open('b', 'w').write('c' * 300_000)"
    files = (InputFile(path="a.txt", data=b"one"),)
    result = setting.loop.run(setting.sandbox.run(Request(code=code, files=files, stdin=b"x" * 300_000)))
    assert (result.status, result.stdout) == (Status.OK, "one 300000\n"), result.stderr
    assert [(file.path, file.size) for file in result.files] == [("b", 300_000)]
    assert (result.meta["backend"], result.enforcement.level) == ("firecracker", Level.VM)

    async def talk() -> list[str]:
        session = await setting.sandbox.open_session("python", {})
        said = [(await session.run("x = len(open('b').read())", timeout_s=60, sink=discard)).status.value]
        beside = await setting.sandbox.run(Request(code="print('beside')"))
        said += [beside.stdout, (await session.run("print(x)", timeout_s=60, sink=discard)).stdout]
        await session.close()
        return said

    assert setting.loop.run(talk()) == ["ok", "beside\n", "300000\n"]


@pytest.mark.soak  # for its length
def test_no_program_reaches_the_host_by_the_vsock(setting: Setting) -> None:
    """Neither the port that its agent called, nor another; and no port of the agent's can be taken or called."""
    code = """
import socket
def attempt(name, act):
    with socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM) as one:
        one.settimeout(5)
        try:
            act(one)
            print(name, "works")
        except OSError:
            print(name, "fails")
for cid, port in ((2, 1), (2, 2), (2, 5000), (1, 3), (3, 3)):
    attempt(f"connect {cid} {port}", lambda one: one.connect((cid, port)))
attempt("bind 9", lambda one: one.bind((socket.VMADDR_CID_ANY, 9)))
attempt("bind 2000", lambda one: one.bind((socket.VMADDR_CID_ANY, 2000)))
"""
    *refused, last = run(setting, code).splitlines()
    assert [line.rpartition(" ")[2] for line in refused] == ["fails"] * 6, refused
    assert last == "bind 2000 works"  # so the family itself is there


@pytest.mark.soak  # for its length
def test_there_is_no_way_out(setting: Setting, microvm_image: Path) -> None:
    """No interface but loopback, no disk that could be written; a remount changes nothing outside."""
    disk = microvm_image / "root.ext4"
    digest = hashlib.sha256(disk.read_bytes()).digest()
    code = """
import ctypes, os, socket
print(os.getuid() != 0, [name for _, name in socket.if_nameindex()])
libc = ctypes.CDLL(None, use_errno=True)
print(libc.mount(None, b"/", None, 32, None), libc.unshare(0x10000000), os.path.exists("/dev/vda"))
"""
    assert run(setting, code) == "True ['lo']\n-1 -1 False\n"
    assert hashlib.sha256(disk.read_bytes()).digest() == digest


@pytest.mark.soak  # for its length
def test_the_monitor_is_locked_up(setting: Setting) -> None:
    """It has an id and namespaces of its own, no powers, and a root where not even root can write to the image."""
    run(setting, "1")
    (monitor,) = programs_of(os.getpid())
    rows = dict(
        line.split(":\t", 1) for line in Path(f"/proc/{monitor}/status").read_text().splitlines() if ":\t" in line
    )
    assert (rows["NoNewPrivs"], int(rows["CapEff"], 16)) == ("1", 0)
    if os.geteuid() == 0:
        assert int(rows["Uid"].split()[0]) >= FIRST_ID
        assert rows["Groups"].strip() == ""
    for kind in ("net", "mnt", "ipc", "pid"):
        assert os.readlink(f"/proc/{monitor}/ns/{kind}") != os.readlink(f"/proc/self/ns/{kind}"), kind
    interfaces = Path(f"/proc/{monitor}/net/dev").read_text().splitlines()[2:]
    assert [line.split(":")[0].strip() for line in interfaces] == ["lo"]
    root = Path(f"/proc/{monitor}/root")
    assert not {"home", "root", "proc", "tmp"} & set(os.listdir(root))
    assert set(os.listdir(root / "run")) == {"api", "vsock"}  # the port that the agent called is gone
    for name in ("image/root.ext4", "image/kernel", "firecracker"):
        with pytest.raises(OSError, match="Read-only"):
            (root / name).open("r+b")
    with pytest.raises(OSError, match="Read-only"):
        (root / "new").touch()


@pytest.mark.soak
def test_what_never_gets_up_is_no_kvm(program: Path, microvm_image: Path, tmp_path: Path) -> None:
    """A monitor whose machine hangs is given up in time, and none is started without /dev/kvm; nothing is left."""
    before = programs_of(os.getpid())
    may_try = os.access("/dev/kvm", os.R_OK | os.W_OK)
    hanging = tmp_path / "firecracker"
    hanging.write_text("#!/bin/sh\nexec sleep 60\n")
    hanging.chmod(0o755)
    found = find_acceleration(find_image(), Firecracker(program=str(hanging)))
    assert found.kind == "tcg"
    assert ("within 5 s" if may_try else "/dev/kvm") in found.reason
    _wait_until(lambda: programs_of(os.getpid()) <= before)


@pytest.mark.soak
def test_a_killed_caller_leaves_nothing(program: Path) -> None:
    """Killed in the middle of a boot, it takes the machine and its monitor with it."""
    words = [sys.executable, "-c", CALLER, str(program), str(Path(__file__).parents[2])]
    caller = subprocess.Popen(words)
    _wait_until(lambda: len(machines_of(caller.pid)) == 2)
    machine = machines_of(caller.pid)
    caller.send_signal(signal.SIGKILL)
    caller.wait()
    _wait_until(lambda: not are_there(machine))


@pytest.mark.soak
def test_a_killed_monitor_is_told(program: Path) -> None:
    """A machine that is lost ends the run that it had, within seconds."""

    async def main() -> None:
        async with opened(program) as sandbox:
            before = programs_of(os.getpid())
            await sandbox.run(Request(code="1"))
            (monitor,) = programs_of(os.getpid()) - before
            up = asyncio.Event()
            request = Request(code="print('up', flush=True)\nwhile True: pass")
            running = asyncio.create_task(
                sandbox.run_streaming(request, lambda event: up.set() if isinstance(event, OutputChunk) else None)
            )
            await asyncio.wait_for(up.wait(), 60)
            os.kill(monitor, signal.SIGKILL)
            with pytest.raises(Exception) as caught:
                await asyncio.wait_for(running, 60)
            return type(caught.value).__name__

    assert asyncio.run(main()) in ("OutcomeUnknown", "StartFailed")


def _wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.1)
