"""Who takes part: plain subprocesses, bubblewrap, and Cloche in each of its ways.

An event is one row of a table: contestants that take turns with one another, and what they are compared to. Whoever
has something new to measure writes a function that yields contestants and adds an event.
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
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import cloche
from cloche.core.result import Result, Status
from cloche.runtime.options import SandboxOptions

from .turns import Contestant, ContestFailed, LeftOut, Turn, no_preparation, timed

CODE = "print(1)"
PANDAS_CODE = "import pandas as pd\nprint(pd.DataFrame({'a': [1, 2, 3], 'b': [4, 5, 6]}))"
PANDAS_OUTPUT = b"   a  b\n0  1  4\n1  2  5\n2  3  6\n"
WARM_PATIENCE_S = 30.0
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Say how large the contest is. `runs` are those at full speed; `import_path` is for children that need Cloche.

    `sessions` are those that are open all at once, 0 for no such thing.
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


Entrants = Iterator[Contestant | LeftOut]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Describe one event. `enter` yields who takes part, and closes what it opened with the stack it is given.

    `share` of the asked rounds are run, but at least `least`; `reference` names whom the others are compared to.
    `also` is measured when all turns are over, each under its own name in the report.
    """

    name: str
    title: str
    enter: Callable[[Setting, ExitStack], Entrants]
    reference: str = PLAIN
    share: float = 1.0
    least: int = 1
    at_full_speed: tuple[str, ...] = ()
    speed_limit_s: float = 30.0  # nobody is measured at full speed for longer
    also: Mapping[str, Callable[[Setting], dict[str, Any]]] = field(default_factory=dict)
    looks_at_memory: bool = False  # of what is kept warm when all turns are over

    def rounds(self, asked: int) -> int:
        return max(min(asked, self.least), int(asked * self.share))


def smallest_program(_: Setting, stack: ExitStack) -> Entrants:
    """Enter who runs print(1): no isolation, bubblewrap, and Cloche cold, warm and in an open sandbox, in two ways."""
    yield plain()
    yield bubblewrap()
    yield cold()
    yield warm()
    sandbox, shown = _opened(stack)
    yield open_sandbox(sandbox, shown)
    yield on_demand(sandbox, shown)


def whole_commands(setting: Setting, _: ExitStack) -> Entrants:
    """Enter the command line: a new process that imports it and runs once, cold."""
    yield plain()
    yield whole_command(setting)


def whole_command(setting: Setting) -> Contestant:
    """Return `cloche run`."""
    command = [sys.executable, "-m", "cloche", "run", "-c", CODE]
    return Contestant(
        name=COMMAND,
        call="python -m cloche run -c 'print(1)'",
        take_turn=timed(partial(output_of, command, setting.env())),
    )


def starts(setting: Setting, _: ExitStack) -> Entrants:
    """Enter whole processes by the processor time that they and what they waited for took."""
    main = "import sys; from cloche.cli import main; sys.argv = ['cloche', *sys.argv[1:]]; main()"  # as a script does
    first = f"import cloche; print(cloche.run({CODE!r}).stdout, end='')"
    for name, words, call, expected in (
        (NOTHING, ["-c", "pass"], "python -c pass", b""),
        (VERSION, ["-c", main, "--version"], "cloche --version", f"cloche {cloche.__version__}\n".encode()),
        (COMMAND, ["-c", main, "run", "-c", CODE], f"cloche run -c '{CODE}'", b"1\n"),
        (WHOLE_FIRST, ["-c", first], f'python -c "{first}"', b"1\n"),
    ):
        take_turn = partial(_processor_time, [sys.executable, *words], setting.env())
        yield Contestant(name=name, call=f"{call}: processor time", take_turn=take_turn, expected=expected)


def _processor_time(command: list[str], env: dict[str, str] | None) -> Turn:
    """Run a command, and say what processor time it took. Raises ContestFailed with its last words."""
    with tempfile.TemporaryFile() as printed, tempfile.TemporaryFile() as said:
        running = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=printed, stderr=said)
        _, status, used = os.wait4(running.pid, 0)
        running.returncode = os.waitstatus_to_exitcode(status)
        printed.seek(0)
        said.seek(0)
        if running.returncode != 0:
            raise ContestFailed(f"exit code {running.returncode}: {said.read()[-300:].decode(errors='replace')}")
        return Turn((used.ru_utime + used.ru_stime) * 1000, printed.read())


def imports(setting: Setting, _: ExitStack) -> Entrants:
    """Enter whole processes that import one thing each; what it costs is the difference to an empty one."""
    statements = {
        EMPTY: "pass",
        "import asyncio": "import asyncio",
        "import cloche": "import cloche",
        "import cloche, run looked up": "import cloche; cloche.run",
    }
    for name, statement in statements.items():
        command = [sys.executable, "-c", f"{statement}\nprint(1)"]
        yield Contestant(
            name=name,
            call=f"python -c '{statement}; print(1)'",
            take_turn=timed(partial(output_of, command, setting.env())),
        )


def first_runs(setting: Setting, _: ExitStack) -> Entrants:
    """Enter the first call of a fresh process, as it comes and cold: what keeping things warm costs who runs once."""
    yield plain()
    for name, options in ((FIRST_RUN, ""), (FIRST_COLD, ", warm=False")):
        call = f"cloche.run({CODE!r}{options})"
        program = f"import time; t = time.perf_counter(); import cloche; {call}; print(time.perf_counter() - t)"
        command = [sys.executable, "-c", program]
        yield Contestant(
            name=name,
            call=f"import cloche; {call}, timed in a new process",
            take_turn=partial(_own_time, command, setting.env()),
        )
        yield Contestant(
            name=f"{name}, whole process",
            call=f"python -c \"import cloche; print({call}.stdout, end='')\"",
            take_turn=timed(
                partial(
                    output_of, [sys.executable, "-c", f"import cloche; print({call}.stdout, end='')"], setting.env()
                )
            ),
        )


def _own_time(command: list[str], env: dict[str, str] | None) -> Turn:
    """Let a process time itself."""
    return Turn(float(output_of(command, env)) * 1000, b"1\n")


def pandas_table(setting: Setting, _: ExitStack) -> Entrants:
    """Enter who prints a small DataFrame, Cloche with pandas already loaded and without."""
    if importlib.util.find_spec("pandas") is None:
        yield LeftOut(name="pandas", reason="pandas is not installed here (pip install pandas)")
        return
    command = [sys.executable, "-c", PANDAS_CODE]
    # As many processors as the plain one may use: what is compared is not the default quota.
    options: SandboxOptions = {"memory": "1g", "cpus": os.cpu_count() or 1}
    shown = "memory='1g', cpus=all"
    yield Contestant(
        name=PLAIN,
        call="subprocess.run([python, '-c', CODE])",
        take_turn=timed(partial(output_of, command, setting.env())),
        expected=PANDAS_OUTPUT,
    )
    yield library_call(
        COLD, f"cloche.run(CODE, warm=False, {shown})", PANDAS_CODE, PANDAS_OUTPUT, {**options, "warm": False}
    )
    yield library_call(
        PRELOADED, f"cloche.run(CODE, preload=['pandas'], {shown})", PANDAS_CODE, PANDAS_OUTPUT,
        {**options, "preload": ["pandas"]},
    )  # fmt: skip


EVENTS = (
    Event(name="print", title="print(1)", enter=smallest_program, at_full_speed=(PLAIN, WARM), looks_at_memory=True),
    Event(name="pandas", title="a small DataFrame", enter=pandas_table, share=0.2, least=5, looks_at_memory=True),
    # Ten times as long as the others: in their turns it would cool what they warm.
    Event(name="command", title="print(1), whole command lines", enter=whole_commands, share=0.2, least=5),
    Event(name="start", title="whole processes, processor time", enter=starts, reference=NOTHING, share=0.2, least=5),
    Event(name="import", title="what importing costs", enter=imports, reference=EMPTY),
    Event(name="first", title="the first run of a process", enter=first_runs, share=0.2, least=5),
)


def plain() -> Contestant:
    """Return the one without any isolation."""
    command = [sys.executable, "-c", CODE]
    return Contestant(
        name=PLAIN,
        call="subprocess.run([python, '-c', 'print(1)'], capture_output=True)",
        take_turn=timed(partial(output_of, command)),
    )


def bubblewrap() -> Contestant | LeftOut:
    """Return bubblewrap with the namespaces and the view of the host that a jail has."""
    program = shutil.which("bwrap")
    if program is None:
        return LeftOut(name=BUBBLEWRAP, reason="bwrap is not installed here")
    command = [program, *_bubblewrap_options(), sys.executable, "-c", CODE]
    return Contestant(
        name=BUBBLEWRAP,
        call="subprocess.run(['bwrap', '--unshare-all', ...the jail's view of the host, python, '-c', 'print(1)'])",
        take_turn=timed(partial(output_of, command)),
        is_optional=True,
    )


def cold() -> Contestant:
    """Return a call that starts an interpreter of its own and builds its jail from nothing."""
    return library_call(COLD, "cloche.run('print(1)', warm=False)", CODE, b"1\n", {"warm": False})


def warm() -> Contestant:
    """Return a call in a jail that was built ahead."""
    return library_call(WARM, "cloche.run('print(1)')", CODE, b"1\n", {})


def warm_turn() -> Callable[[], Turn]:
    """Return a run that may start warm."""
    return partial(_run, partial(cloche.run, CODE))


def library_call(name: str, call: str, code: str, expected: bytes, options: SandboxOptions) -> Contestant:
    """Return one call of the library; one that may start warm waits, before the turns, until a run did."""
    take_turn = partial(_run, partial(cloche.run, code, **options))
    prepare = partial(wait_until_warm, take_turn) if options.get("warm", True) else no_preparation
    return Contestant(name=name, call=call, take_turn=take_turn, expected=expected, prepare=prepare)


def _opened(stack: ExitStack) -> tuple[cloche.Sandbox, str]:
    """Open a sandbox, and say how."""
    # One control group serves all turns, so the default half of a processor would throttle the later ones.
    cpus = min(2, os.cpu_count() or 1)
    return stack.enter_context(cloche.Sandbox(cpus=cpus)), f"cloche.Sandbox(cpus={cpus})"


def open_sandbox(sandbox: cloche.Sandbox, shown: str) -> Contestant:
    """Return a further run of one sandbox: a process waits for it in a jail around its workspace."""
    return Contestant(
        name=OPEN,
        call=f"sandbox.run('print(1)') of one {shown}",
        take_turn=partial(_run, partial(sandbox.run, CODE)),
    )


def on_demand(sandbox: cloche.Sandbox, shown: str) -> Contestant:
    """Return a run that follows another one at once: its process is forked on demand."""

    def take_turn() -> Turn:
        sandbox.run(CODE)
        return _run(partial(sandbox.run, CODE))

    call = f"the second of two sandbox.run('print(1)') without a pause, of one {shown}"
    return Contestant(name=ON_DEMAND, call=call, take_turn=take_turn)


def _run(call: Callable[[], Result]) -> Turn:
    started = time.perf_counter()
    result = call()
    elapsed = time.perf_counter() - started
    if result.status is not Status.OK:
        raise ContestFailed(f"Cloche reports {result.status}: {result.stderr[:200]}")
    return Turn(elapsed * 1000, result.stdout_bytes, str(result.meta.get("start", "")))


def wait_until_warm(take_turn: Callable[[], Turn]) -> None:
    """Run until a run starts warm; where none ever does, the turns will say how they started."""
    deadline = time.monotonic() + WARM_PATIENCE_S
    while take_turn().start in ("", "cold") and time.monotonic() < deadline:
        time.sleep(0.05)


def output_of(command: list[str], env: dict[str, str] | None = None, folder: str | None = None) -> bytes:
    """Return what a command prints. Raises ContestFailed with its last words, or TimeoutExpired."""
    done = subprocess.run(
        command, capture_output=True, check=False, env=env, cwd=folder, stdin=subprocess.DEVNULL, timeout=COMMAND_S
    )
    if done.returncode != 0:
        raise ContestFailed(f"exit code {done.returncode}: {done.stderr.decode(errors='replace')[-300:]}")
    return done.stdout


def _bubblewrap_options() -> list[str]:
    shown = {"/usr", sys.prefix, sys.base_prefix}
    binds = [word for path in sorted(shown) for word in ("--ro-bind", path, path)]
    links = [
        word
        for path in ("/bin", "/sbin", "/lib", "/lib64")
        if os.path.islink(path)
        for word in ("--symlink", os.readlink(path), path)
    ]
    mounts = ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", *binds, *links, "--tmpfs", "/workspace"]
    return ["--unshare-all", *mounts, "--chdir", "/workspace", "--clearenv", "--die-with-parent", "--new-session"]
