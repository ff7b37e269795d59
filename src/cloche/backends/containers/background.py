"""Work that makes sure of what was let go: each piece in a thread, for all of which the process waits at its end."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable


class Background:
    """Hold the threads of one backend; a forked child has none of its parent's. For use from any thread."""

    def __init__(self, name: str, patience_s: float):
        self._name, self._patience_s = name, patience_s
        self._turn = threading.Lock()
        self._threads: set[threading.Thread] = set()
        os.register_at_fork(after_in_child=self._forget)
        atexit.register(self.wait_for_all)

    def begin(self, work: Callable[[], None]) -> None:
        """Do some work."""
        thread = threading.Thread(target=self._do, args=(work,), name=self._name, daemon=True)
        with self._turn:  # whoever sees it there may join it
            thread.start()
            self._threads.add(thread)

    def wait_for_all(self) -> None:
        """Wait until all of it is done, for a bounded time however much there is."""
        deadline = time.monotonic() + self._patience_s
        while True:
            with self._turn:
                threads = list(self._threads)
            if not threads or time.monotonic() > deadline:
                return
            threads[0].join(max(0.0, deadline - time.monotonic()))

    def _do(self, work: Callable[[], None]) -> None:
        try:
            work()
        finally:
            with self._turn:
                self._threads.discard(threading.current_thread())

    def _forget(self) -> None:
        self._turn = threading.Lock()
        self._threads.clear()
