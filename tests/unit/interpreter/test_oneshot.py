"""What was done ahead of a run, and what is left to do where it was not, each in an interpreter of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

PRELOADED = """
import os, sys
from cloche.interpreter import oneshot
preloaded, privileges = oneshot.Preloaded(), oneshot.Privileges(None)
def note(text): os.write(1, str(text).encode())
def preload():
    preloaded.modules.update(sys.modules)
    preloaded.libraries = oneshot.count_libraries()
"""


def run(code: str) -> tuple[int, str]:
    """Return the exit code and the output of a fresh interpreter."""
    done = subprocess.run([sys.executable, "-c", PRELOADED + code], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return done.returncode, done.stdout


@pytest.mark.parametrize("env", [{"A": "1"}, {"A": "2"}, {}])
def test_an_environment_that_was_taken_ahead_is_for_runs_with_that_one(env: dict[str, str]) -> None:
    """Any other run takes its own, and finds nothing else; the same one is not taken again."""
    code = f"""
os.environ.clear()
os.environ.update(A="1", untouched="yes")
preloaded.env = {{"A": "1"}}
oneshot.take_over({env}, preloaded)
del os.environ["CLOCHE_OUTPUT"]
note(dict(os.environ))
"""
    assert run(code) == (0, str({"A": "1", "untouched": "yes"} if env == {"A": "1"} else env))


@pytest.mark.parametrize(("is_preloaded", "written"), [(True, "3"), (False, "")])
def test_the_early_exit_notice_is_given_where_nothing_else_is_left_to_do(written: str, *, is_preloaded: bool) -> None:
    """An interpreter that no fork server prepared has C libraries with exit functions of their own: these come first.

    Where nobody listens any more, the process ends all the same.
    """
    code = f"""
privileges.exit_early = note
if {is_preloaded}: preload()
oneshot.finish(3, "/nowhere", preloaded, privileges)
"""
    assert run(code) == (3, written)
