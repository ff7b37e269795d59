"""A session's guest that obeys nobody: text for its first cell, which puts its own hands into its interpreter.

`IN_CLONE` is what a clone does between its start and the moment when somebody outside looks at it; `instead` leaves
out that it releases its parent's things. Whatever the interpreter would refuse by itself, it no longer does.
"""

from textwrap import dedent

TAKE_OVER = """
import ctypes, fcntl, os, signal, socket, struct, sys, threading, time
frame = sys._getframe()
while type(frame.f_locals.get("self")).__name__ != "Session":
    frame = frame.f_back
SESSION = frame.f_locals["self"]
del frame
FORKING = type(SESSION).__init__.__globals__["session_fork"]
FORKING.look_for_obstacles = lambda ours, clones: ([], [])
FORKING.running_children = lambda clones: []
RELEASE = FORKING.Clone.release
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.syscall.restype = ctypes.c_long

def syscall(number, *arguments):
    plain = bytes, ctypes.Array
    passed = [a if isinstance(a, plain) else ctypes.c_void_p(a & (1 << 64) - 1) for a in arguments]
    result = LIBC.syscall(ctypes.c_long(number), *passed)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result

def say(frame):
    os.write(SESSION.answers, len(frame).to_bytes(4, "big") + frame)

def refused(act):
    try:
        return f"worked: {act()!r}"
    except OSError as error:
        return f"refused: {error.strerror}"
"""
IN_CLONE = """
def release(self, give_up):
{before}
    RELEASE(self, {give_up})
{after}
FORKING.Clone.release = release
"""


def in_clone(before: str = "pass", after: str = "pass", give_up: str = "give_up") -> str:
    """Return a first cell whose clones do more, when they start, than they should."""
    indented = {
        name: "\n".join(f"    {line}" for line in dedent(text).strip().splitlines())
        for name, text in {"before": before, "after": after}.items()
    }
    return TAKE_OVER + IN_CLONE.format(give_up=give_up, **indented)


# A socket whose last holder waits, when it lets go of it, as long as it was told; and its way into other hands.
LINGERING = """
import array, ctypes, os, socket, stat, struct
held = []

def lingering(seconds):
    server = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(server.getsockname())
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, seconds))
    client.setblocking(False)
    try:
        while True:
            client.send(bytes(1 << 16))
    except BlockingIOError:
        return client, server, server.accept()[0]

def lingers(client):
    return list(struct.unpack("ii", client.getsockopt(socket.SOL_SOCKET, socket.SO_LINGER, 8)))

def takes(number, seconds):
    if not stat.S_ISSOCK(os.fstat(number).st_mode):
        return False
    with socket.socket(fileno=os.dup(number)) as carrier:
        if carrier.family != socket.AF_UNIX:
            return False
        client, *others = lingering(seconds)
        held.extend(others)
        words = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [client.fileno()]))]
        frame = (2).to_bytes(4, "big") + b"{}"
        try:
            carrier.sendmsg([frame], words, socket.MSG_DONTWAIT)
            client.close()  # at once: whoever lets go of it last waits
        except OSError:
            held.append(client)
            return False
    return True

def send_everywhere(seconds):
    numbers = [int(name) for name in os.listdir("/proc/self/fd")]
    return [number for number in numbers if os.path.exists(f"/proc/self/fd/{number}") and takes(number, seconds)]
"""
# Words of 64 bits that the kernel reads 32 of, and options that everybody may set.
OPTIONS = """
libc = ctypes.CDLL(None)
number = {"x86_64": 54, "aarch64": 208}[os.uname().machine]
one, high = socket.socket(), 1 << 32
words = [ctypes.c_long(one.fileno()), ctypes.c_long(high | 1), ctypes.c_long(high | 13), struct.pack("ii", 1, 30)]
libc.syscall(ctypes.c_long(number), *words, ctypes.c_long(8))
one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
settings = [lingers(one), one.getsockopt(1, socket.SO_REUSEADDR) > 0, one.getsockopt(6, socket.TCP_NODELAY) > 0]
one.close()
"""
