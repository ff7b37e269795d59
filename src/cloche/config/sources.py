"""Sources of configuration: find the files, and read files, the environment and the arguments.

A file is read once and cached by path, time of change, size and inode; a missing file costs one `stat`. Files in the
working directory are not trusted: only regular files of bounded size are read, and opening never blocks. In a `.env`,
only the variables that Cloche knows are read; its other lines belong to other programs and are not parsed.
"""

from __future__ import annotations

import logging
import os
import re
import stat
import time
from collections.abc import Callable, Container, Hashable, Iterator, Mapping
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any

from cloche.core.errors import InvalidRequest
from cloche.core.record import dataclass
from cloche.hostfs import own_folder

from .keys import ARGUMENT_READERS, JSON_READERS, VARIABLE_READERS, YAML_READERS, read_layer, with_auto_backend
from .origins import ARGUMENT, ConfiguredValue, Layer, Origin, with_value
from .readers import Reader, hint_for, nearest

if TYPE_CHECKING:
    from pathlib import Path

log = logging.getLogger("cloche.config")
MAX_FILE_BYTES = 1 << 20
_OPEN_FLAGS = (
    os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
)  # open(2): O_NONBLOCK does not wait for a FIFO's writer
_LINE = re.compile(
    r"[ \t]*(?:export[ \t]+)?(?P<key>(?:SANDBOX|CLOCHE|E2B|DAYTONA)_[A-Za-z0-9_]*)[ \t]*=[ \t]*(?P<rest>.*)"
)
_VALUE = re.compile(r"""(?:'(?P<single>[^']*)'|"(?P<double>[^"\\]*)"|(?P<bare>[^\s'"#][^\s#]*)?)[ \t]*(?:#.*)?""")
# Variables that name another file, with the option that does the same.
OTHER_FILES: Mapping[str, str] = {"CLOCHE_CONFIG": "--config", "CLOCHE_ENV_FILE": "--env-file"}
_OURS = ("SANDBOX_", "CLOCHE_")  # a `.env` in the working directory may not set other programs' variables
_PROCESS_VARIABLES = ("HOME", "XDG_CONFIG_HOME")
_WATCHED_VARIABLES = (*VARIABLE_READERS, *OTHER_FILES, *_PROCESS_VARIABLES)
_WATCHED_ENCODED = tuple(os.fsencode(name) for name in _WATCHED_VARIABLES)
# A file with one of these keys asks for isolation, so a syntax error in it is reported, and the file is not ignored.
_ISOLATION = ("backend", "require")
_ASKS_FOR_ISOLATION = re.compile(rf"""(^[ \t]+|[{{,]\s*)["']?({"|".join(_ISOLATION)})["']?\s*:""", re.MULTILINE)
_MAX_COMPARED_KEYS = 100  # keys of a section that are compared with Cloche's

MOST_FILES = 16
_MAX_CACHED = 64
_files: dict[Hashable, tuple[str, ...]] = {}  # the paths that may hold settings, by the inputs they depend on
_stored: Layer = {}
_stored_version = 0
_look_s = 0.0  # how long the facts of files hold
_looks: dict[tuple[str, ...], tuple[float, Hashable]] = {}
_cache: dict[tuple[str, bool], tuple[tuple[int, int, int, int], Layer]] = {}  # layers, by the file's path


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """How one kind of file becomes a layer.

    `is_ours` is false for a name that other programs use too. `is_strict` makes unknown keys outside of `sandbox`
    errors.
    """

    parse: Callable[[str, str], object]
    readers: Mapping[str, Reader]
    is_ours: bool = True
    is_strict: bool = False


def _parse_yaml(text: str, file: str) -> object:
    from .plain_yaml import parse_yaml  # yaml is imported only where a YAML file exists

    return parse_yaml(text, file)


def _parse_json(text: str, file: str) -> object:
    import json

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        keys: set[str] = set()
        for key, _ in items:
            if key in keys:
                raise InvalidRequest(f"{file}: the key {key[:80]!r} is given twice; keep one of them")
            keys.add(key)
        return dict(items)

    try:
        return json.loads(text, object_pairs_hook=pairs)
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"{file}, line {error.lineno}, column {error.colno}: not JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, InvalidRequest):
            raise
        raise InvalidRequest(f"{file}: not usable JSON: {type(error).__name__}") from None


_YAML = Format(parse=_parse_yaml, readers=YAML_READERS)
_CLOCHE_YAML = Format(parse=_parse_yaml, readers=YAML_READERS, is_strict=True)
_JSON = Format(parse=_parse_json, readers=JSON_READERS)
_SHARED_YAML = Format(parse=_parse_yaml, readers=YAML_READERS, is_ours=False)

# Weakest first: a later file overrides an earlier one.
_FOLDER_FILES: Mapping[str, Format] = {
    "config.json": _JSON,
    "cloche.yaml": _CLOCHE_YAML,
    "config.yaml": _YAML,
}
_CHECKOUT_FILES: Mapping[str, Format] = {"config.yaml": _SHARED_YAML, "cloche.yaml": _CLOCHE_YAML}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigPaths:
    """The places to search for configuration; None means the process's own working directory or home.

    Without `has_checkout` no file of the working directory is read, unless it is named.
    """

    environ: Mapping[str, str]
    cwd: Path | None = None
    home: Path | None = None
    config_file: str | os.PathLike[str] | None = None
    has_checkout: bool = True

    @property
    def named(self) -> str | None:
        """Return the path of the file that the caller names, or else the environment."""
        name = self.config_file or self.environ.get("CLOCHE_CONFIG")
        return self._absolute(name) if name else None

    @property
    def env_file(self) -> str | None:
        """Return the path of the `.env` that the environment names."""
        name = self.environ.get("CLOCHE_ENV_FILE")
        return self._absolute(name) if name else None

    def _absolute(self, name: str | os.PathLike[str]) -> str:
        return os.path.abspath(os.path.join(self.cwd or "", name))


def fingerprint(config_paths: ConfigPaths) -> Hashable:
    """Return a key that changes whenever a source may have changed: the variables, and `stat` of each file."""
    try:
        folder = os.fspath(config_paths.cwd) if config_paths.cwd is not None else os.getcwd()
    except FileNotFoundError:
        folder = ""
    environ = config_paths.environ
    raw: Mapping[bytes, bytes] | None = getattr(os.environ, "_data", None) if environ is os.environ else None
    if raw is not None:  # CPython's os.environ would decode each value, at every run
        variables: tuple[object, ...] = tuple([raw.get(name) for name in _WATCHED_ENCODED])
    else:
        variables = (
            *(environ.get(name) for name in _WATCHED_VARIABLES),
            *(os.environ.get(name) for name in _PROCESS_VARIABLES),
        )
    files = _watched_files(variables, folder, config_paths)
    return (
        _stored_version,
        variables,
        folder,
        str(config_paths.config_file),
        _facts_of(files),
    )


def look_at_files_every(seconds: float) -> None:
    """Let this process notice a changed file later by so much: a server with many runs a second saves `stat` calls."""
    global _look_s
    _look_s = seconds


def _facts_of(files: tuple[str, ...]) -> Hashable:
    if _look_s <= 0:
        return tuple([_stat_facts(path) for path in files])
    now = time.monotonic()
    looked_at, facts = _looks.get(files, (-_look_s, ()))
    if now - looked_at >= _look_s:
        if len(_looks) >= MOST_FILES:
            _looks.clear()
        facts = tuple([_stat_facts(path) for path in files])
        _looks[files] = now, facts
    return facts


def _watched_files(variables: Hashable, folder: str, config_paths: ConfigPaths) -> tuple[str, ...]:
    """Return the paths that may hold settings; they depend only on the arguments."""
    key = (variables, folder, config_paths.cwd, config_paths.home, str(config_paths.config_file))
    files = _files.get(key)
    if files is None:
        if len(_files) >= MOST_FILES:
            _files.clear()
        files = _files[key] = (
            *(path for path, _ in _user_files(config_paths.environ, config_paths.home)),
            *((os.path.join(folder, name) for name in (*_CHECKOUT_FILES, ".env")) if folder else ()),
            *(named for named in (config_paths.named, config_paths.env_file) if named is not None),
        )
    return files


def _stat_facts(path: str) -> tuple[int, ...] | str:
    try:
        facts = os.stat(path)
    except OSError as error:
        return str(error.errno)
    return facts.st_mode, facts.st_ino, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_size


def operator_layers(config_paths: ConfigPaths) -> list[Layer]:
    """Return the layers of the owner's files, weakest first."""
    paths = _user_files(config_paths.environ, config_paths.home)
    layers = [layer for path, format_ in paths if (layer := _load(path, format_)) is not None]
    named = config_paths.named
    if named is None:
        return layers
    explicit = _load(named, _format_of(named))
    if explicit is None:
        said_by = "config" if config_paths.config_file else "environment CLOCHE_CONFIG"
        raise InvalidRequest(f"{said_by}: there is no file {named}; correct the path, or leave it out")
    return [*layers, explicit]


def use_stored_settings(values: Mapping[str, Any], *, origin: str = "stored by PUT /api/sandbox/config") -> None:
    """Set values, stored by a service, that rank above files in this process. Raises InvalidRequest, changing nothing.

    `values` are spelled as the keywords of `SandboxOptions`; None means not given.
    """
    global _stored, _stored_version
    set_values = [(name, value) for name, value in values.items() if value is not None]
    _stored = read_layer(set_values, ARGUMENT_READERS, origin=Origin(origin, "stored"), where="settings: ")
    _stored_version += 1


def stored_layer() -> Layer:
    """Return the layer of `use_stored_settings`."""
    return _stored


def env_file_layer(config_paths: ConfigPaths) -> Layer:
    """Return the layer of the `.env` that the user named; it is trusted like the environment."""
    path = config_paths.env_file
    if path is None:
        return {}
    layer = _load_dotenv(path, is_users=True)
    if layer is None:
        raise InvalidRequest(
            f"--env-file (CLOCHE_ENV_FILE): there is no file {path}; correct the path, or leave it out"
        )
    return layer


def _user_files(environ: Mapping[str, str], home: Path | None) -> Iterator[tuple[str, Format]]:
    base = _home_folder(home)
    if base is not None:
        yield os.path.join(base, ".cloche", "config.json"), _JSON
    folder = _config_folder(environ, base, is_given=home is not None)
    for name, format_ in _FOLDER_FILES.items() if folder is not None else ():
        yield os.path.join(folder or "", name), format_


def _home_folder(home: Path | None) -> str | None:
    if home is not None:
        return os.fspath(home)
    home_path = os.path.expanduser("~")
    return home_path if os.path.isabs(home_path) else None


def _config_folder(environ: Mapping[str, str], base: str | None, *, is_given: bool) -> str | None:
    """Return the platform's folder; below a given home, the folder of the XDG rules."""
    if not is_given:
        folder = own_folder("XDG_CONFIG_HOME", ".config")
        return folder or _platform_folder(os.environ.get("XDG_CONFIG_HOME"), base)
    configured = environ.get("XDG_CONFIG_HOME", "")
    return os.path.join(configured if os.path.isabs(configured) else os.path.join(base or "/", ".config"), "cloche")


@lru_cache(maxsize=4)
def _platform_folder(xdg: str | None, base: str | None) -> str | None:
    """Ask platformdirs, cached by the variables that its answer depends on."""
    if base is None and not xdg:
        return None
    from platformdirs import user_config_dir

    try:
        return user_config_dir("cloche", appauthor=False)
    except RuntimeError:  # platformdirs raises this for an empty HOME
        return None


def _format_of(path: str) -> Format:
    if os.path.basename(path) == "cloche.yaml":
        return _CLOCHE_YAML
    formats = {".json": _JSON, ".yaml": _YAML, ".yml": _YAML}
    try:
        return formats[os.path.splitext(path)[1].lower()]
    except KeyError:
        raise InvalidRequest(f"{path}: a configuration file's name ends in .yaml, .yml or .json") from None


def checkout_layers(config_paths: ConfigPaths) -> list[Layer]:
    """Return the layers of the files in the working directory, weakest first.

    A file that the owner named, or that lies in the owner's own folders, is not read again as an untrusted file.
    """
    if not config_paths.has_checkout:
        return []
    try:
        folder = os.fspath(config_paths.cwd) if config_paths.cwd is not None else os.getcwd()
    except FileNotFoundError:  # the working directory was removed
        return []
    paths = [os.path.join(folder, name) for name in (*_CHECKOUT_FILES, ".env")]
    present = [path for path in paths if os.path.lexists(path)]
    own = _trusted_files(config_paths) if present else set()
    untrusted = [path for path in present if os.path.realpath(path) not in own]
    layers = [_load_checkout_file(path) for path in untrusted]
    return [layer for layer in layers if layer]


def _load_checkout_file(path: str) -> Layer | None:
    format_ = _CHECKOUT_FILES.get(os.path.basename(path))
    return _load_dotenv(path, is_users=False) if format_ is None else _load(path, format_)


def checkout_origins(config_paths: ConfigPaths) -> frozenset[Origin]:
    """Return the origins of the working directory's files, as settings name them."""
    return frozenset(configured.origin for layer in checkout_layers(config_paths) for configured in layer.values())


def _trusted_files(config_paths: ConfigPaths) -> set[str]:
    paths = [path for path, _ in _user_files(config_paths.environ, config_paths.home)]
    return {os.path.realpath(path) for path in (*paths, config_paths.named, config_paths.env_file) if path is not None}


def _load(path: str, format_: Format) -> Layer | None:
    """Return a file's layer, cached until the file changes; None if there is no such file."""
    return _cached(path, format_.is_ours, lambda text: _read_layer(text, path, format_))


def _load_dotenv(path: str, *, is_users: bool) -> Layer | None:
    def read(text: str) -> Layer:
        names = VARIABLE_READERS if is_users else [name for name in VARIABLE_READERS if name.startswith(_OURS)]
        variables = read_dotenv(text, file=path, names={*names, *OTHER_FILES})
        return read_layer(variables.items(), VARIABLE_READERS, origin=Origin(path), where=f"{path}: ")

    return _cached(path, is_users, read)


def read_dotenv(text: str, *, file: str, names: Container[str]) -> dict[str, str]:
    """Return the variables of `text` that are in `names`, without empty ones.

    Raises InvalidRequest naming file, line and key for a value that is not one word, one given twice with different
    values, or one of OTHER_FILES, which only the real environment may set.
    """
    variables: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        match = _LINE.fullmatch(line)
        if match is None or match["key"] not in names:
            continue
        key, value = match["key"], _read_value(match["rest"], where=f"{file}, line {number}: {match['key']}")
        if key in OTHER_FILES:
            raise InvalidRequest(
                f"{file}, line {number}: {key} cannot be set here, because a .env file may not name another file; "
                f"set it in the environment, or name the file with {OTHER_FILES[key]}"
            )
        if variables.get(key, value) != value:
            raise InvalidRequest(f"{file}, line {number}: {key} is given twice with different values; keep one of them")
        variables[key] = value
    return {key: value for key, value in variables.items() if value}


def _read_value(text: str, *, where: str) -> str:
    match = _VALUE.fullmatch(text.rstrip())
    if match is None:
        raise InvalidRequest(f"{where}: the value is not one word; put quotes around it, without escapes")
    return next((group for group in match.groups() if group is not None), "").strip()


def _cached(path: str, is_ours: bool, read: Callable[[str], Layer]) -> Layer | None:
    try:
        facts = os.stat(path)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return None  # a folder that this user may not search is not theirs
    except OSError as error:
        raise InvalidRequest(f"{path}: cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(facts.st_mode):
        if not is_ours:
            return None  # for example a virtual environment called .env
        raise InvalidRequest(f"{path}: is not a regular file; remove it, or put a file in its place")
    cached = _cache.get((path, is_ours))
    if cached is not None and cached[0] == (facts.st_mtime_ns, facts.st_ctime_ns, facts.st_size, facts.st_ino):
        return cached[1]
    try:
        text, facts = _read_text(path)
    except InvalidRequest as error:
        if is_ours or os.path.basename(path) == ".env":
            raise
        _warn_ignored(f"{error}; it is ignored")
        return None
    layer = read(text)
    if len(_cache) >= _MAX_CACHED:
        _cache.clear()
    _cache[path, is_ours] = ((facts.st_mtime_ns, facts.st_ctime_ns, facts.st_size, facts.st_ino), layer)
    return layer


def _read_text(path: str) -> tuple[str, os.stat_result]:
    try:
        with open(path, "rb", opener=lambda name, _: os.open(name, _OPEN_FLAGS)) as opened:
            facts = os.fstat(opened.fileno())
            data = opened.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise InvalidRequest(f"{path}: cannot be read: {error.strerror}; correct its permissions") from None
    if len(data) > MAX_FILE_BYTES:
        raise InvalidRequest(f"{path}: is larger than {MAX_FILE_BYTES} bytes, the maximum for a configuration file")
    try:
        return data.decode("utf-8-sig"), facts
    except UnicodeDecodeError as error:
        if os.path.basename(path) == ".env":
            return data.decode("utf-8", "replace"), facts
        raise InvalidRequest(f"{path}: is not UTF-8 (byte {error.start})") from None


def _read_layer(text: str, path: str, format_: Format) -> Layer:
    document = format_.parse(text, path) if format_.is_ours else _shared_part(text, path, format_)
    if document is None:
        return {}
    if not isinstance(document, Mapping):
        raise InvalidRequest(f"{path}: the whole file must be a mapping of keys to values")
    return read_layer(_pairs(document, path, format_), format_.readers, origin=Origin(path), where=f"{path}: ")


def _shared_part(text: str, path: str, format_: Format) -> Mapping[object, object] | None:
    """Return Cloche's part of a file that may be another program's; the rest is ignored, with a warning.

    A section with a key unlike any of Cloche's is taken for another program's, unless it asks for isolation.
    """
    if not re.search(r"\b(tier|sandbox)\b", text):
        return None  # without these words it has no settings, even if it is not valid YAML
    try:
        document = format_.parse(text, path)
    except InvalidRequest as error:
        if _ASKS_FOR_ISOLATION.search(text):
            raise
        _warn_ignored(f"{error}; the file seems to be another program's, and is ignored")
        return None
    if not isinstance(document, Mapping):
        return None
    shared: dict[object, object] = {}
    if "tier" in document:
        if str(document["tier"]).strip().isdigit():
            shared["tier"] = document["tier"]
        else:
            _warn_ignored(f"{path}: the key 'tier' seems to be another program's, and is ignored: it is not a number")
    section = document.get("sandbox")
    if isinstance(section, Mapping):
        unknown = islice((str(key) for key in section if key not in format_.readers), _MAX_COMPARED_KEYS)
        foreign = next((key for key in unknown if not nearest(key, format_.readers)), None)
        if foreign is None or any(key in section for key in _ISOLATION):
            shared["sandbox"] = section
        else:
            reason = f"Cloche has no key like {foreign[:80]!r}"
            _warn_ignored(f"{path}: the section 'sandbox' seems to be another program's, and is ignored: {reason}")
    return shared


@lru_cache(maxsize=_MAX_CACHED)
def _warn_ignored(message: str) -> None:
    log.warning("%s", message)


def _pairs(document: Mapping[object, object], path: str, format_: Format) -> Iterator[tuple[str, object]]:
    """Yield every known key with its value; keys of `sandbox` have the section before their name."""
    for key, value in document.items():
        if key == "sandbox":
            yield from _section(value, path, format_)
        elif isinstance(key, str) and key in format_.readers:
            yield key, value
        elif format_.is_strict:
            raise _unknown_key(path, str(key), str(key), format_)


def _section(section: object, path: str, format_: Format) -> Iterator[tuple[str, object]]:
    if section is None:
        return
    if not isinstance(section, Mapping):
        raise InvalidRequest(f"{path}: sandbox must be a mapping of keys to values")
    for key, value in section.items():
        if not isinstance(key, str) or key not in format_.readers:
            raise _unknown_key(path, f"sandbox.{key}", str(key), format_)
        yield f"sandbox.{key}", value


def _unknown_key(path: str, name: str, key: str, format_: Format) -> InvalidRequest:
    return InvalidRequest(f"{path}: unknown key {name[:80]!r}; {hint_for(key, format_.readers)}")


def variable_layer(environ: Mapping[str, str]) -> Layer:
    """Return the layer of the environment; an empty variable counts as unset."""
    variables = {name: environ[name] for name in VARIABLE_READERS if environ.get(name, "").strip()}
    layers = [
        read_layer([(name, value)], VARIABLE_READERS, origin=Origin.variable(name), where="environment ")
        for name, value in variables.items()
    ]
    merged: dict[str, ConfiguredValue] = {}
    for layer in layers:
        chosen = merged.get("backend")
        merged.update(layer)
        if chosen is not None and "prefer" in layer:
            with_auto_backend({**merged, "backend": chosen}, where="environment ")
    return merged


def argument_layer(arguments: Mapping[str, Any]) -> Layer:
    """Return the layer of the caller's keywords; None and an empty list count as not given."""
    given_arguments = {
        name: value for name, value in arguments.items() if value is not None and not _is_empty_list(value)
    }
    unknown = [name for name in given_arguments if name not in ARGUMENT_READERS]
    if unknown:
        raise InvalidRequest(f"unknown argument {unknown[0]!r}; known arguments: {', '.join(ARGUMENT_READERS)}")
    layer = read_layer(given_arguments.items(), ARGUMENT_READERS, origin=ARGUMENT, where="")
    hosts = layer.get("network_allow")
    if hosts is None or "network" in layer:
        return layer
    return {**layer, "network": with_value(hosts, "allowlist")}  # a list of hosts for one run implies an allowlist


def _is_empty_list(value: object) -> bool:
    return isinstance(value, tuple | list) and not value
