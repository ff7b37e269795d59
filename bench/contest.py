"""Run the benchmark in this interpreter and print the report as JSON: the program of a fresh environment.

Its only argument is a setting as JSON; `paths` are added to its search path, and no contestant's interpreter sees them.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    asked = json.loads(sys.argv[1])
    paths = asked.pop("paths")
    sys.path += paths  # after start-up
    contestants = importlib.import_module("cloche.bench.scenarios")
    report = importlib.import_module("cloche.bench.report")
    folder = asked.pop("peers_folder")
    setting = contestants.Setting(
        import_path=os.pathsep.join(paths) or None, peers_folder=Path(folder) if folder else None, **asked
    )
    answers = os.dup(1)
    os.dup2(2, 1)
    found: dict[str, Any] = {}
    try:
        report.measure(setting, found, lambda text: print(f"measuring {text}", file=sys.stderr, flush=True))
    finally:
        with os.fdopen(answers, "w", encoding="utf-8") as file:
            json.dump(found, file)


if __name__ == "__main__":
    main()
