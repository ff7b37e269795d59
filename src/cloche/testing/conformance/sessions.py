"""Conformance: sessions, whose interpreter lives from cell to cell, and their forks.

A check is skipped, with the reason, if a backend here has no sessions, none of a language, or no forks. The end of an
interpreter loses only its state: a new session of the same sandbox begins with the same files.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from cloche.core.enforcement import Control
from cloche.core.errors import BackendUnavailable, InvalidRequest
from cloche.core.events import Displayed, Event, OutputChunk, Sink, Started, discard
from cloche.core.limits import KIB, MIB
from cloche.core.protocols import OpenSandbox, OpenSession, SupportsFork, SupportsSessions, SupportsSessionsApart
from cloche.core.result import EXIT_TIMEOUT, Result, Status

from .live import expect_servers, opened_live
from .subject import (
    HEART,
    HEART_IN_CHILD,
    TRIES_S,
    Broken,
    Check,
    Skipped,
    Subject,
    describe,
    expect,
    expect_no_heartbeat,
    expect_ok,
    expect_that,
    python,
)

CELL_S = 60.0
EXIT_INTERRUPTED = 130
FOR_EVER = "import time\nprint('up', flush=True)\nwhile True: time.sleep(0.01)"
# Who catches each interrupt is killed for it, and whom it has started too.
RESISTS = "print('up', flush=True)\nwhile True:\n try: time.sleep(9)\n except BaseException: pass"
TASKS = "import asyncio\nseen = []\nasync def work():\n for n in range(3):\n  seen.append(n)\n  await asyncio.sleep(0)"
FORKS = "import os\npid = os.fork()\nprint('parent' if pid else 'child', flush=True)\nif pid: os.waitpid(pid, 0)\n7"
RICH = "class Look:\n    def _repr_html_(self): return '<b>look</b>'\ndisplay(Look()); Look()"
# Held until it is seen, also by a look that comes late.
HOARDS = """
import time
x = []
try:
    for _ in range(1000):
        x.append(b"x" * 1_000_000)
except MemoryError:
    pass
time.sleep(60)
"""
ENDS = {
    "exit": ("import os; os._exit(4)", Status.ERROR, 4),
    "exit 0": ("import os; os._exit(0)", Status.ERROR, 0),
    "segv": ("import ctypes; ctypes.string_at(0)", Status.SIGNALED, 139),
    "abort": ("import os; os.abort()", Status.SIGNALED, 134),
    "memory": (HOARDS, Status.OUT_OF_MEMORY, 137),
}
# What starts one program after the other; what sets, what counts, and what says a variable of the environment.
OTHERS = {
    "bash": ("while :; do x=$(/bin/echo a); done", "n=0", "n=$((n + 1)); echo $n", "echo $NAME"),
    "javascript": (
        "for (;;) require('child_process').execSync('true')",
        "let n = 0",
        "n += 1; console.log(n)",
        "console.log(process.env.NAME)",
    ),
}

# What all of five must do before any of them ends; a server; two processes that are left, one of which was let go.
MEETS = """
import os, time
meet = os.environ['TMPDIR'] + '/meet'
os.makedirs(meet, exist_ok=True)
open(meet + '/{number}', 'w').close()
while len(os.listdir(meet)) < 5: time.sleep(0.01)
"""
LISTENS = "import socket; server = socket.create_server(('127.0.0.1', 0)); port = server.getsockname()[1]; port"
LEAVES = """
import subprocess
one = subprocess.Popen(['sleep', '1000'])
line = 'sleep 1000 >/dev/null 2>&1 & echo $!'
two = int(subprocess.check_output(line, shell=True, start_new_session=True))
[one.pid, two]
"""
LIVES = """
import os
def lives(pid):
    try:
        return open(f'/proc/{{pid}}/stat').read().rpartition(')')[2].split()[0] not in 'ZX'
    except PermissionError:
        pass
    except OSError:
        return False
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True
[lives(pid) for pid in {pids}]
"""
RUNTIMES = {"bash": "Bash ", "javascript": "Node.js v"}


@asynccontextmanager
async def _opened(
    subject: Subject,
    *,
    checkpoints: bool = False,
    **limits: Any,  # noqa: ANN401 - checked by Limits
) -> AsyncIterator[tuple[OpenSandbox, OpenSession]]:
    """Open a sandbox and a session in it."""
    async with subject.open(**limits) as sandbox:
        session = await _session(sandbox, checkpoints=checkpoints)
        try:
            yield sandbox, session
        finally:
            await session.close()


async def _session(
    sandbox: OpenSandbox, language: str = "python", *, checkpoints: bool = False, **env: str
) -> OpenSession:
    """Open a session, in a separate sandbox if only those have checkpoints."""
    if not isinstance(sandbox, SupportsSessions):
        raise Skipped("its sandboxes have no sessions")
    try:
        if checkpoints and isinstance(sandbox, SupportsSessionsApart):
            return await sandbox.open_session_apart(language, env)
        return await sandbox.open_session(language, env)
    except BackendUnavailable as error:
        raise Skipped(str(error)) from error


async def _cell(session: OpenSession, code: str, *, timeout_s: float = CELL_S, sink: Sink = discard) -> Result:
    return await session.run(code, timeout_s=timeout_s, sink=sink)


async def _value(session: OpenSession, code: str) -> object:
    return expect_ok(await _cell(session, code)).value


def _expect_end(result: Result, status: Status, exit_code: int, state: str) -> None:
    outcome = result.status, result.exit_code, result.meta["state"]
    expect_that(
        outcome == (status, exit_code, state), f"the cell ended with {describe(result)}, its state {outcome[2]}"
    )


async def _timed_out(session: OpenSession, code: str) -> Result:
    """Let a cell time out after it has printed something; retry with more time until it has."""
    for seconds in TRIES_S:
        result = await _cell(session, code, timeout_s=seconds)
        if result.stdout:
            return result
    raise Broken(f"a cell printed nothing in {TRIES_S[-1]:g} s")


async def _interrupted(session: OpenSession, code: str) -> Result:
    """Interrupt a cell once it has printed something."""
    begun = asyncio.Event()
    running = asyncio.ensure_future(
        _cell(session, code, sink=lambda event: begun.set() if isinstance(event, OutputChunk) else None)
    )
    await asyncio.wait_for(begun.wait(), CELL_S)
    await session.interrupt()
    return await running


async def _lives(subject: Subject) -> None:
    async with _opened(subject) as (_, session):
        expect_ok(await _cell(session, "import math\nx = 20\ndef f(n): return n + x"))
        result = await _cell(session, "f(math.floor(1.5))")
        expect("value and state", (result.value, result.value_is_repr, result.meta["state"]), (21, False, "kept"))
        events: list[Event] = []
        result = await _cell(session, "for n in range(5): print(n, flush=True)", sink=events.append)
        expect("what was streamed", _streamed(events)["stdout"], b"0\n1\n2\n3\n4\n")
        expect("stdout", result.stdout_bytes, b"0\n1\n2\n3\n4\n")
        result = await _timed_out(session, "print('before', flush=True)\nwhile True: pass")
        _expect_end(result, Status.TIMEOUT, EXIT_TIMEOUT, "kept")
        expect("stdout and timed_out", (result.stdout, result.timed_out), ("before\n", True))
        await session.interrupt()  # between cells there is nothing to interrupt
        result = await _interrupted(session, FOR_EVER)
        _expect_end(result, Status.SIGNALED, EXIT_INTERRUPTED, "kept")
        expect_that("KeyboardInterrupt" in result.stderr, f"an interrupted cell said {result.stderr!r}")
        expect("the state", await _value(session, "[x, time.__name__]"), [20, "time"])
        result = await _cell(session, RICH)
        expect("what was shown", [output.data["text/html"] for output in result.outputs], ["<b>look</b>"] * 2)
        expect("meta's backend", result.meta["backend"], subject.backend.name)
        expect("meta's level", result.meta["level"], str(result.enforcement.level))
        if subject.policy.level is not None:
            expect("the level asked for", result.enforcement.level, subject.policy.level)


def _streamed(events: list[Event]) -> dict[str, bytes]:
    streams = {"stdout": b"", "stderr": b""}
    for event in events:
        if isinstance(event, OutputChunk):
            streams[event.stream] += event.data
    return streams


async def _shows(subject: Subject) -> None:
    async with _opened(subject) as (_, session):
        events: list[Event] = []
        code = "print('a'); display(1); import sys; print('b', file=sys.stderr)"
        await _cell(session, code, sink=events.append)
        expect_that(isinstance(events[0], Started), f"the first event is {events[0]!r}")
        expect("how often was displayed", sum(isinstance(event, Displayed) for event in events), 1)
        expect("the streams", _streamed(events), {"stdout": b"a\n", "stderr": b"b\n"})


async def _values(subject: Subject) -> None:
    async with _opened(subject) as (_, session):
        await _cell(session, "5")
        await _cell(session, "'six'")
        expect("the last values", await _value(session, "[_, __, Out[1], len(In)]"), ["six", 5, 5, 4])
        expect("a value of JSON", await _value(session, "{'a': [1, None, 'ä']}"), {"a": [1, None, "ä"]})
        result = await _cell(session, "{1, 2}")
        expect("a value as repr", (result.value, result.value_is_repr), ("{1, 2}", True))
        expect("no value", await _value(session, "x = 5"), None)


async def _awaits(subject: Subject) -> None:
    async with _opened(subject) as (_, session):
        expect_ok(await _cell(session, TASKS))
        code = "task = asyncio.ensure_future(work()); await asyncio.sleep(0); len(seen) >= 0"
        expect("the value of a cell with a task", await _value(session, code), True)
        expect("what a task did", await _value(session, "await task\nseen"), [0, 1, 2])
        expect_ok(await _cell(session, "task = asyncio.create_task(work())\nawait asyncio.sleep(0)"))
        expect("what another one did", await _value(session, "await task\nlen(seen)"), 6)


async def _has_no_stdin(subject: Subject) -> None:
    async with _opened(subject) as (_, session):
        for code in ("input('name? ')", "import sys; sys.stdin.read()"):
            result = await _cell(session, code)
            expect_that("a session has no standard input" in result.stderr, f"{code} said {result.stderr!r}")


async def _exits(subject: Subject) -> None:
    async with _opened(subject) as (_, session):
        await _cell(session, "x = 1")
        _expect_end(await _cell(session, "import sys; sys.exit(3)"), Status.ERROR, 3, "kept")
        _expect_end(await _cell(session, "raise SystemExit"), Status.OK, 0, "kept")
        expect("the state", await _value(session, "x"), 1)


async def _has_children(subject: Subject) -> None:
    async with _opened(subject) as (_, session):
        result = await _cell(session, FORKS)
        expect("output and value", (sorted(result.stdout.split()), result.value), (["child", "parent"], 7))
        expect("the next value", await _value(session, "8"), 8)


async def _resists(subject: Subject) -> None:
    async with _opened(subject) as (sandbox, session):
        result = await _timed_out(session, HEART + HEART_IN_CHILD + RESISTS)
        _expect_end(result, Status.TIMEOUT, EXIT_TIMEOUT, "lost")
        await expect_no_heartbeat(sandbox)
        await _expect_anew(sandbox, session, Status.TIMEOUT)


async def _ends(subject: Subject, how: str) -> None:
    code, status, exit_code = ENDS[how]
    limits: dict[str, Any] = {"memory_bytes": 96 * MIB} if how == "memory" else {}
    async with _opened(subject, **limits) as (sandbox, session):
        expect_ok(await _cell(session, "open('kept', 'w').write('k'); x = 1"))
        _expect_end(await _cell(session, code), status, exit_code, "lost")
        expect("the file while no session lives", await sandbox.read_file("kept", max_bytes=10), b"k")
        await _expect_anew(sandbox, session, status, kept_content="k")


async def _expect_anew(sandbox: OpenSandbox, session: OpenSession, status: Status, *, kept_content: str = "") -> None:
    """Break the claim unless a session reports its end, and a new one begins with its files only."""
    expect("alive after its end", session.is_alive, False)
    expect_that(str(status) in session.why_ended, f"a session says of its end {session.why_ended!r}")
    try:
        await _cell(session, "1")
    except InvalidRequest as error:
        expect_that(re.search(rf"has ended.*{status}.*restart", str(error)), f"a cell after the end: {str(error)!r}")
    else:
        raise Broken("a session that has ended runs cells")
    await session.close()
    anew = await _session(sandbox)
    files = "open('kept').read()" if kept_content else "''"
    expect("what another session finds", await _value(anew, f"[{files}, 'x' in globals()]"), [kept_content, False])
    await anew.close()


async def _floods(subject: Subject) -> None:
    async with _opened(subject, output_bytes=2 * KIB, flood_bytes=2 * MIB) as (_, session):
        await _cell(session, "x = 1")
        result = await _cell(session, "print('A' * 100_000 + 'Z' * 100_000)")
        expect("head and tail", (result.truncated, result.stdout[:3], result.stdout[-4:]), (True, "AAA", "ZZZ\n"))
        result = await _cell(session, "while True: print('x' * 10_000)")
        expect("status and state", (result.status, result.meta["state"]), (Status.OUTPUT_LIMIT, "kept"))
        result = await _cell(session, "print(x)")
        expect("the next output", (result.stdout, result.truncated), ("1\n", False))


async def _is_long(subject: Subject) -> None:
    async with _opened(subject) as (_, session):
        text = "line of text\n" * 200_000
        code = f"text = {text!r}; len(text)"
        expect("the length of what was sent", await _value(session, code), len(text))
        result = await _cell(session, "display({'text/x': text}, raw=True)")
        expect_that(result.outputs[0].data["text/x"] == text, "what was shown is not what was sent")


async def _shares_files(subject: Subject) -> None:
    async with _opened(subject) as (sandbox, session):
        expect_ok(await sandbox.run(python("open('a', 'w').write('from a run')")))
        expect("a run's file", await _value(session, "open('a').read()"), "from a run")
        result = await _cell(session, "import os; os.mkdir('d'); open('d/b', 'w').write('b')")
        if not subject.is_live:  # else others change files at the same time
            expect("a cell's files", [(record.path, record.size) for record in result.files], [("d/b", 1)])
            expect("what is saved", _saved(result), {"d/b": b"b"})
        expect("a cell's file", await sandbox.read_file("d/b", max_bytes=10), b"b")
        expect("the same in a run", (await sandbox.run(python("print(open('d/b').read())"))).stdout, "b\n")
        await sandbox.write_file("c", b"c")
        expect("a file of the caller's", await _value(session, "open('c').read()"), "c")
        expect("files of a cell without any", (await _cell(session, "1")).files, ())


def _saved(result: Result) -> dict[str, bytes]:
    """Return the saved files of a result."""
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        return {name: Path(folder, name).read_bytes() for name in result.save(folder)}


async def _two(subject: Subject) -> None:
    async with _opened(subject) as (sandbox, first):
        second = await _session(sandbox, "python", NAME="second")
        await _cell(first, "x = 1; open('f', 'w').write('f')")
        code = "import os; ['x' in globals(), open('f').read(), os.environ['NAME']]"
        expect("what the other one sees", await _value(second, code), [False, "f", "second"])
        await first.close()
        expect("the file of a closed session", await _value(second, "open('f').read()"), "f")
        await second.close()
        expect("the same in a run", (await sandbox.run(python("print(open('f').read())"))).stdout, "f\n")


async def _takes_turns(subject: Subject) -> None:
    async with _opened(subject) as (_, session):
        await _cell(session, "import time; running = 0; most = 0; count = 0")
        code = "running += 1; most = max(most, running); count += 1; time.sleep(0.01); running -= 1"
        results = await asyncio.gather(*(_cell(session, f"print({n}); {code}; {n}") for n in range(40)))
        outcomes = [(result.stdout, result.value) for result in results]
        expect("what came of each", outcomes, [(f"{n}\n", n) for n in range(40)])
        expect("most at a time, and all", await _value(session, "[most, count]"), [1, 40])


async def _keeps_state(subject: Subject, language: str) -> None:
    loop, begin, count, name = OTHERS[language]
    async with subject.open() as sandbox:
        session = await _session(sandbox, language, NAME="second")
        expect_that(session.runtime.startswith(RUNTIMES[language]), f"the runtime is {session.runtime!r}")
        expect("a variable of its environment", (await _cell(session, name)).stdout, "second\n")
        await _cell(session, begin)
        for number in (1, 2, 3):
            result = await _cell(session, loop, timeout_s=number / 20)
            _expect_end(result, Status.TIMEOUT, EXIT_TIMEOUT, "kept")
            expect("the count", (await _cell(session, count)).stdout, f"{number}\n")
        result = await _interrupted(session, f"{count}; {loop}")
        _expect_end(result, Status.SIGNALED, EXIT_INTERRUPTED, "kept")
        expect("the last count", (await _cell(session, count)).stdout, "5\n")
        await session.close()


@asynccontextmanager
async def _forkable(subject: Subject) -> AsyncIterator[SupportsFork]:
    """Open a session with forks and checkpoints and a known state, or skip the check."""
    async with _opened(subject, checkpoints=True) as (_, session):
        if not isinstance(session, SupportsFork):
            raise Skipped("its sessions have no checkpoints and no forks")
        await _write(session, "early")
        try:
            await session.checkpoint("start")
        except BackendUnavailable as error:
            raise Skipped(str(error)) from error
        yield session


async def _write(session: Any, text: str) -> None:  # noqa: ANN401 - an open session with forks
    expect_ok(await _cell(session, f"x = {text!r}; open('f', 'w').write(x)"))


async def _expect_words(session: Any, text: str) -> None:  # noqa: ANN401 - as above
    expect("memory and file", await _value(session, "[x, open('f').read()]"), [text, text])


async def _rolls_back(subject: Subject) -> None:
    async with _forkable(subject) as session:
        for _ in range(2):
            await _write(session, "late")
            await session.rollback("start")
            await _expect_words(session, "early")


async def _forks(subject: Subject) -> None:
    async with _forkable(subject) as session:
        first, two = await session.fork(2)
        try:
            await _write(first, "one")
            await _expect_words(two, "early")
            await _write(two, "two")
            for each, text in ((session, "early"), (first, "one"), (two, "two")):
                await _expect_words(each, text)
        finally:
            await first.close()
            await two.close()


async def _is_cancelled(subject: Subject) -> None:
    async with _opened(subject) as (_, session):
        await _cell(session, "x = 1")
        begun = asyncio.Event()
        running = asyncio.ensure_future(_cell(session, FOR_EVER, sink=lambda _: begun.set()))
        await asyncio.wait_for(begun.wait(), CELL_S)
        started = time.monotonic()
        running.cancel()
        (ended,) = await asyncio.gather(running, return_exceptions=True)
        expect_that(isinstance(ended, asyncio.CancelledError), f"a cancelled cell came to {ended!r}")
        expect("the state after a cancelled cell", await _value(session, "x"), 1)
        expect_that(time.monotonic() - started < CELL_S, "a cancelled cell went on")


async def _are_at_once(subject: Subject) -> None:
    """Sessions and a run wait for each other, by files in TMPDIR."""
    async with subject.open() as sandbox:
        sessions = [await _session(sandbox) for _ in range(4)]
        cells = [_cell(session, MEETS.format(number=number)) for number, session in enumerate(sessions)]
        *results, ran = await asyncio.gather(*cells, sandbox.run(python(MEETS.format(number=4))))
        expect("how each cell ended", [str(result.status) for result in results], ["ok"] * 4)
        expect_ok(ran)
        expect("a variable of one, in another", await _value(sessions[1], "'port' in globals()"), False)
        for session in sessions:
            await session.close()


async def _meet_by_loopback(subject: Subject) -> None:
    """Connect from a run to a listening session."""
    async with opened_live(subject) as sandbox:
        await expect_servers(sandbox)
        session = await _session(sandbox)
        port = await _value(session, LISTENS)
        answering = asyncio.ensure_future(_cell(session, "peer, _ = server.accept(); peer.sendall(b'hello')"))
        code = f"import socket\nprint(socket.create_connection(('127.0.0.1', {port})).recv(9))"
        expect("what a run hears", expect_ok(await sandbox.run(python(code))).stdout, "b'hello'\n")
        expect_ok(await answering)
        await session.close()


async def _closes_alone(subject: Subject) -> None:
    async with subject.open() as sandbox:
        first, second = await _session(sandbox), await _session(sandbox)
        mine, theirs = [await _value(session, LEAVES) for session in (first, second)]
        await first.close()
        expect("what is left of a closed session", await _value(second, LIVES.format(pids=mine)), [False, False])
        expect("what is left of the other one", await _value(second, LIVES.format(pids=theirs)), [True, True])
        await _cell(second, "import os; os._exit(3)")
        third = await _session(sandbox)
        expect("what is left of one that has ended", await _value(third, LIVES.format(pids=theirs)), [False, False])
        expect("what is alive", (first.is_alive, second.is_alive, third.is_alive), (False, False, True))


async def _is_apart(subject: Subject) -> None:
    async with subject.open() as sandbox:
        if not isinstance(sandbox, SupportsSessionsApart):
            raise Skipped("its sessions have no checkpoints and no forks")
        await sandbox.write_file("d/given", b"given")
        shared, apart = await _session(sandbox), await _session(sandbox, checkpoints=True)
        if not isinstance(shared, SupportsFork) or not isinstance(apart, SupportsFork):
            raise Broken("a session does not say why it has no checkpoints")
        try:
            await shared.checkpoint("a")
        except BackendUnavailable as error:
            expect_that("checkpoints=True" in str(error), f"a session that cannot be cloned said {str(error)!r}")
        else:
            raise Broken("a session that shares its sandbox was cloned")
        await _write(apart, "apart")
        await apart.checkpoint("a")
        expect(
            "its files",
            await _value(apart, "import os; sorted([*os.listdir(), *os.listdir('d')])"),
            ["d", "f", "given"],
        )
        expect("the files of the others", await _value(shared, "import os; os.path.exists('f')"), False)
        await apart.sandbox.write_file("f", b"changed")
        await apart.rollback("a")
        expect("its own file after a rollback", await apart.sandbox.read_file("f", max_bytes=10), b"apart")
        await shared.close()
        await apart.close()


_check = partial(Check, family="sessions")

CHECKS: tuple[Check, ...] = (
    _check(
        name="session",
        claim="state is kept from cell to cell, through a time-out and an interrupt; output streams, values look rich",
        attempt=_lives,
    ),
    _check(name="cell shows", claim="events come in order, with what is displayed and both streams", attempt=_shows),
    _check(name="cell values", claim="a cell's value is JSON or a repr; the last ones are remembered", attempt=_values),
    _check(name="cell awaits", claim="one event loop serves all cells, and tasks go on in it", attempt=_awaits),
    _check(name="cell without stdin", claim="asking for input says what to do instead", attempt=_has_no_stdin),
    _check(name="cell exits", claim="SystemExit ends a cell with its code, and nothing else", attempt=_exits),
    _check(name="cell forks", claim="a process that a cell forks answers for nobody", attempt=_has_children),
    _check(
        name="cell resists",
        claim="who catches each interrupt is killed with its children, and the loss is said",
        attempt=_resists,
    ),
    _check(name="cell cancelled", claim="cancelling a cell ends it and keeps the state", attempt=_is_cancelled),
    _check(name="cell turns", claim="cells run one after the other, and none is lost", attempt=_takes_turns),
    _check(name="cell floods", claim="a flood costs its cell; head and tail are kept of what is long", attempt=_floods),
    _check(name="cell is long", claim="megabytes of code and of what is shown pass whole", attempt=_is_long),
    *(
        _check(
            name=f"session ends: {how}",
            claim=f"what ends the interpreter costs the state and no file ({how})",
            attempt=partial(_ends, how=how),
            rests_on=Control.MEMORY if how == "memory" else None,
        )
        for how in ENDS
    ),
    _check(name="session files", claim="cells, runs and the caller share one workspace", attempt=_shares_files),
    _check(name="two sessions", claim="two sessions of a sandbox share files and nothing else", attempt=_two),
    *(
        _check(
            name=f"session: {language}",
            claim=f"time-outs and interrupts keep the state of {language}",
            attempt=partial(_keeps_state, language=language),
        )
        for language in OTHERS
    ),
    _check(
        name="rollback", claim="a rollback brings back memory and files, as often as one likes", attempt=_rolls_back
    ),
    _check(name="fork", claim="forks begin alike and are independent, in memory and files", attempt=_forks),
)
# What holds besides where sandboxes live.
LIVE_CHECKS: tuple[Check, ...] = (
    _check(name="sessions at once", claim="sessions and runs share files, at once", attempt=_are_at_once),
    _check(name="sessions: loopback", claim="sessions and runs share loopback", attempt=_meet_by_loopback),
    _check(name="session closes", claim="a session's end is that of all that it started alone", attempt=_closes_alone),
    _check(
        name="session apart",
        claim="a session that can be cloned has files of its own; others say so",
        attempt=_is_apart,
    ),
)
