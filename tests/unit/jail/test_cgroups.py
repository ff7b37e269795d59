"""What a control group leaves in the kernel when it is removed."""

import os
import time

from cloche.backends.host import measure_host
from cloche.jail.cgroups import MOST_LEFT_BYTES, Cgroup


def test_names_that_were_looked_up_are_given_back() -> None:
    """The kernel remembers each that was not there, for a group that is gone, until the host is short of memory.

    Without control groups nobody counts what it keeps.
    """
    host, name = measure_host(), f"cloche-{os.getpid()}-names"
    if not host.cgroup_version:
        return
    group = Cgroup(host.cgroup_version, {key: f"{folder}/{name}" for key, folder in host.cgroup_folders.items()})
    group.create(memory_bytes=1 << 30, pids=64, cpus=2)
    try:
        if (pid := os.fork()) == 0:
            try:
                group.attach(os.getpid())
                for number in range(60_000):
                    os.path.exists(f"/usr/lib/{name}-{number}")  # no tmpfs, which remembers nothing
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        assert group.kernel_bytes() > MOST_LEFT_BYTES
        until = time.monotonic() + 30
        while group.kernel_bytes() > MOST_LEFT_BYTES and time.monotonic() < until:  # as one may be in use just now
            group.give_back()
        assert group.kernel_bytes() <= MOST_LEFT_BYTES
    finally:
        group.remove()
