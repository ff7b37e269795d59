"""What a guest at level confined tries on the network: each attempt outside first, then in a sandbox of level confined.

It runs on the host of a world (`tests/harness/world.py`), whose own listeners are the victims, and prints JSON. `race`
has a thread flip the address while `connect` looks at it: with filters that let the call go on, too.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import tempfile
import threading
from typing import Any

MOST = 200_000  # of calls that go on
CONNECT, ECONNREFUSED = 42, 111
ATTEMPTS = r'''
import ctypes, json, os, socket, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
tcp, udp, path, allowed = json.loads(TOLD)
FASTOPEN = 0x20000000

def address(port, host="127.0.0.1"):
    return struct.pack("=H", 2) + struct.pack("!H", port) + socket.inet_aton(host) + bytes(8)

def call(name, *arguments):
    if getattr(libc, name)(*arguments) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

def message(name, data=b"found"):
    """Return a struct msghdr with room behind it for what sendmmsg counts, and what it points to."""
    data, name = ctypes.create_string_buffer(data, len(data)), ctypes.create_string_buffer(name, len(name))
    vector = ctypes.create_string_buffer(struct.pack("=QQ", ctypes.addressof(data), len(data)), 16)
    header = struct.pack("=QQQQQQQQ", ctypes.addressof(name), len(name), ctypes.addressof(vector), 1, 0, 0, 0, 0)
    return ctypes.create_string_buffer(header, 64), (data, name, vector)

def send(one, how, name, flags=0):
    fd = one.fileno()
    if how == "sendto":
        return call("sendto", fd, b"found", 5, flags, name, len(name))
    header, kept = message(name)
    call("sendmsg", fd, header, flags) if how == "sendmsg" else call("sendmmsg", fd, header, 1, flags)

def closed():
    """Return a socket that was connected to whom the policy allows, if there is one, and is no more."""
    one = socket.socket()
    if allowed:
        one.connect(tuple(allowed))
        one.shutdown(socket.SHUT_RDWR)
        one.settimeout(20)
        try:
            while one.recv(100): pass
        except OSError: pass
        one.settimeout(None)
    return one

def unspecific():
    one = closed()
    call("connect", one.fileno(), bytes(16), 16)
    one.connect(("127.0.0.1", tcp))

def not_waiting():
    one = socket.socket()
    one.setblocking(False)
    while (code := one.connect_ex(("127.0.0.1", tcp))) in (115, 114):
        pass
    if code:
        raise OSError(code, "")
    return one

def fast_by_option():
    one = socket.socket()
    one.setsockopt(socket.IPPROTO_TCP, 30, 1)  # TCP_FASTOPEN_CONNECT
    one.connect(("127.0.0.1", tcp))
    one.send(b"found")

def by_path(kind, how="connect"):
    one = socket.socket(socket.AF_UNIX, kind)
    one.connect(path + "." + str(int(kind)))

def stand_in(how):
    """Use what was made for TCP or UDP as what it may be."""
    one = socket.socket(socket.AF_INET, socket.SOCK_STREAM if how == "connect" else socket.SOCK_DGRAM)
    name = struct.pack("=H", 1) + path.encode() + (b".1\0" if how == "connect" else b".2\0")
    call("connect", one.fileno(), name, len(name)) if how == "connect" else send(one, how, name)

def listening():
    one = socket.create_server(("127.0.0.1", 0))
    one.close()

def io_uring():
    if libc.syscall(425, 4, ctypes.create_string_buffer(120)) < 0:
        raise OSError(ctypes.get_errno(), "")

INET, DATAGRAM = socket.AF_INET, socket.SOCK_DGRAM
TRIES = {
    "connect": lambda: socket.create_connection(("127.0.0.1", tcp)),
    "connect, all addresses": lambda: socket.create_connection(("0.0.0.0", tcp)),
    "connect, mapped": lambda: socket.socket(socket.AF_INET6).connect(("::ffff:127.0.0.1", tcp)),
    "connect, not waiting": not_waiting,
    "AF_UNSPEC": unspecific,
    "TCP_FASTOPEN_CONNECT": fast_by_option,
    **{f"{how}, UDP": lambda how=how: send(socket.socket(INET, DATAGRAM), how, address(udp))
       for how in ("sendto", "sendmsg", "sendmmsg")},
    **{f"{how}, MSG_FASTOPEN": lambda how=how: send(socket.socket(), how, address(tcp), FASTOPEN)
       for how in ("sendto", "sendmsg", "sendmmsg")},
    **{f"{how}, MSG_FASTOPEN, after a connection": lambda how=how: send(closed(), how, address(tcp), FASTOPEN)
       for how in ("sendto", "sendmsg", "sendmmsg")},
    "connect, UDP": lambda: [s := socket.socket(INET, DATAGRAM), s.connect(("127.0.0.1", udp)), s.send(b"found")],
    "path, stream": lambda: by_path(socket.SOCK_STREAM),
    "path, datagrams": lambda: by_path(socket.SOCK_DGRAM),
    "path, as TCP": lambda: stand_in("connect"),
    "path, as UDP": lambda: stand_in("sendto"),
    "path, of a pair": lambda: socket.socketpair(socket.AF_UNIX, DATAGRAM)[0].sendto(b"found", path + ".2"),
    "netlink": lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0),
    "packet": lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW),
    "raw": lambda: socket.socket(INET, socket.SOCK_RAW, 1),
    "vsock": lambda: socket.socket(40, socket.SOCK_STREAM),
    "alg": lambda: socket.socket(38, socket.SOCK_SEQPACKET),
    "mptcp": lambda: socket.socket(INET, socket.SOCK_STREAM, 262),
    "io_uring": io_uring,
    "listen": listening,
}
found = {}
kept = []
for name, attempt in TRIES.items():
    try:
        kept.append(attempt())
        found[name] = "done"
    except OSError as error:
        found[name] = error.errno or str(error)
print(json.dumps(found))
'''

RACE = r"""
import ctypes, json, socket, struct, threading
(allowed, victim), count, until_reached = json.loads(TOLD)
libc = ctypes.CDLL(None)
def address(one):
    return struct.pack("=H", 2) + struct.pack("!H", one[1]) + socket.inet_aton(one[0]) + bytes(8)
good, bad, memory = address(allowed), address(victim), ctypes.create_string_buffer(16)
is_over = False
def flip():
    while not is_over:
        memory.raw = bad
        memory.raw = good
flipping = threading.Thread(target=flip)
flipping.start()
connected = 0
for _ in range(count):
    with socket.socket() as one:
        if libc.connect(one.fileno(), memory, 16) == 0:
            connected += 1
            if until_reached and one.getpeername() == tuple(victim):
                break
is_over = True
flipping.join()
print(json.dumps(connected))
"""


class Victims:
    """Listen where no guest may get to, and count what comes."""

    def __init__(self, folder: str):
        self._came = 0
        self.path = f"{folder}/socket"
        os.makedirs(folder, exist_ok=True)
        self.tcp = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.udp.bind(("127.0.0.1", 0))
        stream, datagrams = (socket.socket(socket.AF_UNIX, kind) for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM))
        stream.bind(f"{self.path}.1")
        datagrams.bind(f"{self.path}.2")
        stream.listen(64)
        for number in (1, 2):
            os.chmod(f"{self.path}.{number}", 0o777)
        os.chmod(folder, 0o755)
        self._sockets, self._lock = (self.tcp, stream, self.udp, datagrams), threading.Lock()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            select.select(self._sockets, [], [])
            with self._lock:
                self._take()

    def _take(self) -> None:
        while ready := select.select(self._sockets, [], [], 0)[0]:
            for one in ready:
                if one.type == socket.SOCK_STREAM:
                    one.accept()[0].close()
                else:
                    one.recv(100)
                self._came += 1

    def count(self) -> int:
        """Return how many came since the last call, also those that nobody has accepted yet."""
        with self._lock:
            self._take()
            came, self._came = self._came, 0
            return came

    def ports(self) -> tuple[int, int]:
        return self.tcp.getsockname()[1], self.udp.getsockname()[1]


def outside(program: str, told: str) -> Any:
    """Run a program as a child, with nothing around it."""
    import subprocess

    words = [sys.executable, "-c", f"TOLD = {told!r}\n{program}"]
    return json.loads(subprocess.run(words, capture_output=True, text=True, check=True, timeout=120).stdout)


def inside(program: str, told: str, *, is_live: bool) -> Any:
    """Run it at level confined, with a network that has one allowed name: by itself, or in a live sandbox."""
    import cloche

    # The first name that is asked for has the first address.
    ask = "import socket\nassert socket.gethostbyname('good.example') == '198.18.1.0'\n"
    with cloche.Sandbox(
        level="confined", network="allowlist", network_allow=["good.example"], timeout=200, cpus=2, screen="off",
        live=is_live,
    ) as sandbox:  # fmt: skip
        result = sandbox.run(f"{ask}TOLD = {told!r}\n{program}")
    assert str(result.status) == "ok", (result.stdout, result.stderr)
    return json.loads(result.stdout)


def attempts(*, is_live: bool) -> dict[str, Any]:
    """Return what came of each attempt outside and inside, and what the victims have seen of each side."""
    with tempfile.TemporaryDirectory() as folder:
        victims = Victims(folder)
        without = outside(ATTEMPTS, json.dumps([*victims.ports(), victims.path, None]))
        seen = victims.count()
        within = inside(ATTEMPTS, json.dumps([*victims.ports(), victims.path, ["198.18.1.0", 80]]), is_live=is_live)
        return {"outside": without, "seen_outside": seen, "inside": within, "seen_inside": victims.count()}


def going_on(program: str, told: str, port: int) -> None:
    """Run it behind a filter whose `connect` is looked at, and let go on where the address is the allowed one."""
    from cloche.jail import messages, seccomp_notify
    from cloche.jail.setup.seccomp import build_filter
    from cloche.jail.syscalls import prctl, read_uint

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    child = os.fork()
    if not child:
        prctl(38, 1, 0, 0, 0)
        listener, _ = seccomp_notify.install(build_filter(os.uname().machine, confined=True, network=True))
        messages.send(theirs.fileno(), "listener", {}, [listener])
        os.close(listener)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        exec(compile(f"TOLD = {told!r}\n{program}", "<race>", "exec"), {})
        os._exit(0)
    theirs.close()
    _, _, (listener,) = messages.receive(ours.fileno())
    ended = os.pidfd_open(child)
    while ended not in (ready := select.select([listener, ended], [], [])[0]):
        assert ready
        try:
            question = seccomp_notify.receive(listener)
            is_refused = read_uint(question, 16) == CONNECT and not names_port(question, port)
            seccomp_notify.reply(listener, question, ECONNREFUSED if is_refused else 0)
        except OSError:
            continue  # who asked has ended meanwhile
    os.waitpid(child, 0)
    for fd in (listener, ended):
        os.close(fd)


def names_port(question: bytes, port: int) -> bool:
    """Tell whether the address that is asked for has this port, now."""
    from cloche.jail.syscalls import read_uint

    with open(f"/proc/{read_uint(question, 8)}/mem", "rb", buffering=0) as memory:
        memory.seek(read_uint(question, 40, 8))
        return int.from_bytes(memory.read(16)[2:4], "big") == port


def race(count: int, *, is_live: bool) -> dict[str, Any]:
    """Return how often a victim was reached: by calls that go on, until it was once, and in a sandbox."""
    with tempfile.TemporaryDirectory() as folder:
        victims, other = Victims(folder), Victims(f"{folder}/other")
        port, victim = other.ports()[0], ["127.0.0.1", victims.ports()[0]]
        going_on(RACE, json.dumps([[["127.0.0.1", port], victim], MOST, True]), port)
        gone_on = victims.count()
        connected = inside(RACE, json.dumps([[["198.18.1.0", 80], victim], count, False]), is_live=is_live)
        return {"gone_on": gone_on, "inside": victims.count(), "connected": connected}
