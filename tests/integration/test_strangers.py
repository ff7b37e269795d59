"""What another user of the host could take first: names, places and locks that a run needs."""

import subprocess
import sys
import textwrap

# Root does it in a network namespace of its own, so that the host's names are left alone; who is not root claims none.
TAKEN = """
import os, socket, sys
sys.path[:0] = {path!r}
import cloche
from cloche.backends.local import plan; from cloche.backends.local import prefork as warm
from cloche.jail.syscalls import CLONE_NEWNET, unshare

first, count = plan.OUTSIDE_IDS = warm.OUTSIDE_IDS = (1_898_000_000, 8)
is_root = os.geteuid() == 0
if is_root:
    unshare(CLONE_NEWNET)
reading, writing = os.pipe()
until, goes_on = os.pipe()
if (stranger := os.fork()) == 0:
    if is_root:
        os.setresuid(65534, 65534, 65534)
    held = [socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(count)]
    for number, one in enumerate(held):
        one.bind(b"\\0cloche-id-%d" % (first + number))
    os.write(writing, b"x")
    os.close(goes_on)
    os.read(until, 1)  # which is over when we are
    os._exit(0)
os.read(reading, 1)
print(*(cloche.run("print(42)", warm=warm).stdout.strip() for warm in (False, True)))
"""


def test_names_of_sockets_that_a_stranger_holds_stop_nobody() -> None:
    """Each of them may be taken: no run needs one."""
    code = textwrap.dedent(TAKEN).format(path=sys.path)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "42 42\n", done.stderr
