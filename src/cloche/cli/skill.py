"""`cloche skill`: what the verbs do. Every word of a skill's is a stranger's, and nothing of it drives a terminal."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from cloche.agent.skill import Fault, Skill
from cloche.agent.skill_policy import Terms
from cloche.agent.skill_run import run_skill, terms_for
from cloche.agent.skills import Examined, examine_skill, find_skills, load_skill, locate_skill, search_path
from cloche.core.errors import InvalidRequest
from cloche.core.plain import plain_line
from cloche.core.units import format_size
from cloche.runtime.options import SandboxOptions
from cloche.runtime.settings import Settings, load_settings

from .exits import exit_code_of, say
from .pulling import progress_shown
from .run import _conclude, _print_plan, log_to_stderr, read_files, read_pairs, read_stdin
from .tables import show
from .terminal import Writer

EXIT_FAULTY = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SkillCommand:
    """Hold the command line of `cloche skill run`, parsed and not yet checked."""

    name: str
    script: str | None = None
    argv: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    out: str | None = None
    spill: str | None = None
    as_json: bool = False
    debug: bool = False
    options: SandboxOptions = field(default_factory=SandboxOptions)


def skill_command(command: SkillCommand) -> int:
    """Run a script of a skill and return the exit code."""
    if command.debug:
        log_to_stderr()
    skill = load_skill(command.name, _settings(command.options.get("config")))
    stdout, stderr = Writer(1), Writer(2)
    writers = {"stdout": stdout.write, "stderr": stderr.write}
    with progress_shown():
        result = run_skill(
            skill,
            command.script,
            argv=command.argv,
            stdin=read_stdin(),
            env=read_pairs(command.env),
            files=read_files(command.files),
            out=command.out,
            spill=command.spill,
            on_output=None if command.as_json else lambda stream, data: writers[stream](data),
            on_event=_print_plan if command.debug else None,
            **command.options,
        )
    stdout.finish()
    stderr.finish()
    _conclude(result, as_json=command.as_json)
    return exit_code_of(result)


def check_skill(name: str, options: SandboxOptions, *, as_json: bool) -> int:
    """Show a skill, what holds for it here, and all that is wrong with it."""
    folder = locate_skill(name, search_path(_settings(options.get("config"))))
    examined = examine_skill(folder)
    terms = terms_for(examined.skill, **options) if examined.skill is not None else None
    faults = (*examined.faults, *(terms.refusals if terms is not None else ()))
    if as_json:
        print(json.dumps(_as_json(examined, terms, faults), indent=2))
    else:
        _print_skill(examined, terms, faults)
    return EXIT_FAULTY if faults else 0


def show_skills(folders: Sequence[str], config: str | None, *, as_json: bool) -> int:
    """List the skills of some folders, or of the search path."""
    for folder in folders:
        if not os.path.isdir(folder):
            raise InvalidRequest(f"cannot list {folder!r}: there is no such folder")
    path = tuple(folders) or search_path(_settings(config))
    rows = [
        {
            "skill": found.name,
            "description": found.description,
            "folder": found.folder,
            "faults": [str(fault) for fault in found.faults],
            "hidden": found.is_hidden,
        }
        for found in find_skills(path)
    ]
    if as_json:
        print(json.dumps(rows, indent=2))
    elif not rows:
        say(f"no skills in {', '.join(path)}")
    else:
        show([_line(row) for row in rows], as_json=False)
    return 0


def _settings(config: Any) -> Settings:  # noqa: ANN401 - a path, or None
    return load_settings({"config": config})


def _line(row: dict[str, Any]) -> dict[str, str]:
    """Return a row of the table for people."""
    faults = len(row["faults"])
    state = f"faulty ({faults})" if faults else "hidden by one above" if row["hidden"] else "ok"
    return {
        "skill": plain_line(row["skill"]),
        "state": state,
        "description": plain_line(row["description"]),
        "folder": plain_line(row["folder"]),
    }


def _print_skill(examined: Examined, terms: Terms | None, faults: tuple[Fault, ...]) -> None:
    if examined.skill is not None and terms is not None:
        _print_card(examined.skill)
        rows = [
            {
                "key": term.key,
                "default": plain_line(term.default),
                "from": "" if term.origin == "default" else plain_line(term.origin),
                "asked": plain_line(term.asked),
                "ceiling": plain_line(term.ceiling),
                "result": "refused" if term.is_refused else plain_line(term.result),
                "why": "see below" if term.is_refused else plain_line(term.why),
            }
            for term in terms.table
        ]
        show(rows, as_json=False)
    sys.stdout.flush()  # what is wrong comes after the table, also where both go to one file
    for fault in faults:
        say(str(fault))
    if not faults:
        print("Nothing is wrong with it, and nothing is refused. Nothing of it has run.")


def _print_card(skill: Skill) -> None:
    card = skill.card
    lines = [
        ("skill", card.name), ("description", card.description), ("license", card.license),
        ("compatibility", card.compatibility), ("folder", skill.folder),
        ("files", f"{len(skill.files)}, {format_size(sum(len(file.data) for file in skill.files))}"),
        ("left out", ", ".join(skill.left_out)),
        ("allowed-tools", f"{' '.join(card.allowed_tools)} (grants nothing here)" if card.allowed_tools else ""),
        *((f"metadata.{name}", text) for name, text in card.metadata.items()),
        *(("script", f"{one.name}: {one.path}, {one.runtime}. {one.description}".strip()) for one in skill.scripts),
        ("entry", skill.manifest.entry or ""),
        *(("note", note) for note in skill.notes),
    ]  # fmt: skip
    for label, text in lines:
        if text:
            print(f"{plain_line(label) + ':':<15} {plain_line(text)}")


def _as_json(examined: Examined, terms: Terms | None, faults: tuple[Fault, ...]) -> dict[str, Any]:
    skill = examined.skill
    told: dict[str, Any] = {
        "ok": not faults,
        "folder": examined.folder,
        "faults": [dataclasses.asdict(fault) for fault in faults],
    }
    if skill is None or terms is None:
        return told
    card = dataclasses.asdict(skill.card)
    del card["instructions"]
    return {
        **card,
        **told,
        "scripts": [dataclasses.asdict(script) for script in skill.scripts],
        "entry": skill.manifest.entry,
        "files": {file.path: len(file.data) for file in skill.files},
        "left_out": list(skill.left_out),
        "notes": list(skill.notes),
        "policy": [dataclasses.asdict(term) for term in terms.table],
    }
