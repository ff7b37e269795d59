"""Read values of configuration keys: text or plain data in, a checked value out. Pure.

A parser returns one value. A reader returns a mapping from keys to values, for spellings that set several keys at once
(`require` is a level and controls; a network may include its hosts). Both take `name`, with which every message begins,
and raise InvalidRequest.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, get_args

from cloche.core.enforcement import Control, Level, parse_requirements
from cloche.core.errors import InvalidRequest
from cloche.core.languages import LANGUAGES, language_named
from cloche.core.limits import parse_count, parse_duration, parse_size
from cloche.core.policy import ContainerRuntime, LockText, parse_backend, parse_network, preset_named
from cloche.core.remote import HiddenText

Parser = Callable[..., Any]
Values = Mapping[str, Any]
Reader = Callable[..., Values]

ANY_LANGUAGE = "*"
MAX_TEXT_CHARS = 4096
MOST_ROUNDS = 100

_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@+-]*")
_MODULE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*")
_PACKAGE = re.compile(r"@?[A-Za-z0-9][^\x00-\x1f\x7f]*")
_OBJECT = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,38}[a-z0-9])?")
_ACCOUNT = re.compile(r"[a-z][a-z0-9_-]{0,31}")
_SYSTEM_ACCOUNTS = ("root", "nobody", "nogroup", "users")
_PORT = re.compile(r"[0-9]{1,5}")
# What follows a comma in a rule of the network, with all behind it; and what a comma between methods follows.
_FURTHER_PORT = re.compile(r"[0-9]+(?:[@/].*)?")
_FURTHER_NETWORK = re.compile(r"[0-9A-Fa-f:.\[\]]+/[0-9]{1,3}(?:/.*)?")
_METHODS = re.compile(r"/[A-Z*][A-Z-]*(?:,[A-Z*][A-Z-]*)*$")
# A comma between packages, not between versions or extras: "a[b,c]>=1,<2, d" are two packages.
_PACKAGE_COMMA = re.compile(r",(?![^\[]*\])(?=\s*@?[A-Za-z0-9])")
_PACKAGE_PATTERN = re.compile(r"[A-Za-z0-9*][A-Za-z0-9._*-]*|npm:@?[A-Za-z0-9*][A-Za-z0-9._*/-]*")
_SWITCH: Mapping[str, bool] = {"true": True, "on": True, "false": False, "off": False}


def parse_list(value: object, *, name: str) -> tuple[str, ...]:
    """Return texts from a list, or from text with commas."""
    items: Iterable[object] = value.split(",") if isinstance(value, str) else _items(value, name=name)
    return tuple(dict.fromkeys(_text(item, name=name) for item in items if item != ""))


def one_of(choices: tuple[str, ...], *, if_false: str = "") -> Parser:
    """Return a parser for one of `choices`; `if_false` replaces False, which YAML makes of `off` and `no`."""

    def parse(value: object, *, name: str) -> str:
        return _one_of(choices, if_false if if_false and value is False else value, name=name)

    return parse


def parse_preset(value: object, *, name: str) -> str:
    """Return the name of a preset."""
    text = _text(value, name=name)
    try:
        return preset_named(text).name
    except InvalidRequest as error:
        raise InvalidRequest(f"{name}: {error}") from None


def parse_hosts(value: object, *, name: str) -> tuple[str, ...]:
    """Return rules that allow hosts, in lower case."""
    from cloche.core.network import parse_rule  # imported only if hosts are listed

    return tuple(parse_rule(text, name=name).text for text in _rule_texts(value, name=name))


def parse_denied_hosts(value: object, *, name: str) -> tuple[str, ...]:
    """Return rules that deny hosts and networks, in lower case."""
    from cloche.core.network import parse_deny_rule

    return tuple(parse_deny_rule(text, name=name).text for text in _rule_texts(value, name=name))


def _rule_texts(value: object, *, name: str) -> tuple[str, ...]:
    """Return the texts of rules. In text with commas, ports, networks and methods belong to the rule before them."""
    from cloche.core.request_rules import PART

    if not isinstance(value, str):
        return tuple(map(_small, parse_list(value, name=name)))
    texts: list[str] = []
    for item in (part.strip() for part in value.split(",") if part):
        last = texts[-1] if texts and PART.search(texts[-1]) is None else ""  # to which more may belong
        is_port = ":" in last and "@" not in last and _FURTHER_PORT.fullmatch(item)
        is_network = "@" in last and _FURTHER_NETWORK.fullmatch(item)
        if is_port or is_network or _METHODS.search(last):
            texts[-1] = f"{last},{item}"
        else:
            texts.append(_text(item, name=name))
    return tuple(dict.fromkeys(map(_small, texts)))


def _small(text: str) -> str:
    """Return a rule with its host in lower case."""
    host, slash, rest = text.partition("/")
    return host.lower() + slash + rest


def parse_network_ports(value: object, *, name: str) -> tuple[int, ...]:
    """Return port numbers from one number, a list, or text with commas."""
    from cloche.core.network import parse_ports

    listed = [value] if isinstance(value, int) else value.split(",") if isinstance(value, str) else value
    ports = _items(listed, name=name)
    read = [int(port) if isinstance(port, str) and _PORT.fullmatch(port.strip()) else port for port in ports]
    return parse_ports(read, name=name)


def parse_port(value: object, *, name: str) -> int:
    """Return one port number."""
    ports = parse_network_ports(value, name=name)
    if len(ports) != 1:
        raise InvalidRequest(f"{name}: {len(ports)} ports are given, and one is meant")
    return ports[0]


def parse_network_ceiling(value: object, *, name: str) -> object:
    """Return the network ceiling: a mode, hosts, or a mapping of mode, hosts and networks."""
    from cloche.core.ceilings import NetworkCeiling
    from cloche.core.network import parse_network_range

    if not isinstance(value, Mapping):
        is_list = isinstance(value, list | tuple)
        return NetworkCeiling(**_ceiling_of({"hosts" if is_list else "mode": value}, name=name))
    entries = dict(_entries(value, name=name))
    unknown = [key for key in entries if key not in ("mode", "hosts", "networks")]
    if unknown:
        raise InvalidRequest(f"{name}: unknown key {unknown[0][:80]!r}; known keys: mode, hosts, networks")
    networks = parse_list(entries.pop("networks", ()), name=f"{name}.networks")
    listed = tuple(str(parse_network_range(network, name=f"{name}.networks")) for network in networks)
    return NetworkCeiling(**_ceiling_of(entries, name=name), networks=listed)


def _ceiling_of(entries: Mapping[str, object], *, name: str) -> dict[str, Any]:
    """Return mode and hosts; hosts alone mean an allowlist, and without either the mode is `open`."""
    hosts = parse_hosts(entries["hosts"], name=f"{name}.hosts") if "hosts" in entries else None
    mode = parse_network(entries.get("mode", "open" if hosts is None else "allowlist"), name=f"{name}.mode")
    if hosts is not None and mode != "allowlist":
        raise InvalidRequest(f"{name}.hosts: mode {mode!r} has no list of hosts; use allowlist, or leave the hosts out")
    return {"mode": mode, "hosts": hosts}


def parse_package_ceiling(value: object, *, name: str) -> tuple[str, ...]:
    """Return the names of packages in a ceiling; `none` allows none."""
    if value is False or value in ("none", ""):
        return ()
    if value == "auto":
        raise InvalidRequest(f"{name}: 'auto' is not a list; name the packages, or none, or leave it out")
    return parse_package_patterns(value, name=name)


def packages_in_both(first: tuple[str, ...], second: tuple[str, ...]) -> tuple[str, ...]:
    """Return the lower of two package ceilings."""
    from cloche.core.ceilings import packages_in_both as in_both

    return in_both(first, second)


def is_in_open(hosts: tuple[str, ...], ports: tuple[int, ...]) -> bool:
    """Tell whether mode `open` already reaches one of these hosts."""
    from cloche.core.ceilings import covers
    from cloche.core.network import NetworkRules, parse_rule

    is_open = NetworkRules.parse(mode="open", ports=ports)
    return any(covers(is_open, rule) for rule in map(parse_rule, hosts) if not rule.requests)


def parse_packages(value: object, *, name: str) -> tuple[str, ...] | str:
    """Return names of packages, or `auto`."""
    if isinstance(value, str) and value.strip().lower() in {"auto", "none", ""}:
        return "auto" if value.strip().lower() == "auto" else ()
    listed = _PACKAGE_COMMA.split(value) if isinstance(value, str) else value
    return _matching(_PACKAGE, parse_list(listed, name=name), name=name, description="the name of a package")


def parse_package_patterns(value: object, *, name: str) -> tuple[str, ...]:
    """Return names of packages, in which `*` matches any characters."""
    return _matching(_PACKAGE_PATTERN, parse_list(value, name=name), name=name, description="the name of a package")


def parse_package_hosts(value: object, *, name: str) -> tuple[str, ...]:
    """Return hosts, each with its port."""
    from cloche.core.network import parse_rule

    rules = [parse_rule(text, name=name) for text in parse_list(value, name=name)]
    if any(rule.is_wildcard or rule.requests for rule in rules):
        raise InvalidRequest(f"{name}: a host for files is one name, without a * and without methods and paths")
    return tuple(f"{rule.host}:{rule.ports[0] if ':' in rule.text else 443}" for rule in rules)


def parse_lock_file(value: object, *, name: str) -> str:
    """Return the path of a lock file: the one in the working directory for true, empty for false; or its text."""
    if isinstance(value, LockText):
        return value
    if isinstance(value, bool):
        return os.path.abspath("cloche.lock") if value else ""
    return os.path.abspath(_text(os.fspath(value) if isinstance(value, os.PathLike) else value, name=name))


def parse_modules(value: object, *, name: str) -> tuple[str, ...]:
    """Return the names of modules."""
    return _matching(_MODULE, parse_list(value, name=name), name=name, description="the name of a module")


def parse_languages(value: object, *, name: str) -> tuple[str, ...]:
    """Return the names of languages, at least one."""
    listed = dict.fromkeys(_language(text, name=name) for text in parse_list(value, name=name))
    if not listed:
        raise InvalidRequest(f"{name}: no language is named; known languages: {', '.join(LANGUAGES)}")
    return tuple(listed)


def parse_image(value: object, *, name: str) -> str:
    """Return the name of a container image."""
    text = _text(value, name=name)
    _matching(_IMAGE, [text], name=name, description="the name of an image")
    return text


def parse_images_allow(value: object, *, name: str) -> tuple[str, ...]:
    """Return images by digest, and `present` for those that the daemon has."""
    from cloche.core.ceilings import PRESENT, is_digest

    images = parse_list(value, name=name)
    for image in images:
        if image != PRESENT and not is_digest(image):
            raise InvalidRequest(f"{name}: {image!r} is no image by digest; write NAME@sha256:..., or {PRESENT}")
    return images


def parse_root(value: object, *, name: str, root: str) -> str:
    """Return the host folder behind `/memory` or `/configs`; empty for `none`."""
    text = _text(value, name=name)
    folder = "" if text.lower() == "none" else os.path.expanduser(text)
    if folder and (not os.path.isabs(folder) or "\0" in folder):
        raise InvalidRequest(f"{name}: {text!r} is not an absolute path; write one, such as ~/agent/{root}")
    return os.path.normpath(folder) if folder else ""


def parse_switch(value: object, *, name: str) -> bool:
    """Return true or false; `on` and `off` are accepted too."""
    is_on = _SWITCH.get(str(value).strip().lower())
    if is_on is None or not isinstance(value, bool | str):
        raise InvalidRequest(f"{name}: {_short_repr(value)} is neither true nor false")
    return is_on


def parse_toolchains(value: object, *, name: str) -> tuple[str, ...]:
    """Return folders from a list, or from text with colons, as in PATH."""
    return parse_list(value.split(os.pathsep) if isinstance(value, str) else value, name=name)


def parse_agents(value: object, *, name: str) -> dict[str, dict[str, object]]:
    """Return the user's own rows of coding agents, by name; `coding_agents/own_rows.py` reads their fields."""
    rows: dict[str, dict[str, object]] = {}
    for agent, row in _entries(value, name=name):
        if not _OBJECT.fullmatch(agent):
            raise InvalidRequest(f"{name}: {_short_repr(agent)} is not a name of small letters, digits and dashes")
        rows[agent] = dict(_entries(row, name=f"{name}.{agent}"))
    return rows


def parse_package_managers(value: object, *, name: str) -> bool | str:
    """Return whether package managers are shown: true, false, or `live`, which excludes throwaway runs."""
    if isinstance(value, str) and value.strip().lower() == "live":
        return "live"
    try:
        return parse_switch(value, name=name)
    except InvalidRequest:
        raise InvalidRequest(f"{name}: {_short_repr(value)} is neither true, false nor live") from None


def parse_trusted(value: object, *, name: str) -> bool:
    """Return whether code is trusted; only a real boolean of a program is accepted."""
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name}: {_short_repr(value)} is neither True nor False")
    return value


def parse_audit_keep(value: object, *, name: str) -> tuple[str, ...]:
    """Return the kinds of artifacts stored beside the audit log: `code`, `output`."""
    listed = [] if value is False or value == "none" else parse_list(value, name=name)
    return tuple(_one_of(("code", "output"), kind, name=name) for kind in listed)


def parse_age(value: object, *, name: str) -> float | None:
    """Return seconds; None for `none`, which means no limit."""
    return None if value == "none" else parse_duration(value, name=name)


def parse_least_age(value: object, *, name: str) -> float:
    """Return seconds; 0 for `none`, which means no limit."""
    return 0.0 if value in ("none", 0, "0", False) else parse_duration(value, name=name)


def parse_total(value: object, *, name: str) -> int | None:
    """Return bytes; None for `none`, which means no limit."""
    return None if value == "none" else parse_size(value, name=name)


def parse_total_count(value: object, *, name: str) -> int | None:
    """Return a number; None for `none`, which means no limit."""
    return None if value == "none" else parse_count(value, name=name)


def parse_controls(value: object, *, name: str) -> tuple[Control, ...]:
    """Return controls from their names."""
    names = parse_list(value, name=name)
    unknown = [control for control in names if control.lower() not in set(Control)]
    if unknown:
        raise InvalidRequest(f"{name}: unknown control {unknown[0]!r}; known controls: {', '.join(Control)}")
    return tuple(Control(control.lower()) for control in names)


def parse_level(value: object, *, name: str) -> Level:
    """Return a level from a Level or its name."""
    text = str(value) if isinstance(value, Level) else _text(value, name=name)
    try:
        return Level.parse(text)
    except InvalidRequest as error:
        raise InvalidRequest(f"{name}: {error}") from None


def parse_rounds(value: object, *, name: str) -> int:
    """Return the maximum number of calls to a model."""
    rounds = parse_count(value, name=name)
    if rounds > MOST_ROUNDS:
        raise InvalidRequest(f"{name}: {rounds} rounds are too many; the maximum is {MOST_ROUNDS}")
    return rounds


def parse_share(value: object, *, name: str) -> float:
    """Return a part of a whole: a number above 0, and 1 at most."""
    try:
        share = float(value) if isinstance(value, (int, float, str)) and not isinstance(value, bool) else 0.0
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise InvalidRequest(f"{name}: {value!r} is no part of a whole; give a number above 0, and 1 at most")
    return share


def parse_line(value: object, *, name: str) -> str:
    """Return text of one line; messages do not repeat it."""
    if not isinstance(value, str) or not value.strip() or not value.strip().isprintable():
        raise InvalidRequest(f"{name}: this is not one line of text")
    return value.strip()


def parse_account(value: object, *, name: str) -> str:
    """Return the name of an account: at most 32 of a-z, 0-9, `_` and `-`, not one that every system has."""
    if not isinstance(value, str) or not _ACCOUNT.fullmatch(value) or value in _SYSTEM_ACCOUNTS:
        raise InvalidRequest(
            f"{name}: {value!r} is not a name for an account; give a letter, then letters, digits, _ and - (a-z, 32 at "
            f"most), and none of {', '.join(_SYSTEM_ACCOUNTS)}"
        )
    return value


def parse_object_name(value: object, *, name: str) -> str:
    """Return a name that objects of Kubernetes may have: lower-case letters, digits, hyphens."""
    if not isinstance(value, str) or not _OBJECT.fullmatch(value.strip()):
        raise InvalidRequest(
            f"{name}: {value!r} is no name of an object: lower-case letters, digits and hyphens, 40 at most"
        )
    return value.strip()


def parse_secret(value: object, *, name: str) -> HiddenText:
    """Return an endpoint's key; messages do not repeat it."""
    if not isinstance(value, str) or not value.strip().isascii() or not value.strip().isprintable():
        raise InvalidRequest(f"{name}: this is not a key; a key is one word of printable ASCII characters")
    return HiddenText(value.strip())


def parse_sha256(value: object, *, name: str) -> str:
    """Return the 64 hexadecimal digits of a SHA-256, which may have colons, as openssl writes that of a certificate."""
    digits = value.replace(":", "").strip().lower() if isinstance(value, str) else ""
    if re.fullmatch("[0-9a-f]{64}", digits) is None:
        raise InvalidRequest(f"{name}: give a SHA-256: 64 hexadecimal digits")
    return digits


def parse_file(value: object, *, name: str) -> str:
    """Return the absolute path of a file or folder; `~` is the user's home."""
    path = os.path.expanduser(value) if isinstance(value, str) else ""
    if not os.path.isabs(path) or "\0" in path:
        raise InvalidRequest(f"{name}: give an absolute path")
    return path


def parse_money(value: object, *, name: str) -> float:
    """Return an amount of money."""
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else None
    if isinstance(value, str):
        with suppress(ValueError):
            number = float(value)
    if number is None or not 0 < number < 1e9:
        raise InvalidRequest(f"{name}: {_short_repr(value)} is not an amount; use a number above 0")
    return float(number)


def read_runtime(value: object, *, name: str) -> Values:
    """Read the name of a backend, `runsc` for gVisor's, or docker's own runtime, which means docker and never gVisor
    (C3).
    """
    runtime = value.strip().lower() if isinstance(value, str) else ""
    if runtime in get_args(ContainerRuntime):
        return {"backend": "docker", "runtime": runtime}
    try:
        return {"backend": parse_backend("gvisor" if runtime == "runsc" else value, name=name)}
    except InvalidRequest as error:
        raise InvalidRequest(f"{error}; or {', '.join(get_args(ContainerRuntime))}: docker's own runtime") from None


def read_network(value: object, *, name: str) -> Values:
    """Read a mode. A list of hosts, or the text `allowlist:host,host`, is the mode `allowlist` with these hosts."""
    if isinstance(value, str) and value.strip().lower().startswith("allowlist:"):
        return read_network(parse_list(value.partition(":")[2], name=name), name=name)
    if isinstance(value, list | tuple | set | frozenset):
        return {"network": "allowlist", "network_allow": parse_hosts(value, name=name)}
    is_on = value is True or (isinstance(value, str) and value.strip().lower() in {"true", "on"})
    return {"network": "on" if is_on else parse_network(value, name=name)}


def read_require(value: object, *, name: str) -> Values:
    """Read a level, controls or both; a part that is not named keeps its value."""
    names = (value,) if isinstance(value, Level) else value
    listed = names if isinstance(names, str) else [str(item) for item in _items(names, name=name)]
    try:
        level, controls = parse_requirements(listed)
    except InvalidRequest as error:
        raise InvalidRequest(f"{name}: {str(error).removeprefix('require: ')}") from None
    values = {"require_level": level, "require_controls": controls}
    return {key: item for key, item in values.items() if item not in (None, ())}


def read_audit(value: object, *, name: str) -> Values:
    """Read on or off; a folder means on, with the log in that folder."""
    is_on = _SWITCH.get(str(value).strip().lower())
    if is_on is not None and isinstance(value, bool | str):
        return {"audit": is_on}
    folder = os.path.expanduser(_text(os.fspath(value) if isinstance(value, os.PathLike) else value, name=name))
    if not os.path.isabs(folder) or "\0" in folder:
        raise InvalidRequest(f"{name}: {_short_repr(value)} is neither on nor off, nor the absolute path of a folder")
    return {"audit": True, "audit_folder": os.path.normpath(folder)}


def read_images(value: object, *, name: str) -> Values:
    """Read a mapping of languages to images."""
    values: dict[str, Any] = {}
    for language, image in _entries(value, name=name):
        canonical = ANY_LANGUAGE if language == ANY_LANGUAGE else _language(language, name=name)
        values[f"image.{canonical}"] = parse_image(image, name=f"{name}.{language}")
    return values


def read_roots(value: object, *, name: str, readers: Mapping[str, Reader]) -> Values:
    """Read a mapping of an agent's own folders to host folders."""
    values: dict[str, Any] = {}
    for key, folder in _entries(value, name=name):
        root = key.removeprefix("/")
        if root not in readers:
            raise InvalidRequest(f"{name}: unknown root {key!r}; known roots: {', '.join(readers)}")
        values.update(readers[root](folder, name=f"{name}.{key}"))
    return values


def read_section(value: object, *, name: str, readers: Mapping[str, Reader]) -> Values:
    """Read the keys of a section; messages do not repeat a value, which may be a secret."""
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{name}: this is not a mapping of names to values")
    values: dict[str, Any] = {}
    for key, item in value.items():
        if key not in readers:
            raise InvalidRequest(f"{name}: unknown key {str(key)[:80]!r}; known keys: {', '.join(readers)}")
        values.update(readers[key](item, name=f"{name}.{key}"))
    return values


def read_ceilings(value: object, *, name: str, readers: Mapping[str, Reader], limits: Iterable[str]) -> Values:
    """Read a mapping of limits, in any spelling, to ceilings. If two spellings set the same limit, the lower one is
    used.
    """
    values: dict[str, Any] = {}
    for spelling, ceiling in _entries(value, name=name):
        if spelling not in readers:
            raise InvalidRequest(f"{name}: unknown limit {spelling!r}; known limits: {', '.join(limits)}")
        where = f"{name}.{spelling}"
        for key, amount in readers[spelling](check_length(ceiling, name=where), name=where).items():
            where_kept = f"ceiling.{key}"
            values[where_kept] = min(amount, values[where_kept]) if where_kept in values else amount
    return values


def check_length(value: object, *, name: str) -> object:
    """Return the value. Raises InvalidRequest for very long text, which is a mistake or would flood the message."""
    if isinstance(value, str) and len(value) > MAX_TEXT_CHARS:
        raise InvalidRequest(f"{name}: the text has {len(value)} characters; the maximum is {MAX_TEXT_CHARS}")
    return value


def nearest(key: str, known_keys: Iterable[str]) -> str:
    """Return the most similar known key, empty if none is similar."""
    import difflib  # imported only for an unknown key

    return next(iter(difflib.get_close_matches(key[:80], list(known_keys), n=1, cutoff=0.7)), "")


def hint_for(key: str, known_keys: Collection[str]) -> str:
    """Return a hint for an unknown key: the most similar one, or all known ones."""
    near = nearest(key, known_keys)
    return f"did you mean {near!r}?" if near else f"known keys: {', '.join(known_keys)}"


def _text(value: object, *, name: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise InvalidRequest(f"{name}: {_short_repr(value)} is not text")
    return value.strip()


def _one_of(choices: tuple[str, ...], value: object, *, name: str) -> str:
    text = value.strip().lower() if isinstance(value, str) else None
    if text not in choices:
        raise InvalidRequest(f"{name}: {_short_repr(value)} is unknown; use one of {', '.join(choices)}")
    return text


def _matching(pattern: re.Pattern[str], texts: Iterable[str], *, name: str, description: str) -> tuple[str, ...]:
    checked = tuple(texts)
    for text in checked:
        if not pattern.fullmatch(text):
            raise InvalidRequest(f"{name}: {text!r} is not {description}")
    return checked


def _language(text: str, *, name: str) -> str:
    try:
        return language_named(text).name
    except InvalidRequest as error:
        raise InvalidRequest(f"{name}: {error}") from None


def _items(value: object, *, name: str) -> Iterable[object]:
    if isinstance(value, Mapping | bytes) or not isinstance(value, Iterable):
        raise InvalidRequest(f"{name}: {_short_repr(value)} is not a list")
    return value


def _entries(value: object, *, name: str) -> Iterator[tuple[str, object]]:
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{name}: {_short_repr(value)} is not a mapping of names to values")
    for key, item in value.items():
        if not isinstance(key, str):
            raise InvalidRequest(f"{name}: the key {_short_repr(key)} is not text")
        yield key, item


def _short_repr(value: object) -> str:
    """Return a short repr; that of a container from a file may be extremely long."""
    is_short = isinstance(value, str | int | float | bool) or value is None
    return repr(value)[:200] if is_short else f"a {type(value).__name__}"
