"""A workspace's development environment as a manifest: languages, dependencies, set-up commands, `cloche-devenv.json`.

A manifest may come from a hostile folder, so it is parsed strictly and grants nothing: its limits and network only
lower the operator's settings (`provision.py`). It holds no secrets.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from cloche import hostfs
from cloche.config.keys import YAML_READERS
from cloche.config.readers import hint_for, parse_hosts
from cloche.core.errors import InvalidRequest, NotFound
from cloche.core.escape import escape_name
from cloche.core.letter_case import camel
from cloche.core.limits import REQUESTED_LIMITS
from cloche.core.record import dataclass, field

from .dependency_files import read_json
from .devenv_detection import DetectedLanguage, detect_languages, detect_setup, sources_of
from .ids import now

FILE = "cloche-devenv.json"
VERSION = 1
INDEX = "the operator's index"  # in `network`: the hosts that the operator allows package managers
MOST_BYTES = 256 << 10
MOST_ITEMS, MOST_WORDS, MOST_TEXT, MOST_VALUE = 64, 256, 4096, 1024
# The limits that a manifest may lower: its spelling -> keyword of a run.
LIMITS: Mapping[str, str] = {camel(row.keyword): row.keyword for row in REQUESTED_LIMITS}

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET = re.compile(r"API_?KEY|TOKEN|SECRET|PASSWORD|AUTH|CREDENTIAL|PRIVATE_KEY|ACCESS_KEY", re.IGNORECASE)
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{1,9})?Z")

Reader = Callable[[Any, str], Any]
Fields = Mapping[str, tuple[Reader, bool]]  # by the wire's name: reader, and whether it is required


@dataclass(frozen=True, slots=True, kw_only=True)
class DependencySource:
    """Hold a workspace's file of dependencies."""

    ecosystem: str
    manager: str
    file: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Hold a set-up command and the hosts that it needs, None if unspecified."""

    run: tuple[str, ...]
    network: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DevEnvManifest:
    """Hold a manifest. `limits` are as written; `workspace_path` is relative to the manifest's folder."""

    name: str
    workspace_path: str = "."
    languages: tuple[DetectedLanguage, ...] = ()
    dependencies: tuple[DependencySource, ...] = ()
    setup: tuple[Setup, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[str, str | float] = field(default_factory=dict)
    created_at: str

    def as_dict(self) -> dict[str, Any]:
        """Return it in the format of the wire and the file."""
        return {
            "version": VERSION,
            "name": self.name,
            "workspacePath": self.workspace_path,
            "languages": [{"name": a.name, "version": a.version, "evidence": a.evidence} for a in self.languages],
            "dependencies": [
                {"ecosystem": a.ecosystem, "manager": a.manager, "file": a.file} for a in self.dependencies
            ],
            "setup": [
                {"run": list(a.run), **({} if a.network is None else {"network": list(a.network)})} for a in self.setup
            ],
            "env": dict(self.env),
            "limits": dict(self.limits),
            "createdAt": self.created_at,
        }


def field_names() -> frozenset[str]:
    """Return the names of a manifest's fields, with which messages about them begin."""
    return frozenset(_MANIFEST)


def default_name(path: str) -> str:
    """Return the default name of a workspace's manifest: its folder's name and eight digits of its path's SHA-256."""
    folder = re.sub(r"[^A-Za-z0-9._-]+", "-", os.path.basename(os.path.normpath(path))).strip(".-_")[:64]
    return f"{folder or 'workspace'}-{hashlib.sha256(os.fsencode(os.path.normpath(path))).hexdigest()[:8]}"


def generate(folder: int, path: str, *, notes: list[str] | None = None) -> DevEnvManifest:
    """Return a manifest of the workspace behind a descriptor. The absolute `path` only gives it a name.

    `notes` gets a line for each file that is left out. Raises OSError for an unreadable folder.
    """
    lines: list[str] = [] if notes is None else notes
    managed = sources_of(folder, lines)
    return DevEnvManifest(
        name=default_name(path),
        languages=detect_languages(folder, managed, lines),
        dependencies=tuple(DependencySource(ecosystem=a.ecosystem, manager=a.manager, file=a.file) for a in managed),
        setup=tuple(Setup(run=run, network=(INDEX,)) for run in detect_setup(managed)),
        created_at=now(),
    )


def parse_manifest(document: object) -> DevEnvManifest:
    """Return a manifest from plain data. Raises InvalidRequest, which names the field and its fault."""
    read = _read_fields(document, "manifest", _MANIFEST)
    del read["version"]
    return DevEnvManifest(**{"created_at": now(), **read})


def read_manifest(folder: int) -> DevEnvManifest:
    """Return the manifest of an open folder. Raises NotFound, and InvalidRequest for an invalid one."""
    try:
        fd, facts = hostfs.open_regular(FILE, folder)
        with open(fd, "rb") as file:
            data = file.read(MOST_BYTES + 1) if facts.st_size <= MOST_BYTES else b""
    except FileNotFoundError:
        raise NotFound(f"there is no {FILE} here; `cloche devenv generate` writes one") from None
    except OSError as error:
        raise InvalidRequest(
            f"{FILE} cannot be read: {error.strerror}; it must be a regular file, not a link"
        ) from error
    if not data or len(data) > MOST_BYTES:
        raise InvalidRequest(f"{FILE} is empty, or has more than {MOST_BYTES} bytes")
    try:
        document = read_json(data)
    except ValueError as error:
        raise InvalidRequest(f"{FILE} is not JSON: {error}") from None
    return parse_manifest(document)


def write_manifest(folder: int, manifest: DevEnvManifest) -> None:
    """Write the manifest into an open folder, atomically. A link in its place is replaced. Raises InvalidRequest."""
    data = (json.dumps(manifest.as_dict(), indent=2, ensure_ascii=False) + "\n").encode()
    try:
        hostfs.replace(folder, FILE, data, mode=0o644)
    except OSError as error:
        raise InvalidRequest(f"{FILE} cannot be written: {error.strerror}") from error


# Readers of fields. A reader gets the value, and the name for messages.


def _read_fields(value: object, where: str, fields: Fields) -> dict[str, Any]:
    """Return the values of a mapping by the names of their fields in Python (snake case)."""
    if not isinstance(value, Mapping):
        _refuse(where, "must be a mapping")
    unknown = [str(key) for key in value if key not in fields]
    if unknown:
        named = ", ".join(repr(escape_name(key[:80])) for key in unknown[:10])
        _refuse(where, f"unknown field {named}; {hint_for(unknown[0], list(fields))}")
    missing = [key for key, (_, is_needed) in fields.items() if is_needed and key not in value]
    if missing:
        _refuse(where, f"{', '.join(missing)} is missing")
    prefix = "" if where == "manifest" else f"{where}."
    return {_snake(key): fields[key][0](item, f"{prefix}{key}") for key, item in value.items()}


def _snake(key: str) -> str:
    return re.sub(r"[A-Z]", lambda match: f"_{match[0].lower()}", key)


def _refuse(where: str, problem: str) -> NoReturn:
    raise InvalidRequest(f"{where}: {problem}")


def _version(value: object, where: str) -> int:
    if value != VERSION or isinstance(value, bool):
        _refuse(where, f"{str(value)[:80]!r} is an unknown version; this Cloche reads version {VERSION}")
    return VERSION


def _text(value: object, where: str, max_chars: int = MOST_TEXT) -> str:
    if not isinstance(value, str) or not value or len(value) > max_chars or "\0" in value or not _is_utf8(value):
        _refuse(where, f"must be text of 1 to {max_chars} characters")
    return value


def _is_utf8(text: str) -> bool:
    return not any("\ud800" <= char <= "\udfff" for char in text)


def _short(value: object, where: str) -> str:
    text = _text(value, where, 256)
    if not text.isprintable():
        _refuse(where, "must be text of one line")
    return text


def _short_or_none(value: object, where: str) -> str | None:
    return None if value is None else _short(value, where)


def _name(value: object, where: str) -> str:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        _refuse(where, "must be 1 to 128 letters, digits, . _ and -")
    return value


def _path(value: object, where: str) -> str:
    text = _short(value, where)
    if text.startswith("/") or ".." in text.split("/"):
        _refuse(where, f"{escape_name(text)!r} leads out of the manifest's folder; write . or a path below it")
    return text


def _time(value: object, where: str) -> str:
    if not isinstance(value, str) or not _TIME.fullmatch(value):
        _refuse(where, "must be a time in UTC, such as 2026-01-31T12:00:00Z")
    return value


def _items(value: object, where: str, max_items: int = MOST_ITEMS) -> Sequence[object]:
    if not isinstance(value, list) or len(value) > max_items:
        _refuse(where, f"must be a list of at most {max_items}")
    return value


def _list_of(make: Callable[..., Any], fields: Fields) -> Reader:
    def read(value: object, where: str) -> tuple[Any, ...]:
        items = enumerate(_items(value, where))
        return tuple(make(**_read_fields(item, f"{where}[{number}]", fields)) for number, item in items)

    return read


def _command(value: object, where: str) -> tuple[str, ...]:
    command = tuple(_text(item, f"{where}[{number}]") for number, item in enumerate(_items(value, where, MOST_WORDS)))
    if not command:
        _refuse(where, "must be a command, a list of words")
    return command


def _network(value: object, where: str) -> tuple[str, ...]:
    """Read hosts in the format of `network_allow`, or the phrase for the operator's index."""
    listed = [_text(item, f"{where}[{number}]") for number, item in enumerate(_items(value, where))]
    return tuple(item if item == INDEX else parse_hosts([item], name=where)[0] for item in listed)


def _env(value: object, where: str) -> dict[str, str]:
    if not isinstance(value, Mapping) or len(value) > MOST_ITEMS:
        _refuse(where, f"must be a mapping of at most {MOST_ITEMS} names to texts")
    for key, text in value.items():
        named = f"{where}.{escape_name(str(key)[:80])}"
        if not isinstance(key, str) or not _VARIABLE.fullmatch(key) or len(key) > MOST_VALUE:
            _refuse(named, "is not a name of a variable: letters, digits and _, not first a digit")
        if _SECRET.search(key):
            _refuse(named, "a manifest holds no secrets; leave it out, and give it to the program itself")
        if not isinstance(text, str) or len(text) > MOST_VALUE or "\0" in text or not _is_utf8(text):
            _refuse(named, f"must be text of at most {MOST_VALUE} characters")
    return dict(value)


def _limits(value: object, where: str) -> dict[str, str | float]:
    if not isinstance(value, Mapping):
        _refuse(where, "must be a mapping of limits to amounts")
    for key, amount in value.items():
        named = f"{where}.{escape_name(str(key)[:80])}"
        if key not in LIMITS:
            _refuse(named, f"unknown limit; {hint_for(str(key), list(LIMITS))}")
        if isinstance(amount, bool) or not isinstance(amount, str | int | float) or len(str(amount)) > 32:
            _refuse(named, "must be a number, or text such as 256m or 30s")
        YAML_READERS[LIMITS[key]](amount, name=named)
    return dict(value)


_LANGUAGE: Fields = {"name": (_short, True), "version": (_short_or_none, False), "evidence": (_short, True)}
_SOURCE: Fields = {"ecosystem": (_short, True), "manager": (_short, True), "file": (_path, True)}
_SETUP: Fields = {"run": (_command, True), "network": (_network, False)}
_MANIFEST: Fields = {
    "version": (_version, True), "name": (_name, True), "workspacePath": (_path, False),
    "languages": (_list_of(DetectedLanguage, _LANGUAGE), False),
    "dependencies": (_list_of(DependencySource, _SOURCE), False),
    "setup": (_list_of(Setup, _SETUP), False), "env": (_env, False), "limits": (_limits, False),
    "createdAt": (_time, False),
}  # fmt: skip
