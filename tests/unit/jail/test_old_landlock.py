"""What old versions of Landlock do not handle: to shorten files (before Linux 6.2), ioctls of devices (before 6.10)."""

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
from cloche.jail.setup.privileges import IOCTLS_SINCE, LENGTHS_SINCE
from cloche.jail.setup.seccomp import build_filter

pytestmark = pytest.mark.both_users
# Each way empties a file that its user may write to, and that is neither opened to be written nor shown as such.
PROGRAM = """
import ctypes, fcntl, json, os, struct, sys
from cloche.jail import seccomp_notify
from cloche.jail.setup import privileges, seccomp
from cloche.jail.steps import perform_calls

own, outside, shown, terminal, version, is_filtered = *sys.argv[1:5], int(sys.argv[5]), sys.argv[6] == "filtered"
libc = ctypes.CDLL(None, use_errno=True)
AT_FDCWD, OPENAT2, NEITHER, TIOCSWINSZ = -100, 437, 3, 0x5414
def openat2(path, flags):
    return libc.syscall(OPENAT2, AT_FDCWD, path.encode(), struct.pack("QQQ", flags, 0, 0), 24)
ways = {
    "truncate": lambda path: os.truncate(path, 0),
    "to read": lambda path: os.open(path, os.O_RDONLY | os.O_TRUNC),
    "for neither": lambda path: os.open(path, NEITHER | os.O_TRUNC),
    "to write": lambda path: os.open(path, os.O_WRONLY | os.O_TRUNC),
    "openat2": lambda path: openat2(path, NEITHER | os.O_TRUNC),
}
perform_calls([
    privileges.forbid_new_privileges(),
    *privileges.restriction([(own, "write"), (shown, "read"), ("/usr", "read")], version),
])
if is_filtered:
    program = seccomp.build_filter(os.uname().machine, confined=True, landlock=version)
    seccomp_notify.install(program)
changed = {}
for folder in (own, outside, shown):
    for name, way in ways.items():
        try:
            way(f"{folder}/{name}")
        except OSError:
            pass
    changed[os.path.basename(folder)] = [name for name in ways if os.stat(f"{folder}/{name}").st_size == 0]
changed["terminal"] = []
for name, way in (("open", os.open), ("openat2", openat2)):
    try:
        fcntl.ioctl(way(terminal, NEITHER | os.O_NOCTTY), TIOCSWINSZ, bytes(8))
    except (OSError, ValueError):
        continue
    changed["terminal"].append(name)
print(json.dumps(changed))
"""
WAYS = ["truncate", "to read", "for neither", "to write", "openat2"]


def changed(folder: Path, version: int, *, is_filtered: bool) -> Any:
    """Return what a guest has changed where, under Landlock of a version: files emptied, a terminal resized."""
    folders = [folder / name for name in ("own", "outside", "shown")]
    for one in folders:
        one.mkdir(parents=True)
        for name in WAYS:
            (one / name).write_text("text")
    master, terminal = os.openpty()
    words = [*map(str, folders), os.ttyname(terminal), str(version), "filtered" if is_filtered else "bare"]
    try:
        done = subprocess.run([sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True, check=True)
    finally:
        os.close(master)
        os.close(terminal)
    return json.loads(done.stdout)


def test_what_it_does_not_handle_the_filter_refuses(tmp_path: Path) -> None:
    """Files of outside are not emptied, terminals not used; its own files are emptied by who opens them to write."""
    before = changed(tmp_path / "without", LENGTHS_SINCE - 1, is_filtered=False)
    assert before["outside"] == ["truncate", "for neither", "openat2"], before
    assert before["shown"] == ["truncate", "to read", "for neither", "openat2"], before
    assert changed(tmp_path / "later", IOCTLS_SINCE - 1, is_filtered=False)["terminal"] == ["open", "openat2"]
    found = changed(tmp_path / "with", LENGTHS_SINCE - 1, is_filtered=True)
    assert found == {"own": ["to write"], "outside": [], "shown": [], "terminal": []}
    assert changed(tmp_path / "with later", IOCTLS_SINCE - 1, is_filtered=True)["terminal"] == []


@pytest.mark.parametrize("version", [LENGTHS_SINCE - 1, IOCTLS_SINCE - 1, IOCTLS_SINCE])
def test_the_filter_is_that_of_the_kernel(version: int) -> None:
    """A guest at level confined has the filter of its kernel's Landlock."""
    host, level = replace(measure_host(), landlock_abi=version, cgroup_version=0, owns_ids=False), Level.CONFINED
    spec = build_spec(level, Policy(), Limits(), host, choose_guest_paths(level))
    machine, kind = os.uname().machine, {"confined": True, "one_uid": True, "counted": False}
    assert spec.seccomp == build_filter(machine, **kind, landlock=version)
