"""The dependencies of a workspace, found without executing anything: lock files first, then manifests.

Only regular files of an open folder are read, and no link is followed. A file that is too large or of the wrong kind is
left out, with a note.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator, Mapping
from typing import Any

from cloche.core.ceilings import normalize_package
from cloche.core.escape import escape_line
from cloche.core.record import dataclass
from cloche.hostfs import open_regular

from .dependency_files import FILES, DependencyFile, mapping, read_json, read_toml

MOST_DEPENDENCIES = 10_000
# Names and versions are ASCII in every ecosystem; nothing else is stored or shown.
_NAME = re.compile(r"[!-~]{1,256}")
_DEFAULT_MANAGERS = {"python": "pip", "javascript": "npm"}
_MANAGERS = {"python": ("uv", "poetry", "pipenv", "pip"), "javascript": ("npm", "yarn", "pnpm", "bun")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependency:
    """Hold one package: ecosystem, manager, name, pinned version if any, and the file that names it."""

    ecosystem: str
    manager: str
    name: str
    version: str | None
    source: str

    def as_dict(self) -> dict[str, Any]:
        """Return it in the wire's format."""
        return {
            "ecosystem": self.ecosystem, "manager": self.manager, "name": self.name, "version": self.version,
            "source": self.source,
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagedBy:
    """Hold a workspace's file of dependencies and its package manager."""

    ecosystem: str
    manager: str
    file: str
    is_lock: bool


def find_dependencies(folder: int, *, notes: list[str] | None = None) -> tuple[Dependency, ...]:
    """Return the dependencies of the workspace behind a descriptor, at most 10,000, in the order of `FILES`.

    A name from an earlier file of its ecosystem is not taken from a later one. `notes` gets a line with the reason for
    each omission; without `notes`, omissions go unreported. Raises OSError for an unreadable folder.
    """
    lines: list[str] = [] if notes is None else notes
    dependencies: dict[tuple[str, str, str | None], Dependency] = {}
    sources: dict[tuple[str, str], str] = {}
    for row, data, managed in _present(folder, lines):
        for name, version in _checked(row, data, lines):
            key = normalize_package(name) if row.ecosystem == "python" else name
            if sources.setdefault((row.ecosystem, key), row.name) != row.name:
                continue
            if (row.ecosystem, key, version) not in dependencies and len(dependencies) == MOST_DEPENDENCIES:
                lines.append(f"{row.name}: only the first {MOST_DEPENDENCIES} dependencies are listed")
                return tuple(dependencies.values())
            dependencies.setdefault(
                (row.ecosystem, key, version),
                Dependency(
                    ecosystem=row.ecosystem, manager=managed.manager, name=name, version=version, source=row.name
                ),
            )
    return tuple(dependencies.values())


def find_managers(folder: int, *, notes: list[str] | None = None) -> tuple[ManagedBy, ...]:
    """Return a workspace's files of dependencies with their package managers, in the order of `FILES`."""
    return tuple(managed for _, _, managed in _present(folder, [] if notes is None else notes))


def read_file(folder: int, name: str, most_bytes: int, notes: list[str]) -> bytes | None:
    """Return a regular file of an open folder; None if it is missing, or, with a note, if it is refused."""
    try:
        fd, facts = open_regular(name, folder)
        with open(fd, "rb") as file:
            data = file.read(most_bytes + 1) if facts.st_size <= most_bytes else b""
    except FileNotFoundError:
        return None
    except OSError as error:
        why = "a link" if error.errno == errno.ELOOP else error.strerror
    else:
        if max(facts.st_size, len(data)) <= most_bytes:
            return data
        why = f"it has more than {most_bytes} bytes"
    line = f"{name}: left out: {why}"
    if line not in notes:  # it may be read twice
        notes.append(line)
    return None


def _present(folder: int, notes: list[str]) -> Iterator[tuple[DependencyFile, bytes, ManagedBy]]:
    """Yield the existing files, one at a time. A manifest belongs to the manager of an earlier lock file."""
    locked: dict[str, str] = {}
    for row in FILES:
        data = read_file(folder, row.name, row.most_bytes, notes)
        if data is None:
            continue
        manager = row.manager or locked.get(row.ecosystem) or _manager_of(row, data)
        if row.is_lock:
            locked.setdefault(row.ecosystem, manager)
        yield row, data, ManagedBy(ecosystem=row.ecosystem, manager=manager, file=row.name, is_lock=row.is_lock)


def _manager_of(row: DependencyFile, data: bytes) -> str:
    """Return the manager that a manifest names, else the default one."""
    try:
        named = _named_in_json(data) if row.ecosystem == "javascript" else _named_in_toml(data)
    except ValueError:  # find_dependencies reports the fault
        named = ()
    return next((name for name in named if name in _MANAGERS[row.ecosystem]), _DEFAULT_MANAGERS[row.ecosystem])


def _named_in_json(data: bytes) -> tuple[str, ...]:
    named = read_json(data).get("packageManager")
    return (named.partition("@")[0],) if isinstance(named, str) else ()


def _named_in_toml(data: bytes) -> tuple[str, ...]:
    tools: Mapping[str, Any] = mapping(read_toml(data).get("tool"))
    return tuple(tools)


def _checked(row: DependencyFile, data: bytes, notes: list[str]) -> Iterator[tuple[str, str | None]]:
    """Yield the names and versions of a file that are well-formed."""
    odd = 0
    try:
        for name, version in row.read(data):
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                odd += 1
                continue
            yield name, version if isinstance(version, str) and _NAME.fullmatch(version) else None
    except ValueError as error:
        notes.append(f"{row.name}: the rest was not read: {escape_line(str(error))[:200]}")
    if odd:
        notes.append(f"{row.name}: {odd} entries with invalid names left out")
