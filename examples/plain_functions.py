"""Use the tools as plain async functions: for a loop of your own, or a framework that reads signatures and docstrings.

Run it with `python examples/plain_functions.py`.
"""

import asyncio

from cloche.agent.approval import auto
from cloche.agent.exports import plain_functions
from cloche.agent.toolbox import Toolbox


async def main() -> None:
    """Write a file, and let code read it."""
    async with Toolbox(approve=auto("high")) as tools:
        do = plain_functions(tools)
        print(await do["write_file"](path="numbers.txt", content="3\n4\n5\n"))
        print(await do["run_code"]("print(sum(map(int, open('numbers.txt'))))"))


if __name__ == "__main__":
    asyncio.run(main())
