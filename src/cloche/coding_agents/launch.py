"""Open an agent's sandbox, or find it again, and write what the agent needs at its start.

Files are written from inside, as the guest: what is in its home already may be anything.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from cloche.core.errors import ClocheError, InvalidRequest
from cloche.core.record import dataclass
from cloche.execution.home_folder import give_home
from cloche.execution.sandbox import AsyncSandbox
from cloche.keeper import registry

from . import plan
from .home_files import write_home_files
from .places import AgentPlace
from .row import CodingAgent
from .table import TABLE


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

    def command(self, *, resumes: bool = False) -> list[str]:
        """Return the command inside."""
        return plan.command(self.row, self.program, self.options, resumes=resumes)

    def environment(self) -> dict[str, str]:
        """Return the variables of the agent's process, whose sandbox is open."""
        path = environment_of(self.place)["PATH"]
        return plan.environment(self.row, self.program, self.home, self.place.folder, path, os.environ)


def prepare(name: str, cwd: str, options: plan.AgentOptions, *, number: int = 0) -> Launch:
    """Decide how an agent starts in a folder. Raises InvalidRequest for an unknown agent, or one that is missing."""
    row = TABLE.get(name)
    if row is None:
        raise InvalidRequest(f"agent: {name!r} is unknown; known ones: {', '.join(TABLE)}")
    place = AgentPlace(agent=name, folder=plan.project_folder(cwd), number=number)
    return Launch(
        row=row, place=place, program=_find(row), options=options, cwd=os.path.realpath(cwd),
        home=os.path.realpath(os.path.expanduser("~")),
    )  # fmt: skip


def _find(row: CodingAgent) -> plan.Program:
    import shutil

    from cloche.execution.registry import prefixes_for

    path = shutil.which(row.program)
    if path is None:
        raise InvalidRequest(
            f"agent: {row.program} is not on this host's PATH; get it: cloche agent install {row.name}"
        )
    return plan.Program(words=(path,), toolchains=tuple(prefixes_for(path)))


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
async def opened(launch: Launch) -> AsyncIterator[AsyncSandbox]:
    """Open the agent's sandbox, or attach to the one that lives; leaving the block only detaches."""
    is_new = not is_open(launch.place)
    if is_new:
        sandbox = AsyncSandbox(**launch.keywords())
        give_home(sandbox, launch.place.home, launch.home)
    else:
        sandbox = AsyncSandbox.attach(launch.place.sandbox)
    async with sandbox:
        if is_new:
            shown = {f"{launch.home}/{path}": real for path, real in launch.shown().items()}
            links = {path: real for path, real in shown.items() if path != real}
            variables = environment_of(launch.place)
            await write_home_files(sandbox, launch.row, launch.home, launch.place.folder, variables, shown=links)
        yield sandbox
