"""What one process of a live sandbox does to pid 1, to its commands, and to what they cost: nothing gets away.

Processes of one sandbox share its user, its files and its loopback. What they may not do is stop it from serving, get
away from the end of their tree, or hold more than the sandbox may. Each attempt is first shown to work outside, where
it is not in the table of what the kernel refuses.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from cloche.backends.local.backend import LocalBackend
from cloche.backends.local.live import LocalLiveSandbox
from cloche.core.errors import StartFailed
from cloche.core.events import discard
from cloche.core.limits import MIB, Limits
from cloche.core.policy import Policy
from cloche.core.processes import ProcessRequest
from cloche.core.request import Request
from cloche.core.result import Result, Status
from tests.escape.test_first_process import ALLOWED, END, HEAD, SIGNALS, all_that_is_refused
from tests.harness.escape.runners import end_survivors, new_token, survivors
from tests.harness.processes import children, descendants, is_alive

pytestmark = pytest.mark.both_users
PATIENCE_S = 250.0
TIMEOUT_S = 0.5
GROWTH_KIB, MOST_UNSENT_KIB = 512, 2048  # of pid 1: what is no growth, and what waits for who does not read
# As root with control groups and without; as another user always without.
MODES = pytest.mark.parametrize("use_cgroups", [True, False] if os.geteuid() == 0 else [False])


@asynccontextmanager
async def opened(*, use_cgroups: bool = True, **limits: Any) -> AsyncIterator[LocalLiveSandbox]:
    """Hold a live sandbox, for as long as anybody is patient."""
    async with (
        asyncio.timeout(PATIENCE_S),
        LocalBackend(use_cgroups=use_cgroups).open_live(Policy(), Limits(**limits)) as sandbox,
    ):
        yield sandbox


def attempt(act: Callable[..., Coroutine[Any, Any, None]], **keywords: Any) -> None:
    """Make an attempt in a sandbox of its own."""

    async def begin() -> None:
        async with opened(**keywords) as sandbox:
            await act(sandbox)

    asyncio.run(begin())


async def command(sandbox: LocalLiveSandbox, *argv: str, timeout_s: float = 30.0) -> Result:
    """Run a command."""
    process = await sandbox.start_process(ProcessRequest(argv=argv, timeout_s=timeout_s), discard)
    return await process.result()


async def python(sandbox: LocalLiveSandbox, code: str, timeout_s: float = 30.0) -> Result:
    """Run a program in a fork of pid 1, which is not what `python3` as a command is."""
    return await sandbox.run(Request(code=dedent(code), timeout_s=timeout_s))


async def assert_serves(sandbox: LocalLiveSandbox) -> None:
    """Assert that the next of each kind works."""
    assert (await command(sandbox, "echo", "well")).stdout == "well\n"
    assert (await python(sandbox, "print('well')")).stdout == "well\n"
    await sandbox.write_path("well", b"well")


def pid_1(parent: int | None = None) -> int:
    """Return the number that pid 1 of the only sandbox of this process has outside."""
    for pid in descendants(parent or os.getpid()):
        rows = Path(f"/proc/{pid}/status").read_text().splitlines()
        if any(row.startswith("NSpid:") and row.split()[2:] and row.split()[-1] == "1" for row in rows):
            return pid
    raise AssertionError("there is no pid 1")


def resident_kib(pid: int) -> int:
    """Return the resident memory of a process."""
    return int(Path(f"/proc/{pid}/status").read_text().partition("VmRSS:")[2].split()[0])


# The end of a tree.

NAMED = "import ctypes, os, signal, threading, time\nlibc = ctypes.CDLL(None)\nlibc.prctl(15, {name!r}, 0, 0, 0)\n"
UP = "print('up', flush=True)\ntime.sleep(60)\n"
# What keeps others from looking at the namespaces of a process, by which its tree is known …
HIDING = {
    "not dumpable": "libc.prctl(4, 0, 0, 0, 0)\n" + UP,
    "without its first thread": """
threading.Thread(target=lambda: (time.sleep(0.1), print('up', flush=True), time.sleep(60))).start()
libc.syscall({'x86_64': 60, 'aarch64': 93}[os.uname().machine], 0)
""",
}
# … and what gets away from its group, its session, its parent.
LEAVING = {
    "a daemon": """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        print('up', flush=True)
        os.closerange(0, 3)
        time.sleep(60)
    os._exit(0)
time.sleep(60)
""",
    "one that stops its parent": """
parent = os.getpid()
if os.fork() == 0:
    os.setsid()
    print('up', flush=True)
    while os.getppid() == parent:
        try:
            os.kill(parent, signal.SIGSTOP)
        except ProcessLookupError:
            break
    time.sleep(60)
time.sleep(60)
""",
    "one that is always another": """
if os.fork() == 0:
    os.setsid()
    print('up', flush=True)
    while True:
        if os.fork():
            os._exit(0)
time.sleep(60)
""",
}


def named(code: str, token: str) -> str:
    """Return a program whose processes are found by their name."""
    return NAMED.format(name=token[-15:].encode()) + code


@pytest.mark.parametrize("name", HIDING)
def test_outside_it_cannot_be_looked_at(name: str) -> None:
    """Somebody of the same user, who is not root, learns nothing of its namespaces while it lives."""
    token = new_token()
    look = f"""
import os, subprocess, sys
process = subprocess.Popen([sys.executable, "-c", {named(HIDING[name], token)!r}], stdout=subprocess.PIPE)
assert process.stdout.readline() == b"up\\n"
try:
    os.stat(f"/proc/{{process.pid}}/ns/uts")
except (PermissionError, FileNotFoundError):
    print("hidden", process.poll())
process.kill()
"""
    someone = {"user": 65534} if os.geteuid() == 0 else {}
    python = "/usr/bin/python3" if someone else sys.executable
    try:
        found = subprocess.run([python, "-c", look], capture_output=True, text=True, check=False, **someone)
        assert found.stdout == "hidden None\n", found.stderr
    finally:
        end_survivors(token)


@pytest.mark.parametrize("name", list(LEAVING)[:2])  # the last one nobody would catch outside
def test_outside_it_gets_away(name: str) -> None:
    """Who kills the process group leaves somebody alive."""
    token = new_token()
    command = [sys.executable, "-c", named(LEAVING[name], token)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"up\n"
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            assert any(survivors(token) for _ in range(100))
        finally:
            end_survivors(token)


@pytest.mark.parametrize("name", [*HIDING, *LEAVING])
def test_a_time_out_ends_all_of_a_tree(name: str) -> None:
    """Of a program that is a fork of pid 1, and of one that was executed; what others have started goes on."""

    async def act(sandbox: LocalLiveSandbox) -> None:
        other = await sandbox.start_process(ProcessRequest(argv=("sleep", "60")), discard)
        for run in (python, lambda sandbox, code, seconds: command(sandbox, "python3", "-c", code, timeout_s=seconds)):
            token = new_token()
            result = await run(sandbox, named((HIDING | LEAVING)[name], token), TIMEOUT_S)
            assert result.timed_out, result.stderr
            assert result.stdout == "up\n"
            assert result.duration < TIMEOUT_S + 5
            assert_gone(lambda token=token: survivors(token))  # who runs faster than he is found is looked for again
        await assert_serves(sandbox)
        assert [row.id for row in await sandbox.list_processes() if row.exit_code is None] == [other.id]

    attempt(act, pids=40)


def test_an_ended_process_has_no_tree_but_its_own() -> None:
    """To kill what is left of one ends nothing of those that came later, and whatever it has left behind."""

    async def act(sandbox: LocalLiveSandbox) -> None:
        token = new_token()
        leave = f"setsid sh -c 'exec -a {token} sleep 60' >/dev/null 2>&1 & sleep 0.1"
        first = await sandbox.start_process(ProcessRequest(argv=("bash", "-c", leave)), discard)
        gone = await sandbox.start_process(ProcessRequest(argv=("true",)), discard)
        await first.wait()
        await gone.wait()
        later = [await sandbox.start_process(ProcessRequest(argv=("sleep", "60")), discard) for _ in range(8)]
        for one in (first, gone):
            await (await sandbox.connected()).ask("kill", id=one.id)
        await assert_serves(sandbox)
        assert not survivors(token)
        running = {row.id for row in await sandbox.list_processes() if row.exit_code is None}
        assert running == {one.id for one in later}

    attempt(act, pids=40)


# Pid 1, and the guest that waits for the next order.


def test_pid_1_is_not_the_guests_to_change() -> None:
    """What would change, read or slow it down is refused, and what is allowed does no harm to who comes next."""

    async def act(sandbox: LocalLiveSandbox) -> None:
        assert (await python(sandbox, all_that_is_refused())).stdout == "[]\n"
        for code in ALLOWED.values():
            result = await python(sandbox, f"{HEAD}{dedent(code).format(signals=SIGNALS)}{END}")
            assert (result.status, result.exit_code) == (Status.ERROR, 3), result.stderr
            await assert_serves(sandbox)

    attempt(act)


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_who_waits_keeps_nobody_from_starting(number: signal.Signals) -> None:
    """Others of its user may not stop or end the guest that waits for the next order, where this host has ids.

    Where they may, the next one is carried out all the same.
    """
    stop = f"""
        import os, time
        def send():
            for pid in os.listdir("/proc"):
                if pid.isdigit() and int(pid) not in (1, os.getpid()):
                    try:
                        os.kill(int(pid), {int(number)})
                    except OSError:
                        refused.append(pid)  # or it is on its way here, or gone
                    else:
                        return int(pid)
        refused = []
        while not (found := send()) and len(refused) < 200:
            time.sleep(0.001)
        while found and {int(number)} != {int(signal.SIGSTOP)} and os.path.exists(f"/proc/{{found}}"):
            time.sleep(0.001)
        print("sent" if found else "refused")
    """

    async def act(sandbox: LocalLiveSandbox) -> None:
        assert (await python(sandbox, stop)).stdout in ("refused\n", *(() if os.geteuid() == 0 else ("sent\n",)))
        assert (await command(sandbox, "echo", "well", timeout_s=10)).stdout == "well\n"

    attempt(act)


def test_nothing_is_inherited_but_streams() -> None:
    """No descriptor of pid 1, or of another process, reaches a command, a program, or what runs on a terminal."""
    look = """
        import os
        found = {name: os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")
                 if os.path.exists(f"/proc/self/fd/{name}")}
        print(sorted((int(name), path.partition(":")[0]) for name, path in found.items()))
    """
    look = dedent(look)
    streams = [(number, "pipe") for number in range(3)]
    report = [(1023, "pipe")]

    async def act(sandbox: LocalLiveSandbox) -> None:
        busy = [await sandbox.start_process(ProcessRequest(argv=("cat",)), discard) for _ in range(2)]
        for _ in range(2):
            assert (await command(sandbox, "python3", "-c", look)).stdout == f"{streams}\n"
            assert (await python(sandbox, look)).stdout == f"{[(0, '/dev/null'), *streams[1:], *report]}\n"
        on_terminal = ProcessRequest(argv=("python3", "-c", look), terminal=(24, 80))
        shown = (await (await sandbox.start_process(on_terminal, discard)).result()).stdout
        assert shown.strip() == str([(number, "/dev/pts/0") for number in range(3)])
        for one in busy:
            one.kill()

    attempt(act)


# What is the sandbox's, and runs out.

SENDS = """
    import os, signal, socket
    ours, theirs = socket.socketpair()
    try:
        while True:
            socket.send_fds(ours, [b"x"], [ours.fileno(), theirs.fileno()] * 100)
    except OSError as error:
        print(error.errno, flush=True)
    if os.fork() == 0:
        os.closerange(0, 3)
        signal.pause()
"""
FORKS = """
    import os, time
    try:
        while True:
            if os.fork() == 0:
                time.sleep(60)
    except OSError as error:
        print(error.errno, flush=True)
    time.sleep(60)
"""


def test_descriptors_on_their_way_keep_nobody_from_starting() -> None:
    """Whoever leaves as many as its user may have on their way, in sockets that live on, takes nothing from others."""

    async def act(sandbox: LocalLiveSandbox) -> None:
        for _ in range(2):
            assert (await python(sandbox, SENDS)).stdout == "109\n"
            await assert_serves(sandbox)

    attempt(act)


@MODES
def test_processes_without_end_are_an_error_of_who_wants_one_more(use_cgroups: bool) -> None:
    """Pid 1 goes on, says that there are no more or starts one, and serves again when they are ended."""

    async def act(sandbox: LocalLiveSandbox) -> None:
        hoard = await sandbox.start_process(ProcessRequest(argv=("python3", "-c", dedent(FORKS))))
        assert await hoard.stdout.read() == b"11\n"
        for _ in range(4):
            with suppress(StartFailed):
                await command(sandbox, "true")
        hoard.kill()
        await hoard.wait()
        bomb = await command(sandbox, "sh", "-c", "f() { f | f & }; f; sleep 60", timeout_s=TIMEOUT_S)
        assert not bomb.ok
        await sandbox.list_processes()

    attempt(act, pids=30, use_cgroups=use_cgroups)


GROWS = """
import os, sys, threading, time
held = []
def grow():
    while True:
        held.append(b"x" * (8 << 20))
        time.sleep(0.01)
"""
GROWING = {
    "a command": GROWS + "grow()",
    "one whose first thread has ended": GROWS
    + "import ctypes\nthreading.Thread(target=grow).start()\n"
    + "ctypes.CDLL(None).syscall({'x86_64': 60, 'aarch64': 93}[os.uname().machine], 0)",
}


@MODES
@pytest.mark.parametrize("name", GROWING)
def test_memory_ends_the_tree_that_has_most_of_it(name: str, use_cgroups: bool) -> None:
    """It is called out of memory; others go on, and so does pid 1."""

    async def act(sandbox: LocalLiveSandbox) -> None:
        other = await sandbox.start_process(ProcessRequest(argv=("sleep", "60")), discard)
        result = await command(sandbox, "python3", "-c", GROWING[name])
        assert result.status is Status.OUT_OF_MEMORY or "MemoryError" in result.stderr
        await assert_serves(sandbox)
        assert [row.id for row in await sandbox.list_processes() if row.exit_code is None] == [other.id]

    attempt(act, memory_bytes=96 * MIB, use_cgroups=use_cgroups)


@MODES
def test_memory_of_who_was_left_behind_is_the_sandboxs(use_cgroups: bool) -> None:
    """A daemon that grows when its command has ended, and nothing else runs, is ended before it has much more."""
    token = new_token()
    daemon = named(GROWS + "grow()", token)
    leaves = f"import subprocess\nsubprocess.Popen(['python3', '-c', {daemon!r}], start_new_session=True)"

    async def act(sandbox: LocalLiveSandbox) -> None:
        most = 0
        await command(
            sandbox,
            "python3",
            "-c",
            f"import os\n{leaves.replace('start_new_session', 'stdout=-3, stderr=-3, start_new_session')}",
        )
        pid = pid_1()
        while left := survivors(token):
            most = max(most, *(resident_of(one) for one in left))
            await asyncio.sleep(0.01)
        assert most < 8 * 96 << 10  # without control groups it is looked at in turns: 800 MiB/s grow between two looks
        assert pid_1() == pid
        await assert_serves(sandbox)

    attempt(act, memory_bytes=96 * MIB, use_cgroups=use_cgroups)


def resident_of(pid: int) -> int:
    """Return the resident memory of a process, 0 of one that is gone."""
    try:
        return resident_kib(pid)
    except (OSError, IndexError):
        return 0


@pytest.mark.parametrize("count", [100, pytest.param(10_000, marks=pytest.mark.soak)])
def test_pid_1_does_not_grow(count: int) -> None:
    """Commands, orphans, and output that nobody reads leave its memory as it was."""
    orphans = "i=0; while [ $i -lt 100 ]; do (setsid true >/dev/null 2>&1 &); i=$((i+1)); done"

    async def act(sandbox: LocalLiveSandbox) -> None:
        async def some(number: int) -> None:
            for _ in range(number):
                await command(sandbox, "true")

        await asyncio.gather(*(some(40) for _ in range(4)))  # of which the ends are kept
        await command(sandbox, "sh", "-c", orphans)
        pid = pid_1()
        before = resident_kib(pid)
        await asyncio.gather(*(some(count // 4) for _ in range(4)))
        for _ in range(count // 100):
            await command(sandbox, "sh", "-c", orphans)
        assert resident_kib(pid) - before < GROWTH_KIB
        unread = await sandbox.start_process(ProcessRequest(argv=("yes",)))
        await unread.stdout.read(1)
        await unread.close()
        assert resident_kib(pid) - before < GROWTH_KIB + MOST_UNSENT_KIB

    attempt(act, pids=200)


def test_what_one_client_sent_is_none_of_the_next_ones_window() -> None:
    """Input that a process has not read yet, from a client that has gone, ends no sandbox when another sends more."""

    async def act(sandbox: LocalLiveSandbox) -> None:
        first = await sandbox.start_process(ProcessRequest(argv=("sh", "-c", "sleep 0.3; wc -c"), kept=True))
        sent = 300_000  # what a pipe holds, and most of a window
        await first.write(bytes(sent))
        first.detach()
        second = await sandbox.attach_process({"id": first.id})
        await second.write(bytes(sent))
        second.close_stdin()
        assert int(await second.stdout.read()) == 2 * sent
        await assert_serves(sandbox)

    attempt(act)


CALLER = """
import asyncio, cloche

async def use(sandbox, name):
    while True:
        await sandbox.exec(["sh", "-c", "setsid sleep 60 & (setsid sleep 60 &)"])
        await sandbox.write_file(name, bytes(3 << 20))
        await sandbox.run("print(1)")
        await sandbox.read_file(name, max_bytes=4 << 20)
        await (await sandbox.terminal(["sleep", "60"])).kill()

async def main():
    while True:
        async with cloche.AsyncSandbox(live=True) as sandbox:
            print("up", flush=True)
            using = [asyncio.create_task(use(sandbox, name)) for name in ("a", "b")]
            await asyncio.wait(using, timeout=0.5)
            for one in using:
                one.cancel()
            await asyncio.wait(using)

asyncio.run(main())
"""


@pytest.mark.parametrize("count", [2, pytest.param(100, marks=pytest.mark.soak)])
@pytest.mark.parametrize("who", ["caller", "helper"])
def test_sigkill_of_who_holds_it_leaves_nothing(who: str, count: int) -> None:
    """Whenever it comes, in a start, a command or a transfer: no process of its is left a moment later."""
    for turn in range(count):
        kill_while_it_is_used(who, after_s=turn * 0.618 % 0.7)  # another moment in each turn


def kill_while_it_is_used(who: str, *, after_s: float) -> None:
    """Kill the caller, or the helpers of one that ends later as it should."""
    with subprocess.Popen([sys.executable, "-c", CALLER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as caller:
        assert caller.stdout is not None
        try:
            assert caller.stdout.readline() == b"up\n"
            time.sleep(after_s)
            while not (seen := descendants(caller.pid)):
                time.sleep(0.001)
            helpers = children(caller.pid) if who == "helper" else []
            for pid in helpers or [caller.pid]:
                os.kill(pid, signal.SIGKILL)
            assert_gone(lambda: [pid for pid in seen if pid not in helpers and is_alive(pid)])
            if helpers:
                caller.send_signal(signal.SIGINT)
            caller.wait(20)
        finally:
            caller.kill()


def assert_gone(find: Callable[[], list[int]]) -> None:
    """Assert that processes end, before they would by themselves."""
    until = time.monotonic() + 20
    while left := find():
        assert time.monotonic() < until, left
        time.sleep(0.01)
