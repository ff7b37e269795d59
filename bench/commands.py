"""Whole processes: the command line, imports, the first run of a process; and a small DataFrame."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from itertools import chain

import cloche
from cloche.bench.harness import BenchmarkFailed, Case, Measurement, SkippedCase, timed
from cloche.bench.scenarios import CODE, COLD, PLAIN, Cases, Scenario, library_call, output_of, plain
from cloche.config.options import SandboxOptions

from .setting import Setting

PANDAS_CODE = "import pandas as pd\nprint(pd.DataFrame({'a': [1, 2, 3], 'b': [4, 5, 6]}))"
PANDAS_OUTPUT = b"   a  b\n0  1  4\n1  2  5\n2  3  6\n"
PRELOADED = "cloche, pandas preloaded"
FIRST_RUN, FIRST_COLD = "first cloche.run", "first cloche.run, cold"
EMPTY = "interpreter, nothing imported"
NOTHING, VERSION, COMMAND = "python -c pass", "cloche --version", "cloche run, a new process"
WHOLE_FIRST = "first cloche.run, whole process"
EXEC, EXEC_NAMED, EXEC_WHOLE = "cloche exec", "cloche exec NAME", "cloche exec NAME, --timeout"
MCP_LISTS, MCP_PACKAGE = "cloche mcp, tools listed", "cloche mcp, first other answer"
WALL = ", wall"  # of the same process
BARE = ", no bytecode"


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
        yield SkippedCase(name="pandas", reason="pandas is not installed here (pip install pandas)")
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


def mcp_starts(setting: Setting, _: ExitStack) -> Cases:
    """Enter MCP servers, from their start to the answer to `tools/list`, and to one that needs the protocol package."""
    if importlib.util.find_spec("mcp") is None:
        yield SkippedCase(name=MCP_LISTS, reason="the package mcp is not installed here")
        return
    nothing = partial(output_of, [sys.executable, "-c", "pass"], setting.env())
    yield Case(name=NOTHING, call="python -c pass", measure=timed(nothing))
    for name, method in ((MCP_LISTS, "tools/list"), (MCP_PACKAGE, "prompts/list")):
        measure = timed(partial(_first_answers, method, setting.env()))
        yield Case(name=name, call=f"cloche mcp, until {method} is answered", measure=measure, expected=b"3")


def _first_answers(method: str, env: dict[str, str] | None) -> bytes:
    """Start a server, shake hands, send a request, and return the id of its answer."""
    greeting = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "bench", "version": "1"}}
    messages: tuple[dict[str, object], ...] = (
        {"id": 2, "method": "initialize", "params": greeting},
        {"method": "notifications/initialized"},
        {"id": 3, "method": method},
    )
    with subprocess.Popen(
        [sys.executable, "-m", "cloche", "mcp"], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.writelines(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n" for message in messages)
        server.stdin.flush()
        server.stdout.readline()
        answer = server.stdout.readline()
        server.kill()
    return str(json.loads(answer)["id"]).encode()


COMMAND_EVENTS = (
    Scenario(name="pandas", title="a small DataFrame", enter=pandas_table, share=0.2, least=5, looks_at_memory=True),
    # Ten times as long as the others: in their turns it would cool what they warm.
    Scenario(name="command", title="print(1), whole command lines", enter=whole_commands, share=0.2, least=5),
    Scenario(
        name="start", title="whole processes, processor time", enter=starts, reference=NOTHING, share=0.2, least=5
    ),
    Scenario(name="mcp", title="the start of an MCP server", enter=mcp_starts, reference=NOTHING, share=0.2, least=5),
    Scenario(name="import", title="what importing costs", enter=imports, reference=EMPTY),
    Scenario(name="first", title="the first run of a process", enter=first_runs, share=0.2, least=5),
)
