"""Contests of the benchmark, held and read by tests."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
OURS = {"cloche, cold", "cloche, warm", "cloche, open sandbox", "cloche, on demand"}


def run(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a program of this interpreter's."""
    return subprocess.run(
        [sys.executable, *words], cwd=folder, capture_output=True, text=True, check=False, timeout=200
    )


def event(report: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return one event of a report."""
    return next(one for one in report["events"] if one["name"] == name)
