"""Attempts on the early exit notice of a run: to be reported as ended and to work on, or to lie.

A guest may make the call itself, whenever it likes. It is always an end; when others of the guest's are about it is not
the early one. Each attempt is first made where it works: beside a process that learns of an end in another way.
"""

import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import cloche
from cloche.core.result import Result
from cloche.jail.syscalls import EXIT_NOTICE, MACHINE, NUMBERS
from tests.harness.processes import run_pooled

pytestmark = pytest.mark.both_users

EXIT_GROUP, LIST = (NUMBERS[MACHINE][name] for name in ("exit_group", "set_robust_list"))
SAY = f"""
import ctypes, os, sys, threading, time
def say(code, keeps_list=False):
    sys.stdout.flush()
    call = ctypes.CDLL(None).syscall
    keeps_list or call(ctypes.c_long({LIST}), None, ctypes.c_long(24))
    call(ctypes.c_long({EXIT_GROUP}), ctypes.c_long({EXIT_NOTICE} << 32 | code))
"""
# The kernel marks the last of two thousand words when it takes the process apart, and is long in coming there.
FUTEXES = f"""
import mmap, struct
COUNT = 2040
slow = os.open("/dev/shm/slow", os.O_RDWR | os.O_CREAT)
file = os.open("/workspace/f", os.O_RDWR | os.O_CREAT)
os.ftruncate(slow, 4096 * COUNT)
os.ftruncate(file, 4096)
one, other, target = mmap.mmap(slow, 4096 * COUNT), mmap.mmap(slow, 4096 * COUNT), mmap.mmap(file, 4096)
where = lambda area: ctypes.addressof(ctypes.c_char.from_buffer(area))
me = struct.pack("I", os.getpid())
head = (ctypes.c_ulong * 3)()
start = ctypes.addressof(head)
for n in range(COUNT):
    after = where(other) + 4096 * (n + 1) if n + 1 < COUNT else where(target)
    one[4096 * n : 4096 * n + 12] = struct.pack("Q", after) + me
target[0:12] = struct.pack("Q", start) + me
head[0], head[1], head[2] = where(other), 8, 0
ctypes.CDLL(None).syscall(ctypes.c_long({LIST}), ctypes.c_void_p(start), ctypes.c_long(24))
"""
MARK = b"\0\0\0\x40"
BEAT = """
def beat():
    for _ in range(2000):
        with open("heartbeat", "a") as file:
            file.write("x")
        time.sleep(0.01)
    os._exit(0)
def wait_for_beats():
    until = time.monotonic() + 30
    while not (os.path.exists("heartbeat") and os.path.getsize("heartbeat") > 3) and time.monotonic() < until:
        time.sleep(0.01)
"""
# Who goes on in each, and what it takes to give an exit notice beside it.
BESIDE = {
    "a child": "os.fork() or beat()\nwait_for_beats()\nsay(3)",
    "a daemon": "os.fork() or (os.setsid(), os.fork() and os._exit(0), beat())\nwait_for_beats()\nsay(3)",
    "a thread": "threading.Thread(target=beat).start()\nwait_for_beats()\nsay(3)",
    "a thread that says it": "threading.Thread(target=lambda: (wait_for_beats(), say(3))).start()\nbeat()",
    "a child of an interpreter that ends itself": "os.fork() or beat()\nwait_for_beats()\nraise SystemExit(3)",
    "another program": (
        "os.fork() or beat()\nwait_for_beats()\n"
        "os.execv(sys.executable, [sys.executable, '-c', open('say').read() + 'say(3)'])"
    ),
}
OUTSIDE = "child = os.fork() or (os.setsid(), beat())\nopen('child', 'w').write(str(child))\nwait_for_beats()\nsay(3)"


def test_who_is_told_of_one_end_is_outlived_by_others(tmp_path: Path) -> None:
    """The control: outside, a process that gives an exit notice ends with its code, and its child goes on."""
    started = [sys.executable, "-c", SAY + BEAT + OUTSIDE]
    assert subprocess.run(started, cwd=tmp_path, check=False, timeout=60).returncode == 3
    try:
        before = (tmp_path / "heartbeat").stat().st_size
        assert comes(lambda: (tmp_path / "heartbeat").stat().st_size > before)
    finally:
        os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)


@pytest.mark.parametrize("name", BESIDE)
def test_nobody_works_on_when_the_end_is_told(name: str) -> None:
    """What a run wrote is whole when its result is there: nothing of it grows afterwards."""
    with cloche.Sandbox(live=False, timeout=60) as sandbox:
        sandbox.run("print(1)")
        ended = sandbox.run(SAY + BEAT + BESIDE[name], files={"say": SAY})
        assert ended.exit_code == 3, ended.stderr
        told = next(file.size for file in ended.files if file.path == "heartbeat")
        later = sandbox.run("import os, time; time.sleep(0.5); print(os.path.getsize('heartbeat'))")
        assert int(later.stdout) == told


def comes(look: Callable[[], bool]) -> bool:
    """Wait until something holds, half a minute at most."""
    until = time.monotonic() + 30
    while not (found := look()) and time.monotonic() < until:
        time.sleep(0.01)
    return found


def _ends_with(code: str) -> tuple[Result, Result]:
    return cloche.run(code, warm=False), run_pooled(code)


@pytest.mark.parametrize(
    "ending",
    [
        "pass",
        "raise SystemExit(255)",
        "raise SystemExit(-1)",
        "raise SystemExit(256 + 7)",
        "raise SystemExit('a word')",
        "sys.exit(1 << 70)",
        "1 / 0",
        "os._exit(5)",
        "os.kill(os.getpid(), 9)",
        "os.abort()",
        "say(0)",
        "say(77)",
        "threading.Thread(target=time.sleep, args=(0.2,)).start()",
        "os.execv('/bin/sh', ['sh', '-c', 'exit 9'])",
        "import atexit; atexit.register(os.write, 1, b'last words')",
        "import signal; signal.signal(14, 1); signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001); time.sleep(0.05)",
    ],
)
def test_an_end_is_told_as_it_is(ending: str) -> None:
    """Exit code, status and output are those of a run that starts cold, whose end is waited for."""
    cold, warm = _ends_with(f"{SAY}\n{ending}")
    assert (warm.status, warm.exit_code, warm.stdout, warm.stderr) == (
        cold.status,
        cold.exit_code,
        cold.stdout,
        cold.stderr,
    )


@pytest.mark.parametrize("size", [65_535, 65_536, 65_537, 700_000])
def test_the_last_words_are_whole(size: int) -> None:
    """What fills the pipes in the last moment, both of them, is read to its end."""
    code = (
        f"import os\nfor fd in (1, 2):\n    for n in range(0, {size}, 1000): os.write(fd, b'x' * min(1000, {size} - n))"
    )
    for _ in range(5):
        result = run_pooled(code, output_limit="1m")
        assert (len(result.stdout), len(result.stderr)) == (size, size)


def test_what_was_used_is_told() -> None:
    """Memory and processor time are there, and are those of this run."""
    modest = run_pooled("print(1)").usage
    work = "import time\nx = b'x' * 100_000_000\nwhile time.process_time() < 0.5: pass"
    busy = run_pooled(work, memory="300m").usage
    after = run_pooled("print(1)").usage
    for usage in (modest, busy, after):
        assert usage.cpu_user_s is not None
        assert usage.cpu_system_s is not None
        assert usage.peak_memory_bytes is not None
        assert usage.cpu_user_s >= 0
        assert usage.cpu_system_s >= 0
    assert 0.4 < busy.cpu_user_s + busy.cpu_system_s < 5
    assert busy.peak_memory_bytes > 100_000_000
    for usage in (modest, after):
        assert 0 < usage.cpu_user_s + usage.cpu_system_s < 0.4
        assert 1_000_000 < usage.peak_memory_bytes < 100_000_000


def test_the_next_run_has_its_memory() -> None:
    """What takes long to be taken apart is gone before the next guest begins, and is not counted as its."""
    work = "x = bytearray(200_000_000)\nx[::4096] = b'y' * len(x[::4096])\nprint(len(x))"
    with cloche.Sandbox(live=False, memory="256m") as sandbox:
        for _ in range(8):
            result = sandbox.run(work)
            assert result.stdout == "200000000\n", (result.status, result.stderr)


def test_locks_of_who_has_ended_are_gone() -> None:
    """A later run of the same sandbox can lock what the last one had locked."""
    code = "import fcntl; file = open('lock', 'w'); fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB); print('mine')"
    with cloche.Sandbox(live=False) as sandbox:
        for _ in range(20):
            assert sandbox.run(code).stdout == "mine\n"


@pytest.mark.parametrize("ending", ["say(0, keeps_list=True)", "raise SystemExit(0)"])
def test_what_the_kernel_writes_for_the_dead_is_in_the_result(ending: str) -> None:
    """A word in a shared file that the kernel marks when its owner dies is marked when the file is looked at.

    An interpreter's own end has no such list, so there the word stays as it is.
    """
    is_marked = "keeps" in ending
    with cloche.Sandbox(live=False, timeout=60) as sandbox:
        for _ in range(10):
            result = sandbox.run(f"{SAY}{FUTEXES}\n{ending}")
            assert result.exit_code == 0, result.stderr
            (record,) = [file for file in result.files if file.path == "f"]
            now = sandbox.read_file("f")
            assert hashlib.sha256(now).hexdigest() == record.sha256
            assert not is_marked or now[8:12] == MARK
            sandbox.run("import os; os.unlink('/workspace/f')")


def test_what_the_dead_held_is_free_for_a_session() -> None:
    """Locks, room and files that were open for writing, as a session of the same sandbox finds them at once."""
    look = """
import fcntl, os
def look():
    with open("/workspace/lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    state = os.statvfs("/workspace")
    return (state.f_blocks - state.f_bfree) * state.f_frsize < 1 << 20
"""
    hold = """
import fcntl, os
file, gone = open("/workspace/lock", "w"), open("/workspace/gone", "wb")
fcntl.flock(file, fcntl.LOCK_EX)
os.unlink("/workspace/gone")
gone.write(bytes(20 << 20))
gone.flush()
memory = bytearray(100 << 20)
"""
    with cloche.Sandbox(live=False, cpus=2, memory="1g", timeout=60) as sandbox:
        session = sandbox.session()
        session.run(look)
        for ending in ("", "say(0)"):
            for _ in range(5):
                result = sandbox.run(f"{SAY}{hold}\n{ending}")
                assert result.ok, result.stderr
                seen = session.run("look()")
                assert seen.value is True, seen.stderr


@pytest.mark.parametrize("name", ["VmHWM:1", "VmHWM:-5", "VmHWM:9999999", "x\\nVmHWM:1"])
def test_a_figure_is_not_the_guest_s_word(name: str) -> None:
    """What a process calls itself comes before its largest memory in what the kernel reports of it."""
    rename = f"ctypes.CDLL(None).prctl(15, b'{name}', 0, 0, 0)"
    result = run_pooled(f"{SAY}x = b'x' * 50_000_000\n{rename}\nsay(0)", memory="300m")
    assert result.ok, result.stderr
    assert result.usage.peak_memory_bytes is not None
    assert 50_000_000 < result.usage.peak_memory_bytes < 200_000_000


def test_memory_before_another_program_counts() -> None:
    """The kernel forgets the largest memory of the first program in one place, and keeps it in another."""
    again = f"os.execv(sys.executable, [sys.executable, '-c', {SAY!r} + 'say(0)'])"
    result = run_pooled(f"import os, sys\nx = b'x' * 100_000_000\n{again}", memory="300m")
    assert result.ok, result.stderr
    assert result.usage.peak_memory_bytes is not None
    assert result.usage.peak_memory_bytes > 100_000_000


def test_garbage_on_its_way_keeps_nobody_from_starting() -> None:
    """Descriptors in sockets that were sent to themselves count until the kernel has collected them."""
    leave = """
import socket
try:
    for _ in range(50):
        one, other = socket.socketpair()
        for _ in range(3):
            socket.send_fds(one, [b"x"], [one.fileno(), other.fileno()])
except OSError as error:
    print(error.errno)
"""
    with cloche.Sandbox(live=False) as sandbox:
        for _ in range(10):
            result = sandbox.run(leave)
            assert result.ok, result.stderr
            assert sandbox.run("print(1)").stdout == "1\n"
