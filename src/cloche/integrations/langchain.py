"""LangChain: the tools of a toolbox as LangChain's own, for `create_agent` and other users of a `BaseTool`.

    async with Toolbox(approve=auto("high")) as tools:
        agent = create_agent(model, tools=langchain_tools(tools, "run_code"))
        reply = await agent.ainvoke({"messages": [("user", "What is 2 to the power of 100?")]})

Needs `cloche[langchain]`. The toolbox decides and approves as it does everywhere else; a call that it refused, or code
that failed, is a message with the status `error`, which the model reads, never an exception. Figures are image blocks.
"""

from __future__ import annotations

from typing import Any

from cloche.agent.answers import Answer
from cloche.agent.catalog import Tool, tool_named
from cloche.agent.toolbox import Toolbox
from cloche.core.errors import BackendUnavailable

try:
    from langchain_core.messages import ToolMessage
    from langchain_core.runnables import RunnableConfig
    from langchain_core.tools import BaseTool
    from pydantic import Field
except ImportError as error:
    raise BackendUnavailable(
        "LangChain's tools need the package langchain-core, 1.0 or later.",
        remedy='Install it with "pip install cloche[langchain]".',
    ) from error


class ToolboxTool(BaseTool):
    """Be one tool of a toolbox. The message's `artifact` is the `Answer`, with the run's `result`.

    `ainvoke` is the one to use; `invoke` blocks, from any thread but that of the toolbox's own event loop.
    """

    toolbox: Toolbox = Field(exclude=True, repr=False)
    called: str = Field(exclude=True)
    response_format: Any = "content_and_artifact"

    def _run(self, /, **arguments: Any) -> tuple[Any, Answer]:
        answer = self.toolbox.call_and_wait(self.called, arguments)
        return _content(answer), answer

    async def _arun(self, /, **arguments: Any) -> tuple[Any, Answer]:
        answer = await self.toolbox.call(self.called, arguments)
        return _content(answer), answer

    def invoke(self, input: Any, config: RunnableConfig | None = None, **more: Any) -> Any:  # noqa: A002
        """Call it and wait: a ToolMessage for a tool call, else its content."""
        return _with_status(super().invoke(input, config, **more))

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **more: Any) -> Any:  # noqa: A002
        """Call it: a ToolMessage for a tool call, else its content."""
        return _with_status(await super().ainvoke(input, config, **more))


def langchain_tools(toolbox: Toolbox, *names: str) -> list[BaseTool]:
    """Return the tools of these names as LangChain's, by default all of the toolbox.

    Raises InvalidRequest for one that is not among the toolbox's.
    """
    chosen = [tool_named(name, toolbox.tier).name for name in names]
    return [_tool(toolbox, tool) for tool in toolbox.tools if not names or tool.name in chosen]


def run_code_tool(toolbox: Toolbox) -> BaseTool:
    """Return `run_code` as a tool of LangChain's. Raises InvalidRequest for a tier without it."""
    return langchain_tools(toolbox, "run_code")[0]


def _tool(toolbox: Toolbox, tool: Tool) -> ToolboxTool:
    return ToolboxTool(
        name=tool.wire_name, description=tool.description, args_schema=tool.schema, toolbox=toolbox, called=tool.name
    )


def _content(answer: Answer) -> str | list[Any]:
    if not answer.images:
        return answer.text
    images = [{"type": "image", "base64": image.base64, "mime_type": image.mime} for image in answer.images]
    return [{"type": "text", "text": answer.text}, *images]


def _with_status(message: Any) -> Any:
    """Mark the message of a failed call."""
    if isinstance(message, ToolMessage) and isinstance(message.artifact, Answer) and message.artifact.is_error:
        message.status = "error"
    return message
