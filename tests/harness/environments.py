"""Virtual environments for tests, in places where people have them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cloche

INNER = "inner"  # a module that is installed there alone


def make_environment(folder: Path, inside: Sequence[str] = ()) -> Path:
    """Make an environment that has this one's packages, Cloche, and a module of its own; return its interpreter.

    `inside` are the words before a command that sees this folder, where it is none of the host's.
    """
    subprocess.run([*inside, sys.executable, "-m", "venv", "--without-pip", "--copies", str(folder)], check=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    beside = [str(Path(cloche.__file__).parents[1]), sysconfig.get_path("purelib")]
    for name, text in ((f"{INNER}.py", "WORD = 'within'\n"), ("beside.pth", "\n".join(beside))):
        words = [*inside, "sh", "-c", 'cat > "$0"', str(packages / name)]
        subprocess.run(words, input=text, text=True, check=True)
    return folder / "bin" / "python"


def root_with(folder: Path, shown_at: str) -> list[str]:
    """Return the words before a command that sees the host as it is, and a folder at a top-level path more."""
    same = [
        word for path in sorted(Path("/").iterdir()) if not path.is_symlink() for word in ("--dev-bind", path, path)
    ]
    links = [word for path in Path("/").iterdir() if path.is_symlink() for word in ("--symlink", path.readlink(), path)]
    powers = ["--cap-add", "ALL"] if os.geteuid() == 0 else []
    return [str(word) for word in ("bwrap", "--die-with-parent", *powers, *same, *links, "--bind", folder, shown_at)]


def run_there(python: Path, program: str, inside: Sequence[str] = ()) -> Any:
    """Run a program with another interpreter and return the JSON that it prints last."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [*inside, str(python), "-c", program], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
