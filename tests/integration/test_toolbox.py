"""Tools over a real sandbox: what a model gets told, and that nothing it passes widens what holds."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import cloche
from cloche.agent.answers import MOST_CHARS, Answer
from cloche.agent.approval import ApprovalRequest, Decision, auto
from cloche.agent.exports import answer_anthropic, answer_openai, anthropic_tools, openai_tools
from cloche.agent.toolbox import Toolbox
from cloche.backends.host import measure_host
from cloche.backends.toolchain import languages_here
from tests.harness.environments import make_environment, run_there

EXAMPLE = Path(__file__).parents[2] / "examples" / "agent.py"
YES = Decision(is_approved=True, by="test")


async def always(_: ApprovalRequest) -> Decision:
    """Approve everything, as no approver of ours does."""
    return YES


def use(work: Callable[[Toolbox], Awaitable[Any]], **options: Any) -> Any:
    """Do something with a toolbox that is opened for it; by default HIGH is approved."""

    async def main() -> Any:
        async with Toolbox(**{"approve": auto("high"), **options}) as tools:
            return await work(tools)

    return asyncio.run(main())


def test_programs_of_the_tools_call_functions_of_the_host() -> None:
    """Tools that run Python describe them by their stubs, and the toolbox's approver decides about risky ones."""
    asked = []

    async def approve(request: ApprovalRequest) -> Decision:
        asked.append(request.tool)
        return Decision(is_approved=request.tool != "drop", by="test")

    def double(number: int) -> int:
        """Double a number."""
        return 2 * number

    def drop() -> None:
        """Drop all."""
        raise AssertionError

    async def work(tools: Toolbox) -> list[Any]:
        code = "from cloche_host import double, drop\nprint(double(double(5)))\ndrop()"
        texts = [tool.description for tool in tools.tools if "double" in tool.description]
        return [texts, await tools.call("run_code", {"code": code}), await tools.call("run_code", {"code": "2 + 2"})]

    functions = [double, cloche.Tool(drop, risk="critical")]
    texts, answer, after = use(work, approve=approve, tools=functions, interpreters=True)
    assert len(texts) == 4
    assert 'def double(number: int) -> int:\n    """Double a number."""' in texts[0]
    assert "20\n" in answer.text
    assert "drop was not approved by test" in answer.text
    assert (after.text, asked) == ("[value]\n4", ["run_code", "drop", "run_code"])


ENDED = "took every process there may be, and was ended"


def test_what_a_call_has_left_running_disables_no_other() -> None:
    """Where it takes every process there may be it is ended, and the model is told; a lost sandbox is made anew."""
    bomb = "import os, time\nwhile True:\n  try: os.fork()\n  except OSError: time.sleep(0.05)"
    leave = f"import os, subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {bomb!r}], start_new_session=True)"
    until_full = """
while True:
    try: child = os.fork()
    except OSError: break
    if child == 0: os._exit(0)
    os.waitpid(child, 0)"""

    async def work(tools: Toolbox) -> list[str]:
        await tools.call("run_code", {"code": leave + until_full})
        told = [""]
        while len(told) < 20 and ENDED not in told[-1]:
            told.append((await tools.call("run_code", {"code": "print(1)"})).text)
        told.append((await tools.call("write_file", {"path": "a", "content": "x"})).text)
        await tools._sandbox.kill()
        return [*told, *[(await tools.call("list_files", {"path": "."})).text for _ in range(2)]]

    *told, lost, after = use(work, pids=60, timeout=10)
    assert ENDED in told[-2]
    assert told[-1].endswith("Wrote 1 characters to a.")
    assert "the next call begins in a new one" in lost
    assert after == "There are no files."


def ask(name: str, arguments: dict[str, Any], **options: Any) -> Answer:
    """Call one tool."""
    answer: Answer = use(lambda tools: tools.call(name, arguments), **options)
    return answer


def test_code_is_run_and_its_output_and_value_are_told() -> None:
    """As plain text."""
    answer = ask("run_code", {"code": "print('hello')\n6 * 7"})
    assert answer.text == "hello\n[value]\n42"
    assert not answer.is_error
    assert answer.result is not None
    assert answer.result.enforcement.level >= cloche.Level.JAIL


def test_files_that_may_be_missing_are_told() -> None:
    """Else a model would take those that are reported for all."""
    answer = ask("run_code", {"code": "import os; os.makedirs('d/' * 70)"})
    assert answer.text == "Files may be missing from the result; write fewer, or one archive."
    assert not answer.is_error


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("run_code", {"code": "echo $((6 * 7))", "language": "bash"}),
        ("run_python_code", {"code": "print(42)"}),
        ("code_exec", {"code": "print(42)"}),
        ("code.execute", {"code": "print(42)"}),
        ("code_execute", {"code": "print(42)"}),
        ("os.execute_sandboxed", {"command": "expr 6 \\* 7"}),
    ],
)
def test_each_tool_that_runs_code_runs_it(name: str, arguments: dict[str, Any]) -> None:
    """By its own name, or by the one that providers allow."""
    assert ask(name, arguments).text == "42"


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("while True: pass", "Killed after 1 s; split the work or raise timeout."),
        ("x = bytearray(1 << 30)\nx[::4096] = b'1' * len(x[::4096])", "memory"),
        ("import nothing_like_it", "Packages cannot be installed here"),
        ("import socket\nsocket.create_connection(('192.0.2.1', 80), 1)", "There is no network here"),
        ("raise SystemExit(3)", "It ended with exit code 3."),
        ("import os\nos.abort()", "It was ended by signal 6."),
    ],
)
def test_what_went_wrong_is_said_in_words(code: str, told: str) -> None:
    """With what to try next."""
    answer = ask("run_code", {"code": code, "timeout": 1 if "while" in code else 20})
    assert answer.is_error
    assert told in answer.text


def test_what_is_long_is_clipped_and_kept_where_a_tool_can_read_it() -> None:
    """Head and tail are told, and where the full text is."""

    async def work(tools: Toolbox) -> tuple[Answer, Answer]:
        answer = await tools.call("run_code", {"code": "for i in range(9000): print(i)"})
        return answer, await tools.call("read_file", {"path": "tool-outputs/1.stdout.txt", "offset": 4321, "lines": 1})

    answer, part = use(work)
    assert len(answer.text) < MOST_CHARS + 200
    assert answer.text.startswith("0\n1\n2\n")
    assert answer.text.rstrip().endswith("8999")
    assert "the full text is in tool-outputs/1.stdout.txt" in answer.text
    assert part.text == "4321\n\n[lines 4321 to 4321 of 9000]"


def test_languages_without_a_toolchain_or_leave_are_not_offered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that the host runs and the policy allows are."""
    here = languages_here()
    assert "python" in here
    monkeypatch.setattr("cloche.backends.toolchain.SYSTEM_FOLDERS", (str(tmp_path),))
    monkeypatch.setenv("PATH", str(tmp_path))
    (alone,) = {tool.languages for tool in Toolbox().tools if tool.name == "run_code"}
    assert alone == ("python",)
    monkeypatch.undo()
    (both,) = {tool.languages for tool in Toolbox(languages=["ruby", "python"]).tools if tool.name == "run_code"}
    assert both == tuple(name for name in ("python", "ruby") if name in here)


INSTALLERS = """
import importlib.util, shutil, subprocess, sys
names = ("pip", "pip3", "npm", "npx", "gem", "apt", "apt-get", "uv")
commands = [[name] for name in names if shutil.which(name)]
commands += [[sys.executable, "-m", name] for name in ("pip", "ensurepip") if importlib.util.find_spec(name)]
ends = [subprocess.run([*one, "--version"], capture_output=True, text=True) for one in commands]
[one.args[-2] for one in ends if one.returncode == 0 or "name the packages when it is started" not in one.stderr]
"""


@pytest.mark.both_users
def test_package_managers_are_not_found_by_tools_that_say_so(settings_of_nobody: None) -> None:
    """Neither in a run of its own nor in an interpreter that goes on: each says where packages come from."""

    async def work(tools: Toolbox) -> list[Any]:
        answers = [await tools.call("code_exec", {"code": INSTALLERS}) for _ in range(3)]
        assert "no package managers" in next(tool.description for tool in tools.tools if tool.name == "code_exec")
        return [answer.result.value for answer in answers if answer.result is not None]

    for live in (False, True):
        assert use(work, interpreters=live) == [[]] * 3


@pytest.mark.both_users
def test_throwaway_runs_find_no_package_managers_but_what_lives_does(settings_of_nobody: None) -> None:
    """In a run's own sandbox all say where packages come from, cold and warm; elsewhere, or where asked, they work."""
    assert [cloche.run(INSTALLERS).value for _ in range(3)] == [[]] * 3
    assert cloche.get_sandbox().execute(INSTALLERS).value == []
    venv = cloche.run("import subprocess, sys\nexit(subprocess.call(['python3', '-m', 'venv', 'v']))")
    assert "cloche exec" in venv.meta["advice"]  # what it says itself misleads
    with cloche.Sandbox(live=False) as sandbox:
        shown = [cloche.run(INSTALLERS, package_managers=True).value, sandbox.run(INSTALLERS).value]
    with cloche.Sandbox() as sandbox:
        assert [*shown, sandbox.run(INSTALLERS).value] == [shown[0]] * 3 != [[]] * 3


def test_where_package_managers_are_shown_no_tool_denies_it() -> None:
    """The sentence is made from the policy: below level jail nothing is covered."""
    toolbox = Toolbox(tier=4, backend="local", level="confined")
    assert toolbox.policy.package_managers
    assert "package managers" not in " ".join(tool.description for tool in toolbox.tools)


def test_a_package_manager_that_nobody_inside_can_reach_is_in_the_way_of_nothing(tmp_path: Path) -> None:
    """It lies in a folder that is its owner's alone, and a link leads there."""
    python = make_environment(tmp_path / "mine")
    hidden = tmp_path / "mine" / "hidden"
    hidden.mkdir(mode=0o700)
    (hidden / "npm").touch()
    (python.parent / "npm").symlink_to(hidden / "npm")
    program = """
import json
from cloche.agent.approval import auto
from cloche.agent.toolbox import Toolbox
with Toolbox(approve=auto("high")) as tools:
    print(json.dumps(tools.call_and_wait("run_code", {"code": "print(1)"}).text))
"""
    assert run_there(python, program) == "1"


def test_where_this_host_gives_no_jail_no_tool_denies_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in most containers: code runs at level confined there, which shows what the host has."""
    host = replace(measure_host(), namespaces="refused")
    monkeypatch.setattr("cloche.backends.local.backend.measure_host", lambda: host)
    assert "package managers" not in " ".join(tool.description for tool in Toolbox().tools)


def test_a_time_out_that_cannot_be_longer_is_not_to_be_raised() -> None:
    """What the operator allows is all there is, and asking for more brings no more."""

    async def work(tools: Toolbox) -> list[str]:
        return [
            (await tools.call("run_code", {"code": "while True: pass", "timeout": 60})).text,
            await tools.run_python_code("while True: pass", 60),
        ]

    for text in use(work, timeout=1):
        assert "Killed after 1 s; split the work: there is no more time." in text


def test_what_the_limit_cut_is_not_called_the_full_text() -> None:
    """The file holds what is known of it."""

    async def work(tools: Toolbox) -> str:
        return (await tools.call("run_code", {"code": "for i in range(9000): print(i)"})).text

    assert "more of it, not all, is in tool-outputs/1.stdout.txt" in use(work, output_limit="20k")


def test_a_figure_comes_as_an_image() -> None:
    """A PNG, in base64."""
    pixel = base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(16)).decode()
    code = f"import base64\nclass Look:\n    def _repr_png_(self): return base64.b64decode({pixel!r})\nLook()"
    answer = ask("run_code", {"code": code})
    assert [image.mime for image in answer.images] == ["image/png"]
    assert base64.b64decode(answer.images[0].base64).startswith(b"\x89PNG")


def test_files_are_the_workspaces() -> None:
    """What one tool writes, code and the other tools see."""

    async def work(tools: Toolbox) -> list[str]:
        calls = [
            ("write_file", {"path": "notes/a.txt", "content": "one two"}),
            ("edit_file", {"path": "notes/a.txt", "old": "two", "new": "three"}),
            ("run_code", {"code": "print(open('notes/a.txt').read())"}),
            ("read_file", {"path": "/workspace/notes/a.txt"}),
            ("list_files", {"path": "notes"}),
        ]
        return [(await tools.call(name, arguments)).text for name, arguments in calls]

    assert use(work)[1:] == ["Replaced one passage of notes/a.txt.", "one three", "one three", "notes/a.txt"]


@pytest.mark.parametrize(("old", "told"), [("", "is empty"), ("four", "is not there"), ("o", "is there 2 times")])
def test_an_edit_that_is_not_clear_changes_nothing(old: str, told: str) -> None:
    """The passage must be there exactly once."""

    async def work(tools: Toolbox) -> tuple[Answer, Answer]:
        await tools.call("write_file", {"path": "a", "content": "one two"})
        answer = await tools.call("edit_file", {"path": "a", "old": old, "new": "x"})
        return answer, await tools.call("read_file", {"path": "a"})

    answer, after = use(work)
    assert answer.is_error
    assert told in answer.text
    assert after.text == "one two"


def test_memory_and_configs_are_host_folders_and_nothing_else_is(tmp_path: Path) -> None:
    """The control: the host reads its own file; through a tool nobody does."""
    (tmp_path / "canary").write_text("canary")
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory/link").symlink_to(tmp_path / "canary")
    assert (tmp_path / "memory/link").read_text() == "canary"

    async def work(tools: Toolbox) -> list[Answer]:
        paths = [
            str(tmp_path / "canary"),
            "/memory/../canary",
            "/memory/link",
            "../canary",
            "/etc/passwd",
            "/configs/a",
        ]
        return [
            await tools.call("write_file", {"path": "/memory/a", "content": "kept"}),
            *[await tools.call("read_file", {"path": path}) for path in paths],
            *[await tools.call("write_file", {"path": path, "content": "x"}) for path in paths],
        ]

    first, *others = use(work, roots={"/memory": tmp_path / "memory"})
    assert not first.is_error
    assert (tmp_path / "memory/a").read_text() == "kept"
    assert all(answer.is_error and "canary" not in answer.text.replace("/canary", "") for answer in others)
    assert (tmp_path / "canary").read_text() == "canary"


WIDER = {
    "timeout": 1e9, "network": "open", "memory": "64g", "backend": "none", "tier": 4, "level": "process",
    "trusted": True, "require": "none", "image": "debian", "env": {"A": "1"}, "user": "root", "fallback": "process",
    "best_effort": ["network"], "preset": "performance", "languages": ["csharp"], "pids": 9999, "config": "/x",
}  # fmt: skip
REPORT = "import resource, json, os; print(json.dumps([resource.getrlimit(n) for n in range(16)] + sorted(os.environ)))"


@pytest.mark.parametrize("name", WIDER)
@pytest.mark.parametrize("tool", ["run_code", "run_python_code", "code_exec", "code.execute"])
def test_no_argument_widens_the_sandbox(tool: str, name: str) -> None:
    """It is refused by name, or changes nothing of what holds."""

    async def work(tools: Toolbox) -> tuple[Answer, Answer]:
        return await tools.call(tool, {"code": REPORT}), await tools.call(tool, {"code": REPORT, name: WIDER[name]})

    plain, wider = use(work, timeout=20)
    assert plain.result is not None
    if wider.result is None:
        assert f"there is no argument {name!r}" in wider.text
        return
    assert name == "timeout"
    assert wider.result.stdout == plain.result.stdout
    assert replace(wider.result.enforcement, hits={}) == replace(plain.result.enforcement, hits={})
    assert wider.result.meta["limits"] == plain.result.meta["limits"]


def test_a_longer_time_out_than_the_operators_is_the_operators() -> None:
    """And the model is told how long it had."""
    begun = time.monotonic()
    answer = ask("run_code", {"code": "while True: pass", "timeout": 600}, timeout=1)
    assert "Killed after 1 s" in answer.text
    assert time.monotonic() - begun < 20


def test_nothing_runs_without_approval() -> None:
    """The default is no, which is told to the model, and the code was not run."""

    async def work(tools: Toolbox) -> tuple[Answer, Answer]:
        denied = await tools.call("run_code", {"code": "open('ran', 'w')"})
        return denied, await tools.call("list_files")

    async def main() -> tuple[Answer, Answer]:
        async with Toolbox() as tools:
            return await work(tools)

    denied, files = asyncio.run(main())
    assert denied.is_error
    assert denied.text.startswith("ApprovalDenied: run_code was not approved by default")
    assert files.text == "There are no files."


def test_who_approves_sees_the_code_and_the_rules() -> None:
    """Where it runs, under which policy and limits."""
    asked: list[ApprovalRequest] = []

    async def approve(request: ApprovalRequest) -> Decision:
        asked.append(request)
        return YES

    assert not ask("run_code", {"code": "print(1)"}, approve=approve, memory="100m").is_error
    assert asked[0].arguments["code"] == "print(1)"
    assert asked[0].rules["runs_on"] == "local"
    assert asked[0].rules["policy"]["network"] == "off"
    assert asked[0].rules["limits"]["memory_bytes"] == 100 << 20


def test_the_host_is_tier_4s_and_takes_two_words_each_time(tmp_path: Path) -> None:
    """Approved and confirmed; its time-out kills the whole group."""
    asked: list[ApprovalRequest] = []

    async def approve(request: ApprovalRequest) -> Decision:
        asked.append(request)
        return YES

    path = tmp_path / "made"
    assert not ask("os.execute", {"command": f"echo here > {path}"}, approve=approve, tier=4).is_error
    assert path.read_text() == "here\n"
    assert [request.is_confirmation for request in asked] == [False, True]
    child = tmp_path / "child"
    slow = f"sh -c 'echo $$ > {child}; exec sleep 60' & sleep 60"
    answer = ask("os.execute", {"command": slow, "timeout": 10}, approve=approve, tier=4)
    assert "Killed after 10 s" in answer.text
    deadline = time.monotonic() + 20  # until whoever adopted it has taken note
    while os.path.exists(f"/proc/{child.read_text().strip()}"):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_at_tier_4_code_runs_on_the_host_and_is_critical() -> None:
    """Unless a sandbox was asked for, where it is high."""

    async def risks(tools: Toolbox) -> set[str]:
        return {str(tools.risk(tool.name)) for tool in tools.tools if tool.runs_code and tool.name != "os.execute"}

    assert use(risks, tier=4) == {"critical"}
    assert use(risks, tier=4, backend="local", level="jail") == {"high"}
    assert use(risks, tier=3) == {"high"}


def test_what_a_model_wrote_is_never_trusted() -> None:
    """That word is the operator's, about their own code."""
    with pytest.raises(cloche.InvalidRequest, match="never the operator's own"):
        Toolbox(trusted=True, fallback="process")


def test_the_plain_functions() -> None:
    """`run_code` returns a dict, `run_python_code` text."""

    async def work(tools: Toolbox) -> tuple[dict[str, Any], str, str]:
        return (
            await tools.run_code("print(1)\n2"),
            await tools.run_python_code("print(1)"),
            await tools.run_python_code("1 / 0"),
        )

    told, good, bad = use(work)
    assert told["stdout"] == "1\n"
    assert told["value"] == 2
    assert told["output"] == "1\n[value]\n2"
    assert good == "1\n"
    assert bad.startswith("Error (exit_code=1): Traceback")
    assert "ZeroDivisionError" in bad


def test_providers_are_told_of_the_tools_and_answered_in_their_own_forms() -> None:
    """OpenAI's function calls, and Anthropic's tool use."""

    async def work(tools: Toolbox) -> list[Any]:
        call = {"id": "c1", "function": {"name": "code_execute", "arguments": json.dumps({"code": "print(1)"})}}
        broken = {"id": "c2", "function": {"name": "run_code", "arguments": "{'code': 1"}}
        block = {"id": "b1", "name": "run_code", "input": {"code": "print(2)"}}
        return [
            openai_tools(tools), anthropic_tools(tools), await answer_openai(tools, call),
            await answer_openai(tools, broken), await answer_anthropic(tools, block),
        ]  # fmt: skip

    openai, anthropic, answered, broken, used = use(work)
    assert [tool["function"]["name"] for tool in openai] == [tool["name"] for tool in anthropic]
    assert openai[0]["function"]["parameters"] == anthropic[0]["input_schema"] == Toolbox().tools[0].schema
    assert answered == {"role": "tool", "tool_call_id": "c1", "content": "1"}
    assert "the arguments are not JSON" in broken["content"]
    assert used == {
        "type": "tool_result", "tool_use_id": "b1", "content": [{"type": "text", "text": "2"}], "is_error": False,
    }  # fmt: skip


def test_the_example_runs() -> None:
    """As it stands."""
    done = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "run_code: 12\n" in done.stdout
    assert "Packages cannot be installed here" in done.stdout


def test_code_that_is_not_async_calls_and_waits() -> None:
    """One toolbox, whoever calls it: blocking, from an event loop, from the loop that it was opened in."""
    with Toolbox(approve=auto("high")) as tools:
        assert tools.call_and_wait("run_code", {"code": "open('a', 'w').write('kept')"}).text == "[value]\n4"
        assert asyncio.run(tools.call("run_code", {"code": "print(open('a').read())"})).text == "kept"
    with pytest.raises(cloche.InvalidRequest, match="not open"):
        tools.call_and_wait("run_code", {"code": "1"})

    async def work(tools: Toolbox) -> str:
        with pytest.raises(cloche.InvalidRequest, match=r"await tools\.call"):
            tools.call_and_wait("run_code", {"code": "print(1)"})
        return (await asyncio.to_thread(tools.call_and_wait, "run_code", {"code": "print(1)"})).text

    assert use(work) == "1"


def test_a_toolbox_is_open_once() -> None:
    """And says so."""

    async def main() -> None:
        tools = Toolbox()
        with pytest.raises(cloche.InvalidRequest, match="not open"):
            await tools.call("run_code", {"code": "1"})
        async with tools:
            with pytest.raises(cloche.InvalidRequest, match="already open"):
                await tools.__aenter__()

    asyncio.run(main())


def test_the_configuration_names_the_hosts_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a toolbox names none; one that is not there is an error that says who named it."""
    (tmp_path / "memory").mkdir()
    monkeypatch.setenv("CLOCHE_ROOT_MEMORY", str(tmp_path / "memory"))
    note = {"path": "/memory/a", "content": "kept"}
    assert not ask("write_file", note).is_error
    assert (tmp_path / "memory/a").read_text() == "kept"
    assert "no folder here; the operator configures one" in ask("write_file", note, roots={}).text
    monkeypatch.setenv("CLOCHE_ROOT_CONFIGS", str(tmp_path / "missing"))
    with pytest.raises(
        cloche.InvalidRequest, match=r"roots\.configs \(environment CLOCHE_ROOT_CONFIGS\) is '.*missing'"
    ):
        Toolbox()
