"""A coding agent as data: what it needs to start inside, and what is done with what it leaves.

All paths of an agent are relative to its home folder. Hosts are names, as rules of the network have them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from cloche.core.limits import MIB
from cloche.core.record import dataclass, field

Registry = Literal["npm", "pypi"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """Say where an agent is installed from.

    `scripts` are the only packages whose install scripts run, each in a sandbox without a network. `python` names the
    versions of the interpreter that a PyPI package may have, the best first, as in "3.12,3.11"; empty for any. `node`
    is the least major version of Node.
    """

    registry: Registry
    name: str
    scripts: tuple[str, ...] = ()
    python: str = ""
    node: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Login:
    """Say how an agent logs in by itself, and how its file of credentials is written from placeholders.

    `provider` is one of `Secret.login`. `file` is the agent's own, `template` its content: `{access_token}` and the
    like stand for the placeholders of the captured fields, `{expires_ms}` for the end of the access token,
    `{account_id}` for the account in a web token, `{now}` for the time. `command` are the arguments that begin a login,
    `env` variables for it, and with it. `browser` are the origins whose links may be opened on the host, with the
    beginning of their paths or without; `callback_ports` those that the agent listens on, beside any free one.
    """

    provider: str
    file: str
    template: str
    command: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    browser: tuple[str, ...] = ()
    callback_ports: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CodingAgent:
    """Describe one coding agent.

    `program` is looked for on the user's PATH, then among what `cloche agent install` installed. `tools` are programs
    that it uses, shown if the host has them. `arguments` switch off its own sandbox, `without_questions` its own
    questions; `for_prompt` has `{prompt}`, and runs it once without a terminal: words of `without_questions` in it are
    not repeated before it; `to_resume` goes on with the last conversation of the folder, if there is a
    file of `conversations`, patterns of one name each, or these are not known. `env` are variables inside,
    `passed` names of the user's own that are passed on: never those of secrets.

    `secrets` are names of the user's variables that become secrets, if they are set; each has a row in `PROVIDERS`, or
    its hosts behind `@`. `login` is its own login. `hosts` are those it needs beside those of its secrets; `telemetry`
    are refused, and told once.

    `first_files` are written into its home: JSON is merged into what is there, another file is written once.
    `key_files` are those that are written if a secret is set, by its name. `{project}` and `{home}` are replaced in
    them and in `arguments`; in `key_files` also `{NAME}`, the secret's placeholder, and `{NAME_end}`, the last 20
    characters of it. `shown` are
    folders of the user's own home that it sees, read-only. `copied` are single files that are copied at each start: of
    JSON and TOML the keys listed, of others the whole text. Never credentials. `state_to_review` are patterns of kept
    files that make it run something or that it obeys: a change is shown before the next session loads it. `**` matches
    all below a folder; `FILE#KEY.KEY` are these keys alone of a JSON file, `*` any key.
    `instructions` is the file in which it is told its limits.
    """

    name: str
    title: str
    program: str
    package: Package | None = None
    tools: tuple[str, ...] = ("git", "rg", "node")
    arguments: tuple[str, ...] = ()
    without_questions: tuple[str, ...] = ()
    for_prompt: tuple[str, ...] = ("{prompt}",)
    to_resume: tuple[str, ...] = ()
    conversations: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    passed: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()
    login: Login | None = None
    hosts: tuple[str, ...] = ()
    telemetry: tuple[str, ...] = ()
    first_files: Mapping[str, str] = field(default_factory=dict)
    key_files: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    shown: tuple[str, ...] = ()
    copied: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    state_to_review: tuple[str, ...] = ()
    instructions: str = ""
    memory_bytes: int = 2048 * MIB
    cpus: float = 2.0
    pids: int = 512
    disk_bytes: int = 4096 * MIB
    workspace_disk_bytes: int = 4096 * MIB
    state_bytes: int = 4096 * MIB
