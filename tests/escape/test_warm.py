"""Attempts that only a warm start makes possible: on what forked the guest, and on what was there before it.

Each is first made where it works: on a process of the attempt's own, or within one run.
"""

import os
import secrets
import subprocess
import sys
from textwrap import dedent

import pytest

from tests.harness.processes import run_pooled

pytestmark = pytest.mark.both_users

IS_ROOT = os.geteuid() == 0
# Ways to hurt, hold or read another process; each returns whether it worked.
REACH = {
    "kill": "os.kill(pid, 9); worked = comes(lambda: not os.path.exists(f'/proc/{pid}') or gone(pid))",
    "stop": "os.kill(pid, 19); worked = comes(lambda: state(pid) in 'Tt')",
    "renice": "os.setpriority(os.PRIO_PROCESS, pid, 19); worked = os.getpriority(os.PRIO_PROCESS, pid) == 19",
    "pin to one processor": "os.sched_setaffinity(pid, {0}); worked = os.sched_getaffinity(pid) == {0}",
    "limit": "resource.prlimit(pid, 7, (3, 3)); worked = resource.prlimit(pid, 7)[0] == 3",
    "read memory": "open(f'/proc/{pid}/mem', 'rb').close(); worked = True",
    "read descriptors": "worked = bool(os.listdir(f'/proc/{pid}/fd'))",
    "read the environment": "worked = comes(lambda: bool(open(f'/proc/{pid}/environ', 'rb').read()))",
    "enter its root": "worked = bool(os.listdir(f'/proc/{pid}/root'))",
}  # fmt: skip
AIM = """
import os, resource, subprocess, sys, time
def gone(pid):
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return False
def state(pid):
    return open('/proc/%d/stat' % pid).read().rsplit(')')[-1].split()[0]
def comes(look):
    until = time.monotonic() + {patience_s}
    while not (found := look()) and time.monotonic() < until:
        time.sleep(0.01)
    return found
pid = {pid}
try:
    {attempt}
except (OSError, ValueError) as error:
    worked = False
print(worked)
"""
OWN_CHILD = "(child := subprocess.Popen(['sleep', '30'])).pid"
# The secret is given masked, and never put together: whoever looks for it would else find their own copy.
SCAN = """
import sys
masked = bytes.fromhex(sys.argv[1])
found = False
with open('/proc/self/maps') as maps, open('/proc/self/mem', 'rb', 0) as memory:
    for line in maps.readlines():
        first, last = (int(word, 16) for word in line.split()[0].split('-'))
        if 'r' not in line.split()[1] or '[v' in line:
            continue
        memory.seek(first)
        try:
            data = memory.read(last - first)
        except OSError:
            continue
        at = data.find(b'canary-')
        while at >= 0:
            found = found or all(data[at + 7 + k : at + 8 + k] == bytes([one ^ 90]) for k, one in enumerate(masked))
            at = data.find(b'canary-', at + 1)
        del data
print(found)
"""


def _masked(secret: str) -> str:
    return bytes(byte ^ 90 for byte in secret.removeprefix("canary-").encode()).hex()


@pytest.mark.parametrize("name", REACH)
def test_the_process_that_forked_it_is_out_of_reach(name: str) -> None:
    """Pid 1 of a jail can be neither hurt nor read by its guest; outside, a program could do all that to its child."""
    program = AIM.format(pid=OWN_CHILD, attempt=REACH[name], patience_s=20) + "child.kill()\n"
    outside = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert outside.stdout == "True\n", f"the attempt does not work even on a child: {outside.stderr}"
    assert run_pooled(AIM.format(pid=1, attempt=REACH[name], patience_s=0.1), cpus=2).stdout == "False\n"


def test_no_run_finds_what_the_one_before_was_told() -> None:
    """Code, arguments, environment, input and files of one run are nowhere in the memory of the next ones."""
    secret = f"canary-{secrets.token_hex(16)}"
    control = run_pooled(f"kept = {secret!r}\n{SCAN}", argv=[_masked(secret)])
    assert control.stdout == "True\n", control.stderr
    for _ in range(4):
        told = run_pooled(
            f"x = {secret!r}; print(len(x))", argv=[secret], env={"SECRET": secret}, stdin=secret, files={"f": secret}
        )
        assert told.ok
        found = run_pooled(SCAN, argv=[_masked(secret)])
        assert found.stdout == "False\n", found.stderr


RESIDUE = {
    "shared memory of System V": (
        "libc.shmget(0xC10C, 4096, 0o1666)",
        "libc.shmget(0xC10C, 0, 0o666)",
    ),
    "a semaphore of System V": ("libc.semget(0xC10C, 1, 0o1666)", "libc.semget(0xC10C, 0, 0o666)"),
    "a message queue of System V": ("libc.msgget(0xC10C, 0o1666)", "libc.msgget(0xC10C, 0o666)"),
    "a file in the temporary folder": ("os.open('/tmp/left', os.O_CREAT | os.O_RDWR)", "os.open('/tmp/left', 0)"),
    "a file in shared memory": ("os.open('/dev/shm/left', os.O_CREAT | os.O_RDWR)", "os.open('/dev/shm/left', 0)"),
    "a file in the workspace": ("os.open('left', os.O_CREAT | os.O_RDWR)", "os.open('left', 0)"),
    "a process": ("(os.fork() or (os.setsid(), time.sleep(60)))", "next(p for p in os.listdir('/proc') if others(p))"),
    "a listening socket": ("listen()", "socket.create_connection(('127.0.0.1', 9999), 1).fileno()"),
    "counters of the network": ("listen() and 0 or connect()", "counted()"),
    "counters of what failed": ("unreachable()", "counted6()"),
    "flow labels of IPv6": ("label()", "labelled()"),
}
TOOLS = """
import ctypes, os, socket, sys, time
libc = ctypes.CDLL(None)
def others(name):
    return name.isdigit() and int(name) not in (1, os.getpid())
kept = []
def listen():
    kept.append(socket.create_server(('127.0.0.1', 9999))); return 1
def connect():
    kept.append(socket.create_connection(('127.0.0.1', 9999))); return 1
def counted():
    line = next(line for line in open('/proc/net/dev') if line.strip().startswith('lo:'))
    return 1 if int(line.split()[1]) else -1
def unreachable():
    try:
        socket.socket(socket.AF_INET6, socket.SOCK_DGRAM).connect(('2001:db8::1', 1))
    except OSError:
        return 1
def counted6():
    rows = dict(line.split() for line in open('/proc/net/snmp6'))
    return 1 if int(rows['Ip6OutNoRoutes']) else -1
def label():
    kept.append(socket.socket(socket.AF_INET6, socket.SOCK_DGRAM))
    name, share = (0xC10C).to_bytes(4, 'big'), bytes((0, 255, 1, 0, 140, 0, 0, 0, 0, 0, 0, 0))
    request = b'said to the next'.ljust(16, bytes(1)) + name + share
    kept[-1].setsockopt(41, 32, request)
    return 1
def labelled():
    return 1 if len(open('/proc/net/ip6_flowlabel').readlines()) > 1 else -1
def said(value):
    print('no' if isinstance(value, int) and value < 0 else 'yes', flush=True)
try:
    {attempt}
except (OSError, StopIteration):
    print('no')
"""


@pytest.mark.parametrize("name", RESIDUE)
def test_nothing_is_left_for_the_next_guest(name: str) -> None:
    """What one guest leaves behind it finds itself, and no later guest of the same slot does."""
    leave, find = RESIDUE[name]
    if not IS_ROOT and name == "shared memory of System V":
        return  # refused altogether where no control group counts it
    control = run_pooled(TOOLS.format(attempt=f"said({leave}); said({find})"), cpus=2)
    assert control.stdout.split()[:2] == ["yes", "yes"], control.stderr
    for _ in range(4):
        left = run_pooled(TOOLS.format(attempt=f"said({leave})"), cpus=2)
        assert left.stdout.startswith("yes"), left.stderr
        assert run_pooled(TOOLS.format(attempt=f"said({find})"), cpus=2).stdout == "no\n"


RANDOM = dedent("""
    import os, random, secrets, tempfile, uuid
    found = [random.random(), random.SystemRandom().random(), os.urandom(8), secrets.token_hex(8), uuid.uuid4(),
             uuid.uuid1(), tempfile.mktemp()]
    try:
        import ssl
        found.append(ssl.RAND_bytes(8))
    except ImportError:
        found.append(os.urandom(8))
    try:
        import numpy
        found += [float(numpy.random.random()), float(numpy.random.default_rng().random())]
    except ImportError:
        found += [os.urandom(8), os.urandom(8)]
    print(*found, sep="\\n")
""")


@pytest.mark.parametrize("preload", [(), ("ssl", "numpy", "uuid", "tempfile")])
def test_siblings_draw_different_numbers(preload: tuple[str, ...]) -> None:
    """Children of one template share no random number, whichever generator was loaded before they were forked."""
    drawn = [run_pooled(RANDOM, preload=list(preload), cpus=2).stdout.splitlines() for _ in range(6)]
    assert all(len(row) == len(drawn[0]) for row in drawn)
    for column in zip(*drawn, strict=True):
        assert len(set(column)) == len(drawn), f"drawn twice: {column}"


# Names that are listed for as long as the kernel has not collected sockets that are on their way through each other.
LEAVE_NAMES = """
import socket
kept = []
for number in range(30):
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    one.bind(b'\\0left-behind-%d' % number)
    for end in (one, other):
        socket.send_fds(end, [b'x'], [one.fileno(), other.fileno()])
    kept += one, other
"""
LIST_NAMES = "print(open('/proc/net/unix').read().count('left-behind'))"


@pytest.mark.both_users
def test_names_of_sockets_that_nobody_holds_end_with_their_run() -> None:
    """Whoever comes next in a network namespace finds none of them listed, which their own run does."""
    for _ in range(3):
        assert int(run_pooled(LEAVE_NAMES + LIST_NAMES).stdout) == 30
        assert [int(run_pooled(LIST_NAMES).stdout) for _ in range(4)] == [0] * 4


@pytest.mark.parametrize(
    "program",
    ["pass", "import asyncio; asyncio.run(asyncio.sleep(0))", "import socket; kept = socket.socketpair()",
     "import subprocess; subprocess.run(['true'])"],
)  # fmt: skip
def test_who_leaves_nothing_leaves_the_jail_to_the_next(program: str) -> None:
    """Also who has made pairs of sockets, as every event loop does."""
    look = "\nimport os; print(os.readlink('/proc/self/ns/net'))"
    found = [run_pooled(program + look).stdout for _ in range(12)]
    assert all(found)
    assert len(set(found)) <= 4, "in a jail for each they would be twelve"


@pytest.mark.both_users
def test_no_count_of_processes_is_left_to_the_next_run() -> None:
    """However many there were in a run, the numbers in the next ones are the same."""
    look = "import os; print(os.getpid(), open('/proc/loadavg').read().split()[-1])"
    before = {run_pooled(look).stdout for _ in range(4)}
    many = "import os\nfor _ in range(20):\n    os.fork() or os._exit(0)\n    os.wait()\n"
    after = {run_pooled(code).stdout for _ in range(3) for code in (many, look, look)} - {""}
    assert len(before) == 1
    assert after == before
