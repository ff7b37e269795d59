"""A child is cloned into its control group, on any kernel: version 2 can be had beside the hierarchies of version 1."""

from __future__ import annotations

import asyncio
import json
import marshal
import os
import subprocess
import sys
from pathlib import Path

import pytest

import cloche
from cloche.backends.host import measure_host
from cloche.backends.local.backend import LocalBackend
from cloche.core.enforcement import Level
from cloche.core.limits import Limits
from cloche.core.policy import Policy
from cloche.core.request import Request
from cloche.jail.setup import launch

pytestmark = pytest.mark.both_users

PROGRAM = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
from jail.cgroups import Cgroup
from jail.syscalls import CLONE_NEWCGROUP, call, clone, unshare
from jail.supervisor import CLONED_NAMESPACES

def own_group():
    with open("/proc/self/cgroup") as file:
        return next(line.strip() for line in file if line.startswith("0:"))

place = sys.argv[2]
call("mount", b"cgroup2", place.encode(), b"cgroup2", 0, None)
group = Cgroup(2, {"pids": f"{place}/cloche-birth-{os.getpid()}"})
os.mkdir(group.folders["pids"])
for namespaces in (0, CLONED_NAMESPACES):
    fd = group.open()
    pid = clone(namespaces, fd)
    if pid == 0:
        before = own_group()
        if namespaces:
            unshare(CLONE_NEWCGROUP)
        print(json.dumps([before.rpartition("/")[2], own_group(), os.getpid()]), flush=True)
        os._exit(0)
    os.close(fd)
    os.waitpid(pid, 0)
group.remove()
print(json.dumps(os.path.exists(group.folders["pids"])))
"""


@pytest.mark.root
def test_a_child_is_cloned_into_its_group(tmp_path: Path) -> None:
    """Alone and with new namespaces; where it then makes the group its root, it sees no other."""
    package = Path(cloche.__file__).parent
    program = [sys.executable, "-I", "-S", "-c", PROGRAM, str(package), str(tmp_path)]
    done = subprocess.run(["unshare", "--mount", *program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    alone, apart, is_left = (json.loads(line) for line in done.stdout.splitlines())
    assert alone[0].startswith("cloche-birth-")
    assert alone[1].endswith(alone[0])
    assert apart == [alone[0], "0::/", 1]
    assert not is_left


@pytest.mark.parametrize("level", [Level.JAIL, Level.CONFINED])
@pytest.mark.parametrize("use_cgroups", [True, False])
def test_a_program_has_the_processors_that_it_may_have(level: Level, use_cgroups: bool) -> None:
    """While it is built it is moved about between processors; where no control group keeps the limit, its mask does."""
    mine = os.sched_getaffinity(0)
    wanted = {1: len(mine) if use_cgroups and measure_host().cgroup_version else 1, 2: min(2, len(mine))}
    found = [asyncio.run(_processors(level, cpus, use_cgroups=use_cgroups)) for cpus in (1, 2) for _ in range(5)]
    assert found == [wanted[cpus] for cpus in (1, 2) for _ in range(5)]
    assert os.sched_getaffinity(0) == mine


@pytest.mark.parametrize("level", [Level.JAIL, Level.CONFINED, Level.PROCESS])
def test_a_program_has_its_processors_though_moving_it_is_cut_short(
    level: Level, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root of a plain container may no longer change the mask of a guest that has taken its identity meanwhile."""
    measure_host()  # by an archive of its own
    source = Path(launch.PACKAGE, "jail", "syscalls.py").read_text("utf-8")
    cut = source.replace("        posix.sched_setaffinity(pid, allowed)\n", "")
    codes = marshal.loads(launch._archive(is_probe=False))
    codes["jail.syscalls"] = marshal.dumps(compile(cut, "syscalls.py", "exec"))
    monkeypatch.setattr(launch, "_archive_files", {})
    monkeypatch.setattr(launch, "_archive", lambda _: marshal.dumps(codes))
    mine = os.sched_getaffinity(0)
    few = set(sorted(mine)[:2])  # of many, nobody is moved
    os.sched_setaffinity(0, few)
    try:
        found = {asyncio.run(_processors(level, 2, use_cgroups=True)) for _ in range(3)}
    finally:
        os.sched_setaffinity(0, mine)
    assert cut != source
    assert found == {len(few)}


async def _processors(level: Level, cpus: int, *, use_cgroups: bool) -> int:
    policy, limits = Policy(level=level, warm=False), Limits(cpus=cpus)
    async with LocalBackend(use_cgroups=use_cgroups).open(policy, limits) as sandbox:
        result = await sandbox.run(Request(code="import os; print(len(os.sched_getaffinity(0)))"))
    return int(result.stdout)
