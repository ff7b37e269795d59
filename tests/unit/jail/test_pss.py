"""What a tree has in memory: decided by what could be read of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from cloche.jail import procfs, pss
from cloche.jail.seccomp_notify import without_questions
from cloche.jail.setup.seccomp import build_filter

V1 = b"cache 9\nrss 7\nshmem 1\nhierarchical_memory_limit 99\ntotal_rss %d\ntotal_shmem %d\n"
V2 = b"anon %d\nfile 90\nshmem %d\n"


@pytest.mark.parametrize(
    ("found", "grown", "used"),
    [
        ({"bytes": 100, "is_exact": True}, 10, 100),  # PSS decides, whatever the container does
        ({"bytes": 300, "is_exact": False}, 200, 200),  # where not all may be read: the smaller of both …
        ({"bytes": 300, "is_exact": False}, 700, 300),
        ({"bytes": None, "is_exact": False}, 700, 600),  # … also where there was no time for a sum, …
        (None, 50, 50),  # … or no answer, …
        (None, None, 600),  # … or the container's memory cannot be read
    ],
)
def test_pss_decides_and_else_the_smaller_of_two_sums(found: dict[str, int] | None, grown: int, used: int) -> None:
    """Beside anonymous and shared memory of 600, never by resident sizes."""
    assert pss.decide(found, 600, grown) == used


@pytest.mark.parametrize("text", [V1, V2])
def test_growth_is_of_anonymous_and_shared_memory(text: bytes) -> None:
    """By either version's `memory.stat`, with the groups below; what is freed meanwhile is no growth."""
    assert pss.growth_bytes(text % (1000, 10), text % (3000, 15)) == 2005
    assert pss.growth_bytes(text % (1000, 10), text % (0, 0)) == 0
    assert pss.growth_bytes(b"", text % (1, 1)) is None


def test_a_sum_has_a_step_for_each_process_and_counts_none_that_ended() -> None:
    """So that who makes it is held by no more than one of them, and memory that was handed on is not counted twice."""
    lives, ends = (os.fork() or signal.pause() for _ in range(2))
    assert isinstance(lives, int)
    assert isinstance(ends, int)
    try:
        one = pss.PssSum(os.getpid(), 1 << 40)
        steps = 0
        while not one.step():
            steps += 1
            if steps == 2:  # the one that was read first is the last of the list
                os.kill(ends, signal.SIGKILL)
                os.waitpid(ends, 0)
        assert steps >= 3
        own = procfs.share_of(lives) or 0
        assert 0 < one.result()["bytes"] <= own * 1.5
    finally:
        os.kill(lives, signal.SIGKILL)
        os.waitpid(lives, 0)


def test_what_is_asked_only_where_it_is_heard_is_allowed_elsewhere() -> None:
    """With another listener around, forks are not refused: their filter is the one that does not ask."""
    asking = build_filter(os.uname().machine, confined=True, counted=False, one_uid=True)
    silent = without_questions(asking)
    assert (len(silent), silent != asking) == (len(asking), True)
    assert without_questions(silent) == silent
    others = build_filter(os.uname().machine, confined=True, counted=True, one_uid=True)
    assert without_questions(others) == others


SOCKETS = """
import os, socket, sys
from cloche.jail.seccomp_notify import install
from cloche.jail.setup.seccomp import build_filter
from cloche.jail.syscalls import PR_SET_NO_NEW_PRIVS, prctl
sender, _ = socket.socketpair()
options = (socket.SO_SNDBUF, socket.SO_RCVBUF)
before = [sender.getsockopt(socket.SOL_SOCKET, option) for option in options]
prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
install(build_filter(os.uname().machine, confined=sys.argv[1] == "confined", counted=sys.argv[2] == "counted"))
for option in options:
    sender.setsockopt(socket.SOL_SOCKET, option, 16384)
print([sender.getsockopt(socket.SOL_SOCKET, option) for option in options] == before)
"""


@pytest.mark.parametrize("level", ["confined", "jail"])
@pytest.mark.parametrize(("counted", "is_usual"), [("tree", "True"), ("counted", "False")])
def test_sockets_hold_what_is_usual_where_nobody_counts_it(level: str, counted: str, is_usual: str) -> None:
    """Where no control group has the memory of what is unread, no socket can be made to hold more."""
    words = [sys.executable, "-c", SOCKETS, level, counted]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == (f"{is_usual}\n", "")
