"""Conformance: the content and the status of results."""

from __future__ import annotations

import json
from functools import partial

from cloche.core.enforcement import Control
from cloche.core.limits import MIB
from cloche.core.record import fields
from cloche.core.result import EXIT_TIMEOUT, TIMEOUT_NOTE, ExecutionResult, Result, Status

from .subject import Check, Subject, bash, command, ends, expect, expect_ok, expect_that, python, timed_out

META_KEYS = ("runtime", "versions", "limits", "duration", "backend", "level")


async def _streams(subject: Subject) -> None:
    result = expect_ok(await subject.run(python("import sys; print('out'); print('err', file=sys.stderr)")))
    expect("stdout", result.stdout, "out\n")
    expect("stderr", result.stderr, "err\n")


async def _bytes(subject: Subject) -> None:
    data = bytes(range(256))
    result = expect_ok(await subject.run(python("import sys; sys.stdout.buffer.write(bytes(range(256)))")))
    expect("stdout_bytes", result.stdout_bytes, data)
    expect("stdout", result.stdout, data.decode("utf-8", "replace"))


async def _duration(subject: Subject) -> None:
    result = expect_ok(await subject.run(python("import time; time.sleep(0.5)")))
    expect_that(0.5 <= result.duration < 20, f"half a second of sleep had a duration of {result.duration} s")
    expect_that(abs(result.usage.wall_s - result.duration) < 0.5, f"usage.wall_s {result.usage.wall_s} differs")


async def _value(subject: Subject) -> None:
    value = {"a": [1, 2.5, None, True], "ä": "\U0001f600"}
    result = expect_ok(await subject.run(python(f"x = 1\n{value!r}")))
    expect("value", (result.value, result.value_is_repr), (value, False))


async def _repr(subject: Subject) -> None:
    result = expect_ok(await subject.run(python("{1}")))
    expect("value", (result.value, result.value_is_repr), ("{1}", True))


async def _no_value(subject: Subject) -> None:
    for request in (python("x = 1"), python("print(1)"), bash("echo 1"), command("echo", "1")):
        result = expect_ok(await subject.run(request))
        expect("value", (result.value, result.value_is_repr), (None, False))


async def _meta(subject: Subject) -> None:
    result = expect_ok(await subject.run(python("pass")))
    missing = [key for key in META_KEYS if key not in result.meta]
    expect("missing keys of meta", missing, [])
    expect("meta's limits", result.meta["limits"], subject.limits.as_dict())
    expect("meta's backend", result.meta["backend"], subject.backend.name)
    expect("meta's level", result.meta["level"], str(result.enforcement.level))


async def _positional(subject: Subject) -> None:
    result = expect_ok(await subject.run(python("print(1)")))
    expect("the result's class", type(result), ExecutionResult)
    again = ExecutionResult(result.stdout, result.stderr, result.exit_code, result.duration)
    expect("the first four fields", again.status, result.status)
    expect("their names", [f.name for f in fields(Result)][:4], ["stdout", "stderr", "exit_code", "duration"])


async def _json(subject: Subject) -> None:
    code = "import sys; sys.stdout.buffer.write(b'\\xff\\0'); open('f', 'w').write('x')"
    result = expect_ok(await subject.run(python(code)))
    data = json.loads(json.dumps(result.as_dict()))
    expect("status in JSON", data["status"], "ok")
    expect("files in JSON", [row["path"] for row in data["files"]], ["f"])


async def _usage(subject: Subject) -> None:
    code = (
        "import time\nend = time.process_time() + 0.5\nhoard = b'x' * (64 << 20)\nwhile time.process_time() < end: pass"
    )
    usage = expect_ok(await subject.run(python(code))).usage
    if usage.cpu_user_s is not None and usage.cpu_system_s is not None:
        worked = usage.cpu_user_s + usage.cpu_system_s
        expect_that(0.4 < worked < 20, f"half a second of work counted as {worked} s")
    if usage.peak_memory_bytes is not None:
        expect_that(usage.peak_memory_bytes > 60 * MIB, f"64 MiB counted as {usage.peak_memory_bytes} bytes")
    expect_that(usage.processes is None or usage.processes >= 1, f"processes is {usage.processes}")


async def _timeout(subject: Subject) -> None:
    code = """
import sys, time
print("out")
print("err", file=sys.stderr)
open("said", "w").close()
time.sleep(100)
"""
    async with subject.open() as sandbox:
        result, timeout_s = await timed_out(sandbox, code, mark="said")
    expect("exit_code and timed_out", (result.exit_code, result.timed_out), (EXIT_TIMEOUT, True))
    expect("stdout so far", result.stdout, "out\n")
    expect("stderr so far", result.stderr, f"err\n{TIMEOUT_NOTE}")
    late_s = result.duration - timeout_s
    expect_that(0 <= late_s < 20, f"a time-out of {timeout_s:g} s took {result.duration} s")


async def _timeout_before_pids(subject: Subject) -> None:
    async with subject.open(pids=16) as sandbox:
        code = FORKS.format(then="open('full', 'w').close(); time.sleep(100)")
        result, _ = await timed_out(sandbox, code, mark="full")
    expect("exit_code", result.exit_code, EXIT_TIMEOUT)
    hits = result.enforcement.hits
    expect_that(hits.get("pids_limit"), f"hits are {dict(hits)}, without pids_limit")


def _signals(name: str, number: int) -> Check:
    return ends(
        f"signal {name}", f"a program ended by SIG{name.upper()} is signaled with {128 + number}",
        lambda: python(f"import os; os.kill(os.getpid(), {number})"),
        family="statuses", status=Status.SIGNALED, exit_code=128 + number,
    )  # fmt: skip


def _leaves(code: int) -> Check:
    return ends(
        f"exit code {code}", f"the program's own exit code {code} is reported, whatever it usually stands for",
        lambda: python(f"import sys; sys.exit({code})"),
        family="exit codes", status=Status.ERROR if code else Status.OK, exit_code=code,
    )  # fmt: skip


# Piece by piece: one huge allocation may be refused, which is a MemoryError and no more.
GROWS = """
import time
hoard = []
for _ in range(200):
    hoard.append(b"x" * (2 << 20))
    time.sleep(0.005)
time.sleep(60)
"""
# A child that keeps on holding memory: the tree is over its limit, no single process is.
IN_CHILDREN = """
import os, time
for _ in range(8):
    if os.fork() == 0:
        hoard = b"x" * (32 << 20)
        time.sleep(60)
        os._exit(0)
while True:
    os.wait()
    raise SystemExit(9)
"""
FORKS = """
import os, sys, time
try:
    for _ in range(200):
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
except OSError:
    time.sleep(0.3)
    {then}
sys.exit(77)
"""
# Without a mount of its own a workspace is summed now and then: it may be filled further before it is seen.
LINGERS = "import os; [open(f'fill{n}', 'wb').write(bytes(1 << 20)) for n in range(40)]; import time; time.sleep(60)"
_ends = partial(ends, family="statuses")

CHECKS: tuple[Check, ...] = (
    Check(name="streams apart", family="results", claim="stdout and stderr arrive apart and whole", attempt=_streams),
    Check(
        name="exact bytes",
        family="results",
        claim="the exact bytes are kept; text has U+FFFD where it must",
        attempt=_bytes,
    ),
    Check(name="duration", family="results", claim="the duration is wall clock in seconds", attempt=_duration),
    Check(name="value", family="results", claim="the last expression's plain value arrives", attempt=_value),
    Check(
        name="value as repr",
        family="results",
        claim="a value that JSON cannot hold is its repr, and says so",
        attempt=_repr,
    ),
    Check(name="no value", family="results", claim="without a last expression there is no value", attempt=_no_value),
    Check(
        name="meta",
        family="results",
        claim="meta names runtime, versions, limits, duration, backend, level",
        attempt=_meta,
    ),
    Check(
        name="positional",
        family="results",
        claim="a result is an ExecutionResult, four fields positional",
        attempt=_positional,
    ),
    Check(name="json", family="results", claim="every result can be written as JSON", attempt=_json),
    Check(name="usage", family="results", claim="usage, where it is measured, is plausible", attempt=_usage),
    ends(
        "silence", "a program that prints nothing has empty output", lambda: python("pass"), family="results", stdout=""
    ),
    Check(
        name="timeout",
        family="statuses",
        claim="a time-out ends with -1, timed_out, partial output and the note",
        attempt=_timeout,
    ),
    _ends(
        "uncaught exception",
        "an uncaught exception is an error with exit code 1",
        lambda: python("1/0"),
        status=Status.ERROR,
        exit_code=1,
    ),
    _ends(
        "syntax error",
        "code that does not compile is an error",
        lambda: python("def ("),
        status=Status.ERROR,
        exit_code=1,
    ),
    _ends(
        "memory error",
        "an uncaught MemoryError is an error: nothing was killed",
        lambda: python("bytearray(1 << 60)"),
        status=Status.ERROR,
        exit_code=1,
    ),
    _ends(
        "missing program",
        "a missing program is an error with 127",
        lambda: command("no-such-program"),
        status=Status.ERROR,
        exit_code=127,
    ),
    _ends(
        "missing program in bash",
        "a shell's missing program is an error with 127",
        lambda: bash("no-such-program"),
        status=Status.ERROR,
        exit_code=127,
    ),
    _ends(
        "not executable",
        "a file that cannot be run is an error with 126",
        lambda: command("/etc"),
        status=Status.ERROR,
        exit_code=126,
    ),
    _signals("term", 15),
    _signals("kill", 9),
    _signals("segv", 11),
    _ends(
        "abort",
        "abort() is signaled with 134",
        lambda: python("import os; os.abort()"),
        status=Status.SIGNALED,
        exit_code=134,
    ),
    _ends(
        "out of memory",
        "one process over the memory is out_of_memory with 137",
        lambda: python(GROWS),
        status=Status.OUT_OF_MEMORY,
        exit_code=137,
        hits="out_of_memory",
        memory_bytes=64 * MIB,
        rests_on=Control.MEMORY,
    ),
    _ends(
        "out of memory in children",
        "children over the memory together are out_of_memory with 137",
        lambda: python(IN_CHILDREN),
        status=Status.OUT_OF_MEMORY,
        exit_code=137,
        memory_bytes=96 * MIB,
        disk_bytes=16 * MIB,
        tmp_bytes=16 * MIB,
        rests_on=Control.MEMORY,
    ),
    _ends(
        "pids limit",
        "a program that fails at the process limit is pids_limit with its own exit code",
        lambda: python(FORKS.format(then="sys.exit(3)")),
        status=Status.PIDS_LIMIT,
        exit_code=3,
        hits="pids_limit",
        pids=16,
        rests_on=Control.PIDS,
        alone=True,
    ),
    _ends(
        "pids limit before signaled",
        "the process limit has precedence over the signal",
        lambda: python(FORKS.format(then="os.abort()")),
        status=Status.PIDS_LIMIT,
        exit_code=134,
        pids=16,
        rests_on=Control.PIDS,
        alone=True,
    ),
    _ends(
        "ok at the process limit",
        "exit 0 is ok whatever was hit; the hit is counted",
        lambda: python(FORKS.format(then="sys.exit(0)")),
        hits="pids_limit",
        pids=16,
        rests_on=Control.PIDS,
        alone=True,
    ),
    _ends(
        "disk limit",
        "a program that overfills the workspace is disk_limit",
        lambda: python(LINGERS),
        status=Status.DISK_LIMIT,
        exit_code=None,
        hits="disk_limit",
        disk_bytes=8 * MIB,
        rests_on=Control.DISK,
    ),
    Check(
        name="timeout before pids limit",
        family="statuses",
        claim="the time-out has precedence over what else was hit",
        attempt=_timeout_before_pids,
        rests_on=Control.PIDS,
        alone=True,
    ),
    _ends(
        "output limit",
        "a flood ends the run as output_limit with 137",
        lambda: bash("exec cat /dev/zero"),
        status=Status.OUTPUT_LIMIT,
        exit_code=137,
        hits="output_limit",
        flood_bytes=4 * MIB,
    ),
    _ends(
        "flood on stderr",
        "a flood of stderr ends the run too",
        lambda: bash("exec cat /dev/zero >&2"),
        status=Status.OUTPUT_LIMIT,
        exit_code=137,
        flood_bytes=4 * MIB,
    ),
    *(_leaves(code) for code in (0, 1, 3, 124, 127, 137, 255)),
)
