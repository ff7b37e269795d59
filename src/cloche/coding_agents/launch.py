"""Open an agent's sandbox, or find it again, and write what the agent needs at its start.

Files are written from inside, as the guest: what is in its home already may be anything.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from itertools import islice
from typing import Any

from cloche.core.errors import ClocheError, StartFailed
from cloche.core.escape import escape, escape_line, escape_name
from cloche.core.loops import finish
from cloche.core.record import dataclass, replace
from cloche.execution.home_folder import give_home
from cloche.execution.host_ports import give_host_ports
from cloche.execution.sandbox import AsyncSandbox
from cloche.execution.why import give_why
from cloche.keeper import registry

from . import about, archives, forks, plan
from .boundaries import require_boundaries
from .find import find_agent
from .home_files import write_home_files
from .kept_state import copy_accepted, own_writes
from .limits_text import limit_lines
from .logins import AgentLogin, login_env, login_of, login_path
from .own_rows import agent_named
from .places import AgentPlace, project_folder
from .row import CodingAgent
from .terminal_note import mark_lost
from .watch import WatchSettings, start_watch

MOST_NAMED = 10  # paths in a message


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Hold what is needed to start an agent: all decisions are made."""

    row: CodingAgent
    place: AgentPlace
    program: plan.Program
    options: plan.AgentOptions
    cwd: str
    home: str

    def shown(self) -> dict[str, str]:
        """Return the real path of each of the user's own folders that the agent is shown, by its path in the home."""
        reals = {path: os.path.realpath(f"{self.home}/{path}") for path in self.row.shown}
        return {path: real for path, real in reals.items() if os.path.isdir(real)}

    def keywords(self) -> dict[str, Any]:
        """Return the keywords of a new sandbox."""
        return plan.keywords(
            self.row, self.place, self.program, self.options, os.environ, shown=tuple(self.shown().values())
        )

    def limits(self, sandbox: AsyncSandbox) -> list[str]:
        """Return the sentences that tell the agent its limits in a sandbox."""
        shown = [f"~/{path}" for path in self.shown()]
        return limit_lines(
            sandbox.policy, sandbox.limits, folder=self.place.folder, read_only=[*shown, *self.options.also],
            is_alone=self.options.prompt is not None,
        )  # fmt: skip

    def values(self) -> dict[str, str]:
        """Return the values of its secrets that the variables of this shell have, by name."""
        texts = (*self.row.secrets, *self.options.secrets)
        names = [text.partition("@")[0].partition("=")[0] for text in texts]
        return {name: value for name in names if (value := os.environ.get(name))}

    def command(self, *, resumes: bool = False) -> list[str]:
        """Return the command inside."""
        return plan.command(
            self.row, self.program, self.options, home=self.home, project=self.place.folder, resumes=resumes
        )

    def environment(self) -> dict[str, str]:
        """Return the variables of the agent's process, whose sandbox is open."""
        path = environment_of(self.place)["PATH"]
        own = plan.environment(self.row, self.program, self.home, self.place.folder, path, os.environ)
        return {**own, **login_env(self.row)}

    def check_environment(self) -> dict[str, str]:
        """Return the variables of a check of the agent's changes: where programs and caches are."""
        variables = self.environment()
        return {name: variables[name] for name in ("PATH", "XDG_CACHE_HOME")}

    def start(self) -> about.Start | None:
        """Return how it starts again without options; None if it was given some."""
        if self.options != plan.AgentOptions():
            return None
        names = (*(name.partition("@")[0] for name in self.row.secrets), *plan.PASSED)
        return about.Start(command=tuple(self.command()), variables=self.environment(), depends_on=names)


def prepare(
    name: str, cwd: str, options: plan.AgentOptions, *, number: int = 0, program: plan.Program | None = None
) -> Launch:
    """Decide how an agent starts in a folder. Raises InvalidRequest for an unknown agent, or one that is missing."""
    row = agent_named(name)
    place = AgentPlace(agent=name, folder=project_folder(cwd), number=number)
    return Launch(
        row=row, place=place, program=program or _find(row, place.folder), options=options, cwd=os.path.realpath(cwd),
        home=os.path.realpath(os.path.expanduser("~")),
    )  # fmt: skip


def _find(row: CodingAgent, folder: str) -> plan.Program:
    found = find_agent(row, folder)
    return plan.Program(words=found.words, toolchains=found.toolchains, path=found.path)


def is_open(place: AgentPlace) -> bool:
    """Tell whether the agent's sandbox lives."""
    try:
        registry.find(place.sandbox)
    except ClocheError:
        return False
    return True


def environment_of(place: AgentPlace) -> Mapping[str, str]:
    """Return the variables of the sandbox itself; of its secrets they have the placeholders. Raises InvalidRequest."""
    variables: Mapping[str, str] = registry.find(place.sandbox).entry["environment"]
    return variables


@asynccontextmanager
async def opened(launch: Launch, tell: Callable[[str], None]) -> AsyncIterator[AsyncSandbox]:
    """Open the agent's sandbox, or attach to the one that lives; leaving the block only detaches.

    A new one goes on from the last archive, if there is work in it. One that lives with other settings is opened anew,
    with its changes, unless the agent is running in it. `tell` gets sentences for the user.
    """
    keywords = launch.keywords()
    has_login = await asyncio.to_thread(os.path.exists, login_path(launch.row.name))
    settings = {**keywords, "host_ports": launch.options.host_ports, "has_login": has_login}
    if is_open(launch.place) and not await _is_to_be_renewed(launch, settings, tell):
        async with AsyncSandbox.attach(launch.place.sandbox) as sandbox:
            try:
                await _require_boundaries(sandbox, launch, tell)
            except StartFailed:
                raise
            except ClocheError as error:  # it may be paused, or have no room for a process
                tell(f"its boundaries could not be tried: {escape_line(str(error))}")
            await _watch(launch)
            await asyncio.to_thread(_note_start, launch, settings)
            yield sandbox
        return
    login = await asyncio.to_thread(login_of, launch.row)
    all_keywords: Any = {**keywords, "secrets": login.added_to(keywords["secrets"])}
    sandbox = AsyncSandbox(**all_keywords)
    give_home(sandbox, launch.place.home, launch.home)
    give_host_ports(sandbox, launch.options.host_ports)
    give_why(sandbox, launch.limits(sandbox))
    async with sandbox:
        try:
            await _prepare_new(sandbox, launch, login, tell)
            await _require_boundaries(sandbox, launch, tell)
            await asyncio.to_thread(about.note, launch.place, settings, launch.start())
        except BaseException:
            await finish(sandbox.kill())  # the next start must not find it
            raise
        if launch.row.login is not None and not has_login and not keywords["secrets"]:
            tell(f"no key is set, and there is no login; for all projects: cloche agent login {launch.row.name}")
        await _watch(launch)
        yield sandbox


async def _require_boundaries(sandbox: AsyncSandbox, launch: Launch, tell: Callable[[str], None]) -> None:
    """Try the boundaries from inside. Raises StartFailed if an attempt succeeds."""
    tried = await require_boundaries(sandbox, home=launch.home, values=launch.values())
    for row in tried.failed:
        tell(f"this boundary could not be tried: {row.name}: {row.how}")


async def _watch(launch: Launch) -> None:
    settings = WatchSettings(state_bytes=launch.row.state_bytes)
    await asyncio.to_thread(start_watch, launch.place, settings)


def _note_start(launch: Launch, settings: Mapping[str, Any]) -> None:
    """Note how the agent starts in a sandbox that lives, if that has changed: its settings have not."""
    noted, start = about.read(launch.place.state), launch.start()
    if start is not None and noted is not None and noted.has_settings(settings) and not noted.has_state():
        about.note(launch.place, settings, start, opened=noted.opened)


async def _prepare_new(sandbox: AsyncSandbox, launch: Launch, login: AgentLogin, tell: Callable[[str], None]) -> None:
    if launch.place.number and about.read(launch.place.state) is None:
        left_out = await forks.copy_home(sandbox, launch.place)
        copy_accepted(replace(launch.place, number=0), launch.place)
        for path in left_out[:MOST_NAMED]:
            tell(f"not copied from the home folder of the first sandbox: {escape_name(path)}")
    await asyncio.to_thread(mark_lost, launch.place.state)
    archive = await asyncio.to_thread(archives.pending_archive, launch.place)
    if archive is not None:
        _tell_restored(await archives.restore(sandbox, archive), tell)
    shown = {f"{launch.home}/{path}": real for path, real in launch.shown().items()}
    links = {path: real for path, real in shown.items() if path != real}
    variables = environment_of(launch.place)
    limits = launch.limits(sandbox)
    folder = launch.place.folder
    with own_writes(launch.place, launch.row):
        await write_home_files(
            sandbox, launch.row, launch.home, folder, variables, shown=links, limits=limits, login=login.files
        )


def _tell_restored(restored: archives.Restored, tell: Callable[[str], None]) -> None:
    archive = restored.archive
    age = format_age(archive.age_s)
    tell(f"going on from {archive.changes} changed {'path' if archive.changes == 1 else 'paths'}, saved {age} ago")
    for path, reason in islice(archive.left_out.items(), MOST_NAMED):
        tell(f"not saved: {escape_name(path)}: {escape(reason)}")
    for path in restored.changed_on_host[:MOST_NAMED]:
        tell(f"changed in the project since: {escape_name(path)}; the review shows both")


def format_age(seconds: float) -> str:
    """Return a time as a number of the largest unit that it fills."""
    for unit, name in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if count := int(seconds // unit):
            return f"{count} {name}{'' if count == 1 else 's'}"
    return "less than a minute"


async def _is_to_be_renewed(launch: Launch, keywords: Mapping[str, Any], tell: Callable[[str], None]) -> bool:
    """Tell whether a living sandbox has other settings and was ended for that, after its changes were saved."""
    noted = about.read(launch.place.state)
    if noted is not None and noted.has_settings(keywords):
        return False
    async with AsyncSandbox.attach(launch.place.sandbox) as sandbox:
        if any(process.exit_code is None for process in await sandbox.processes()):
            tell("its settings have changed; they apply when nothing runs in it any more, or after cloche agent stop")
            return False
        if (await sandbox.changes()) and not await archives.save(sandbox, launch.place, reason="new settings"):
            return False
        await sandbox.kill()
    tell("its settings have changed: it starts anew, with its changes")
    return True
