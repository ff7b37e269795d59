"""The watcher of an agent's sandbox: one small process beside its keeper, which saves the agent's work.

Theory of operation: it is no client that keeps the sandbox alive. It asks the keeper every few seconds how much was
printed and how much processor time was used. It saves after a minute in which little of both was, when all
processes have ended, and at least every ten minutes; while nothing happens, it looks ever less often. It holds a
channel of the keeper's (`linger`): where the sandbox is asked to end, or the machine shuts down, the keeper waits until
the last save is done. A kill of either loses what was done since the last save, at most.

It attaches to the sandbox only while it saves. What it has done is in `watch.json`, beside `about.json`.
"""

from __future__ import annotations

import asyncio
import fcntl
import importlib.util
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from cloche import hostfs
from cloche.core.errors import ClocheError
from cloche.core.limits import format_size
from cloche.core.record import asdict, dataclass, replace
from cloche.execution.sandbox import AsyncSandbox
from cloche.init import wire
from cloche.keeper import registry
from cloche.keeper.attach import visit

from . import archives
from .folder_size import folder_size
from .places import AgentPlace
from .steps import note_step

log = logging.getLogger("cloche.agents")
WATCH, LOCK, MOST_FILE_BYTES = "watch.json", "watch.lock", 1 << 16
CHANNEL = 1
KILL_S = 10.0
_PACKAGES = ("cloche", "platformdirs")
_started: list[subprocess.Popen[bytes]] = []  # watchers of this process, to be taken note of when they end
_OSC = re.compile(rb"\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")
_NOTICE = re.compile(rb"\x1b\](?:9;[^4]|777;notify;)")  # OSC 9;4 is a progress bar


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchSettings:
    """Say how a sandbox is watched. Times in seconds.

    It counts as idle after `idle_s` in which nothing is printed and less than `busy` of a processor is used.
    `state_bytes` bounds the agent's home folder on the host.
    """

    state_bytes: int
    poll_s: float = 5.0
    idle_s: float = 60.0
    busy: float = 0.05
    longest_s: float = 600.0
    linger_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """Report what the watcher of an agent has done: the last save, why one failed, why the agent was stopped.

    `state_bytes` is the size of its home folder; there may be more if `is_state_whole` is False.
    """

    pid: int
    saved_at: float = 0.0
    saves: int = 0
    save_s: float = 0.0
    error: str = ""
    stopped: str = ""
    state_bytes: int = 0
    is_state_whole: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Hold what the sandbox has done up to a moment: bytes printed, processor seconds, processes that run."""

    at: float
    printed: int = 0
    cpu_s: float = 0.0
    running: int = 0
    is_attached: bool = False


class Quiet:
    """Decide when to save, from samples. Pure."""

    def __init__(self, settings: WatchSettings, now: float):
        self._settings = settings
        self._last: Sample | None = None
        self._quiet_since = self._saved_at = now
        self._wait_s = settings.idle_s

    def note(self, sample: Sample) -> str:
        """Take the next sample; return why to save now, empty for not now."""
        last, self._last = self._last, sample
        if last is None:
            return ""
        used = (sample.cpu_s - last.cpu_s) / max(0.001, sample.at - last.at)
        if sample.printed != last.printed or used > self._settings.busy:
            self._quiet_since = sample.at
        if sample.printed != last.printed or used > 0:
            self._wait_s = self._settings.idle_s
        if last.running and not sample.running:
            return self._due("the agent has ended", sample.at)
        if sample.at - max(self._quiet_since, self._saved_at) >= self._wait_s:
            return self._due("the agent is idle", sample.at)
        if sample.at - self._saved_at >= self._settings.longest_s:
            return self._due("the agent has worked for a while", sample.at)
        return ""

    def _due(self, reason: str, now: float) -> str:
        self._saved_at, self._wait_s = now, min(2 * self._wait_s, self._settings.longest_s)
        return reason


def rings(output: bytes) -> bool:
    """Tell whether output has a BEL, or a notification of a terminal (OSC 9, OSC 777)."""
    return b"\x07" in _OSC.sub(b"", output) or _NOTICE.search(output) is not None


def read_watched(place: AgentPlace) -> Watched | None:
    """Return what the last watcher of an agent has noted; None if there was none."""
    try:
        with open(f"{place.state}/{WATCH}", "rb") as file:
            return Watched(**json.loads(file.read(MOST_FILE_BYTES)))
    except (OSError, ValueError, TypeError):
        return None


def is_watched(place: AgentPlace) -> bool:
    """Tell whether a watcher of this agent's sandbox lives."""
    with _locked(place) as is_ours:
        return not is_ours


@contextmanager
def _locked(place: AgentPlace) -> Iterator[bool]:
    """Hold the lock of the watcher during the block; yield whether it was free."""
    os.makedirs(place.state, mode=0o700, exist_ok=True)
    fd = os.open(f"{place.state}/{LOCK}", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield True
    except BlockingIOError:
        yield False
    finally:
        os.close(fd)


def start_watch(place: AgentPlace, settings: WatchSettings) -> None:
    """Start a watcher for an agent's sandbox unless one lives; it ends with the sandbox. Raises OSError."""
    if is_watched(place):
        return
    specs = [spec for package in _PACKAGES if (spec := importlib.util.find_spec(package)) is not None]
    paths = [os.path.dirname(os.path.dirname(os.path.abspath(str(spec.origin)))) for spec in specs]
    boot = f"import sys; sys.path += {paths!r}; from cloche.coding_agents.watch import main; main(*sys.argv[1:])"
    words = [json.dumps(asdict(place)), json.dumps(asdict(settings))]
    _started[:] = [process for process in _started if process.poll() is None]
    process = subprocess.Popen(
        [sys.executable, "-I", "-c", boot, *words], cwd="/", stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    _started.append(process)


def main(place: str, settings: str) -> None:
    """Watch the sandbox of an agent until it ends."""
    agent_place = AgentPlace(**json.loads(place))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with _locked(agent_place) as is_ours:
        if is_ours:
            asyncio.run(Watcher(agent_place, WatchSettings(**json.loads(settings))).run())


class Watcher:
    """Watch one sandbox; see `run`."""

    def __init__(self, place: AgentPlace, settings: WatchSettings):
        self._place, self._settings = place, settings
        self._entry = registry.find(place.sandbox)
        self._noted = Watched(pid=os.getpid())
        newest = next(iter(archives.archives(place)), None)
        self._saver = archives.Saver(place, last_mark=newest.mark if newest is not None else "")
        self._quiet = Quiet(settings, time.monotonic())
        self._sample: Sample | None = None
        self._next_size = 0.0
        self._ending, self._gone = asyncio.Event(), asyncio.Event()
        self._ends_sandbox = False

    async def run(self) -> None:
        """Watch until the sandbox ends, or this process is asked to end; then save a last time."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._ending.set)
        reader, writer = await asyncio.open_unix_connection(sock=self._entry.connect())
        writer.write(wire.json_frame(wire.HELLO, 0, version=wire.VERSION, is_visit=True))
        writer.write(wire.json_frame(wire.OPEN, CHANNEL, op="linger", linger_s=self._settings.linger_s))
        hearing = asyncio.ensure_future(self._hear(reader))
        self._note()
        try:
            while not self._ending.is_set():
                with suppress(ClocheError, OSError, ValueError, TypeError, KeyError):
                    await self._look()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._ending.wait(), self._settings.poll_s)
            if not self._gone.is_set():
                await self._save("the sandbox ends")
        finally:
            hearing.cancel()
            writer.close()  # whereupon the keeper goes on
        if self._ends_sandbox:
            with suppress(ClocheError, OSError):
                await self._ask("end")

    async def _hear(self, reader: asyncio.StreamReader) -> None:
        frames = wire.FrameBuffer()
        with suppress(OSError, ValueError):
            while data := await reader.read(wire.MOST_DATA):
                if any(kind == wire.EVENT and channel == CHANNEL for kind, channel, _ in frames.feed(data)):
                    self._ending.set()
        self._gone.set()
        self._ending.set()

    async def _ask(self, op: str) -> Mapping[str, Any]:
        return await asyncio.to_thread(visit, self._entry, op)

    async def _look(self) -> None:
        """Take a sample, and do what it asks for."""
        rows = [row for row in (await self._ask("processes"))["processes"] if isinstance(row, dict)]
        usage = await self._ask("usage")
        running = [row for row in rows if row.get("status") is None]
        before, self._sample = self._sample, Sample(
            at=time.monotonic(), printed=sum(int(row["printed"]) for row in rows), cpu_s=float(usage["cpu_s"]),
            running=len(running), is_attached=any(row.get("is_attached") for row in running),
        )  # fmt: skip
        if before is not None and running and not before.running and self._noted.stopped:
            self._note(stopped="")  # it was started again
        if reason := self._quiet.note(self._sample):
            await self._save(reason)
        if before is not None and not self._sample.is_attached:
            await self._notify(before, running)
        if self._sample.at >= self._next_size and (before is None or before != replace(self._sample, at=before.at)):
            await self._check_size(running, int(usage["processes"]))

    async def _save(self, reason: str) -> None:
        began = time.monotonic()
        try:
            async with AsyncSandbox.attach(self._place.sandbox) as sandbox:
                archive = await self._saver.save(sandbox, reason=reason)
        except (ClocheError, OSError) as error:
            self._note(error=f"{type(error).__name__}: {error}"[:1000])
            return
        if archive is not None:
            seconds = time.monotonic() - began
            self._note(saved_at=archive.saved_at, saves=self._noted.saves + 1, save_s=seconds, error="")
            with suppress(ClocheError, OSError):
                await asyncio.to_thread(note_step, self._place, archive, self._saver.snapshots)

    def _note(self, **facts: Any) -> None:  # noqa: ANN401 - fields of Watched
        self._noted = replace(self._noted, **facts)
        with suppress(OSError):
            fd = hostfs.open_folder(self._place.state)
            try:
                hostfs.replace(fd, WATCH, json.dumps(asdict(self._noted)).encode(), mode=0o600)
            finally:
                os.close(fd)

    # The size of the agent's home folder.

    async def _check_size(self, running: list[dict[str, Any]], processes: int) -> None:
        """Stop the agent where its home folder holds more than it may; the next look takes a fiftieth of the time.

        If only processes are left that outlive their command, none can be named: the sandbox is ended.
        """
        found = await asyncio.to_thread(folder_size, self._place.home)
        self._next_size = time.monotonic() + max(self._settings.idle_s, 50 * found.seconds)
        stopped = ""
        if found.size > self._settings.state_bytes:
            stopped = (
                f"its home folder holds {format_size(found.size)}, more than "
                f"{format_size(self._settings.state_bytes)}: the agent was stopped; remove files in {self._place.home}"
            )
            await self._save("the agent is stopped")
            for row in running:
                await asyncio.to_thread(visit, self._entry, "kill", id=str(row["id"]))
            if processes and not running:
                self._ends_sandbox = True
                self._ending.set()
        self._note(state_bytes=found.size, is_state_whole=found.is_whole, stopped=stopped or self._noted.stopped)
        if stopped:
            await self._show("was stopped: its home folder is too large")

    # Notifications.

    async def _notify(self, before: Sample, running: list[dict[str, Any]]) -> None:
        sample = self._sample
        if sample is None or shutil.which("notify-send") is None:
            return
        if before.running and not sample.running:
            await self._show("has ended")
        elif sample.printed > before.printed and await self._rang(running, sample.printed - before.printed):
            await self._show("waits for you")

    async def _rang(self, running: list[dict[str, Any]], count: int) -> bool:
        async with AsyncSandbox.attach(self._place.sandbox) as sandbox:
            tails = [(await sandbox.logs(str(row["id"])))[0][-count:] for row in running]
        return any(map(rings, tails))

    async def _show(self, text: str) -> None:
        """Show a notification on the desktop, if there is one; nothing of it comes from the guest."""
        program = shutil.which("notify-send")
        if program is None:
            return
        folder = os.path.basename(self._place.folder)
        with suppress(OSError, TimeoutError):
            process = await asyncio.create_subprocess_exec(
                program, "--app-name=cloche", f"{self._place.agent} {text}", folder, stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            await _in_time(process.wait(), KILL_S)


async def _in_time(work: Awaitable[Any], seconds: float) -> None:
    async with asyncio.timeout(seconds):
        await work
