"""Sessions of the local backend, as a user of the library relies on them: state, limits, interrupts, ends."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import cloche
from cloche.core.events import Cleared, Displayed, Ended, Event, OutputChunk, Started
from cloche.sync import Session

pytestmark = [pytest.mark.user_soak, pytest.mark.usefixtures("settings_of_nobody")]

FOR_EVER = "import time\nprint('up', flush=True)\nwhile True: time.sleep(0.01)"
FIGURE = "import matplotlib.pyplot as plt; plt.plot([1, 2]); None"


class Watch:
    """Be a callback that tells other threads when a cell has begun to print."""

    def __init__(self) -> None:
        self.has_begun = threading.Event()
        self.chunks: list[tuple[str, bytes]] = []

    def __call__(self, stream: str, data: bytes) -> None:
        """Take a piece of output."""
        self.chunks.append((stream, data))
        self.has_begun.set()


def in_a_thread(work: Callable[[], Any]) -> Callable[[], Any]:
    """Start work in a thread and return what waits for its result."""
    pool = ThreadPoolExecutor(1)
    running = pool.submit(work)
    pool.shutdown(wait=False)
    return lambda: running.result(60)


def mimes(result: cloche.Result) -> list[list[str]]:
    """Return the types of each bundle that was shown."""
    return [sorted(output.data) for output in result.outputs]


# State and values.


@pytest.mark.parametrize("level", ["jail", "confined", "process"])
def test_a_session_does_not_find_the_program_of_the_run_before(level: str) -> None:
    """A run leaves its own files to a session, and nothing of what it was started with."""
    with cloche.Sandbox(live=False, level=level, screen="off") as sandbox:
        assert sandbox.run("open('made', 'w')").ok
        assert sandbox.session().run("import os; os.listdir()").value == ["made"]


def test_a_cell_that_awaits_is_in_the_event_loop_as_a_whole(session: Session) -> None:
    """Tasks begin before its first `await` and after its last; a magic that runs a cell of its own still can."""
    session.run("import asyncio\nasync def five(): return 5")
    assert session.run("task = asyncio.ensure_future(five())\nawait asyncio.sleep(0)").ok
    assert session.run("await task\nasyncio.create_task(five())").ok
    assert session.run("await _").value == 5
    assert session.run("%time await five()\nawait five()").value == 5


def test_displayed_and_last_values_look_rich(session: Session) -> None:
    """`display` comes first, the last expression last; a table is HTML, a figure PNG, or SVG when told so."""
    assert [output.data["text/plain"] for output in session.run("display(1, 'a')\n2").outputs] == ["1", "'a'", "2"]
    table = session.run("import pandas as pd\npd.DataFrame({'a': [1]})")
    assert mimes(table) == [["text/html", "text/plain"]]
    assert "<table" in str(table.outputs[0].data["text/html"])
    (figure,) = session.run(FIGURE).outputs
    assert bytes(figure.data["image/png"]).startswith(b"\x89PNG")  # type: ignore[arg-type]
    session.run("%config InlineBackend.figure_formats = ['svg']")
    (figure,) = session.run(FIGURE).outputs
    assert "<svg" in str(figure.data["image/svg+xml"])


# Output.


def test_updates_and_clear_output_replace_what_is_there(session: Session) -> None:
    """A cell's events, applied to a list, come to its outputs; what was replaced or cleared is not among them."""
    shown: list[Any] = []

    def take(event: Event) -> None:
        if isinstance(event, Cleared):
            shown.clear()
        elif isinstance(event, Displayed) and event.replaces is not None:
            shown[event.replaces] = event.output
        elif isinstance(event, Displayed):
            shown.append(event.output)

    result = session.run(
        "from IPython.display import clear_output\nfor i in range(300):\n"
        "    clear_output(wait=True)\n    print('step', i)\n    display(i)\n"
        "bar = display('0 %', display_id=True)\nfor i in range(1, 101): bar.update(f'{i} %')",
        on_event=take,
    )
    assert [output.data["text/plain"] for output in result.outputs] == ["299", "'100 %'"]
    assert tuple(shown) == result.outputs
    assert result.stdout == "step 299\n"
    waits = session.run("print('old')\ndisplay('old')\nclear_output(wait=True)")
    assert (waits.stdout, len(waits.outputs)) == ("old\n", 1)
    by_a_command = session.run("print('old')\nclear_output()\n!echo new")
    assert by_a_command.stdout == "new\n"


def test_a_progress_bar_is_one_line(session: Session) -> None:
    """What a carriage return let other text take the place of is not in the result, and was printed as it came."""
    watch = Watch()
    loop = "for i in range(1001): print(f'\\r{i // 10:3} %', end='', file=sys.stderr, flush=True)"
    result = session.run(f"import sys\n{loop}\nprint('done')", on_output=watch)
    assert (result.stdout, result.stderr) == ("done\n", "100 %")
    assert b"".join(data for stream, data in watch.chunks if stream == "stderr").count(b"\r") == 1001


# What plotly does, as far as it matters here: a figure shows itself, by renderers of which some need nbformat.
PLOTLY = {
    "plotly/__init__.py": "",
    "plotly/io/__init__.py": "from ._renderers import renderers, show",
    "plotly/io/_base_renderers.py": (
        "ipython_display = None\nclass ExternalRenderer: pass\n"
        "class PlotlyRenderer:\n    def to_mimebundle(self, fig): return {'application/vnd.plotly.v1+json': fig}\n"
        "class HtmlRenderer:\n    def __init__(self, connected=False): self.connected = connected\n"
        "    def to_mimebundle(self, fig): return {'text/html': 'a link' if self.connected else 'x' * 5_000_000}\n"
    ),
    "plotly/io/_renderers.py": (
        "from ._base_renderers import ExternalRenderer, HtmlRenderer\nnbformat = ipython_display = None\n"
        "class Renderers(dict): default = 'plotly_mimetype+notebook'\n"
        "renderers = Renderers({'plotly_mimetype+notebook': HtmlRenderer()})\n"
        "def show(fig):\n    one = renderers[renderers.default]\n"
        "    if isinstance(one, ExternalRenderer): return one.render(fig)\n"
        "    if not nbformat: raise ValueError('Mime type rendering requires nbformat')\n"
        "    ipython_display.display(one.to_mimebundle(fig), raw=True)\n"
    ),
}
FIGURE_OF_PLOTLY = """import plotly.io
class Figure:
    def _ipython_display_(self): plotly.io.show({"data": [{"type": "bar"}]})
    def _repr_mimebundle_(self, **_): raise AssertionError("it has shown itself")
    def __repr__(self): return "Figure()"
"""


@pytest.mark.parametrize("way", ["cell", "run"])
@pytest.mark.parametrize("last", ["Figure()", "Figure()._ipython_display_()"])
def test_what_shows_itself_is_one_small_output(way: str, last: str) -> None:
    """A figure of plotly that shows itself is not asked for its bundle, too, and names its script's address."""
    with cloche.Sandbox() as sandbox:
        for path, text in PLOTLY.items():
            sandbox.write_file(path, text)
        result = (
            sandbox.session().run(FIGURE_OF_PLOTLY + last) if way == "cell" else sandbox.run(FIGURE_OF_PLOTLY + last)
        )
    (output,) = result.outputs
    assert (result.status, result.stderr) == ("ok", "")
    assert output.data["text/html"] == "a link"
    assert output.data["text/plain"] == "<plotly figure: bar>"
    assert result.value == ("Figure()" if last == "Figure()" else None)


def test_what_was_displayed_before_an_error_is_in_the_result_of_a_run() -> None:
    """A run that fails or exits after it has displayed something has it among its outputs."""
    result = cloche.run(FIGURE_OF_PLOTLY + "Figure()._ipython_display_()\n1 / 0", files=PLOTLY)
    assert [sorted(output.data) for output in result.outputs] == [
        ["application/vnd.plotly.v1+json", "text/html", "text/plain"]
    ]


def test_the_source_of_a_class_of_a_cell_is_found(session: Session) -> None:
    """`inspect.getsource` finds a class with methods, one without, and the one that another cell defined before."""
    session.run("class A:\n    def f(self): return 1\nold = A")
    session.run("x = 1\nclass A:\n    'another'\n    def f(self): return 2\nclass Plain(dict):\n    size = 3")
    code = "import inspect\n[inspect.getsource(one) for one in (old, A, Plain, A.f)]"
    found = session.run(code).value
    assert found == [
        "class A:\n    def f(self): return 1\n",
        "class A:\n    'another'\n    def f(self): return 2\n",
        "class Plain(dict):\n    size = 3\n",
        "    def f(self): return 2\n",
    ]
    assert session.run("inspect.getsource(type('Made', (), {}))").meta["error"]["name"] in ("OSError", "TypeError")


def test_a_figure_that_cannot_be_drawn_is_an_error_where_it_is_shown(session: Session) -> None:
    """`plt.show()` raises what drawing raised, and the cell ends there."""
    result = session.run(
        "import matplotlib.pyplot as plt\nplt.title('$\\\\nonsense$')\nplt.show()\nprint('after')", timeout=60
    )
    assert (result.status, result.stdout) == ("error", "")
    assert "nonsense" in result.stderr


def test_a_cell_can_be_iterated_over() -> None:
    """`stream` yields what happens and at last the result; leaving it early ends the cell."""

    async def scenario() -> list[str]:
        async with cloche.AsyncSandbox(live=False) as sandbox:
            session = await sandbox.session()
            kinds = [type(event) async for event in session.stream("print(1); display(2); 3")]
            assert (kinds[0], kinds[-1]) == (Started, Ended)
            assert {OutputChunk, Displayed} <= set(kinds)
            async for event in session.stream(FOR_EVER):
                if isinstance(event, OutputChunk):
                    break
            return [entry.code for entry in session.history]

    assert asyncio.run(scenario())[0] == "print(1); display(2); 3"


def test_tracebacks_are_those_of_a_script(session: Session) -> None:
    """To the column in which the interpreter marks what failed, on a cell's last line too."""
    for code in ("x = 1\nx / 0", "def f():\n    return 1 + 1 / 0\n(f() +\n 1)"):
        script, cell = cloche.run(code).stderr, session.run(code).stderr
        assert "^" in script
        assert cell.splitlines() == re.sub(r'"/workspace/\S+"', f'"<cell {len(session.history)}>"', script).splitlines()


def test_long_output_is_cut_and_a_flood_ends_the_cell() -> None:
    """Head and tail are kept of what is long; what never ends is interrupted, and the state kept."""
    with cloche.Sandbox(live=False, output_limit="2k") as sandbox:
        session = sandbox.session()
        result = session.run("print('A' * 100_000 + 'Z' * 100_000)")
        assert (result.truncated, result.status) == (True, "ok")
        assert (result.stdout[:3], result.stdout[-4:]) == ("AAA", "ZZZ\n")
        result = session.run("while True: print('x' * 10_000)")
        assert (result.status, result.meta["state"]) == ("output_limit", "kept")
        result = session.run("print('next')")
        assert (result.stdout, result.truncated) == ("next\n", False)


# Other languages: what their drivers promise is in test_session_drivers.py.

IN_OTHERS = {  # a loop that starts one program after the other; what sets, and what counts
    "bash": ("while :; do x=$(/bin/echo a); done", "n=0", "n=$((n + 1)); echo $n"),
    "javascript": ("for (;;) require('child_process').execSync('true')", "let n = 0", "n += 1; console.log(n)"),
}


@pytest.mark.toolchain
@pytest.mark.parametrize("level", ["jail", "confined", "process"])
@pytest.mark.parametrize("language", IN_OTHERS)
def test_interrupts_keep_the_state_of_any_language(language: str, level: str) -> None:
    """Time-outs and interrupts, early and late, cost a cell and never the state."""
    loop, begin, count = IN_OTHERS[language]
    with cloche.Sandbox(live=False, level=level, screen="off") as sandbox:
        session = sandbox.session(language)
        session.run(begin)
        for number in range(1, 6):
            result = session.run(loop, timeout=number / 50)
            assert (result.status, result.meta["state"]) == ("timeout", "kept"), number
            assert session.run(count).stdout == f"{number}\n"
        watch = Watch()
        wait = in_a_thread(lambda: session.run(f"{count}; {loop}", on_output=watch))
        assert watch.has_begun.wait(60)
        session.interrupt()
        result = wait()
        assert (result.status, result.exit_code, result.meta["state"]) == ("signaled", 130, "kept")
        assert session.run(count).stdout == "7\n"


@pytest.mark.toolchain
@pytest.mark.parametrize(
    ("language", "code"),
    [
        ("bash", "ls /proc/self/fd"),
        ("javascript", "console.log(require('child_process').execSync('ls /proc/self/fd').toString())"),
    ],
)
def test_programs_inherit_no_link(language: str, code: str) -> None:
    """A program that a cell starts has the three streams, and the folder that it lists."""
    with cloche.Sandbox(live=False) as sandbox:
        assert sandbox.session(language).run(code).stdout.split() == ["0", "1", "2", "3"]


# Ends of cells.


def check_interrupt(session: Session) -> None:
    """Show that another thread can interrupt a cell, and that its output was heard before."""
    watch = Watch()
    session.interrupt()
    wait = in_a_thread(lambda: session.run(FOR_EVER, on_output=watch))
    assert watch.has_begun.wait(60)
    session.interrupt()
    result = wait()
    assert (result.status, result.exit_code, result.meta["state"]) == ("signaled", 130, "kept")
    assert "KeyboardInterrupt" in result.stderr
    assert watch.chunks[0] == ("stdout", b"up\n")
    assert session.run("time.__name__").value == "time"


def test_interrupted_from_another_thread(session: Session) -> None:
    """An interrupt is what Ctrl-C is; between cells there is nothing to interrupt."""
    check_interrupt(session)


IDENTIFIED = {
    "python": "import os, signal; signal.signal(signal.SIGINT, signal.SIG_DFL); os.getpid()",
    "javascript": "process.pid",
    "bash": "echo $$",
}
TRACED = {"python": "print('begun')", "javascript": "console.log('begun')", "bash": "echo begun"}

ENDLESS = {"python": "while True: pass", "javascript": "for (;;) {}", "bash": "while :; do :; done"}


@pytest.mark.toolchain
@pytest.mark.parametrize("is_long", [False, True])
@pytest.mark.parametrize("way", ["interrupt", "time-out"])
@pytest.mark.parametrize("language", TRACED)
def test_an_interrupt_before_its_cell_began_is_for_that_cell(language: str, way: str, is_long: bool) -> None:
    """An interpreter that is slow to hear of it, or has heard a part, ends it as it begins, and runs the next one."""
    code = f"{TRACED[language]}\n{ENDLESS[language]}\n" + " " * (300_000 if is_long else 0)
    status, timeout = ("signaled", 60) if way == "interrupt" else ("timeout", 0.2)
    with cloche.Sandbox(live=False, level="process", screen="off") as sandbox:
        session = sandbox.session(language)
        said = session.run(IDENTIFIED[language])
        interpreter = int(said.value or said.stdout)
        for _ in range(3):
            begun = threading.Event()
            stop(interpreter)
            wait = in_a_thread(lambda set_=begun.set: session.run(code, timeout=timeout, on_event=lambda _: set_()))
            assert begun.wait(60)
            if way == "interrupt":
                session.interrupt()
            if not is_long:
                await_signal(interpreter, signal.SIGURG if language == "bash" else signal.SIGINT)
            os.kill(interpreter, signal.SIGCONT)
            result = wait()
            assert (result.status, result.meta["state"]) == (status, "kept")
            if not is_long and language != "javascript":  # whose signals another thread hears than its cells
                assert result.stdout == ""
            assert session.run(TRACED[language]).stdout == "begun\n"


def stop(process: int) -> None:
    """Stop a process for good: its guard, which has it stand still for a look at files, may be about to wake it."""
    while True:
        os.kill(process, signal.SIGSTOP)
        time.sleep(0.1)
        if told_of(process, "State:") == "T":
            return


def await_signal(process: int, number: int) -> None:
    """Wait until a process that is stopped has a signal to hear."""
    deadline = time.monotonic() + 10
    while not int(told_of(process, "ShdPnd:"), 16) >> (number - 1) & 1:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def told_of(process: int, name: str) -> str:
    """Return what the kernel tells of a process."""
    words = Path(f"/proc/{process}/status").read_text().split()
    return words[words.index(name) + 1]


def test_interrupted_and_cancelled_from_another_task() -> None:
    """A task can interrupt a cell; cancelling the call ends what it runs, and a restart goes on."""

    async def scenario() -> None:
        async with cloche.AsyncSandbox(live=False) as sandbox:
            session = await sandbox.session()
            for is_cancelled in (False, True):
                begun = asyncio.Event()
                running = asyncio.ensure_future(session.run(FOR_EVER, on_output=lambda *_, set_=begun.set: set_()))
                await asyncio.wait_for(begun.wait(), 60)
                if is_cancelled:
                    running.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await running
                else:
                    await session.interrupt()
                    assert (await running).status == "signaled"
            if not session.is_alive:
                await session.restart()
            assert (await session.run("1")).value == 1

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("language", "first", "code", "last"),
    [
        ("python", "x = 1", "while True: pass", "print(x)"),
        ("javascript", "x = 1", "while (true) {}", "console.log(x)"),
        ("bash", "x=1", "while true; do :; done", "echo $x"),
    ],
)
def test_a_cell_that_is_cancelled_as_it_begins_keeps_the_state(language: str, first: str, code: str, last: str) -> None:
    """An interrupt that comes before the interpreter has heard of the cell is not lost."""

    async def scenario() -> None:
        async with cloche.AsyncSandbox(live=False) as sandbox:
            session = await sandbox.session(language)
            await session.run(first)
            for _ in range(10):
                begun = asyncio.Event()
                running = asyncio.ensure_future(session.run(code, on_event=lambda _, set_=begun.set: set_()))
                await asyncio.wait_for(begun.wait(), 60)
                running.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await running
            assert (await session.run(last)).stdout == "1\n"

    asyncio.run(scenario())


def test_the_limit_of_processes_holds() -> None:
    """A cell cannot make more than its sandbox may have, and the session lives."""
    with cloche.Sandbox(live=False, pids=16) as sandbox:
        session = sandbox.session()
        code = "import os, time\nfor n in range(100):\n if os.fork() == 0:\n  time.sleep(60)\n  os._exit(0)"
        result = session.run(code)
        assert not result.ok
        assert "BlockingIOError" in result.stderr
        assert session.run("n < 16").value is True


# The session and its sandbox.


def test_history_is_kept(session: Session) -> None:
    """Each cell has an entry, across a restart too."""
    session.run("1")
    session.run("1/0")
    session.restart()
    session.run("print('a')")
    assert [(entry.code, entry.status) for entry in session.history] == [
        ("1", "ok"),
        ("1/0", "error"),
        ("print('a')", "ok"),
    ]
    assert session.history[2].summary.endswith("a")


def test_history_is_bounded_in_characters_too(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest cells go first, and the last one stays, however long it is."""
    monkeypatch.setattr("cloche.execution.history.MOST_CHARS", 6)
    for code in ("1", "22", "333", "4444444"):
        session.run(code)
    assert [entry.code for entry in session.history] == ["4444444"]
    session.run("55")
    assert [entry.code for entry in session.history] == ["55"]


def test_an_interpreter_can_be_ended_and_begun_again(session: Session) -> None:
    """It says why it is gone; history and workspace stay, and nothing of what it knew."""
    session.run("x = 1; open('kept', 'w').close()")
    assert session.why_ended == ""
    session.end()
    assert not session.is_alive
    with pytest.raises(cloche.InvalidRequest, match="has ended"):
        session.run("1")
    session.restart()
    assert session.run("import os; ['x' in globals(), os.listdir()]").value == [False, ["kept"]]
    session.run("os._exit(5)")
    assert session.why_ended == "it has ended (error, exit code 5)"
    assert len(session.history) == 3
    with pytest.raises(cloche.InvalidRequest, match=r"has ended.*error.*restart"):
        session.run("1")
    session.restart()
    assert session.run("import os; ['x' in globals(), os.listdir()]").value == [False, ["kept"]]


def test_an_unused_session_expires() -> None:
    """It ends by itself, says why, and can be begun anew; a cell that runs is use."""
    with cloche.Sandbox(live=False) as sandbox:
        session = sandbox.session(idle_timeout="3s")
        assert session.run("import time; time.sleep(4); 1").value == 1
        deadline = time.monotonic() + 60
        while session.is_alive and time.monotonic() < deadline:
            time.sleep(0.1)
        assert session.why_ended == "it was not used for 3 s"
        with pytest.raises(cloche.InvalidRequest, match="has expired"):
            session.run("1")
        session.restart()
        assert session.run("2").value == 2


def test_runs_and_sessions_share_files(session: Session, tmp_path: Path) -> None:
    """One workspace serves both; what a cell made is listed, saved, and comes out."""
    session.sandbox.run("open('a', 'w').write('from a run')")
    assert session.run("open('a').read()").value == "from a run"
    result = session.run("import os; os.mkdir('d'); open('d/b', 'w').write('b')", out=tmp_path / "out")
    assert [(record.path, record.size) for record in result.files] == [("d/b", 1)]
    assert (tmp_path / "out" / "d" / "b").read_text() == "b"
    assert result.save(tmp_path / "saved") == ("d/b",)
    assert (session.read_file("d/b"), session.sandbox.run("print(open('d/b').read())").stdout) == (b"b", "b\n")
    session.write_file("c", "c")
    assert session.run("open('c').read()").value == "c"
    assert session.run("1").files == ()


def test_rules_hold_for_cells() -> None:
    """What screening blocks does not run, and a language that is not allowed has no session."""
    with cloche.Sandbox(live=False, screen="block", languages=["python"]) as sandbox:
        session = sandbox.session()
        with pytest.raises(cloche.PolicyDenied):
            session.run("import os; os.system('true')")
        assert session.run("1").value == 1
        with pytest.raises(cloche.PolicyDenied, match="not allowed"):
            sandbox.session("bash")
        with pytest.raises(cloche.InvalidRequest, match="cobol"):
            sandbox.session("cobol")


def test_what_is_closed_says_so() -> None:
    """A closed session refuses; a session does not outlive its sandbox."""
    with cloche.Sandbox(live=False) as sandbox:
        session, other = sandbox.session(), sandbox.session()
        session.close()
        session.close()
        for call in (lambda: session.run("1"), session.restart, lambda: session.checkpoint("a")):
            with pytest.raises(cloche.InvalidRequest, match="closed"):
                call()
        assert other.run("1").value == 1
    assert not other.is_alive
    with pytest.raises(cloche.InvalidRequest, match="closed"):
        other.run("1")
    with pytest.raises(cloche.InvalidRequest, match="not open"):
        sandbox.session()


def test_two_sessions_in_one_sandbox() -> None:
    """They share files and nothing else."""
    with cloche.Sandbox(live=False) as sandbox:
        first, second = sandbox.session(), sandbox.session(env={"NAME": "second"})
        first.run("x = 1; open('f', 'w').write('f')")
        assert second.run("import os; ['x' in globals(), open('f').read(), os.environ['NAME']]").value == [
            False, "f", "second",
        ]  # fmt: skip
        with pytest.raises(cloche.InvalidRequest, match="another session is open"):
            first.checkpoint("c")


def test_threads_take_turns(session: Session) -> None:
    """Cells of eight threads run one after the other, and none is lost."""
    session.run("running = 0; most = 0; count = 0")
    code = "running += 1; most = max(most, running); count += 1; import time; time.sleep(0.01); running -= 1"
    with ThreadPoolExecutor(8) as pool:
        assert all(result.ok for result in pool.map(lambda _: session.run(code), range(40)))
    assert session.run("[most, count]").value == [1, 40]


def test_twenty_at_once() -> None:
    """Twenty sessions of twenty sandboxes live side by side."""

    async def one(number: int) -> Any:
        async with cloche.AsyncSandbox(live=False, memory="64m") as sandbox:
            session = await sandbox.session()
            await session.run(f"x = {number}")
            await asyncio.sleep(0.2)
            return (await session.run("x")).value

    async def scenario() -> list[Any]:
        return await asyncio.gather(*(one(number) for number in range(20)))

    assert asyncio.run(scenario()) == list(range(20))


@pytest.mark.parametrize("level", ["confined", "process"])
def test_below_jail_there_are_sessions_without_checkpoints(level: str) -> None:
    """State, interrupts and restarts work without namespaces; memory cannot be copied there, and that is said."""
    with cloche.Sandbox(live=False, level=level, screen="off") as sandbox:
        session = sandbox.session()
        session.run("x = 1")
        assert session.run("import time; time.sleep(60)", timeout=5).meta["state"] == "kept"
        assert session.run("x").value == 1
        for call in (lambda: session.checkpoint("c"), session.fork):
            with pytest.raises(cloche.BackendUnavailable, match="level jail"):
                call()
        session.restart()
        assert session.run("'x' in globals()").value is False


def test_without_warm_starts() -> None:
    """A session that starts afresh is a session like any other."""
    with cloche.Sandbox(live=False, warm=False) as sandbox:
        session = sandbox.session()
        session.run("x = 1")
        session.checkpoint("c")
        result = session.run("x")
        assert (result.value, result.meta["start"]) == (1, "cold")
