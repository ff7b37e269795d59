"""A child is born in its control group, on any kernel: version 2 can be had beside the hierarchies of version 1."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import cloche

PROGRAM = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
from jail.cgroups import Cgroup
from jail.syscalls import CLONE_NEWCGROUP, call, clone, unshare
from jail.watch import NAMESPACES_AT_BIRTH

def own_group():
    with open("/proc/self/cgroup") as file:
        return next(line.strip() for line in file if line.startswith("0:"))

place = sys.argv[2]
call("mount", b"cgroup2", place.encode(), b"cgroup2", 0, None)
group = Cgroup(2, {"pids": f"{place}/cloche-birth-{os.getpid()}"})
os.mkdir(group.folders["pids"])
for namespaces in (0, NAMESPACES_AT_BIRTH):
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
def test_a_child_is_born_in_its_group(tmp_path: Path) -> None:
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
