"""The limit on processes where the tree is counted."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "harness/programs/moving.py"


@pytest.mark.both_users
def test_nobody_is_missed_who_moves_while_the_tree_is_counted() -> None:
    """Processes whose parents keep ending go where the walk has been; the count has all of them, or says otherwise."""
    words = [sys.executable, str(PROGRAM), "30", "1"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["counts"] > 0, found
    assert found["least"] >= 30, found
