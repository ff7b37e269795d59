"""`cloche skill`: the verbs and their options."""

from __future__ import annotations

from typing import Annotated

import click
import typer

from .app import (
    _SETTINGS,
    AsJson,
    BackendName,
    BestEffort,
    ConfigFile,
    Cpus,
    Disk,
    Fallback,
    Image,
    InputFiles,
    Memory,
    OutputLimit,
    Pids,
    Preference,
    PresetName,
    Require,
    TierNumber,
    Timeout,
    Trusted,
    Variables,
    _choice,
    _finish,
    _joined,
)
from .commands import Command, Verbs

skill = Verbs(
    help="Check, list and run skills: folders with SKILL.md and scripts.", no_args_is_help=True, rich_markup_mode=None
)
SkillName = Annotated[str, typer.Argument(metavar="NAME|PATH", help="A name of `cloche skill list`, or a folder.")]
_AFTER = "cloche.after"


class _WithArguments(Command):
    """Keep what comes after -- apart: it is the script's."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        at = args.index("--") if "--" in args else len(args)
        ctx.meta[_AFTER] = tuple(args[at + 1 :])
        return super().parse_args(ctx, args[:at])


@skill.command("check", context_settings=_SETTINGS)
def check(
    name: SkillName,
    backend: BackendName = None,
    preset: PresetName = None,
    tier: TierNumber = None,
    config_file: ConfigFile = None,
    timeout: Timeout = None,
    memory: Memory = None,
    cpus: Cpus = None,
    pids: Pids = None,
    disk: Disk = None,
    as_json: AsJson = False,
) -> None:
    """Read a skill without running anything, and show what it asks for, the ceilings and what it gets.

    Shows all faults at once, each with its file and key. Exit code 1 when the skill cannot run here as it is. PATH has
    a slash in it, NAME none.
    """

    def work() -> int:
        from .skill import check_skill

        return check_skill(
            name,
            {
                "backend": backend, "preset": preset, "tier": tier, "config": config_file, "timeout": timeout,
                "memory": memory, "cpus": cpus, "pids": pids, "disk": disk,
            },
            as_json=as_json,
        )  # fmt: skip

    _finish(work, as_json=as_json)


@skill.command("list", context_settings=_SETTINGS)
def list_skills(
    folder: Annotated[
        list[str] | None, typer.Argument(metavar="DIR", help="Look in these folders instead of the search path.")
    ] = None,
    config_file: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """List the skills of the search path: the platform's data folder, then skill_path of your own configuration.

    With DIR, those in these folders instead.
    """

    def work() -> int:
        from .skill import show_skills

        return show_skills(tuple(folder or ()), config_file, as_json=as_json)

    _finish(work, as_json=as_json)


@skill.command("run", cls=_WithArguments, context_settings=_SETTINGS)
def run_script(
    context: typer.Context,
    name: SkillName,
    script: Annotated[
        str | None, typer.Argument(metavar="SCRIPT", help="Its name or path. Default: the skill's entry.")
    ] = None,
    backend: BackendName = None,
    prefer: Preference = None,
    fallback: Fallback = None,
    trusted: Trusted = False,
    image: Image = None,
    require: Require = None,
    best_effort: BestEffort = None,
    preset: PresetName = None,
    tier: TierNumber = None,
    config_file: ConfigFile = None,
    timeout: Timeout = None,
    memory: Memory = None,
    cpus: Cpus = None,
    pids: Pids = None,
    disk: Disk = None,
    output_limit: OutputLimit = None,
    env: Variables = None,
    file: InputFiles = None,
    out: Annotated[str | None, typer.Option(metavar="DIR", help="Copy created and changed files to DIR.")] = None,
    spill: Annotated[
        str | None, typer.Option(metavar="DIR", help="Write the full output to DIR/stdout.txt and DIR/stderr.txt.")
    ] = None,
    as_json: AsJson = False,
    sandbox_debug: Annotated[
        bool, typer.Option("--sandbox-debug", help="Print debug log and the jail's plan.")
    ] = False,
) -> None:
    """Run a script of a skill in a throwaway sandbox; its arguments follow --. Exit codes are those of cloche run.

    SCRIPT is a script's name or path; without one the skill's entry runs. The skill's files lie in the workspace,
    read-only, and the script runs where it lies among them.
    """

    def work() -> int:
        from .skill import SkillCommand, skill_command

        return skill_command(
            SkillCommand(
                name=name, script=script, argv=context.meta[_AFTER], env=tuple(env or ()), files=tuple(file or ()),
                out=out, spill=spill, as_json=as_json, debug=sandbox_debug,
                options={
                    "backend": backend, "image": image, "require": _joined(require),
                    "best_effort": _joined(best_effort) or (),
                    "preset": preset, "tier": tier, "config": config_file, "timeout": timeout,
                    "memory": memory, "cpus": cpus, "pids": pids, "disk": disk, "output_limit": output_limit,
                    **_choice(prefer, fallback, trusted),
                },
            )
        )  # fmt: skip

    _finish(work, debug=sandbox_debug, as_json=as_json)
