"""The caller's end of the door of a nursery: where its guests take their orders, and where their ends are heard of."""

from __future__ import annotations

import itertools
import os
import select
import socket
from array import array
from collections.abc import Sequence
from typing import Any

from cloche.jail import slate, wire

_ROOM = socket.CMSG_SPACE(4 * wire.MAX_DESCRIPTORS)
UNWATCHED_S = 0.02  # how long a run goes on before its helper looks at it
_generations = itertools.count(1, 1 << 32)  # with room for the nurseries of each door


class Door:
    """Hold a socket whose other end a helper hands to one nursery after the other, counted by `generation`.

    No two nurseries of this process have the same number: a later one has a higher one, at whatever door.

    A guest that is ready waits at it: `seconds` are those that its jail took to build, step by step. With a door comes
    a slate, for all its nurseries. Raises OSError.
    """

    def __init__(self) -> None:
        self._link, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._slate, self._timer = slate.make()
        except BaseException:
            self._link.close()
            self._theirs.close()
            raise
        self._link.setblocking(False)
        self._waiting = select.poll()
        self._waiting.register(self._link, select.POLLIN)
        self.generation = next(_generations)
        self.seconds: Sequence[float] = ()
        self.has_guest = False
        self._workspace: list[int] = []

    def fileno(self) -> int:
        """Return the descriptor to wait on."""
        return self._link.fileno()

    @property
    def other_ends(self) -> tuple[int, int, int]:
        """Return what is for the helper, which keeps copies: the other end of the socket, the slate and its timer."""
        return self._theirs.fileno(), self._slate, self._timer

    def hand_over(self) -> None:
        """Let go of the other end: the helper has it."""
        self._theirs.close()

    def order(
        self,
        body: dict[str, Any],
        fds: Sequence[int],
        *,
        number: int,
        timeout_s: float,
        rebuilds: bool,
        is_crowded: bool = False,
        has_company: bool = False,
    ) -> None:
        """Send the orders of run `number`, which a guest of the present nursery takes and no other. Raises OSError.

        The helper looks at it when it may have lasted too long to be left alone. It builds anew, or waits to be told
        to, where this run turns out to be the last one in its nursery. Where it `is_crowded`, the next guest saves
        what it would only do to answer sooner. Where a live session `has_company` of it in the same files, or it is
        crowded, the guest's end is not told before the kernel is through with it.
        """
        slate.note_order(
            self._slate, number, timeout_s, rebuilds=rebuilds, is_crowded=is_crowded, has_company=has_company
        )
        slate.wind(self._timer, min(timeout_s, UNWATCHED_S))
        body |= {"number": number, "generation": self.generation, "says_farewell": not (is_crowded or has_company)}
        wire.send_by(self._pass_on, "order", body, fds)

    def start_of(self, number: int) -> float:
        """Return when the program of run `number` started, 0.0 if it has not: seconds on the monotonic clock."""
        return slate.start_of(self._slate, number)

    def hear(self) -> tuple[str, dict[str, Any]]:
        """Return one word; an empty one for what need not be known. Raises BlockingIOError when nothing was said."""
        tag, body, fds = self._receive()
        if not tag:
            raise ConnectionResetError("the other end of the door is gone")
        if body["generation"] < self.generation:  # of a nursery that is no more
            _close_all(fds)
            return "", {}
        self.generation = body["generation"]
        if tag == "ready":
            _close_all(self._workspace)
            self._workspace, self.has_guest = fds, True
            self.seconds = body.get("seconds", self.seconds)
        return tag, body

    def _pass_on(self, data: bytes, fds: Sequence[int]) -> None:
        control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
        self._link.sendmsg([data], control, socket.MSG_NOSIGNAL)

    def _receive(self) -> tuple[str, dict[str, Any], list[int]]:
        """Do what `wire.receive` does by the socket's own methods, which the caller has at hand."""
        try:
            data, control, _, _ = self._link.recvmsg(wire.INLINE_BYTES, _ROOM, socket.MSG_CMSG_CLOEXEC)
        except ConnectionResetError:
            return "", {}, []
        fds = array("i")
        for level, kind, words in control:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.frombytes(words[: len(words) - len(words) % fds.itemsize])
        return wire.read(data, fds.tolist())

    def wait(self, seconds: float) -> bool:
        """Wait until something is said, and tell whether it was; not when time is up or the other end is gone."""
        found = self._waiting.poll(seconds * 1000) if seconds > 0 else []
        return bool(found) and found[0][1] == select.POLLIN

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
        if self._link.fileno() < 0:
            return
        _close_all((*self.take_guest(), self._slate, self._timer))
        self._link.close()
        self._theirs.close()


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
