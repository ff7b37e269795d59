"""Readers of lock files and manifests of packages: bytes in, names with versions out. Pure; nothing is executed.

Files may be hostile: each reader takes time and memory in proportion to the file. TOML lock files are read line by
line, in the form that their tools write. Manifests are small and parsed whole. A reader raises ValueError for a file
that is not its own; the yielded values are not checked yet.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

from cloche.core import toml
from cloche.core.record import dataclass

MOST_LOCK_BYTES = 16 << 20
MOST_MANIFEST_BYTES = 256 << 10
MOST_LINE, MOST_LINES = 4096, 1_000_000  # bytes of a line that are parsed, and lines of a file
MOST_VALUES = 1_000_000  # of a JSON or YAML document
MOST_DEPTH = 50

NamedVersion = tuple[object, object]  # name and pinned version, as in the file, unchecked
Reader = Callable[[bytes], Iterator[NamedVersion]]

_REQUIREMENT = re.compile(
    r"([A-Za-z0-9][A-Za-z0-9._-]*)(?=\s*(?:[\[<>=!~;@#(\\]|$))\s*(?:\[[^\]]*\])?\s*(?:===?\s*([A-Za-z0-9][A-Za-z0-9.!+_-]*)\s*(?=[;#\\]|--|$))?"
)
_EXACT = re.compile(r"=?=?\s*v?([0-9]+(?:\.[0-9]+){1,3}(?:[-+.][0-9A-Za-z.+-]*)?)")
_TOML_PAIR = re.compile(r'(name|version)\s*=\s*"([^"\\]*)"\s*$')
_TOML_SOURCE = re.compile(r"source\s*=\s*(.*)$")
_YARN_KEY = re.compile(r'"?((?:@[^@"/\s]+/)?[^@"/\s,:]+)@')
_YARN_PAIR = re.compile(r'  (version|resolution):?\s+"?([^"\s]+)"?\s*$')
# name@1.2.3, /name@1.2.3(peer@4.5.6), and /name/1.2.3_peer@4.5.6 of lock file version 5
_PNPM_KEY = re.compile(r"/?((?:@[^/@]+/)?[^/@]+)[@/]([0-9][^_(]*)")
_GEM = re.compile(r"    ([A-Za-z0-9._-]+) \(([^()\s]+)\)$")
_GEMFILE = re.compile(r"""\s*+gem\s*+\(?\s*+["']([A-Za-z0-9._-]+)["'](?:\s*,\s*["']([^"']*)["'])?""")
_GO_MODULE = re.compile(r"(?:require\s+)?([A-Za-z0-9][^\s()]*)\s+(v[0-9][^\s]*)(?:\s|$)")
# A string (an unclosed one to the end), or a comment, or a comma before a closing bracket.
_BEYOND_JSON = re.compile(
    r'("(?:[^"\\]|\\.)*+(?:"|\\?\Z))|//[^\n]*+|/\*(?:[^*]|\*(?!/))*+(?:\*/|\Z)|,(?=\s*+[}\]])', re.DOTALL
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DependencyFile:
    """Hold a row of `FILES`: a file's name, ecosystem, manager, and reader."""

    name: str
    ecosystem: str
    manager: str
    read: Reader
    is_lock: bool = True

    @property
    def most_bytes(self) -> int:
        """Return the bound of such a file in bytes."""
        return MOST_LOCK_BYTES if self.is_lock else MOST_MANIFEST_BYTES


def read_toml(data: bytes) -> Mapping[str, Any]:
    """Return a parsed TOML manifest. Raises ValueError."""
    return toml.read_toml(data.decode("utf-8-sig"))


def read_json(data: bytes) -> Mapping[str, Any]:
    """Return a parsed JSON document, a mapping. Raises ValueError."""
    if sum(map(data.count, (b"{", b"[", b","))) > MOST_VALUES:
        raise ValueError(f"it has more than {MOST_VALUES} values")
    try:
        document = json.loads(data.decode("utf-8-sig"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(document, dict):
        raise ValueError("it is not a mapping")
    return document


def mapping(value: object) -> Mapping[str, Any]:
    """Return a mapping unchanged, and an empty one for any other value."""
    return value if isinstance(value, dict) else {}


def _lines(data: bytes) -> Iterator[str]:
    for number, line in enumerate(io.BytesIO(data)):  # a list of lines could be ten times as large as the file
        if number == MOST_LINES:
            raise ValueError(f"it has more than {MOST_LINES} lines")
        yield line[:MOST_LINE].decode("utf-8", "replace").rstrip()


def _texts(value: object) -> Iterable[str]:
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


def exact(requirement: object) -> str | None:
    """Return the version that a requirement pins, None for a range."""
    match = _EXACT.fullmatch(requirement.strip()) if isinstance(requirement, str) else None
    return match[1] if match else None


# Python


def _read_toml_lock(data: bytes) -> Iterator[NamedVersion]:
    """Yield `[[package]]` of uv.lock and poetry.lock, except the workspace's own."""
    package: dict[str, str] | None = None
    for line in _lines(data):
        if line.startswith("["):
            yield from _toml_package(package)
            package = {} if line == "[[package]]" else None
        elif package is not None and (pair := _TOML_PAIR.match(line)):
            package.setdefault(pair[1], pair[2])
        elif package is not None and (source := _TOML_SOURCE.match(line)):
            package.setdefault("source", source[1])
    yield from _toml_package(package)


def _toml_package(package: Mapping[str, str] | None) -> Iterator[NamedVersion]:
    is_own = package is not None and re.match(r"\{\s*(virtual|editable|directory)\b", package.get("source", ""))
    if package and "name" in package and not is_own:
        yield package["name"], package.get("version")


def _read_cargo_lock(data: bytes) -> Iterator[NamedVersion]:
    """Yield the packages of Cargo.lock; the workspace's own have no source and are left out."""
    package: dict[str, str] = {}
    for line in chain(_lines(data), ("[[package]]",)):
        if line.startswith("["):
            if "name" in package and "source" in package:
                yield package["name"], package.get("version")
            package = {}
        elif pair := _TOML_PAIR.match(line):
            package.setdefault(pair[1], pair[2])
        elif source := _TOML_SOURCE.match(line):
            package.setdefault("source", source[1])


def _read_pipfile_lock(data: bytes) -> Iterator[NamedVersion]:
    document = read_json(data)
    for section in ("default", "develop"):
        for name, entry in mapping(document.get(section)).items():
            yield name, exact(mapping(entry).get("version"))


def _read_requirements(data: bytes) -> Iterator[NamedVersion]:
    for line in _lines(data):
        yield from _requirement(line)


def _requirement(line: str) -> Iterator[NamedVersion]:
    if match := _REQUIREMENT.match(line.strip()[:500]):
        yield match[1], match[2]


def _read_pyproject(data: bytes) -> Iterator[NamedVersion]:
    document = read_toml(data)
    project, poetry = mapping(document.get("project")), mapping(mapping(document.get("tool")).get("poetry"))
    groups = [project.get("dependencies"), *mapping(project.get("optional-dependencies")).values()]
    for listed in (*groups, *mapping(document.get("dependency-groups")).values()):
        for line in _texts(listed):
            yield from _requirement(line)
    tables = [poetry, *map(mapping, mapping(poetry.get("group")).values())]
    for name, version in _table_pairs(tables, ("dependencies", "dev-dependencies")):
        if name != "python":
            yield name, version


def _read_pipfile(data: bytes) -> Iterator[NamedVersion]:
    yield from _table_pairs([read_toml(data)], ("packages", "dev-packages"))


def _table_pairs(tables: Iterable[Mapping[str, Any]], keys: tuple[str, ...]) -> Iterator[NamedVersion]:
    """Yield names with versions of mappings such as `{name = "1.2"}` and `{name = {version = "1.2"}}`."""
    for table in tables:
        for key in keys:
            for name, requirement in mapping(table.get(key)).items():
                entry = mapping(requirement)
                if "path" not in entry and "workspace" not in entry:
                    yield str(entry.get("package", name)), exact(entry.get("version", requirement))


# JavaScript


def _read_package_lock(data: bytes) -> Iterator[NamedVersion]:
    """Read `packages` (lock file versions 2 and 3), else `dependencies` (1)."""
    document = read_json(data)
    packages = document.get("packages")
    if not isinstance(packages, dict):
        yield from _locked_tree(document, depth=0)
        return
    for path, entry in packages.items():
        is_installed = "node_modules/" in path and mapping(entry).get("link") is not True
        if is_installed:
            name = mapping(entry).get("name", path.rpartition("node_modules/")[2])
            yield name, mapping(entry).get("version")


def _locked_tree(document: Mapping[str, Any], *, depth: int) -> Iterator[NamedVersion]:
    if depth > MOST_DEPTH:
        raise ValueError("it is nested too deeply")
    for name, entry in mapping(document.get("dependencies")).items():
        yield name, mapping(entry).get("version")
        yield from _locked_tree(mapping(entry), depth=depth + 1)


def _read_yarn_lock(data: bytes) -> Iterator[NamedVersion]:
    """Read yarn.lock of yarn 1, and of later ones, which have the true name in `resolution`."""
    name, version = "", None
    for line in _lines(data):
        if line and line[0] not in " #":
            if name:
                yield name, version
            key = _YARN_KEY.match(line)
            name, version = (key[1] if key and "@workspace:" not in line else ""), None
        elif name and (pair := _YARN_PAIR.match(line)):
            if pair[1] == "version":
                version = pair[2]
            elif true := _YARN_KEY.match(pair[2]):
                name = true[1]
    if name:
        yield name, version


def _read_pnpm_lock(data: bytes) -> Iterator[NamedVersion]:
    for key in _yaml_keys(data, "packages"):
        if match := _PNPM_KEY.match(key):
            yield match[1], match[2]


def _yaml_keys(data: bytes, section: str) -> Iterator[str]:
    """Yield the keys of a mapping from the parser's events: no objects are built, so memory stays bounded."""
    import yaml

    depth, count, is_key, within = 0, 0, True, ""
    try:
        for event in yaml.parse(data.decode("utf-8-sig"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
            count += 1
            if count > MOST_VALUES or depth > MOST_DEPTH:
                raise ValueError("it has too many values, or is nested too deeply")
            if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
                raise ValueError("anchors (&) and aliases (*) are not allowed")
            if isinstance(event, yaml.CollectionEndEvent):
                depth -= 1
                is_key = True  # if this level is a mapping; only the first two levels matter
            elif isinstance(event, yaml.NodeEvent):
                if is_key and depth == 1:
                    within = str(getattr(event, "value", ""))
                elif is_key and depth == 2 and within == section:
                    yield str(getattr(event, "value", ""))
                is_collection = isinstance(event, yaml.CollectionStartEvent)
                depth += is_collection
                is_key = True if is_collection else not is_key
    except yaml.YAMLError as error:
        raise ValueError(f"not YAML: {str(error).splitlines()[0]}") from None


def _read_bun_lock(data: bytes) -> Iterator[NamedVersion]:
    if data.count(b'"') > 2 * MOST_VALUES:
        raise ValueError(f"it has more than {MOST_VALUES} texts")
    plain = _BEYOND_JSON.sub(lambda match: match[1] or "", data.decode("utf-8-sig"))
    for entry in mapping(read_json(plain.encode()).get("packages")).values():
        for text in [*_texts(entry)][:1]:
            name, _, version = text[1:].rpartition("@")
            if not version.startswith(("workspace:", "file:", "link:")):
                yield text[0] + name, version


def _read_package_json(data: bytes) -> Iterator[NamedVersion]:
    document = read_json(data)
    keys = ("dependencies", "devDependencies", "optionalDependencies")
    yield from _table_pairs([document], keys)


# Rust, Go, Ruby


def _read_cargo_toml(data: bytes) -> Iterator[NamedVersion]:
    document = read_toml(data)
    tables = [document, mapping(document.get("workspace")), *map(mapping, mapping(document.get("target")).values())]
    for name, _ in _table_pairs(tables, ("dependencies", "dev-dependencies", "build-dependencies")):
        yield name, None  # "1.2.3" is a range here


def _read_go_mod(data: bytes) -> Iterator[NamedVersion]:
    """Yield the required modules. go.mod decides the versions; go.sum also has hashes of unused ones."""
    section = ""
    for line in _lines(data):
        text = line.partition("//")[0].strip()
        if text.endswith("("):
            section = text[:-1].strip()
        elif text == ")":
            section = ""
        elif (section == "require" or text.startswith("require ")) and (match := _GO_MODULE.match(text)):
            yield match[1], match[2]


def _read_go_sum(data: bytes) -> Iterator[NamedVersion]:
    for line in _lines(data):
        match = _GO_MODULE.match(line)
        if match and not match[2].endswith("/go.mod"):
            yield match[1], match[2]


def _read_gemfile_lock(data: bytes) -> Iterator[NamedVersion]:
    section = ""
    for line in _lines(data):
        if line and not line.startswith(" "):
            section = line
        elif section in ("GEM", "GIT") and (match := _GEM.match(line)):
            yield match[1], match[2].partition("-")[0]  # after the hyphen is a platform


def _read_gemfile(data: bytes) -> Iterator[NamedVersion]:
    for line in _lines(data):
        if match := _GEMFILE.match(line):
            yield match[1], exact(match[2])


# In order of precedence: names from an earlier file of an ecosystem are not taken from a later one.
FILES: tuple[DependencyFile, ...] = (
    DependencyFile(name="uv.lock", ecosystem="python", manager="uv", read=_read_toml_lock),
    DependencyFile(name="poetry.lock", ecosystem="python", manager="poetry", read=_read_toml_lock),
    DependencyFile(name="Pipfile.lock", ecosystem="python", manager="pipenv", read=_read_pipfile_lock),
    DependencyFile(name="requirements.txt", ecosystem="python", manager="pip", read=_read_requirements),
    DependencyFile(name="pyproject.toml", ecosystem="python", manager="", read=_read_pyproject, is_lock=False),
    DependencyFile(name="Pipfile", ecosystem="python", manager="pipenv", read=_read_pipfile, is_lock=False),
    DependencyFile(name="package-lock.json", ecosystem="javascript", manager="npm", read=_read_package_lock),
    DependencyFile(name="yarn.lock", ecosystem="javascript", manager="yarn", read=_read_yarn_lock),
    DependencyFile(name="pnpm-lock.yaml", ecosystem="javascript", manager="pnpm", read=_read_pnpm_lock),
    DependencyFile(name="bun.lock", ecosystem="javascript", manager="bun", read=_read_bun_lock),
    # Binary: pinned versions are not read, and names come from package.json.
    DependencyFile(name="bun.lockb", ecosystem="javascript", manager="bun", read=lambda _: iter(())),
    DependencyFile(name="package.json", ecosystem="javascript", manager="", read=_read_package_json, is_lock=False),
    DependencyFile(name="Cargo.lock", ecosystem="rust", manager="cargo", read=_read_cargo_lock),
    DependencyFile(name="Cargo.toml", ecosystem="rust", manager="cargo", read=_read_cargo_toml, is_lock=False),
    DependencyFile(name="go.mod", ecosystem="go", manager="go", read=_read_go_mod),
    DependencyFile(name="go.sum", ecosystem="go", manager="go", read=_read_go_sum),
    DependencyFile(name="Gemfile.lock", ecosystem="ruby", manager="bundler", read=_read_gemfile_lock),
    DependencyFile(name="Gemfile", ecosystem="ruby", manager="bundler", read=_read_gemfile, is_lock=False),
)
