"""Whoever takes over the egress process makes no system call but those that serving a network takes."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from cloche.core.network import NetworkRules
from cloche.egress import client

pytestmark = pytest.mark.both_users
# Each attempt does something that the filter is to refuse; all are made before it is installed, and after.
PROGRAM = """
import ctypes, json, os, socket, sys, tempfile, threading
from cloche.egress.process import install_filter
from cloche.jail.setup.seccomp import egress_filter
from cloche.jail.syscalls import PR_SET_DUMPABLE, call, prctl

folder = tempfile.mkdtemp()
path = os.path.join(folder, "file")
open(path, "w").close()
server = socket.socket(socket.AF_UNIX)
server.bind(path + ".socket")
server.listen()
other = os.getppid()
libc = ctypes.CDLL(None, use_errno=True)

def check(answer):
    if answer < 0:
        raise OSError(ctypes.get_errno(), "refused")
    return answer

def fork():
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)

def connect():
    with socket.socket(socket.AF_UNIX) as one:
        one.connect(path + ".socket")

def spawn():
    os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0)

def listen():
    with socket.socket() as one:
        one.listen()

def pair():
    for one in socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM):
        one.close()

ATTEMPTS = {
    "fork": fork, "spawn": spawn, "connect to a Unix socket": connect, "listen": listen, "a pair of datagrams": pair,
    "open to write": lambda: open(path, "a").close(), "make a file": lambda: os.mknod(path + "2"),
    "remove a file": lambda: os.unlink(path + "2"), "rename": lambda: os.rename(path, path),
    "change a mode": lambda: os.chmod(path, 0o600), "link": lambda: os.symlink("x", path + "3"),
    "signal": lambda: os.kill(other, 0), "limits of another": lambda: __import__("resource").prlimit(other, 7),
    "hold another": lambda: os.close(os.pidfd_open(other)), "dumpable": lambda: prctl(PR_SET_DUMPABLE, 1),
    "key": lambda: check(libc.syscall(250, 0, -3, 1)), "inotify": lambda: os.close(check(libc.inotify_init1(0))),
}

if os.geteuid() == 0:
    ATTEMPTS["packets"] = lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW).close()

def outcomes():
    found = {}
    for name, attempt in ATTEMPTS.items():
        try:
            attempt()
            found[name] = ""
        except OSError as error:
            found[name] = str(error.errno)
    return found

def needed():
    threads = [threading.Thread(target=lambda: names.append(socket.getaddrinfo("localhost", 80))) for _ in range(2)]
    names = []
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with socket.socket() as tcp, socket.socket(type=socket.SOCK_DGRAM) as udp, open("/etc/hosts") as hosts:
        tcp.setblocking(False)
        tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        udp.connect(("127.0.0.1", 9))
        return [len(names), bool(hosts.read() or 1)]

before = outcomes()
prctl(38, 1, 0, 0, 0)
install_filter(egress_filter(os.uname().machine))
print(json.dumps([before, outcomes(), needed()]), flush=True)
os._exit(0)
"""


def test_what_serving_takes_is_possible_and_nothing_else() -> None:
    """Each attempt succeeds before, and fails within the filter; names are looked up all the same."""
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, start_new_session=True)
    assert done.returncode == 0, done.stderr
    before, within, needed = json.loads(done.stdout)
    assert {name: why for name, why in before.items() if why} == {}
    assert {name: why for name, why in within.items() if why not in {"1", "97"}} == {}
    assert needed == [2, True]


def test_the_process_that_serves_has_it() -> None:
    """Its status says that a filter is installed, before the first sandbox has a network in it."""
    network = client.open_network(NetworkRules.parse(mode="allowlist", allow=("good.example",)))
    try:
        assert not asyncio.run(network.report(ends=False)).is_lost
        status = Path(f"/proc/{client.process_id()}/status").read_text()
    finally:
        network.close()
        client.rest()
    assert "Seccomp:\t2" in status
