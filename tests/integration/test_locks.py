"""Locks work on the guest's own files, and on no others."""

from __future__ import annotations

import pytest

import cloche

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
