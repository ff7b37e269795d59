"""Conformance: limits are enforced, and everything below them works."""

from __future__ import annotations

import time
from functools import partial

from cloche.core.enforcement import Control
from cloche.core.errors import InvalidRequest
from cloche.core.limits import KIB, MIB
from cloche.core.request import MAX_ARGV_BYTES, MAX_ONE_ARGUMENT_BYTES, MAX_STDIN_BYTES, Request
from cloche.core.result import Status

from .subject import (
    Broken,
    Check,
    Subject,
    bash,
    command,
    describe,
    ends,
    expect,
    expect_ok,
    expect_that,
    least_s,
    python,
)

READ_STDIN = """
import hashlib, sys
digest, size = hashlib.sha256(), 0
while data := sys.stdin.buffer.read(1 << 20):
    digest.update(data)
    size += len(data)
print(size, digest.hexdigest())
"""


async def _ends_in_time(subject: Subject, code: str) -> None:
    usual_s = await least_s(subject)
    started = time.monotonic()
    result = await subject.run(python(code), timeout_s=1)
    took = time.monotonic() - started
    expect_that(result.status is Status.TIMEOUT, f"the run ended with {describe(result)}")
    message = f"a time-out of 1 s returned after {took:.1f} s; to do nothing took {usual_s:.1f} s"
    expect_that(took < 20 + 3 * usual_s, message)


async def _one_run(subject: Subject) -> None:
    async with subject.open() as sandbox:
        result = await sandbox.run(python("import time; time.sleep(60)", timeout_s=1))
        expect_that(result.status is Status.TIMEOUT, f"the run ended with {describe(result)}")
        expect_ok(await sandbox.run(python("import time; time.sleep(1.5)")))


async def _compile_counts(subject: Subject) -> None:
    """Bash reads its script while it runs: the first command stands for a slow compiler."""
    result = await subject.run(bash("slow() { sleep 60; }\nslow && echo compiled"), timeout_s=1)
    expect("status", (result.status, result.stdout), (Status.TIMEOUT, ""))


async def _truncated(subject: Subject) -> None:
    code = "print('HEAD' + 'x' * 300_000 + 'TAIL', end='')\nraise SystemExit(5)"
    result = await subject.run(python(code), output_bytes=4 * KIB)
    expect("truncated", (result.truncated, result.status, result.exit_code), (True, Status.ERROR, 5))
    expect_that(result.stdout.startswith("HEADxxx"), f"the head is lost: {result.stdout[:20]!r}")
    expect_that(result.stdout.endswith("xxxTAIL"), f"the tail is lost: {result.stdout[-20:]!r}")
    expect_that(len(result.stdout_bytes) < 5 * KIB, f"{len(result.stdout_bytes)} bytes were kept of 4096")


async def _at_limit(subject: Subject) -> None:
    result = expect_ok(await subject.run(python("print('x' * 4096, end='')"), output_bytes=4 * KIB))
    expect("stdout at its limit", (result.truncated, len(result.stdout)), (False, 4 * KIB))


async def _per_stream(subject: Subject) -> None:
    code = "import sys; print('o' * 9000); print('e', file=sys.stderr)"
    result = expect_ok(await subject.run(python(code), output_bytes=4 * KIB))
    expect("the other stream", (result.truncated, result.stderr), (True, "e\n"))


async def _disk_again(subject: Subject) -> None:
    async with subject.open(disk_bytes=16 * MIB) as sandbox:
        first = await sandbox.run(python("open('big', 'wb').write(bytes(40 << 20))"))
        expect_that(first.status is not Status.OK, "40 MiB fit into a disk of 16 MiB")
        expect_ok(await sandbox.run(command("rm", "-f", "big")))  # a command needs no room for its own code
        second = expect_ok(await sandbox.run(bash("head -c 8M /dev/zero > half; wc -c < half")))
        expect("what fits after clearing up", second.stdout.strip(), str(8 * MIB))


async def _stdin(subject: Subject, size: int) -> None:
    import hashlib

    data = (b"0123456789abcde\n" * (size // 16 + 1))[:size]
    result = expect_ok(await subject.run(python(READ_STDIN, stdin=data)))
    expect("what was read", result.stdout.split(), [str(size), hashlib.sha256(data).hexdigest()])


async def _stdin_refused(subject: Subject) -> None:
    await _refused(subject, lambda: python("pass", stdin=bytes(MAX_STDIN_BYTES + 1)))


async def _argv(subject: Subject) -> None:
    """Test arguments of code, and of a command."""
    arguments = [
        "é" * 1000,
        *(chr(97 + n) * (MAX_ONE_ARGUMENT_BYTES - 1) for n in range(7)),
        "",
        "a b",
        "--help",
        "$HOME;`id`",
        "'\"",
    ]
    spare = MAX_ARGV_BYTES - sum(len(argument.encode()) + 1 for argument in arguments)
    arguments.append("z" * (spare - 1 - 3 * KIB))  # room for the command's own words
    digest = (
        "import hashlib, sys; print(len(sys.argv) - 1, hashlib.sha256('\\0'.join(sys.argv[1:]).encode()).hexdigest())"
    )
    first = expect_ok(await subject.run(python(digest, *arguments)))
    async with subject.open() as sandbox:
        await sandbox.write_file("digest.sh", b"printf '%s ' $#; printf '%s\\0' \"$@\" | sha256sum\n")
        second = expect_ok(await sandbox.run(Request(argv=("bash", "digest.sh", *arguments))))
    import hashlib

    joined = "\0".join(arguments).encode()
    expect("the code's arguments", first.stdout.split(), [str(len(arguments)), hashlib.sha256(joined).hexdigest()])
    expect(
        "the command's", second.stdout.split()[:2], [str(len(arguments)), hashlib.sha256(joined + b"\0").hexdigest()]
    )


async def _argv_refused(subject: Subject) -> None:
    for argument in ("a\0b", "\ud800", "x" * (MAX_ONE_ARGUMENT_BYTES + 1)):
        await _refused(subject, lambda argument=argument: python("pass", argument))
    await _refused(subject, lambda: python("pass", *["x" * 1024] * 1030))


async def _env_refused(subject: Subject) -> None:
    for env in ({"A=B": "c"}, {"": "c"}, {"A": "b\0c"}, {"A\0": "c"}):
        await _refused(subject, lambda env=env: python("pass", env=env))


async def _refused(subject: Subject, make: object) -> None:
    """Expect InvalidRequest before anything runs, from any layer."""
    try:
        result = await subject.run(make())  # type: ignore[operator]
    except InvalidRequest:
        return
    raise Broken(f"it was not refused; the run ended with {describe(result)}")


async def _env(subject: Subject) -> None:
    env = {"PLAIN": "x", "ODD": "a b\n\t'\"$HOME ä", "EMPTY": "", "lower_1": "=="}
    code = "import os; print(ascii([os.environ[name] for name in ('PLAIN', 'ODD', 'EMPTY', 'lower_1')]))"
    result = expect_ok(await subject.run(python(code, env=env)))
    expect("the variables", result.stdout.strip(), ascii(list(env.values())))


async def _env_minimum(subject: Subject) -> None:
    result = expect_ok(await subject.run(bash('[ -d "$HOME" ] && [ -n "$PATH" ] && [ -w "$TMPDIR" ] && echo yes')))
    expect("HOME, PATH and TMPDIR usable", result.stdout, "yes\n")


_limits = partial(ends, family="limits")
_time = partial(Check, family="limits")

CHECKS: tuple[Check, ...] = (
    _time(
        name="busy loop", claim="a busy loop is ended in time", attempt=partial(_ends_in_time, code="while True: pass")
    ),
    _time(
        name="sleep",
        claim="a sleeper is ended in time",
        attempt=partial(_ends_in_time, code="import time; time.sleep(200)"),
    ),
    _time(
        name="deaf",
        claim="who ignores signals and closes the streams is ended in time",
        attempt=partial(
            _ends_in_time,
            code="import os, signal, time\nfor n in (1, 2, 3, 13, 15): signal.signal(n, signal.SIG_IGN)\n"
            "for n in (0, 1, 2): os.close(n)\nwhile True: time.sleep(1)",
        ),
    ),
    _time(name="one run's time-out", claim="a request's own time-out holds for that run alone", attempt=_one_run),
    _time(name="compile step", claim="what precedes the program counts as its time", attempt=_compile_counts),
    _limits(
        "memory is usable",
        "half of the memory can be used",
        lambda: python("hoard = b'x' * (96 << 20)"),
        memory_bytes=192 * MIB,
    ),
    _limits(
        "processes are usable",
        "half of the processes can be had at once",
        lambda: bash("for n in 1 2 3 4 5 6 7 8; do sleep 0.5 & done; wait; echo done"),
        pids=20,
        stdout="done\n",
        alone=True,
    ),
    _limits(
        "threads are usable",
        "a program may start threads",
        lambda: python(
            # Each writes its line in one piece: `print` may be interrupted before the line's end.
            "import os, threading\n"
            "threads = [threading.Thread(target=os.write, args=(1, b'x\\n')) for _ in range(4)]\n"
            "[t.start() for t in threads]; [t.join() for t in threads]\nNone"
        ),
        stdout="x\n" * 4,
    ),
    _limits(
        "disk is usable",
        "half of the disk can be filled",
        lambda: python("open('half', 'wb').write(bytes(16 << 20))\nNone"),
        disk_bytes=32 * MIB,
    ),
    _time(
        name="room again",
        claim="a run after one that filled the disk can clear up and go on",
        attempt=_disk_again,
        rests_on=Control.DISK,
    ),
    _time(
        name="truncation", claim="output over the limit keeps head and tail, status and exit code", attempt=_truncated
    ),
    _time(name="no truncation", claim="output of exactly the limit is whole", attempt=_at_limit),
    _time(name="truncation per stream", claim="each stream has its own limit", attempt=_per_stream),
    *(
        Check(
            name=f"stdin of {size}",
            family="stdin",
            claim=f"{size} bytes of stdin arrive whole",
            attempt=partial(_stdin, size=size),
        )
        for size in (0, 1, MIB, MAX_STDIN_BYTES)
    ),
    Check(name="too much stdin", family="stdin", claim="more than 50 MiB of stdin is refused", attempt=_stdin_refused),
    ends(
        "unread stdin",
        "a program need not read its stdin",
        lambda: python("pass", stdin=bytes(4 * MIB)),
        family="stdin",
    ),
    Check(
        name="long argv", family="argv", claim="about 1 MiB of arguments arrives, each as it was given", attempt=_argv
    ),
    Check(name="bad argv", family="argv", claim="NUL, lone surrogates and too much are refused", attempt=_argv_refused),
    Check(name="env", family="env", claim="variables arrive as they were given", attempt=_env),
    Check(name="env minimum", family="env", claim="HOME, PATH and TMPDIR are usable", attempt=_env_minimum),
    Check(
        name="bad env", family="env", claim="names and values no environment can hold are refused", attempt=_env_refused
    ),
)
