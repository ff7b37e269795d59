"""Detect a workspace's languages, their versions, and its set-up commands, from its files alone.

Nothing is executed. A file that is too large or of the wrong kind is left out, with a note.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from ..core.record import dataclass
from .dependencies import ManagedBy, find_managers, read_file
from .dependency_files import MOST_MANIFEST_BYTES, mapping, read_json, read_toml

# A stored version or range: one line of harmless characters.
_VERSION = re.compile(r"[0-9A-Za-z^~<>=!*.,|+ _/-]{1,64}")
_GO = re.compile(rb"^go[ \t]+([0-9][0-9A-Za-z.]{0,31})", re.MULTILINE)
_RUBY = re.compile(rb"""^ruby[ \t]+["']([^"'\n]{1,64})["']""", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectedLanguage:
    """Hold a language, its required version or range, and the file that says so."""

    name: str
    version: str | None = None
    evidence: str


def sources_of(folder: int, notes: list[str]) -> tuple[ManagedBy, ...]:
    """Return the files of dependencies with their package managers."""
    return find_managers(folder, notes=notes)


def detect_languages(folder: int, managed: Iterable[ManagedBy], notes: list[str]) -> tuple[DetectedLanguage, ...]:
    """Return the languages of an open folder. The first file with a version is the evidence."""
    languages: dict[str, DetectedLanguage] = {}
    for file, language, read in _EVIDENCE:
        if language in languages:
            continue
        data = read_file(folder, file, MOST_MANIFEST_BYTES, notes)
        version = _version_in(file, data, read, notes) if data is not None else None
        if version is not None:
            languages[language] = DetectedLanguage(name=language, version=version, evidence=file)
    for file_row in managed:
        languages.setdefault(file_row.ecosystem, DetectedLanguage(name=file_row.ecosystem, evidence=file_row.file))
    return tuple(languages[name] for name in _LANGUAGES if name in languages)


def detect_setup(managed: Iterable[ManagedBy]) -> tuple[tuple[str, ...], ...]:
    """Return one command for each ecosystem, by the package manager of its first file. Pure."""
    first: dict[str, ManagedBy] = {}
    for file_row in managed:
        first.setdefault(file_row.ecosystem, file_row)
    return tuple(_command(file_row) for file_row in first.values())


def _command(file_row: ManagedBy) -> tuple[str, ...]:
    locked, free = _COMMANDS[file_row.manager]
    return locked if file_row.is_lock else free


def _version_in(file: str, data: bytes, read: Callable[[bytes], object], notes: list[str]) -> str | None:
    try:
        value = read(data)
    except ValueError as error:
        line = f"{file}: has no version: {' '.join(str(error).split())[:200]}"
        if line not in notes:
            notes.append(line)
        return None
    return value.strip() if isinstance(value, str) and _VERSION.fullmatch(value.strip()) else None


def _line(data: bytes) -> object:
    lines = data[:4096].decode("utf-8", "replace").splitlines()
    return next((line for line in map(str.strip, lines) if line and not line.startswith("#")), None)


def _matched(pattern: re.Pattern[bytes]) -> Callable[[bytes], object]:
    def read(data: bytes) -> object:
        match = pattern.search(data)
        return match[1].decode("utf-8", "replace") if match else None

    return read


def _within(read: Callable[[bytes], Mapping[str, object]], *keys: str) -> Callable[[bytes], object]:
    def look(data: bytes) -> object:
        value: object = read(data)
        for key in keys:
            value = mapping(value).get(key)
        return value

    return look


_LANGUAGES = ("python", "javascript", "rust", "go", "ruby")
# In order of precedence for each language.
_EVIDENCE: Sequence[tuple[str, str, Callable[[bytes], object]]] = (
    (".python-version", "python", _line),
    ("pyproject.toml", "python", _within(read_toml, "project", "requires-python")),
    (".nvmrc", "javascript", _line),
    (".node-version", "javascript", _line),
    ("package.json", "javascript", _within(read_json, "engines", "node")),
    ("rust-toolchain.toml", "rust", _within(read_toml, "toolchain", "channel")),
    ("rust-toolchain", "rust", _line),
    ("go.mod", "go", _matched(_GO)),
    (".ruby-version", "ruby", _line),
    ("Gemfile", "ruby", _matched(_RUBY)),
)
# By package manager: with a lock file, and with a manifest alone.
_COMMANDS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "uv": (("uv", "sync", "--frozen"), ("uv", "sync")),
    "poetry": (("poetry", "install", "--no-interaction"), ("poetry", "install", "--no-interaction")),
    "pipenv": (("pipenv", "sync"), ("pipenv", "install")),
    "pip": (("pip", "install", "-r", "requirements.txt"), ("pip", "install", ".")),
    "npm": (("npm", "ci"), ("npm", "install")),
    "yarn": (("yarn", "install", "--frozen-lockfile"), ("yarn", "install")),
    "pnpm": (("pnpm", "install", "--frozen-lockfile"), ("pnpm", "install")),
    "bun": (("bun", "install", "--frozen-lockfile"), ("bun", "install")),
    "cargo": (("cargo", "fetch", "--locked"), ("cargo", "fetch")),
    "go": (("go", "mod", "download"), ("go", "mod", "download")),
    "bundler": (("bundle", "install"), ("bundle", "install")),
}
