"""Files of outside keep their length where Landlock asks for no right to shorten them (before Linux 6.2)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cloche.backends.host import measure_host
from cloche.backends.local.plan import build_spec, choose_guest_paths
from cloche.core.enforcement import Level
from cloche.core.limits import Limits
from cloche.core.policy import Policy
from cloche.core.record import replace
from cloche.jail.setup.privileges import LENGTHS_SINCE
from cloche.jail.setup.seccomp import build_filter

pytestmark = pytest.mark.both_users
# Each of these empties a file that its user may write to, and that is neither opened to be written nor shown as such.
PROGRAM = """
import ctypes, json, os, struct, sys
from cloche.jail import seccomp_notify
from cloche.jail.setup import privileges, seccomp
from cloche.jail.steps import perform_calls

own, outside, shown, version, keeps = *sys.argv[1:4], int(sys.argv[4]), json.loads(sys.argv[5])
libc = ctypes.CDLL(None, use_errno=True)
AT_FDCWD, OPENAT2, NEITHER = -100, 437, 3
ways = {
    "truncate": lambda path: os.truncate(path, 0),
    "to read": lambda path: os.open(path, os.O_RDONLY | os.O_TRUNC),
    "for neither": lambda path: os.open(path, NEITHER | os.O_TRUNC),
    "to write": lambda path: os.open(path, os.O_WRONLY | os.O_TRUNC),
    "openat2": lambda path: libc.syscall(
        OPENAT2, AT_FDCWD, path.encode(), struct.pack("QQQ", NEITHER | os.O_TRUNC, 0, 0), 24
    ),
}
perform_calls([
    privileges.forbid_new_privileges(),
    *privileges.restriction([(own, "write"), (shown, "read"), ("/usr", "read")], version),
])
if keeps is not None:
    program = seccomp.build_filter(os.uname().machine, confined=True, keeps_lengths=keeps)
    seccomp_notify.install(program)
emptied = {}
for folder in (own, outside, shown):
    for name, way in ways.items():
        try:
            way(f"{folder}/{name}")
        except OSError:
            pass
    emptied[os.path.basename(folder)] = [name for name in ways if os.stat(f"{folder}/{name}").st_size == 0]
print(json.dumps(emptied))
"""
WAYS = ["truncate", "to read", "for neither", "to write", "openat2"]


def emptied(folder: Path, *, version: int, keeps: bool) -> Any:
    """Return which files a guest has emptied in which folder, under Landlock of a version."""
    folders = [folder / name for name in ("own", "outside", "shown")]
    for one in folders:
        one.mkdir(parents=True)
        for name in WAYS:
            (one / name).write_text("text")
    words = [sys.executable, "-c", PROGRAM, *map(str, folders), str(version), json.dumps(keeps)]
    return json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)


def test_files_of_outside_keep_their_length(tmp_path: Path) -> None:
    """Before version 3 by the filter, which empties the guest's own where these are opened to be written."""
    before = emptied(tmp_path / "without", version=LENGTHS_SINCE - 1, keeps=False)
    assert before["outside"] == ["truncate", "for neither", "openat2"], before
    assert before["shown"] == ["truncate", "to read", "for neither", "openat2"], before
    found = emptied(tmp_path / "with", version=LENGTHS_SINCE - 1, keeps=True)
    assert found == {"own": ["to write"], "outside": [], "shown": []}


@pytest.mark.parametrize("version", [LENGTHS_SINCE - 1, LENGTHS_SINCE])
def test_the_filter_is_that_of_the_kernel(version: int) -> None:
    """A guest at level confined has such a filter exactly where its Landlock is older."""
    host, level = replace(measure_host(), landlock_abi=version, cgroup_version=0, owns_ids=False), Level.CONFINED
    spec = build_spec(level, Policy(), Limits(), host, choose_guest_paths(level))
    machine, kind = os.uname().machine, {"confined": True, "one_uid": True, "counted": False}
    assert spec.seccomp == build_filter(machine, **kind, keeps_lengths=version < LENGTHS_SINCE)
