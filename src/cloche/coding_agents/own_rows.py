"""Rows of the user's own: the key `agents` of the user's configuration, in the form of a row of the table.

    agents:
      claude:
        env: {ANTHROPIC_MODEL: claude-opus-5}
      mine:
        program: my-agent
        hosts: [api.example.com]
        secrets: [MY_KEY@api.example.com]

A row with the name of one of the table replaces the fields that it names. Another one needs a `program`. A file of the
working directory cannot set the key at all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from cloche.config.origins import DEFAULT
from cloche.config.readers import hint_for, parse_hosts, parse_list
from cloche.config.settings import load_settings
from cloche.core.errors import InvalidRequest
from cloche.core.limits import parse_count, parse_cpus, parse_memory, parse_size
from cloche.core.record import replace

from .row import CodingAgent, Login, Package
from .table import TABLE

Read = Callable[..., Any]
MOST_FILE_CHARS = 64 << 10
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PROGRAM = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]*")


def known_agents() -> Mapping[str, CodingAgent]:
    """Return all agents by name: those of the table, as the user's configuration changes them, and the user's own.

    Raises InvalidRequest that names file and field of a wrong row.
    """
    settings = load_settings()
    if not settings.agents:
        return TABLE
    where = f"{settings.origins.get('agents', DEFAULT)}: agents"
    own = {name: read_row(name, fields, where=f"{where}.{name}") for name, fields in settings.agents.items()}
    return {**TABLE, **own}


def agent_named(name: str) -> CodingAgent:
    """Return the agent with a name. Raises InvalidRequest with those that there are."""
    agents = known_agents()
    if name not in agents:
        raise InvalidRequest(f"agent: {name[:80]!r} is unknown; {hint_for(name, agents)}")
    return agents[name]


def read_row(name: str, fields: Mapping[str, object], *, where: str) -> CodingAgent:
    """Return the row that a mapping describes; `where` precedes a field's name in messages. Raises InvalidRequest."""
    row = TABLE.get(name)
    if row is None:
        if "program" not in fields:
            raise InvalidRequest(f"{where}.program is missing: the name of the agent's program")
        row = CodingAgent(name=name, title=name, program=name)
    return replace(row, **_read(_FIELDS, fields, where))


def _read(readers: Mapping[str, tuple[str, Read]], fields: object, where: str) -> dict[str, Any]:
    if not isinstance(fields, Mapping):
        raise InvalidRequest(f"{where}: it must be a mapping of fields to values")
    values = {}
    for name, value in fields.items():
        if name not in readers:
            raise InvalidRequest(f"{where}: unknown field {str(name)[:80]!r}; {hint_for(str(name), readers)}")
        field, read = readers[name]
        values[field] = read(value, name=f"{where}.{name}")
    return values


def _text(value: object, *, name: str) -> str:
    if not isinstance(value, str) or not value or "\0" in value or len(value) > MOST_FILE_CHARS:
        raise InvalidRequest(f"{name}: it must be a text that is not empty, of at most {MOST_FILE_CHARS} characters")
    return value


def _program(value: object, *, name: str) -> str:
    text = _text(value, name=name)
    if not _PROGRAM.fullmatch(text):
        raise InvalidRequest(f"{name}: {text[:80]!r} must be the name of a program on PATH, without a folder")
    return text


def _texts(value: object, *, name: str) -> tuple[str, ...]:
    if not isinstance(value, list | tuple):
        raise InvalidRequest(f"{name}: it must be a list of texts")
    return tuple(_text(entry, name=f"{name}[{number}]") for number, entry in enumerate(value))


def _path(value: object, *, name: str) -> str:
    text = _text(value, name=name)
    if text.startswith("/") or {"", ".", ".."} & set(text.split("/")):
        raise InvalidRequest(f"{name}: {text[:80]!r} must be a path below the home folder, such as .agent/skills")
    return text


def _paths(value: object, *, name: str) -> tuple[str, ...]:
    return tuple(_path(text, name=f"{name}[{number}]") for number, text in enumerate(_texts(value, name=name)))


def _mapping(value: object, *, name: str, key: Read, read: Read) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{name}: it must be a mapping of names to values")
    return {key(inner, name=name): read(entry, name=f"{name}.{inner}") for inner, entry in value.items()}


def _variable(value: object, *, name: str) -> str:
    if not isinstance(value, str) or not _VARIABLE.fullmatch(value):
        raise InvalidRequest(f"{name}: {str(value)[:80]!r} is not the name of a variable")
    return value


def _value(value: object, *, name: str) -> str:
    """Return a variable's value; numbers and switches of YAML are texts here."""
    return str(value).lower() if isinstance(value, bool | int) else _text(value, name=name)


def _env(value: object, *, name: str) -> dict[str, str]:
    return _mapping(value, name=name, key=_variable, read=_value)


def _files(value: object, *, name: str) -> dict[str, str]:
    return _mapping(value, name=name, key=_path, read=_text)


def _key_files(value: object, *, name: str) -> dict[str, dict[str, str]]:
    return _mapping(value, name=name, key=_variable, read=_files)


def _copied(value: object, *, name: str) -> dict[str, tuple[str, ...]]:
    return _mapping(value, name=name, key=_path, read=_texts)


def _major(value: object, *, name: str) -> int:
    return int(parse_count(value, name=name))


def _registry(value: object, *, name: str) -> str:
    if value not in ("npm", "pypi"):
        raise InvalidRequest(f"{name}: it must be npm or pypi")
    return str(value)


def _package(value: object, *, name: str) -> Package:
    values = _read(_PACKAGE, value, name)
    if missing := sorted({"registry", "name"} - set(values)):
        raise InvalidRequest(f"{name}.{missing[0]} is missing")
    return Package(**values)


def _login(value: object, *, name: str) -> Login:
    values = _read(_LOGIN, value, name)
    if missing := sorted({"provider", "file", "template"} - set(values)):
        raise InvalidRequest(f"{name}.{missing[0]} is missing")
    return Login(**values)


def _ports(value: object, *, name: str) -> tuple[int, ...]:
    items = value if isinstance(value, list | tuple) else parse_list(value, name=name)
    return tuple(_major(item, name=name) for item in items)


def _same(read: Read, *names: str) -> dict[str, tuple[str, Read]]:
    return {name: (name, read) for name in names}


_PACKAGE: Mapping[str, tuple[str, Read]] = {
    **_same(_registry, "registry"), **_same(_text, "name", "python"), **_same(_texts, "scripts"),
    **_same(_major, "node"),
}  # fmt: skip
_LOGIN: Mapping[str, tuple[str, Read]] = {
    **_same(_text, "provider", "template"), **_same(_path, "file"), **_same(_texts, "command", "browser"),
    **_same(_env, "env"),
    **_same(_ports, "callback_ports"), **_same(_env, "env"),
}  # fmt: skip
_FIELDS: Mapping[str, tuple[str, Read]] = {
    **_same(_text, "title"),
    **_same(_program, "program"),
    **_same(_package, "package"),
    **_same(_texts, "tools", "arguments", "without_questions", "for_prompt", "to_resume", "passed", "secrets"),
    **_same(_env, "env"),
    **_same(_login, "login"),
    **_same(parse_hosts, "hosts", "telemetry"),
    **_same(_files, "first_files"),
    **_same(_key_files, "key_files"),
    **_same(_copied, "copied"),
    **_same(_paths, "shown", "state_to_review", "conversations"),
    **_same(_path, "instructions"),
    **_same(parse_cpus, "cpus"),
    **_same(_major, "pids"),
    "memory": ("memory_bytes", parse_memory),
    **{name: (f"{name}_bytes", parse_size) for name in ("disk", "workspace_disk", "state")},
}
