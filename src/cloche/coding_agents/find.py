"""Find an agent on this host: its program, the folders that it needs, and its PATH inside.

The user's own PATH comes first, then what `cloche agent install` installed. A program is started by its real path, so
a folder of links such as `~/.local/bin` need not be shown. The shim of a version manager is not the program: the
manager is asked for it. Of the user's PATH, those folders are on PATH inside that are shown there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from typing import Literal

from cloche.core.errors import InvalidRequest
from cloche.core.escape import escape_name
from cloche.core.record import dataclass, field
from cloche.execution.registry import is_shown_anyway, prefixes_for
from cloche.workspace.allowed import check_folder

from .installed import Installed, newest
from .row import CodingAgent

Origin = Literal["path", "installed"]
ASKING_S = 20.0
MOST_FIRST_LINE = 256
MODULES = "/node_modules/"
ENVIRONMENT = "agent/bin/python"  # of an installed agent in Python
SYSTEM = ("/usr/local/bin", "/usr/bin", "/bin")


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundAgent:
    """Say how an agent starts inside: the words of its command, the folders shown for it, and its PATH.

    `tools` has the real paths of the row's tools that this host has, by name. `origin` says where the program is from.
    """

    words: tuple[str, ...]
    toolchains: tuple[str, ...] = ()
    path: tuple[str, ...] = ()
    tools: Mapping[str, str] = field(default_factory=dict)
    origin: Origin = "path"


def find_agent(row: CodingAgent, folder: str = "", variables: Mapping[str, str] | None = None) -> FoundAgent:
    """Find an agent for a project's folder. Raises InvalidRequest with the command that installs it."""
    variables = os.environ if variables is None else variables
    search = variables.get("PATH", "")
    program = find_program(row.program, search)
    installed = newest(row.name) if program is None else None
    if program is None and installed is None:
        raise InvalidRequest(f"agent: {row.program} is not on this host's PATH; {_remedy(row)}")
    if installed is not None:
        program = _of(installed, row)
    found = ((name, find_program(name, search)) for name in row.tools)
    tools = {name: path for name, path in found if path is not None and _can_be_shown(path)}
    needed = interpreter_of(str(program))
    if needed and needed not in tools and (path := find_program(needed, search)) is not None:
        tools[needed] = path
    if needed and needed not in tools:
        raise InvalidRequest(
            f"agent: {escape_name(str(program))} is started by {escape_name(needed)}, which is not on this host's "
            f"PATH; install that, or {_remedy(row)}"
        )
    last = [os.path.dirname(path) for path in (tools.get(needed), installed and program) if path]
    python = [os.path.realpath(f"{installed.folder}/{ENVIRONMENT}")] if installed is not None else []
    shown = _outermost(prefix for path in (str(program), *python, *tools.values()) for prefix in folders_of(path))
    return FoundAgent(
        words=(str(program),), toolchains=shown, tools=tools, path=_path(search, shown, folder, *last),
        origin="path" if installed is None else "installed",
    )  # fmt: skip


def _remedy(row: CodingAgent) -> str:
    return f"get it: cloche agent install {row.name}" if row.package else f"install {row.title} as its maker says"


def _of(installed: Installed, row: CodingAgent) -> str:
    program = f"{installed.folder}/bin/{row.program}"
    if not os.access(program, os.X_OK):
        raise InvalidRequest(f"agent: {program} is missing; get it anew: cloche agent install {row.name}")
    return program


def find_program(name: str, search: str) -> str | None:
    """Return the real path of a program on a search path, of which relative folders are left out."""
    folders = [folder for folder in search.split(os.pathsep) if os.path.isabs(folder)]
    path = shutil.which(name, path=os.pathsep.join(folders))
    if path is None:
        return None
    manager = _manager_of(path, search)
    if manager is None:
        return os.path.realpath(path)
    real = _ask(manager, name, search)
    return real or find_program(name, os.pathsep.join(rest for rest in folders if rest != os.path.dirname(path)))


def _manager_of(path: str, search: str) -> str | None:
    """Return the version manager whose shim a program is: of volta, or of one with a folder `shims`."""
    real, folder = os.path.realpath(path), os.path.dirname(path)
    if os.path.basename(real) == "volta-shim":
        return f"{os.path.dirname(real)}/volta"
    if os.path.basename(folder) != "shims":
        return None
    root = os.path.dirname(folder)
    name = os.path.basename(root).lstrip(".")
    own = f"{root}/bin/{name}"
    return own if os.access(own, os.X_OK) else shutil.which(name, path=search)


def _ask(manager: str, name: str, search: str) -> str | None:
    """Ask a version manager of the user's for a program, outside of any project; None where it has none."""
    env = {**os.environ, "PATH": search}
    try:
        answer = subprocess.run(
            [manager, "which", name], cwd="/", env=env, stdin=subprocess.DEVNULL, capture_output=True, check=True,
            timeout=ASKING_S,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    path = os.path.realpath(os.fsdecode(answer.stdout.strip()))
    return path if os.path.isabs(os.fsdecode(answer.stdout.strip())) and os.access(path, os.X_OK) else None


def interpreter_of(program: str) -> str:
    """Return the name of the interpreter that a script's first line has looked for on PATH; empty for others."""
    try:
        with open(program, "rb") as file:
            line = file.readline(MOST_FIRST_LINE)
    except OSError:
        return ""
    words = os.fsdecode(line[2:]).split() if line.startswith(b"#!") else []
    if not words or os.path.basename(words[0]) != "env":
        return ""
    return next((word for word in words[1:] if not word.startswith("-") and "=" not in word), "")


def folders_of(program: str) -> Iterator[str]:
    """Yield the folders to show for a program: its own, its interpreter's, and the packages beside its own."""
    above, middle, _ = program.partition(MODULES)
    if middle:
        yield f"{above}/node_modules"
    root = os.path.dirname(program)
    root = os.path.dirname(root) if os.path.basename(root) == "bin" else root
    for prefix in prefixes_for(program):
        # Of a manager's folder, such as ~/.nvm, the one version suffices.
        yield root if _is_below(root, prefix) else prefix


def _can_be_shown(program: str) -> bool:
    """Tell whether the folders of a program may be shown: one that lies in a home itself is left out."""
    try:
        for folder in folders_of(program):
            if not is_shown_anyway(folder):
                os.close(check_folder(folder).fd)
    except InvalidRequest:
        return False
    return True


def _outermost(folders: Iterator[str]) -> tuple[str, ...]:
    chosen: list[str] = []
    for folder in sorted(set(folders)):
        if not is_shown_anyway(folder) and not any(_is_below(folder, top) for top in chosen):
            chosen.append(folder)
    return tuple(chosen)


def _path(search: str, shown: tuple[str, ...], project: str, *last: str) -> tuple[str, ...]:
    """Return PATH inside: the folders of the user's that are shown, the system's, and the last ones."""
    tops = (*shown, *([project] if project else []))
    own = [folder for folder in search.split(os.pathsep) if os.path.isabs(folder)]
    seen = [folder for folder in own if is_shown_anyway(folder) or _is_seen(os.path.realpath(folder), tops)]
    return tuple(dict.fromkeys((*seen, *SYSTEM, *last)))


def _is_seen(folder: str, tops: tuple[str, ...]) -> bool:
    return any(_is_below(folder, top) for top in tops)


def _is_below(path: str, top: str) -> bool:
    return path == top or path.startswith(f"{top}/")
