"""`cloche doctor`: what this host can enforce, measured, and how to get more."""

from __future__ import annotations

import json

from cloche.runtime.doctor import Diagnosis, diagnose

from .tables import Row, show


def examine(*, as_json: bool) -> int:
    """Print the diagnosis; 0 when code that nobody vetted can run here, that is at level confined or above."""
    found = diagnose()
    if as_json:
        print(json.dumps(found.as_dict(), default=str, indent=2))
    else:
        _print_report(found)
    return 0 if found.is_usable else 1


def _print_report(found: Diagnosis) -> None:
    print(f"level: {found.level} ({found.kernel}, {found.user})")
    for label, text in (("why not more", found.reason), ("what to do", found.remedy)):
        if text:
            print(f"{label}: {text}")
    for sentence in found.weak_points:
        print(f"weak point: {sentence}")
    for title, rows in _tables(found):
        if rows:
            print()
            show(rows, as_json=False, title=title)


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
