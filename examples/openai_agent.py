"""Let a model behind OpenAI's protocol run code. Run it with `python examples/openai_agent.py QUESTION`.

Needs `openai`, and OPENAI_API_KEY; OPENAI_BASE_URL names any other server that speaks the protocol, MODEL a model.
"""

import asyncio
import os
import sys
from typing import Any

from openai import AsyncOpenAI

from cloche.agent.approval import auto
from cloche.agent.exports import answer_openai, openai_tools
from cloche.agent.toolbox import Toolbox


async def ask(question: str) -> str:
    """Return what the model answers, once it has all that it wanted from its tools."""
    messages: list[Any] = [{"role": "user", "content": question}]
    async with AsyncOpenAI() as client, Toolbox(approve=auto("high")) as tools:
        chat: dict[str, Any] = {"model": os.environ.get("MODEL", "gpt-5-mini"), "tools": openai_tools(tools)}
        while (
            reply := (await client.chat.completions.create(messages=messages, **chat)).choices[0].message
        ).tool_calls:
            messages += [reply, *[await answer_openai(tools, call) for call in reply.tool_calls]]
        return str(reply.content)


if __name__ == "__main__":
    print(asyncio.run(ask(" ".join(sys.argv[1:]) or "What is 2 to the power of 100?")))
