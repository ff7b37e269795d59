"""The suites that frameworks publish, unmodified, each in an environment of its own: `make soak AREA=frameworks`.

What an environment has not installed is not collected there, and so nothing of this in any other one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE, EXAMPLES = Path(__file__).parent, Path(__file__).parents[2] / "examples"
collect_ignore = [path.name for path in HERE.glob("test_*.py") if find_spec(path.stem.removeprefix("test_")) is None]


@pytest.fixture
def anyio_backend() -> str:
    """Run on asyncio alone."""
    return "asyncio"


@pytest.fixture
def example(tmp_path: Path) -> Callable[[str], str]:
    """Return a function that runs an example and returns what it prints."""

    def run(name: str) -> str:
        done = subprocess.run(
            [sys.executable, EXAMPLES / f"{name}_sandbox.py"],
            cwd=tmp_path, env={**os.environ, "PYTHONWARNINGS": "ignore"}, capture_output=True, text=True, timeout=200,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture
def well_typed() -> Callable[[str], None]:
    """Return a function that checks the types of an adapter, which can be done only where its framework is."""

    def check(name: str) -> None:
        command = [
            sys.executable,
            "-m",
            "mypy",
            "--config-file",
            HERE.parents[1] / "pyproject.toml",
            "--cache-dir",
            os.devnull,
        ]
        module = ["-m", f"cloche.integrations.{name}"]
        done = subprocess.run([*command, *module], capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    return check
