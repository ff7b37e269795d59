"""The local backend where control groups are of version 2 alone: in a virtual machine, whose kernel has no others.

The guest is root of its machine (an image of the tests' own), makes what a service manager makes of a session, and is
root or an ordinary user with a delegated group from then on. Tried is the conformance suite at level jail, all that may
depend on groups as that user and what rests on them most as root; and how runs get into their groups.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import cloche
from cloche.testing.conformance import CHECKS
from tests.harness.machines import monitors, with_root

pytestmark = [pytest.mark.soak, pytest.mark.root, pytest.mark.timeout(1800)]

MACHINE: dict[str, Any] = {
    "backend": "microvm", "require": "vm", "cpus": 2, "memory": "1g", "disk": "256m", "pids": 4000, "timeout": 1500,
}  # fmt: skip
TESTS = Path(__file__).parents[1]
ENTER = (TESTS / "harness/programs/inside_v2.py").read_text()
USERS = {"root": 0, "an ordinary user": 1000}
UNPACK = """
import os, tarfile
tarfile.open("kit.tar").extractall("kit")
os.remove("kit.tar")
os.system("chmod -R a+rX .")
"""
CONFORM = """
import json, sys
from cloche.backends.local import LocalBackend
from cloche.core.enforcement import Level
from cloche.testing.conformance.__init__ import run_conformance
for row in run_conformance(LocalBackend(), level=Level.JAIL, only={names!r}, deviations={{}}, at_once=4):
    print(json.dumps([row.check.name, str(row.outcome), row.reason, round(row.seconds, 1)]), flush=True)
"""
# The ordinary user is held to all but what has nothing to do with groups, root to what rests on them most.
ELSEWHERE = (
    "results", "exit codes", "stdin", "argv", "env", "files in", "files out", "streaming", "cancellation", "walls",
)  # fmt: skip
NOT_HERE = ("session: javascript",)  # the machine's disk has Python and no Node
OF_THE_USER = tuple(check.name for check in CHECKS if check.family not in ELSEWHERE and check.name not in NOT_HERE)
OF_ROOT = (
    *(check.name for check in CHECKS if check.family in ("truth", "capabilities")),
    "out of memory", "out of memory in children", "pids limit", "pids limit before signaled", "ok at the process limit",
    "timeout before pids limit", "memory error", "memory is usable", "processes are usable", "survivor: daemon",
    "survivor: timed out", "in parallel",
)  # fmt: skip
# Each run is followed by the kernel's own word of who was moved from group to group.
BIRTHS = """
import ctypes, json, os, subprocess
import cloche
from cloche.backends.local import LocalBackend
from cloche.core.enforcement import Control
from cloche.jail.setup import probe; from cloche.jail.setup import probe as survey

TRACE = "/sys/kernel/tracing"
EVENTS = f"{TRACE}/events/cgroup/cgroup_attach_task/enable"

def write(path, text):
    with open(path, "w") as file:
        file.write(text)

def moved():
    with open(f"{TRACE}/trace") as file:
        rows = [row.strip() for row in file if not row.startswith("#")]
    write(f"{TRACE}/trace", "")
    return rows

said = {"survey": survey._clone_into_cgroup()[0], "version": probe._cgroup()["version"]}
controls = LocalBackend().capabilities().controls
said["mechanisms"] = {str(name): controls[name].mechanism for name in (Control.MEMORY, Control.PIDS, Control.CPU)}
if os.geteuid() == 0:
    ctypes.CDLL(None).mount(b"tracefs", TRACE.encode(), b"tracefs", 0, None)
    write(EVENTS, "1")
    group = f"/sys/fs/cgroup/moved"
    os.mkdir(group)
    child = subprocess.Popen(["sleep", "60"])
    write(f"{group}/cgroup.procs", str(child.pid))
    said["seen when moved"] = len(moved())
    child.kill()
    child.wait()
    os.rmdir(group)
said["runs"] = []
kinds = ({}, {"warm": False}, {"level": "confined"}) if os.geteuid() == 0 else ({},)
for options in kinds:
    with cloche.Sandbox(live=False, backend="local", memory="64m", **options) as sandbox:
        for code in ("print(open('/proc/self/cgroup').read())", "b = bytearray(b'x') * (256 << 20)"):
            result = sandbox.run(code, timeout=60)
            said["runs"].append([str(result.status), result.stdout.strip(), str(result.enforcement.level)])
with cloche.Sandbox(live=False, backend="local", pids=8) as sandbox:
    result = sandbox.run("import os, time\\nwhile os.fork(): pass\\ntime.sleep(60)", timeout=60)
    said["pids"] = str(result.status)
if os.geteuid() == 0:
    said["moved"] = moved()
with cloche.Sandbox(live=False, backend="local", memory="64m") as sandbox:
    session = sandbox.session()
    session.run("x = 1")
    (fork,) = session.fork(1)
    said["fork"] = [str(fork.run("b = bytearray(b'x') * (256 << 20)", timeout=60).status), session.run("x").value]
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def sandbox(microvm_image: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[cloche.Sandbox]:
    """Give a machine whose programs are root, with Cloche in it; no machine is left afterwards."""
    before = monitors()
    with pytest.MonkeyPatch.context() as patch:
        image = with_root(microvm_image, tmp_path_factory.mktemp("rooted"))
        patch.setenv("CLOCHE_MICROVM_IMAGE", str(image))
        patch.setenv("XDG_CACHE_HOME", str(microvm_image.parents[2]))
        with cloche.Sandbox(live=False, **MACHINE) as one:
            one.write_file("kit.tar", pack())
            unpacked = one.run(UNPACK)
            assert unpacked.ok, unpacked.stderr
            yield one
    assert monitors() <= before


def pack() -> bytes:
    """Return what the machine needs: Cloche, and the one package that its configuration asks for."""
    packed = io.BytesIO()
    spec = find_spec("platformdirs")
    assert spec is not None
    assert spec.origin is not None
    with tarfile.open(fileobj=packed, mode="w") as kit:
        for path in (TESTS.parent / "src" / "cloche", Path(spec.origin).parent):
            kit.add(path, path.name, filter=lambda one: None if "__pycache__" in one.name else one)
    return packed.getvalue()


def rows_of(sandbox: cloche.Sandbox, user: int, code: str) -> list[Any]:
    """Run code there as a user, and return what it says, line by line."""
    told = json.dumps({"kit": "/workspace/kit", "user": user, "words": ["-c", code]})
    result = sandbox.run(ENTER, argv=[told])
    assert result.ok, f"{result.status}: {result.stdout[-2000:]} {result.stderr[-4000:]}"
    *rows, last = (json.loads(line) for line in result.stdout.splitlines())
    assert last == {"left": []}
    return rows


@pytest.mark.parametrize("user", USERS.values(), ids=USERS)
def test_runs_are_born_in_their_groups(sandbox: cloche.Sandbox, user: int) -> None:
    """Warm and, as root, cold and confined, too: inside from the first moment, held to its limits, and gone after."""
    (said,) = rows_of(sandbox, user, BIRTHS)
    assert (said["version"], said["survey"]) == (2, True)
    assert all("cgroup v2" in mechanism for mechanism in said["mechanisms"].values())
    kinds = 1 if user else 3
    assert [row[0] for row in said["runs"]] == ["ok", "out_of_memory"] * kinds
    assert [row[2] for row in said["runs"][::2]] == ["jail", "jail", "confined"][:kinds]
    assert {row[1] for row in said["runs"] if row[::2] == ["ok", "jail"]} == {"0::/"}
    assert said["pids"] == "pids_limit"
    assert said["fork"] == ["out_of_memory", 1]
    if user == 0:
        assert said["seen when moved"] >= 1
        assert said["moved"] == []


@pytest.mark.parametrize("user", USERS.values(), ids=USERS)
def test_the_local_backend_conforms(sandbox: cloche.Sandbox, user: int) -> None:
    """Every check is kept at level jail, without a deviation."""
    names = OF_THE_USER if user else OF_ROOT
    rows = rows_of(sandbox, user, CONFORM.format(names=names))
    assert len(rows) == len(names)
    broken = [f"{name}: {reason}" for name, outcome, reason, _ in rows if outcome != "kept"]
    assert not broken, "\n".join(broken)
