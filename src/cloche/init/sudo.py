"""`sudo` in a sandbox with several users: a command as another user, asked for by a program of the sandbox's own user.

Theory of operation: pid 1 listens on an abstract socket, and never accepts. For each connection it forks a process that
becomes root inside, with the restrictions of all that are root there; only then this process accepts and reads what the
client sends: the command, its variables, and four descriptors (the standard streams and the working folder). So pid 1
neither parses a guest's bytes nor holds its descriptors, whose closing could block, and this code has no rights that
the client does not get anyway. The process forks the command, passes the client's signals on, and reports its end.

A message is its length in four bytes and a JSON object: `argv`, `env`, `uid`, `gid`, `groups`, `terminal`. Then each
byte is a signal for the command's process group. The answer is a wait status in four bytes.
"""

from __future__ import annotations

import _socket
import json
import os
import select

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

_signal: Any = __import__("_signal")
NAME = b"\0cloche-sudo"  # in this network namespace, which is the sandbox's
BACKLOG = 64
MOST_BYTES, MOST_FDS = 1 << 20, 4
RECEIVE_S, GRACE_S = 10, 2.0
MOST_ID = 1 << 16
REFUSED = b"\xff\xff\xff\xff"  # in place of a status
SO_PEERCRED, TIOCSCTTY = 17, 0x540E
SIGHUP, SIGKILL, SIGPIPE, SIGCHLD, SIGXFSZ = 1, 9, 13, 17, 25


def listen() -> int:
    """Return the descriptor of a new listening socket."""
    listener = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    listener.bind(NAME)
    listener.listen(BACKLOG)
    listener.setblocking(False)
    return listener.detach()


def accept(listener: int) -> int:
    """Return the descriptor of the next connection, -1 for none. Not called in pid 1."""
    try:
        fd, _ = _socket.socket(fileno=os.dup(listener))._accept()  # type: ignore[attr-defined]
    except OSError:
        return -1
    return int(fd)


def serve(connection: int, users: Iterable[int]) -> None:
    """Serve one client, whose uid is one of `users`, to the end of its command."""
    client = _socket.socket(fileno=connection)
    client.setblocking(True)
    _signal.alarm(RECEIVE_S)  # which ends this process
    order, fds = _receive(client)
    uid = int.from_bytes(client.getsockopt(_socket.SOL_SOCKET, SO_PEERCRED, 12)[4:8], "little")
    if uid not in users or len(fds) != MOST_FDS:
        client.sendall(REFUSED)
        return
    pid = _start(order, fds, client)
    _signal.alarm(0)  # only now: to close what came may take as long as its sender says (SO_LINGER)
    _carry(client, pid)


def _receive(client: Any) -> tuple[dict[str, Any], list[int]]:
    fds: list[int] = []
    data = bytearray()
    while len(data) < 4 or len(data) < 4 + int.from_bytes(data[:4], "big"):
        if len(data) > 4 + MOST_BYTES:
            os._exit(1)
        piece, control, _, _ = client.recvmsg(1 << 16, 16 + 4 * MOST_FDS)
        if not piece:
            os._exit(1)
        data += piece
        for level, kind, packed in control:
            if (level, kind) == (_socket.SOL_SOCKET, _socket.SCM_RIGHTS):
                fds += [int.from_bytes(packed[at : at + 4], "little") for at in range(0, len(packed) - 3, 4)]
    return json.loads(data[4:]), fds


def _start(order: dict[str, Any], fds: list[int], client: Any) -> int:
    """Fork the command; return its pid, which is that of its group."""
    ids = [_id(number) for number in (order["uid"], order["gid"], *order["groups"])]
    argv = [str(word) for word in order["argv"]]
    env = {str(name): str(value) for name, value in order["env"].items()}
    pid = os.fork()  # which has no alarm
    if pid:
        for fd in fds:
            os.close(fd)
        return pid
    try:
        client.close()
        _become(ids, fds, has_terminal=bool(order.get("terminal")))
        os.execvpe(argv[0], [str(order.get("name") or argv[0]), *argv[1:]], env)  # noqa: S606 - as it was asked for
    except FileNotFoundError:
        os.write(2, f"sudo: {argv[0]}: command not found\n".encode("utf-8", "surrogateescape"))
    except OSError as error:
        os.write(2, f"sudo: unable to execute {argv[0]}: {error.strerror}\n".encode("utf-8", "surrogateescape"))
    finally:
        os._exit(1)


def _id(number: object) -> int:
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < MOST_ID:
        os._exit(1)
    return number


def _become(ids: list[int], fds: list[int], *, has_terminal: bool) -> None:
    """Take the client's folder and streams as the leader of a new session, then the identity."""
    os.setsid()
    os.fchdir(fds[3])
    kept = [os.dup(fd) for fd in fds[:3]]  # out of the way
    for number, fd in enumerate(kept):
        os.dup2(fd, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    if has_terminal:
        import fcntl

        fcntl.ioctl(0, TIOCSCTTY, 0)
    for number in (SIGHUP, SIGPIPE, SIGCHLD, SIGXFSZ):
        _signal.signal(number, _signal.SIG_DFL)
    uid, gid, *groups = ids
    os.setgroups(groups[:64])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)


def _carry(client: Any, pid: int) -> None:
    """Pass signals on until the command ends; end it if the client is gone."""
    woken, wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    _signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    _signal.signal(SIGCHLD, lambda *_: None)
    poll = select.poll()
    for fd in (client.fileno(), woken):
        poll.register(fd, select.POLLIN)
    is_gone = False
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            break
        events = dict(poll.poll(GRACE_S * 1000 if is_gone else None))
        if is_gone and not events:
            _signal_group(pid, SIGKILL)
        if woken in events:
            os.read(woken, 512)
        if client.fileno() in events and not is_gone:
            numbers = _read(client)
            is_gone = not numbers
            for number in numbers or bytes((SIGHUP,)):
                _signal_group(pid, number)
            if is_gone:
                poll.unregister(client.fileno())
    try:
        client.sendall(status.to_bytes(4, "big"))
    except OSError:
        pass  # it is gone


def _read(client: Any) -> bytes:
    try:
        return bytes(client.recv(64))
    except OSError:
        return b""


def _signal_group(pid: int, number: int) -> None:
    try:
        os.killpg(pid, number)
    except (OSError, ValueError):
        pass  # it has gone, or has no such signal
