"""User namespaces: who the guest is outside.

Never the outside uid 0: even without capabilities it owns /proc/sys. Root gives each live sandbox an outside id of
its own from a high range, claimed by binding an abstract socket's name: the kernel releases it with its process,
so nothing can leak. An ordinary user can only give their own id.
"""

from __future__ import annotations

import posix

from .syscalls import AF_UNIX, SOCK_DGRAM, call

EADDRINUSE = 98


class Claim:
    """Hold an outside id that no other live sandbox on this host has; `held` is the descriptor that does it."""

    __slots__ = ("held", "outside_id")

    def __init__(self, outside_id: int, held: int):
        self.outside_id, self.held = outside_id, held

    def share(self) -> Claim:
        """Return a hold of the same id that lasts by itself."""
        return Claim(self.outside_id, posix.dup(self.held))

    def forget(self) -> None:
        """Let go of this process's own hold; a forked child must not keep the id claimed."""
        if self.held >= 0:
            posix.close(self.held)
            self.held = -1


def claim_outside_id(first: int, count: int) -> Claim:
    """Claim a free id of the range, starting at a place that this process's pid spreads. Raises OSError when full."""
    start = posix.getpid() * 7919
    for at in range(count):
        outside_id = first + (start + at) % count
        held = call("socket", AF_UNIX, SOCK_DGRAM | posix.O_CLOEXEC, 0)
        address = AF_UNIX.to_bytes(2, "little") + f"\0cloche-id-{outside_id}".encode()
        try:
            call("bind", held, address, len(address))
            return Claim(outside_id, held)
        except OSError as error:
            posix.close(held)
            if error.errno != EADDRINUSE:
                raise
    raise OSError(EADDRINUSE, f"all {count} outside ids from {first} are in use")


def write_maps(
    pid: int, *, inside_id: int, outside_uid: int, outside_gid: int, privileged: bool, keeper: int | None = None
) -> None:
    """Map one id of process `pid`'s new user namespace; without privilege only the writer's own id can be mapped.

    `keeper` is the outside id of a second one, 0 inside, which no guest ever has.
    """
    if not privileged:
        _write(f"/proc/{pid}/setgroups", "deny")
    second = "" if keeper is None else f"\n0 {keeper} 1"
    _write(f"/proc/{pid}/gid_map", f"{inside_id} {outside_gid} 1{second}")
    _write(f"/proc/{pid}/uid_map", f"{inside_id} {outside_uid} 1{second}")


def _write(path: str, text: str) -> None:
    fd = posix.open(path, posix.O_WRONLY | posix.O_CLOEXEC)
    try:
        posix.write(fd, text.encode())
    finally:
        posix.close(fd)
