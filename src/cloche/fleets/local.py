"""This machine as a fleet of one node: the smallest engine, and all that the seam needs.

Theory of operation: the engine starts `cloche node` as a child on loopback, reads the line with its address, and starts
it again if it ends. It has no blocks: the node's share is one. The child gets SIGTERM from the kernel when the thread
that started it ends, so a fleet whose process is killed leaves no server.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections import deque
from collections.abc import Sequence

from cloche.core.errors import BackendUnavailable
from cloche.core.fleet import FleetSettings

from .coordinator import Coordinator
from .engine import EngineNode, LinkTo, ReservedBlock
from .signing import Signer
from .tending import Timing

SERVES_S, ENDS_S, AGAIN_S = 60.0, 10.0, 2.0
MOST_LINES, MOST_LINE = 20, 1000  # of the child's standard error, for a message
NODE = "local"
# Runs in a fresh interpreter, which becomes the node's server: a signal when the thread of the fleet ends (prctl(2)).
STARTER = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execv(sys.executable, [sys.executable, "-P", "-m", "cloche", "node", *sys.argv[2:]])
"""


class NodeChild:
    """One start of `cloche node`; `words` are further arguments."""

    def __init__(self, public_key: str, words: Sequence[str]):
        self.facts: dict[str, str] = {}
        self._lines: deque[str] = deque(maxlen=MOST_LINES)
        self._process: asyncio.subprocess.Process | None = None
        self._serving = asyncio.create_task(
            self._serve(["--listen", "127.0.0.1:0", "--public-key", public_key, *words])
        )

    async def _serve(self, words: list[str]) -> None:
        command = [sys.executable, "-I", "-S", "-c", STARTER, str(os.getpid()), *words]
        self._process = process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._read_errors(process))
                await self._read_facts(process)
            await process.wait()
        finally:
            _signal(process, signal.SIGKILL)

    async def _read_facts(self, process: asyncio.subprocess.Process) -> None:
        async with asyncio.timeout(SERVES_S):
            line = await _line_of(process.stdout)
        if line:
            self.facts = {name: str(value) for name, value in json.loads(line).items()}
        while await _line_of(process.stdout):
            pass

    async def _read_errors(self, process: asyncio.subprocess.Process) -> None:
        while line := await _line_of(process.stderr):
            self._lines.append(line[:MOST_LINE].decode(errors="replace").rstrip())

    @property
    def has_ended(self) -> bool:
        """Tell whether it runs no longer, or never did."""
        return self._serving.done()

    @property
    def reason(self) -> str:
        """Return why it serves no longer, empty while it does."""
        if not self._serving.done():
            return ""
        error = None if self._serving.cancelled() else self._serving.exception()
        code = None if self._process is None else self._process.returncode
        last = self._lines[-1] if self._lines else "" if error is None else repr(error)
        return f'"cloche node" ended with code {code}: {last}'

    async def end(self) -> None:
        """End it, by SIGTERM and then by SIGKILL."""
        process = self._process
        if process is not None and process.returncode is None:
            _signal(process, signal.SIGTERM)
            await asyncio.wait([self._serving], timeout=ENDS_S)
            _signal(process, signal.SIGKILL)
        self._serving.cancel()
        await asyncio.wait([self._serving])
        if process is not None:
            await process.wait()


class LocalEngine:
    """Implement FleetEngine on this machine alone."""

    name, has_blocks, scaling_s = "local", False, 0.0

    def __init__(self, share: float = 0.5, words: Sequence[str] = ()):
        self._words = tuple(words)
        self._cpus = len(os.sched_getaffinity(0)) * share
        self._memory_bytes = int(_memory_bytes() * share)
        self._key = ""
        self._child: NodeChild | None = None
        self._starts_again_at = 0.0

    async def start(self, public_key: str) -> None:
        """Start the server."""
        self._key = public_key
        await self.nodes()

    async def nodes(self) -> Sequence[EngineNode]:
        """Return this machine. A server that has ended is started again."""
        now = asyncio.get_running_loop().time()
        child = self._child
        if self._key and (child is None or (child.has_ended and now >= self._starts_again_at)):
            self._child = NodeChild(self._key, self._words)
            self._starts_again_at = now + AGAIN_S
        shown = child or self._child
        reason, facts = ("", {}) if shown is None else (shown.reason, shown.facts)
        return [
            EngineNode(
                id=NODE,
                cpus=self._cpus,
                memory_bytes=self._memory_bytes,
                address=facts.get("address", ""),
                certificate=facts.get("certificate", ""),
                boot=facts.get("boot", ""),
                reason=reason,
            )
        ]

    async def blocks(self) -> Sequence[ReservedBlock]:
        """Return no blocks."""
        return ()

    async def take_block(self, *, node: str, cpus: float, memory_bytes: int) -> ReservedBlock:
        """Refuse: the share of this machine is one block."""
        raise BackendUnavailable(f"node {node} reserves no block of {cpus:g} processors, {memory_bytes} bytes.")

    async def give_back(self, block: str) -> None:
        """Do nothing."""

    async def stop(self) -> None:
        """End the server."""
        self._key = ""
        child, self._child = self._child, None
        if child is not None:
            await child.end()

    async def close(self) -> None:
        """End the server: it is a child of this process."""
        await self.stop()


class LocalFleet(Coordinator):
    """This machine as a fleet. `words` are further arguments of `cloche node`; its server ends with the fleet."""

    def __init__(
        self,
        link_to: LinkTo,
        *,
        settings: FleetSettings | None = None,
        words: Sequence[str] = (),
        version: str = "",
        timing: Timing | None = None,
    ):
        settings = settings or FleetSettings()
        engine = LocalEngine(settings.share, words)
        super().__init__(engine, link_to, signer=Signer(), quota=settings.quota, version=version, timing=timing)


async def _line_of(stream: asyncio.StreamReader | None) -> bytes:
    """Return the next line, or what there is of a longer one; empty at the end."""
    if stream is None:
        return b""
    try:
        return await stream.readuntil()
    except asyncio.IncompleteReadError as error:
        return error.partial
    except asyncio.LimitOverrunError as error:
        return await stream.read(max(error.consumed, 1))


def _signal(process: asyncio.subprocess.Process, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(number)


def _memory_bytes() -> int:
    """Return the memory of this machine, or of its control group if that is less."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    with contextlib.suppress(OSError, ValueError), open("/sys/fs/cgroup/memory.max", encoding="ascii") as file:
        limits.append(int(file.read()))
    return min(limits)
