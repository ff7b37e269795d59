"""`cloche doctor`: what this host can enforce, measured, and how to get more."""

from __future__ import annotations

import json

from cloche.core.plain import plain_line
from cloche.runtime.doctor import Diagnosis, diagnose
from cloche.runtime.doctor_audit import AuditState, examine_audit

from .tables import READ_COLUMNS, Row, show

# What stands below its table: sentences, and paths and commands that somebody copies.
_BELOW = ("answer", "why not", "what to do", "program", "really", "how the jail sees it", "note")


def examine(*, as_json: bool) -> int:
    """Print the diagnosis; 0 when code that nobody vetted can run here: at level confined or above, and in the log."""
    found, audit = diagnose(), examine_audit()
    if as_json:
        print(json.dumps({**found.as_dict(), "audit": audit.as_dict()}, default=str, indent=2))
    else:
        _print_report(found, audit)
    return 0 if found.is_usable and not audit.stops_runs else 1


def audit_lines(found: AuditState) -> list[str]:
    """Say in a few lines how the audit log is."""
    if found.is_on is None:
        return [plain_line(f"audit log: unknown: {found.problem}")]
    place = f" in {found.folder}" if found.folder else ""
    lines = [f"audit log: {'on' if found.is_on else 'off'} ({found.origin}){place}"]
    if found.problem:
        lines.append(f"audit log: NOT writable: {found.problem}")
    elif found.folder:
        lines.append("audit log: can be written")
    if found.fault:
        lines.append(f"audit log: NOT sound: {found.fault}; cloche audit verify says all")
    elif found.events:
        which = "all of them" if found.first == 1 else f"from event {found.first} on; cloche audit verify reads all"
        lines.append(f"audit log: sound, {found.events} events up to {found.last_time}, {which}")
    elif found.folder:
        lines.append("audit log: no events yet")
    return [plain_line(line) for line in lines]


def _print_report(found: Diagnosis, audit: AuditState) -> None:
    print(plain_line(f"level: {found.level} ({found.kernel}, {found.user})"))
    for label, text in (("why not more", found.reason), ("what to do", found.remedy)):
        if text:
            print(plain_line(f"{label}: {text}"))
    for sentence in found.weak_points:
        print(plain_line(f"weak point: {sentence}"))
    for line in audit_lines(audit):
        print(line)
    for title, rows in _tables(found):
        if rows:
            print()
            show(
                rows,
                as_json=False,
                title=title,
                piped_columns=READ_COLUMNS,
                below=[name for name in _BELOW if name in rows[0]],
            )


def _tables(found: Diagnosis) -> list[tuple[str, list[Row]]]:
    return [
        (f"What level {found.level} enforces", _control_rows(found)),
        ("print(1), run for real", _trial_rows(found)),
        ("What the kernel lets this user do", _feature_rows(found)),
        ("What runs the languages", _toolchain_rows(found)),
        ("This interpreter", _interpreter_rows(found)),
    ]


def _control_rows(found: Diagnosis) -> list[Row]:
    return [
        {"control": str(control), "state": str(measure.state), "mechanism": measure.mechanism}
        for control, measure in found.controls.items()
    ]


def _trial_rows(found: Diagnosis) -> list[Row]:
    return [
        {
            "level": str(trial.level),
            "status": trial.status,
            "ms": f"{trial.seconds * 1000:.0f}" if trial.seconds else "",
            "enforced": ", ".join(c for c, m in trial.controls.items() if m.state == "enforced"),
            "partial": ", ".join(c for c, m in trial.controls.items() if m.state == "partial"),
            "why not": trial.detail,
        }
        for trial in found.trials
    ]


def _feature_rows(found: Diagnosis) -> list[Row]:
    return [
        {
            "feature": feature.name,
            "works": feature.works,
            "needed for": feature.needed_for,
            "answer": feature.detail,
            "what to do": feature.remedy,
        }
        for feature in found.features
    ]


def _toolchain_rows(found: Diagnosis) -> list[Row]:
    return [
        {"language": t.language, "engine": t.engine, "version": t.version, "program": t.path, "note": t.note}
        for t in found.toolchains
    ]


def _interpreter_rows(found: Diagnosis) -> list[Row]:
    interpreter = found.interpreter
    return [
        {
            "version": interpreter.version,
            "program": interpreter.path,
            "really": interpreter.real_path,
            "how the jail sees it": "; ".join(interpreter.notes),
        }
    ]
