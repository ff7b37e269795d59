"""Locks work on the guest's own files, and on no others."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

import cloche
from tests.harness.environments import make_environment, run_there

pytestmark = pytest.mark.both_users

DATABASE = """
import sqlite3
base = sqlite3.connect("a.db")
base.execute("create table t (x)")
for number in range(20):
    base.execute("insert into t values (?)", (number,))
    base.commit()
print(base.execute("select sum(x) from t").fetchone()[0])
"""
EXCLUSION = """
import fcntl, os
for place in ("/workspace/lock", "/tmp/lock", "/dev/shm/lock"):
    held = open(place, "w")
    fcntl.flock(held, fcntl.LOCK_EX)
    child = os.fork()
    if child == 0:
        try:
            fcntl.flock(open(place), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os._exit(3)
        os._exit(0)
    print(place, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
SHARED = """
import errno, fcntl, os
for place in (os.__file__, "/dev/null", "/etc/localtime"):
    try:
        fcntl.flock(open(place), fcntl.LOCK_SH)
    except OSError as error:
        print(errno.errorcode[error.errno])
"""


def test_a_database_works() -> None:
    """SQLite's record locks are granted in the workspace."""
    assert cloche.run(DATABASE).stdout == "190\n"


def test_locks_exclude_inside() -> None:
    """A lock that one process of the guest's holds is seen by another, in every place of the guest's own."""
    assert [line.split()[1] for line in cloche.run(EXCLUSION).stdout.splitlines()] == ["3", "3", "3"]


def test_no_lock_on_what_is_shared() -> None:
    """Files and devices that others see as well cannot be locked."""
    assert cloche.run(SHARED).stdout == "ENOLCK\n" * 3


# Each kind of lock, on what the guest makes and on what the host's folder has, and the folder itself.
IN_A_WORKSPACE = """
import fcntl, os, sqlite3, struct
os.makedirs("made", exist_ok=True)
whole = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
for path in ("kept", "made/lock"):
    for lock in (fcntl.flock, fcntl.lockf, lambda file, _: fcntl.fcntl(file, fcntl.F_OFD_SETLK, whole)):
        with open(path, "a") as file:
            lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
folder = os.open(".", os.O_RDONLY)
fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
os.close(folder)
base = sqlite3.connect("made/a.db")
print(base.execute("pragma journal_mode=wal").fetchone()[0])
base.execute("create table if not exists t (x)")
base.execute("insert into t values (1)")
base.commit()
base.close()
"""


def test_locks_in_a_folder_of_the_host(tmp_path: Path) -> None:
    """A workspace below /tmp, /var or a home has locks of each kind, in each kind of run, whatever the host holds."""
    (tmp_path / "kept").write_text("kept\n")
    with open(tmp_path / "kept") as held, cloche.Sandbox(workspace=tmp_path, timeout=60) as sandbox:
        fcntl.flock(held, fcntl.LOCK_EX)
        ended = [sandbox.run(IN_A_WORKSPACE), sandbox.exec(["python3", "-c", IN_A_WORKSPACE])]
        with sandbox.session() as session:
            ended.append(session.run(IN_A_WORKSPACE))
        with sandbox.session(checkpoints=True) as session:
            ended.append(session.run(IN_A_WORKSPACE))
            with session.fork()[0] as fork:
                ended.append(fork.run(IN_A_WORKSPACE))
    assert [(one.stdout, one.stderr) for one in ended] == [("wal\n", "")] * 5


TRIED = """
import errno, fcntl, json, os, sys
def tried(path):
    file = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return "locked"
    except OSError as error:
        return errno.errorcode[error.errno]
    finally:
        os.close(file)
"""
ENDS = "print(json.dumps([tried(path) for path in {paths}]))"


READ_ONLY = """
import fcntl, sqlite3
print(sqlite3.connect("file:{folder}/a.db?mode=ro", uri=True).execute("select x from t").fetchone()[0])
with open("{folder}/a.db") as file:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
"""


def test_locks_in_a_folder_that_can_only_be_read(tmp_path: Path) -> None:
    """A view of it has locks of its own, too: a database is read, whatever the host holds."""
    workspace, other = tmp_path / "workspace", tmp_path / "other"
    workspace.mkdir()
    other.mkdir()
    with contextlib.closing(sqlite3.connect(other / "a.db")) as base:
        base.executescript("create table t (x); insert into t values (5)")
    with (
        open(other / "a.db") as held,
        cloche.Sandbox(workspace=workspace, workspace_read=[other], timeout=60) as sandbox,
    ):
        fcntl.flock(held, fcntl.LOCK_EX)
        ended = sandbox.run(READ_ONLY.format(folder=other))
    assert (ended.stdout, ended.stderr) == ("5\n", "")


def test_no_lock_on_the_host_within_the_workspace(tmp_path: Path) -> None:
    """What the host shows within the guest's own mounts, an environment in the project, is locked by the host alone."""
    python = make_environment(tmp_path / ".venv")
    (tmp_path / "own").write_text("own\n")
    held, free = tmp_path / ".venv" / "pyvenv.cfg", tmp_path / ".venv" / "bin" / "python"
    program = TRIED + ENDS.format(paths=[str(held), str(free), str(tmp_path / ".venv"), str(tmp_path / "own")])
    with open(held) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        outside = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        inside = run_there(
            python,
            f"import cloche, os\nwith cloche.Sandbox(workspace={os.fspath(tmp_path)!r}) as sandbox:\n"
            f'    print(sandbox.run({program!r}).stdout, end="")',
        )
    assert outside.stdout == '["EAGAIN", "locked", "locked", "locked"]\n'
    assert inside == ["ENOLCK", "ENOLCK", "ENOLCK", "locked"]
