"""Decide a skill's grants, and run its script in a throwaway sandbox.

Theory of operation: `decide_terms` is pure. It compares a skill's requests with the operator's settings. Requests
replace defaults: Cloche's own, a tier's, plain values in the operator's files. The environment, arguments of this run
and a file of the working directory (which may only tighten) win over a request, and an amount is lowered to the
operator's ceiling. A request without an amount (a language, a tool, hosts, packages) is granted or refused: hosts are
granted if the operator's own policy or ceiling covers each of them. A skill cannot request any other part of a policy.
`arun_skill` then runs the script with the skill's files in the workspace.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, Unpack, cast

from cloche.agent.catalog import DEFAULT_TIER, tools_of
from cloche.audit.recording import note_fallback, refusals
from cloche.config.keys import LIMIT_FIELDS, Settings, format_limit
from cloche.config.options import SandboxOptions
from cloche.config.origins import DEFAULT, Origin
from cloche.config.settings import given_options, load_settings
from cloche.config.sources import ConfigPaths, checkout_origins
from cloche.core.ceilings import covers, packages_above
from cloche.core.enforcement import Control, Level
from cloche.core.errors import ClocheError, InvalidRequest, PolicyDenied
from cloche.core.events import Sink
from cloche.core.limits import format_size
from cloche.core.network import parse_rule
from cloche.core.policy import HOST_BACKENDS, PRESETS, TIERS
from cloche.core.record import dataclass, replace
from cloche.core.request import Request
from cloche.core.result import Result
from cloche.execution.inputs import Files
from cloche.execution.packages import rules_of, with_packages
from cloche.execution.prepare import Prepared, prepare_in_thread
from cloche.execution.run import OnOutput, PreparedRequest, make_sink, prepare_request, run_once
from cloche.execution.secrets import with_limits
from cloche.packages.requirements import parse_requirements
from cloche.sync_run import blocking

from .manifest import LIMIT_KEYS
from .skill import MANIFEST, Fault, Script, Skill, SkillRequests

if TYPE_CHECKING:
    from cloche.core.ceilings import PackageList

_KEY_OF_LIMIT = {LIMIT_FIELDS[key]: key for key in LIMIT_KEYS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """Describe one key: the value without the skill, the skill's request, the ceiling, the result, and the reason.

    All of them are texts in the form of the configuration; empty if missing. `origin` and `ceiling_origin` name the
    source of the operator's values. A refused term has no result.
    """

    key: str
    default: str
    origin: str = "default"
    asked: str = ""
    ceiling: str = ""
    ceiling_origin: str = ""
    result: str = ""
    why: str = ""
    is_refused: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SkillTerms:
    """Hold the outcome: the table, and the keywords of the run.

    `limits` has the amounts of the keys that a run takes as keywords, in bytes, seconds, CPUs and numbers; `require`
    joins the requirements of operator and skill. `packages` are installed for it. `hosts` are the only ones it may
    reach. `is_network_demanded`: without hosts, the run must set the network to off explicitly, because the skill
    requests that or it would be on. `refusals` says why the skill may not run; empty when it may.
    """

    table: tuple[Term, ...]
    limits: Mapping[str, float]
    require: tuple[str, ...] = ()
    packages: tuple[str, ...] | str = ()
    hosts: tuple[str, ...] = ()
    is_network_demanded: bool = True
    refusals: tuple[Fault, ...] = ()


def decide_terms(
    skill: Skill, settings: Settings, *, checkout: Collection[Origin] = (), script: Script | None = None
) -> SkillTerms:
    """Return the terms for a skill, or one script of it. `checkout` are the origins that may only tighten."""
    requests = skill.manifest.asked
    requested = requested_limits(requests)
    limits, table = {}, []
    for key in LIMIT_KEYS:
        limits[key], term = _limit(key, requested.get(key), settings, checkout)
        table.append(term)
    scripts = skill.scripts if script is None else (script,)
    table += [
        network := _network(requests, settings, checkout),
        packages := _packages(requests, settings),
        *_runtimes(scripts, settings),
        *_tools(requests, settings),
        required := _require(requests, settings),
        _backend(settings),
    ]
    refused = tuple(
        Fault(file=MANIFEST if term.asked else "", key=term.key, problem=term.why) for term in table if term.is_refused
    )
    return SkillTerms(
        table=tuple(table),
        limits=limits,
        require=_words(required.result),
        packages=() if packages.is_refused else requests.packages or settings.policy.packages,
        hosts=requests.hosts if network.result not in ("", "off") else (),
        is_network_demanded=bool(network.asked) or settings.policy.network != "off",
        refusals=refused,
    )


def requested_limits(requests: SkillRequests) -> dict[str, float]:
    """Return the amounts that a skill requests: its preset's, overridden by its own."""
    preset = PRESETS[requests.preset].limits if requests.preset is not None else {}
    return {_KEY_OF_LIMIT[field]: amount for field, amount in preset.items()} | dict(requests.limits)


def _limit(key: str, requested: float | None, settings: Settings, checkout: Collection[Origin]) -> tuple[float, Term]:
    field = LIMIT_FIELDS[key]
    held: float = getattr(settings.limits, field)
    origin, ceiling = settings.origins.get(key, DEFAULT), settings.ceilings.get(field)
    capped_by = settings.origins.get(f"ceilings.{key}", "") if ceiling is not None else ""
    amount, why = _decide_limit(requested, held, origin, checkout)
    if ceiling is not None and amount > ceiling:
        amount, why = ceiling, f"lowered to the operator's ceiling ({capped_by})"
    elif requested is not None and not why:
        has_no_bound = ceiling is None and amount > held
        why = "as the skill asks" + ("; the operator has set no ceiling" if has_no_bound else "")
    return amount, Term(
        key=key,
        default=format_limit(key, held),
        origin=origin,
        asked=format_limit(key, requested) if requested is not None else "",
        ceiling=format_limit(key, ceiling) if ceiling is not None else "",
        ceiling_origin=capped_by,
        result=format_limit(key, amount),
        why=why,
    )


def _decide_limit(
    requested: float | None, held: float, origin: Origin, checkout: Collection[Origin]
) -> tuple[float, str]:
    """Return the amount before ceilings, and why it differs from the skill's request."""
    if requested is None:
        return held, ""
    if origin.first.kind in ("argument", "environment"):
        return held, f"said for this run ({origin.first})" if held != requested else ""
    if origin.first in checkout and held < requested:
        return held, "a file of the working directory tightens it"
    return requested, ""


def _network(requests: SkillRequests, settings: Settings, checkout: Collection[Origin]) -> Term:
    """Grant the hosts that a skill names where the operator's policy or ceiling covers each of them; never more."""
    mode, hosts = requests.network, requests.hosts
    if mode is None and requests.preset is not None:
        mode = PRESETS[requests.preset].policy.get("network")
    policy, origins = settings.policy, settings.origins
    held = policy.network if policy.network != "allowlist" else _listed_hosts(policy.network_allow)
    wants = mode in ("open", "bridge") or (mode == "allowlist" and (bool(hosts) or requests.network is None))
    held_fields: dict[str, Any] = {
        "key": "network", "default": held,
        "origin": origins.get("network_allow" if policy.network == "allowlist" else "network", DEFAULT),
    }  # fmt: skip
    ceiling = settings.ceilings.get("network")
    if ceiling is not None:
        held_fields |= {"ceiling": str(ceiling), "ceiling_origin": origins.get("ceilings.network", "")}
    if not wants:
        why = "a skill has no network unless it names hosts" if policy.network != "off" else ""
        return Term(**held_fields, asked="off" if mode is not None else "", result="off", why=why)
    requested = _listed_hosts(hosts) if mode == "allowlist" else str(mode)
    why = _why_no_network(mode, hosts, settings, checkout)
    if why:
        why = f"the skill asks for the network ({requested}); {why}; allow it, or leave the key out"
    return Term(**held_fields, asked=requested, result="" if why else requested, why=why, is_refused=bool(why))


def _listed_hosts(hosts: tuple[str, ...]) -> str:
    return f"allowlist: {', '.join(hosts) or 'no host named'}"


def _why_no_network(mode: str | None, hosts: tuple[str, ...], settings: Settings, checkout: Collection[Origin]) -> str:
    """Return the reason why a skill does not get its network, empty if it does.

    The ceiling grants the hosts that it names, unless the network was set for this run, or was tightened.
    """
    if mode != "allowlist":
        return "no skill gets more than the hosts that it names"
    if not hosts:
        return "it names no host"
    own, ceiling = settings.policy.network_rules(), settings.ceilings.get("network")
    said_by = settings.origins.get("network", DEFAULT).first
    if said_by.kind in ("argument", "environment") or said_by in checkout:
        ceiling = None
    for rule in map(parse_rule, hosts):
        granted = (own.mode != "bridge" and covers(own, rule)) or (ceiling is not None and ceiling.grants(rule))
        if not granted:
            return f"{rule.text} is in neither the operator's network_allow nor what ceilings.network grants"
        denied = replace(own, mode="allowlist", allow=(rule,))
        refused = [decision for port in rule.ports if not (decision := denied.decide(rule.host, port)).is_allowed]
        if refused and not rule.is_wildcard:
            return refused[0].why
    return ""


def _packages(requests: SkillRequests, settings: Settings) -> Term:
    """Return the packages to install: the skill's, else the configured ones, within the operator's lists."""
    held, origin = settings.policy.packages, settings.origins.get("packages", DEFAULT)
    packages = requests.packages or held
    listed, requested = _listed_packages(held), _listed_packages(requests.packages)
    why = _why_no_packages(packages, settings)
    return Term(
        key="packages", default=listed or "none", origin=origin, asked=requested,
        result="" if why else _listed_packages(packages) or "none",
        why=why or ("as the skill asks" if requested else ""), is_refused=bool(why),
    )  # fmt: skip


def _listed_packages(packages: Sequence[str] | str) -> str:
    return packages if isinstance(packages, str) else ", ".join(packages)


def _why_no_packages(packages: Sequence[str] | str, settings: Settings) -> str:
    """Say why packages may not be installed, as far as their names tell; empty where they may."""
    if not packages:
        return ""
    ceiling = settings.ceilings.get("packages")
    if ceiling is not None and (above := packages_above(cast("PackageList", packages), ceiling)):
        return f"{above} is above your ceilings.packages ({', '.join(ceiling) or 'none'})"
    if packages == "auto":
        return ""
    rules = rules_of(settings)
    try:
        requirements = parse_requirements(packages)
        rules.check_denied(requirement.name for requirement in requirements)
    except ClocheError as error:
        return str(error).removeprefix("packages: ")
    unlisted = rules.unlisted(requirements)
    return f"{', '.join(unlisted)} is not in your packages_allow" if unlisted else ""


def _runtimes(scripts: tuple[Script, ...], settings: Settings) -> Iterator[Term]:
    """Yield a term for every language of the scripts; one that the operator does not allow is refused."""
    allowed = settings.policy.languages
    shown, origin = ", ".join(allowed), settings.origins.get("languages", "default")
    for language in dict.fromkeys(script.runtime for script in scripts):
        names = ", ".join(script.name for script in scripts if script.runtime == language)
        is_refused = language not in allowed
        why = f"{names}: {language} is not allowed here (allowed: {shown}); the operator's languages decide"
        yield Term(
            key="runtime", default=shown, origin=origin, asked=language, result="" if is_refused else language,
            why=why if is_refused else names, is_refused=is_refused,
        )  # fmt: skip


def _tools(requests: SkillRequests, settings: Settings) -> Iterator[Term]:
    """Yield a term where the skill needs tools: the tier has all of them, or the skill is refused."""
    if not requests.tools:
        return
    tier = settings.tier or DEFAULT_TIER
    have = {tool.name for tool in tools_of(tier)}
    lacking = [name for name in requests.tools if name not in have]
    why = f"tier {tier} has no {', '.join(lacking)}; a skill does not change the tier"
    yield Term(
        key="tools", default=f"those of tier {tier}", origin=settings.origins.get("tier", "default"),
        asked=", ".join(requests.tools), result="" if lacking else ", ".join(requests.tools),
        why=why if lacking else "", is_refused=bool(lacking),
    )  # fmt: skip


def _require(requests: SkillRequests, settings: Settings) -> Term:
    """Join what both require: the higher level, and all controls."""
    policy, tier = settings.policy, TIERS.get(settings.tier or 0)
    levels = [level for level in (policy.require_level, requests.require_level) if level is not None]
    joined = _required(max(levels, default=None), (*policy.require_controls, *requests.require_controls))
    if tier is not None and not tier.runs_code:
        why = f"tier {tier.number} ({settings.origins.get('tier', 'argument')}) runs no code"
    else:
        why = ""
    return Term(
        key="require",
        default=_required(policy.require_level, policy.require_controls) or "none",
        origin=settings.origins.get("require", "default"),
        asked=_required(requests.require_level, requests.require_controls),
        result="" if why else joined or "none",
        why=why,
        is_refused=bool(why),
    )


def _backend(settings: Settings) -> Term:
    """Say where it runs: where other code does, but on the host only if it is trusted."""
    level = settings.policy.level
    is_on_host = settings.backend in HOST_BACKENDS or (level is not None and level < Level.CONFINED)
    is_refused = is_on_host and not settings.policy.trusted
    why = (
        f'backend "{settings.backend}" runs code on the host without a sandbox; name another backend, or, for a skill '
        "of your own, say that it is trusted"
    )
    return Term(
        key="backend", default=settings.backend, origin=settings.origins.get("backend", "default"),
        result="" if is_refused else settings.backend, is_refused=is_refused,
        why=why if is_refused else "on the host, without a sandbox" if is_on_host else "",
    )  # fmt: skip


def _required(level: Level | None, controls: tuple[Control, ...]) -> str:
    return ", ".join([*([str(level)] if level is not None else []), *dict.fromkeys(controls)])


def _words(result: str) -> tuple[str, ...]:
    return () if result in ("", "none") else tuple(result.split(", "))


def terms_for(skill: Skill, script: Script | None = None, /, **options: Unpack[SandboxOptions]) -> SkillTerms:
    """Return what holds for a skill here, with the keywords of `cloche.run`.

    Raises InvalidRequest for keywords or a configuration that is wrong.
    """
    return _agree(skill, _settings_for(options), options, script)


def _settings_for(options: SandboxOptions) -> Settings:
    given = given_options(options)
    if given.get("network") not in (None, False, "off"):
        raise InvalidRequest("network: a skill gets the hosts that it names; allow them by network_allow")
    chosen = given.get("backend")
    if chosen is not None and not isinstance(chosen, str):
        del given["backend"]
    settings = load_settings(given)
    if "backend" not in given and chosen is not None:
        settings = replace(settings, backend=str(getattr(chosen, "name", "")))
    return settings


def _agree(skill: Skill, settings: Settings, options: SandboxOptions, script: Script | None) -> SkillTerms:
    paths = ConfigPaths(environ=os.environ, config_file=options.get("config"))
    return decide_terms(skill, settings, checkout=checkout_origins(paths), script=script)


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

    The skill's files are in the workspace under their own paths, read-only as far as modes go; `files` come beside
    them. `result.meta["skill"]` names skill and script. Raises PolicyDenied with every reason for a skill that may not
    run here, and the errors of `cloche.run`.
    """
    chosen = skill.script(script)
    settings = _settings_for(options)
    terms = _agree(skill, settings, options, chosen)
    with refusals(settings, language=chosen.runtime):
        if terms.refusals:
            raise PolicyDenied(f"skill {skill.name}: {'; '.join(map(str, terms.refusals))}")
    prepared = await prepare_in_thread(**_agreed(options, terms, settings))
    if prepared.policy.packages:
        code, own = _code_of(skill, chosen), {file.path: file.data for file in skill.files}
        prepared = await with_packages(prepared, code=code, language=chosen.runtime, files=own)
    job = await _prepare_run(skill, chosen, prepared, argv=argv, stdin=stdin, env=env, files=files)
    sink = make_sink(on_output, on_event)
    note_fallback(prepared.audit, prepared.notes)
    return await run_once(prepared, job, sink=sink, out=out, spill=spill)


run_skill = blocking(arun_skill, name="run_skill", module=__name__)


def _agreed(options: SandboxOptions, terms: SkillTerms, settings: Settings) -> SandboxOptions:
    """Return the keywords of the run: the caller's, with the terms in place of those they decide.

    A skill that was granted hosts reaches these. The network is set to off only where another setting says so or it
    would be on: trusted code with that demand has no fallback.
    """
    agreed: dict[str, Any] = {"warm": False, **options, **terms.limits}
    if terms.hosts:
        hosts = with_limits(terms.hosts, settings.policy) if options.get("secrets") else terms.hosts
        agreed |= {"network": "allowlist", "network_allow": hosts}
    elif terms.is_network_demanded:
        agreed["network"] = False
    if terms.require:
        agreed["require"] = terms.require
    if terms.packages:
        agreed["packages"] = terms.packages
    return cast("SandboxOptions", agreed)


def _code_of(skill: Skill, script: Script) -> str:
    return next(file.data for file in skill.files if file.path == script.path).decode("utf-8")


async def _prepare_run(
    skill: Skill,
    script: Script,
    prepared: Prepared,
    *,
    argv: Sequence[str | PathLike[str]],
    stdin: bytes | str,
    env: Mapping[str, str] | None,
    files: Files | None,
) -> PreparedRequest:
    """Return the request, with the skill's files and its script where it lies among them."""
    size, room = sum(len(file.data) for file in skill.files), prepared.limits.disk_bytes
    if size > room:
        raise InvalidRequest(
            f"skill {skill.name}: its files have {format_size(size)}, the workspace {format_size(room)}; raise disk"
        )
    code = _code_of(skill, script)
    job = await prepare_request(prepared, code, language=script.runtime, argv=argv, stdin=stdin, env=env, files=files)
    theirs = {file.path for file in skill.files}
    doubled = [file.path for file in job.request.files if file.path in theirs]
    if doubled:
        raise InvalidRequest(f"file {doubled[0]!r} is one of the skill's own; give yours another name")
    request: Request = replace(job.request, files=(*skill.files, *job.request.files), source_path=script.path)
    return PreparedRequest(request=request, notes={**job.notes, "skill": {"name": skill.name, "script": script.name}})
