"""Give a model a tool that runs code: the tools for its provider, and the answers to its calls.

Run it with `python examples/agent.py`. The calls below are scripted; in an agent they come from the model.
"""

import asyncio
import json

from cloche.agent.approval import auto
from cloche.agent.exports import answer_openai, openai_tools
from cloche.agent.toolbox import Toolbox

CALLS = [
    {"name": "write_file", "arguments": {"path": "numbers.txt", "content": "3\n4\n5\n"}},
    {"name": "run_code", "arguments": {"code": "print(sum(map(int, open('numbers.txt'))))"}},
    {"name": "run_code", "arguments": {"code": "import not_installed_here"}},
]


async def main() -> None:
    """Answer each call as an agent's loop would."""
    async with Toolbox(approve=auto("high"), timeout=10) as tools:
        print("tools:", ", ".join(tool["function"]["name"] for tool in openai_tools(tools)))
        for number, call in enumerate(CALLS):
            function = {"name": call["name"], "arguments": json.dumps(call["arguments"])}
            message = await answer_openai(tools, {"id": f"call-{number}", "function": function})
            print(f"{call['name']}: {message['content']}")


if __name__ == "__main__":
    asyncio.run(main())
