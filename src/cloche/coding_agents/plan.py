"""The keywords of an agent's sandbox, from its row, what was found on the host, and the user's options. Pure."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from cloche.core.errors import InvalidRequest
from cloche.core.record import dataclass, field

from .network_summary import never_asked
from .places import AgentPlace
from .row import CodingAgent

A_YEAR_S = 366 * 86400.0  # the longest that a sandbox may be kept


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOptions:
    """Hold what the user chose on the command line.

    `also` are further folders, read-only; `hosts`, `secrets` and `toolchains` those beside the row's; `host_ports` are
    ports of this host's loopback. `settings` are further keywords of a sandbox, which win. `asks` leaves the agent's
    own questions on. `prompt` runs it once, without a terminal.
    """

    also: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()
    toolchains: tuple[str, ...] = ()
    host_ports: tuple[int, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    asks: bool = False
    prompt: str | None = None
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Say how the agent's program starts inside: its words, the folders shown for it, and those first on PATH."""

    words: tuple[str, ...]
    toolchains: tuple[str, ...] = ()
    path: tuple[str, ...] = ()


def keywords(
    row: CodingAgent,
    place: AgentPlace,
    program: Program,
    options: AgentOptions,
    variables: Mapping[str, str],
    *,
    shown: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the keywords of `AsyncSandbox` for a new sandbox.

    `variables` are those of the user's shell, `shown` the real paths of the user's own folders that the agent sees.
    """
    given = [name for name in row.secrets if variables.get(name.partition("@")[0])]
    return {
        "workspace": place.folder,
        "workspace_disk": row.workspace_disk_bytes,
        "workspace_read": _apart((*shown, *map(_folder, options.also)), place.folder) or None,
        "name": place.sandbox,
        "keep": A_YEAR_S,
        "lifetime": A_YEAR_S,
        "backend": "local",
        "memory": row.memory_bytes,
        "cpus": row.cpus,
        "pids": row.pids,
        "disk": row.disk_bytes,
        "network": "allowlist",
        "network_allow": [*row.hosts, *options.hosts],
        "network_deny": never_asked(row.telemetry, allowed=(*row.hosts, *options.hosts)) or None,
        "on_network": "ask",
        "secrets": [*given, *options.secrets] or None,
        "toolchains": [*program.toolchains, *options.toolchains] or None,
        **options.settings,
    }


def _folder(text: str) -> str:
    """Return the real path of a folder of --also. Raises InvalidRequest if it is wanted for writing."""
    path, _, mode = text.rpartition(":") if text.endswith((":ro", ":rw")) else (text, "", "ro")
    if mode == "rw":
        raise InvalidRequest(f"--also: {path} can be shown read-only; for changes there, start another agent in it")
    return os.path.realpath(os.path.expanduser(path))


def _apart(folders: Sequence[str], project: str) -> list[str]:
    """Leave out folders that lie in each other, or in the project."""
    apart: list[str] = []
    for folder in dict.fromkeys(folders):
        if not any(f"{folder}/".startswith(f"{other}/") for other in (project, *apart)):
            apart.append(folder)
    return apart


def command(
    row: CodingAgent, program: Program, options: AgentOptions, *, home: str, project: str, resumes: bool = False
) -> list[str]:
    """Return the agent's command inside."""
    words = {'"{project}"': json.dumps(project), "{project}": project, "{home}": home}
    own = [_filled(word, words) for word in row.arguments]
    if options.prompt is not None:
        end = [word.replace("{prompt}", options.prompt) for word in row.for_prompt]
    else:
        end = [*row.to_resume] if resumes else []
    quiet = () if options.asks and options.prompt is None else row.without_questions
    quiet = tuple(word for word in quiet if word not in end)  # of a subcommand they stand behind it
    return [*program.words, *own, *quiet, *end, *options.arguments]


def _filled(text: str, words: Mapping[str, str]) -> str:
    for word, value in words.items():
        text = text.replace(word, value)
    return text


PASSED = ("TERM", "COLORTERM", "NO_COLOR", "FORCE_COLOR", "TERM_PROGRAM", "LANG", "LC_ALL", "TZ")


def environment(
    row: CodingAgent, program: Program, home: str, project: str, path: str, variables: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables of the agent's process beside the sandbox's own; `path` is the sandbox's PATH.

    Folders of the project on the user's own PATH come first, as in an environment that is activated there.
    """
    passed = {name: variables[name] for name in (*PASSED, *row.passed) if variables.get(name)}
    if _is_below(variables.get("VIRTUAL_ENV", ""), project):
        passed["VIRTUAL_ENV"] = variables["VIRTUAL_ENV"]
    own = [folder for folder in variables.get("PATH", "").split(os.pathsep) if _is_below(folder, project)]
    search_path = os.pathsep.join(dict.fromkeys((*own, *program.path, *path.split(os.pathsep))))
    return {**passed, "PATH": search_path, "XDG_CACHE_HOME": f"{home}/.cache", **row.env}


def _is_below(folder: str, above: str) -> bool:
    return f"{os.path.realpath(folder)}/".startswith(f"{above}/") if os.path.isabs(folder) else False
