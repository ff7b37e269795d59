"""Facts about this host and its settings (languages, presets, backends, images, configuration, doctor), and gc."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from cloche.core.escape import escape, escape_line

from .app import root
from .options import json_option, option, sandbox_options
from .output import READ_COLUMNS, Row, show, showing_progress

if TYPE_CHECKING:
    from cloche.audit.verify import AuditState
    from cloche.execution.doctor import Diagnosis

# Columns printed below the doctor's tables: sentences, and paths and commands to be copied.
_BELOW = ("answer", "why not", "what to do", "program", "really", "how the jail sees it", "note")
_CONFORMANCE_COLUMNS = ("family", "check", "outcome", "seconds", "reason")

images = root.group("images", help="Build images for backends.")(lambda: None)
config = root.group("config", help="Show the configuration.")(lambda: None)


@root.command("languages")
@json_option()
def _languages(as_json: bool) -> int:
    """List the languages, and the programs that run them."""
    from cloche.core.languages import LANGUAGES
    from cloche.execution.doctor import find_toolchains

    rows = [
        {
            "language": language.name,
            "aliases": language.aliases,
            "suffixes": language.suffixes,
            "engine": toolchain.engine or None,
            "note": toolchain.note,
            "image": language.image,
        }
        for language, toolchain in zip(LANGUAGES.values(), find_toolchains(), strict=True)
    ]
    show(rows, as_json=as_json)
    return 0


@root.command("presets")
@json_option()
def _presets(as_json: bool) -> int:
    """List the presets."""
    from cloche.core.policy import PRESETS

    rows = [
        {
            "preset": preset.name,
            "summary": preset.summary,
            "sets": [_amount(name, value) for name, value in {**preset.limits, **preset.policy}.items()],
        }
        for preset in PRESETS.values()
    ]
    show(rows, as_json=as_json)
    return 0


def _amount(name: str, value: object) -> str:
    from cloche.core.limits import format_size

    return f"{name}={format_size(value) if name.endswith('_bytes') and isinstance(value, int) else value}"


@root.command("backends")
@json_option()
def _backends(as_json: bool) -> int:
    """List the backends, and which are available here."""
    from cloche.config.settings import load_settings
    from cloche.core.policy import BACKEND_ROWS, Policy
    from cloche.execution.accounts import accounts_of
    from cloche.execution.selection import BackendCriteria, describe

    settings = load_settings()
    criteria = BackendCriteria(policy=Policy(), images=settings.images, accounts=accounts_of(settings))
    backends = {name: describe(name, criteria) for name in BACKEND_ROWS}
    rows = [
        {
            "backend": name,
            "available": backends[name].available,
            "level": str(backends[name].level) if backends[name].available else None,
            "level_source": backends[name].level_source if backends[name].available else None,
            "lives": not backends[name].not_live if backends[name].available else None,
            "summary": row.summary,
            "reason": backends[name].reason,
            "remedy": backends[name].remedy,
            "not_live": backends[name].not_live,
        }
        for name, row in BACKEND_ROWS.items()
    ]
    show(rows, as_json=as_json, piped_columns=READ_COLUMNS, below=("reason", "remedy", "not_live"))
    return 0


@root.command("gc")
@json_option()
def _gc(as_json: bool) -> int:
    """Remove what dead processes left behind.

    That includes containers, workspaces, their folders and control groups, and sandboxes at providers with a configured
    key. An interrupted commit to a folder of the host is undone or completed.
    """
    from cloche.config.settings import load_settings
    from cloche.execution.accounts import accounts_of
    from cloche.execution.commits import recovered
    from cloche.execution.registry import collect_garbage

    removed = {
        **collect_garbage(accounts_of(load_settings())),
        **({"workspace": recovery} if (recovery := recovered()) else {}),
    }
    if as_json:
        print(json.dumps({backend: list(lines) for backend, lines in removed.items()}, indent=2))
        return 0
    for backend, lines in removed.items():
        for line in lines:
            print(escape(f"{backend}: {line}" if backend == "workspace" else f"{backend}: removed {line}"))
    if not any(removed.values()):
        print("nothing to remove")
    return 0


@images.command("build")
@option("--backend", metavar="NAME", default="microvm", help="The backend that the image is for.")
@option("--package", metavar="NAME", multiple=True, help="A package of the distribution to add. Repeatable.")
@json_option()
def _build(backend: str, package: tuple[str, ...], as_json: bool) -> int:
    """Build the image that virtual machines start from.

    It has a kernel and a root disk from the distribution's packages. Root is not needed.
    """
    from cloche.execution.registry import build_image

    with showing_progress():
        line = build_image(backend, package)
    print(json.dumps({"backend": backend, "built": line}) if as_json else escape(line))
    return 0


@config.command("show")
@sandbox_options("config", "preset", "tier", "backend", "runtime", "prefer")
@json_option()
def _show_settings(options: dict[str, Any], as_json: bool) -> int:
    """Show every setting with its value and origin."""
    from cloche.config.settings import load_settings

    settings = load_settings(options)
    rows = [{"key": key, "value": value, "origin": origin} for key, value, origin in settings.as_rows()]
    show(rows, as_json=as_json)
    return 0


@root.command("conformance")
@option("--backend", "name", metavar="NAME", default="local", help="A backend, as `cloche backends` lists them.")
@option("--level", metavar="LEVEL", help="The level. Default: the strongest one of the backend here.")
@json_option()
def _conformance(name: str, level: str | None, as_json: bool) -> int:
    """Check a backend against every promise of the interface. The exit code is 1 if one is broken."""
    from cloche.config.settings import load_settings
    from cloche.core.enforcement import Level
    from cloche.core.policy import Policy
    from cloche.core.protocols import SupportsImages
    from cloche.execution.registry import backend_named, policy_for
    from cloche.testing.conformance import Outcome, run_conformance

    policy = policy_for(name, Policy(level=Level.parse(level) if level else None))
    backend = backend_named(name)
    if isinstance(backend, SupportsImages):
        backend = backend.with_images(load_settings().images)
    rows = run_conformance(backend, level=policy.level)
    as_dicts = [row.as_dict() for row in rows]
    if as_json:
        show(as_dicts, as_json=True)
    else:
        show([{column: row[column] for column in _CONFORMANCE_COLUMNS} for row in as_dicts], as_json=False)
        skipped = sum(row.outcome is Outcome.SKIPPED for row in rows)
        print(f"{sum(row.ok for row in rows) - skipped} of {len(rows) - skipped} as promised, {skipped} skipped")
    return 0 if all(row.ok for row in rows) else 1


@root.command("doctor")
@option(
    "--container-profile",
    "profile",
    metavar="FILE",
    help="Write a seccomp profile for containers that run jails to FILE (-: print it); measure nothing.",
)
@option("--backend", metavar="NAME", help="Also look at the machines of this backend: ray, kubernetes.")
@json_option()
def _doctor(profile: str | None, backend: str | None, as_json: bool) -> int:
    """Measure what this host enforces, and how to get more."""
    if profile is not None:
        return _write_profile(profile)
    if sys.platform != "linux":
        from ._elsewhere import doctor

        return doctor(as_json=as_json)
    from cloche.audit.verify import examine_audit
    from cloche.execution.doctor import diagnose

    from .fleet import examined, fleet_as_dict, print_fleet

    fleet = examined(backend)
    diagnosis, audit = diagnose(), examine_audit()
    if as_json:
        of_fleet = {} if fleet is None else {"fleet": fleet_as_dict(fleet)}
        print(json.dumps({**diagnosis.as_dict(), "audit": audit.as_dict(), **of_fleet}, default=str, indent=2))
    else:
        _print_report(diagnosis, audit)
        if fleet is not None:
            print_fleet(fleet)
    # Usable: untrusted code can run here at level confined or above, and is logged.
    return 0 if diagnosis.is_usable and not audit.stops_runs and not (fleet and fleet.problem) else 1


def _write_profile(path: str) -> int:
    from cloche.core.errors import InvalidRequest
    from cloche.execution.registry import container_profile

    text = container_profile()
    if path == "-":
        print(text, end="")
        return 0
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise InvalidRequest(f"--container-profile: {path} cannot be written: {error.strerror}") from error
    return 0


def audit_lines(state: AuditState) -> list[str]:
    """Describe the state of the audit log in a few lines."""
    if state.is_on is None:
        return [escape_line(f"audit log: unknown: {state.problem}")]
    where = f" in {state.folder}" if state.folder else ""
    lines = [f"audit log: {'on' if state.is_on else 'off'} ({state.origin}){where}"]
    if state.problem:
        lines.append(f"audit log: NOT writable: {state.problem}")
    elif state.folder:
        lines.append("audit log: can be written")
    if state.fault:
        lines.append(f"audit log: NOT sound: {state.fault}; cloche audit verify shows all")
    elif state.events:
        which = "all of them" if state.first == 1 else f"from event {state.first} on; cloche audit verify reads all"
        lines.append(f"audit log: sound, {state.events} events up to {state.last_time}, {which}")
    elif state.folder:
        lines.append("audit log: no events yet")
    return [escape_line(line) for line in lines]


def _print_report(diagnosis: Diagnosis, audit: AuditState) -> None:
    print(escape_line(f"level: {diagnosis.level} ({diagnosis.kernel}, {diagnosis.user})"))
    for label, text in (("why not more", diagnosis.reason), ("what to do", diagnosis.remedy)):
        if text:
            print(escape_line(f"{label}: {text}"))
    from cloche.execution.doctor import LEAST_LEVEL

    lives = [f"at {trial.level}" for trial in diagnosis.trials if trial.is_ok and not trial.not_live]
    print(escape_line(f"sandboxes live: {' and '.join(lives) or 'at no level'}"))
    for trial in diagnosis.trials:
        if trial.is_ok and trial.not_live and trial.level >= LEAST_LEVEL:
            print(escape_line(f"none lives at {trial.level}: {trial.not_live}"))
    for sentence in diagnosis.weak_points:
        print(escape_line(f"weak point: {sentence}"))
    for line in audit_lines(audit):
        print(line)
    for title, rows in _tables(diagnosis):
        if rows:
            print()
            show(
                rows,
                as_json=False,
                title=title,
                piped_columns=READ_COLUMNS,
                below=[name for name in _BELOW if name in rows[0]],
            )


def _tables(diagnosis: Diagnosis) -> list[tuple[str, list[Row]]]:
    return [
        (f"What level {diagnosis.level} enforces", _control_rows(diagnosis)),
        ("print(1), run for real", _trial_rows(diagnosis)),
        ("What the kernel lets this user do", _feature_rows(diagnosis)),
        ("What runs the languages", _toolchain_rows(diagnosis)),
        ("This interpreter", _interpreter_rows(diagnosis)),
    ]


def _control_rows(diagnosis: Diagnosis) -> list[Row]:
    return [
        {"control": str(control), "state": str(measure.state), "mechanism": measure.mechanism}
        for control, measure in diagnosis.controls.items()
    ]


def _trial_rows(diagnosis: Diagnosis) -> list[Row]:
    return [
        {
            "level": str(trial.level),
            "status": trial.status,
            "ms": f"{trial.seconds * 1000:.0f}" if trial.seconds else "",
            "enforced": ", ".join(c for c, m in trial.controls.items() if m.state == "enforced"),
            "partial": ", ".join(c for c, m in trial.controls.items() if m.state == "partial"),
            "why not": trial.detail,
        }
        for trial in diagnosis.trials
    ]


def _feature_rows(diagnosis: Diagnosis) -> list[Row]:
    return [
        {
            "feature": feature.name,
            "works": feature.works,
            "needed for": feature.needed_for,
            "answer": feature.detail,
            "what to do": feature.remedy,
        }
        for feature in diagnosis.features
    ]


def _toolchain_rows(diagnosis: Diagnosis) -> list[Row]:
    return [
        {"language": t.language, "engine": t.engine, "version": t.version, "program": t.path, "note": t.note}
        for t in diagnosis.toolchains
    ]


def _interpreter_rows(diagnosis: Diagnosis) -> list[Row]:
    interpreter = diagnosis.interpreter
    return [
        {
            "version": interpreter.version,
            "program": interpreter.path,
            "really": interpreter.real_path,
            "how the jail sees it": "; ".join(interpreter.notes),
        }
    ]
