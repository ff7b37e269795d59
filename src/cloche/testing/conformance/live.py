"""Conformance: live sandboxes, whose processes share one file system and one network.

A backend without them, here or at this level, skips these checks with the reason. `live_files` has the file operations.
"""

from __future__ import annotations

import asyncio
import hashlib
import shlex
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from cloche.core.enforcement import Control
from cloche.core.errors import BackendUnavailable, InvalidRequest, SandboxFileError, SandboxFileNotFound
from cloche.core.limits import KIB, MIB
from cloche.core.processes import ProcessRequest
from cloche.core.protocols import OpenLiveSandbox, OpenProcess, OpenStream, SupportsLive
from cloche.core.request import MAX_ONE_ARGUMENT_BYTES
from cloche.core.result import EXIT_TIMEOUT, Result, Status

from .subject import TRIES_S, Broken, Check, Skipped, Subject, describe, expect, expect_ok, expect_that, python, refuses

PATIENCE_S = 60.0
# A command that goes on until it is ended, its first line being its pid.
SLEEPS = "echo $$; exec sleep 1000"
# Start a process that leaves its parent and its session, and, with a second word, its streams; wait until it is there.
LEAVES = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    if sys.argv[2:]:
        null = os.open("/dev/null", os.O_RDWR)
        for number in range(3): os.dup2(null, number)
    with open(sys.argv[1] + ".new", "w") as file: file.write(str(os.getpid()))
    os.rename(sys.argv[1] + ".new", sys.argv[1])
    os.execvp("sleep", ["sleep", "1000"])
while not os.path.exists(sys.argv[1]): time.sleep(0.01)
"""
SERVER = """
import socket, threading
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
def serve(client):
    while data := client.recv(65536):
        client.sendall(data.upper())
    client.sendall(b"bye")
    client.close()
while True:
    threading.Thread(target=serve, args=(server.accept()[0],)).start()
"""
TERMINAL = """
import os, signal, sys
def show(*_): os.write(1, "size {} {}\\n".format(*os.get_terminal_size()).encode())
signal.signal(signal.SIGWINCH, show)
print("ttys", *map(os.isatty, (0, 1, 2)), os.ttyname(0) == os.ttyname(1), flush=True)
show()
try:
    for line in sys.stdin: print("line", line.strip(), flush=True)
    print("end", flush=True)
    while True: signal.pause()
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""
HOARDS = "x = []\nwhile True: x.append(b'x' * 1_000_000)"
FORKS = """
import os, signal
pids = []
try:
    for _ in range(1000):
        pid = os.fork()
        if pid == 0:
            signal.pause()
        pids.append(pid)
except OSError as error:
    print(error.errno, len(pids) < 40)
for pid in pids:
    os.kill(pid, 9)
"""
FILLS = """
import os, time
WORKSPACE = os.getcwd()
for number in range(100):
    time.sleep(0.01)  # for who sums what is there, now and then
    folder = (os.environ["TMPDIR"], os.path.expanduser("~"), WORKSPACE)[number % 3]
    try:
        with open(f"{folder}/fill-{number}", "wb", 0) as file: file.write(bytes(1 << 20))
    except OSError as error:
        print(error.errno, number < 60, folder, number % 3)
        break
"""


@asynccontextmanager
async def opened_live(
    subject: Subject,
    **limits: Any,  # noqa: ANN401 - checked by Limits
) -> AsyncIterator[OpenLiveSandbox]:
    """Open a live sandbox, or skip the check."""
    backend = subject.backend
    if not isinstance(backend, SupportsLive):
        raise Skipped("it gives no live sandboxes")
    opening = backend.open_live(subject.policy, subject.limits.with_changes(**limits))
    try:
        sandbox = await opening.__aenter__()
    except BackendUnavailable as error:
        raise Skipped(str(error)) from error
    try:
        yield sandbox
    finally:
        await opening.__aexit__(None, None, None)


@asynccontextmanager
async def started(sandbox: OpenLiveSandbox, *argv: str, **more: Any) -> AsyncIterator[OpenProcess]:  # noqa: ANN401
    """Start a process with readable streams; kill it on exit."""
    process = await sandbox.start_process(ProcessRequest(argv=argv, **more))
    try:
        yield process
    finally:
        await process.close()


async def run_to_end(sandbox: OpenLiveSandbox, *argv: str, stdin: bytes = b"", **more: Any) -> Result:  # noqa: ANN401
    """Run a command to its end."""
    async with started(sandbox, *argv, **more) as process:
        writing = asyncio.ensure_future(process.write(stdin))
        writing.add_done_callback(lambda _: process.close_stdin())
        try:
            return await process.result()
        finally:
            writing.cancel()


async def shell(sandbox: OpenLiveSandbox, line: str, **more: Any) -> Result:  # noqa: ANN401 - of ProcessRequest
    """Run a shell command line to its end."""
    return await run_to_end(sandbox, "sh", "-c", line, **more)


async def until(stream: OpenStream, expected: bytes) -> bytes:
    """Read until the expected bytes have arrived."""
    received = b""
    async with asyncio.timeout(PATIENCE_S):
        while expected not in received:
            piece = await stream.read()
            if not piece:
                raise Broken(f"a stream ended with {received[-200:]!r}, without {expected!r}")
            received += piece
    return received


async def _first_line(process: OpenProcess) -> str:
    return (await until(process.stdout, b"\n")).split()[0].decode()


async def _lives(sandbox: OpenLiveSandbox, pid: str) -> bool:
    """Tell whether a process inside exists and is not a zombie."""
    looks = f"(while read n s r; do [ $n != State: ] || echo $s; done < /proc/{pid}/status) 2> /dev/null"
    line = f's=$( {looks} ); [ -n "$s" ] || ! kill -0 {pid} 2> /dev/null || s=there; echo $s'
    return (await shell(sandbox, line)).stdout.strip() not in ("", "Z", "X")


async def _expect_gone(sandbox: OpenLiveSandbox, *pids: str) -> None:
    """Break the claim unless the processes end within `PATIENCE_S`."""
    deadline = time.monotonic() + PATIENCE_S
    for pid in pids:
        while await _lives(sandbox, pid):
            expect_that(time.monotonic() < deadline, f"of the processes {pids} some live on")


def _leaving(path: str, *unheard: str) -> str:
    """Return a shell command that leaves a process behind, whose pid is then in a file below TMPDIR."""
    return f'rm -f "$TMPDIR/{path}"; python3 -c {shlex.quote(LEAVES)} "$TMPDIR/{path}" {" ".join(unheard)}'


async def _read(sandbox: OpenLiveSandbox, path: str) -> str:
    return (await sandbox.read_path(path, max_bytes=KIB)).decode().strip()


async def _at_once(subject: Subject) -> None:
    """Two commands and a run wait for each other; all of them see the same files."""
    async with opened_live(subject) as sandbox:
        waits = "cd $TMPDIR; until [ -e first ]; do sleep 0.01; done; echo 2 > $HOME/second; cat first"
        code = (
            "import os, time\nwhile not os.path.exists(os.path.expanduser('~/second')): time.sleep(0.01)\nprint('run')"
        )
        waiting = asyncio.gather(shell(sandbox, waits), sandbox.run(python(code)))
        expect_ok(await shell(sandbox, "cd $TMPDIR; echo 1 > first.new; mv first.new first"))
        outputs = [expect_ok(result).stdout for result in await waiting]
        expect("what they said", outputs, ["1\n", "run\n"])


async def _fifty(subject: Subject) -> None:
    async with opened_live(subject, pids=256) as sandbox:

        async def run_numbered(number: int) -> None:
            line = f"read x; echo $x $A; echo {number} >&2; exit {number}"
            result = await shell(sandbox, line, stdin=f"in-{number}\n".encode(), env={"A": f"env-{number}"})
            outcome = result.stdout, result.stderr, result.exit_code
            expect(f"command {number}", outcome, (f"in-{number} env-{number}\n", f"{number}\n", number))

        await asyncio.gather(*(run_numbered(number) for number in range(50)))


async def _outlives(subject: Subject) -> None:
    """Leave processes behind: one without streams, and one with the streams of its command."""
    async with opened_live(subject) as sandbox:
        expect_ok(await shell(sandbox, _leaving("one", "unheard")))
        code = "import os; os.write(1, b'x' * 60000)"
        result = expect_ok(await shell(sandbox, f'{_leaving("two")}; python3 -c "{code}"'))
        expect("bytes of output", len(result.stdout), 60000)
        for path in ("/tmp/one", "/tmp/two"):
            pid = await _read(sandbox, path)
            expect_that(await _lives(sandbox, pid), f"what left its command behind is gone: {path}")


async def _exits(subject: Subject) -> None:
    rows = {
        "exit 3": 3, "kill -9 $$": 137, "kill -TERM $$": 143, "/no/program": 127, "exec /no/program": 127, "/etc": 126,
    }  # fmt: skip
    async with opened_live(subject) as sandbox:
        for line, code in rows.items():
            expect(f"the exit code of {line}", (await shell(sandbox, line)).exit_code, code)
        await sandbox.write_path("plain", b"true", mode=0o644)
        plain = (await shell(sandbox, "echo $PWD/plain")).stdout.strip()
        for program, code in {"/no/program": 127, "nonesuch": 127, plain: 126, "/etc": 126}.items():
            result = await run_to_end(sandbox, program)
            expect(f"the exit code of {program}", result.exit_code, code)
        expect("the status by a signal", (await shell(sandbox, "kill -9 $$")).status, Status.SIGNALED)


async def _is_given_much(subject: Subject) -> None:
    async with opened_live(subject) as sandbox:
        arguments = [f"{number:05}" * (100_000 // 5) for number in range(10)]
        expect_that(len(arguments[0]) <= MAX_ONE_ARGUMENT_BYTES, "the check itself is wrong")
        script = "import hashlib, sys; print(hashlib.sha256(repr(sys.argv[1:]).encode()).hexdigest())"
        result = expect_ok(await run_to_end(sandbox, "python3", "-c", script, *arguments))
        expect("the arguments", result.stdout.strip(), hashlib.sha256(repr(arguments).encode()).hexdigest())
        data = bytes(range(256)) * (50 * MIB // 256)
        script = "import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())"
        result = expect_ok(await run_to_end(sandbox, "python3", "-c", script, stdin=data))
        expect("standard input", result.stdout.strip(), hashlib.sha256(data).hexdigest())
        expect_ok(await run_to_end(sandbox, "true", stdin=data))


async def _times_out(subject: Subject) -> None:
    """Let a command time out: its descendants end, but no sibling, and no process left by another command."""
    async with opened_live(subject) as sandbox, started(sandbox, "sh", "-c", SLEEPS) as sibling:
        sibling_pid = await _first_line(sibling)
        expect_ok(await shell(sandbox, _leaving("other", "unheard")))
        for seconds in TRIES_S:
            line = f"{_leaving('left', 'unheard')}; echo there; sleep 1000"
            result = await shell(sandbox, line, timeout_s=seconds)
            expect_that(result.status is Status.TIMEOUT, f"the command ended with {describe(result)}")
            expect("exit code", result.exit_code, EXIT_TIMEOUT)
            if result.stdout:
                break
        await _expect_gone(sandbox, await _read(sandbox, "/tmp/left"))
        for pid in (sibling_pid, await _read(sandbox, "/tmp/other")):
            expect_that(await _lives(sandbox, pid), "a time-out has ended what does not belong to its command")


async def _is_killed(subject: Subject) -> None:
    async with opened_live(subject) as sandbox:
        line = f"{_leaving('left', 'unheard')}; {SLEEPS}"
        async with started(sandbox, "sh", "-c", line) as process:
            pid = await _first_line(process)
            process.kill()
            expect("exit code", (await process.result()).exit_code, 137)
        await _expect_gone(sandbox, pid, await _read(sandbox, "/tmp/left"))
        async with started(sandbox, "sh", "-c", line) as process:  # which closes it
            pid = await _first_line(process)
        await _expect_gone(sandbox, pid, await _read(sandbox, "/tmp/left"))


async def _is_not_read(subject: Subject) -> None:
    """Do not read a process that writes endlessly: others continue, and its output can be read later."""
    async with opened_live(subject) as sandbox, started(sandbox, "sh", "-c", "while :; do echo $$; done") as process:
        results = await asyncio.gather(*(shell(sandbox, "head -c 500000 /dev/zero | tr '\\0' x") for _ in range(3)))
        expect("ends of others", [result.status for result in results], [Status.OK] * 3)
        pid = await _first_line(process)
        output = await until(process.stdout, f"{pid}\n".encode() * 1000)
        expect("its lines, but for the first and the last", set(output.split(b"\n")[1:-1]), {pid.encode()})
        expect_that(await _lives(sandbox, pid), "it was ended because nobody read")


async def _terminal(subject: Subject) -> None:
    async with opened_live(subject) as sandbox:
        async with started(sandbox, "python3", "-c", TERMINAL, terminal=(30, 90)) as process:
            await until(process.stdout, b"ttys True True True True\r\nsize 90 30\r\n")
            process.resize(40, 100)
            await until(process.stdout, b"size 100 40\r\n")
            await process.write(b"hello\r")
            await until(process.stdout, b"line hello\r\n")
            process.close_stdin()
            await until(process.stdout, b"end\r\n")
            await process.write(b"\x03")
            await until(process.stdout, b"interrupted\r\n")
            expect("exit code", (await process.result()).exit_code, 0)
        line = f"sleep 1000 & echo $! > $TMPDIR/pid; {SLEEPS}"
        async with started(sandbox, "sh", "-c", line, terminal=(24, 80)) as process:
            pid = await _first_line(process)
        await _expect_gone(sandbox, pid, await _read(sandbox, "/tmp/pid"))


async def _ports(subject: Subject) -> None:
    async with opened_live(subject) as sandbox, started(sandbox, "python3", "-c", SERVER) as server:
        await expect_servers(sandbox)
        port = int(await _first_line(server))
        expect_that(port in [row.port for row in await sandbox.list_ports()], "the server is not listed")
        line = f"import socket; s = socket.create_connection(('127.0.0.1', {port})); s.sendall(b'in'); print(s.recv(9))"
        expect("what a sibling hears", expect_ok(await sandbox.run(python(line))).stdout, "b'IN'\n")
        await asyncio.gather(*(_talk(sandbox, port, number) for number in range(4)))
        server.kill()
        await server.result()
        await refuses(sandbox.connect(port), OSError, "connecting to a server that is gone")


async def expect_servers(sandbox: OpenLiveSandbox) -> None:
    """Skip the check if a sandbox reports that servers inside are not supported."""
    try:
        await sandbox.connect(1)
    except BackendUnavailable as error:
        raise Skipped(str(error)) from error
    except OSError:
        pass


async def _talk(sandbox: OpenLiveSandbox, port: int, number: int) -> None:
    connection = await sandbox.connect(port)
    try:
        data = f"line {number}\n".encode() * 100_000
        writing = asyncio.ensure_future(connection.write(data))
        writing.add_done_callback(lambda _: connection.end())
        received = bytearray()
        async with asyncio.timeout(PATIENCE_S):
            while piece := await connection.read():
                received += piece
        expect_that(received == data.upper() + b"bye", "what a connection carries is not what was sent")
    finally:
        connection.close()


async def _signals(subject: Subject) -> None:
    trap = "trap 'echo got; exit 5' USR1; echo $$; while :; do sleep 0.01; done"
    async with opened_live(subject) as sandbox:
        async with started(sandbox, "sh", "-c", trap) as process:
            expect_ok(await shell(sandbox, f"kill -USR1 {await _first_line(process)}"))
            await until(process.stdout, b"got\n")
            expect("exit code", (await process.result()).exit_code, 5)
        for to in ("process", "group", "tree"):
            async with started(sandbox, "sh", "-c", trap) as process:
                await _first_line(process)
                process.signal(10, to)
                await until(process.stdout, b"got\n")
                expect(f"exit code of one whose {to} was sent a signal", (await process.result()).exit_code, 5)


async def _memory(subject: Subject) -> None:
    async with opened_live(subject, memory_bytes=192 * MIB) as sandbox:
        async with started(sandbox, "sh", "-c", SLEEPS) as sibling:
            pid = await _first_line(sibling)
            results = await asyncio.gather(run_to_end(sandbox, "python3", "-c", HOARDS), sandbox.run(python(HOARDS)))
            statuses = {result.status for result in results}
            expect_that(Status.OUT_OF_MEMORY in statuses, f"hoarding ended with {describe(results[0])}")
            expect_that(Status.OK not in statuses, "hoarding has gone well")
            expect_that(await _lives(sandbox, pid), "a command was ended that had not caused it")
        expect_ok(await sandbox.run(python("pass")))


async def _pids(subject: Subject) -> None:
    async with opened_live(subject, pids=40) as sandbox:
        result = await run_to_end(sandbox, "python3", "-c", FORKS)
        expect("what forking comes to", result.stdout, "11 True\n")
        expect_ok(await shell(sandbox, "true"))


async def _disk(subject: Subject) -> None:
    async with opened_live(subject, disk_bytes=16 * MIB, tmp_bytes=16 * MIB) as sandbox:
        result = await run_to_end(sandbox, "python3", "-c", FILLS)
        if result.status is Status.DISK_LIMIT:  # there it is the end of what is at work; the files can be removed
            names = [f"{folder}/{row.name}" for folder in ("/tmp", ".") for row in await sandbox.list_path(folder)]
            expect_that(0 < len(names) < 100, f"{len(names)} MiB were written")
            for name in names:
                await sandbox.remove_path(name)
            await sandbox.write_path("again", bytes(MIB // 2))
            return
        expect_ok(result)
        expect("what filling the disk comes to", result.stdout.split()[:2], ["28", "True"])
        folder, first = result.stdout.split()[2:]
        await refuses(sandbox.write_path(f"{folder}/more", bytes(8 * MIB)), SandboxFileError, "writing to a full disk")
        await sandbox.remove_path(f"{folder}/fill-{first}")
        await sandbox.write_path(f"{folder}/again", bytes(MIB // 2))


async def _fresh(subject: Subject) -> None:
    async with opened_live(subject) as sandbox:
        leaves = "import os, sys\nos.environ['LEFT'] = 'x'; os.chdir(os.environ['TMPDIR']); sys.left = 1; left = 1"
        looks = "import os, sys\nprint(os.environ.get('LEFT'), hasattr(sys, 'left'), 'left' in globals(), os.getcwd())"
        where = expect_ok(await sandbox.run(python(looks))).stdout
        for _ in range(2):
            expect_ok(await sandbox.run(python(leaves)))
            expect("what a run finds of another", expect_ok(await sandbox.run(python(looks))).stdout, where)
        results = await asyncio.gather(*(sandbox.run(python(f"print({n}); {n} * 2", stdin=b"x")) for n in range(5)))
        outcomes = [(result.stdout, result.value) for result in results]
        expect("what runs at once come to", outcomes, [(f"{n}\n", 2 * n) for n in range(5)])
        says = "echo $A; [ $PWD = $TMPDIR ] || echo elsewhere"
        expect("env and cwd", (await shell(sandbox, says, env={"A": "1"}, cwd="/tmp")).stdout, "1\n")
        expect("env after", (await shell(sandbox, says)).stdout, "\nelsewhere\n")
        await refuses(shell(sandbox, "true", cwd="/no/where"), SandboxFileNotFound, "working in no folder")


async def _comes_back(subject: Subject) -> None:
    """Detach from a process, attach again by its id, read its output, and attach once more after its end."""
    async with opened_live(subject) as sandbox:
        line = "echo one; until [ -e $TMPDIR/go ]; do sleep 0.01; done; echo two; exit 4"
        first = await sandbox.start_process(ProcessRequest(argv=("sh", "-c", line), kept=True))
        await until(first.stdout, b"one\n")
        first.detach()
        rows = {row.id: row for row in await sandbox.list_processes()}
        expect("whether it runs", rows[first.id].exit_code, None)
        again = await sandbox.attach_process({"id": first.id})
        await sandbox.write_path("/tmp/go", b"")
        await until(again.stdout, b"two\n")
        expect("exit code", (await again.result()).exit_code, 4)
        rows = {row.id: row for row in await sandbox.list_processes()}
        expect("what the list says of its end", rows[first.id].exit_code, 4)
        late = await sandbox.attach_process({"id": first.id})
        expect("exit code, asked again", (await late.result()).exit_code, 4)
        await refuses(sandbox.attach_process({"id": "nonesuch"}), InvalidRequest, "attaching to no process")


async def _is_cancelled(subject: Subject) -> None:
    async with opened_live(subject) as sandbox:
        running = asyncio.ensure_future(sandbox.run(python("open('up', 'w').close()\nwhile True: pass")))
        expect_ok(await shell(sandbox, "until [ -e up ]; do sleep 0.01; done", timeout_s=PATIENCE_S))
        running.cancel()
        (ended,) = await asyncio.gather(running, return_exceptions=True)
        expect_that(isinstance(ended, asyncio.CancelledError), f"a cancelled run came to {ended!r}")
        expect("what runs after that", [row for row in await sandbox.list_processes() if row.exit_code is None], [])


_check = partial(Check, family="live")

CHECKS: tuple[Check, ...] = (
    _check(name="live: at once", claim="commands and runs go on at once, with the same files", attempt=_at_once),
    _check(name="live: fifty at once", claim="fifty commands at once come each to its own end", attempt=_fifty),
    _check(
        name="live: background",
        claim="what a command leaves behind delays its end by nothing, and lives on; no output is lost",
        attempt=_outlives,
    ),
    _check(name="live: exit codes", claim="128 and the signal, 127 and 126 as from a shell", attempt=_exits),
    _check(name="live: large input", claim="1 MiB of arguments and 50 MiB of stdin arrive", attempt=_is_given_much),
    _check(name="live: time-out", claim="a time-out ends a command's whole tree, and only that", attempt=_times_out),
    _check(name="live: kill", claim="killing or closing a process ends its whole tree", attempt=_is_killed),
    _check(name="live: not read", claim="who does not read stops its own process alone", attempt=_is_not_read),
    _check(
        name="live: terminal",
        claim="a terminal has a size, Ctrl-C, an end, and ends with its client",
        attempt=_terminal,
    ),
    _check(name="live: ports", claim="servers are reached by siblings and from outside, and listed", attempt=_ports),
    _check(name="live: signals", claim="signals pass between commands, and from outside", attempt=_signals),
    _check(
        name="live: memory",
        claim="who uses too much memory is ended and says so, and nobody else",
        attempt=_memory,
        rests_on=Control.MEMORY,
    ),
    _check(
        name="live: pids",
        claim="the processes of a sandbox are bounded",
        attempt=_pids,
        rests_on=Control.PIDS,
        alone=True,
    ),
    _check(
        name="live: disk",
        claim="all that can be written to is bounded, and says so",
        attempt=_disk,
        rests_on=Control.DISK,
    ),
    _check(name="live: fresh runs", claim="no run or command leaves state to the next", attempt=_fresh),
    _check(name="live: attach", claim="a process is found again by its id, also after its end", attempt=_comes_back),
    _check(name="live: cancelled", claim="a run that is cancelled is ended", attempt=_is_cancelled),
)
