"""Run a script of a skill: in a throwaway sandbox, with the skill's files in the workspace, under the agreed terms."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, Unpack, cast

from cloche.core.errors import InvalidRequest, PolicyDenied
from cloche.core.events import Sink
from cloche.core.request import Request
from cloche.core.result import Result
from cloche.core.units import format_size
from cloche.runtime.config_sources import Places, stranger_origins
from cloche.runtime.execute import Job, OnOutput, Prepared, make_job, make_sink, prepare_beside, run_once
from cloche.runtime.inputs import Files
from cloche.runtime.options import SandboxOptions, given
from cloche.runtime.recording import note_fallback, refusals
from cloche.runtime.settings import Settings, load_settings
from cloche.sync import blocking

from .skill import Script, Skill
from .skill_policy import Terms, agree


def terms_for(skill: Skill, script: Script | None = None, /, **options: Unpack[SandboxOptions]) -> Terms:
    """Return what holds for a skill here, with the keywords of `cloche.run`.

    Raises InvalidRequest for keywords or a configuration that is wrong.
    """
    return _agree(skill, _settings_for(options), options, script)


def _settings_for(options: SandboxOptions) -> Settings:
    asked = given(options)
    if asked.get("network") not in (None, False, "off"):
        raise InvalidRequest("network: a skill has no network; leave it out")
    chosen = asked.get("backend")
    if chosen is not None and not isinstance(chosen, str):
        del asked["backend"]
    settings = load_settings(asked)
    if "backend" not in asked and chosen is not None:
        settings = dataclasses.replace(settings, backend=str(getattr(chosen, "name", "")))
    return settings


def _agree(skill: Skill, settings: Settings, options: SandboxOptions, script: Script | None) -> Terms:
    places = Places(environ=os.environ, config_file=options.get("config"))
    return agree(skill, settings, strangers=stranger_origins(places), script=script)


async def arun_skill(
    skill: Skill,
    script: str | None = None,
    *,
    argv: Sequence[str | PathLike[str]] = (),
    stdin: bytes | str = b"",
    env: Mapping[str, str] | None = None,
    files: Files | None = None,
    on_output: OnOutput | None = None,
    on_event: Sink | None = None,
    out: str | PathLike[str] | None = None,
    spill: str | PathLike[str] | None = None,
    **options: Unpack[SandboxOptions],
) -> Result:
    """Run a script of a skill, by default its entry, with the keywords of `cloche.run`.

    The skill's files lie in the workspace under their own paths, read-only as far as modes go; `files` come beside
    them. `result.meta["skill"]` names skill and script. Raises PolicyDenied with every reason for a skill that may not
    run here, and whatever `cloche.run` raises.
    """
    chosen = skill.script(script)
    settings = _settings_for(options)
    terms = _agree(skill, settings, options, chosen)
    with refusals(settings, language=chosen.runtime):
        if terms.refusals:
            raise PolicyDenied(f"skill {skill.name}: {'; '.join(map(str, terms.refusals))}")
    prepared = await prepare_beside(**_agreed(options, terms))
    job = await _job(skill, chosen, prepared, argv=argv, stdin=stdin, env=env, files=files)
    sink = make_sink(on_output, on_event)
    note_fallback(prepared.audit, prepared.notes)
    return await run_once(prepared, job, sink=sink, out=out, spill=spill)


run_skill = blocking(arun_skill, name="run_skill", module=__name__)


def _agreed(options: SandboxOptions, terms: Terms) -> SandboxOptions:
    """Return the keywords of the run: the caller's, and the terms in place of what they decide.

    That the network is off is said only where somebody else says so or it would be on: trusted code of which it is
    demanded finds no fallback.
    """
    agreed: dict[str, Any] = {"warm": False, **options, **terms.limits}
    if terms.is_network_demanded:
        agreed["network"] = False
    if terms.require:
        agreed["require"] = terms.require
    return cast("SandboxOptions", agreed)


async def _job(
    skill: Skill,
    script: Script,
    prepared: Prepared,
    *,
    argv: Sequence[str | PathLike[str]],
    stdin: bytes | str,
    env: Mapping[str, str] | None,
    files: Files | None,
) -> Job:
    """Return the request, with the skill's files and its script where it lies among them."""
    size, room = sum(len(file.data) for file in skill.files), prepared.limits.disk_bytes
    if size > room:
        raise InvalidRequest(
            f"skill {skill.name}: its files have {format_size(size)}, the workspace {format_size(room)}; raise disk"
        )
    code = next(file.data for file in skill.files if file.path == script.path).decode("utf-8")
    job = await make_job(prepared, code, language=script.runtime, argv=argv, stdin=stdin, env=env, files=files)
    theirs = {file.path for file in skill.files}
    doubled = [file.path for file in job.request.files if file.path in theirs]
    if doubled:
        raise InvalidRequest(f"file {doubled[0]!r} is one of the skill's own; give yours another name")
    request: Request = dataclasses.replace(
        job.request, files=(*skill.files, *job.request.files), source_path=script.path
    )
    return Job(request=request, notes={**job.notes, "skill": {"name": skill.name, "script": script.name}})
