"""A caller with a hundred runs at once and two sessions, to be killed among them.

Arguments: keywords of `arun` as JSON, and a seed.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from typing import Any

import cloche

RUNS = 100
CODES = (
    "print('short')",
    "open('f', 'wb').write(bytes(1 << 20))",
    "import time; time.sleep(60)",
    "import subprocess; subprocess.Popen(['sleep', '60'], start_new_session=True)",
    "while True: print('x' * 1000)",
)
CELLS = {"python": "import time; time.sleep(600)", "bash": "sleep 600"}


async def main(keywords: dict[str, Any], seed: int) -> None:
    """Order them all, and say when the first has come to its end and the sessions are open."""
    chance = random.Random(seed)

    async def once(number: int) -> None:
        code = CODES[0] if number == 0 else chance.choice(CODES)
        await cloche.arun(code, timeout=5, **keywords)
        if number == 0:
            await are_open.wait()
            print("ready", flush=True)

    async def live() -> None:
        async with cloche.AsyncSandbox(live=False, **keywords) as sandbox:
            while True:
                await sandbox.run(chance.choice(CODES), timeout=5)

    async def live_in_sessions() -> None:
        async with cloche.AsyncSandbox(live=False, **keywords) as sandbox:
            sessions = [await sandbox.session(language) for language in CELLS]
            are_open.set()
            await asyncio.gather(*(session.run(CELLS[session.language], timeout=600) for session in sessions))

    are_open = asyncio.Event()
    await asyncio.gather(live(), live_in_sessions(), *(once(number) for number in range(RUNS)))


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1]), int(sys.argv[2])))
