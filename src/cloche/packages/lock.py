"""`cloche.lock`: a pinned set in a file that can be read, committed, and required.

It names versions and files and no more, and its author is not trusted: the requirements are resolved again with these
versions, by today's rules, from the operator's own index or a mirror. So no package is installed that the requirements
do not need.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from urllib.parse import quote

from cloche.core.errors import InvalidRequest
from cloche.core.layers import Target
from cloche.core.policy import MOST_LOCK_CHARS, LockText
from cloche.core.record import dataclass, field, replace
from cloche.core.toml import read_toml
from cloche.hostfs import open_folder
from cloche.hostfs import replace as replace_file

from .requirements import Requirement, parse_requirements
from .resolve import NAME, Pin, is_version

FILE, SENT = "cloche.lock", "the lock that was sent"
MOST_BYTES = 4 << 20
VERSION = 2
_HEAD = """\
# Written by "cloche packages lock"; "--locked" requires it. Do not edit.
"""


_AGAIN = 'write a new one: "cloche packages lock"'


@dataclass(frozen=True, slots=True, kw_only=True)
class Locked:
    """Hold the content of a lock file: the requirements, the pinned set, and its interpreter.

    The address of a Python pin is the name of its file, an npm pin has no address: the index knows the location.
    `is_build` is the part for the build of a source.
    """

    file: str
    asked: tuple[Requirement, ...]
    pins: tuple[Pin, ...]
    target: Mapping[str, object] = field(default_factory=dict)
    is_build: bool = False

    @property
    def digest(self) -> str:
        """Return what tells this set from another one."""
        rows = [pin.identity for pin in self.pins]
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()

    def part(self, *, is_npm: bool) -> Locked:
        """Return the part for npm packages, or for Python packages."""
        requirements = tuple(requirement for requirement in self.asked if requirement.is_npm == is_npm)
        return replace(self, asked=requirements, pins=tuple(pin for pin in self.pins if bool(pin.at) == is_npm))

    def of_build(self, pin: Pin) -> Locked:
        """Return the part for the build of a source. Its backend may ask for all of that in turns."""
        locked = next((candidate for candidate in self.pins if candidate.text == pin.text), pin)
        return replace(self, pins=locked.build, is_build=True)

    def check_resolved(self, pins: Iterable[Pin]) -> None:
        """Raise InvalidRequest if the resolved set differs from the pinned one."""
        mine, resolved = {pin.identity: pin for pin in self.pins}, {pin.identity: pin for pin in pins}
        lacking = sorted(resolved[identity].text for identity in resolved.keys() - mine.keys())
        idle = sorted(mine[identity].text for identity in mine.keys() - resolved.keys())
        if lacking:
            raise InvalidRequest(
                f"packages: {self.file} does not pin {', '.join(lacking)}, but a requested package needs that; {_AGAIN}"
            )
        if idle and not self.is_build:
            raise InvalidRequest(
                f"packages: {self.file} pins {', '.join(idle)}, which no requested package needs; {_AGAIN}"
            )

    def check(self, requirements: Sequence[Requirement], target: Target) -> None:
        """Raise InvalidRequest where it is for other requirements, or for another interpreter."""
        if set(requirements) != set(self.asked):
            more = ", ".join(sorted({str(requirement) for requirement in set(requirements) - set(self.asked)}))
            fewer = ", ".join(sorted({str(requirement) for requirement in set(self.asked) - set(requirements)}))
            difference = "; ".join(filter(None, (more and f"not in it: {more}", fewer and f"only in it: {fewer}")))
            raise InvalidRequest(f"packages: {self.file} is for other requirements ({difference}); {_AGAIN}")
        if all(requirement.is_npm for requirement in self.asked):  # which no version of Python matters to
            target = replace(target, tag=str(self.target.get("tag")))
        if lacking := [requirement.text for requirement in requirements if not _is_met(requirement, self.pins)]:
            raise InvalidRequest(f"packages: {self.file} has no pins for {', '.join(lacking)}; {_AGAIN}")
        if not target.fits(dict(self.target)):
            raise InvalidRequest(
                f"packages: {self.file} is for {self.target.get('tag')} on {self.target.get('platform')}, and here is "
                f"{target.tag} on {target.platform}; {_AGAIN}"
            )


def _is_met(requirement: Requirement, pins: Iterable[Pin]) -> bool:
    """Tell whether a pin meets a requirement. A requirement for some hosts only may have no pin."""
    pinned = [pin.version for pin in pins if pin.name == requirement.name]
    if requirement.is_npm:
        return bool(pinned)
    from packaging.requirements import Requirement as Parsed
    from packaging.version import InvalidVersion

    parsed = Parsed(requirement.text)
    try:
        return any(parsed.specifier.contains(version, prereleases=True) for version in pinned) or (
            parsed.marker is not None and not pinned
        )
    except InvalidVersion:
        return False


def format_lock(requirements: Iterable[Requirement], pins: Iterable[Pin], target: Target) -> str:
    """Return the text of a lock file."""
    lines = [
        _HEAD,
        f"version = {VERSION}",
        f"requirements = {json.dumps([requirement.text for requirement in requirements])}",
        "",
        "[target]",
    ]
    lines += [f"{name} = {json.dumps(value)}" for name, value in target.as_dict().items() if name != "python"]
    for pin in pins:
        lines += ["", "[[packages]]", *_rows(pin), *(["source = true"] if pin.is_source else [])]
        for built_with in pin.build:
            lines += ["", "[[packages.build]]", *_rows(built_with)]
    return "\n".join(lines) + "\n"


def _rows(pin: Pin) -> list[str]:
    fields = {"file" if name == "url" else name: value for name, value in pin.as_dict().items() if name != "build"}
    fields |= {"file": "" if pin.at else pin.file_name}
    return [f"{name} = {json.dumps(value)}" for name, value in fields.items() if value or name != "file"]


def write_lock(path: str, requirements: Iterable[Requirement], pins: Iterable[Pin], target: Target) -> None:
    """Write a lock file, whole or not at all. Raises InvalidRequest where it cannot be written."""
    folder, name = os.path.split(os.path.abspath(path))
    try:
        folder_fd = open_folder(folder, follows_link=True)
        try:
            replace_file(folder_fd, name, format_lock(requirements, pins, target).encode())
        finally:
            os.close(folder_fd)
    except OSError as error:
        raise InvalidRequest(f"packages: cannot write {path}: {error.strerror}") from error


def read_lock(path: str) -> Locked:
    """Read a lock file, or the text of one. Raises InvalidRequest if it is missing or invalid."""
    return _parsed(path.encode(), SENT) if isinstance(path, LockText) else _parsed(_content(path), path)


def read_text(path: str) -> LockText:
    """Return the text of a lock file, to be sent. Raises InvalidRequest if it is missing, invalid, or too long."""
    data = path.encode() if isinstance(path, LockText) else _content(path)
    _parsed(data, path)
    if len(data) > MOST_LOCK_CHARS:
        raise InvalidRequest(f"packages: {path} has {len(data)} bytes, and {MOST_LOCK_CHARS} are sent at the most")
    return LockText(data.decode())


def _content(path: str) -> bytes:
    try:
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise InvalidRequest(f"packages: {path} is not a regular file")
            return file.read(MOST_BYTES + 1)
    except OSError as error:
        hint = 'write one first: "cloche packages lock"' if isinstance(error, FileNotFoundError) else "correct that"
        raise InvalidRequest(f"packages: cannot read {path}: {error.strerror}; {hint}") from None


def _parsed(data: bytes, path: str) -> Locked:
    try:
        document = read_toml(data.decode()) if len(data) <= MOST_BYTES else {}
        if document.get("version") != VERSION:
            raise ValueError(f"it was written by another version of Cloche; {_AGAIN}")
        pins = _pins(document.get("packages", []))
        return Locked(
            file=path,
            asked=parse_requirements(document["requirements"]),
            pins=pins,
            target=dict(document.get("target", {})),
        )
    except InvalidRequest:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidRequest(f"packages: {path} is not a lock file of Cloche's: {error}") from None


def _pins(rows: object) -> tuple[Pin, ...]:
    if not isinstance(rows, list):
        raise TypeError("a list of packages is invalid")
    return tuple(sorted(map(_pin, rows)))


def _pin(row: Mapping[str, object]) -> Pin:
    size, location = row.get("size", 0), str(row.get("at", ""))
    if not isinstance(size, int):
        raise TypeError("a size is no number")
    name, version = str(row["name"]), str(row["version"])
    if not location and not (NAME.fullmatch(name) and is_version(version)):
        raise ValueError(f"{name[:80]!r} {version[:40]!r} is not a package with its version")
    return Pin(
        name=name,
        version=version,
        url="" if location else quote(str(row["file"])),
        sha256=str(row.get("sha256", "")),
        size=size,
        sha512=str(row.get("sha512", "")),
        at=location,
        build=_pins(row.get("build", [])),
    )
