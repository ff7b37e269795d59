"""The interpreters that a contest is held in: that of a fresh virtual environment, or this one."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
Report = dict[str, Any]


def hold(events: tuple[str, ...], asked: dict[str, Any], *, has_packages: bool = False) -> Report:
    """Hold some events in an interpreter of their own and return the report.

    Without packages that is the one of a fresh environment; Cloche and what it imports come in by path, after start-up:
    every interpreter that a contestant starts is as bare as can be. With packages it is this one.
    """
    if has_packages:
        return _run(Path(sys.executable), {**asked, "events": events, "paths": []})
    paths = [str(HERE.parent / "src"), *(path for path in sys.path if path.endswith("site-packages"))]
    # Not in /tmp, which every guest has for itself.
    with tempfile.TemporaryDirectory(prefix="bench-", dir="/var/tmp") as folder:
        place = Path(folder) / "venv"  # the folder itself is closed to others, which no user's environment is
        venv.create(place, with_pip=False, symlinks=True)
        return _run(place / "bin" / "python", {**asked, "events": events, "paths": paths})


def _run(python: Path, setting: dict[str, Any]) -> Report:
    program = [str(python), str(HERE / "contest.py"), json.dumps(setting)]
    done = subprocess.run(program, stdout=subprocess.PIPE, check=False)
    if done.returncode != 0:
        raise SystemExit("the contest did not come to its end; what it said is above")
    report: Report = json.loads(done.stdout)
    return report
