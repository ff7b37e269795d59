"""A session's clones, as its helper ends them."""

from __future__ import annotations

import os
import subprocess
from types import SimpleNamespace
from typing import Any

from cloche.jail import fork_tree


def test_a_clone_that_is_killed_is_not_throttled() -> None:
    """A process dies by running, so the share of the processor that a fork had is lifted with the kill."""
    lifted: list[str] = []
    cgroup = SimpleNamespace(lift_quota=lambda: lifted.append("quota"))
    with subprocess.Popen(["sleep", "60"]) as process:
        clone: Any = SimpleNamespace(ended=os.pidfd_open(process.pid), cgroup=cgroup)
        fork_tree._kill_clone(clone)
        assert process.wait(30) == -9
        fork_tree._kill_clone(clone)  # it is gone by now
        os.close(clone.ended)
    assert lifted == ["quota", "quota"]
