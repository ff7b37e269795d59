"""The agents that are open: found by name or folder, described, and stopped with all their work saved."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from cloche.core.errors import ClocheError, InvalidRequest, OutcomeUnknown
from cloche.core.escape import escape_name
from cloche.core.record import asdict, dataclass, field
from cloche.execution.sandbox import AsyncSandbox
from cloche.keeper import registry
from cloche.keeper.attach import visit

from . import about, archives
from .launch import is_open
from .network_summary import NetworkSummary, summarize
from .own_rows import known_agents
from .places import AgentPlace, agents_folder, project_folder
from .terminal_note import process_of
from .watch import Watched, is_watched, read_watched

GRACE_S, END_S = 10.0, 90.0  # for the agent to end, and for what it did to be saved
MOST_PLACES = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentStatus:
    """Describe an agent that is open. Times in seconds, sizes in bytes.

    `state` is `working`, `waiting` (no agent runs, the sandbox is kept) or `paused`. `files` and `dangers` count the
    changes that are not committed; `saved_ago_s` is None if nothing was saved yet. `problems` are sentences.
    """

    agent: str
    sandbox: str
    folder: str
    state: str
    is_attached: bool
    age_s: float
    memory_bytes: int = 0
    processes: int = 0
    cpu_s: float = 0.0
    files: int = 0
    dangers: int = 0
    conflicts: int = 0
    saved_ago_s: float | None = None
    state_bytes: int = 0
    problems: tuple[str, ...] = ()
    network: NetworkSummary = field(default_factory=NetworkSummary)

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)


def open_agents(folder: str | None = None) -> list[AgentPlace]:
    """Return all agents of this user whose sandbox is open, or those on one folder."""
    try:
        names = sorted(os.listdir(agents_folder()))[:MOST_PLACES]
    except OSError:
        return []
    noted = (about.read(f"{agents_folder()}/{name}") for name in names)
    places = [AgentPlace(agent=row.agent, folder=row.folder, number=row.number) for row in noted if row is not None]
    return [place for place in places if folder in (None, place.folder) and is_open(place)]


def find_agent(name: str | None, cwd: str) -> AgentPlace:
    """Return an open agent by the name of its sandbox, or of an agent on this project; without a name the only one.

    Raises InvalidRequest.
    """
    places = open_agents()
    here = [place for place in places if place.folder == project_folder(cwd)]
    chosen = [place for place in places if name == place.sandbox]
    chosen = chosen or [place for place in here if name in (None, place.agent)]
    chosen = chosen or (places if name is None and len(places) == 1 else [])
    if len(chosen) == 1:
        return chosen[0]
    listed = ", ".join(place.sandbox for place in (chosen or places)) or "none"
    what = "no agent is" if name is None else f"{name!r} is not"
    problem = "several agents are" if chosen else what
    raise InvalidRequest(f"agent: {problem} open on {escape_name(project_folder(cwd))}; open ones: {listed}")


def named_here(name: str | None, cwd: str) -> str:
    """Return the sandbox of an agent on this project, the only one without a name; another name as it is.

    Raises InvalidRequest.
    """
    folder = project_folder(cwd)
    names = [place.sandbox for place in open_agents(folder) if name in (None, place.agent)]
    if len(names) == 1:
        return names[0]
    if name is not None and not names:
        return name
    listed = ": " + ", ".join(names) if names else ""
    raise InvalidRequest(
        f"agent: {len(names) or 'no'} sandboxes of agents are open on {escape_name(folder)}{listed}; name one "
        "(cloche ps lists all)"
    )


async def status(place: AgentPlace) -> AgentStatus:
    """Describe an open agent; its processes stand still while the changes are read."""
    entry = await asyncio.to_thread(registry.find, place.sandbox)
    info, usage = [await asyncio.to_thread(visit, entry, op) for op in ("info", "usage")]
    async with AsyncSandbox.attach(place.sandbox) as sandbox:
        running = [process for process in await sandbox.processes() if process.exit_code is None]
        network = await _network(sandbox, place)
        diff = None if info.get("is_paused") else await sandbox.diff()
    watched, newest = read_watched(place), next(iter(archives.archives(place)), None)
    works = any(process.id == process_of(place.state) for process in running) or bool(running)
    return AgentStatus(
        agent=place.agent, sandbox=place.sandbox, folder=place.folder,
        state="paused" if info.get("is_paused") else "working" if works else "waiting",
        is_attached=any(process.is_attached for process in running), age_s=float(info.get("age_s") or 0.0),
        memory_bytes=int(usage["memory_bytes"]), processes=int(usage["processes"]), cpu_s=float(usage["cpu_s"]),
        files=sum(change.kind != "directory" for change in diff.changes) if diff else 0,
        dangers=len(diff.dangerous) if diff else 0, conflicts=len(diff.conflicts) if diff else 0,
        saved_ago_s=newest.age_s if newest is not None else None,
        state_bytes=watched.state_bytes if watched is not None else 0,
        problems=_problems(place, watched), network=network,
    )  # fmt: skip


async def end_of(sandbox: AsyncSandbox, place: AgentPlace) -> tuple[float, NetworkSummary]:
    """Return the processor seconds of an agent's sandbox, and its network so far."""
    entry = await asyncio.to_thread(registry.find, place.sandbox)
    usage = await asyncio.to_thread(visit, entry, "usage")
    return float(usage["cpu_s"]), await _network(sandbox, place)


async def _network(sandbox: AsyncSandbox, place: AgentPlace) -> NetworkSummary:
    row = known_agents().get(place.agent)
    with suppress(ClocheError):
        return summarize(await sandbox.network.traffic(), row.telemetry if row is not None else ())
    return NetworkSummary()


def _problems(place: AgentPlace, watched: Watched | None) -> tuple[str, ...]:
    problems = []
    if not is_watched(place):
        problems.append("nothing is saved now: its watcher has ended; cloche agent attach starts another one")
    if watched is not None and watched.error:
        problems.append(f"the last save failed: {watched.error}")
    if watched is not None and watched.stopped:
        problems.append(watched.stopped)
    if watched is not None and not watched.is_state_whole:
        problems.append("its home folder could not be counted to the end; it may hold more than is known")
    return tuple(problems)


async def stop(place: AgentPlace) -> archives.Archive | None:
    """End an agent and its sandbox, once its work is saved; return the archive that the next start goes on from.

    Raises OSError or InvalidRequest if it cannot be saved; the sandbox goes on then.
    """
    entry = await asyncio.to_thread(registry.find, place.sandbox)
    async with AsyncSandbox.attach(place.sandbox) as sandbox:
        if kept := process_of(place.state):
            with suppress(InvalidRequest):  # it has ended
                await (await sandbox.process(kept)).detach()  # from its terminal, which is told
        await _ask(entry, "stop", grace_s=GRACE_S, timeout_s=GRACE_S + END_S)
        newest = next(iter(archives.archives(place)), None)
        await archives.save(sandbox, place, reason="it was stopped", last_mark=newest.mark if newest else "")
    await _ask(entry, "end", timeout_s=END_S)
    return await asyncio.to_thread(archives.pending_archive, place)


async def _ask(entry: registry.Found, op: str, *, timeout_s: float, **arguments: Any) -> Mapping[str, Any]:  # noqa: ANN401
    try:
        return await asyncio.to_thread(visit, entry, op, timeout_s=timeout_s, **arguments)
    except OutcomeUnknown:
        if op == "end" and not is_open_name(entry.name):
            return {}
        raise


def is_open_name(name: str) -> bool:
    """Tell whether a sandbox with this name lives."""
    try:
        registry.find(name)
    except ClocheError:
        return False
    return True
