"""Pid 1's part of `sudo`: the socket, and a process for each connection, at most so many at once. See `init.sudo`."""

from __future__ import annotations

from .syscalls import POLLIN

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Protocol

    class Worker(Protocol):
        """Be a forked process that accepts one connection."""

        mark: Any
        on_running: Any

        def conclude(self) -> dict[str, Any]: ...

    class SudoHost(Protocol):
        """Fork the processes."""

        server: Any

        def fork_sudo(self, listener: int) -> tuple[int, Worker]: ...


CLOCK = "sudo"
MOST_WORKERS = 16  # commands of sudo at once; others wait in the socket's queue
PAUSE_S, RETRY_S = 0.005, 0.1  # between two of them; until the next try where there is no room


class SudoListener:
    """Have one process at a time accept a connection."""

    def __init__(self, host: SudoHost, listener: int, now: Any):  # noqa: ANN401 - a function
        self.host, self.listener, self.now = host, listener, now
        self.workers: dict[int, Worker] = {}
        self.is_watched = False
        self.watch()

    def watch(self) -> None:
        """Wait for the next connection, if there may be one more."""
        if not self.is_watched and len(self.workers) < MOST_WORKERS:
            self.is_watched = True
            self.host.server.loop.watch(self.listener, POLLIN, self.take)

    def take(self, _: int) -> None:
        """Fork a process for a connection; the next one comes when this has been accepted."""
        self.host.server.loop.ignore(self.listener)
        self.is_watched = False
        server = self.host.server
        if server.pausing or server.is_held or server.is_stopping:
            self.watch_after(RETRY_S)
            return
        try:
            pid, worker = self.host.fork_sudo(self.listener)
        except OSError:  # the limit on processes is reached
            self.watch_after(RETRY_S)
            return
        self.workers[pid] = worker
        worker.on_running = lambda: self.watch_after(PAUSE_S)

    def watch_after(self, seconds: float) -> None:
        """Wait a moment, so that connections cannot keep pid 1 busy."""
        self.host.server.loop.call_at(CLOCK, self.now() + seconds, self.watch)

    def note_end(self, pid: int) -> bool:
        """Take note of the end of a process; tell whether it was one of these."""
        worker = self.workers.pop(pid, None)
        if worker is None:
            return False
        worker.conclude()
        worker.mark.close()
        self.watch_after(PAUSE_S)
        return True

    def mark_of(self, pid: int) -> int:
        """Return the mark of one of these, 0 for another process."""
        worker = self.workers.get(pid)
        return 0 if worker is None else int(worker.mark.number)
