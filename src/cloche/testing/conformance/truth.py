"""Conformance: reported enforcement is compared with attempts, and the isolation of every sandbox is tested.

A control reported as `partial` or `absent` makes no claim here. A check of isolation that needs such a control names it
in `rests_on`.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from cloche.core.enforcement import Control, Level, State
from cloche.core.errors import BackendUnavailable
from cloche.core.limits import MIB
from cloche.core.protocols import SupportsSingleRun
from cloche.core.result import Status

from .subject import (
    Attempt,
    Broken,
    Check,
    Subject,
    at_work,
    claims,
    describe,
    enforcement_of,
    eventually,
    expect,
    expect_ok,
    expect_that,
    named_processes,
    python,
    status_of,
)


async def _complete(subject: Subject) -> None:
    enforcement = await enforcement_of(subject)
    expect("controls without a row", [c for c in Control if c not in enforcement.controls], [])
    for control, measure in enforcement.controls.items():
        if measure.state is State.ENFORCED:
            expect_that(measure.mechanism, f"{control} is enforced by nothing that is named")
        if measure.state is State.PARTIAL:
            expect_that(measure.reason, f"{control} is partial for no reason that is given")


async def _agrees(subject: Subject) -> None:
    capabilities, enforcement = subject.backend.capabilities(), await enforcement_of(subject)
    expect("available, name", (capabilities.available, capabilities.backend), (True, subject.backend.name))
    expect_that(
        enforcement.level <= capabilities.level,
        f"a run had level {enforcement.level}, the most is {capabilities.level}",
    )
    if subject.policy.level is not None:
        expect("the level asked for", enforcement.level, subject.policy.level)
    if enforcement.level == capabilities.level:
        expect("controls", dict(enforcement.controls), dict(capabilities.as_enforcement().controls))


async def _require(subject: Subject) -> None:
    """Require a higher level, each control that is not enforced, and finally the available ones."""
    enforcement = await enforcement_of(subject)
    weak = [c for c, measure in enforcement.controls.items() if measure.state is not State.ENFORCED]
    strong = tuple(c for c in enforcement.controls if c not in weak)
    if enforcement.level < max(Level):
        await _unavailable(subject, require_level=Level(enforcement.level + 1))
    for control in weak:
        await _unavailable(subject, require_controls=(control,))
    policy = subject.policy.with_changes(require_level=enforcement.level, require_controls=strong)
    async with subject.open(policy=policy) as sandbox:
        expect_ok(await sandbox.run(python("pass")))


async def _unavailable(subject: Subject, **required: object) -> None:
    policy = subject.policy.with_changes(**required)
    try:
        async with subject.open(policy=policy) as sandbox:
            await sandbox.run(python("pass"))
    except BackendUnavailable as error:
        expect_that(len(str(error)) > 20, f"the refusal does not say why: {error}")
        return
    raise Broken(f"{required} was not refused")


async def _host_files(subject: Subject) -> None:
    """Try to read a world-readable host file, and to create one."""
    secret = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="canary-") as folder:
        os.chmod(folder, 0o777)  # noqa: S103 - whatever keeps the guest out, it shall not be these bits
        await asyncio.to_thread(Path(folder, "canary").write_text, secret)
        code = """
import os, sys
for way in ("", "/proc/self/root", "/proc/1/root"):
    try: print(open(f"{way}{sys.argv[1]}/canary").read())
    except OSError: pass
try: open(sys.argv[1] + "/left", "w").close()
except OSError: pass
"""
        result = expect_ok(await subject.run(python(code, folder)))
        expect_that(secret not in result.stdout, "a file of the host was read")
        expect("files of the host", os.listdir(folder), ["canary"])


Address = tuple[str, int] | str
_LOOPBACKS: tuple[tuple[int, Address], ...] = (
    (socket.AF_INET, ("127.0.0.1", 0)),
    (socket.AF_INET6, ("::1", 0)),
    (socket.AF_UNIX, ""),
)


@contextmanager
def _listeners() -> Iterator[list[tuple[int, Address]]]:
    """Listen on this host's loopback and at an abstract address; yield the addresses that work from here."""
    with ExitStack() as open_sockets:
        reached = []
        for family, bind_address in _LOOPBACKS:
            listening = open_sockets.enter_context(socket.socket(family))
            try:
                listening.bind(bind_address or f"\0canary-{secrets.token_hex(6)}")
            except OSError:
                continue  # no such loopback on this host
            listening.listen()
            address = listening.getsockname()
            with socket.socket(family) as client:
                client.connect(address)
            reached.append((int(family), address.decode() if isinstance(address, bytes) else address))
        yield reached


async def _loopback(subject: Subject) -> None:
    with _listeners() as reached:
        code = f"""
import socket
for family, address in {reached!r}:
    try:
        with socket.socket(family) as client:
            client.settimeout(3)
            client.connect(address)
            print("reached", address)
    except OSError: pass
"""
        expect("what was reached", expect_ok(await subject.run(python(code))).stdout, "")


async def _caller_environment(subject: Subject) -> None:
    secret = secrets.token_hex(16)
    os.environ["CLOCHE_CONFORMANCE_CANARY"] = secret
    try:
        code = """
for path in ("/proc/self/environ", "/proc/1/environ"):
    try: print(open(path).read())
    except OSError: pass
"""
        result = expect_ok(await subject.run(python("import os; print(dict(os.environ))\n" + code)))
    finally:
        del os.environ["CLOCHE_CONFORMANCE_CANARY"]
    expect_that(secret not in result.stdout, "the caller's environment was seen")


async def _caller_process(subject: Subject) -> None:
    """Signal 0 tests the permission and sends nothing (kill(2))."""
    code = """
import os, sys
try: open(f"/proc/{sys.argv[1]}/environ", "rb").read()
except OSError: pass
else: print("read the caller's environment")
try: os.kill(int(sys.argv[1]), 0)
except OSError: pass
else: print("may signal the caller")
"""
    expect("what the guest could do", expect_ok(await subject.run(python(code, str(os.getpid())))).stdout, "")


async def _descriptors(subject: Subject) -> None:
    """Hold an inheritable descriptor open: the guest has only its standard streams and at most a pipe of Cloche's."""
    with tempfile.TemporaryFile() as file:
        os.set_inheritable(file.fileno(), True)
        code = """
import os
for fd in range(3, 200):
    try: print(fd, os.readlink(f"/proc/self/fd/{fd}"))
    except OSError: pass
"""
        lines = expect_ok(await subject.run(python(code))).stdout.splitlines()
    expect("descriptors that are no pipe", [line for line in lines if "pipe:" not in line], [])


@asynccontextmanager
async def _at_work(
    subject: Subject,
    code: str,
    **limits: Any,  # noqa: ANN401 - checked by Limits
) -> AsyncIterator[list[int]]:
    """Run code in the background; yield the host's pids of the process that it names with a token."""
    token = f"work-{secrets.token_hex(6)}"
    async with subject.open(**limits) as sandbox:
        if isinstance(sandbox, SupportsSingleRun):
            sandbox.expect_single_run()
        async with at_work(sandbox, python(f"print('up', flush=True)\nTOKEN = {token!r}\n{code}")) as running:
            await eventually(lambda: running.done() or bool(named_processes(token)), patience_s=8)
            yield named_processes(token)


async def _identity(subject: Subject) -> None:
    async with _at_work(subject, "import os; os.execvp('sleep', [TOKEN, '60'])") as pids:
        for pid in pids:  # none where the sandbox's processes are not this host's
            uids = {int(uid) for uid in status_of(pid).get("Uid", "-1").split()}
            expect_that(not uids & {0, os.getuid()}, f"the guest has the outside uid {uids}")


async def _syscalls(subject: Subject) -> None:
    """Try system calls that no guest needs, by number and harmlessly: each must be refused."""
    code = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
NAMES = ("unshare", "ptrace", "keyctl", "bpf", "mount", "userfaultfd", "io_uring_setup")
NUMBERS = {"x86_64": (272, 101, 250, 321, 165, 323, 425), "aarch64": (97, 117, 219, 280, 40, 282, 425)}
ARGUMENTS = {"unshare": (0x10000000,), "ptrace": (0, 0, 0, 0), "keyctl": (0, -3, 1)}
for name, number in zip(NAMES, NUMBERS[os.uname().machine]):
    if libc.syscall(number, *(ctypes.c_long(a) for a in ARGUMENTS.get(name, (0, 0, 0, 0, 0)))) >= 0:
        print(name, "worked")
    elif ctypes.get_errno() not in (1, 38):
        print(name, os.strerror(ctypes.get_errno()))
"""
    expect("system calls that got through", expect_ok(await subject.run(python(code))).stdout, "")


async def _memory(subject: Subject) -> None:
    code = "import os\nhoard = []\nfor _ in range(200): hoard.append(b'x' * (4 << 20))\nprint('held')"
    result = await subject.run(python(code), memory_bytes=64 * MIB, disk_bytes=16 * MIB, tmp_bytes=16 * MIB)
    expect_that("held" not in result.stdout, "800 MiB were held with a limit of 64 MiB")


async def _cpu(subject: Subject) -> None:
    """Use the CPU for 3 s. A delayed machine may be credited unused quota; then the test is repeated for longer."""
    code = """
import time
def used(): return time.process_time() - first
began, first = time.monotonic(), time.process_time()
for seconds in (3, 6, 12, 24):
    while time.monotonic() < began + seconds: pass
    if used() < seconds / 2: break
print(used(), seconds)
"""
    used, seconds = expect_ok(await subject.run(python(code), cpus=0.2)).stdout.split()
    expect_that(float(used) < float(seconds) / 2, f"{used} s of CPU in {seconds} s with 0.2 CPUs")


async def _pids(subject: Subject) -> None:
    code = """
import os, time
children = 0
try:
    while children < 100:
        if os.fork() == 0:
            time.sleep(30)
            os._exit(0)
        children += 1
except OSError: pass
os.write(1, str(children).encode())
os._exit(0)
"""
    result = expect_ok(await subject.run(python(code), pids=12))
    expect_that(3 <= int(result.stdout) <= 12, f"{result.stdout} children with a limit of 12 processes")


async def _disk(subject: Subject) -> None:
    code = """
import os
held = 0
try:
    for number in range(64):
        with open(f"f{number}", "wb", 0) as file: held += file.write(bytes(1 << 20))
except OSError: pass
os.write(1, str(held).encode())
os._exit(0)
"""
    result = expect_ok(await subject.run(python(code), disk_bytes=16 * MIB))
    expect_that(8 * MIB <= int(result.stdout) <= 16 * MIB, f"{result.stdout} bytes fit into a disk of {16 * MIB}")


async def _time(subject: Subject) -> None:
    result = await subject.run(python("import time; time.sleep(60)"), timeout_s=1)
    expect_that(result.status is Status.TIMEOUT and result.duration < 20, f"the run ended with {describe(result)}")


async def _output(subject: Subject) -> None:
    result = await subject.run(python("while True: print('x' * 100_000)"), flood_bytes=MIB, output_bytes=1000)
    expect_that(result.status is Status.OUTPUT_LIMIT, f"the run ended with {describe(result)}")
    expect_that(len(result.stdout_bytes) < 2000, f"{len(result.stdout_bytes)} bytes were kept of 1000")


def _if_claimed(control: Control, attempt: Attempt) -> Attempt:
    async def compare(subject: Subject) -> None:
        if await claims(subject, control):
            await attempt(subject)

    return compare


ATTEMPTS: dict[Control, tuple[str, Attempt]] = {
    Control.FILESYSTEM: ("no file of the host can be read or left", _host_files),
    Control.NETWORK: ("no listener of the host is reached", _loopback),
    Control.MEMORY: ("twelve times the memory cannot be held", _memory),
    Control.CPU: ("0.2 CPUs give no more", _cpu),
    Control.PIDS: ("no more processes than allowed", _pids),
    Control.DISK: ("no more bytes than allowed", _disk),
    Control.TIME: ("a sleeper is ended", _time),
    Control.OUTPUT: ("a flood is ended and what is kept is bounded", _output),
    Control.SYSCALLS: ("dangerous system calls are refused", _syscalls),
    Control.IDENTITY: ("the guest's outside uid is neither ours nor 0", _identity),
}
_reported, _wall = partial(Check, family="capabilities"), partial(Check, family="walls")

CHECKS: tuple[Check, ...] = (
    _reported(
        name="every control told", claim="each control has a state, with its mechanism or reason", attempt=_complete
    ),
    _reported(name="capabilities agree", claim="capabilities and results tell the same", attempt=_agrees),
    _reported(name="require", claim="less than what is required is refused; what is there is not", attempt=_require),
    *(
        Check(
            name=f"{control} is true",
            family="truth",
            claim=f"where {control} is enforced, {claim}",
            attempt=_if_claimed(control, attempt),
        )
        for control, (claim, attempt) in ATTEMPTS.items()
    ),
    _wall(
        name="host files",
        claim="no file of the host can be read or left",
        attempt=_host_files,
        rests_on=Control.FILESYSTEM,
    ),
    _wall(
        name="host loopback",
        claim="with the network off no listener of the host is reached",
        attempt=_loopback,
        rests_on=Control.NETWORK,
    ),
    _wall(
        name="caller's environment", claim="the caller's environment is not the guest's", attempt=_caller_environment
    ),
    _wall(
        name="caller's process",
        claim="the guest can neither signal nor read the caller",
        attempt=_caller_process,
        rests_on=Control.IDENTITY,
    ),
    _wall(name="descriptors", claim="the guest inherits its standard streams and no file", attempt=_descriptors),
)
