"""`cloche skill`: check, list and run skills. The texts of a skill are hostile and escaped on a terminal."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from cloche.core.errors import InvalidRequest
from cloche.core.escape import escape_line
from cloche.core.limits import REQUESTED_LIMITS

from .app import root
from .options import Command, argument, debug_option, json_option, output_options, program_options, sandbox_options
from .output import log_to_stderr, say, show
from .run import read_files, read_pairs, read_stdin, run_and_report

if TYPE_CHECKING:
    from cloche.config.keys import Settings
    from cloche.config.options import SandboxOptions
    from cloche.skills.loader import Examined
    from cloche.skills.run import SkillTerms
    from cloche.skills.skill import Fault, Skill

EXIT_FAULTY = 1
_AFTER = "cloche.after"
_NAME = "A name from `cloche skill list`, or a folder."

skill = root.group("skill", help="Check, list and run skills (SKILL.md and scripts).")(lambda: None)


class _WithArguments(Command):
    """Store the arguments after -- for the script."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        dashes = args.index("--") if "--" in args else len(args)
        ctx.meta[_AFTER] = tuple(args[dashes + 1 :])
        return super().parse_args(ctx, args[:dashes])


@skill.command("check")
@argument("name", metavar="NAME|PATH", help=_NAME)
@sandbox_options("backend", "runtime", "preset", "tier", "config", *(row.keyword for row in REQUESTED_LIMITS))
@json_option()
def _check(name: str, options: SandboxOptions, as_json: bool) -> int:
    """Check a skill, and show the rules and limits that it gets.

    Nothing of it runs. The table shows its requests, the ceilings and the results.

    All faults are listed, each with its file and key. The exit code is 1 if the skill cannot run here unchanged. A PATH
    contains a slash, a NAME does not.
    """
    return check_skill(name, options, as_json=as_json)


@skill.command("list")
@argument("folder", nargs=-1, metavar="DIR", help="Look in these folders instead of the search path.")
@sandbox_options("config")
@json_option()
def _list(folder: tuple[str, ...], options: SandboxOptions, as_json: bool) -> int:
    """List the skills of the search path.

    The search path is the platform's data folder, then skill_path of your own configuration.

    With DIR, list the skills in these folders instead.
    """
    return show_skills(folder, options.get("config"), as_json=as_json)


@skill.command("run", cls=_WithArguments)
@argument("name", metavar="NAME|PATH", help=_NAME)
@argument("script", metavar="SCRIPT", required=False, help="Its name or path. Default: the skill's entry.")
@sandbox_options(but=("network", "screen"))
@program_options()
@output_options()
@json_option()
@debug_option("Print the debug log and the jail's plan.")
@click.pass_context
def _run(
    context: click.Context,
    name: str,
    script: str | None,
    env: tuple[str, ...],
    file: tuple[str, ...],
    out: str | None,
    spill: str | None,
    as_json: bool,
    sandbox_debug: bool,
    options: SandboxOptions,
) -> int:
    """Run a script of a skill in a throwaway sandbox.

    The script's arguments follow --. Exit codes are those of cloche run.

    SCRIPT is a script's name or path; without one the skill's entry runs. The skill's files are in the workspace,
    read-only, and the script runs from its place among them.
    """
    from cloche.skills.loader import load_skill
    from cloche.skills.run import run_skill

    if sandbox_debug:
        log_to_stderr()
    loaded = load_skill(name, _settings(options.get("config")))
    start = partial(
        run_skill, loaded, script, argv=context.meta[_AFTER], stdin=read_stdin(), env=read_pairs(env),
        files=read_files(file), out=out, spill=spill, **options,
    )  # fmt: skip
    return run_and_report(start, as_json=as_json, debug=sandbox_debug)


def check_skill(name: str, options: SandboxOptions, *, as_json: bool) -> int:
    """Print a skill, the settings that apply to it here, and all its faults."""
    from cloche.skills.loader import examine_skill, locate_skill, search_path
    from cloche.skills.run import terms_for

    folder = locate_skill(name, search_path(_settings(options.get("config"))))
    examined = examine_skill(folder)
    terms = terms_for(examined.skill, **options) if examined.skill is not None else None
    faults = (*examined.faults, *(terms.refusals if terms is not None else ()))
    if as_json:
        print(json.dumps(_as_json(examined, terms, faults), indent=2))
    else:
        _print_skill(examined, terms, faults)
    return EXIT_FAULTY if faults else 0


def show_skills(folders: Sequence[str], config: str | os.PathLike[str] | None, *, as_json: bool) -> int:
    """List the skills of some folders, or of the search path."""
    for folder in folders:
        if not os.path.isdir(folder):
            raise InvalidRequest(f"cannot list {folder!r}: there is no such folder")
    from cloche.skills.loader import find_skills, search_path

    path = tuple(folders) or search_path(_settings(config))
    rows = [
        {
            "skill": skill.name,
            "description": skill.description,
            "folder": skill.folder,
            "faults": [str(fault) for fault in skill.faults],
            "hidden": skill.is_hidden,
        }
        for skill in find_skills(path)
    ]
    if as_json:
        print(json.dumps(rows, indent=2))
    elif not rows:
        say(f"no skills in {', '.join(path)}")
    else:
        show([_line(row) for row in rows], as_json=False)
    return 0


def _settings(config: str | os.PathLike[str] | None) -> Settings:
    from cloche.config.settings import load_settings

    return load_settings({"config": config})


def _line(row: dict[str, Any]) -> dict[str, str]:
    """Return a row of the table."""
    faults = len(row["faults"])
    state = f"faulty ({faults})" if faults else "hidden by one above" if row["hidden"] else "ok"
    return {
        "skill": escape_line(row["skill"]),
        "state": state,
        "description": escape_line(row["description"]),
        "folder": escape_line(row["folder"]),
    }


def _print_skill(examined: Examined, terms: SkillTerms | None, faults: tuple[Fault, ...]) -> None:
    if examined.skill is not None and terms is not None:
        _print_card(examined.skill)
        rows = [
            {
                "key": term.key,
                "default": escape_line(term.default),
                "from": "" if term.origin == "default" else escape_line(term.origin),
                "asked": escape_line(term.asked),
                "ceiling": escape_line(term.ceiling),
                "result": "refused" if term.is_refused else escape_line(term.result),
                "why": "see below" if term.is_refused else escape_line(term.why),
            }
            for term in terms.table
        ]
        show(rows, as_json=False)
    sys.stdout.flush()  # faults come after the table, also if both go to one file
    for fault in faults:
        say(str(fault))
    if not faults:
        print("The skill is valid, and nothing is refused. Nothing of it has run.")


def _print_card(skill: Skill) -> None:
    from cloche.core.limits import format_size

    card = skill.card
    lines = [
        ("skill", card.name), ("description", card.description), ("license", card.license),
        ("compatibility", card.compatibility), ("folder", skill.folder),
        ("files", f"{len(skill.files)}, {format_size(sum(len(file.data) for file in skill.files))}"),
        ("left out", ", ".join(skill.left_out)),
        ("allowed-tools", f"{' '.join(card.allowed_tools)} (grants nothing here)" if card.allowed_tools else ""),
        *((f"metadata.{name}", text) for name, text in card.metadata.items()),
        *(
            ("script", f"{script.name}: {script.path}, {script.runtime}. {script.description}".strip())
            for script in skill.scripts
        ),
        ("entry", skill.manifest.entry or ""),
        *(("note", note) for note in skill.notes),
    ]  # fmt: skip
    for label, text in lines:
        if text:
            print(f"{escape_line(label) + ':':<15} {escape_line(text)}")


def _as_json(examined: Examined, terms: SkillTerms | None, faults: tuple[Fault, ...]) -> dict[str, Any]:
    from cloche.core.record import asdict

    skill = examined.skill
    row: dict[str, Any] = {
        "ok": not faults,
        "folder": examined.folder,
        "faults": [asdict(fault) for fault in faults],
    }
    if skill is None or terms is None:
        return row
    card = asdict(skill.card)
    del card["instructions"]
    return {
        **card,
        **row,
        "scripts": [asdict(script) for script in skill.scripts],
        "entry": skill.manifest.entry,
        "files": {file.path: len(file.data) for file in skill.files},
        "left_out": list(skill.left_out),
        "notes": list(skill.notes),
        "policy": [asdict(term) for term in terms.table],
    }
