"""The tools as LangChain's own: its standard tests, an agent of its making, figures, failures."""

import asyncio
import base64
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.tools import BaseTool
from langchain_tests.integration_tests import ToolsIntegrationTests
from langchain_tests.unit_tests import ToolsUnitTests

import cloche
from cloche.agent.answers import Answer
from cloche.agent.approval import ApprovalRequest, Decided, Decision, auto
from cloche.agent.toolbox import Toolbox
from cloche.integrations.langchain import langchain_tools, run_code_tool

PROGRAM = {"code": "print(6 * 7)"}


class Scripted(BaseChatModel):
    """Call a tool with what was prepared, then repeat what it answered; keep the tools that it was given."""

    calls: list[dict[str, Any]]
    given: list[str] = []  # noqa: RUF012 - a field of pydantic's, copied for each
    heard: list[ToolMessage] = []  # noqa: RUF012

    _llm_type = "scripted"

    def bind_tools(self, tools: Any, **_: Any) -> Any:
        """Note the names."""
        self.given.extend(tool.name for tool in tools)
        return self

    def _generate(self, messages: list[BaseMessage], *_: Any, **__: Any) -> ChatResult:
        if isinstance(messages[-1], ToolMessage):
            self.heard.append(messages[-1])
        call = self.calls.pop(0) if self.calls else None
        said = AIMessage("", tool_calls=[call]) if call else AIMessage(f"It said: {messages[-1].text}")
        return ChatResult(generations=[ChatGeneration(message=said)])


def called(name: str, **args: Any) -> dict[str, Any]:
    """Return a tool call as a model makes it."""
    return {"name": name, "args": args, "id": f"call-{name}", "type": "tool_call"}


def ask(model: Scripted, **options: Any) -> str:
    """Return what an agent with `run_code` answers."""

    async def main() -> str:
        async with Toolbox(**options) as tools:
            agent = create_agent(model, tools=[run_code_tool(tools)])
            reply = await agent.ainvoke({"messages": [("user", "What is six times seven?")]})
            return str(reply["messages"][-1].text)

    return asyncio.run(main())


@pytest.fixture(scope="class")
def open_tool(request: pytest.FixtureRequest) -> Iterator[None]:
    """Open one toolbox for the standard tests."""
    with Toolbox(approve=auto("high")) as tools:
        request.cls.opened = run_code_tool(tools)
        yield


class OfOurs:
    """Say what LangChain's standard tests try."""

    opened: BaseTool

    @property
    def tool_constructor(self) -> BaseTool:
        """The tool itself, as a toolbox makes it."""
        return self.opened

    @property
    def tool_invoke_params_example(self) -> dict[str, Any]:
        """What it is called with."""
        return PROGRAM


@pytest.mark.usefixtures("open_tool")
class TestUnit(OfOurs, ToolsUnitTests):
    """Hold the tool to LangChain's own unit tests."""


@pytest.mark.usefixtures("open_tool")
class TestIntegration(OfOurs, ToolsIntegrationTests):
    """Hold it to LangChain's own integration tests."""


def test_an_agent_of_langchains_calls_the_tool_and_gets_the_answer() -> None:
    """With an approver that allows high calls, who was asked."""
    events: list[Any] = []
    model = Scripted(calls=[called("run_code", **PROGRAM)])
    assert ask(model, approve=auto("high"), on_event=events.append) == "It said: 42"
    assert set(model.given) == {"run_code"}
    (message,) = model.heard
    assert (message.content, message.status, message.tool_call_id) == ("42", "success", "call-run_code")
    assert isinstance(message.artifact, Answer)
    assert message.artifact.result is not None
    assert message.artifact.result.enforcement.level >= cloche.Level.JAIL
    assert [event.decision.by for event in events if isinstance(event, Decided)] == ["auto(high)"]


def test_an_agent_reads_why_it_was_denied_and_nothing_ran() -> None:
    """A denial is a message, not an exception; the next call of the same agent may pass."""

    async def not_twice(request: ApprovalRequest) -> Decision:
        return Decision(is_approved="second" in request.arguments["code"], by="test", reason="not this one")

    model = Scripted(
        calls=[
            called("run_code", code="open('ran', 'w')"),
            called("run_code", code="import os\n'ran' in os.listdir() # second"),
        ]
    )
    assert ask(model, approve=not_twice) == "It said: [value]\nfalse"
    assert model.heard[0].status == "error"
    assert model.heard[0].content == "ApprovalDenied: run_code was not approved by test: not this one"


def test_what_a_model_got_wrong_is_told_to_it() -> None:
    """Arguments that do not exist, code that fails: errors that the framework knows as such."""
    model = Scripted(
        calls=[called("run_code", code="1", network="open"), called("run_code", code="1 / 0"), called("run_code")]
    )
    ask(model, approve=auto("high"))
    assert [message.status for message in model.heard] == ["error"] * 3
    told = [str(message.content) for message in model.heard]
    assert "there is no argument 'network'" in told[0]
    assert "ZeroDivisionError" in told[1]
    assert "the argument 'code' is missing" in told[2]


def test_any_name_of_an_argument_is_the_models_mistake() -> None:
    """Those that Python uses itself, too: an error in words, and the agent goes on."""
    model = Scripted(calls=[{"name": "run_code", "args": {"self": 1, "code": "1"}, "id": "1", "type": "tool_call"}])
    ask(model, approve=auto("high"))
    assert "there is no argument 'self'" in str(model.heard[0].content)


def test_what_a_call_defined_is_there_in_the_next_where_the_toolbox_is_told_so() -> None:
    """The tool then has `restart` besides, in its schema, too."""

    async def main() -> list[Any]:
        async with Toolbox(approve=auto("high"), interpreters=True) as tools:
            tool = run_code_tool(tools)
            assert tool.args["restart"]["type"] == "boolean"
            calls: list[dict[str, Any]] = [{"code": "x = 20"}, {"code": "x + 1"}]
            calls.append({"code": "'x' in globals()", "restart": True})
            return [await tool.ainvoke(call) for call in calls]

    assert asyncio.run(main())[1:] == ["[value]\n21", "[value]\nfalse"]


def test_a_figure_is_an_image_block() -> None:
    """Which providers' own packages translate."""
    pixel = base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(16)).decode()
    code = f"import base64\nclass Look:\n    def _repr_png_(self): return base64.b64decode({pixel!r})\nprint(1)\nLook()"
    model = Scripted(calls=[called("run_code", code=code)])
    ask(model, approve=auto("high"))
    text, image = model.heard[0].content_blocks
    assert text["type"] == "text"
    assert image == {"type": "image", "base64": pixel, "mime_type": "image/png"}


def test_all_tools_or_those_that_are_named() -> None:
    """By either of their names; one that the tier does not have is an error that says which tier does."""

    async def main() -> None:
        async with Toolbox(approve=auto("high")) as tools:
            assert [one.name for one in langchain_tools(tools)] == [one.wire_name for one in tools.tools]
            assert [one.name for one in langchain_tools(tools, "code_execute", "read_file")] == [
                "code_execute",
                "read_file",
            ]
            await langchain_tools(tools, "write_file")[0].ainvoke({"path": "a", "content": "kept"})
            assert await langchain_tools(tools, "read_file")[0].ainvoke({"path": "a"}) == "kept"
            with pytest.raises(cloche.InvalidRequest, match=r"tier 3 has no tool 'os\.execute': it is for tier 4"):
                langchain_tools(tools, "os.execute")
        with pytest.raises(cloche.InvalidRequest, match="tier 1 has no tool 'run_code'"):
            run_code_tool(Toolbox(tier=1))

    asyncio.run(main())


def test_without_langchain_the_error_names_the_extra() -> None:
    """And the rest of Cloche does without."""
    program = (
        "import sys\n"
        "sys.modules['langchain_core'] = None\n"
        "from cloche import BackendUnavailable\n"
        "from cloche.agent.toolbox import Toolbox\n"
        "try:\n"
        "    import cloche.integrations.langchain\n"
        "except BackendUnavailable as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert "pip install cloche[langchain]" in done.stdout, done.stderr


def test_the_example_runs() -> None:
    """As it stands."""
    example = Path(__file__).parents[2] / "examples" / "langchain_agent.py"
    done = subprocess.run([sys.executable, example], capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout == "It is 338350.\n", done.stderr
