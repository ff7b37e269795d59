"""User namespaces: who the guest is outside.

Never the outside uid 0: even without capabilities it owns /proc/sys. Root gives each live sandbox an outside id of
its own from a high range, claimed by binding an abstract socket's name: the kernel releases it with its process,
so nothing can leak. An ordinary user can only give their own id.
"""

from __future__ import annotations

import _socket
import os

EADDRINUSE = 98


class Claim:
    """Hold an outside id that no other live sandbox on this host has."""

    __slots__ = ("_socket", "outside_id")

    def __init__(self, outside_id: int, held: _socket.socket | None):
        self.outside_id, self._socket = outside_id, held

    def forget(self) -> None:
        """Let go of this process's own hold; a forked child must not keep the id claimed."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def claim_outside_id(first: int, count: int) -> Claim:
    """Claim a free id of the range, starting at a place that this process's pid spreads. Raises OSError when full."""
    start = os.getpid() * 7919
    for at in range(count):
        outside_id = first + (start + at) % count
        held = _socket.socket(_socket.AF_UNIX, _socket.SOCK_DGRAM | _socket.SOCK_CLOEXEC)
        try:
            held.bind(f"\0cloche-id-{outside_id}".encode())
            return Claim(outside_id, held)
        except OSError as error:
            held.close()
            if error.errno != EADDRINUSE:
                raise
    raise OSError(EADDRINUSE, f"all {count} outside ids from {first} are in use")


def write_maps(pid: int, *, inside_id: int, outside_uid: int, outside_gid: int, privileged: bool) -> None:
    """Map one id of process `pid`'s new user namespace; without privilege only the writer's own id can be mapped."""
    if not privileged:
        _write(f"/proc/{pid}/setgroups", "deny")
    _write(f"/proc/{pid}/gid_map", f"{inside_id} {outside_gid} 1")
    _write(f"/proc/{pid}/uid_map", f"{inside_id} {outside_uid} 1")


def become(inside_id: int, *, can_set_groups: bool) -> None:
    """Switch to the mapped id. The namespace has no id 0, so the kernel does not take the capabilities away."""
    if can_set_groups:
        os.setgroups([])
    os.setresgid(inside_id, inside_id, inside_id)
    os.setresuid(inside_id, inside_id, inside_id)


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)
