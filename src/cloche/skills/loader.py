"""Find skills and read their folders. Loading only reads: no code of a skill is imported, compiled or run.

    skill = load_skill("word-count", load_settings())
    result = run_skill(skill, argv=("notes.txt",), files={"notes.txt": Path("notes.txt")})

Theory of operation: the folder is opened once and everything below it by descriptor, one name at a time, following no
link. So a change of the folder meanwhile cannot lead the reader out of it. The target of a link is read as text: a link
that stays in the folder and ends at a regular file counts as a copy of that file, any other is a fault. Only regular
files are opened, so no read blocks. Sizes, depth and number of files are bounded.
"""

from __future__ import annotations

import os
import posixpath
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from cloche import hostfs
from cloche.config.keys import Settings
from cloche.core.errors import InvalidRequest
from cloche.core.escape import escape_name
from cloche.core.languages import LANGUAGES, detect_language, language_named
from cloche.core.limits import MIB, format_size
from cloche.core.record import dataclass, field
from cloche.core.request import InputFile

from .manifest import MOST_CARD_BYTES, read_card, read_manifest
from .skill import CARD, MANIFEST, Card, Fault, InvalidSkill, Script, Skill, SkillManifest

MOST_FILES = 2000
MOST_BYTES = 32 * MIB
MOST_FILE_BYTES = 8 * MIB
MOST_DEPTH = 16
MOST_FAULTS = 50
MOST_NAME_CHARS = 200  # characters of a name
# What version control, interpreters and desktops leave in a folder: no part of a skill.
LEFT_OUT = frozenset({".git", ".hg", ".svn", "__pycache__", ".DS_Store"})
_READ_ONLY, _PROGRAM = 0o444, 0o555
SCRIPTS = "scripts"
MOST_SKILLS = 1000  # of one folder of the search path


@dataclass(slots=True)
class Gathered:
    """Collect the files of a folder, the files left out, and the faults."""

    files: list[InputFile] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    size: int = 0

    @property
    def is_full(self) -> bool:
        return len(self.faults) >= MOST_FAULTS

    def add_fault(self, path: str, problem: str) -> None:
        if not self.is_full:
            self.faults.append(Fault(file=path, problem=problem))


@contextmanager
def open_folder(folder: str | os.PathLike[str]) -> Iterator[int]:
    """Hold the folder of a skill open. Raises InvalidRequest for a missing one."""
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
    gathered = Gathered()
    with suppress(_Full):
        _walk(fd, fd, "", gathered)
    return gathered


def read_bounded(fd: int, path: str, *, max_bytes: int) -> bytes:
    """Return a regular file below an open folder. Raises OSError, and ValueError with the reason for any other."""
    facts, data = _read(fd, path, max_bytes)
    if len(data) > max_bytes:
        raise ValueError(f"has more than {format_size(max_bytes)}")
    _check(facts)
    return data


class _Full(Exception):
    """Stop a walk: there is no use in going on."""


def _walk(root: int, fd: int, folder: str, gathered: Gathered) -> None:
    for entry in _listed(fd, folder, gathered):
        path = posixpath.join(folder, entry)
        if entry in LEFT_OUT:
            gathered.left_out.append(path)
            continue
        problem = _name_problem(entry)
        if problem:
            gathered.add_fault(escape_name(path)[:MOST_NAME_CHARS], problem)
            continue
        try:
            mode = os.stat(entry, dir_fd=fd, follow_symlinks=False).st_mode
            if stat.S_ISDIR(mode):
                _descend(root, fd, entry, path, gathered)
            else:
                _take(root, fd, entry, path, mode, gathered)
        except OSError as error:
            gathered.add_fault(path, f"cannot be read: {error.strerror}")
        if gathered.is_full:
            raise _Full


def _listed(fd: int, folder: str, gathered: Gathered) -> list[str]:
    """Return the names in a folder, sorted; no more than may be."""
    names: list[str] = []
    with os.scandir(fd) as entries:
        for entry in entries:
            names.append(entry.name)
            if len(names) > MOST_FILES:
                gathered.add_fault(folder or ".", f"holds more than {MOST_FILES} files")
                raise _Full
    return sorted(names)


def _descend(root: int, fd: int, entry: str, path: str, gathered: Gathered) -> None:
    if path.count("/") + 1 > MOST_DEPTH:
        gathered.add_fault(path, f"lies deeper than {MOST_DEPTH} folders")
        return
    with hostfs.descended(fd, (entry,)) as below:
        _walk(root, below, path, gathered)


def _take(root: int, fd: int, entry: str, path: str, mode: int, gathered: Gathered) -> None:
    if len(gathered.files) >= MOST_FILES:
        gathered.add_fault(path, f"is one file too many: a skill has at most {MOST_FILES}")
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
        gathered.add_fault(path, str(error))
        return
    if len(data) > MOST_FILE_BYTES:
        gathered.add_fault(
            path, f"has {format_size(facts.st_size)}; a file of a skill has at most {format_size(MOST_FILE_BYTES)}"
        )
        return
    gathered.size += len(data)
    if gathered.size > MOST_BYTES:
        gathered.add_fault(path, f"is too much: all files of a skill have at most {format_size(MOST_BYTES)} together")
        raise _Full
    is_program = bool(facts.st_mode & 0o100)
    gathered.files.append(InputFile(path=path, data=data, mode=_PROGRAM if is_program else _READ_ONLY))


def _follow(root: int, path: str, target: str) -> tuple[os.stat_result, bytes]:
    """Read the file that a link in the folder leads to. Raises ValueError for one that leads anywhere else."""
    inside, shown = (
        posixpath.normpath(posixpath.join(posixpath.dirname(path), target)),
        escape_name(target)[:MOST_NAME_CHARS],
    )
    if target.startswith("/") or inside == ".." or inside.startswith("../"):
        raise ValueError(f"is a link to {shown!r}, which leads out of the skill's folder")
    if not LEFT_OUT.isdisjoint(inside.split("/")):
        raise ValueError(f"is a link to {shown!r}, which is not a part of the skill")
    try:
        return _read(root, inside, MOST_FILE_BYTES)
    except OSError:
        raise ValueError(f"is a link to {shown!r}, which is not a plain file of the skill's folder") from None


def _read(fd: int, path: str, max_bytes: int) -> tuple[os.stat_result, bytes]:
    """Read up to one byte more than allowed of a file, name by name. Raises OSError, ValueError for other types."""
    *folders, name = path.split("/")
    try:
        with hostfs.descended(fd, folders) as parent:
            file, facts = hostfs.open_regular(name, parent)
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
    if escape_name(name) != name or "\\" in name:
        return "has a control character, a character that cannot be seen, or a backslash in its name; rename it"
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """Hold the outcome of reading a skill: the skill as far as it is readable, and all its faults."""

    folder: str
    skill: Skill | None
    faults: tuple[Fault, ...] = ()

    def usable(self) -> Skill:
        """Return the skill. Raises InvalidSkill naming every fault, if there is one."""
        if self.skill is None or self.faults:
            raise InvalidSkill(self.folder, self.faults)
        return self.skill


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundSkill:
    """Describe a skill of the search path. `is_hidden` says that an earlier folder has one of that name."""

    name: str
    description: str
    folder: str
    faults: tuple[Fault, ...] = ()
    is_hidden: bool = False


def search_path(settings: Settings) -> tuple[str, ...]:
    """Return the folders that hold skills: the platform's data folder, then those the operator's files name.

    A relative one counts from the working directory, which is searched only where the operator says so.
    """
    from platformdirs import user_data_dir

    data_folder = os.path.join(user_data_dir("cloche", appauthor=False), "skills")
    named = (os.path.abspath(os.path.expanduser(folder)) for folder in settings.skill_path)
    return tuple(dict.fromkeys((data_folder, *named)))


def find_skills(folders: Sequence[str]) -> Iterator[FoundSkill]:
    """Yield the skills in these folders, by folder and name; only their SKILL.md is read."""
    names: set[str] = set()
    for folder in folders:
        for name in _subfolders(folder):
            path = os.path.join(folder, name)
            try:
                card, faults = _card_of(path)
            except InvalidRequest as error:
                card, faults = None, (Fault(file="", problem=str(error)),)
            if card is None and not faults:
                continue
            yield FoundSkill(
                name=name, description=card.description if card else "", folder=path, faults=faults,
                is_hidden=name in names,
            )  # fmt: skip
            names.add(name)


def locate_skill(name_or_path: str, folders: Sequence[str]) -> str:
    """Return the folder of a skill: the path itself where one is given, else by name from the search path.

    Raises InvalidRequest that says where was looked.
    """
    if not name_or_path or "\0" in name_or_path:
        raise InvalidRequest(f"{name_or_path!r} is neither the name nor the path of a skill")
    if "/" in name_or_path or name_or_path in (".", "..") or name_or_path.startswith("~"):
        return os.path.abspath(os.path.expanduser(name_or_path))
    for folder in folders:
        path = os.path.join(folder, name_or_path)
        if os.path.lexists(os.path.join(path, CARD)):
            return path
    hint = f'; for the folder here write "./{name_or_path}"' if os.path.isdir(name_or_path) else ""
    raise InvalidRequest(f"there is no skill {name_or_path!r} in {', '.join(folders)}{hint}")


def load_skill(name_or_path: str | os.PathLike[str], settings: Settings) -> Skill:
    """Return a skill, whole and checked. Raises InvalidRequest, with all faults of one that is there."""
    named = os.fspath(name_or_path)
    folder = locate_skill(named, search_path(settings)) if isinstance(name_or_path, str) else os.path.abspath(named)
    return examine_skill(folder).usable()


def examine_skill(folder: str) -> Examined:
    """Read a skill's folder, and find all that is wrong with it. Raises InvalidRequest where there is no folder."""
    folder = os.path.abspath(folder)
    with open_folder(folder) as fd:
        gathered = gather(fd)
    files = {file.path: file for file in gathered.files}
    faults = list(gathered.faults)
    card, notes = _read_card(files, folder, faults)
    manifest = SkillManifest()
    if MANIFEST in files:
        manifest, found = read_manifest(files[MANIFEST].data)
        faults += found
    scripts = tuple(_scripts(manifest, files, faults))
    if card is None:
        return Examined(folder=folder, skill=None, faults=tuple(faults))
    _check_entry(manifest, scripts, faults)
    skill = Skill(
        card=card, manifest=manifest, folder=folder, scripts=scripts, files=tuple(gathered.files),
        left_out=tuple(gathered.left_out), notes=tuple(notes),
    )  # fmt: skip
    return Examined(folder=folder, skill=skill, faults=tuple(faults))


def _subfolders(folder: str) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries if not entry.name.startswith(".")]
    except OSError:
        return []
    return sorted(name for name in names if os.path.isdir(os.path.join(folder, name)))[:MOST_SKILLS]


def _card_of(folder: str) -> tuple[Card | None, tuple[Fault, ...]]:
    """Read SKILL.md alone; None without it."""
    with open_folder(folder) as fd:
        try:
            data = read_bounded(fd, CARD, max_bytes=MOST_CARD_BYTES)
        except FileNotFoundError:
            return None, ()
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else str(error)
            return None, (Fault(file=CARD, problem=f"cannot be read: {why}"),)
        card, faults, _ = read_card(data, os.path.basename(folder))
        return card, tuple(faults)


def _read_card(files: Mapping[str, InputFile], folder: str, faults: list[Fault]) -> tuple[Card | None, list[str]]:
    if CARD not in files:
        if not any(fault.file == CARD for fault in faults):
            faults.append(Fault(file=CARD, problem="is missing; a skill is a folder with this file"))
        return None, []
    card, card_faults, notes = read_card(files[CARD].data, os.path.basename(folder))
    faults += card_faults
    return card, notes


def _scripts(manifest: SkillManifest, files: Mapping[str, InputFile], faults: list[Fault]) -> Iterator[Script]:
    """Yield the scripts of the manifest; without any, the files below `scripts` with a known language."""
    for name, entry in manifest.scripts.items():
        key = f"scripts.{name}"
        path = _script_path(entry.get("path", ""), f"{key}.path", files, faults)
        if path is not None:
            runtime = entry.get("runtime") or manifest.runtime
            language = _language(runtime, path, files, f"{key}.runtime", faults)
            if language is not None:
                yield Script(name=name, path=path, runtime=language, description=entry.get("description", ""))
    if not manifest.scripts:
        yield from _unnamed_scripts(manifest, files)


def _unnamed_scripts(manifest: SkillManifest, files: Mapping[str, InputFile]) -> Iterator[Script]:
    named = {manifest.entry} & set(files) if manifest.entry is not None else set()
    for path in sorted({*named, *(path for path in files if path.startswith(f"{SCRIPTS}/"))}, key=str):
        language = _language(None, path, files, "", [])
        if language is not None:
            yield Script(name=posixpath.basename(path), path=path, runtime=language)


def _script_path(written: str, key: str, files: Mapping[str, InputFile], faults: list[Fault]) -> str | None:
    """Return the path of a script that is there."""
    if not written:
        return None
    path = posixpath.normpath(written)
    if written.startswith("/") or ".." in written.split("/"):
        problem = f"{written!r} leads out of the skill's folder; give a path below it"
    elif path not in files:
        problem = f"there is no file {written!r} in the skill"
    else:
        return path
    faults.append(Fault(file=MANIFEST, key=key, problem=problem))
    return None


def _language(
    runtime: str | None, path: str, files: Mapping[str, InputFile], key: str, faults: list[Fault]
) -> str | None:
    """Return a script's language: that of the manifest, else by suffix or first line. The script must be text."""
    data = files[path].data
    try:
        data.decode("utf-8")
        return language_named(runtime).name if runtime else detect_language(path, data[:200].partition(b"\n")[0]).name
    except UnicodeDecodeError as error:
        faults.append(Fault(file=path, problem=f"is a script and not UTF-8 (byte {error.start})"))
    except InvalidRequest:
        if not runtime:  # a runtime that does not exist was told already
            problem = f"the language of {path!r} cannot be told; name it: {', '.join(LANGUAGES)}"
            faults.append(Fault(file=MANIFEST, key=key, problem=problem))
    return None


def _check_entry(manifest: SkillManifest, scripts: tuple[Script, ...], faults: list[Fault]) -> None:
    entry = manifest.entry
    if entry is None:
        return
    problem = ""
    if entry.startswith("/") or ".." in entry.split("/"):
        problem = f"{entry!r} leads out of the skill's folder; give the name or the path of a script"
    elif not any(entry in (script.name, script.path) for script in scripts):
        names = ", ".join(script.name for script in scripts) or "none"
        problem = f"there is no script {entry!r}; the scripts are: {names}"
    if problem:
        faults.append(Fault(file=MANIFEST, key="entry", problem=problem))
