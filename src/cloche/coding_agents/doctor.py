"""Say what an agent lacks on this host, what it may reach, what it will see, and what it tries in vain.

The last is tried in a sandbox like the agent's own, with an empty home folder, which is removed afterwards: see
`boundaries`. The first is looked up on this host; a program is asked for its version alone.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import shutil
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from importlib.util import find_spec
from typing import Any

from cloche.core.errors import BackendUnavailable, ClocheError, InvalidRequest
from cloche.core.record import asdict, dataclass, field, replace
from cloche.core.secrets import SecretSet
from cloche.execution.home_folder import give_home, why_no_home
from cloche.execution.host_ports import give_host_ports
from cloche.execution.sandbox import AsyncSandbox
from cloche.keeper import registry

from . import plan
from .boundaries import Boundaries, try_boundaries
from .find import find_agent, find_program, interpreter_of
from .launch import Launch, prepare
from .logins import login_of, login_path

VERSION_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirement:
    """Say whether something that an agent uses is here. Without a needed one it cannot start."""

    name: str
    is_met: bool
    detail: str = ""
    remedy: str = ""
    is_needed: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """Hold what the agent may reach: rules of the network, hosts of secrets by their names, ports of this host."""

    rules: tuple[str, ...] = ()
    secrets: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    host_ports: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Hold what the agent sees of this host, and what it does not.

    `hidden` are paths of the project that do not exist inside, `shown` folders of the user's home, read-only, `copied`
    its files that are copied at each start, `also` further folders. `unseen` counts the other entries of the home.
    """

    project: str = ""
    hidden: tuple[str, ...] = ()
    shown: tuple[str, ...] = ()
    copied: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    toolchains: tuple[str, ...] = ()
    home: str = ""
    unseen: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """Hold all of it. `problem` says why no sandbox could be opened; `boundaries` is None then."""

    agent: str
    title: str
    requirements: tuple[Requirement, ...]
    reach: Reach
    view: View
    boundaries: Boundaries | None
    problem: str = ""

    @property
    def is_sound(self) -> bool:
        """Tell whether nothing that is needed is missing, and whether every boundary was tried and held."""
        has_all = all(one.is_met for one in self.requirements if one.is_needed)
        return has_all and self.boundaries is not None and self.boundaries.is_held

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        tried = self.boundaries
        rows = [] if tried is None else [{**asdict(row), "meaning": row.meaning} for row in tried.rows]
        return {
            "agent": self.agent,
            "title": self.title,
            "sound": self.is_sound,
            "problem": self.problem,
            "requirements": [asdict(one) for one in self.requirements],
            "reach": asdict(self.reach),
            "view": asdict(self.view),
            "boundaries": rows,
            "seconds": None if tried is None else tried.seconds,
        }


async def examine(name: str, cwd: str, options: plan.AgentOptions) -> Examination:
    """Look at all of it for an agent in a folder. Raises InvalidRequest for an unknown agent."""
    launch, program = _prepared(name, cwd, options)
    requirements = [program, *await asyncio.to_thread(lambda: list(_tools(launch))), *_of_host(), _key(launch)]
    try:
        async with _like_its_own(launch) as sandbox:
            view, reach = _view(launch, sandbox), _reach(sandbox)
            tried = await try_boundaries(
                sandbox, home=launch.home, values=launch.values(), files=_files(launch), outside=True, asks_egress=True
            )
    except ClocheError as error:
        return Examination(
            agent=name, title=launch.row.title, requirements=tuple(requirements), reach=Reach(), view=View(),
            boundaries=None, problem=str(error),
        )  # fmt: skip
    return Examination(
        agent=name, title=launch.row.title, requirements=tuple(requirements), reach=reach, view=view, boundaries=tried
    )


def _prepared(name: str, cwd: str, options: plan.AgentOptions) -> tuple[Launch, Requirement]:
    """Return the launch of an agent, also of one that is not installed, and whether its program is here."""
    try:
        launch = prepare(name, cwd, options)
    except InvalidRequest as error:
        launch = prepare(name, cwd, options, program=plan.Program(words=("true",)))
        why, _, remedy = str(error).removeprefix("agent: ").partition("; ")
        return launch, Requirement(name=launch.row.program, is_met=False, detail=why, remedy=remedy)
    return launch, Requirement(name=launch.row.program, is_met=True, detail=launch.program.words[0])


@asynccontextmanager
async def _like_its_own(launch: Launch) -> AsyncIterator[AsyncSandbox]:
    """Open a sandbox without a name with the agent's keywords, and an empty home folder."""
    keywords = launch.keywords()
    for name in ("name", "keep", "lifetime"):
        keywords.pop(name)
    place = replace(launch.place, agent="doctor", number=secrets.randbits(32))
    login = await asyncio.to_thread(login_of, launch.row)
    all_keywords: Any = {**keywords, "secrets": login.added_to(keywords["secrets"])}
    sandbox = AsyncSandbox(**all_keywords)
    try:
        give_home(sandbox, place.home, launch.home)
        give_host_ports(sandbox, launch.options.host_ports)
        async with sandbox:
            yield sandbox
    finally:
        await asyncio.to_thread(shutil.rmtree, place.state, ignore_errors=True)


# What is missing.


def _tools(launch: Launch) -> Iterator[Requirement]:
    """Yield the interpreter of the agent's program, and its tools."""
    row, search = launch.row, os.environ.get("PATH", "")
    interpreter = interpreter_of(launch.program.words[0])
    least = row.package.node if row.package and interpreter == "node" else 0
    shown: Mapping[str, str] = {}
    with suppress(InvalidRequest):
        shown = find_agent(row, launch.place.folder).tools
    names: list[str] = [*([interpreter] if interpreter else []), *row.tools]
    for name in dict.fromkeys(names):
        path, is_needed = shown.get(name) or find_program(name, search), name in (interpreter, "git")
        if path is None:
            yield Requirement(
                name=name, is_met=False, detail="not on PATH", remedy=f"install {name}", is_needed=is_needed
            )
        elif shown and name not in shown:
            yield Requirement(
                name=name, is_met=False, detail=f"{path} cannot be shown inside", is_needed=is_needed,
                remedy="install it in a folder of its own, outside of the home itself",
            )  # fmt: skip
        else:
            yield _tool(name, path, least if name == interpreter else 0, is_needed=is_needed)


def _tool(name: str, path: str, least: int, *, is_needed: bool) -> Requirement:
    version = _version(path) if least else ""
    is_old = bool(least) and int((re.search(r"\d+", version) or ["0"])[0]) < least
    return Requirement(
        name=name, is_met=not is_old, detail=f"{path} {version}".strip(), is_needed=is_needed,
        remedy=f"install version {least} or later" if is_old else "",
    )  # fmt: skip


def _version(path: str) -> str:
    import subprocess

    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=VERSION_S, check=False)
        return done.stdout.strip()[:40]
    return ""


def _of_host() -> Iterator[Requirement]:
    from cloche.egress.client import OPENING

    missing = [package for package in OPENING if find_spec(package) is None]
    yield Requirement(
        name="secrets", is_met=not missing, detail=f"missing: {', '.join(missing)}" if missing else "",
        remedy='pip install "cloche[secrets]"' if missing else "",
    )  # fmt: skip
    try:
        yield Requirement(name="names of sandboxes", is_met=True, detail=registry.make_place())
    except BackendUnavailable as error:
        yield Requirement(name="names of sandboxes", is_met=False, detail=error.reason, remedy=error.remedy)
    why = why_no_home(AsyncSandbox(backend="local", workspace="."))
    yield Requirement(
        name="view of a folder, own home folder", is_met=not why, detail=why,
        remedy="see cloche doctor (user namespaces, id-mapped mounts)" if why else "",
    )  # fmt: skip


def _key(launch: Launch) -> Requirement:
    """Say whether the agent has a key or a login; without one it asks."""
    login = launch.row.login
    is_kept = login is not None and os.path.exists(login_path(launch.row.name))
    given = [*launch.values(), *launch.options.secrets, *(["a login"] if is_kept else [])]
    detail = ", ".join(given) or f"none of {', '.join(launch.row.secrets)} is set"
    remedy = (
        ""
        if given
        else "set one in this shell" + (f", or log in once: cloche agent login {launch.row.name}" if login else "")
    )
    return Requirement(name="key or login", is_met=bool(given), detail=detail, remedy=remedy, is_needed=False)


def _files(launch: Launch) -> list[str]:
    """Return the agent's files that may have keys."""
    row = launch.row
    files = [*row.first_files, *(path for texts in row.key_files.values() for path in texts), *row.copied]
    files += [row.login.file] if row.login else []
    return [f"{launch.home}/{path}" for path in dict.fromkeys(files)]


# What it may reach and see.


def _reach(sandbox: AsyncSandbox) -> Reach:
    policy = sandbox.policy
    given = policy.secrets.hosts_by_name if isinstance(policy.secrets, SecretSet) else {}
    rules = dict.fromkeys(policy.network_allow)
    apart = [rule for rule in rules if rule.removesuffix(":443") == rule or rule.removesuffix(":443") not in rules]
    return Reach(
        rules=tuple(apart),  # a secret's host is a rule with its port, also beside one without
        secrets={name: tuple(hosts) for name, hosts in given.items()}, host_ports=policy.host_ports,
    )  # fmt: skip


def _view(launch: Launch, sandbox: AsyncSandbox) -> View:
    folder = sandbox.policy.host_folder
    shown = launch.shown()
    reals = set(shown.values())
    return View(
        project=launch.place.folder,
        hidden=() if folder is None else folder.hidden,
        shown=tuple(f"~/{path}" for path in shown),
        copied=tuple(f"~/{path}" for path in launch.row.copied if os.path.isfile(f"{launch.home}/{path}")),
        also=() if folder is None else tuple(one.path for one in folder.read_only if one.path not in reals),
        toolchains=sandbox.policy.toolchains,
        home=launch.home,
        unseen=_unseen(launch.home, shown),
    )


def _unseen(home: str, shown: Mapping[str, str]) -> int:
    tops = {path.partition("/")[0] for path in shown}
    with suppress(OSError):
        return sum(name not in tops for name in os.listdir(home))
    return 0
