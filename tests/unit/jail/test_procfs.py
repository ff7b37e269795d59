"""When who was killed can do nothing any more, although the kernel is not through with it."""

import mmap
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator

import pytest

from cloche.backends.host import measure_host
from cloche.jail.cgroups import Cgroup
from cloche.jail.procfs import Death, is_done

SIZE, TIMES = 32 << 20, 300
KEPT: list[mmap.mmap] = []


@pytest.fixture
def group() -> Iterator[Cgroup | None]:
    """Return a control group of this test's own; None for whom all deaths are awaited, for want of one."""
    host, name = measure_host(), f"cloche-{os.getpid()}-dying"
    if not host.cgroup_version:
        yield None
        return
    group = Cgroup(host.cgroup_version, {key: f"{folder}/{name}" for key, folder in host.cgroup_folders.items()})
    group.create(memory_bytes=1 << 30, pids=64, cpus=2)
    yield group
    for pid in group.members():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    group.remove()


def child(group: Cgroup, work: Callable[[], object]) -> int:
    """Start a process in the group, and wait until it has done its work; it stays."""
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            group.attach(os.getpid())
            work()
            os.write(writing, b"x")
            time.sleep(600)
        finally:
            os._exit(1)
    os.close(writing)
    assert os.read(reading, 1) == b"x"
    os.close(reading)
    return pid


def test_who_lives_is_not_done(group: Cgroup | None) -> None:
    """Asleep, or stopped; who is dead is, also before its parent has taken note."""
    if group is None:
        return
    pid = child(group, lambda: None)
    assert not is_done(group)
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED)
    assert not is_done(group)
    other = child(group, lambda: None)
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert not is_done(group)
    os.kill(other, signal.SIGKILL)
    os.waitid(os.P_PID, other, os.WEXITED | os.WNOWAIT)
    assert is_done(group)


def test_a_death_that_takes_long_is_not_awaited(group: Cgroup | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It only gives up its memory, of which much is mapped: it runs no more, and is not gone."""
    monkeypatch.setattr("cloche.jail.procfs.FIRST_WAIT_S", 0.005)
    if group is None:
        return

    def map_much() -> None:
        with tempfile.TemporaryFile(dir="/dev/shm") as file:
            file.write(b"x" * SIZE)
            file.flush()
            how = mmap.MAP_SHARED | mmap.MAP_POPULATE
            KEPT.extend(mmap.mmap(file.fileno(), SIZE, how, mmap.PROT_READ) for _ in range(TIMES))

    pid = child(group, map_much)
    death = Death(pid, group)
    assert death.spent[1] > 0
    os.kill(pid, signal.SIGKILL)
    assert not death.wait()
    assert os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None
    assert is_done(group)
