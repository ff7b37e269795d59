"""A reward for trl: `GRPOTrainer(reward_funcs=[cases_passed], ...)`, with a column `cases` in the data set."""

import asyncio
import logging
import re
from typing import Any

import cloche

log = logging.getLogger(__name__)
INFRASTRUCTURE = (cloche.BackendUnavailable, cloche.StartFailed, cloche.OutcomeUnknown)
Cases = list[tuple[str, str]]  # of each row: standard input, and expected output


async def cases_passed(completions: list[Any], cases: list[Cases], **_columns: Any) -> list[float | None]:
    """Return the fraction of its cases that each program passes; None where it could not be run."""
    return await asyncio.gather(*map(score, completions, cases))


async def score(completion: Any, cases: Cases) -> float | None:
    """Run the last block of code of a completion once for each case."""
    text = completion if isinstance(completion, str) else completion[-1]["content"]
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    if not blocks:
        return 0.0
    try:
        results = [await cloche.arun(blocks[-1], stdin=given, timeout="10s") for given, _ in cases]
    except INFRASTRUCTURE:
        log.exception("a program could not be run; it gets no reward")
        return None
    passed = [r.ok and r.stdout.split() == out.split() for r, (_, out) in zip(results, cases, strict=True)]
    return sum(passed) / len(passed)
