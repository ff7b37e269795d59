"""What is measured: plain subprocesses, bubblewrap, Cloche in each of its ways, and live sessions.

An event is one row of a table: contestants that take turns with one another, and what they are compared to. To measure
something new, write a function that yields contestants and add an event.

Sessions: a cell, opening, checkpoint, rollback, fork, and memory. Every turn with a large session begins the same way,
not measured: it is rolled back to its first checkpoint, which removes what the turn before left, and runs one cell, so
that there is something to roll back. Results are checked, and forks closed, after the turn.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloche
from cloche.config.options import SandboxOptions
from cloche.core.errors import ClocheError
from cloche.core.record import dataclass, field
from cloche.core.result import Result, Status

from .harness import (
    THREADS,
    BenchmarkFailed,
    Case,
    LeftOut,
    Measurement,
    available_bytes,
    memory_of,
    no_preparation,
    processes_below,
    reason_of,
    timed,
)

if TYPE_CHECKING:
    from cloche.sync import Session

CODE = "print(1)"
PANDAS_CODE = "import pandas as pd\nprint(pd.DataFrame({'a': [1, 2, 3], 'b': [4, 5, 6]}))"
PANDAS_OUTPUT = b"   a  b\n0  1  4\n1  2  5\n2  3  6\n"
WARM_TIMEOUT_S = 30.0
COMMAND_S = 120.0
PLAIN = "plain subprocess"
BUBBLEWRAP = "bubblewrap"
COLD, WARM, OPEN = "cloche, cold", "cloche, warm", "cloche, open sandbox"
ON_DEMAND = "cloche, on demand"
PRELOADED = "cloche, pandas preloaded"
FIRST_RUN, FIRST_COLD = "first cloche.run", "first cloche.run, cold"
EMPTY = "interpreter, nothing imported"
NOTHING, VERSION, COMMAND = "python -c pass", "cloche --version", "cloche run, a new process"
WHOLE_FIRST = "first cloche.run, whole process"
EXEC, EXEC_NAMED, EXEC_WHOLE = "cloche exec", "cloche exec NAME", "cloche exec NAME, --timeout"
WALL = ", wall"  # of the same process
BARE = ", no bytecode"
CELL = "x = 1; x"
SESSION, OPENED = "cloche, session cell", "cloche, session opened"
TABLE_CELL = "cloche, session shows a DataFrame"
ROLLBACK, FORK, CHECKPOINT = "cloche, rollback", "cloche, fork(1)", "cloche, checkpoint"
LARGE_ROWS = 65_536_000  # of eight bytes each
LARGE_MEMORY, LARGE_NEEDS_BYTES = "2g", 3 << 30
LARGE_CODE = f"import numpy, pandas\nlarge = pandas.DataFrame({{'a': numpy.random.rand({LARGE_ROWS})}})\nlen(large)"
IDLE_SESSIONS, CROWD_NEEDS_BYTES = 20, 8 << 30
FIRST = "first"
SETTLE_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Say how large the benchmark is. `runs` are those at full speed; `import_path` is for children that need Cloche.

    `sessions` is how many are open at once; 0 leaves that out.
    """

    rounds: int
    runs: int
    image: str
    sessions: int = 0
    events: tuple[str, ...] | None = None  # None: all that fit
    import_path: str | None = None
    peers_folder: Path | None = None  # None: no peers

    def env(self) -> dict[str, str] | None:
        """Return the environment of a child that imports what this process can import; None for the usual one."""
        return None if self.import_path is None else {**os.environ, "PYTHONPATH": self.import_path}


Cases = Iterator[Case | LeftOut]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Describe one scenario. `enter` yields its cases; the stack that it is given closes what they opened.

    `share` of the requested rounds are run, but at least `least`; `reference` names the case that the others are
    compared to. `also` is measured after all cases, each under its own name in the report.
    """

    name: str
    title: str
    enter: Callable[[Setting, ExitStack], Cases]
    reference: str = PLAIN
    share: float = 1.0
    least: int = 1
    at_full_speed: tuple[str, ...] = ()
    speed_limit_s: float = 30.0  # nobody is measured at full speed for longer
    also: Mapping[str, Callable[[Setting], dict[str, Any]]] = field(default_factory=dict)
    looks_at_memory: bool = False  # of what is kept warm when all turns are over

    def rounds(self, asked: int) -> int:
        return max(min(asked, self.least), int(asked * self.share))


def smallest_program(_: Setting, stack: ExitStack) -> Cases:
    """Yield cases of print(1): no isolation, bubblewrap, and Cloche cold, warm and in an open sandbox, in two ways."""
    yield plain()
    yield bubblewrap()
    yield cold()
    yield warm()
    sandbox, arguments = _opened(stack)
    yield open_sandbox(sandbox, arguments)
    yield on_demand(sandbox, arguments)


def whole_commands(setting: Setting, _: ExitStack) -> Cases:
    """Enter the command line: a new process that imports it and runs once, cold."""
    yield plain()
    yield whole_command(setting)


def whole_command(setting: Setting) -> Case:
    """Return `cloche run`."""
    command = [sys.executable, "-m", "cloche", "run", "-c", CODE]
    return Case(
        name=COMMAND,
        call="python -m cloche run -c 'print(1)'",
        measure=timed(partial(output_of, command, setting.env())),
    )


def starts(setting: Setting, stack: ExitStack) -> Cases:
    """Enter whole processes by the processor time that they and what they waited for took, and some by the clock."""
    main = "import sys; from cloche.cli import main; sys.argv = ['cloche', *sys.argv[1:]]; main()"  # as a script does
    first = f"import cloche; print(cloche.run({CODE!r}).stdout, end='')"
    bare = _without_bytecode(setting, stack)
    cases: tuple[tuple[str, list[str], str, bytes], ...] = (
        (NOTHING, ["-c", "pass"], "python -c pass", b""),
        (VERSION, ["-c", main, "--version"], "cloche --version", f"cloche {cloche.__version__}\n".encode()),
        (COMMAND, ["-c", main, "run", "-c", CODE], f"cloche run -c '{CODE}'", b"1\n"),
        (WHOLE_FIRST, ["-c", first], f'python -c "{first}"', b"1\n"),
        (EXEC, ["-c", main, "exec", "--", "true"], "cloche exec -- true", b""),
    )
    in_named = (
        (case, ["-c", main, "exec", *words], call, b"") for case, words, call in _commands_in_a_named_one(stack)
    )
    for name, words, call, expected in chain(cases, in_named):
        command = [sys.executable, *words]
        measure = partial(_processor_time, command, setting.env())
        needs_life = name.startswith(EXEC)  # which is not to be had everywhere
        yield Case(
            name=name, call=f"{call}: processor time", measure=measure, expected=expected, is_optional=needs_life
        )
        if name in (COMMAND, WHOLE_FIRST, EXEC, EXEC_NAMED):
            call_bare, measure_bare = (
                f"{call}, in an installation without bytecode",
                partial(_processor_time, command, bare),
            )
            yield Case(
                name=f"{name}{BARE}", call=call_bare, measure=measure_bare, expected=expected, is_optional=needs_life
            )
        if name in (NOTHING, EXEC_NAMED, EXEC):
            whole = timed(partial(output_of, command, setting.env()))
            yield Case(
                name=f"{name}{WALL}",
                call=f"{call}: wall time",
                measure=whole,
                expected=expected,
                is_optional=needs_life,
            )


def _without_bytecode(setting: Setting, stack: ExitStack) -> dict[str, str]:
    """Return an environment in which Cloche is found as a copy without compiled modules, which may not have them."""
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-", dir="/var/tmp"))
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(os.path.dirname(cloche.__file__), os.path.join(folder, "cloche"), ignore=ignored)
    env = dict(os.environ if (given := setting.env()) is None else given)
    path = os.pathsep.join(filter(None, (folder, env.get("PYTHONPATH"))))
    cache = os.path.join(folder, "cache")  # where the command keeps them; the user's own is left alone
    return {**env, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "XDG_CACHE_HOME": cache}


def _commands_in_a_named_one(stack: ExitStack) -> Iterator[tuple[str, list[str], str]]:
    """Yield commands in a sandbox with a name, the second with an option that the short way leaves to the whole one."""
    name = f"bench-{os.getpid()}"
    sandbox = stack.enter_context(cloche.Sandbox(name=name, keep="10m"))
    stack.callback(sandbox.kill)
    yield EXEC_NAMED, [name, "--", "true"], "cloche exec NAME -- true"
    yield EXEC_WHOLE, ["--timeout", "30s", name, "--", "true"], "cloche exec --timeout 30s NAME -- true"


def _processor_time(command: list[str], env: dict[str, str] | None) -> Measurement:
    """Run a command, and say what processor time it took. Raises BenchmarkFailed with its last words."""
    with tempfile.TemporaryFile() as printed, tempfile.TemporaryFile() as errors:
        running = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=printed, stderr=errors)
        _, status, used = os.wait4(running.pid, 0)
        running.returncode = os.waitstatus_to_exitcode(status)
        printed.seek(0)
        errors.seek(0)
        if running.returncode != 0:
            raise BenchmarkFailed(f"exit code {running.returncode}: {errors.read()[-300:].decode(errors='replace')}")
        return Measurement((used.ru_utime + used.ru_stime) * 1000, printed.read())


def imports(setting: Setting, _: ExitStack) -> Cases:
    """Enter whole processes that import one thing each; what it costs is the difference to an empty one."""
    statements = {
        EMPTY: "pass",
        "import asyncio": "import asyncio",
        "import cloche": "import cloche",
        "import cloche, run looked up": "import cloche; cloche.run",
    }
    for name, statement in statements.items():
        command = [sys.executable, "-c", f"{statement}\nprint(1)"]
        yield Case(
            name=name,
            call=f"python -c '{statement}; print(1)'",
            measure=timed(partial(output_of, command, setting.env())),
        )


def first_runs(setting: Setting, _: ExitStack) -> Cases:
    """Enter the first call of a fresh process, as it comes and cold: what keeping things warm costs who runs once."""
    yield plain()
    for name, options in ((FIRST_RUN, ""), (FIRST_COLD, ", warm=False")):
        call = f"cloche.run({CODE!r}{options})"
        program = f"import time; t = time.perf_counter(); import cloche; {call}; print(time.perf_counter() - t)"
        command = [sys.executable, "-c", program]
        yield Case(
            name=name,
            call=f"import cloche; {call}, timed in a new process",
            measure=partial(_own_time, command, setting.env()),
        )
        yield Case(
            name=f"{name}, whole process",
            call=f"python -c \"import cloche; print({call}.stdout, end='')\"",
            measure=timed(
                partial(
                    output_of, [sys.executable, "-c", f"import cloche; print({call}.stdout, end='')"], setting.env()
                )
            ),
        )


def _own_time(command: list[str], env: dict[str, str] | None) -> Measurement:
    """Let a process time itself."""
    return Measurement(float(output_of(command, env)) * 1000, b"1\n")


def pandas_table(setting: Setting, _: ExitStack) -> Cases:
    """Enter who prints a small DataFrame, Cloche with pandas already loaded and without."""
    if importlib.util.find_spec("pandas") is None:
        yield LeftOut(name="pandas", reason="pandas is not installed here (pip install pandas)")
        return
    command = [sys.executable, "-c", PANDAS_CODE]
    # As many processors as the plain one may use: what is compared is not the default quota.
    options: SandboxOptions = {"memory": "1g", "cpus": os.cpu_count() or 1}
    arguments = "memory='1g', cpus=all"
    yield Case(
        name=PLAIN,
        call="subprocess.run([python, '-c', CODE])",
        measure=timed(partial(output_of, command, setting.env())),
        expected=PANDAS_OUTPUT,
    )
    yield library_call(
        COLD, f"cloche.run(CODE, warm=False, {arguments})", PANDAS_CODE, PANDAS_OUTPUT, {**options, "warm": False}
    )
    yield library_call(
        PRELOADED, f"cloche.run(CODE, preload=['pandas'], {arguments})", PANDAS_CODE, PANDAS_OUTPUT,
        {**options, "preload": ["pandas"]},
    )  # fmt: skip


EVENTS = (
    Scenario(name="print", title="print(1)", enter=smallest_program, at_full_speed=(PLAIN, WARM), looks_at_memory=True),
    Scenario(name="pandas", title="a small DataFrame", enter=pandas_table, share=0.2, least=5, looks_at_memory=True),
    # Ten times as long as the others: in their turns it would cool what they warm.
    Scenario(name="command", title="print(1), whole command lines", enter=whole_commands, share=0.2, least=5),
    Scenario(
        name="start", title="whole processes, processor time", enter=starts, reference=NOTHING, share=0.2, least=5
    ),
    Scenario(name="import", title="what importing costs", enter=imports, reference=EMPTY),
    Scenario(name="first", title="the first run of a process", enter=first_runs, share=0.2, least=5),
)


def plain() -> Case:
    """Return the one without any isolation."""
    command = [sys.executable, "-c", CODE]
    return Case(
        name=PLAIN,
        call="subprocess.run([python, '-c', 'print(1)'], capture_output=True)",
        measure=timed(partial(output_of, command)),
    )


def bubblewrap() -> Case | LeftOut:
    """Return bubblewrap with the namespaces and the view of the host that a jail has."""
    program = shutil.which("bwrap")
    if program is None:
        return LeftOut(name=BUBBLEWRAP, reason="bwrap is not installed here")
    command = [program, *_bubblewrap_options(), sys.executable, "-c", CODE]
    return Case(
        name=BUBBLEWRAP,
        call="subprocess.run(['bwrap', '--unshare-all', ...the jail's view of the host, python, '-c', 'print(1)'])",
        measure=timed(partial(output_of, command)),
        is_optional=True,
    )


def cold() -> Case:
    """Return a call that starts an interpreter of its own and builds its jail from nothing."""
    return library_call(COLD, "cloche.run('print(1)', warm=False)", CODE, b"1\n", {"warm": False})


def warm() -> Case:
    """Return a call in a jail that was built ahead."""
    return library_call(WARM, "cloche.run('print(1)')", CODE, b"1\n", {})


def measure_warm() -> Callable[[], Measurement]:
    """Return a run that may start warm."""
    return partial(_run, partial(cloche.run, CODE))


def library_call(name: str, call: str, code: str, expected: bytes, options: SandboxOptions) -> Case:
    """Return one call of the library; one that may start warm waits, before the turns, until a run did."""
    measure = partial(_run, partial(cloche.run, code, **options))
    prepare = partial(wait_until_warm, measure) if options.get("warm", True) else no_preparation
    return Case(name=name, call=call, measure=measure, expected=expected, prepare=prepare)


def _opened(stack: ExitStack) -> tuple[cloche.Sandbox, str]:
    """Open a sandbox, and say how."""
    # One control group serves all turns, so the default half of a processor would throttle the later ones.
    cpus = min(2, os.cpu_count() or 1)
    return stack.enter_context(cloche.Sandbox(live=False, cpus=cpus)), f"cloche.Sandbox(live=False, cpus={cpus})"


def open_sandbox(sandbox: cloche.Sandbox, arguments: str) -> Case:
    """Return a further run of one sandbox: a process waits for it in a jail around its workspace."""
    return Case(
        name=OPEN,
        call=f"sandbox.run('print(1)') of one {arguments}",
        measure=partial(_run, partial(sandbox.run, CODE)),
    )


def on_demand(sandbox: cloche.Sandbox, arguments: str) -> Case:
    """Return a run that follows another one at once: its process is forked on demand."""

    def measure() -> Measurement:
        sandbox.run(CODE)
        return _run(partial(sandbox.run, CODE))

    call = f"the second of two sandbox.run('print(1)') without a pause, of one {arguments}"
    return Case(name=ON_DEMAND, call=call, measure=measure)


def _run(call: Callable[[], Result]) -> Measurement:
    started = time.perf_counter()
    result = call()
    elapsed = time.perf_counter() - started
    if result.status is not Status.OK:
        raise BenchmarkFailed(f"Cloche reports {result.status}: {result.stderr[:200]}")
    return Measurement(elapsed * 1000, result.stdout_bytes, str(result.meta.get("start", "")))


def wait_until_warm(measure: Callable[[], Measurement]) -> None:
    """Run until a run starts warm; where none ever does, the turns will say how they started."""
    deadline = time.monotonic() + WARM_TIMEOUT_S
    while measure().start in ("", "cold") and time.monotonic() < deadline:
        time.sleep(0.05)


def output_of(command: list[str], env: dict[str, str] | None = None, folder: str | None = None) -> bytes:
    """Return what a command prints. Raises BenchmarkFailed with its last words, or TimeoutExpired."""
    done = subprocess.run(
        command, capture_output=True, check=False, env=env, cwd=folder, stdin=subprocess.DEVNULL, timeout=COMMAND_S
    )
    if done.returncode != 0:
        raise BenchmarkFailed(f"exit code {done.returncode}: {done.stderr.decode(errors='replace')[-300:]}")
    return done.stdout


def _bubblewrap_options() -> list[str]:
    visible = {"/usr", sys.prefix, sys.base_prefix}
    binds = [word for path in sorted(visible) for word in ("--ro-bind", path, path)]
    links = [
        word
        for path in ("/bin", "/sbin", "/lib", "/lib64")
        if os.path.islink(path)
        for word in ("--symlink", os.readlink(path), path)
    ]
    mounts = ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", *binds, *links, "--tmpfs", "/workspace"]
    return ["--unshare-all", *mounts, "--chdir", "/workspace", "--clearenv", "--die-with-parent", "--new-session"]


def live_session(_: Setting, stack: ExitStack) -> Cases:
    """Enter a cell of a session that is open, and the opening of another one."""
    yield plain()
    yield cell(stack)
    yield Case(
        name=OPENED,
        call="cloche.Sandbox(live=False), entered, and its session(); closed afterwards, untimed",
        measure=_open_and_close,
        prepare=partial(wait_until_warm, measure_warm()),
    )


def cell(stack: ExitStack) -> Case:
    """Return a cell with a value, whose look is captured, in a session that stays open."""
    wait_until_warm(measure_warm())  # so that it is forked, as all but the first session of a process are
    session = _open(stack)
    return Case(name=SESSION, call=f"session.run({CELL!r})", measure=partial(_take_cell, session))


def session_with_data(_: Setting, stack: ExitStack) -> Cases:
    """Enter what is done with a session that holds a DataFrame of 500 MB, and one that shows a small DataFrame."""
    yield plain()
    missing = [name for name in ("numpy", "pandas") if importlib.util.find_spec(name) is None]
    if missing:
        yield LeftOut(name="sessions with data", reason=f"{missing[0]} is not installed here (pip install pandas)")
        return
    yield _table(stack)
    free = available_bytes()
    if free < LARGE_NEEDS_BYTES:
        yield LeftOut(name=ROLLBACK, reason=f"{_gib(LARGE_NEEDS_BYTES)} of memory must be free; {_gib(free)} are")
        return
    large = LargeSession(stack)
    for name, turn, call in (
        (ROLLBACK, large.roll_back, f"session.rollback({FIRST!r}), 500 MB in memory, after one more cell"),
        (FORK, large.fork, "session.fork(1), 500 MB in memory; closed afterwards, untimed"),
        (CHECKPOINT, large.checkpoint, "session.checkpoint('later'), 500 MB in memory"),
    ):
        yield Case(name=name, call=call, measure=turn)


class LargeSession:
    """Hold a session with 500 MB in its memory, and take turns with it."""

    def __init__(self, stack: ExitStack):
        self._session = _open(stack, memory=LARGE_MEMORY)
        _check(self._session.run(LARGE_CODE), LARGE_ROWS)
        self._session.checkpoint(FIRST)
        self._turns = 0

    def roll_back(self) -> Measurement:
        """Go back, and look that the cell's variable is gone."""
        self._begin()
        ms = _ms(lambda: self._session.rollback(FIRST))
        _check(self._session.run("'turn' in globals()"), False)
        return Measurement(ms, self._rows(self._session))

    def fork(self) -> Measurement:
        """Fork, and look that the fork knows what the session knew."""
        self._begin()
        forks: list[Session] = []
        ms = _ms(lambda: forks.extend(self._session.fork(1)))
        with closing(forks[0]) as fork:
            _check(fork.run("turn"), self._turns)
            return Measurement(ms, self._rows(fork))

    def checkpoint(self) -> Measurement:
        """Set another checkpoint, and look that the session goes on."""
        self._begin()
        ms = _ms(lambda: self._session.checkpoint("later"))
        return Measurement(ms, self._rows(self._session))

    def _begin(self) -> None:
        self._session.rollback(FIRST)
        self._turns += 1
        _check(self._session.run(f"turn = {self._turns}; turn"), self._turns)

    def _rows(self, session: Session) -> bytes:
        _check(session.run("len(large)"), LARGE_ROWS)
        return b"1\n"


def idle_memory(_setting: Setting) -> dict[str, Any]:
    """Return what a session costs that waits for its next cell, in MiB of PSS: the mean of twenty."""
    with ExitStack() as stack:
        before = descendants()
        try:
            for _ in range(IDLE_SESSIONS):
                _check(_open(stack).run(CELL), 1)
            return crowd_report(before, IDLE_SESSIONS)
        except PermissionError:
            return {"reason": "only root may look into these processes (they are closed to others on purpose)"}


def many_sessions(setting: Setting) -> dict[str, Any]:
    """Open as many sessions as asked for, let each of them answer while all are open, and return time and memory."""
    count, free = setting.sessions, available_bytes()
    if count == 0:
        return {}
    if free < CROWD_NEEDS_BYTES:
        return {"reason": f"{_gib(CROWD_NEEDS_BYTES)} of memory must be free; {_gib(free)} are"}
    with ExitStack() as stack, ThreadPoolExecutor(THREADS) as threads:
        before = descendants()
        try:
            started = time.perf_counter()
            sessions = list(threads.map(lambda _: _open(stack), range(count)))
            opened = time.perf_counter()
            results = threads.map(lambda numbered: numbered[1].run(f"{numbered[0]} + 1"), enumerate(sessions))
            for number, result in enumerate(results):
                _check(result, number + 1)
            times = {"open_s": round(opened - started, 2), "answer_s": round(time.perf_counter() - opened, 2)}
            return {**times, **crowd_report(before, count)}
        except (ClocheError, BenchmarkFailed, OSError) as error:
            return {"reason": reason_of(error)}


def crowd_report(before: frozenset[int], count: int) -> dict[str, Any]:
    """Return the memory of all processes that were not there before; the sums are those of `count` sessions."""
    time.sleep(SETTLE_S)
    found = memory_of(before)
    return {
        "sessions": count,
        "session_mib": round(found["pss_mib"] / count, 2),
        "session_private_mib": round(found["private_mib"] / count, 2),
        "processes_per_session": round(found["processes"] / count, 1),
        "all_mib": found["pss_mib"],
    }


def descendants() -> frozenset[int]:
    """Return the processes below this one, when what is forked for a session is all that is new."""
    wait_until_warm(measure_warm())
    time.sleep(SETTLE_S)
    return frozenset(processes_below(os.getpid()))


def _open(stack: ExitStack, **options: Any) -> Session:  # noqa: ANN401 - some of SandboxOptions
    # The default, half a processor, would throttle long measurements.
    sandbox = stack.enter_context(cloche.Sandbox(live=False, cpus=min(2, os.cpu_count() or 1), **options))
    return sandbox.session()


def _take_cell(session: Session) -> Measurement:
    results: list[Result] = []
    ms = _ms(lambda: results.append(session.run(CELL)))
    if [output.data.get("text/plain") for output in results[0].outputs] != ["1"]:
        raise BenchmarkFailed(f"a cell with the value 1 showed {results[0].outputs!r}"[:300])
    return Measurement(ms, f"{results[0].value}\n".encode(), str(results[0].meta.get("start", "")))


def _open_and_close() -> Measurement:
    with ExitStack() as stack:
        sessions: list[Session] = []
        ms = _ms(lambda: sessions.append(stack.enter_context(cloche.Sandbox(live=False)).session()))
        result = sessions[0].run("print(1)")
        return Measurement(ms, result.stdout_bytes, str(result.meta.get("start", "")))


def _table(stack: ExitStack) -> Case:
    """Return a cell that shows a small DataFrame, whose HTML is captured."""
    session = _open(stack, memory="1g")
    session.run("import pandas\ntable = pandas.DataFrame({'a': [1, 2, 3], 'b': [4, 5, 6]})")

    def measure() -> Measurement:
        results: list[Result] = []
        ms = _ms(lambda: results.append(session.run("table")))
        shown = [output.data.get("text/html") or "" for output in results[0].outputs]
        if len(shown) != 1 or "<table" not in str(shown[0]):
            raise BenchmarkFailed(f"a DataFrame showed {results[0].outputs!r} {results[0].stderr}"[:300])
        return Measurement(ms, b"1\n")

    return Case(name=TABLE_CELL, call="session.run('table'), a small DataFrame", measure=measure)


def _ms(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return (time.perf_counter() - started) * 1000


def _check(result: Result, value: object) -> None:
    if result.status is not Status.OK or result.value != value:
        raise BenchmarkFailed(
            f"a session answered {result.value!r}, not {value!r}: {result.status} {result.stderr[:200]}"
        )


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"


def session_lines(event: dict[str, Any]) -> Iterator[str]:
    """Yield a line on the memory of sessions and one on many of them, where they were looked at."""
    idle, many = event.get("idle", {}), event.get("crowd", {})
    if "reason" in idle:
        yield f"memory of an idle session: not measured: {idle['reason']}"
    elif idle:
        yield "memory of an idle session: " + _MEMORY.format_map(idle)
    if "reason" in many:
        yield f"many sessions at once: left out: {many['reason']}"
    elif many:
        yield "many sessions at once: " + _MANY_SESSIONS_LINE.format_map(many) + "; " + _MEMORY.format_map(many)


_MEMORY = (
    "{session_mib} MiB PSS each ({session_private_mib} MiB its own, {processes_per_session} processes, "
    "{sessions} sessions), all {all_mib} MiB"
)
_MANY_SESSIONS_LINE = "opened in {open_s} s, one answer of each in {answer_s} s"

SESSION_EVENTS = (
    Scenario(
        name="session", title="a live session", enter=live_session, reference=PLAIN,
        also={"idle": idle_memory, "crowd": many_sessions},
    ),
    Scenario(name="data", title="a live session with data", enter=session_with_data, share=0.2, least=5),
)  # fmt: skip
