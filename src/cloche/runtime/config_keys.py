"""Every key of configuration: the one word it stands for, the spellings it is accepted under, how its value
is read.

Theory of operation: a source (a file, the environment, the arguments) becomes a `Layer`, a mapping from words
to wishes. Some spellings say several words at once (`require` is a level and controls; a network may bring
its hosts), so every reader returns a mapping. Within one source two spellings may say the same word only if
they say the same thing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

from cloche.core.errors import InvalidRequest
from cloche.core.languages import LANGUAGES, language_named
from cloche.core.levels import Control, Level, parse_requirements
from cloche.core.limits import ALIASES
from cloche.core.policy import ContainerRuntime, Fallback, ScreenMode, parse_network
from cloche.core.presets import preset_named
from cloche.core.tiers import parse_backend, parse_tier
from cloche.core.units import format_size, parse_duration, parse_size

from .config_autofix import read_autofix, read_one

Prefer = Literal["strongest", "fastest"]
AUTO = "auto"

# The word of each limit, with its field in `Limits`.
LIMIT_FIELDS: Mapping[str, str] = {
    "timeout": "timeout_s",
    "memory": "memory_bytes",
    "cpus": "cpus",
    "pids": "pids",
    "disk": "disk_bytes",
    "inodes": "inodes",
    "tmp": "tmp_bytes",
    "output_limit": "output_bytes",
    "flood_limit": "flood_bytes",
}
_LIMIT_WORDS = {field: word for word, field in LIMIT_FIELDS.items()}

# The words that are fields of `Policy` under the same name and need no further thought.
POLICY_WORDS = (
    "network_allow", "packages", "languages", "screen", "require_controls", "best_effort",
    "user", "seccomp", "level", "runtime", "warm", "preload", "fallback", "trusted",
)  # fmt: skip

ANY_LANGUAGE = "*"
AUDIT_KEEPS = ("code", "output")
# The agent's own folders, which the operator keeps on the host.
ROOTS = ("memory", "configs")
MAX_TEXT_CHARS = 4096

_HOST = re.compile(r"(\*\.)?[a-z0-9]([a-z0-9.-]*[a-z0-9])?(:[0-9]{1,5})?")
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@+-]*")
_MODULE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*")
_PACKAGE = re.compile(r"[A-Za-z0-9][^\x00-\x1f\x7f]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """Hold what one source says about one word: the value, the source, and the key as it is written there."""

    value: Any
    origin: str
    key: str


Layer = Mapping[str, Wish]
Words = Mapping[str, Any]
Reader = Callable[..., Words]


def _read_text(value: object, *, name: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise InvalidRequest(f"{name}: {_shown(value)} is not text")
    return value.strip()


def _read_list(value: object, *, name: str) -> tuple[str, ...]:
    """Return words from a list, or from text with commas."""
    items: Iterable[object] = value.split(",") if isinstance(value, str) else _items(value, name=name)
    return tuple(dict.fromkeys(_read_text(item, name=name) for item in items if item != ""))


def _items(value: object, *, name: str) -> Iterable[object]:
    if isinstance(value, Mapping | bytes) or not isinstance(value, Iterable):
        raise InvalidRequest(f"{name}: {_shown(value)} is not a list")
    return value


def _matching(pattern: re.Pattern[str], texts: Iterable[str], *, name: str, what: str) -> tuple[str, ...]:
    checked = tuple(texts)
    for text in checked:
        if not pattern.fullmatch(text):
            raise InvalidRequest(f"{name}: {text!r} is not {what}")
    return checked


def _read_backend(value: object, *, name: str) -> Words:
    return {"backend": parse_backend(value, name=name)}


def _read_runtime(value: object, *, name: str) -> Words:
    """Read the name of a backend, or docker's own runtime, which is docker and never gVisor (C3)."""
    word = value.strip().lower() if isinstance(value, str) else ""
    if word in get_args(ContainerRuntime):
        return {"backend": "docker", "runtime": word}
    try:
        return _read_backend(value, name=name)
    except InvalidRequest as error:
        raise InvalidRequest(f"{error}; or {', '.join(get_args(ContainerRuntime))}: docker's own runtime") from None


def _read_tier(value: object, *, name: str) -> Words:
    return {"tier": parse_tier(value, name=name)}


def _read_preset(value: object, *, name: str) -> Words:
    text = _read_text(value, name=name)
    try:
        return {"preset": preset_named(text).name}
    except InvalidRequest as error:
        raise InvalidRequest(f"{name}: {error}") from None


def _read_network(value: object, *, name: str) -> Words:
    """Read a mode; a list of hosts, or `allowlist:host,host` in text, is the mode `allowlist` with these
    hosts.
    """
    if isinstance(value, str) and value.strip().lower().startswith("allowlist:"):
        return _read_network(_read_list(value.partition(":")[2], name=name), name=name)
    if isinstance(value, list | tuple | set | frozenset):
        return {"network": "allowlist", **_read_hosts(value, name=name)}
    is_word_on = value is True or (isinstance(value, str) and value.strip().lower() in {"true", "on"})
    return {"network": "on" if is_word_on else parse_network(value, name=name)}


def _read_hosts(value: object, *, name: str) -> Words:
    hosts = (host.lower() for host in _read_list(value, name=name))
    return {"network_allow": _matching(_HOST, hosts, name=name, what="a host name")}


def _read_packages(value: object, *, name: str) -> Words:
    if isinstance(value, str) and value.strip().lower() in {"auto", "none", ""}:
        return {"packages": "auto" if value.strip().lower() == "auto" else ()}
    listed = _read_list(value, name=name)
    return {"packages": _matching(_PACKAGE, listed, name=name, what="the name of a package")}


def _read_warm(value: object, *, name: str) -> Words:
    word = {"true": True, "on": True, "false": False, "off": False}.get(str(value).strip().lower())
    if word is None or not isinstance(value, bool | str):
        raise InvalidRequest(f"{name}: {_shown(value)} is neither true nor false")
    return {"warm": word}


def _read_audit(value: object, *, name: str) -> Words:
    """Read on or off; a folder means on, in that folder."""
    word = {"true": True, "on": True, "false": False, "off": False}.get(str(value).strip().lower())
    if word is not None and isinstance(value, bool | str):
        return {"audit": word}
    folder = os.path.expanduser(_read_text(os.fspath(value) if isinstance(value, os.PathLike) else value, name=name))
    if not os.path.isabs(folder) or "\0" in folder:
        raise InvalidRequest(f"{name}: {_shown(value)} is neither on nor off, nor the absolute path of a folder")
    return {"audit": True, "audit_folder": os.path.normpath(folder)}


def _read_audit_keep(value: object, *, name: str) -> Words:
    listed = [] if value is False or value == "none" else _read_list(value, name=name)
    return {"audit_keep": tuple(_one_of(AUDIT_KEEPS, what, name=name) for what in listed)}


def _read_audit_keep_age(value: object, *, name: str) -> Words:
    return {"audit_keep_age": None if value == "none" else parse_duration(value, name=name)}


def _read_audit_keep_size(value: object, *, name: str) -> Words:
    return {"audit_keep_size": None if value == "none" else parse_size(value, name=name)}


def _read_preload(value: object, *, name: str) -> Words:
    listed = _read_list(value, name=name)
    return {"preload": _matching(_MODULE, listed, name=name, what="the name of a module")}


def _read_languages(value: object, *, name: str) -> Words:
    listed = dict.fromkeys(_language(text, name=name) for text in _read_list(value, name=name))
    if not listed:
        raise InvalidRequest(f"{name}: no language is named; known languages: {', '.join(LANGUAGES)}")
    return {"languages": tuple(listed)}


def _language(text: str, *, name: str) -> str:
    try:
        return language_named(text).name
    except InvalidRequest as error:
        raise InvalidRequest(f"{name}: {error}") from None


def _read_image(value: object, *, name: str, language: str = ANY_LANGUAGE) -> Words:
    text = _read_text(value, name=name)
    _matching(_IMAGE, [text], name=name, what="the name of an image")
    return {f"image.{language}": text}


def _read_images(value: object, *, name: str) -> Words:
    words: dict[str, Any] = {}
    for language, image in _entries(value, name=name):
        known = ANY_LANGUAGE if language == ANY_LANGUAGE else _language(language, name=name)
        words.update(_read_image(image, name=f"{name}.{language}", language=known))
    return words


def _read_root(value: object, *, name: str, root: str) -> Words:
    """Read the folder of the host behind `/memory` or `/configs`; `none` is no folder."""
    text = _read_text(value, name=name)
    folder = "" if text.lower() == "none" else os.path.expanduser(text)
    if folder and (not os.path.isabs(folder) or "\0" in folder):
        raise InvalidRequest(f"{name}: {text!r} is no absolute path; write one, such as ~/agent/{root}")
    return {f"roots.{root}": os.path.normpath(folder) if folder else ""}


def _read_roots(value: object, *, name: str) -> Words:
    words: dict[str, Any] = {}
    for key, folder in _entries(value, name=name):
        root = key.removeprefix("/")
        if root not in ROOTS:
            raise InvalidRequest(f"{name}: unknown root {key!r}; known roots: {', '.join(ROOTS)}")
        words.update(_read_root(folder, name=f"{name}.{key}", root=root))
    return words


def _read_prefer(value: object, *, name: str) -> Words:
    return {"prefer": _one_of(get_args(Prefer), value, name=name)}


def _read_fallback(value: object, *, name: str) -> Words:
    return {"fallback": _one_of(get_args(Fallback), "none" if value is False else value, name=name)}


def _read_trusted(value: object, *, name: str) -> Words:
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name}: {_shown(value)} is neither True nor False")
    return {"trusted": value}


def _one_of(known: tuple[str, ...], value: object, *, name: str) -> str:
    word = value.strip().lower() if isinstance(value, str) else None
    if word not in known:
        raise InvalidRequest(f"{name}: {_shown(value)} is unknown; use one of {', '.join(known)}")
    return word


def _read_screen(value: object, *, name: str) -> Words:
    return {"screen": _one_of(get_args(ScreenMode), "off" if value is False else value, name=name)}


def _read_require(value: object, *, name: str) -> Words:
    """Read a level, controls or both; what is not named is left as it was."""
    names = (value,) if isinstance(value, Level) else value
    listed = names if isinstance(names, str) else [str(item) for item in _items(names, name=name)]
    try:
        level, controls = parse_requirements(listed)
    except InvalidRequest as error:
        raise InvalidRequest(f"{name}: {str(error).removeprefix('require: ')}") from None
    words = {"require_level": level, "require_controls": controls}
    return {word: found for word, found in words.items() if found not in (None, ())}


def _read_best_effort(value: object, *, name: str) -> Words:
    names = _read_list(value, name=name)
    unknown = [control for control in names if control.lower() not in set(Control)]
    if unknown:
        raise InvalidRequest(f"{name}: unknown control {unknown[0]!r}; known controls: {', '.join(Control)}")
    return {"best_effort": tuple(Control(control.lower()) for control in names)}


def _read_level(value: object, *, name: str) -> Words:
    text = str(value) if isinstance(value, Level) else _read_text(value, name=name)
    try:
        return {"level": Level.parse(text)}
    except InvalidRequest as error:
        raise InvalidRequest(f"{name}: {error}") from None


def _limit_readers(*, timeout_unit_s: float) -> dict[str, Reader]:
    """Return a reader for every spelling of a limit; the unit is that of a bare number under the spelling
    `timeout`.
    """

    def reader(word: str, parse: Callable[..., Any]) -> Reader:
        return lambda value, *, name: {word: parse(value, name=name)}

    readers = {key: reader(_LIMIT_WORDS[field], parse) for key, (field, parse) in ALIASES.items()}
    return {**readers, "timeout": reader("timeout", partial(parse_duration, bare_unit_s=timeout_unit_s))}


def _read_ceilings(value: object, *, name: str, readers: Mapping[str, Reader]) -> Words:
    words: dict[str, Any] = {}
    for key, most in _entries(value, name=name):
        if key not in readers:
            raise InvalidRequest(f"{name}: unknown limit {key!r}; known limits: {', '.join(LIMIT_FIELDS)}")
        for word, amount in readers[key](_plain(most, name=f"{name}.{key}"), name=f"{name}.{key}").items():
            words[f"ceiling.{word}"] = min(amount, words.get(f"ceiling.{word}", amount))
    return words


_OTHER_READERS: Mapping[str, Reader] = {
    "tier": _read_tier,
    "preset": _read_preset,
    "backend": _read_backend,
    "runtime": _read_runtime,
    "network": _read_network,
    "NetworkEnabled": _read_network,
    "network_allow": _read_hosts,
    "NetworkAllowList": _read_hosts,
    "packages": _read_packages,
    "PythonPackages": _read_packages,
    "languages": _read_languages,
    "image": _read_image,
    "images": _read_images,
    "roots": _read_roots,
    "screen": _read_screen,
    "warm": _read_warm,
    "preload": _read_preload,
    "require": _read_require,
    "best_effort": _read_best_effort,
    "prefer": _read_prefer,
    "fallback": _read_fallback,
    "audit": _read_audit,
    "audit_keep": _read_audit_keep,
    "audit_keep_age": _read_audit_keep_age,
    "audit_keep_size": _read_audit_keep_size,
    "autofix": read_autofix,
    "skill_path": lambda value, *, name: {"skill_path": _read_list(value, name=name)},
}


def _file_readers(*, timeout_unit_s: float) -> Mapping[str, Reader]:
    limits = _limit_readers(timeout_unit_s=timeout_unit_s)
    return {**limits, **_OTHER_READERS, "ceilings": partial(_read_ceilings, readers=limits)}


YAML_READERS = _file_readers(timeout_unit_s=1.0)
JSON_READERS = _file_readers(timeout_unit_s=0.001)  # C8: a bare `timeout` is in milliseconds, and only there
ARGUMENT_READERS: Mapping[str, Reader] = {
    key: reader
    for key, reader in {**YAML_READERS, "level": _read_level, "trusted": _read_trusted}.items()
    if key in {
        "timeout", "memory", "cpus", "pids", "disk", "network", "network_allow", "preset", "tier",
        "backend", "runtime", "image", "require", "best_effort", "packages", "output_limit", "screen",
        "level", "languages", "warm", "preload", "prefer", "fallback", "trusted", "audit",
    }
}  # fmt: skip
VARIABLE_READERS: Mapping[str, Reader] = {
    "SANDBOX_TYPE": _read_backend,
    "SANDBOX_TIMEOUT_SEC": lambda value, *, name: {"timeout_override": parse_duration(value, name=name)},
    **{
        f"CLOCHE_{word.upper()}": YAML_READERS[word]
        for word in (
            "memory", "cpus", "pids", "disk", "network",
            "preset", "tier", "require", "screen", "output_limit", "warm", "preload",
            "prefer", "fallback", "audit", "audit_keep", "audit_keep_age", "audit_keep_size",
        )
    },
    **{f"CLOCHE_IMAGE_{lang.upper()}": partial(_read_image, language=lang) for lang in LANGUAGES},
    **{
        f"CLOCHE_AUTOFIX_{key.upper()}": partial(read_one, key=key)
        for key in ("base_url", "model", "api_key", "max_rounds", "token_budget", "time_budget")
    },
    **{f"CLOCHE_ROOT_{root.upper()}": partial(_read_root, root=root) for root in ROOTS},
}  # fmt: skip


def read_words(pairs: Iterable[tuple[str, object]], readers: Mapping[str, Reader], *, origin: str, where: str) -> Layer:
    """Return the layer that `pairs` of key and value say; `where` is put before keys in messages.

    A key may be dotted (`sandbox.memory`): its last part is the spelling. A value of None says nothing.
    Raises InvalidRequest naming the key, both keys where two of them disagree.
    """
    layer: dict[str, Wish] = {}
    for key, value in pairs:
        if value is None:
            continue
        name = f"{where}{key}"
        words = readers[key.rpartition(".")[2]](_plain(value, name=name), name=name)
        for word, found in words.items():
            _refuse_conflict(layer.get(word), found, key=key, where=where)
            layer[word] = Wish(value=found, origin=origin, key=key)
    return with_choice(_with_reach(layer, where=where), where=where)


def _refuse_conflict(earlier: Wish | None, value: object, *, key: str, where: str) -> None:
    if earlier is not None and earlier.value != value:
        raise InvalidRequest(f"{where}{earlier.key} and {key} say different things about the same; keep one of them")


def _with_reach(layer: dict[str, Wish], *, where: str) -> Layer:
    """Make a network that is on and a list of hosts in one source mean the list; `open` beside a list is a
    mistake.
    """
    network, hosts = layer.get("network"), layer.get("network_allow")
    if network is None or hosts is None or network.value in {"off", "allowlist"}:
        return layer
    if network.value == "open":
        raise InvalidRequest(
            f"{where}{network.key} is open but {hosts.key} lists hosts; use allowlist, or drop the list"
        )
    return {**layer, "network": Wish(value="allowlist", origin=network.origin, key=network.key)}


def with_choice(layer: Layer, *, where: str) -> Layer:
    """Make a preference in a source mean the backend `auto`; beside another backend it is a mistake."""
    prefer, backend = layer.get("prefer"), layer.get("backend")
    if prefer is None:
        return layer
    if backend is not None and backend.value != AUTO:
        raise InvalidRequest(
            f"{where}{prefer.key} is for a choice among backends but {backend.key} names {backend.value}; "
            f"drop one of them, or let {backend.key} be {AUTO}"
        )
    return {**layer, "backend": backend or Wish(value=AUTO, origin=prefer.origin, key=prefer.key)}


def shown_limit(word: str, value: float) -> str:
    """Return a limit as one would write it: `256MiB`, `30s`, `0.5`."""
    if LIMIT_FIELDS[word].endswith("_bytes"):
        return format_size(int(value))
    return f"{value:g}s" if word == "timeout" else f"{value:g}"


def _plain(value: object, *, name: str) -> object:
    """Refuse text so long that it can only be a mistake or an attack on the reader of the message."""
    if isinstance(value, str) and len(value) > MAX_TEXT_CHARS:
        raise InvalidRequest(f"{name}: the text has {len(value)} characters; at most {MAX_TEXT_CHARS} make sense")
    return value


def _entries(value: object, *, name: str) -> Iterator[tuple[str, object]]:
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{name}: {_shown(value)} is not a mapping of names to values")
    for key, item in value.items():
        if not isinstance(key, str):
            raise InvalidRequest(f"{name}: the key {_shown(key)} is not text")
        yield key, item


def _shown(value: object) -> str:
    """Return a short repr; a container from a file may be built to have an endless one."""
    return (
        repr(value)[:200]
        if isinstance(value, str | int | float | bool) or value is None
        else f"a {type(value).__name__}"
    )
