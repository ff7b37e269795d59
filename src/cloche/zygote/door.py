"""The caller's end of the door of a nursery: where its guests take their orders, and where their ends are heard of."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from cloche.jail import wire

_generations = itertools.count(1, 1 << 32)  # with room for the nurseries of each door


class Door:
    """Hold a socket whose other end a helper hands to one nursery after the other, counted by `generation`.

    No two nurseries of this process have the same number: a later one has a higher one, at whatever door.

    A guest that is ready waits at it: `seconds` are those that its jail took to build, step by step.
    """

    def __init__(self) -> None:
        self._link, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._link.setblocking(False)
        self.generation = next(_generations)
        self.seconds: Sequence[float] = ()
        self.has_guest = False
        self._workspace: list[int] = []

    def fileno(self) -> int:
        """Return the descriptor to wait on."""
        return self._link.fileno()

    @property
    def other_end(self) -> int:
        """Return the end for the helper, which keeps a copy of it."""
        return self._theirs.fileno()

    def hand_over(self) -> None:
        """Let go of the other end: the helper has it."""
        self._theirs.close()

    def order(self, body: Mapping[str, Any], fds: Sequence[int]) -> None:
        """Send orders, which a guest of the present nursery takes and no other. Raises OSError."""
        wire.send(self.fileno(), "order", {**body, "generation": self.generation}, fds)

    def hear(self) -> tuple[str, dict[str, Any]]:
        """Return one word; an empty one for what need not be known. Raises BlockingIOError when nothing was said."""
        tag, body, fds = wire.receive(self.fileno())
        if not tag:
            raise ConnectionResetError("the other end of the door is gone")
        if body["generation"] < self.generation:  # of a nursery that is no more
            _close_all(fds)
            return "", {}
        self.generation = body["generation"]
        if tag == "ready":
            _close_all(self._workspace)
            self._workspace, self.seconds, self.has_guest = fds, body["seconds"], True
        return tag, body

    def look(self) -> bool:
        """Tell whether a guest is known to wait; raises nothing."""
        try:
            while not self.has_guest:
                self.hear()
        except OSError:
            pass
        return self.has_guest

    def take_guest(self) -> list[int]:
        """Return the mount of the workspace of the guest that waited, to be owned by who asks; none if it is kept."""
        found, self._workspace, self.has_guest = self._workspace, [], False
        return found

    def close(self) -> None:
        """Let go of everything."""
        _close_all(self.take_guest())
        self._link.close()
        self._theirs.close()


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
