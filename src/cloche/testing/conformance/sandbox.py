"""Conformance: what persists between runs, what a run takes with it, and that nothing is left behind.

A surviving process is detected from inside: its heartbeat would still be written into the workspace, which a later run
of the same sandbox sees. That works wherever a backend runs. This host is searched for leftovers, too.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Sequence
from functools import partial

from cloche.core.errors import ClocheError
from cloche.core.events import Event, OutputChunk, Started
from cloche.core.protocols import OpenSandbox, SupportsStreaming
from cloche.core.result import Result, Status
from cloche.execution.batch import AsyncBatch, amap

from .subject import (
    HEART,
    HEART_IN_CHILD,
    TRIES_S,
    Broken,
    Check,
    Subject,
    at_work,
    bash,
    describe,
    eventually,
    expect,
    expect_no_heartbeat,
    expect_ok,
    expect_that,
    has_file,
    leaks,
    least_s,
    named_processes,
    python,
    short_repr,
    timed_out,
)

_DAEMON = """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.closerange(0, 3)
        beat()
    os._exit(0)
wait_for_beat()
"""
SURVIVORS = {
    "child": "if os.fork() == 0: beat()\nwait_for_beat()",
    "daemon": _DAEMON,
    "many": HEART_IN_CHILD * 4,
    "killed": HEART_IN_CHILD + "os.kill(os.getpid(), 9)",
    "timed out": HEART_IN_CHILD + "time.sleep(100)",
}


async def _dies_with_run(subject: Subject, how: str) -> None:
    async with subject.open() as sandbox:
        code = HEART + SURVIVORS[how]
        if how == "timed out":
            await timed_out(sandbox, code, mark="heartbeat")
        else:
            result = await sandbox.run(python(code))
            expected = Status.SIGNALED if how == "killed" else Status.OK
            expect_that(result.status is expected, f"the run ended with {describe(result)}")
        await expect_no_heartbeat(sandbox)


async def _held_pipe(subject: Subject) -> None:
    usual_s = await least_s(subject)
    code = "import os, time\nprint('parent', flush=True)\nif os.fork() == 0: os.setsid(); time.sleep(150); os._exit(0)"
    started = time.monotonic()
    expect("stdout", expect_ok(await subject.run(python(code), timeout_s=200)).stdout, "parent\n")
    took = time.monotonic() - started
    expect_that(took < 25 + 3 * usual_s, "the run waited for a grandchild that held its pipe")


async def _cancelled(subject: Subject) -> None:
    """Cancel a run once its heartbeat is reported. Without streaming it is given more and more time."""
    code = HEART + HEART_IN_CHILD + "print('beats', flush=True)\ntime.sleep(200)"
    async with subject.open(timeout_s=220) as sandbox:
        for patience_s in TRIES_S:
            async with at_work(sandbox, python(code), patience_s=patience_s) as running:
                expect_that(not running.done(), "the run ended by itself")
                started = time.monotonic()
                running.cancel()
                ended = (await asyncio.gather(running, return_exceptions=True))[0]
            expect_that(isinstance(ended, asyncio.CancelledError), f"a cancelled run came to {ended!r}")
            expect_that(time.monotonic() - started < 40, "cancelling a run took more than 40 s")
            if await has_file(sandbox, "heartbeat"):
                await expect_no_heartbeat(sandbox)
                return
    raise Broken("a program did not come to write its heartbeat before it was cancelled")


async def _workspace_lives(subject: Subject) -> None:
    async with subject.open() as sandbox:
        expect_ok(await sandbox.run(bash("mkdir d && echo 1 > d/f && chmod 750 d/f && ln -s d/f link")))
        result = expect_ok(await sandbox.run(bash("cat link; stat -c %a d/f; pwd > where; cat where; echo $HOME")))
        lines = result.stdout.split()
        expect("what is left of the first run", lines[:2], ["1", "750"])
        expect("HOME, which is the workspace", lines[3], lines[2])


async def _tmp_dies(subject: Subject) -> None:
    async with subject.open() as sandbox:
        expect_ok(await sandbox.run(bash('mkdir "$TMPDIR/d" && echo 1 > "$TMPDIR/d/f" && chmod 0 "$TMPDIR/d"')))
        expect_ok(await sandbox.run(bash('[ ! -e "$TMPDIR/d" ]')))


async def _fresh_process(subject: Subject) -> None:
    async with subject.open() as sandbox:
        expect_ok(
            await sandbox.run(python("import os; x = 1; os.environ['X'] = '1'; os.chdir('/')", env={"GIVEN": "1"}))
        )
        code = "import os; e = os.environ; print('x' in globals(), 'X' in e, 'GIVEN' in e, os.getcwd() == e['HOME'])"
        expect("what is left", expect_ok(await sandbox.run(python(code))).stdout, "False False False True\n")


async def _turns(subject: Subject) -> None:
    """Start three runs of one sandbox concurrently: in turns or not, each result is complete."""
    async with subject.open() as sandbox:
        runs = [
            sandbox.run(python(f"import time; time.sleep(0.2); open('{n}', 'w').close(); print({n})")) for n in range(3)
        ]
        results = await asyncio.gather(*runs)
        expect("their output", [expect_ok(r).stdout for r in results], ["0\n", "1\n", "2\n"])
        listed = expect_ok(await sandbox.run(bash("echo [0-9]")))
        expect("their files", listed.stdout, "0 1 2\n")


async def _batch(subject: Subject) -> None:
    """Run programs by `amap`, all at once: code, a command, input and files; a batch that is left ends its programs."""
    programs: list[object] = [f"print({number})" for number in range(4)]
    programs.append({"argv": ["bash", "-c", "cat; cat f; exit 3"], "stdin": "in", "files": {"f": "file"}})
    limits, policy = subject.limits, subject.policy

    def running(programs: Sequence[object]) -> AsyncBatch[Result]:
        return amap(
            programs, backend=subject.backend, level=policy.level, best_effort=policy.best_effort, concurrency=3,
            timeout=limits.timeout_s, memory=limits.memory_bytes, audit=False,
        )  # fmt: skip

    async with running(programs) as results:
        ended = [(result.stdout, result.exit_code) async for result in results]
    expect("results in order", ended, [*((f"{number}\n", 0) for number in range(4)), ("infile", 3)])
    began = time.monotonic()
    async with running(["print(1)", *["import time; time.sleep(50)"] * 5]) as results:
        expect_ok(await anext(results))
    expect_that(time.monotonic() - began < limits.timeout_s / 2, "a batch that is left still runs its programs")


_NEIGHBOUR = """
import os, sys, time
mine = sys.argv[1]
for folder in (".", os.environ["TMPDIR"]):
    open(f"{folder}/{mine}", "w").write(mine)
time.sleep(1)
for folder in (".", os.environ["TMPDIR"]):
    seen = [name for name in os.listdir(folder) if name.startswith("neighbour")]
    assert seen == [mine], seen
print(mine)
"""


async def _eight(subject: Subject) -> None:
    names = [f"neighbour-{n}" for n in range(8)]
    results = await asyncio.gather(*(subject.run(python(_NEIGHBOUR, name)) for name in names))
    expect("their output", [expect_ok(r).stdout.strip() for r in results], names)
    for name, result in zip(names, results, strict=True):
        expect(f"files of {name}", [record.path for record in result.files], [name])


async def _parallel(subject: Subject) -> None:
    """Four long programs print at their start: all of them print before one ends, unless they run in turns."""
    async with subject.open() as sandbox:
        if not isinstance(sandbox, SupportsStreaming):
            await _parallel_by_time(subject)
            return
    speakers: set[int] = set()
    all_speak = asyncio.Event()

    def collect(event: Event, *, number: int) -> None:
        if isinstance(event, OutputChunk):
            speakers.add(number)
        if len(speakers) == 4:
            all_speak.set()

    code = "import time; print('up', flush=True); time.sleep(280)"
    runs = [
        asyncio.ensure_future(subject.run(python(code), sink=partial(collect, number=number), timeout_s=300))
        for number in range(4)
    ]
    speaking = asyncio.ensure_future(all_speak.wait())
    try:
        await asyncio.wait([speaking, *runs], return_when=asyncio.FIRST_COMPLETED)
        for run in runs:
            if run.done() and not all_speak.is_set():
                expect_ok(run.result())
                raise Broken(f"{len(speakers)} of four programs had begun when the first one had ended")
    finally:
        for task in (speaking, *runs):
            task.cancel()
        await asyncio.gather(speaking, *runs, return_exceptions=True)


async def _parallel_by_time(subject: Subject) -> None:
    """Run four sleeps of 2 s concurrently. In sequence they would take 8 s, or four times the duration of one."""
    together_s = await _sleeping(subject, 4)
    if together_s > 7.5:  # where it takes seconds to start
        alone_s = await _sleeping(subject, 1)
        expect_that(
            together_s < 0.9 * 4 * alone_s, f"four sleeps of 2 s took {together_s:.1f} s, one takes {alone_s:.1f} s"
        )


async def _sleeping(subject: Subject, times: int) -> float:
    started = time.monotonic()
    await asyncio.gather(*(subject.run(python("import time; time.sleep(2)")) for _ in range(times)))
    return time.monotonic() - started


async def _streaming(subject: Subject) -> None:
    async with subject.open(timeout_s=100) as sandbox:
        if not isinstance(sandbox, SupportsStreaming):
            return  # an optional power: not offering it breaks no claim
        events: list[Event] = []
        code = "import sys, time\nfor n in range(5): print(n); time.sleep(0.1)\nprint('e', file=sys.stderr)"
        result = expect_ok(await sandbox.run_streaming(python(code), events.append))
        expect_that(events and isinstance(events[0], Started), "Started is not the first event")
        chunks = [event for event in events if isinstance(event, OutputChunk)]
        for stream, data in (("stdout", result.stdout_bytes), ("stderr", result.stderr_bytes)):
            expect(f"the chunks of {stream}", b"".join(e.data for e in chunks if e.stream == stream), data)
        await _expect_output_while_running(sandbox)


async def _expect_output_while_running(sandbox: OpenSandbox) -> None:
    """Let a program print and run on: its output must arrive while it runs, however late."""
    events: list[Event] = []
    code = "import time; print('first'); time.sleep(70); print('last')"
    async with at_work(sandbox, python(code), sink=events.append) as running:
        await asyncio.wait([running], timeout=1.0)  # a backend that buffers all output would deliver it, and end, now
        output = b"".join(event.data for event in events if isinstance(event, OutputChunk))
        is_meanwhile = output == b"first\n" and not running.done()
    expect_that(is_meanwhile, f"the first output did not come while the code ran; heard was {short_repr(output)}")


async def _closed(subject: Subject) -> None:
    async with subject.open() as sandbox:
        result = expect_ok(await sandbox.run(bash("echo kept > f")))
    try:
        after = await sandbox.run(bash("cat f"))
    except ClocheError:
        pass  # the clearest answer
    else:
        expect_that(after.stdout == "", "a closed sandbox still has its workspace")
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        expect("files saved after closing", result.save(folder), ("f",))


# A folder without permissions must be removed, too.
LOCKS = "os.mkdir('d'); open('d/f', 'w'); [os.chmod(path, 0) for path in ('d/f', 'd', os.environ['TMPDIR'], '.')]"


async def _nothing_left(subject: Subject) -> None:
    """End runs in every way, then search this host for their leftovers."""
    await subject.drain()
    before = leaks()
    token = f"left-{secrets.token_hex(6)}"
    daemon = f"import os\nif os.fork() == 0:\n    os.setsid()\n    os.execvp('sleep', ['{token}', '300'])\n"
    sleeper = f"{daemon}\nprint('up', flush=True)\nopen('up', 'w').close()\nimport time; time.sleep(100)"
    async with subject.open() as sandbox:
        await timed_out(sandbox, sleeper, mark="up")
        for ending in ("", "os.abort()", "print('x' * 100_000_000)", LOCKS):
            await sandbox.run(python(f"{daemon}\nopen('f', 'a').write('x')\n{ending}"))
    is_up = asyncio.Event()

    async def cancelled_with_its_sandbox() -> None:
        async with subject.open() as sandbox, at_work(sandbox, python(sleeper)) as running:
            is_up.set()
            await running

    running = asyncio.ensure_future(cancelled_with_its_sandbox())
    coming = asyncio.ensure_future(is_up.wait())
    await asyncio.wait([running, coming], return_when=asyncio.FIRST_COMPLETED)
    coming.cancel()
    running.cancel()
    await asyncio.gather(running, coming, return_exceptions=True)
    del sandbox, running, coming
    import gc

    gc.collect()  # results in cycles would hold their files a little longer
    await subject.drain()
    is_clean = await eventually(lambda: not named_processes(token) and leaks() <= before)
    if not is_clean:
        raise Broken(f"left behind: {sorted(leaks() - before)} {named_processes(token)}")


async def _no_descriptors_left(subject: Subject) -> None:
    """Count this process's descriptors: after a first run, which may cache some, more runs add none."""
    await subject.run(python("pass"))
    await subject.drain()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        await subject.run(python("open('f', 'w').write('x')"))
        await subject.run(python("import time; time.sleep(60)"), timeout_s=0.2)
    import gc

    gc.collect()
    await subject.drain()
    few = await eventually(lambda: len(os.listdir("/proc/self/fd")) <= before)
    expect_that(few, f"ten runs left {len(os.listdir('/proc/self/fd')) - before} descriptors open")


_lives = partial(Check, family="sandbox")

CHECKS: tuple[Check, ...] = (
    *(
        Check(
            name=f"survivor: {how}",
            family="tree kill",
            claim=f"a process left behind dies with the run ({how})",
            attempt=partial(_dies_with_run, how=how),
        )
        for how in SURVIVORS
    ),
    Check(
        name="held pipe",
        family="tree kill",
        claim="a run ends with its program though a grandchild holds the pipe",
        attempt=_held_pipe,
    ),
    Check(
        name="cancellation",
        family="cancellation",
        claim="cancelling a run kills everything it started",
        attempt=_cancelled,
    ),
    _lives(name="workspace lives", claim="the workspace lives between runs, and is the home", attempt=_workspace_lives),
    _lives(name="temporary files die", claim="temporary files die with the run", attempt=_tmp_dies),
    _lives(name="fresh process", claim="each run is a fresh process in the workspace", attempt=_fresh_process),
    _lives(name="runs at once", claim="runs started at once in one sandbox are each whole", attempt=_turns),
    _lives(name="closed", claim="closing ends the sandbox; its results stay whole", attempt=_closed),
    Check(
        name="eight at once",
        family="concurrency",
        claim="eight sandboxes at once do not see each other",
        attempt=_eight,
    ),
    Check(
        name="batch",
        family="concurrency",
        claim="a batch gives each program's result in order, and ends when it is left",
        attempt=_batch,
    ),
    Check(name="in parallel", family="concurrency", claim="sandboxes run in parallel", attempt=_parallel, alone=True),
    Check(
        name="streaming",
        family="streaming",
        claim="events come in order, while the code runs, and are whole",
        attempt=_streaming,
    ),
    Check(
        name="nothing left",
        family="cleanup",
        claim="no process, mount, control group or folder is left",
        attempt=_nothing_left,
        alone=True,
    ),
    Check(
        name="no descriptors left",
        family="cleanup",
        claim="no descriptor is left open",
        attempt=_no_descriptors_left,
        alone=True,
    ),
)
