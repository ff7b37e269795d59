"""Solve a task with ten calls of tools in one program, in place of ten turns of a model.

Run it with `python examples/code_mode.py`. The program at the end is what a model writes when it is given the tool
`run_program`, whose description has the stubs of the functions.
"""

import asyncio

from cloche.agent.code_mode import code_mode

PRICES = {"hammer": 12.5, "saw": 19.0, "nails": 3.2, "drill": 89.0, "tape": 4.1}
STOCK = {"hammer": 3, "saw": 0, "nails": 120, "drill": 1, "tape": 7}


def price(item: str) -> float:
    """Return the price of an item."""
    return PRICES[item]


async def stock(item: str) -> int:
    """Return how many of an item there are."""
    await asyncio.sleep(0.01)
    return STOCK[item]


PROGRAM = """
from cloche_host import price, stock

items = ["hammer", "saw", "nails", "drill", "tape"]
worth = {item: price(item) * stock(item) for item in items}
print(f"in all {sum(worth.values()):.2f}, most of it {max(worth, key=worth.get)}")
"""


async def main() -> None:
    """Give a model the one tool, and carry out its program."""
    run_program = code_mode([price, stock])
    print((run_program.__doc__ or "").strip().splitlines()[0])
    print(await run_program(PROGRAM))


if __name__ == "__main__":
    asyncio.run(main())
