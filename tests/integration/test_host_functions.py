"""Functions of the caller that programs in the local jail call, and what hostile programs make of that."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cloche
from cloche.agent.approval import ApprovalRequest, Decision, callback
from cloche.core.errors import BackendUnavailable, InvalidRequest
from cloche.functions.tool import Tool, ToolLimits, stubs
from tests.harness.loops import check_loop

pytestmark = pytest.mark.usefixtures("settings_of_nobody")

# The descriptors of the link, as a hostile program finds them.
RAW = """
import os, sys, time, cloche_host
link = cloche_host._functions.__closure__[0].cell_contents
calls, answers = link.calls, link.answers
def frame(number, body, kind=1): return len(body).to_bytes(4, "big") + number.to_bytes(4, "big") + bytes((kind,)) + body
"""


def search(query: str, limit: int = 3) -> list[str]:
    """Search the index.

    Return titles.
    """
    return [f"{query} {number}" for number in range(limit)]


async def later(number: int) -> int:
    """Return a number after a moment."""
    await asyncio.sleep(0.02)
    return number


def fail() -> None:
    """Fail."""
    raise FileNotFoundError("no such page")


TOOLS: dict[str, Callable[..., Any]] = {"search": search, "later": later, "fail": fail}
USES = """
import asyncio, concurrent.futures, json
from cloche_host import HostError, fail, later, search
async def many():
    return await asyncio.gather(*[later(number) for number in range(20)], search("x", limit=1))
def caught(call):
    try:
        return call()
    except Exception as error:
        return [type(error).__name__, str(error), getattr(error, "kind", "")]
with concurrent.futures.ThreadPoolExecutor(8) as pool:
    threaded = list(pool.map(lambda number: search(str(number), limit=1)[0], range(20)))
seen = [search("y"), threaded, caught(fail), caught(lambda: search(5)), caught(lambda: search())]
"""
SEEN = [
    ["y 0", "y 1", "y 2"],
    [f"{number} 0" for number in range(20)],
    ["HostError", "no such page", "FileNotFoundError"],
    ["HostError", "query must be text, not an integer", "refused"],
    ["TypeError", "search() missing 1 required positional argument: 'query'", ""],
]
IN_A_RUN = USES + "[*seen, asyncio.run(many())]"
MANY = [*range(20), ["x 0"]]


def run_cold() -> cloche.Result:
    """Run in a helper of its own."""
    return cloche.run(IN_A_RUN, tools=TOOLS, warm=False)


def run_warm() -> cloche.Result:
    """Run in a fork of the template."""
    cloche.run("1", tools=TOOLS)
    return cloche.run(IN_A_RUN, tools=TOOLS)


def run_confined() -> cloche.Result:
    """Run without namespaces."""
    return cloche.run(IN_A_RUN, tools=TOOLS, level="confined")


def run_live() -> cloche.Result:
    """Run as a process of a live sandbox."""
    with cloche.Sandbox(tools=TOOLS) as sandbox:
        return sandbox.run(IN_A_RUN)


def cell_live() -> cloche.Result:
    """Run as a cell in a live sandbox."""
    with cloche.Sandbox(tools=TOOLS) as sandbox:
        session = sandbox.session()
        session.run(USES)
        return session.run("[*seen, await many()]")


def cell_of_fork() -> cloche.Result:
    """Run as a cell of a fork."""
    with cloche.Sandbox(tools=TOOLS, live=False) as sandbox:
        session = sandbox.session()
        session.run("import cloche_host; before = cloche_host.search('z', limit=1)")
        (fork,) = session.fork(1)
        fork.run(USES)
        result = fork.run("[*seen, await many()]")
        assert session.run("before + cloche_host.search('a', limit=1)").value == ["z 0", "a 0"]
        return result


@pytest.mark.parametrize("place", [run_cold, run_warm, run_confined, run_live, cell_live, cell_of_fork])
def test_a_program_calls_functions_of_its_caller(place: Callable[[], cloche.Result]) -> None:
    """Plainly, from threads and tasks at once; errors have the function's own message, and the result has counts."""
    result = place()
    assert result.value == [*SEEN, MANY], result.stderr
    counts = result.meta["tools"]
    assert counts["by_name"]["later"] == 20
    assert counts["calls"] >= 21


IN_NODE = """
const { HostError, later, search } = require("cloche_host");
async function main() {
  const found = await Promise.all([...Array(20).keys()].map((number) => later(number)));
  const titles = [await search("x", 1), await search("y", { limit: 2 }), await search({ query: "z", limit: 1 })];
  const refusal = await search(5).catch((error) => [error instanceof HostError, error.kind, error.message]);
  console.log(JSON.stringify([found, titles, refusal]));
}
main();
"""
IN_BASH = """
cloche_host search '{"query": "x", "limit": 1}'
cloche_host later '{"number": 7}' &
cloche_host later '{"number": 7}' &
wait
cloche_host search '{"query": 5}' || echo "code $?"
"""


@pytest.mark.parametrize("live", [False, True])
def test_programs_of_node_and_bash_call_too(live: bool) -> None:
    """Node gets promises, Bash JSON on standard output; a file of the project does not replace Node's module."""
    refused = "query must be text, not an integer"
    project = {"node_modules/cloche_host/index.js": "throw 'taken'"}
    with cloche.Sandbox(tools=TOOLS, live=live, files=project, timeout=20) as sandbox:
        node, shell = sandbox.run(IN_NODE, language="javascript"), sandbox.run(IN_BASH, language="bash")
        in_cells = sandbox.session("javascript").run("cloche_host.search('x', 1)") if live else None
        bash = sandbox.session("bash")
        bash.run('counted=$(cloche_host search \'{"query": "x", "limit": 1}\')')
        assert bash.run('echo "$counted"; cloche_host later \'{"number": 7}\'').stdout == '["x 0"]\n7\n'
    assert in_cells is None or in_cells.value == ["x 0"], in_cells
    titles = [["x 0"], ["y 0", "y 1"], ["z 0"]]
    assert json.loads(node.stdout) == [[*range(20)], titles, [True, "refused", refused]], node.stderr
    assert shell.stdout == '["x 0"]\n7\n7\ncode 1\n', shell.stderr
    assert refused in shell.stderr


def test_a_part_of_an_answer_that_an_interrupt_left_is_skipped() -> None:
    """Bash reads by programs, which an interrupt ends: the next call finds where the next answer begins."""
    bash = """
    body='{"call":"large","data":{}}'
    { __cloche_bytes ${#body} 7 1; printf '%s' "$body"; } >&5
    head -c 9000 <&6 >/dev/null
    cloche_host search '{"query": "ham", "limit": 1}'
    """
    result = cloche.run(bash, language="bash", tools=[search, Tool(lambda: "7" * 20_000, name="large")], timeout=5)
    assert result.stdout == '["ham 0"]\n', (result.status, result.stderr)


def test_help_and_stubs_show_signature_and_docstring() -> None:
    """What a model is told before is what `help` says inside."""
    result = cloche.run("from cloche_host import search; help(search)", tools=TOOLS)
    assert "search(query: str, limit: int = 3) -> list[str]\n    Search the index." in result.stdout
    text = stubs(TOOLS)
    assert text.startswith("from cloche_host import search, later, fail")
    assert (
        'def search(query: str, limit: int = 3) -> list[str]:\n    """Search the index.\n\n    Return titles.' in text
    )
    compile(text, "stubs", "exec")


def test_a_project_cannot_take_the_module_nor_break_it() -> None:
    """Files named like it, and like all that it is made of, are in the folder that is searched first."""
    names = ("cloche_host", "select", "json", "__future__", "asyncio")
    taken = {f"{name}.py": "raise SystemExit('taken')" for name in names}
    control = cloche.run("import cloche_host", files=taken)
    assert "taken" in control.stderr
    for warm in (False, True):
        code = "from cloche_host import search; search('x', limit=1)"
        assert cloche.run(code, files=taken, tools=TOOLS, warm=warm).value == ["x 0"]


def test_a_backend_without_calls_says_so_before_anything_runs() -> None:
    """And so does a list of tools that is none."""
    with pytest.raises(BackendUnavailable, match=r'cannot call functions of the caller.*backend "local"'):
        cloche.run("1", tools=TOOLS, backend=NoCalls())
    with pytest.raises(InvalidRequest, match="in python, javascript, bash can call"):
        cloche.run("1", language="ruby", tools=TOOLS)
    with pytest.raises(InvalidRequest, match="env has variables of the interpreter's own"):
        cloche.run("1", tools=TOOLS, env={"PYTHONPATH": "/tmp"})
    for wrong in ({"__class__": search}, {"search": 5}, "search", [search, search], {"for": search}):
        with pytest.raises(InvalidRequest, match="tools: "):
            cloche.run("1", tools=wrong)  # type: ignore[arg-type]


class NoCalls:
    """Be a backend that has no way for calls."""

    name = "plain"

    def open(self, *_: object) -> None:
        """Fail the test: nothing may be opened."""
        raise AssertionError


def test_async_functions_run_on_the_callers_loop_and_others_in_threads() -> None:
    """So one may use what belongs to the loop, and the other may block."""
    seen: dict[str, object] = {}

    async def on_loop() -> None:
        seen["loop"] = asyncio.get_running_loop()

    def in_thread() -> None:
        seen["thread"] = threading.current_thread()

    async def run() -> object:
        await cloche.arun("from cloche_host import *; on_loop(); in_thread()", tools=[on_loop, in_thread])
        return asyncio.get_running_loop()

    assert asyncio.run(run()) is seen["loop"]
    assert seen["thread"] is not threading.main_thread()


LEAVES = """
import os, threading, time
from cloche_host import wait
threading.Thread(target=wait, args=("end",), daemon=True).start()
time.sleep(0.3)
os._exit(0)
"""
FAILS = """
from cloche_host import fail, search
search("secret words")
try:
    fail()
except Exception:
    pass
"""
FORKS = """
import os
from cloche_host import search
search("x")
pid = os.fork()
if pid == 0:
    try:
        search("y")
    except Exception as error:
        print(error, flush=True)
    os._exit(0)
os.waitpid(pid, 0)
"""


def test_a_run_that_ends_cancels_its_calls() -> None:
    """At its own end, at its time-out and when it is cancelled; no call outlives it."""
    ends: list[str] = []

    async def wait(word: str) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ends.append(word)
            raise

    assert cloche.run(LEAVES, tools=[wait]).ok
    assert cloche.run("from cloche_host import wait; wait('time')", tools=[wait], timeout=0.5).status == "timeout"

    async def cancel() -> None:
        running = asyncio.create_task(cloche.arun("from cloche_host import wait; wait('cancel')", tools=[wait]))
        await asyncio.sleep(0.7)
        running.cancel()
        await asyncio.wait([running])

    asyncio.run(cancel())
    assert ends == ["end", "time", "cancel"]


def test_calls_are_in_the_audit_log(tmp_path: Path) -> None:
    """With the function, the sizes, the end and a hash; never with the arguments themselves."""
    cloche.run(FAILS, tools=TOOLS, audit=tmp_path)
    events = [json.loads(line) for file in tmp_path.glob("*.jsonl") for line in file.read_text().splitlines()]
    rows = [event for event in events if event["kind"] == "tool_call"]
    assert [(row["tool"], row["status"]) for row in rows] == [("search", "ok"), ("fail", "failed")]
    assert rows[0]["argument_bytes"] > 10
    assert "secret words" not in json.dumps(events)


# Approval.


ASKS = """
from cloche_host import HostError, remove

def attempt(page):
    try:
        return remove(page)
    except HostError as error:
        return error.kind

[attempt(page) for page in ["a", "a", "home"]]
"""


def remove(page: list[str] | str) -> str:
    """Remove a page."""
    return f"no {page}"


def test_a_risky_call_needs_a_yes_each_time() -> None:
    """A yes is for one call: the same call is asked about again, unless the approver says that it shall not be."""
    asked: list[object] = []

    def decide(request: ApprovalRequest) -> Decision:
        asked.append(request.arguments["page"])
        is_remembered = len(asked) > 3
        return Decision(is_approved=request.arguments["page"] != "home", by="me", is_remembered=is_remembered)

    tools = [Tool(remove, risk="high")]
    assert cloche.run(ASKS, tools=tools, approve=callback(decide)).value == ["no a", "no a", "denied"]
    assert asked == ["a", "a", "home"]
    assert cloche.run(ASKS, tools=tools, approve=callback(decide)).value == ["no a", "no a", "denied"]
    assert asked[3:] == ["a", "home"]
    assert cloche.run(ASKS, tools=tools).value == ["denied"] * 3


def test_what_was_approved_is_what_runs() -> None:
    """Neither the approver nor a second call under the same number changes the arguments."""

    def decide(request: ApprovalRequest) -> bool:
        assert isinstance(request.arguments, dict)
        request.arguments["page"].append("home")
        return True

    code = "from cloche_host import remove; remove(['a'])"
    assert cloche.run(code, tools=[Tool(remove, risk="critical")], approve=callback(decide)).value == "no ['a']"


def test_no_answer_in_time_is_a_no() -> None:
    """The approver has a time of its own, and the call ends with a refusal."""

    async def decide(_: ApprovalRequest) -> Decision:
        await asyncio.sleep(60)
        raise AssertionError

    limits = ToolLimits(approval_s=0.1)
    result = cloche.run(ASKS, tools=[Tool(remove, risk="high")], approve=decide, tool_limits=limits)
    assert result.value == ["denied"] * 3


STANDS = """
import threading, time, cloche_host
ticks = []
def tick():
    while True:
        ticks.append(time.sleep(0.01))
threading.Thread(target=tick, daemon=True).start()
[cloche_host.remove("a"), len(ticks) < 60]
"""


def alone(**options: Any) -> cloche.Result:
    """Run by itself."""
    return cloche.run(STANDS, **options)


def beside(**options: Any) -> cloche.Result:
    """Run in a live sandbox, which stands still for two questions at once."""
    both = "from concurrent.futures import ThreadPoolExecutor\nThreadPoolExecutor().map(cloche_host.remove, ['b'])\n"
    with cloche.Sandbox(**options) as sandbox:
        return sandbox.run(STANDS.replace("[cloche_host", f"{both}[cloche_host"))


def in_cell(**options: Any) -> cloche.Result:
    """Run as a cell, after which the time-out is as before."""
    with cloche.Sandbox(**options) as sandbox:
        session = sandbox.session()
        result = session.run(STANDS)
        assert session.run("while True: pass").status == "timeout"
        return result


@pytest.mark.parametrize("place", [alone, beside, in_cell])
def test_a_program_and_its_clock_stand_still_while_an_approver_decides(place: Callable[..., cloche.Result]) -> None:
    """The answer takes longer than the run may, and the program's other threads have no time meanwhile."""

    async def decide(_: ApprovalRequest) -> Decision:
        await asyncio.sleep(1.2)
        return Decision(is_approved=True, by="me")

    result = place(tools=[Tool(remove, risk="high")], approve=decide, timeout=1)
    assert result.value == ["no a", True], (result.status, result.stderr)


# Hostile programs.


def test_a_child_of_the_program_cannot_call() -> None:
    """A fork would read the answers of its parent."""
    assert "called by the process that the run began with" in cloche.run(FORKS, tools=TOOLS).stdout


def test_no_descriptor_gets_to_the_caller() -> None:
    """One that arrives would be closed by the caller, for as long as the program said (SO_LINGER)."""
    code = RAW + "import socket\nsocket.send_fds(socket.socket(fileno=os.dup(answers)), [b'x'], [0])"
    control = "import socket\na, b = socket.socketpair()\nsocket.send_fds(a, [b'x'], [0])"
    assert cloche.run(control).ok
    result = cloche.run(code, tools=TOOLS)
    assert "BrokenPipeError" in result.stderr or "EPIPE" in result.stderr, result.stderr


HOSTILE = {
    "floods": """
os.set_blocking(calls, True)
number = 0
while True:
    os.write(calls, b"".join(frame(number + n, b"{}") for n in range(1, 999)))
    number += 999
""",
    "never reads": """
os.set_blocking(calls, True)
for number in range(1, 10**6):
    os.write(calls, frame(number, b'{"call":"large","data":{}}'))
""",
    "sends half": "os.write(calls, frame(1, b'x' * 500_000)[:60_000]); time.sleep(60)",
    "sends a gibibyte": "os.write(calls, (1 << 30).to_bytes(4, 'big') + bytes(4) + b'1'); time.sleep(60)",
    "closes its ends": "os.close(calls); os.close(answers); time.sleep(60)",
    "lies": "os.write(calls, frame(1, b'[' * 9000) + frame(2, b'x' * 999, 7) + frame(2, b'5')); time.sleep(60)",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_program_holds_no_other_work_of_the_caller(name: str) -> None:
    """The loop goes on, memory stays, and another program's calls are served meanwhile."""

    async def large() -> str:
        return "x" * 100_000

    async def claim() -> float:
        longest_s, last = 0.0, (time.perf_counter(), time.process_time())
        attacker = asyncio.create_task(cloche.arun(RAW + HOSTILE[name], tools=[large], timeout=1.2))
        await cloche.arun("1", tools=TOOLS)
        last = (time.perf_counter(), time.process_time())
        victim = asyncio.create_task(
            cloche.arun("from cloche_host import search\nfor _ in range(30): search('x')", tools=TOOLS)
        )
        while not attacker.done():
            await asyncio.sleep(0.001)
            now = time.perf_counter(), time.process_time()
            longest_s = max(longest_s, min(after - before for after, before in zip(now, last, strict=True)))
            last = now
        assert (await victim).meta["tools"]["ok"] == 30
        assert (await attacker).status == "timeout"
        return longest_s

    check_loop(claim)


@pytest.mark.parametrize("count", [2000, pytest.param(10_000, marks=pytest.mark.soak)])
def test_many_calls_lose_none_and_leave_the_caller_as_it_was(count: int) -> None:
    """Thousands in one run, eight at a time."""
    code = (
        "import concurrent.futures, sys, cloche_host\nwith concurrent.futures.ThreadPoolExecutor(8) as pool: "
        "total = sum(pool.map(cloche_host.double, range(int(sys.argv[1]))))\ntotal"
    )

    def double(number: int) -> int:
        return 2 * number

    cloche.run(code, argv=["500"], tools=[double], timeout=60)
    before = resident()
    result = cloche.run(code, argv=[str(count)], tools=[double], timeout=60)
    assert result.value == count * (count - 1)
    assert result.meta["tools"]["ok"] == count
    assert resident() - before < 10 * 1024 * 1024


def resident() -> int:
    """Return the bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize("live", [False, True])
def test_a_program_that_is_served_no_more_is_told_so(live: bool) -> None:
    """After many refusals its calls fail at once: none waits for the time-out."""
    code = """
from cloche_host import HostError, search
kinds = {}
for _ in range(1500):
    try:
        search(5)
    except HostError as error:
        kinds[error.kind] = kinds.get(error.kind, 0) + 1
kinds
"""
    with cloche.Sandbox(tools=TOOLS, live=live, timeout=20) as sandbox:
        kinds = sandbox.run(code).value
    assert kinds["refused"] + kinds["gone"] == 1500
    assert kinds["gone"] >= 500


def test_limits_are_refusals_with_their_keyword() -> None:
    """A program reads which limit it has reached, and its caller how to raise it."""
    code = "from cloche_host import search\nfor _ in range(3): search('x')"
    result = cloche.run(code, tools=[Tool(search)], tool_limits=ToolLimits(calls=2))
    assert "has made 2 calls, which is its limit (tool_limits: calls)" in result.stderr
    assert result.meta["tools"]["refused"] == 1
