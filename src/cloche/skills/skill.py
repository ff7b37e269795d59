"""A skill as values: the card of SKILL.md, the manifest, scripts, requests, faults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from cloche.core.enforcement import Control, Level, NetworkMode
from cloche.core.errors import InvalidRequest
from cloche.core.record import dataclass, field
from cloche.core.request import InputFile

CARD = "SKILL.md"
MANIFEST = "cloche-skill.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Name one thing that is wrong: the file below the skill's folder, the key in it if there is one, and what."""

    file: str
    problem: str
    key: str = ""

    def __str__(self) -> str:
        return ": ".join(text for text in (self.file, self.key, self.problem) if text)


class InvalidSkill(InvalidRequest):
    """Report a folder that is no skill, with all its faults."""

    def __init__(self, folder: str, faults: tuple[Fault, ...]):
        count = f"{len(faults)} faults" if len(faults) > 1 else "1 fault"
        listed = "; ".join(map(str, faults))
        super().__init__(f'the skill in {folder!r} has {count}: {listed}. "cloche skill check" shows them one by one')
        self.folder = folder
        self.faults = faults


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """Name a program of a skill: `path` is relative to the skill's folder, `runtime` a language's own name."""

    name: str
    path: str
    runtime: str
    description: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SkillRequests:
    """Hold the requests of a skill; None and empty request nothing.

    `limits` is keyed by configuration keys (`memory`, `timeout`, ...), in bytes, seconds, CPUs and numbers.
    """

    preset: str | None = None
    limits: Mapping[str, float] = field(default_factory=dict)
    network: NetworkMode | None = None
    hosts: tuple[str, ...] = ()
    packages: tuple[str, ...] | Literal["auto"] = ()
    tools: tuple[str, ...] = ()
    require_level: Level | None = None
    require_controls: tuple[Control, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """Hold the front matter of SKILL.md, under the published format's names; `instructions` is the text below it."""

    name: str
    description: str
    license: str = ""
    compatibility: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)
    allowed_tools: tuple[str, ...] = ()
    instructions: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class SkillManifest:
    """Hold what `cloche-skill.yaml` says. `scripts` maps names to path, runtime and description as they are written."""

    asked: SkillRequests = field(default_factory=SkillRequests)
    runtime: str | None = None
    entry: str | None = None
    scripts: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Skill:
    """Hold a whole skill, read and checked. Nothing of it has run.

    `left_out` names what of the folder does not travel; `notes` are remarks that are no faults.
    """

    card: Card
    manifest: SkillManifest
    folder: str
    scripts: tuple[Script, ...] = ()
    files: tuple[InputFile, ...] = field(default=(), repr=False)
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.card.name

    def script(self, name: str | None = None) -> Script:
        """Return a script by its name or path; without one the entry, else the only one.

        Raises InvalidRequest naming those there are.
        """
        if name is None:
            return self._entry()
        matches = [script for script in self.scripts if name in (script.name, script.path)]
        if not matches:
            raise InvalidRequest(f"skill {self.name} has no script {name!r}; {self._known()}")
        return matches[0]

    def _entry(self) -> Script:
        entry = self.manifest.entry
        if entry is not None:
            return self.script(entry)
        if len(self.scripts) == 1:
            return self.scripts[0]
        raise InvalidRequest(f"skill {self.name} names no entry; say which script to run: {self._known()}")

    def _known(self) -> str:
        return f"it has: {', '.join(script.name for script in self.scripts)}" if self.scripts else "it has no scripts"
