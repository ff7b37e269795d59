"""What a guest sends to the socket of `sudo`: pid 1 reads none of it, holds none of it, and serves its caller."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

import cloche
from tests.harness.processes import descendants

pytestmark = [pytest.mark.root, pytest.mark.timeout(120)]

CLIENT = """
import array, json, os, socket, struct, sys, time
def connect():
    link = socket.socket(socket.AF_UNIX)
    link.settimeout(30)
    link.connect("\\0cloche-sudo")
    return link
def packed(order):
    data = order if isinstance(order, bytes) else json.dumps(order).encode()
    return len(data).to_bytes(4, "big") + data
def send(link, data, fds=(0, 1, 2)):
    fds = [*fds, *([os.open("/", os.O_PATH)] if len(fds) == 3 else [])]
    sent = link.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])
    link.sendall(data[sent:])
GOOD = {"argv": ["id", "-u"], "env": {"PATH": "/usr/bin:/bin"}, "uid": 0, "gid": 0, "groups": [0]}
"""
HOSTILE = (
    CLIENT
    + """
shapes = [
    b"", b"{", b"[]", b"null", b"[" * 100000, b'{"a":' * 100000, b'{"uid": ' + b"9" * 100000 + b"}",
    {**GOOD, "uid": -1}, {**GOOD, "uid": 65536}, {**GOOD, "uid": "0"}, {**GOOD, "gid": 1 << 40}, {**GOOD, "uid": True},
    {**GOOD, "groups": 5}, {**GOOD, "groups": list(range(100000))}, {**GOOD, "argv": []}, {**GOOD, "argv": 3},
    {**GOOD, "argv": ["a\\0b"]}, {**GOOD, "env": []}, {**GOOD, "env": {"a=b": "c"}},
    {**GOOD, "env": {"\\ud800": "\\0"}},
    {**GOOD, "terminal": True}, {}, {**GOOD, "argv": ["\\ud800"]},
]
for shape in shapes:
    link = connect()
    try:
        send(link, packed(shape))
        link.recv(4)
    except OSError:
        pass  # the other end has seen enough
for data, fds in ((b"\\xff" * 8, (0, 1, 2)), (b"\\0\\x10\\0\\1" + b" " * (1 << 20), (0, 1, 2)), (packed(GOOD), (0,)),
                  (packed(GOOD), [0] * 200), (packed(GOOD), ())):
    link = connect()
    link.settimeout(0.5)
    try:
        send(link, data, fds)
        link.sendall(data)
        link.recv(4)
    except OSError:
        pass
link = connect()
send(link, packed(GOOD))
assert link.recv(4) == bytes(4), "sudo is gone"
"""
)
LINGERS = (
    CLIENT
    + """
server = socket.create_server(("127.0.0.1", 0))
held = []
for number in range(6):
    client = socket.create_connection(server.getsockname())
    held.append(server.accept()[0])
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 100000))
    client.setblocking(False)
    try:
        while True:
            client.send(bytes(65536))
    except BlockingIOError:
        pass
    link = connect()
    send(link, packed({**GOOD, "argv": ["true"]}) if number % 2 else b"", [client.fileno()] * 3)
    client.close()
    link.close()
print("sent", flush=True)
time.sleep(1000)
"""
)
FLOOD = (
    CLIENT
    + """
held = []
print("up", flush=True)
while True:
    try:
        held.append(connect())
    except OSError:
        held.clear()
"""
)
RIGHTS = r"""
grep -E "Cap(Prm|Eff|Bnd)|NoNewPrivs|Seccomp:" /proc/self/status | cut -f2
for line in "mount -t tmpfs x /opt" "mknod /opt/d b 8 0" "chroot /opt /bin/true" "unshare -n true" "unshare -r true" \
    "hostname evil" "cat /proc/1/environ" "ls /proc/1/fd/" "date -s 2000-01-01" "kill -9 1; false" "strace true"
do sh -c "$line" >/dev/null 2>&1 && echo "$line"; done
"""


@pytest.fixture
def sandbox() -> Iterator[cloche.Sandbox]:
    """Open a sandbox with several users."""
    with cloche.Sandbox(users=True, timeout=60) as found:
        yield found


def test_root_by_sudo_is_root_inside_and_no_more(sandbox: cloche.Sandbox) -> None:
    """Its rights are those of a command that the caller starts as root."""
    by_caller = sandbox.exec(shell=RIGHTS, user="root").stdout
    assert sandbox.exec(["sudo", "sh", "-c", RIGHTS]).stdout == by_caller
    assert by_caller.split() == ["00000000000005fb"] * 3 + ["1", "2"]


def test_malformed_requests_end_with_their_connection(sandbox: cloche.Sandbox) -> None:
    """And nothing else: a good one is served after them, and pid 1 holds no more descriptors than before."""
    sandbox.exec(["sudo", "true"])
    (init,) = inits_of(sandbox)
    before = len(os.listdir(f"/proc/{init}/fd"))
    result = sandbox.exec(["python3", "-c", HOSTILE])
    assert (result.stdout, result.exit_code) == ("0\n", 0), result.stderr[-2000:]
    until = time.monotonic() + 30
    while len(os.listdir(f"/proc/{init}/fd")) >= before + 10:  # those of guests that wait for an order come and go
        assert time.monotonic() < until, os.listdir(f"/proc/{init}/fd")
        time.sleep(0.05)


def test_descriptors_that_are_slow_to_close_hold_nobody_up(sandbox: cloche.Sandbox) -> None:
    """A socket with unsent data and SO_LINGER: neither the caller's commands nor, after a while, others of sudo."""
    with sandbox.start(["python3", "-c", LINGERS]) as process:
        assert process.stdout.read() == b"sent\n"
        began = time.monotonic()
        assert sandbox.exec(["echo", "ok"]).stdout == "ok\n"
        assert time.monotonic() - began < 5
        assert sandbox.exec(["sudo", "id", "-u"]).stdout == "0\n"


def test_connections_without_number_leave_the_caller_its_turn(sandbox: cloche.Sandbox) -> None:
    """Their processes are bounded in number, and pid 1 starts the caller's commands meanwhile."""
    with sandbox.start(["python3", "-c", FLOOD]) as process:
        assert process.stdout.read() == b"up\n"
        for _ in range(20):
            assert sandbox.exec(["echo", "ok"], timeout=10).stdout == "ok\n"
        assert int(sandbox.exec(shell="ls -d /proc/[0-9]* | wc -l").stdout) < 40
    assert sandbox.exec(["sudo", "id", "-u"]).stdout == "0\n"


def inits_of(sandbox: cloche.Sandbox) -> list[int]:
    """Return the first process of a sandbox: it leads the process namespace of its commands."""
    own = sandbox.exec(["readlink", "/proc/self/ns/pid"]).stdout.strip()
    found = [pid for pid in descendants(os.getpid()) if os.readlink(f"/proc/{pid}/ns/pid") == own]
    return [pid for pid in found if _status(pid, "NSpid").split()[-1] == "1"]


def _status(pid: int, name: str) -> str:
    with open(f"/proc/{pid}/status", encoding="utf-8") as file:
        return next(line.partition(":")[2].strip() for line in file if line.startswith(f"{name}:"))
