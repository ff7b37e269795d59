"""Measure calls of the caller's functions: `python -m bench.host_functions`.

In turns, in one session: an empty cell, and calls timed inside. Then ten thousand calls in one run, with the growth of
this process, calls from a live sandbox of a service, and a warm `print(1)` with and without a tool.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import cloche
from cloche.backends.cloche import ClocheBackend
from tests.harness.remote import serving_tls

CALLS = 20  # in a turn
TIMED = f"""
import time
from cloche_host import nothing
seconds = []
for _ in range({CALLS}):
    begun = time.perf_counter()
    nothing()
    seconds.append(time.perf_counter() - begun)
seconds
"""
MANY = """
import concurrent.futures, cloche_host
with concurrent.futures.ThreadPoolExecutor(8) as pool:
    total = sum(pool.map(cloche_host.double, range(10_000)))
total
"""


def nothing() -> None:
    """Do nothing."""


async def nothing_async() -> None:
    """Do nothing, on the loop."""


def double(number: int) -> int:
    """Return twice a number."""
    return 2 * number


def in_turns(rounds: int, *, live: bool) -> tuple[float, float, float]:
    """Return the medians of an empty cell, of a call, and of a call of an async function, in seconds."""
    cells: list[float] = []
    calls: dict[str, list[float]] = {"nothing": [], "nothing_async": []}
    with cloche.Sandbox(live=live, tools=[nothing, nothing_async]) as sandbox:
        session = sandbox.session()
        session.run("import cloche_host; cloche_host.nothing()")
        for _ in range(rounds):
            for name, seconds in calls.items():
                begun = time.perf_counter()
                session.run("")
                cells.append(time.perf_counter() - begun)
                seconds.extend(session.run(TIMED.replace("nothing", name)).value)
    medians = [statistics.median(seconds) for seconds in (cells, calls["nothing"], calls["nothing_async"])]
    return medians[0], medians[1], medians[2]


def many() -> tuple[int, float, float]:
    """Return how many of ten thousand calls were served, in how many seconds, and by how many MiB this process grew."""
    cloche.run(MANY.replace("10_000", "500"), tools=[double], timeout=60)
    before, begun = resident(), time.perf_counter()
    result = cloche.run(MANY, tools=[double], timeout=300)
    assert result.value == 10_000 * 9_999, result.stderr
    return result.meta["tools"]["ok"], time.perf_counter() - begun, (resident() - before) / (1 << 20)


def over_the_wire(rounds: int) -> float:
    """Return the median of a call from a live sandbox of a service on loopback, in seconds."""
    seconds: list[float] = []
    with (
        tempfile.TemporaryDirectory(prefix="bench-calls-") as folder,
        serving_tls(Path(folder)) as (_, account),
        cloche.Sandbox(backend=ClocheBackend(account), tools=[nothing]) as sandbox,
    ):
        for _ in range(rounds):
            seconds += sandbox.run(TIMED).value
    return statistics.median(seconds)


def warm(rounds: int) -> tuple[float, float]:
    """Return the medians of a warm print(1) without and with a tool, in turns, in seconds."""
    plain: list[float] = []
    with_tool: list[float] = []
    for _ in range(rounds):
        for seconds, tools in ((plain, None), (with_tool, [nothing])):
            begun = time.perf_counter()
            result = cloche.run("print(1)", tools=tools)
            if result.meta["start"] == "pooled":
                seconds.append(time.perf_counter() - begun)
    return statistics.median(plain), statistics.median(with_tool)


def resident() -> int:
    """Return the bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def main() -> None:
    """Print one row for each figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=50)
    rounds = parser.parse_args().rounds
    for live in (False, True):
        cell, call, on_loop = in_turns(rounds, live=live)
        where = "live sandbox" if live else "session with a jail of its own"
        print(
            f"{where}: empty cell {cell * 1e3:.3f} ms, call {call * 1e3:.3f} ms ({call / cell:.2f} of it; wanted 1.2)"
        )
        print(f"{where}: call of an async function {on_loop * 1e3:.3f} ms ({on_loop / cell:.2f} of an empty cell)")
    served, seconds, grown = many()
    print(
        f"10,000 calls in one run: {served} served in {seconds:.1f} s, the caller grew by {grown:.1f} MiB (wanted 10)"
    )
    print(f"over the wire of a service: call {over_the_wire(rounds) * 1e3:.3f} ms")
    plain, with_tool = warm(4 * rounds)
    ratio = with_tool / plain
    print(f"warm print(1): {plain * 1e3:.2f} ms, with a tool {with_tool * 1e3:.2f} ms ({ratio:.2f} of it; wanted 1.3)")


if __name__ == "__main__":
    main()
