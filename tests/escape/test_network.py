"""Attempts to reach the host's or another sandbox's network while the network is off."""

from functools import partial
from typing import Any

from tests.harness.escape.attempts import BOTH, CONFINED, JAIL, Attempt
from tests.harness.escape.controls import Controls

OWNERS = ("host", "neighbour")
attempt = partial(Attempt, family="network", levels=BOTH)


def on_both(name: str, code: str, **keywords: Any) -> tuple[Attempt, ...]:
    """Return the attempt against the host's process and against the neighbour's."""
    return tuple(
        attempt(
            name=f"{name} ({owner})",
            code=f"import socket\nsocket.setdefaulttimeout(10)\nat = T['{owner}']\n" + code,
            **keywords,
        )
        for owner in OWNERS
    )


def connects(name: str, family: str, address: str, kind: str = "SOCK_STREAM", protocol: int = 0) -> tuple[Attempt, ...]:
    """Return attempts to connect and hear the secret."""
    code = f"""
caller = socket.socket(socket.{family}, socket.{kind}, {protocol})
caller.connect({address})
if {kind!r} == "SOCK_DGRAM":
    caller.send(b"?")
saw(caller.recv(64))
"""
    return on_both(name, code)


ATTEMPTS = (
    *connects("loopback, version 4", "AF_INET", "('127.0.0.1', at['tcp4'])"),
    *connects("loopback, version 6", "AF_INET6", "('::1', at['tcp6'])"),
    *connects("loopback by datagrams", "AF_INET", "('127.0.0.1', at['udp4'])", "SOCK_DGRAM"),
    *connects("loopback by datagrams, version 6", "AF_INET6", "('::1', at['udp6'])", "SOCK_DGRAM")[:1],
    *connects("the address of any interface", "AF_INET", "('0.0.0.0', at['tcp4'])")[:1],
    *connects("version 4 within version 6", "AF_INET6", "('::ffff:127.0.0.1', at['tcp4'])")[:1],
    *connects("multipath", "AF_INET", "('127.0.0.1', at['tcp4'])", protocol=262)[:1],
    *connects("an abstract socket", "AF_UNIX", "'\\0' + at['abstract']"),
    *connects("a socket with a path", "AF_UNIX", "at['socket']"),
    *on_both(
        "a socket with a path, by the root of pid 1",
        """
caller = socket.socket(socket.AF_UNIX)
os.chdir("/proc/1/root" + os.path.dirname(at["socket"]))
caller.connect(os.path.basename(at["socket"]))
saw(caller.recv(64))
""",
        root_only="the root of another user's process",
    )[:1],
    *on_both(
        "an abstract socket by datagrams",
        """
caller = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
caller.bind("\\0" + T["token"])
caller.sendto(b"?", "\\0" + at["abstract"] + "-dgram")
saw(caller.recv(64))
""",
    ),
    *on_both(
        "a socket with a path, by a pair of datagrams",
        """
import array
pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
pair[0].sendmsg([b"?"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0]))], 0, at["socket"] + ".dgram")
escaped("sent a datagram and a descriptor")
""",
    ),
    *on_both(
        "an abstract socket, by a pair that was asked for as raw",
        """
socket.socketpair(socket.AF_UNIX, socket.SOCK_RAW)[0].sendto(b"?", "\\0" + at["abstract"] + "-dgram")
escaped("sent a datagram")
""",
    ),
    attempt(
        name="an abstract name of the host's, taken by a pair's socket",
        levels=(CONFINED,),  # in a jail it is a name of its own network namespace
        code="""
        import socket
        socket.socketpair()[0].bind("\\0" + T["token"])
        escaped("took a name")
        """,
    ),
    *on_both(
        "loopback by name",
        """
saw(socket.create_connection(("localhost", at["tcp4"])).recv(64))
""",
    )[:1],
    *on_both(
        "data with the first packet",
        """
caller = socket.socket()
caller.settimeout(None)
caller.sendto(b"?", socket.MSG_FASTOPEN, ("127.0.0.1", at["tcp4"]))
saw(caller.recv(64))
""",
    )[:1],
    *on_both(
        "an unconnected datagram",
        """
caller = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
caller.settimeout(1)  # which passes in a sandbox, where nobody says that nobody is there
caller.sendto(b"?", ("127.255.255.254", at["udp4"]))
caller.sendto(b"?", ("127.0.0.1", at["udp4"]))
saw(caller.recv(64))
""",
    )[:1],
    attempt(
        name="the shell's own sockets",
        language="bash",
        code="""
        port=$(sed -E 's/.*"host": \\{[^}]*"tcp4": ([0-9]+).*/\\1/' <<<"$1")
        exec 3<>"/dev/tcp/127.0.0.1/$port" || { echo "CONTAINED exit $?"; exit 0; }
        timeout 1 head -c 39 <&3
        """,
    ),
    attempt(
        name="interfaces besides loopback",
        code="""
        import socket
        found = [name for _, name in socket.if_nameindex() if name != "lo"]
        if found:
            escaped(f"sees {found}")
        """,
    ),
    attempt(
        name="interfaces by netlink",
        code="""
        import socket, struct
        asked = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
        asked.send(struct.pack("=IHHII", 32, 18, 0x301, 1, 0) + bytes(16))
        answer = asked.recv(65536)
        count = 0
        while len(answer) >= 16:
            size, kind = struct.unpack_from("=IH", answer)
            count += kind == 16
            answer = answer[(size + 3) & ~3:] if size else b""
        if count > 1:
            escaped(f"sees {count} interfaces")
        """,
    ),
    attempt(
        name="interfaces by ioctl",
        code="""
        import fcntl, socket, struct
        room = ctypes.create_string_buffer(4096)
        asked = bytearray(struct.pack("iP", 4096, ctypes.addressof(room)))
        fcntl.ioctl(socket.socket(socket.AF_INET, socket.SOCK_DGRAM), 0x8912, asked)
        found = struct.unpack_from("i", asked)[0] // 40
        if found > 1:
            escaped(f"sees {found} addresses")
        """,
    ),
    attempt(
        name="interfaces by ioctl, of a pair",
        code="""
        import fcntl, socket
        name = fcntl.ioctl(socket.socketpair()[0], 0x8910, bytes(16) + b"\\2" + bytes(23))[:16].rstrip(b"\\0")
        escaped(f"sees interface {name}") if name != b"lo" else contained("loopback alone")
        """,
    ),
    attempt(
        name="routes that lead out",
        levels=(JAIL,),  # `confined` has no network namespace: these tables are the host's
        code="""
        lines = open("/proc/net/route").read().splitlines()[1:]
        if any(not line.startswith("lo") for line in lines):
            escaped(f"{len(lines)} routes")
        """,
    ),
    attempt(
        name="connections of the host",
        levels=(JAIL,),  # `confined` has no network namespace: these tables are the host's
        code="""
        port = f":{T['host']['tcp4']:04X}"
        if port in open("/proc/net/tcp").read():
            escaped("sees the host's listener")
        """,
    ),
    attempt(
        name="names of the host's sockets",
        levels=(JAIL,),  # `confined` has no network namespace: these tables are the host's
        code="""
        if T["host"]["abstract"] in open("/proc/net/unix").read():
            escaped("sees the host's abstract socket")
        """,
    ),
    attempt(
        name="a route of its own making",
        destructive=True,
        levels=("jail",),
        code="""
        import fcntl, socket, struct
        asked = struct.pack("16sH14x8x", b"lo", 0)
        fcntl.ioctl(socket.socket(socket.AF_INET, socket.SOCK_DGRAM), 0x8914, asked)
        escaped("switched an interface")
        """,
    ),
    attempt(
        name="an interface of its own making",
        destructive=True,
        code="""
        import fcntl, struct
        os.makedirs("dev", exist_ok=True)
        tunnel = os.open("/dev/net/tun", os.O_RDWR)
        fcntl.ioctl(tunnel, 0x400454CA, struct.pack("16sH22x", b"escape0", 2))
        escaped("made a tunnel")
        """,
    ),
    attempt(
        name="a ping by datagrams",
        root_only="the range of groups that may ping is empty on many hosts",
        code="""
        import socket
        caller = socket.socket(socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP)
        caller.settimeout(1)
        caller.sendto(b"\\x08\\x00\\xf7\\xff\\x00\\x00\\x00\\x00", ("127.0.0.1", 0))
        escaped(f"{len(caller.recv(64))} bytes came back")
        """,
    ),
    attempt(
        name="a listener that the host could call",
        code="""
        import socket
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        name = os.readlink("/proc/self/ns/net")
        if name == T["namespaces"]["net"]:
            escaped("listens on the host's loopback")
        """,
    ),
)


def test_contained(attempt: Attempt, where: str, controls: Controls) -> None:
    """With the network off, nothing can be reached, neither by address nor by name nor by path."""
    controls.assert_contained(attempt, where)
