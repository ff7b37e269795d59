"""The probe process: what it leaves when it is killed."""

import os
import select
import subprocess
import sys

import pytest

PATIENCE_S = 20.0
# As if it was killed at the moment when its child, in new namespaces, waits for its ids.
KILLED = """
import os
from cloche.jail import user_namespaces
from cloche.jail.setup import probe
user_namespaces.write_maps = lambda *_, **__: os.kill(os.getpid(), 9)
print(probe._namespaces())
"""


def test_a_probe_that_is_killed_leaves_no_child() -> None:
    """Its child ends, too: the pipe that all of them have comes to its end."""
    reading, writing = os.pipe()
    command = [sys.executable, "-c", KILLED]
    ended = subprocess.run(command, check=False, pass_fds=[writing], stdout=subprocess.DEVNULL)
    os.close(writing)
    try:
        if ended.returncode == 0:
            pytest.skip("this user has no namespaces here: see cloche doctor")
        assert ended.returncode == -9
        assert select.select([reading], [], [], PATIENCE_S)[0], "a child of the probe waits for its parent"
        assert os.read(reading, 1) == b""
    finally:
        os.close(reading)
