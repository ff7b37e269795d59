"""Measure what a guest's messages cost its caller: `python -m bench.frames [--rounds N] [--shapes NAME,...]`.

Each shape is what a hostile guest may send as its value: into the value's pipe of a one-shot run, or over the link of a
session. While the caller reads it, a coroutine in the same event loop is woken every millisecond. The gap is the most
processor time that the loop's thread took between two of these moments, the least of all rounds: longer than that
nothing else in the loop had to wait, on an idle machine. Memory is the most that the caller's Python had allocated
meanwhile, in a round of its own, beside what it kept of the result.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import time
import tracemalloc
from dataclasses import dataclass

import cloche

MIB = 1 << 20
# Written by the guest: `fd` is where its value or its answers go to.
BEGIN = """
import os, stat
wanted = (stat.S_IFIFO, stat.S_IFSOCK)
def is_there(fd):
    try: return stat.S_IFMT(os.fstat(fd).st_mode) in wanted
    except OSError: return False
found = [fd for fd in range(3, 1024) if is_there(fd)]
def say(data):
    view = memoryview(data)
    while view:
        for fd in found:
            try: view = view[os.write(fd, view):]
            except OSError: continue
            break
        else: os._exit(7)
def frame(body): return len(body).to_bytes(4, "big") + body
def output(body): return frame(b'{"op":"display","data":{"text/html":"x"},"metadata":{"a":' + body + b'}}')
def picture(body): return frame(b'{"op":"display","data":{"image/png":"' + body + b'"},"metadata":{}}')
def page(body): return frame(b'{"op":"display","data":{"text/html":"' + body + b'"},"metadata":{}}')
M = 1 << 20
"""
SHAPES = {
    "nothing": "b''",
    "tiny frames, 6 MB": "frame(b'{}') * M",
    "tiny outputs, 20 MB": "page(b'x') * (20 * M // 64)",
    "one picture of 8 MiB": "picture(b'QUJD' * (2 * M))",
    "four pictures of 8 MiB": "picture(b'QUJD' * (2 * M)) * 4",
    "giant text, 31 MiB": "page(b'x' * 31 * M)",
    "page of 7 MB, many escapes": r"page(rb'<td class=\"a,b\">1</td>\n' * (250 * 1024))",
    "page of 8 MiB, only escapes": r"page(rb'\n' * 4 * M)",
    "wide text": "page(b'x' * 4 * M + bytes.fromhex('f09f9880'))",
    "empty lists, 15 MB": "output(b'[' + b'[],' * (5 * M) + b'[]]')",
    "empty lists, 1 MB": "output(b'[' + b'[],' * (M // 3) + b'[]]')",
    "small lists in 400 frames": "output(b'[' + b'[],' * 1000 + b'[]]') * 400",
    "names, 9 MB": "output(b'{' + b','.join(b'\"%d\":0' % i for i in range(900000)) + b'}')",
    "nested 10 million deep": "output(b'[' * (10 * M))",
    "nested 300 deep, wide": "output(b'[' + b','.join([b'[' * 300 + b']' * 300] * 60) + b']')",
    "halves of characters, 8 MB": r"page(rb'\ud800' * (8 * M // 6))",
    "integer of 8 M digits": "output(b'9' * 8 * M)",
    "integers of 4,300 digits": "output(b'[' + b','.join([b'9' * 4300] * 2000) + b']')",
    "the same in 8 members": (
        "frame(b'{' + b','.join(b'\"%d\":[' % i + b','.join([b'9' * 4300] * 238) + b']' for i in range(8)) + b'}')"
    ),
    "float of 8 M digits": "output(b'0.' + b'9' * 8 * M)",
    "floats of 300 digits": "output(b'[' + b','.join([b'9' * 300 + b'.5'] * 25000) + b']')",
    "blanks, 8 MiB": "output(b' ' * 8 * M + b'1')",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Hold what one run cost its caller."""

    gap_ms: float
    peak_bytes: int
    kept_bytes: int
    status: str


async def _watch(gaps: list[float]) -> None:
    before = time.thread_time()
    while True:
        await asyncio.sleep(0.001)
        now = time.thread_time()
        gaps.append(now - before)
        before = now


async def one_shot(shape: str) -> cloche.Result:
    """Say it in a run of its own."""
    return await cloche.arun(f"{BEGIN}say(b'F' + {shape})", memory="512m", cpus=1, timeout=60, audit=False)


async def cell(shape: str) -> cloche.Result:
    """Say it in a cell of a session."""
    async with cloche.AsyncSandbox(live=False, memory="512m", cpus=1, timeout=60, audit=False) as sandbox:
        session = await sandbox.session()
        return await session.run(f"{BEGIN}say({shape})")


KINDS = {"run": one_shot, "cell": cell}


async def measure(kind: str, shape: str, *, counts_memory: bool) -> Measured:
    """Run one shape once, with a watch beside it."""
    await KINDS[kind]("b''")  # so that all is loaded
    gc.collect()
    gaps: list[float] = []
    if counts_memory:
        tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    watch = asyncio.ensure_future(_watch(gaps))
    result = await KINDS[kind](shape)
    await asyncio.sleep(0.005)
    watch.cancel()
    gc.collect()
    now, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return Measured(
        gap_ms=max(gaps) * 1000, peak_bytes=peak - before, kept_bytes=now - before, status=str(result.status)
    )


def main() -> None:
    """Print a line for each shape, in a run and in a cell."""
    parser = argparse.ArgumentParser(prog="python -m bench.frames", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="runs of each shape whose gap is measured (default 5)")
    parser.add_argument("--shapes", help=f"some of: {', '.join(SHAPES)} (default all)")
    options = parser.parse_args()
    print(f"{'shape':30} {'in a':5} {'gap ms':>8} {'peak MiB':>9} {'kept MiB':>9}  status")
    for name in options.shapes.split(";") if options.shapes else SHAPES:
        for kind in KINDS:
            runs = [asyncio.run(measure(kind, SHAPES[name], counts_memory=False)) for _ in range(options.rounds)]
            memory = asyncio.run(measure(kind, SHAPES[name], counts_memory=True))
            print(
                f"{name:30} {kind:5} {min(run.gap_ms for run in runs):8.1f} {memory.peak_bytes / MIB:9.1f} "
                f"{memory.kept_bytes / MIB:9.1f}  {memory.status}",
                flush=True,
            )


if __name__ == "__main__":
    main()
