"""What an escape attempt is, and how it is judged.

Theory of operation. An attempt is one program. It is run twice, with the same check: outside, where it must
succeed (that is its control, the proof that it would work), and in a sandbox, where it must not. It succeeds when it
prints `ESCAPED`, when the secret of a planted canary turns up in its output, or when the check finds its effect on
the host. It is contained when none of this happened and the program either said `CONTAINED` or was stopped. A program
that just crashed has proved nothing and fails the test. An attempt whose control does not succeed is listed with the
reason and not counted.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from textwrap import dedent
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.harness.escape.runners import Runner
    from tests.harness.escape.targets import Canaries

JAIL, CONFINED = "jail", "confined"
BOTH = (JAIL, CONFINED)
SESSION, FORK = "session", "fork"  # places at level jail where the program is a cell
LIVE = "live"  # a live sandbox, at level jail
IS_ROOT = os.geteuid() == 0

# How a run may end without a word of its own and still count as contained: something stopped it.
STOPPED = frozenset({
    "timeout", "out_of_memory", "output_limit", "pids_limit", "disk_limit", "signaled", "denied",
})  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Hold what came of a run: how it succeeded (`breach`) or what held it (`stopped_by`); a crash has neither."""

    breach: str = ""
    stopped_by: str = ""
    trace: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Hold what the host saw of one run. `save` copies the files out into a directory, as the host would."""

    stdout: str
    stderr: str
    exit_code: int
    status: str
    seconds: float
    token: str
    save: Callable[[str], object]
    promises: Mapping[str, str] = field(default_factory=dict)


Check = Callable[["Attempt", "Runner", "Canaries"], Verdict]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """Describe one attempt.

    `first` is a program that runs before `code`, in another sandbox, session or fork. `limits` are keywords of the
    sandboxed run.
    `destructive`: the control runs in throwaway namespaces only. `root_only` says why no ordinary user can show that
    it works. `promise` names a control: where the result says that it is not enforced, success is not counted.
    """

    name: str
    family: str
    code: str
    first: str = ""
    language: str = "python"
    check: Check | None = None
    limits: Mapping[str, Any] = field(default_factory=dict)
    levels: tuple[str, ...] = (JAIL,)
    destructive: bool = False
    terminal: bool = False
    root_only: str = ""
    promise: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "code", dedent(self.code).strip() + "\n")
        object.__setattr__(self, "first", dedent(self.first).strip() + "\n" if self.first else "")

    @property
    def has_control_here(self) -> bool:
        """Say whether this user has any chance to show that the attempt works."""
        return IS_ROOT or not self.root_only


def judge(seen: Seen, canaries: Canaries) -> Verdict:
    """Return the verdict on one run, from its output and from what became of the canaries."""
    output = seen.stdout + "\n" + seen.stderr
    lines = output.splitlines()
    claims = [line for line in lines if line.startswith("ESCAPED")]
    leaks = [f"saw {name}" for name, secret in canaries.secrets.items() if secret in output]
    harm = canaries.harm()
    if claims or leaks or harm:
        return Verdict(breach="; ".join([*claims, *leaks, *harm]))
    refusals = [line for line in lines if line.startswith("CONTAINED")]
    stopped_by = refusals[0] if refusals else seen.status if seen.status in STOPPED else ""
    return Verdict(stopped_by=stopped_by, trace=f"{seen.status}, exit {seen.exit_code}\n{output[-2000:]}")


def run_once(attempt: Attempt, runner: Runner, canaries: Canaries) -> Verdict:
    """Be the plain check: run the first program if there is one, then the attempt, and look at what it says."""
    if attempt.first:
        before = judge(runner.run(attempt, code=attempt.first), canaries)
        if before.breach or not before.stopped_by:
            return before
    try:
        return judge(runner.run(attempt), canaries)
    except UnicodeDecodeError as error:
        return Verdict(breach=f"the host choked on the output: {error}")


def run_check(attempt: Attempt, runner: Runner, canaries: Canaries) -> Verdict:
    """Run the attempt with one runner, and return what its check says."""
    return (attempt.check or run_once)(attempt, runner, canaries)


# By family and name: why it makes no sense in a cell.
PATIENCE = "who resists the interrupt of a time-out has three seconds more: test_sessions.py runs them as cells"
NOT_AS_CELL: Mapping[str, str] = {
    "processes/ignore every signal that asks": PATIENCE,
    "processes/outlive a time-out": PATIENCE,
    "processes/stand still past the time-out": PATIENCE,
}
# By family and name: why it makes no sense in a live sandbox.
OWN_TERMINALS = "it has terminals of its own at /dev/pts, as the host has"
SHARED = "what else runs in it is the same user's, and within reach: test_live.py has what must go on"
LINKS = "links that stay inside the folder are copied out as links: tests of folders have those that do not"
NOT_LIVE: Mapping[str, str] = {
    "leaks/the host's mounts": OWN_TERMINALS,
    "leaks/the host's mounts, by pid 1": OWN_TERMINALS,
    "processes/kill everybody": SHARED,
    "way out/a link to a link": LINKS,
    "way out/a link by way of a folder link": LINKS,
    "way out/a link to itself": LINKS,
}
# What works in a cell and should not: expected to fail, and an error when it no longer does.
FOUND_OPEN: Mapping[tuple[str, str], str] = {}
if IS_ROOT:  # an ordinary user's forks have no groups of their own
    FOUND_OPEN = {
        ("leaks/the path of the control group", FORK): (
            "a fork's group is beside its session's, and its path shows its name with the caller's pid (as documented)"
        ),
    }


def key_of(attempt: Attempt) -> str:
    """Return what an attempt is called by."""
    return f"{attempt.family}/{attempt.name}"


def places_of(attempt: Attempt) -> tuple[str, ...]:
    """Return where an attempt is run: at its levels, as a cell in a session and in a fork, in a live sandbox."""
    if JAIL not in attempt.levels:
        return attempt.levels
    cells = (SESSION, FORK) if key_of(attempt) not in NOT_AS_CELL else ()
    return (*attempt.levels, *cells, *((LIVE,) if key_of(attempt) not in NOT_LIVE else ()))
