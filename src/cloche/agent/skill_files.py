"""The files of a skill, read once and within bounds.

Theory of operation: the folder is opened once and everything below it by descriptors, one name at a time and following
no link, so whoever changes the folder meanwhile cannot lead us out of it. A link is read as text: one that stays in
the folder and ends at a regular file counts as a copy of that file, any other is a fault. Nothing is waited for, and
nothing is run.
"""

from __future__ import annotations

import os
import posixpath
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from cloche import hostfs
from cloche.core.errors import InvalidRequest
from cloche.core.plain import plain_name
from cloche.core.request import InputFile
from cloche.core.units import MIB, format_size

from .skill import Fault

MOST_FILES = 2000
MOST_BYTES = 32 * MIB
MOST_FILE_BYTES = 8 * MIB
MOST_DEPTH = 16
MOST_FAULTS = 50
MOST_SHOWN = 200  # characters of a name
# What version control, interpreters and desktops leave in a folder: no part of a skill.
LEFT_OUT = frozenset({".git", ".hg", ".svn", "__pycache__", ".DS_Store"})
_READ_ONLY, _PROGRAM = 0o444, 0o555


@dataclass(slots=True)
class Gathered:
    """Collect the files of a folder, what was left out, and what is wrong."""

    files: list[InputFile] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    size: int = 0

    @property
    def is_full(self) -> bool:
        return len(self.faults) >= MOST_FAULTS

    def blame(self, path: str, problem: str) -> None:
        if not self.is_full:
            self.faults.append(Fault(file=path, problem=problem))


@contextmanager
def open_folder(folder: str | os.PathLike[str]) -> Iterator[int]:
    """Hold the folder of a skill open. Raises InvalidRequest where there is none."""
    try:
        fd = hostfs.open_folder(folder, follows_link=True)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "a path has no NUL"
        raise InvalidRequest(f"cannot open the folder {os.fspath(folder)!r}: {why}") from None
    try:
        yield fd
    finally:
        os.close(fd)


def gather(fd: int) -> Gathered:
    """Return everything below an open folder, read-only copies of it."""
    found = Gathered()
    with suppress(_Full):
        _walk(fd, fd, "", found)
    return found


def read_bounded(fd: int, path: str, *, max_bytes: int) -> bytes:
    """Return a regular file below an open folder. Raises OSError, and ValueError with the reason for any other."""
    facts, data = _read(fd, path, max_bytes)
    if len(data) > max_bytes:
        raise ValueError(f"has more than {format_size(max_bytes)}")
    _check(facts)
    return data


class _Full(Exception):
    """Stop a walk: there is no use in going on."""


def _walk(root: int, fd: int, folder: str, found: Gathered) -> None:
    for entry in _listed(fd, folder, found):
        path = posixpath.join(folder, entry)
        if entry in LEFT_OUT:
            found.left_out.append(path)
            continue
        problem = _name_problem(entry)
        if problem:
            found.blame(plain_name(path)[:MOST_SHOWN], problem)
            continue
        try:
            mode = os.stat(entry, dir_fd=fd, follow_symlinks=False).st_mode
            if stat.S_ISDIR(mode):
                _descend(root, fd, entry, path, found)
            else:
                _take(root, fd, entry, path, mode, found)
        except OSError as error:
            found.blame(path, f"cannot be read: {error.strerror}")
        if found.is_full:
            raise _Full


def _listed(fd: int, folder: str, found: Gathered) -> list[str]:
    """Return the names in a folder, sorted; no more than may be."""
    names: list[str] = []
    with os.scandir(fd) as entries:
        for entry in entries:
            names.append(entry.name)
            if len(names) > MOST_FILES:
                found.blame(folder or ".", f"holds more than {MOST_FILES} files")
                raise _Full
    return sorted(names)


def _descend(root: int, fd: int, entry: str, path: str, found: Gathered) -> None:
    if path.count("/") + 1 > MOST_DEPTH:
        found.blame(path, f"lies deeper than {MOST_DEPTH} folders")
        return
    with hostfs.descended(fd, (entry,)) as below:
        _walk(root, below, path, found)


def _take(root: int, fd: int, entry: str, path: str, mode: int, found: Gathered) -> None:
    if len(found.files) >= MOST_FILES:
        found.blame(path, f"is one file too many: a skill has at most {MOST_FILES}")
        raise _Full
    try:
        if stat.S_ISLNK(mode):
            facts, data = _follow(root, path, os.readlink(entry, dir_fd=fd))
        elif stat.S_ISREG(mode):
            facts, data = _read(fd, entry, MOST_FILE_BYTES)
        else:
            raise ValueError(f"is {_kind(mode)}; a skill has regular files and folders only")
        _check(facts)
    except ValueError as error:
        found.blame(path, str(error))
        return
    if len(data) > MOST_FILE_BYTES:
        found.blame(
            path, f"has {format_size(facts.st_size)}; a file of a skill has at most {format_size(MOST_FILE_BYTES)}"
        )
        return
    found.size += len(data)
    if found.size > MOST_BYTES:
        found.blame(path, f"is too much: all files of a skill have at most {format_size(MOST_BYTES)} together")
        raise _Full
    is_program = bool(facts.st_mode & 0o100)
    found.files.append(InputFile(path=path, data=data, mode=_PROGRAM if is_program else _READ_ONLY))


def _follow(root: int, path: str, target: str) -> tuple[os.stat_result, bytes]:
    """Read the file that a link in the folder leads to. Raises ValueError for one that leads anywhere else."""
    inside, shown = posixpath.normpath(posixpath.join(posixpath.dirname(path), target)), plain_name(target)[:MOST_SHOWN]
    if target.startswith("/") or inside == ".." or inside.startswith("../"):
        raise ValueError(f"is a link to {shown!r}, which leads out of the skill's folder")
    if not LEFT_OUT.isdisjoint(inside.split("/")):
        raise ValueError(f"is a link to {shown!r}, which is no part of the skill")
    try:
        return _read(root, inside, MOST_FILE_BYTES)
    except OSError:
        raise ValueError(f"is a link to {shown!r}, which is no plain file of the skill's folder") from None


def _read(fd: int, path: str, max_bytes: int) -> tuple[os.stat_result, bytes]:
    """Read up to one byte more than allowed of a file, name by name. Raises OSError, ValueError for what is no file."""
    *folders, name = path.split("/")
    try:
        with hostfs.descended(fd, folders) as at:
            file, facts = hostfs.open_regular(name, at)
    except hostfs.NotRegular as error:
        raise ValueError(f"is {_kind(error.mode)}, not a regular file") from None
    with open(file, "rb") as opened:
        return facts, opened.read(max_bytes + 1) or b""  # None: nothing is there yet, in a file of the kernel's


def _check(facts: os.stat_result) -> None:
    """Refuse a file that has another name: that may be outside of the folder."""
    if facts.st_nlink > 1:
        raise ValueError("is a hard link, whose other name may be outside of the skill's folder; copy the file")


def _kind(mode: int) -> str:
    kinds = (
        (stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"),
        (stat.S_ISBLK, "a device"), (stat.S_ISCHR, "a device"), (stat.S_ISLNK, "a link"),
    )  # fmt: skip
    return next((kind for is_it, kind in kinds if is_it(mode)), "of an unknown kind")


def _name_problem(name: str) -> str:
    """Say why a name cannot travel; empty when it can."""
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return "has a name that is not UTF-8; rename it"
    if plain_name(name) != name or "\\" in name:
        return "has a control character, a character that cannot be seen, or a backslash in its name; rename it"
    return ""
