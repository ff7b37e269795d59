"""Find skills and load them. Loading only reads: no code of a skill is imported, compiled or run.

skill = load_skill("word-count", load_settings())
result = run_skill(skill, argv=("notes.txt",), files={"notes.txt": Path("notes.txt")})
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from cloche.core.errors import InvalidRequest
from cloche.core.languages import LANGUAGES, detect_language, language_named
from cloche.core.request import InputFile
from cloche.runtime.settings import Settings

from .skill import CARD, MANIFEST, Card, Fault, InvalidSkill, Manifest, Script, Skill
from .skill_files import gather, open_folder, read_bounded
from .skill_manifest import MOST_CARD_BYTES, read_card, read_manifest

SCRIPTS = "scripts"
MOST_SKILLS = 1000  # of one folder of the search path


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """Hold what came of reading a skill: itself as far as it could be read, and all that is wrong with it."""

    folder: str
    skill: Skill | None
    faults: tuple[Fault, ...] = ()

    def usable(self) -> Skill:
        """Return the skill. Raises InvalidSkill naming every fault, if there is one."""
        if self.skill is None or self.faults:
            raise InvalidSkill(self.folder, self.faults)
        return self.skill


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
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

    standing = os.path.join(user_data_dir("cloche", appauthor=False), "skills")
    named = (os.path.abspath(os.path.expanduser(folder)) for folder in settings.skill_path)
    return tuple(dict.fromkeys((standing, *named)))


def find_skills(folders: Sequence[str]) -> Iterator[Found]:
    """Yield the skills in these folders, by folder and name; only their SKILL.md is read."""
    seen: set[str] = set()
    for folder in folders:
        for name in _subfolders(folder):
            path = os.path.join(folder, name)
            try:
                card, faults = _card_of(path)
            except InvalidRequest as error:
                card, faults = None, (Fault(file="", problem=str(error)),)
            if card is None and not faults:
                continue
            yield Found(
                name=name, description=card.description if card else "", folder=path, faults=faults,
                is_hidden=name in seen,
            )  # fmt: skip
            seen.add(name)


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
    here = f'; for the folder here write "./{name_or_path}"' if os.path.isdir(name_or_path) else ""
    raise InvalidRequest(f"there is no skill {name_or_path!r} in {', '.join(folders)}{here}")


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
    manifest = Manifest()
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
    """Read SKILL.md alone; nothing at all where there is none."""
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
    card, found, notes = read_card(files[CARD].data, os.path.basename(folder))
    faults += found
    return card, notes


def _scripts(manifest: Manifest, files: Mapping[str, InputFile], faults: list[Fault]) -> Iterator[Script]:
    """Yield the scripts that the manifest names; else the files below `scripts` whose language can be told."""
    for name, said in manifest.scripts.items():
        key = f"scripts.{name}"
        path = _script_path(said.get("path", ""), f"{key}.path", files, faults)
        if path is not None:
            wanted = said.get("runtime") or manifest.runtime
            language = _language(wanted, path, files, f"{key}.runtime", faults)
            if language is not None:
                yield Script(name=name, path=path, runtime=language, description=said.get("description", ""))
    if not manifest.scripts:
        yield from _unnamed_scripts(manifest, files)


def _unnamed_scripts(manifest: Manifest, files: Mapping[str, InputFile]) -> Iterator[Script]:
    named = {manifest.entry} & set(files) if manifest.entry is not None else set()
    for path in sorted({*named, *(path for path in files if path.startswith(f"{SCRIPTS}/"))}, key=str):
        language = _language(None, path, files, "", [])
        if language is not None:
            yield Script(name=posixpath.basename(path), path=path, runtime=language)


def _script_path(said: str, key: str, files: Mapping[str, InputFile], faults: list[Fault]) -> str | None:
    """Return the path of a script that is there."""
    if not said:
        return None
    path = posixpath.normpath(said)
    if said.startswith("/") or ".." in said.split("/"):
        problem = f"{said!r} leads out of the skill's folder; give a path below it"
    elif path not in files:
        problem = f"there is no file {said!r} in the skill"
    else:
        return path
    faults.append(Fault(file=MANIFEST, key=key, problem=problem))
    return None


def _language(
    wanted: str | None, path: str, files: Mapping[str, InputFile], key: str, faults: list[Fault]
) -> str | None:
    """Return a script's language: what is said, else by suffix or first line. It is to be text, too."""
    data = files[path].data
    try:
        data.decode("utf-8")
        return language_named(wanted).name if wanted else detect_language(path, data[:200].partition(b"\n")[0]).name
    except UnicodeDecodeError as error:
        faults.append(Fault(file=path, problem=f"is a script and not UTF-8 (byte {error.start})"))
    except InvalidRequest:
        if not wanted:  # a runtime that does not exist was told already
            problem = f"the language of {path!r} cannot be told; name it: {', '.join(LANGUAGES)}"
            faults.append(Fault(file=MANIFEST, key=key, problem=problem))
    return None


def _check_entry(manifest: Manifest, scripts: tuple[Script, ...], faults: list[Fault]) -> None:
    entry = manifest.entry
    if entry is None:
        return
    problem = ""
    if entry.startswith("/") or ".." in entry.split("/"):
        problem = f"{entry!r} leads out of the skill's folder; give the name or the path of a script"
    elif not any(entry in (script.name, script.path) for script in scripts):
        known = ", ".join(script.name for script in scripts) or "none"
        problem = f"there is no script {entry!r}; the scripts are: {known}"
    if problem:
        faults.append(Fault(file=MANIFEST, key="entry", problem=problem))
