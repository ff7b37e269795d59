"""Interpreters that go on between the calls of a toolbox: what is kept, what is lost, and that the model is told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from cloche.agent.answers import Answer
from cloche.agent.approval import ApprovalRequest, Decision, auto
from cloche.agent.catalog import TOOLS
from cloche.agent.exports import plain_functions
from cloche.agent.interpreters import Room
from cloche.agent.toolbox import Toolbox
from cloche.audit.chain import sha256_of
from cloche.core.errors import InvalidRequest
from cloche.core.result import Result
from cloche.testing.fake import FakeBackend
from tests.harness.audits import lines_of

DEAF = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
RESISTING = f"{DEAF}while True: pass"
FOR_EVER = "open('on', 'w').close()\nwhile True: pass"


@pytest.fixture(autouse=True)
def _settings_of_nobody(settings_of_nobody: None) -> None:
    """Keep the machine's own configuration out."""


def use(work: Callable[[Toolbox], Awaitable[Any]], **options: Any) -> Any:
    """Do something with a toolbox that keeps interpreters; HIGH is approved."""

    async def main() -> Any:
        async with asyncio.timeout(100), Toolbox(**{"approve": auto("high"), "interpreters": True, **options}) as tools:
            return await work(tools)

    return asyncio.run(main())


def told(*calls: str | dict[str, Any], **options: Any) -> list[Answer]:
    """Return the answers to calls of `run_code`, one after the other."""

    async def work(tools: Toolbox) -> list[Answer]:
        return [await ask(tools, one) for one in calls]

    answers: list[Answer] = use(work, **options)
    return answers


async def ask(tools: Toolbox, call: str | dict[str, Any]) -> Answer:
    """Call `run_code` with code, or with all its arguments."""
    return await tools.call("run_code", {"code": call} if isinstance(call, str) else call)


async def until(tools: Toolbox, name: str) -> None:
    """Wait for a file that a call makes."""
    while name not in (await tools.call("list_files", {})).text.splitlines():  # noqa: ASYNC110 - code tells no one
        await asyncio.sleep(0.02)


def states(answers: Sequence[Answer]) -> list[str]:
    """Return what became of the interpreter, call by call."""
    return [one.state for one in answers]


@pytest.mark.parametrize(
    ("language", "first", "second", "expected"),
    [
        ("python", "x = 20", "print(x + 1)", "21"),
        ("javascript", "const x = 20", "console.log(x + 1)", "21"),
        ("bash", "x=20; cd /tmp; f() { echo $((x + 1)) $PWD; }", "f", "21 /tmp"),
    ],
)
def test_what_a_call_defined_is_there_in_the_next(language: str, first: str, second: str, expected: str) -> None:
    """In every language that has sessions."""
    answers = told(*({"code": code, "language": language} for code in (first, second)))
    assert states(answers) == ["new", "kept"]
    assert answers[1].text == expected


def test_each_tool_and_language_finds_its_own() -> None:
    """Tools share the interpreter of a language; a shell command, and other languages, begin anew; files are shared."""

    async def work(tools: Toolbox) -> None:
        await ask(tools, "x = 1; open('f', 'w').write('here')")
        assert (await tools.call("run_python_code", {"code": "x"})).text == "[value]\n1"
        assert (await tools.call("code.execute", {"code": "x"})).text == "[value]\n1"
        shell = await tools.call("os.execute_sandboxed", {"command": "cat f; cd /tmp; y=2"})
        assert (shell.text, shell.state) == ("here", "none")
        assert (await tools.call("os.execute_sandboxed", {"command": "echo $y$PWD"})).text == "/workspace"
        assert await tools.run_python_code("print(x)") == "1\n"
        assert (await tools.run_code("x", restart=True))["state"] == "new"
        assert "NameError" in await plain_functions(tools)["run_code"]("x")

    use(work)


FIGURE = "import matplotlib.pyplot as plt\nplt.plot(data)\nplt.show()"


def test_a_figure_is_drawn_from_an_earlier_call() -> None:
    """And it is an image, as it is in one call."""
    answers = told("data = [1, 2, 4]", FIGURE)
    assert [len(one.images) for one in answers] == [0, 1]


def test_an_error_an_exit_and_a_time_out_keep_it() -> None:
    """Exit code, status and words are those of a program; what earlier calls defined is still there."""
    late = {"code": "import time; time.sleep(60)", "timeout": 5}
    answers = told("x = 1", "1 / 0", "import sys; sys.exit(3)", late, "x")
    results = [one.result for one in answers]
    assert [(str(one.status), one.exit_code) for one in results if one] == [
        ("ok", 0), ("error", 1), ("error", 3), ("timeout", -1), ("ok", 0),
    ]  # fmt: skip
    assert states(answers) == ["new", *["kept"] * 4]
    assert "ended with exit code 3" in answers[2].text
    assert answers[3].text.endswith("The interpreter goes on, with the definitions of earlier calls.")
    assert "Interrupted after 5 s" in answers[3].text
    assert answers[4].text == "[value]\n1"


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("y = [b'x' * 1_000_000 for _ in range(1000)]", "Killed: it used more than 256 MiB of memory, with what"),
        ("import os; os._exit(0)", "ended with exit code 0"),
        (RESISTING, "Killed after 3 s"),
    ],
)
def test_what_ends_it_is_said_and_the_next_call_works(code: str, why: str) -> None:
    """Once; files are still there."""
    last = "import os; ['x' in globals(), os.path.exists('f')]"
    answers = told("x = 1; open('f', 'w').close()", {"code": code, "timeout": 3 if "while" in code else 20}, last)
    assert states(answers) == ["new", "lost", "new"]
    assert answers[1].is_error
    assert why in answers[1].text
    assert "what earlier calls defined is gone; files are still there" in answers[1].text
    assert answers[2].text == "[value]\n[false, true]"


def test_a_restart_begins_anew_and_widens_nothing() -> None:
    """It takes a truth value and nothing else, and is no argument of a toolbox that keeps nothing."""
    answers = told(
        "x = 1",
        {"code": "'x' in globals()", "restart": True},
        {"code": "2", "restart": None},
        {"code": "3", "restart": 1},
    )
    assert [one.text for one in answers[1:3]] == ["[value]\nfalse", "[value]\n2"]
    assert states(answers) == ["new", "new", "kept", "none"]
    assert "restart must be of type boolean, not int" in answers[3].text
    refused = told({"code": "1", "restart": True}, interpreters=False)[0]
    assert "there is no argument 'restart'" in refused.text


def test_what_is_put_away_is_said_with_the_next_call() -> None:
    """The least recently used one makes room for another; the other goes on."""

    async def main() -> None:
        room = Room(most=1)
        options: dict[str, Any] = {"approve": auto("high"), "interpreters": room.share_of(None)}
        async with Toolbox(**options) as mine, Toolbox(**options) as yours:
            await ask(mine, "x = 1; open('f', 'w').close()")
            await ask(yours, "x = 2")
            back = await ask(mine, "import os; ['x' in globals(), os.listdir()]")
            assert back.text.startswith(
                "[The python interpreter of the earlier calls is gone: it was put away as the one"
            )
            assert "at most 1 are kept" in back.text
            assert back.text.endswith('[value]\n[false, ["f"]]')
            assert (await ask(mine, "1")).text == "[value]\n1"  # it was said

    asyncio.run(main())


def test_that_it_is_gone_is_said_until_a_call_has_an_answer() -> None:
    """One that is given up, or refused before it ran, has none to say it in."""

    async def main() -> None:
        room = Room(most=1)
        options: dict[str, Any] = {"approve": auto("high"), "interpreters": room.share_of(None), "screen": "block"}
        async with Toolbox(**options) as mine, Toolbox(**options) as yours:
            await ask(mine, "x = 1")
            await ask(yours, "x = 2")
            call = asyncio.ensure_future(ask(mine, FOR_EVER))
            await until(mine, "on")
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert "PolicyDenied" in (await ask(mine, "import subprocess")).text
            after = await ask(mine, "'x' in globals()")
            assert "is gone: it was put away as the one" in after.text
            assert after.text.endswith("[value]\nfalse")
            assert (await ask(mine, "1")).text == "[value]\n1"

    asyncio.run(main())


def test_what_was_not_used_for_long_is_said_with_the_next_call() -> None:
    """It has ended meanwhile, and its place is free; files are still there."""

    async def main() -> None:
        room = Room(idle_s=3)
        async with Toolbox(approve=auto("high"), interpreters=room.share_of(None)) as tools:
            await ask(tools, "x = 1")
            one = tools._interpreters._by_language["python"]  # type: ignore[union-attr]
            while one.is_alive:  # noqa: ASYNC110 - it is what is waited for
                await asyncio.sleep(0.02)
            assert "is gone: it was not used for 3 s" in (await ask(tools, "'x' in globals()")).text

    asyncio.run(main())


def test_a_call_that_is_given_up_keeps_it() -> None:
    """Its cell is interrupted; where that does not help, the loss is said with the next call."""

    async def work(tools: Toolbox) -> None:
        await ask(tools, "x = 1")
        for code in (FOR_EVER, f"{DEAF}open('on2', 'w').close()\nwhile True: pass"):
            call = asyncio.ensure_future(ask(tools, code))
            name = code.partition("'")[2].partition("'")[0]
            await until(tools, name)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            after = await ask(tools, "x if 'x' in globals() else 'none'")
            assert after.text.endswith("[value]\n1" if name == "on" else "[value]\nnone")
        assert "is gone: a call that was given up did not let itself be interrupted" in after.text

    use(work)


def test_calls_take_turns() -> None:
    """Fifty at once run one after the other, each in the state that the one before it left, in every language."""

    async def work(tools: Toolbox) -> None:
        await ask(tools, "n = 0")
        slow = "k = n; import time; time.sleep(0.001); n = k + 1; n"
        answers = await asyncio.gather(*(ask(tools, slow) for _ in range(50)))
        assert [one.text for one in answers] == [f"[value]\n{number}" for number in range(1, 51)]

    use(work)


HOSTILE = {
    "other builtins": "import builtins\nbuiltins.len = builtins.print = builtins.isinstance = lambda *a: 0",
    "no builtins": "import builtins\nfor name in [*vars(builtins)]: delattr(builtins, name)",
    "closed streams": "import os; os.close(1); os.close(2)",
    "closed descriptors": "import os; os.closerange(0, 64)",
    "another display hook": "import sys; sys.displayhook = sys.excepthook = None; del Out, In, _, __, ___",
    "a forged answer": "import gc\nfor s in gc.get_objects():\n if type(s).__name__ == 'Session':\n"
    "  s.send({'op': 'done', 'id': s.request_id, 'exit_code': 0, 'value': 'forged'})",
    "rubbish on the link": "import os\nfor fd in range(3, 64):\n try: os.write(fd, b'\\xff' * 64)\n except OSError: 0",
    "much output": "import os\nfor _ in range(100): os.write(1, b'x' * 1_000_000)",
    "a stopped process": "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
}


@pytest.mark.parametrize(
    "attack", [pytest.param(name, marks=[pytest.mark.soak] if "stopped" in name else []) for name in HOSTILE]
)
def test_a_hostile_call_harms_nobody_but_its_session(attack: str) -> None:
    """It is answered in bounded words; the call after it is, too, and a restart puts everything right."""
    answers = told(
        {"code": HOSTILE[attack], "timeout": 2}, {"code": "print('after')", "timeout": 2},
        {"code": "print('fresh')", "restart": True},
    )  # fmt: skip
    assert [one.text for one in answers][2] == "fresh"
    assert all(len(one.text) < 20_000 for one in answers)
    assert answers[0].state in ("new", "lost")


def test_what_a_call_leaves_running_is_its_sessions_until_a_restart() -> None:
    """It may write into the next call's output, and nobody else's; its end comes with the interpreter's."""
    daemon = "import os, time\nif not os.fork():\n os.setsid()\n while True: os.write(1, b'noise '); time.sleep(0.02)"

    async def work(tools: Toolbox) -> None:
        async with Toolbox(approve=auto("high"), interpreters=True) as other:
            await ask(tools, daemon)
            while "noise" not in (await ask(tools, "time.sleep(0.3); print('mine')")).text:
                pass
            assert (await ask(other, "import time; time.sleep(0.3); print('mine')")).text == "mine"
            quiet = {"code": "import time; time.sleep(0.3); print('mine')", "restart": True}
            assert (await ask(tools, quiet)).text == "mine"

    use(work)


def test_each_call_is_approved_and_who_approves_is_told() -> None:
    """As before; a remembered yes is for the same arguments, of which restart is one."""
    asked: list[ApprovalRequest] = []

    async def yes(request: ApprovalRequest) -> Decision:
        asked.append(request)
        return Decision(is_approved="no" not in request.arguments["code"], by="test", is_remembered=True)

    calls: list[Any] = ["x = 1", "x", "x", {"code": "x", "restart": True}, "x = 'no'", "x"]
    answers = told(*calls, approve=yes)
    assert [one.arguments["restart"] for one in asked] == [False, False, True, False]
    assert {one.rules["interpreter"] for one in asked} == {"goes on between calls"}
    assert "ApprovalDenied" in answers[4].text
    assert "NameError" in answers[5].text


def test_each_call_is_an_execution_in_the_log(tmp_path: Path) -> None:
    """With the hash of its code, the tool and who approved it; so is one that was given up."""

    async def work(tools: Toolbox) -> None:
        await ask(tools, "x = 1")
        call = asyncio.ensure_future(ask(tools, FOR_EVER))
        await until(tools, "on")
        call.cancel()
        await asyncio.wait({call})

    use(work, audit=tmp_path / "log")
    events = [event for line in lines_of(tmp_path / "log") if (event := json.loads(line))["kind"] == "execution"]
    assert [(one["what"], one["status"], one["code_sha256"]) for one in events] == [
        ("cell", "ok", sha256_of("x = 1")), ("cell", "cancelled", sha256_of(FOR_EVER)),
    ]  # fmt: skip
    assert {(one["tool"], one["approved_by"]) for one in events} == {("run_code", "auto(high)")}
    assert events[0]["call"] != events[1]["call"]


def test_without_sessions_each_call_begins_anew_and_the_tools_say_so() -> None:
    """So it is where a backend has none, and on the host, where nothing may go on between two approvals."""
    fake = FakeBackend([Result("1\n", "", 0, 0.0)])
    for options in ({"backend": fake}, {"tier": 4}):
        tools = {tool.name: tool for tool in Toolbox(interpreters=True, **options).tools}  # type: ignore[arg-type]
        assert "restart" not in tools["run_code"].properties
        assert tools["run_code"].description.endswith("variables and imports of earlier ones are not there.")
    (answer,) = told("print(1)", backend=fake)
    assert (answer.text, answer.state) == ("1", "none")


class Boastful(FakeBackend):
    """Say that there are sessions of Python, and have none."""

    def session_languages(self) -> tuple[str, ...]:
        return ("python",)


def test_an_interpreter_that_cannot_be_had_is_said_and_the_code_runs() -> None:
    """A backend may find out late: an image without what sessions need, say."""
    fake = Boastful([Result("1\n", "", 0, 0.0)] * 2)
    for answer in told("print(1)", "print(1)", backend=fake):
        assert answer.text.startswith("[No python interpreter can be kept here, so each call begins anew")
        assert answer.text.endswith("\n1")
        assert (answer.state, answer.is_error) == ("none", False)


def test_a_toolbox_of_the_library_keeps_nothing_unless_told() -> None:
    """Its tools are those of the table; anything but a truth value or a share of a room is an error."""
    assert [tool.name for tool in Toolbox().tools] == [tool.name for tool in TOOLS.values() if 3 in tool.tiers]
    assert not any("restart" in tool.properties for tool in Toolbox().tools)
    with pytest.raises(InvalidRequest, match="interpreters: 'yes' keeps none"):
        Toolbox(interpreters="yes")  # type: ignore[arg-type]
