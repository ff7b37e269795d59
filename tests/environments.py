"""Virtual environments for tests, in places where people have them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import cloche

INNER = "inner"  # a module that is installed there alone


def make_environment(folder: Path) -> Path:
    """Make an environment that has this one's packages, Cloche, and a module of its own; return its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--copies", str(folder)], check=True)
    python = folder / "bin" / "python"
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    (packages / f"{INNER}.py").write_text("WORD = 'within'\n")
    beside = [str(Path(cloche.__file__).parents[1]), sysconfig.get_path("purelib")]
    (packages / "beside.pth").write_text("\n".join(beside))
    return python


def run_there(python: Path, program: str) -> Any:
    """Run a program with another interpreter and return the JSON that it prints last."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [str(python), "-c", program], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
