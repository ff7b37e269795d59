"""Pid 1 of a jail may have the guest's own id, as an ordinary user's always has: a run has a status all the same."""

from textwrap import dedent

import pytest

import cloche
from tests.harness.processes import run_pooled

HEAD = """\
import ctypes, fcntl, os, resource, signal, socket, struct
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
def call(number, *arguments):
    if libc.syscall(number, *(ctypes.c_void_p(one) if type(one) is int else one for one in arguments)) < 0:
        raise OSError(ctypes.get_errno(), "refused")
def write(name, text):
    fd = os.open(f"/proc/1/{name}", os.O_WRONLY)
    os.write(fd, text)
def own(fd, number):
    fcntl.fcntl(fd, fcntl.F_SETOWN, 1)
    fcntl.fcntl(fd, 10, number)
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
"""
LIMITS = ["NOFILE", "AS", "DATA", "CPU", "FSIZE", "STACK", "SIGPENDING", "NPROC", "MEMLOCK", "CORE"]
SIGNALS = [number for number in range(1, 65) if number not in (32, 33)]
# What is refused; what is allowed, and must do no harm, comes after it.
REFUSED = {
    **{f"limit {name}": f"resource.prlimit(1, resource.RLIMIT_{name}, (0, 0))" for name in LIMITS},
    "limit by a word of 64 bits": "call(302, (1 << 32) + 1, 7, bytes(16), None)",
    "pin to one processor": "os.sched_setaffinity(1, {0})",
    "run when idle": "os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0))",
    "run when idle, by attributes": "call(314, 1, struct.pack('IIQiIQQQ', 48, 5, 0, 0, 0, 0, 0, 0), 0)",
    "set its scheduler's parameter": "os.sched_setparam(1, os.sched_param(0))",
    "renice": "os.setpriority(os.PRIO_PROCESS, 1, 19)",
    "renice by a word of 64 bits": "call(141, 0, (1 << 32) + 1, 19)",
    "renice its group": "os.setpriority(os.PRIO_PGRP, 1, 19)",
    "renice the user": "os.setpriority(os.PRIO_USER, 0, 19)",
    "read and write when idle": "call(251, 1, 1, 3 << 13)",
    "read and write when idle, as a group": "call(251, 2, 1, 3 << 13)",
    "read and write when idle, as a user": "call(251, 3, os.getuid(), 3 << 13)",
    "trace": "call(101, 16, 1, None, None)",
    "read memory": "call(310, 1, None, 0, None, 0, 0)",
    "write memory": "call(311, 1, None, 0, None, 0, 0)",
    "move memory": "call(256, 1, 64, b'\\\\xff' * 8, b'\\\\xff' * 8)",
    "advise on memory": "call(440, os.pidfd_open(1), None, 0, 21, 0)",
    "release memory": "call(448, os.pidfd_open(1), 0)",
    "take a descriptor": "call(438, os.pidfd_open(1), 0, 0)",
    "compare descriptors": "call(312, 1, os.getpid(), 0, 0, 0)",
    "find its locks": "call(274, 1, bytes(8), bytes(8))",
    "move to a group": "os.setpgid(1, os.getpid())",
    **{
        f"write {name}": f"write({name!r}, {text!r})"
        for name, text in {
            "mem": b"x", "oom_score_adj": b"0", "timerslack_ns": b"1", "coredump_filter": b"0", "clear_refs": b"1",
            "setgroups": b"deny", "attr/exec": b"x", "comm": b"x", "sched": b"0", "autogroup": b"19",
            "uid_map": b"0 0 1",
        }.items()
    },
    **{f"look at {name}": f"os.listdir('/proc/1/{name}')" for name in ("fd", "map_files", "root", "cwd")},
}  # fmt: skip
ALLOWED = {
    "send all signals": """
        for number in {signals}:
            for send in (os.kill, lambda pid, number: signal.pidfd_send_signal(os.pidfd_open(pid), number)):
                for _ in range(20):
                    try:
                        send(1, number)
                    except OSError:
                        pass
            libc.sigqueue(1, number, 1)
            libc.syscall(234, 1, 1, number)
    """,
    "have the kernel send signals": """
        for number in (0, 9, 15, 19, 29, 34):
            ours, theirs = socket.socketpair()
            own(ours.fileno(), number)
            theirs.send(b"x")
    """,
    "send descriptors that nobody takes": """
        ours, theirs = socket.socketpair()
        try:
            for _ in range(20):
                socket.send_fds(ours, [b"x"], [ours.fileno(), theirs.fileno()] * 100)
        except OSError:
            pass
        os.fork() or signal.pause()
    """,
    "leave no pending signals": """
        signal.pthread_sigmask(signal.SIG_BLOCK, {{34}})
        while libc.sigqueue(os.getpid(), 34, 0) == 0:
            pass
        os.fork() or signal.pause()
    """,
}
END = "\nraise SystemExit(3)\n"


def all_that_is_refused() -> str:
    """Return a program that tries everything, and says what worked."""
    rows = [
        f"try:\n    {code}\n    worked.append({name!r})\nexcept OSError:\n    pass\n" for name, code in REFUSED.items()
    ]
    return f"{HEAD}worked = []\n{''.join(rows)}print(worked)\n"


@pytest.mark.both_users
@pytest.mark.parametrize("name", ALLOWED)
def test_what_a_guest_may_do_to_pid_1_changes_no_status(name: str) -> None:
    """Signals and what fills what both share keep nobody from reporting."""
    code = dedent(ALLOWED[name]).format(signals=SIGNALS)
    result = cloche.run(f"{HEAD}{code}{END}", warm=False)
    assert (result.status, result.exit_code) == ("error", 3), result.stderr


@pytest.mark.both_users
def test_pid_1_is_not_the_guests_to_change() -> None:
    """What would change, read or slow it down is refused: cold, warm, in a live sandbox and in a session."""
    code = all_that_is_refused()
    assert cloche.run(code, warm=False).stdout == "[]\n"
    assert run_pooled(code).stdout == "[]\n"
    with cloche.Sandbox(live=False) as sandbox:
        assert sandbox.run(code).stdout == "[]\n"
        with sandbox.session() as session:
            assert session.run(code).stdout == "[]\n"
            assert session.run("print(1)").stdout == "1\n"


@pytest.mark.both_users
@pytest.mark.parametrize("name", ALLOWED)
def test_what_a_guest_may_do_to_pid_1_harms_no_guest_after_it(name: str) -> None:
    """Nor any status where pid 1 stays: those who come next in its jail, or in another one if it ended, run well."""
    code = dedent(ALLOWED[name]).format(signals=SIGNALS)
    for _ in range(3):
        result = run_pooled(f"{HEAD}{code}{END}", cpus=2)
        assert (result.status, result.exit_code) == ("error", 3), result.stderr
        after = run_pooled("print('well')", cpus=2)
        assert (after.status, after.stdout) == ("ok", "well\n"), after.stderr


def test_own_limits_can_be_set_by_number() -> None:
    """A process may name itself, or a child of its own, where 0 would do."""
    code = """
        import os, resource, subprocess
        child = subprocess.Popen(["sleep", "30"])
        for pid in (0, os.getpid(), child.pid):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (64, 64))
            os.setpriority(os.PRIO_PROCESS, pid, min(19, os.getpriority(os.PRIO_PROCESS, pid) + 1))
        child.kill()
    """
    assert cloche.run(dedent(code), warm=False).ok
