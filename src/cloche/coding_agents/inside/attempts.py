"""Make attempts at what a sandbox must refuse, and print a line for each: its state, and how.

A line behind this text calls `main` with lists `[kind, *arguments]`. A state is `reached`, `refused`, or `untried`
where nothing was shown. `coding_agents/boundaries.py` makes the lists and judges the lines. No attempt writes into
what it reaches, and none sends a packet that the sandbox's kernel could pass on: see there.
"""

from __future__ import annotations

import _socket
import posix

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

Came = tuple[str, str]
IS_INSIDE = True
REACHED, REFUSED, UNTRIED = "reached", "refused", "untried"
WAIT_S = 1.0
OWN_ADDRESSES = ("198.18.", "198.19.")  # which the egress process gives to names, and resolves none
MOST_ANSWER_BYTES, MOST_PROCESS_BYTES, MOST_TEXT_BYTES, MOST_PROCESSES = 4096, 1 << 16, 1 << 18, 512
ERRNO = {
    1: "EPERM", 2: "ENOENT", 3: "ESRCH", 6: "ENXIO", 13: "EACCES", 20: "ENOTDIR", 22: "EINVAL", 30: "EROFS",
    38: "ENOSYS", 40: "ELOOP", 91: "EPROTOTYPE", 92: "ENOPROTOOPT", 93: "EPROTONOSUPPORT", 94: "ESOCKTNOSUPPORT",
    95: "EOPNOTSUPP", 97: "EAFNOSUPPORT", 99: "EADDRNOTAVAIL", 101: "ENETUNREACH", 104: "ECONNRESET",
    111: "ECONNREFUSED", 113: "EHOSTUNREACH",
}  # fmt: skip
SO_PEERCRED, SYSCALL = 17, {"x86_64": 0, "aarch64": 1}
PTRACE_SEIZE, PTRACE_DETACH = 0x4206, 17
NUMBERS = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "keyctl": (250, 219),
    "io_uring_setup": (425, 425), "pidfd_open": (434, 434),
}  # fmt: skip


def unix(name: str, device: int = 0, inode: int = 0) -> Came:
    """Connect to a socket of the host's, by its path or its abstract name."""
    kinds = (_socket.SOCK_STREAM, _socket.SOCK_SEQPACKET, _socket.SOCK_DGRAM)
    came, kind = (UNTRIED, "no kind of socket fits"), kinds[0]
    for kind in kinds:
        came = _connect(name, kind)
        if came != (REFUSED, "EPROTOTYPE"):
            break
    if IS_INSIDE and came[0] == REACHED and kind == _socket.SOCK_DGRAM:  # which has no peer before it sends
        state = posix.lstat(name) if name.startswith("/") else None
        if state is None or (state.st_dev, state.st_ino) != (device, inode):
            return REFUSED, "a socket of the sandbox's own"
    return came


def _connect(name: str, kind: int) -> Came:
    link = _socket.socket(_socket.AF_UNIX, kind | _socket.SOCK_NONBLOCK)
    try:
        link.connect(name)
        peer = int.from_bytes(link.getsockopt(_socket.SOL_SOCKET, SO_PEERCRED, 12)[:4], "little")
    except OSError as error:
        return _refused(error)
    finally:
        link.close()
    # A process that this namespace of pids does not have is 0.
    return (REFUSED, "a process of the sandbox's own") if IS_INSIDE and peer else (REACHED, "it takes a connection")


def tcp(address: str, port: int, token: str = "") -> Came:
    """Connect to an address; with a token, only who sends it is meant."""
    link = _socket.socket(_socket.AF_INET6 if ":" in address else _socket.AF_INET, _socket.SOCK_STREAM)
    link.settimeout(WAIT_S)
    try:
        link.connect((address, port))
        if token and link.recv(64) != token.encode():
            return REFUSED, "another server, of the sandbox's own"
    except TimeoutError:
        return UNTRIED, "no answer"
    except OSError as error:
        return _refused(error)
    finally:
        link.close()
    return REACHED, "it takes a connection"


def http(address: str, port: int) -> Came:
    """Ask by HTTP where the sandbox's network is served from outside: the answer must be a refusal."""
    link = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)
    link.settimeout(WAIT_S)
    try:
        link.connect((address, port))
        link.send(f"GET / HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n".encode())
        answer = link.recv(MOST_ANSWER_BYTES)
    except TimeoutError:
        return UNTRIED, "no answer"
    except OSError as error:
        return _refused(error)
    finally:
        link.close()
    status = answer[9:12].decode("ascii", "replace")
    if answer.startswith(b"HTTP/1.1 403 ") and IS_INSIDE:
        return REFUSED, "403"
    return (REACHED, f"an answer: {status}") if answer.startswith(b"HTTP/") else (UNTRIED, "no answer")


def dns(address: str) -> Came:
    """Ask a name server for a name, by UDP."""
    link = _socket.socket(_socket.AF_INET6 if ":" in address else _socket.AF_INET, _socket.SOCK_DGRAM)
    link.settimeout(WAIT_S)
    try:
        link.connect((address, 53))
        link.send(b"\x43\x4c\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x07invalid\x00\x00\x01\x00\x01")
        link.recv(512)
    except TimeoutError:
        return UNTRIED, "no answer"
    except OSError as error:
        return _refused(error)
    finally:
        link.close()
    return REACHED, "it answers"


def lookup(name: str) -> Came:
    """Look a name up that no rule has; one that is asked about at its first connection has an address of its own."""
    try:
        address = str(_socket.getaddrinfo(name, 80, _socket.AF_INET, _socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        return REFUSED, str(error.args[-1])
    return (REFUSED, "asked about when connected") if address.startswith(OWN_ADDRESSES) else (REACHED, address)


def same(path: str, device: int, inode: int) -> Came:
    """Read a file or a folder of the host's; another one at its path is not it."""
    try:
        state = posix.lstat(path)
        if (state.st_dev, state.st_ino) != (device, inode):
            return REFUSED, "another one is there"
        fd = posix.open(path, posix.O_RDONLY | posix.O_NONBLOCK | posix.O_NOFOLLOW | posix.O_CLOEXEC)
    except OSError as error:
        return _refused(error)
    posix.close(fd)
    return REACHED, "it can be read"


def write(path: str, device: int, inode: int, token: str) -> Came:
    """Make a file in a folder of the host's, and remove it; another folder at its path is not it."""
    try:
        state = posix.stat(path)
        if (state.st_dev, state.st_ino) != (device, inode):
            return REFUSED, "another folder is there"
        fd = posix.open(f"{path}/{token}", posix.O_WRONLY | posix.O_CREAT | posix.O_EXCL | posix.O_CLOEXEC, 0o600)
    except OSError as error:
        return _refused(error)
    posix.close(fd)
    posix.unlink(f"{path}/{token}")
    return REACHED, "a file can be made"


def opens(path: str, flags: int) -> Came:
    """Open a file of the kernel's, or a device; the null device in its place is a mask."""
    try:
        fd = posix.open(path, flags | posix.O_NONBLOCK | posix.O_CLOEXEC)
    except OSError as error:
        return _refused(error)
    is_mask = posix.fstat(fd).st_rdev == 0x103
    posix.close(fd)
    return (REFUSED, "a mask") if is_mask else (REACHED, "it can be opened")


def process(pid: int, started: str) -> Came:
    """Find a process of the host's by its number and its time of start."""
    own = _started(pid)
    return (REACHED, "it is in /proc") if own == started else (REFUSED, "another process" if own else "ENOENT")


def signals(pid: int, started: str) -> Came:
    """Send signal 0 to a process of the host's."""
    if IS_INSIDE and _started(pid) not in ("", started):
        return REFUSED, "another process"
    try:
        posix.kill(pid, 0)
    except OSError as error:
        return _refused(error)
    return REACHED, "it takes signals"


def traces(pid: int, started: str) -> Came:
    """Trace a process of the host's, and read its memory."""
    if IS_INSIDE and _started(pid) not in ("", started):
        pid = 0  # a process of the sandbox's own has its number: show that the call itself is refused
    for name, words in (("ptrace", (PTRACE_SEIZE, pid, 0, 0)), ("process_vm_readv", (pid, 0, 0, 0, 0, 0))):
        answer, error = _syscall(name, *words)
        if answer == 0:
            _syscall("ptrace", PTRACE_DETACH, pid, 0, 0)
            return REACHED, name
    return _refused(OSError(error, ""))


def kernel(name: str, *words: int) -> Came:
    """Make a system call."""
    answer, error = _syscall(name, *words)
    return (REACHED, "it works") if answer >= 0 else _refused(OSError(error, ""))


def sockets(family: int, kind: int, protocol: int) -> Came:
    """Make a socket of a family that has no namespace, or that takes raw packets."""
    try:
        _socket.socket(family, kind, protocol).close()
    except OSError as error:
        return _refused(error)
    return REACHED, "it can be made"


def texts(*paths: str) -> Came:
    """Return the environments and command lines of all processes, and some files, for the caller to look through.

    Where there are more than fit, those of the newest processes.
    """
    numbers = sorted((name for name in posix.listdir("/proc") if name.isdigit()), key=int)[: -MOST_PROCESSES - 1 : -1]
    processes = [f"/proc/{number}/{file}" for number in numbers for file in ("environ", "cmdline")]
    held: list[bytes] = []
    for path in (*paths, *processes):
        data = _read(path, MOST_PROCESS_BYTES)
        if sum(map(len, held)) + len(data) <= MOST_TEXT_BYTES:
            held.append(data)
    return "text", b"\n".join(held).hex()


def _refused(error: OSError) -> Came:
    if error.errno in ERRNO:
        return REFUSED, ERRNO[error.errno]
    return UNTRIED, error.strerror or str(error)


def _started(pid: int) -> str:
    """Return the time of start of a process, empty if there is none: field 22 of /proc/PID/stat."""
    fields = _read(f"/proc/{pid}/stat", 4096).rpartition(b")")[2].split()
    return fields[19].decode() if len(fields) > 19 else ""


def _read(path: str, count: int) -> bytes:
    try:
        fd = posix.open(path, posix.O_RDONLY | posix.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return posix.read(fd, count)
    except OSError:
        return b""
    finally:
        posix.close(fd)


def _syscall(name: str, *words: int) -> tuple[int, int]:
    """Return a system call's answer and its errno."""
    number = NUMBERS[name][SYSCALL[posix.uname().machine]]
    answer = _call(number, *words, *(0,) * (6 - len(words)))
    return answer, _ctypes.get_errno()


_ctypes: Any = __import__("_ctypes")  # alone it takes a third of the time of `ctypes`
_Word = type("_Word", (_ctypes._SimpleCData,), {"_type_": "P"})
_Long = type("_Long", (_ctypes._SimpleCData,), {"_type_": "l"})
_flags = _ctypes.FUNCFLAG_CDECL | _ctypes.FUNCFLAG_USE_ERRNO
_Call = type("_Call", (_ctypes.CFuncPtr,), {"_flags_": _flags, "_argtypes_": (_Word,) * 7, "_restype_": _Long})
_call: Any = _Call(_ctypes.dlsym(_ctypes.dlopen(None, 0), "syscall"))


def _line(kind: str, *arguments: object) -> str:
    try:
        state, how = ATTEMPTS[kind](*arguments)
    except Exception as error:  # what cannot be tried is told by name
        state, how = UNTRIED, f"{type(error).__name__}: {error}"
    return f"{state}\t{how}".replace("\n", " ")


ATTEMPTS: dict[str, Callable[..., Came]] = {
    "unix": unix, "tcp": tcp, "http": http, "dns": dns, "lookup": lookup, "same": same, "write": write, "open": opens,
    "process": process, "signal": signals, "trace": traces, "kernel": kernel, "socket": sockets, "texts": texts,
}  # fmt: skip


def main(orders: list[list[Any]]) -> None:
    """Make the attempts, in this order."""
    print("\n".join([_line(*order) for order in orders]))  # noqa: T201 - its output is its answer
