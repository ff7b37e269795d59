"""Give a LangChain agent a tool that runs code. Five lines are yours: those of `ask`.

Run it with `python examples/langchain_agent.py`. The model below is scripted, so that this needs no key; yours is
`init_chat_model("...")`, say. Needs `cloche[langchain]` and `langchain`.
"""

import asyncio
from typing import Any

from langchain.agents import create_agent
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult

from cloche.agent.approval import auto
from cloche.agent.toolbox import Toolbox
from cloche.integrations.langchain import run_code_tool


async def ask(model: BaseChatModel, question: str) -> str:
    """Return what the agent answers."""
    async with Toolbox(approve=auto("high")) as tools:
        agent = create_agent(model, tools=[run_code_tool(tools)])
        reply = await agent.ainvoke({"messages": [("user", question)]})
    return str(reply["messages"][-1].text)


class Scripted(BaseChatModel):
    """Stand in for a model: call the tool once, and answer with what it said."""

    _llm_type = "scripted"

    def bind_tools(self, tools: Any, **_: Any) -> Any:
        """Take the tools, as a model does."""
        return self

    def _generate(self, messages: list[BaseMessage], *_: Any, **__: Any) -> ChatResult:
        call = {"name": "run_code", "args": {"code": "print(sum(n * n for n in range(1, 101)))"}, "id": "call-1"}
        last = messages[-1]
        is_answered = isinstance(last, ToolMessage)
        said = AIMessage(f"It is {last.text}.") if is_answered else AIMessage("", tool_calls=[call])
        return ChatResult(generations=[ChatGeneration(message=said)])


if __name__ == "__main__":
    print(asyncio.run(ask(Scripted(), "What is the sum of the first hundred squares?")))
