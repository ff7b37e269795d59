"""Python's libraries share memory, locks and queues between processes at level `confined`, which sees no /dev/shm."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import cloche

pytestmark = [pytest.mark.both_users, pytest.mark.usefixtures("settings_of_nobody")]
PROGRAM = """
import concurrent.futures, multiprocessing, os, time
from multiprocessing.shared_memory import SharedMemory

def square(number): return number * number

def add(lock, value, name):
    memory = SharedMemory(name)
    for _ in range(200):
        with lock: value.value += 1; memory.buf[0] = (memory.buf[0] + 1) % 256
    memory.close()

def wrong(call, kind):
    try: call()
    except kind: return True

if __name__ == "__main__":
    try: os.open("/dev/shm/cloche-test", os.O_CREAT | os.O_RDWR)
    except PermissionError: pass
    else: raise SystemExit("the premise: /dev/shm is closed")
    for how in ("fork", "spawn"):
        context = multiprocessing.get_context(how)
        if how == "fork":
            with context.Pool(2) as pool: assert pool.map(square, range(4)) == [0, 1, 4, 9]
            with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as pool:
                assert list(pool.map(square, range(4))) == [0, 1, 4, 9]
        lock, value, memory = context.Lock(), context.Value("i", 0, lock=False), SharedMemory(create=True, size=64)
        memory.buf[0] = 0
        both = [context.Process(target=add, args=(lock, value, memory.name)) for _ in range(1 + (how == "fork"))]
        for one in both: one.start()
        if how == "spawn": add(lock, value, memory.name)
        for one in both: one.join()
        assert (value.value, memory.buf[0]) == (400, 400 % 256), (value.value, memory.buf[0])
        memory.close(); memory.unlink()
        assert wrong(lambda: SharedMemory(memory.name), FileNotFoundError)
        assert lock.acquire() and not lock.acquire(False)
        begin = time.monotonic()
        assert not lock.acquire(timeout=0.05) and time.monotonic() - begin >= 0.05
        again = context.RLock()
        assert again.acquire() and again.acquire()
        again.release(); again.release()
        assert wrong(again.release, AssertionError) and wrong(context.BoundedSemaphore(1).release, ValueError)
    print("all")
"""


def run() -> cloche.Result:
    """Run the program itself."""
    return cloche.run(PROGRAM, level="confined", timeout=120)


def run_below() -> cloche.Result:
    """Have the system's interpreter run it, which another program of the sandbox starts."""
    files = {"program.py": PROGRAM}
    return cloche.run("/usr/bin/python3 program.py", language="bash", files=files, level="confined", timeout=120)


@pytest.mark.parametrize("how", [run, run_below])
def test_processes_share_locks_queues_and_memory(how: Callable[[], cloche.Result]) -> None:
    """Pools, queues, values, locks and shared memory do what they do elsewhere, for forks and for new interpreters."""
    result = how()
    assert (result.status, result.stdout) == ("ok", "all\n"), result.stderr
