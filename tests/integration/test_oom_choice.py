"""Whom the kernel ends when memory runs out: the guest, at every level and however it was started."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import cloche
from cloche.jail.setup.probe import killed_together

pytestmark = pytest.mark.both_users

SCORE = Path("/proc/self/oom_score_adj")
LOOKS = """
print(open("/proc/self/oom_score_adj").read().strip())
try:
    open("/proc/self/oom_score_adj", "w").write("0")
except OSError:
    print("refused")
"""


def cold(level: str) -> str:
    """Run at a level, with nothing warm."""
    return cloche.run(LOOKS, level=level, warm=False).stdout


def warm() -> str:
    """Run in what another run left."""
    cloche.run("pass")
    return cloche.run(LOOKS).stdout


def command() -> str:
    """Run a program of the shell's."""
    code = "cat /proc/self/oom_score_adj; echo 0 2>&- > /proc/self/oom_score_adj || echo refused"
    return cloche.run(code, language="bash", warm=False).stdout


def session() -> str:
    """Run a cell."""
    with cloche.Sandbox() as sandbox, sandbox.session() as one:
        return one.run(LOOKS).stdout


def living() -> str:
    """Start a process in a live sandbox."""
    with cloche.Sandbox() as sandbox:
        return sandbox.exec(["python3", "-c", LOOKS]).stdout


@pytest.mark.parametrize(
    "start", [lambda: cold("jail"), lambda: cold("confined"), warm, command, session, living],
    ids=["cold", "confined", "warm", "command", "session", "living"],
)  # fmt: skip
def test_a_guest_is_the_first_choice_and_stays_it(start: Callable[[], str]) -> None:
    """With the highest score, which it cannot lower; and its caller's is what it was."""
    before = SCORE.read_text()
    assert start().split() == ["1000", "refused"]
    assert SCORE.read_text() == before


def test_without_landlock_it_is_the_first_choice_and_the_report_says_that_it_may_change_that() -> None:
    """At level `process` nothing keeps the file from being written, so memory is `partial`."""
    result = cloche.run(LOOKS, level="process")
    assert result.stdout.split()[0] == "1000"
    memory = result.enforcement["memory"]
    assert (str(memory.state), "oom_score_adj" in memory.reason) == ("partial", True)


@pytest.mark.parametrize(("where", "found"), [("", ""), ("a", "a"), ("a/b", "a/b")])
def test_the_doctor_finds_a_group_that_the_kernel_ends_as_one(tmp_path: Path, where: str, found: str) -> None:
    """Our own group or one around it, whose `memory.oom.group` is 1: there no score helps the caller."""
    (tmp_path / "a/b").mkdir(parents=True)
    for folder in ("a", "a/b"):
        (tmp_path / folder / "memory.oom.group").write_text("1\n" if folder == where else "0\n")
    assert killed_together(str(tmp_path), "/a/b") == (str(tmp_path / found) if found else "")
