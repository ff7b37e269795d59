"""Tools under attack: by a model that passes anything, and by a program that uses them at once, late or wrongly."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import cloche
from cloche.agent.answers import MOST_IMAGE_BYTES, Answer
from cloche.agent.approval import ApprovalEvent, ApprovalRequest, Approver, Decision
from cloche.agent.exports import answer_openai
from cloche.agent.toolbox import Toolbox
from cloche.core.enforcement import Level
from cloche.core.protocols import Capabilities
from cloche.testing.fake import FakeBackend
from tests.harness.processes import wait_for_word

YES = Decision(is_approved=True, by="test")


async def always(_: ApprovalRequest) -> Decision:
    """Approve everything, as no approver of ours does."""
    return YES


def use(work: Callable[[Toolbox], Awaitable[Any]], **options: Any) -> Any:
    """Do something with a toolbox that is opened for it; by default everything is approved."""

    async def main() -> Any:
        async with Toolbox(**{"approve": always, **options}) as tools:
            return await work(tools)

    return asyncio.run(main())


def ask(name: Any, arguments: dict[str, Any], **options: Any) -> Answer:
    """Call one tool."""
    answer: Answer = use(lambda tools: tools.call(name, arguments), **options)
    return answer


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        (["run_code"], {}),
        ("run_code", {"code": "1", "timeout": 10**400}),
        ("run_code", {"code": "'\\ud800'"}),
        ("read_file", {"path": "\ud800"}),
        ("read_file", {"path": "/memory/\ud800"}),
        ("read_file", {"path": "x", "offset": 10**5000}),
        ("list_files", {"path": "a\0b"}),
        ("list_files", {"path": "/memory"}),
        ("write_file", {"path": "/memory/" + "a/" * 1500 + "x", "content": "1"}),
        ("write_file", {"path": "/memory/x", "content": "1" * (5 << 20)}),
        ("os.execute", {"command": "echo a\0b"}),
        ("os.execute", {"command": "echo \ud800"}),
        ("os.execute", {"command": "echo " + "a" * 300_000}),
    ],
)
def test_whatever_a_model_passes_is_answered(name: Any, arguments: dict[str, Any], tmp_path: Path) -> None:
    """In text that every protocol takes; nothing is raised."""
    (tmp_path / os.fsdecode(b"\xff")).write_text("x")
    answer = ask(name, arguments, approve=always, tier=4, roots={"/memory": tmp_path})
    assert answer.text.encode()
    assert "InternalError" not in answer.text


def test_an_error_that_nobody_thought_of_is_told_without_its_words() -> None:
    """And what was not written down does not run."""

    def fails(event: ApprovalEvent) -> None:
        raise OSError("/a/path/of/the/host")

    answer = ask("run_code", {"code": "1"}, on_event=fails)
    assert (answer.is_error, answer.result) == (True, None)
    assert answer.text == "InternalError: the tool failed with OSError."


def test_what_runs_is_what_was_asked_for() -> None:
    """An approver that writes into its request changes nothing."""

    async def changes(request: ApprovalRequest) -> Decision:
        request.arguments["code"] = "print('changed')"  # type: ignore[index]
        return YES

    assert ask("run_code", {"code": "print('as asked')"}, approve=changes).text == "as asked"


@pytest.mark.parametrize("is_inside", [pytest.param(True, marks=pytest.mark.soak), False])
def test_nothing_runs_in_a_toolbox_that_was_closed(is_inside: bool, tmp_path: Path) -> None:
    """A yes that comes after its end finds nobody; a command that runs is killed."""
    made, takes_s = tmp_path / "made", 10 if is_inside else 0

    async def main() -> list[Answer]:
        said = asyncio.Event()

        async def slow(_: ApprovalRequest) -> Decision:
            await said.wait()
            return YES

        approve: Approver = always if is_inside else slow
        async with Toolbox(approve=approve, tier=4) as tools:
            calls = [
                asyncio.create_task(tools.call("os.execute", {"command": f"sleep {takes_s}; touch {made}"})),
                asyncio.create_task(
                    tools.call("run_code", {"code": f"import time; time.sleep({takes_s}); open({str(made)!r}, 'w')"})
                ),
            ]
            await asyncio.sleep(0.5)
        said.set()
        answers = await asyncio.wait_for(asyncio.gather(*calls), 30)
        if is_inside:
            await asyncio.sleep(takes_s + 1)
        return answers

    answers = asyncio.run(main())
    assert all(answer.is_error and answer.text == "The call was ended: the toolbox was closed." for answer in answers)
    assert not made.exists()


@pytest.mark.parametrize("is_blocking", [True, False])
def test_a_call_that_is_cancelled_in_another_loop_ends(is_blocking: bool) -> None:
    """Whichever loop holds the toolbox."""
    word = f"8{time.monotonic_ns() % 10**9}.5"
    options: dict[str, Any] = {"approve": always, "tier": 4, "timeout": 600}
    command = {"command": f"sleep {word}", "timeout": 600}  # not what ends it here

    async def cancelled(tools: Toolbox) -> None:
        calling = asyncio.ensure_future(tools.call("os.execute", command))
        await asyncio.to_thread(wait_for_word, word)
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling

    if is_blocking:
        with Toolbox(**options) as tools:
            asyncio.run(cancelled(tools))
            wait_for_word(word, is_there=False)
    else:

        async def elsewhere(tools: Toolbox) -> None:
            await asyncio.to_thread(asyncio.run, cancelled(tools))
            await asyncio.to_thread(wait_for_word, word, is_there=False)

        use(elsewhere, **options)


@pytest.mark.parametrize("path", ["notes.txt", "/memory/notes.txt"])
def test_edits_at_once_lose_nothing(path: str, tmp_path: Path) -> None:
    """Models call several tools in one turn."""

    async def work(tools: Toolbox) -> str:
        await tools.call("write_file", {"path": path, "content": "".join(f"<{n}>" for n in range(20))})
        edits = [{"path": path, "old": f"<{n}>", "new": f"[{n}]"} for n in range(20)]
        await asyncio.gather(*[tools.call("edit_file", edit) for edit in edits])
        return (await tools.call("read_file", {"path": path})).text

    assert use(work, roots={"/memory": tmp_path}) == "".join(f"[{n}]" for n in range(20))


def test_who_approves_the_host_is_shown_no_rules_of_a_sandbox() -> None:
    """Neither for a command, nor for code that runs without a sandbox."""
    asked: list[ApprovalRequest] = []

    async def approve(request: ApprovalRequest) -> Decision:
        asked.append(request)
        return YES

    for name, arguments in (("os.execute", {"command": "true"}), ("run_code", {"code": "1"})):
        ask(name, arguments, approve=approve, tier=4)
    assert [request.rules["runs_on"] for request in asked] == ["the host"] * 4
    assert not any("policy" in request.rules for request in asked)


def test_no_tool_is_called_sandboxed_on_the_host() -> None:
    """A model that trusts a wall that is not there is careless."""

    def told(**options: Any) -> list[str]:
        tools = Toolbox(**options).tools
        return [tool.description for tool in tools if tool.runs_code and tool.name != "os.execute"]

    assert all("It runs in a sandbox" in text for text in told(tier=3) + told(tier=4, backend="local", level="jail"))
    assert all("on the host itself, with no sandbox" in text for text in told(tier=4))
    assert not any("runs in a sandbox" in text or "no access" in text for text in told(tier=4))


class Weak(FakeBackend):
    """A backend of one's own that has no wall."""

    def capabilities(self) -> Capabilities:
        """Say so."""
        return Capabilities(backend="weak", available=True, level=Level.NONE)


def test_a_backend_of_ones_own_that_has_no_wall_is_the_host() -> None:
    """Its own word decides, where no level was asked for."""
    assert str(Toolbox(tier=4, backend=Weak()).risk("run_code")) == "critical"
    assert str(Toolbox(tier=4, backend=FakeBackend()).risk("run_code")) == "high"


@pytest.mark.parametrize(("configured", "tier"), [(1, 1), (2, 2), (3, 3), (4, 3)])
def test_a_configured_tier_holds_and_never_opens_the_host(configured: int, tier: int, tmp_path: Path) -> None:
    """That takes the keyword, which goes before the configuration as everywhere."""
    config = tmp_path / "cloche.yaml"
    config.write_text(f"tier: {configured}\n")
    assert Toolbox(config=config).tier == tier
    assert Toolbox(config=config, tier=4).tier == 4
    assert Toolbox(config=config, tier="2").tier == 2  # type: ignore[arg-type]
    for wrong in (True, 3.0, [], "none", 9):
        with pytest.raises(cloche.InvalidRequest, match="tier"):
            Toolbox(tier=wrong)  # type: ignore[arg-type]

    async def files(tools: Toolbox) -> str:
        await tools.call("write_file", {"path": "a", "content": "kept"})
        return (await tools.call("read_file", {"path": "a"})).text

    assert use(files, config=config) == "kept"


def test_a_figure_that_is_none_or_too_large_is_left_out_and_said() -> None:
    """A provider refuses the whole conversation for it."""
    code = "class Look:\n    def __init__(self, data): self.data = data\n    def _repr_png_(self): return self.data\n"
    for data in ("b'no figure at all'", f"b'\\x89PNG\\r\\n\\x1a\\n' + bytes({MOST_IMAGE_BYTES})"):
        answer = ask("run_code", {"code": f"{code}Look({data})"}, memory="512m")
        assert answer.images == ()
        assert "Figures left out: 1." in answer.text


def test_no_answer_is_empty() -> None:
    """Providers refuse empty text."""

    async def work(tools: Toolbox) -> list[str]:
        for path, content in (("empty", ""), ("blank", " \n\n"), ("text", "one\ntwo")):
            await tools.call("write_file", {"path": path, "content": content})
        reads: list[dict[str, Any]] = [{"path": "empty"}, {"path": "blank"}, {"path": "text", "offset": 9}]
        return [(await tools.call("read_file", arguments)).text for arguments in reads]

    assert use(work) == ["The file is empty.", "Nothing but blanks.", "There is no line 9: the file has 2 lines."]


def test_arguments_that_came_as_an_object_are_taken() -> None:
    """Some servers that speak OpenAI's protocol send them so; what is neither is told."""

    async def work(tools: Toolbox) -> list[str]:
        given: list[Any] = [{"code": "print(7)"}, 7]
        calls = [{"id": "c", "function": {"name": "run_code", "arguments": arguments}} for arguments in given]
        return [(await answer_openai(tools, call))["content"] for call in calls]

    good, bad = use(work)
    assert good == "7"
    assert "the arguments are not JSON" in bad
