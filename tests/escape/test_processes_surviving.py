"""Attempts to run on after the run has ended, or to keep the host waiting."""

from functools import partial
from typing import Any

from tests.harness.escape.attempts import BOTH, Attempt
from tests.harness.escape.checks import outlives, returns_by
from tests.harness.escape.controls import Controls

# Live on for a while in a process that nobody waits for. Its command line, and so its token, are the run's own.
LINGER = """
import signal, time
def be_quiet():
    quiet = os.open("/dev/null", os.O_RDWR)
    for stream in range(3):
        os.dup2(quiet, stream)
def linger(seconds=2):
    be_quiet()
    time.sleep(seconds)
    os._exit(0)
"""

survive = partial(Attempt, family="processes", check=outlives, levels=BOTH)
delay = partial(Attempt, family="processes", check=returns_by(1.7), levels=BOTH)


def lingering(name: str, code: str, **keywords: Any) -> Attempt:
    """Return an attempt to outlive the run; `code` makes the process that lingers."""
    return survive(name=name, code=LINGER + code, **keywords)


ATTEMPTS = (
    lingering("outlive as a child", "if os.fork() == 0: linger()\n"),
    lingering(
        "outlive as a daemon",
        """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.chdir("/")
        linger()
    os._exit(0)
os.wait()
""",
    ),
    lingering("outlive in a session of its own", "if os.fork() == 0:\n    os.setsid()\n    linger()\n"),
    lingering("outlive in a process group of its own", "if os.fork() == 0:\n    os.setpgid(0, 0)\n    linger()\n"),
    lingering(
        "outlive without a death signal",
        """
if os.fork() == 0:
    syscall(157, 1, 0, 0, 0, 0)
    os.setsid()
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN)
    linger()
""",
    ),
    lingering(
        "outlive as a stopped process",
        """
child = os.fork()
if child == 0:
    os.setsid()
    be_quiet()
    os.kill(os.getpid(), signal.SIGSTOP)
    linger()
os.waitpid(child, os.WUNTRACED)
""",
    ),
    lingering(
        "outlive as a sibling",
        """
if syscall(56, 0x8000 | 17, 0, 0, 0, 0) == 0:
    os.setsid()
    linger()
""",
    ),
    lingering(
        "outlive below a subreaper",
        """
if os.fork() == 0:
    syscall(157, 36, 1, 0, 0, 0)
    os.setsid()
    if os.fork() == 0:
        if os.fork() == 0:
            linger()
        os._exit(0)
    linger()
""",
    ),
    lingering(
        "outlive by hopping from process to process",
        """
if os.fork() == 0:
    be_quiet()
    end = time.monotonic() + 2
    while time.monotonic() < end:
        if os.fork():
            os._exit(0)
        os.setsid()
        time.sleep(0.05)
    os._exit(0)
""",
    ),
    lingering(
        "outlive in a thread of a child",
        "if os.fork() == 0:\n    import threading\n    threading.Thread(target=linger).start()\n    time.sleep(5)\n",
    ),
    lingering(
        "outlive by a shell's background job",
        """
import subprocess
job = f"(sleep 2; : {T['token']}) >/dev/null 2>&1 </dev/null &"
subprocess.run(["sh", "-c", job], check=True)
""",
    ),
    lingering(
        "outlive a time-out",
        """
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    linger(T["lingers_s"])
time.sleep(T["lingers_s"])
""",
        limits={"timeout": 0.4},
    ),
    lingering(
        "outlive a crash",
        """
if os.fork() == 0:
    os.setsid()
    linger()
os.kill(os.getpid(), signal.SIGSEGV)
""",
    ),
    survive(
        name="close the streams and run on",
        limits={"timeout": 0.4},
        code="""
        import signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if os.fork() == 0:
            for stream in range(3):
                os.close(stream)
            os.setsid()
            time.sleep(T["lingers_s"])
            os._exit(0)
        for stream in range(3):
            os.close(stream)
        time.sleep(T["lingers_s"])
        os._exit(0)
        """,
    ),
    delay(
        name="a grandchild holds the pipe",
        code="""
        import time
        if os.fork() == 0:
            os.setsid()
            time.sleep(T["lingers_s"])
            os._exit(0)
        """,
    ),
    delay(
        name="a stopped grandchild holds the pipe",
        limits={"timeout": 0.4},
        code="""
        import signal
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        os.waitpid(child, os.WUNTRACED)
        """,
    ),
    delay(
        name="a grandchild passes the pipe through a socket",
        code="""
        import socket, time
        left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        socket.send_fds(left, [b"x"], [1, 2])
        if os.fork() == 0:
            quiet = os.open("/dev/null", os.O_RDWR)
            for stream in range(3):
                os.dup2(quiet, stream)
            os.setsid()
            time.sleep(T["lingers_s"])
            os._exit(0)
        """,
    ),
    delay(
        name="ignore every signal that asks",
        limits={"timeout": 0.4},
        code="""
        import signal, time
        for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_IGN)
        if os.fork() == 0:
            time.sleep(T["lingers_s"])
        time.sleep(T["lingers_s"])
        """,
    ),
    delay(
        name="stand still past the time-out",
        limits={"timeout": 0.4},
        code="""
        import signal, time
        if os.fork() == 0:
            os.setsid()
            os.kill(os.getppid(), signal.SIGSTOP)
            time.sleep(T["lingers_s"])
            os._exit(0)
        time.sleep(T["lingers_s"])
        """,
    ),
    Attempt(
        name="a fork bomb",
        family="processes",
        levels=BOTH,
        promise="pids",
        limits={"pids": 24, "timeout": 10},
        code="""
        import signal, time
        ready, gate = os.pipe(), os.pipe()
        born = 0
        try:
            for _ in range(64):
                if os.fork() == 0:
                    os.close(gate[1])
                    os.read(gate[0], 1)
                    os._exit(0)
                born += 1
        finally:
            os.close(gate[1])
        escaped(f"{born} processes at once")
        """,
    ),
    Attempt(
        name="a fork bomb of grandchildren",
        family="processes",
        levels=BOTH,
        promise="pids",
        limits={"pids": 24, "timeout": 10},
        code="""
        import time
        count = os.open("count", os.O_RDWR | os.O_CREAT | os.O_APPEND)
        def bomb(depth):
            for _ in range(3):
                if os.fork() == 0:
                    os.setsid()
                    os.write(count, b".")
                    if depth:
                        bomb(depth - 1)
                    time.sleep(3)
                    os._exit(0)
        try:
            bomb(3)
        except OSError:
            if os.getsid(0) == os.getpid() and os.getppid() != 1:
                time.sleep(0.3)
        time.sleep(0.5)
        if os.fstat(count).st_size > 64:
            escaped(f"{os.fstat(count).st_size} processes at once")
        """,
    ),
)


def test_contained(attempt: Attempt, where: str, controls: Controls) -> None:
    """Nothing of a run is left when it has ended, and the host never waits for it."""
    controls.assert_contained(attempt, where)
