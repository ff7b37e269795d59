"""Parse SKILL.md and `cloche-skill.yaml`: bytes in, values and faults out. Pure.

SKILL.md has the published Agent Skills format, whose validators refuse unknown keys. So Cloche's additions are in a
separate, optional file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from cloche.agent.catalog import TOOLS
from cloche.config.keys import BY_NAME, LIMIT_FIELDS, YAML_READERS
from cloche.config.readers import hint_for
from cloche.core.errors import InvalidRequest
from cloche.core.languages import LANGUAGES, language_named
from cloche.core.limits import KIB, REQUESTED_LIMITS
from cloche.core.policy import preset_named
from cloche.core.record import fields

from .skill import CARD, MANIFEST, Card, Fault, SkillManifest, SkillRequests

MOST_CARD_BYTES = 256 * KIB
MOST_MANIFEST_BYTES = 64 * KIB
MOST_DEPTH = 8
MOST_NAME, MOST_DESCRIPTION, MOST_COMPATIBILITY = 64, 1024, 500
MOST_METADATA, MOST_SCRIPTS, MOST_TEXT = 64, 64, 1024
# What a skill may ask for of the limits, as a run takes them.
LIMIT_KEYS = tuple(row.keyword for row in REQUESTED_LIMITS)

_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_SCRIPT_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
_CARD_KEYS = ("name", "description", "license", "compatibility", "metadata", "allowed-tools")
_FENCE = "---"
Faults = list[Fault]


def read_card(data: bytes, folder_name: str) -> tuple[Card | None, list[Fault], list[str]]:
    """Return what SKILL.md says (None when that is not usable), all its faults, and remarks that are no faults."""
    faults: Faults = []
    halves = _front_matter(data, faults)
    if halves is None:
        return None, faults, []
    document = _mapping(halves[0], CARD, faults)
    if document is None:
        return None, faults, []
    notes = [f"{CARD}: {key!r} is not a key of the format, and is ignored" for key in document if key not in _CARD_KEYS]
    card = Card(
        name=_skill_name(document, folder_name, faults),
        description=_text(document, "description", MOST_DESCRIPTION, faults, is_needed=True),
        license=_text(document, "license", MOST_TEXT, faults),
        compatibility=_text(document, "compatibility", MOST_COMPATIBILITY, faults),
        metadata=_metadata(document.get("metadata"), faults),
        allowed_tools=_allowed_tools(document.get("allowed-tools"), faults),
        instructions=halves[1],
    )
    return card, faults, notes


def read_manifest(data: bytes) -> tuple[SkillManifest, list[Fault]]:
    """Return what `cloche-skill.yaml` says, and all its faults."""
    faults: Faults = []
    text = _decoded(data, MANIFEST, MOST_MANIFEST_BYTES, faults)
    document = _mapping(text, MANIFEST, faults) if text is not None else None
    if document is None:
        return SkillManifest(), faults
    values: dict[str, Any] = {}
    for key, value in document.items():
        reader = _MANIFEST_READERS.get(key)
        if reader is None:
            faults.append(Fault(file=MANIFEST, key=key[:80], problem=_unknown(key, _MANIFEST_READERS)))
        elif value is not None:
            values |= _tried(reader, value, key, faults)
    requests = {spec.name: values[spec.name] for spec in fields(SkillRequests) if spec.name in values}
    return SkillManifest(
        asked=SkillRequests(**requests),
        runtime=values.get("runtime"),
        entry=values.get("entry"),
        scripts=values.get("scripts", {}),
    ), faults


def _front_matter(data: bytes, faults: Faults) -> tuple[str, str] | None:
    """Split SKILL.md into its front matter, its lines where they were, and the instructions."""
    text = _decoded(data, CARD, MOST_CARD_BYTES, faults)
    if text is None:
        return None
    first, *lines = text.split("\n")
    ends = [number for number, line in enumerate(lines) if line.rstrip() == _FENCE]
    if first.rstrip() != _FENCE or not ends:
        problem = f"begins with no front matter: a line {_FENCE}, keys such as name and description, a line {_FENCE}"
        faults.append(Fault(file=CARD, problem=problem))
        return None
    front, body = lines[: ends[0]], lines[ends[0] + 1 :]
    if sum(map(len, front)) > MOST_MANIFEST_BYTES:
        faults.append(Fault(file=CARD, problem=f"has a front matter of more than {MOST_MANIFEST_BYTES} bytes"))
        return None
    return "\n".join(["", *front]), "\n".join(body).strip()


def _decoded(data: bytes, file: str, max_bytes: int, faults: Faults) -> str | None:
    if len(data) > max_bytes:
        faults.append(Fault(file=file, problem=f"has more than {max_bytes} bytes"))
        return None
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        faults.append(Fault(file=file, problem=f"is not UTF-8 (byte {error.start})"))
        return None


def _mapping(text: str, file: str, faults: Faults) -> Mapping[str, Any] | None:
    """Return the one mapping of a text, plain data that is no larger than it looks."""
    try:
        document = _parsed(text, file)
    except InvalidRequest as error:
        position, _, problem = str(error).removeprefix(file).partition(": ")
        faults.append(Fault(file=f"{file}{position}", problem=problem))
        return None
    if document is None:
        document = {}
    if not isinstance(document, Mapping) or not all(isinstance(key, str) for key in document):
        faults.append(Fault(file=file, problem="is to hold keys with values, and the keys are to be text"))
        return None
    return document


def _parsed(text: str, file: str) -> object:
    from cloche.config.plain_yaml import parse_yaml  # yaml is imported only where there is a skill to be read

    return parse_yaml(text, file, most_depth=MOST_DEPTH, takes_anchors=False)


def _skill_name(document: Mapping[str, Any], folder_name: str, faults: Faults) -> str:
    name = _text(document, "name", MOST_NAME, faults, is_needed=True)
    if not name:
        return ""
    if not _NAME.fullmatch(name):
        problem = f"{name!r} must consist of small letters a-z, digits, and single hyphens between them"
        faults.append(Fault(file=CARD, key="name", problem=problem))
    elif name != folder_name:
        problem = f"{name!r} is not the name of its folder, {folder_name!r}; make them equal"
        faults.append(Fault(file=CARD, key="name", problem=problem))
    return name


def _text(document: Mapping[str, Any], key: str, max_chars: int, faults: Faults, *, is_needed: bool = False) -> str:
    value = document.get(key)
    problem = ""
    if value is None:
        problem = "is missing" if is_needed else ""
    elif not isinstance(value, str):
        problem = f"must be text, not {_kind(value)}; put it in quotes"
    elif not value.strip():
        problem = "is empty"
    elif len(value) > max_chars:
        problem = f"has {len(value)} characters; at most {max_chars} are allowed"
    if problem:
        faults.append(Fault(file=CARD, key=key, problem=problem))
    return value.strip() if isinstance(value, str) and not problem else ""


def _metadata(value: object, faults: Faults) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, Mapping) or len(value) > MOST_METADATA:
        problem = f"must be a mapping of at most {MOST_METADATA} names to texts"
        faults.append(Fault(file=CARD, key="metadata", problem=problem))
        return {}
    entries: dict[str, str] = {}
    for name, item in value.items():
        if isinstance(item, Mapping | list | set | bytes) or len(str(item)) > MOST_TEXT:
            problem = f"must be a text of at most {MOST_TEXT} characters"
            faults.append(Fault(file=CARD, key=f"metadata.{str(name)[:80]}", problem=problem))
        else:
            entries[str(name)] = str(item)
    return entries


def _allowed_tools(value: object, faults: Faults) -> tuple[str, ...]:
    """Return the names; an agent's own, which Cloche shows and grants nothing for."""
    if value is None:
        return ()
    tools = value.split() if isinstance(value, str) else value
    if not isinstance(tools, list) or not all(isinstance(tool, str) and len(tool) <= MOST_TEXT for tool in tools):
        problem = "must be names in one text with blanks between, or a list of names"
        faults.append(Fault(file=CARD, key="allowed-tools", problem=problem))
        return ()
    return tuple(tools)


def _tried(reader: Callable[[Any, str], Iterator[Any]], value: object, key: str, faults: Faults) -> dict[str, Any]:
    """Read one key of the manifest; a reader yields a keyword with its value, or an error."""
    values: dict[str, Any] = {}
    for result in reader(value, key):
        if isinstance(result, Fault):
            faults.append(result)
        else:
            values[result[0]] = result[1]
    return values


def _by_configuration(value: object, key: str, *, spelled: str | None = None) -> Iterator[Any]:
    """Read a key with the meaning that configuration gives it."""
    try:
        yield from YAML_READERS[spelled or key.rpartition(".")[2]](value, name=key).items()
    except InvalidRequest as error:
        yield _fault(key, str(error).removeprefix(f"{key}: "))


def _read_limits(value: object, key: str) -> Iterator[Any]:
    if not isinstance(value, Mapping):
        yield _fault(key, f"must be a mapping of limits to amounts, not {_kind(value)}")
        return
    limits: dict[str, float] = {}
    for name, amount in value.items():
        limit = isinstance(name, str) and _LIMIT_SPELLINGS.get(name)
        if not limit:
            yield _fault(f"{key}.{str(name)[:80]}", _unknown(str(name), LIMIT_KEYS))
            continue
        for result in _by_configuration(amount, f"{key}.{name}"):
            if isinstance(result, Fault):
                yield result
            elif limits.setdefault(limit, result[1]) != result[1]:
                yield _fault(f"{key}.{name}", f"says something else about {limit} than another key; keep one of them")
    yield "limits", limits


def _read_network(value: object, key: str) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for name in value:
            if name != "hosts":
                yield _fault(f"{key}.{str(name)[:80]}", "unknown key; known keys: hosts")
        value = value.get("hosts", [])
        key = f"{key}.hosts"
    for result in _by_configuration(value, key, spelled="network"):
        if isinstance(result, Fault):
            yield result
        else:
            keyword, value_given = result
            yield (
                ("hosts", value_given)
                if keyword == "network_allow"
                else ("network", "open" if value_given == "on" else value_given)
            )


def _read_runtime(value: object, key: str) -> Iterator[Any]:
    try:
        yield "runtime", language_named(value).name  # type: ignore[arg-type]  # anything else fails below
    except InvalidRequest as error:
        yield _fault(key, str(error))
    except AttributeError:
        yield _fault(key, f"must be the name of a language, one of {', '.join(LANGUAGES)}")


def _read_preset(value: object, key: str) -> Iterator[Any]:
    try:
        yield "preset", preset_named(value).name  # type: ignore[arg-type]  # it refuses what is no text
    except InvalidRequest as error:
        yield _fault(key, str(error))


def _read_tools(value: object, key: str) -> Iterator[Any]:
    listed = value.split() if isinstance(value, str) else value
    if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
        yield _fault(key, "must be a list of names of tools")
        return
    for name in listed:
        if name not in TOOLS:
            yield _fault(key, f"there is no tool {name[:80]!r}; known tools: {', '.join(TOOLS)}")
    yield "tools", tuple(dict.fromkeys(name for name in listed if name in TOOLS))


def _read_entry(value: object, key: str) -> Iterator[Any]:
    if isinstance(value, str) and value.strip():
        yield "entry", value.strip()
    else:
        yield _fault(key, "must be the name or the path of a script")


def _read_scripts(value: object, key: str) -> Iterator[Any]:
    if not isinstance(value, Mapping) or len(value) > MOST_SCRIPTS:
        yield _fault(key, f"must be a mapping of at most {MOST_SCRIPTS} names to paths")
        return
    scripts: dict[str, Mapping[str, str]] = {}
    for name, said in value.items():
        where = f"{key}.{str(name)[:80]}"
        if not isinstance(name, str) or not _SCRIPT_NAME.fullmatch(name):
            yield _fault(where, "is not a name for a script: letters, digits, _ . and -, at most 64")
            continue
        entry: Any = {"path": said} if isinstance(said, str) else said
        yield from _script_faults(entry, where)
        if isinstance(entry, Mapping):
            fields = {
                keyword: entry[keyword].strip() for keyword in _SCRIPT_KEYS if isinstance(entry.get(keyword), str)
            }
            scripts[name] = fields
    yield "scripts", scripts


_SCRIPT_KEYS = ("path", "runtime", "description")


def _script_faults(entry: object, where: str) -> Iterator[Fault]:
    if not isinstance(entry, Mapping):
        yield _fault(where, f"must be a path, or a mapping with {', '.join(_SCRIPT_KEYS)}")
        return
    for keyword, value in entry.items():
        if keyword not in _SCRIPT_KEYS:
            yield _fault(f"{where}.{str(keyword)[:80]}", _unknown(str(keyword), _SCRIPT_KEYS))
        elif not isinstance(value, str) or not value.strip() or len(value) > MOST_TEXT:
            yield _fault(f"{where}.{keyword}", f"must be a text of at most {MOST_TEXT} characters")
    if isinstance(entry.get("runtime"), str):
        yield from (
            result for result in _read_runtime(entry["runtime"], f"{where}.runtime") if isinstance(result, Fault)
        )
    if "path" not in entry:
        yield _fault(f"{where}.path", "is missing")


# As configuration spells them, but for the fields of `Limits`.
_LIMIT_SPELLINGS: Mapping[str, str] = {
    spelling: limit
    for limit in LIMIT_KEYS
    for spelling in BY_NAME[limit].readers()
    if spelling == limit or spelling != LIMIT_FIELDS[limit]
}

_MANIFEST_READERS: Mapping[str, Callable[[Any, str], Iterator[Any]]] = {
    "runtime": _read_runtime,
    "entry": _read_entry,
    "scripts": _read_scripts,
    "preset": _read_preset,
    "limits": _read_limits,
    "network": _read_network,
    "packages": _by_configuration,
    "tools": _read_tools,
    "require": _by_configuration,
}


def _fault(key: str, problem: str) -> Fault:
    return Fault(file=MANIFEST, key=key, problem=problem)


def _unknown(key: str, known: Collection[str]) -> str:
    return f"unknown key; {hint_for(key, known)}"


def _kind(value: object) -> str:
    kinds = {dict: "a mapping", list: "a list", bool: "true or false", int: "a number", float: "a number"}
    return kinds.get(type(value), type(value).__name__)
