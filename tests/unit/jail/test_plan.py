"""The order of a prefork jail's steps: it is the wall, and most of it cannot be seen from inside."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from cloche.jail.messages import Building, Run, Spec
from cloche.jail.setup.plan import compile_prefork_jail
from cloche.jail.steps import CALLERS_WORKSPACE, NEXT_WORKSPACE

if TYPE_CHECKING:
    from cloche.jail.steps import Step

MOUNTS = [("tmpfs", "dev/shm", 1 << 20, 100, "1777"), ("tmpfs", "tmp", 1 << 20, 100, "1777")]
SPEC = Spec(outside=(1, 1), mounts=MOUNTS, landlock=[("/workspace", "write")], landlock_abi=1, cpu_affinity=1)
# What a guest does once its mounts are made: the last that needs capabilities, then what gives them up.
GIVE_UP = "directory namespace limits affinity switch_identity capabilities die_with_parent session"


def compiled(*, keeps_workspace: bool, has_workspace: bool = False) -> Building:
    """Return what is compiled for a guest of root's, who has an id that pid 1 has not."""
    return compile_prefork_jail(SPEC, Run(), keeps_workspace=keeps_workspace, has_workspace=has_workspace)


def names(steps: list[Step]) -> str:
    """Return the names of steps, in order."""
    return " ".join(name for name, *_ in steps)


def test_pid_1_opens_the_hosts_files_before_it_changes_its_identity() -> None:
    """And dies with the helper: the kernel forgets that when the identity changes."""
    assert names(compiled(keeps_workspace=False).build).startswith("open_sources switch_identity die_with_parent ")


@pytest.mark.parametrize(
    ("has_workspace", "begin"), [(False, "unshare tmpfs tmpfs tmpfs"), (True, "unshare attach tmpfs tmpfs")]
)
def test_a_first_guest_keeps_a_mount_for_the_next_and_one_for_the_caller(has_workspace: bool, begin: str) -> None:
    """The workspace it makes, or attaches; the caller has one of its own, which no guest attaches."""
    first = compiled(keeps_workspace=True, has_workspace=has_workspace).first
    assert names(first) == f"{begin} umask keep_workspace lend_workspace {GIVE_UP}"
    registers = {name: calls[0][2] for name, _, calls in first if name.endswith("_workspace")}
    assert registers == {"keep_workspace": NEXT_WORKSPACE, "lend_workspace": CALLERS_WORKSPACE}


def test_a_later_guest_attaches_the_workspace_and_keeps_a_mount_for_the_next() -> None:
    """Where none is kept, it does what the first one did."""
    later = compiled(keeps_workspace=True).later
    assert names(later) == f"unshare attach tmpfs tmpfs umask keep_workspace {GIVE_UP}"
    assert compiled(keeps_workspace=False).later == []


def test_every_guest_is_restricted_by_landlock_last() -> None:
    """After it is dumpable: its own entries of /proc are its own by then."""
    assert names(compiled(keeps_workspace=True).late) == "dumpable landlock"
