"""A reward for trl: `GRPOTrainer(reward_funcs=[cases_passed], ...)`, with a column `cases` in the data set."""

import asyncio
import re
from typing import Any

import cloche

Cases = list[dict[str, Any]]  # of each row, such as {"stdin": "3", "stdout": "6"}


async def cases_passed(completions: list[Any], cases: list[Cases], **_columns: Any) -> list[float | None]:
    """Return the fraction of its cases that each program passes; None where it could not be run."""
    return await asyncio.gather(*map(score, completions, cases))


async def score(completion: Any, cases: Cases) -> float | None:
    """Check the last block of code of a completion."""
    text = completion if isinstance(completion, str) else completion[-1]["content"]
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    if not blocks:
        return 0.0
    return (await cloche.acheck(blocks[-1], cases, timeout="10s")).score
