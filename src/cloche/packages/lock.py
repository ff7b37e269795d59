"""`cloche.lock`: a pinned set in a file that one can read, commit, and require.

What it pins may only come from the operator's own index, whoever wrote the file; hashes say which files those are.
"""

from __future__ import annotations

import hashlib
import json
import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from cloche.core.errors import InvalidRequest
from cloche.core.layers import Target
from cloche.hostfs import open_folder
from cloche.hostfs import replace as replace_file

from .requirements import Requirement, parse_requirements
from .resolve import Pin

FILE = "cloche.lock"
MOST_BYTES = 4 << 20
VERSION = 1
_HEAD = """\
# Written by "cloche packages lock"; "--locked" requires it. Do not edit.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Locked:
    """Hold what a lock file says: what was asked for, the pinned set, and the interpreter that it is for."""

    file: str
    asked: tuple[Requirement, ...]
    pins: tuple[Pin, ...]
    target: Mapping[str, object] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """Return what tells this set from another one."""
        rows = [pin.identity for pin in self.pins]
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()

    def part(self, *, is_npm: bool) -> Locked:
        """Return what it says of npm's packages, or of Python's."""
        asked = tuple(one for one in self.asked if one.is_npm == is_npm)
        return replace(self, asked=asked, pins=tuple(pin for pin in self.pins if bool(pin.at) == is_npm))

    def check(self, asked: Sequence[Requirement], target: Target) -> None:
        """Raise InvalidRequest where it is for other requirements, or for another interpreter."""
        again = 'write it again: "cloche packages lock"'
        if set(asked) != set(self.asked):
            more = ", ".join(sorted({str(one) for one in set(asked) - set(self.asked)}))
            fewer = ", ".join(sorted({str(one) for one in set(self.asked) - set(asked)}))
            what = "; ".join(filter(None, (more and f"not in it: {more}", fewer and f"only in it: {fewer}")))
            raise InvalidRequest(f"packages: {self.file} is for other requirements ({what}); {again}")
        if all(one.is_npm for one in self.asked):  # which no version of Python matters to
            target = replace(target, tag=str(self.target.get("tag")))
        if lacking := [one.text for one in asked if not _is_met(one, self.pins)]:
            raise InvalidRequest(f"packages: {self.file} pins nothing for {', '.join(lacking)}; {again}")
        if not target.fits(dict(self.target)):
            raise InvalidRequest(
                f"packages: {self.file} is for {self.target.get('tag')} on {self.target.get('platform')}, and here is "
                f"{target.tag} on {target.platform}; {again}"
            )


def _is_met(asked: Requirement, pins: Iterable[Pin]) -> bool:
    """Tell whether a pin is what a requirement asks for; what holds on some hosts alone need have none."""
    pinned = [pin.version for pin in pins if pin.name == asked.name]
    if asked.is_npm:
        return bool(pinned)
    from packaging.requirements import Requirement as Parsed
    from packaging.version import InvalidVersion

    parsed = Parsed(asked.text)
    try:
        return any(parsed.specifier.contains(one, prereleases=True) for one in pinned) or (
            parsed.marker is not None and not pinned
        )
    except InvalidVersion:
        return False


def format_lock(asked: Iterable[Requirement], pins: Iterable[Pin], target: Target) -> str:
    """Return the text of a lock file."""
    lines = [_HEAD, f"version = {VERSION}", f"requirements = {json.dumps([one.text for one in asked])}", "", "[target]"]
    lines += [f"{name} = {json.dumps(value)}" for name, value in target.as_dict().items() if name != "python"]
    for pin in pins:
        lines += ["", "[[packages]]", *_rows(pin), *(["source = true"] if pin.is_source else [])]
        for one in pin.build:
            lines += ["", "[[packages.build]]", *_rows(one)]
    return "\n".join(lines) + "\n"


def _rows(pin: Pin) -> list[str]:
    return [f"{name} = {json.dumps(value)}" for name, value in pin.as_dict().items() if name != "build"]


def write_lock(path: str, asked: Iterable[Requirement], pins: Iterable[Pin], target: Target) -> None:
    """Write a lock file, whole or not at all. Raises InvalidRequest where it cannot be written."""
    folder, name = os.path.split(os.path.abspath(path))
    try:
        at = open_folder(folder, follows_link=True)
        try:
            replace_file(at, name, format_lock(asked, pins, target).encode())
        finally:
            os.close(at)
    except OSError as error:
        raise InvalidRequest(f"packages: cannot write {path}: {error.strerror}") from error


def read_lock(path: str) -> Locked:
    """Read a lock file. Raises InvalidRequest where there is none, or it is none."""
    try:
        with open(path, "rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        hint = 'write it first: "cloche packages lock"' if isinstance(error, FileNotFoundError) else "correct that"
        raise InvalidRequest(f"packages: cannot read {path}: {error.strerror}; {hint}") from None
    try:
        said = tomllib.loads(data.decode())
        if said.get("version") != VERSION or len(data) > MOST_BYTES:
            raise ValueError("it is of another version")
        pins = _pins(said.get("packages", []))
        return Locked(
            file=path, asked=parse_requirements(said["requirements"]), pins=pins, target=dict(said.get("target", {}))
        )
    except InvalidRequest:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidRequest(f"packages: {path} is no lock file of Cloche's: {error}") from None


def _pins(said: object) -> tuple[Pin, ...]:
    if not isinstance(said, list):
        raise TypeError("a list of packages is none")
    return tuple(sorted(map(_pin, said)))


def _pin(said: Mapping[str, object]) -> Pin:
    size = said.get("size", 0)
    if not isinstance(size, int):
        raise TypeError("a size is no number")
    return Pin(
        name=str(said["name"]),
        version=str(said["version"]),
        url=str(said["url"]),
        sha256=str(said.get("sha256", "")),
        size=size,
        sha512=str(said.get("sha512", "")),
        at=str(said.get("at", "")),
        build=_pins(said.get("build", [])),
    )
