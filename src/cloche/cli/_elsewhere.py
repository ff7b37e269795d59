"""The command on systems other than Linux: `doctor`; on Windows also `backends`, and one message for all others."""

from __future__ import annotations

import json
import platform
import sys
from typing import NoReturn

from cloche.core.other_systems import WINDOWS, WORK_ELSEWHERE, system_name, unavailable_on
from cloche.core.policy import BACKEND_ROWS

EXIT_UNUSABLE, EXIT_FAILED = 1, 125


def doctor(*, as_json: bool) -> int:
    """Print which system this is, and what works here."""
    error = unavailable_on(sys.platform)
    works = [] if sys.platform == WINDOWS else list(WORK_ELSEWHERE)
    system = f"{system_name(sys.platform)} {platform.release()}, {platform.machine()}"
    if as_json:
        facts = {"level": "none", "usable": False, "kernel": system, "reason": error.reason, "remedy": error.remedy}
        print(json.dumps({**facts, "works": works}, indent=2))
    else:
        print(f"level: none ({system})\nwhy not more: {error.reason}\nwhat to do: {error.remedy}")
    return EXIT_UNUSABLE


def on_windows(arguments: list[str]) -> NoReturn:
    """Run `doctor` or `backends`, print the message for every other command, and exit."""
    if arguments[:1] == ["doctor"]:
        sys.exit(doctor(as_json="--json" in arguments))
    error = unavailable_on(sys.platform)
    if arguments[:1] != ["backends"]:
        print(f"cloche: {error}", file=sys.stderr)
        sys.exit(EXIT_FAILED)
    report = {"available": False, "reason": error.reason, "remedy": error.remedy}
    if "--json" in arguments:
        print(json.dumps([{"backend": name, "summary": row.summary, **report} for name, row in BACKEND_ROWS.items()]))
    else:
        print("\n".join(f"{name}: no: {row.summary}" for name, row in BACKEND_ROWS.items()))
        print(f"reason: {error.reason}\nremedy: {error.remedy}")
    sys.exit(0)
