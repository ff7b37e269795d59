"""Warm containers: started in advance, idle, used once; and work that is deferred while runs are in progress.

A container waits for one exact plan. It leaves the pool once and never returns. Containers of a kind that was not
requested for `IDLE_S` are closed, and all are closed at the end of the process. If the process is killed, its
containers read the end of their input and exit.

New containers are started, and old ones removed, after runs in warm containers (`Deferral`). Both take a daemon many
times the work of a short run, which would have to compete for the processor. They therefore start when no such run is
in progress and none has just ended, or after a bounded time.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

from ...core.record import dataclass, field
from .container import Container

QUIET_S = 0.03  # after a run: a caller that runs in a loop has sent its next request by then
MOST_S = 0.25  # much shorter than the start of a container

WAITING, MOST_KINDS, IDLE_S = 2, 3, 300.0  # containers of one kind, kinds, and how long a container waits
log = logging.getLogger("cloche.containers")
Make = Callable[[], Container[Any]]
_pools: dict[int, ContainerPool] = {}


class Deferral:
    """Defer work while runs are in progress. Thread-safe."""

    def __init__(self) -> None:
        self._begin()
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        self._turn = threading.Condition()
        self._under_way = 0
        self._ended_at = 0.0

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Defer work of others until the context ends."""
        with self._turn:
            self._under_way += 1
        try:
            yield
        finally:
            with self._turn:
                self._under_way -= 1
                self._ended_at = time.monotonic()
                self._turn.notify_all()

    def wait(self, most_s: float = MOST_S) -> None:
        """Wait until no run is in progress and none has just ended, for at most `most_s`."""
        deadline = time.monotonic() + most_s
        with self._turn:
            while (left_s := self._until(deadline) - time.monotonic()) > 0:
                self._turn.wait(left_s)

    def _until(self, deadline: float) -> float:
        return deadline if self._under_way else min(deadline, self._ended_at + QUIET_S)


deferral = Deferral()


@dataclass(slots=True)
class WarmSet:
    """The warm containers of one kind, and the time of the last request for one."""

    make: Make
    waiting: list[Container[Any]] = field(default_factory=list)
    coming: int = 0
    request_count: int = 0
    asked_at: float = 0.0


class ContainerPool:
    """Keep containers ready. Thread-safe."""

    def __init__(self) -> None:
        self._warm_sets: dict[Hashable, WarmSet] = {}
        self._turn = threading.Lock()
        self._are_none_coming = threading.Condition(self._turn)
        self._generation = 0
        self._timer: threading.Timer | None = None

    def take(self, kind: Hashable) -> Container[Any] | None:
        """Return a waiting container, or None."""
        with self._turn:
            warm_set = self._warm_sets.get(kind)
            while warm_set is not None and warm_set.waiting:
                container = warm_set.waiting.pop(0)
                if not container.is_lost:
                    return container
        return None

    def refill(self, kind: Hashable, make: Make) -> None:
        """Start containers of a kind in the background; the least recently requested kind may be removed."""
        with self._turn:
            warm_set = self._warm_sets.setdefault(kind, WarmSet(make))
            warm_set.make, warm_set.asked_at, warm_set.request_count = (
                make,
                time.monotonic(),
                warm_set.request_count + 1,
            )
            missing = min(WAITING, warm_set.request_count) - len(warm_set.waiting) - warm_set.coming
            warm_set.coming += max(0, missing)
            dropped = self._drop_old()
            generation = self._generation
        for container in dropped:
            container.release()
        self._expire_later()
        for _ in range(missing):
            thread = threading.Thread(target=self._make, args=(kind, make, generation), daemon=True)
            thread.name = "cloche-container-pool"
            thread.start()

    def close(self) -> None:
        """Remove all warm containers."""
        with self._turn:
            self._generation += 1
            if self._timer is not None:
                self._timer.cancel()
            self._are_none_coming.wait_for(
                lambda: not any(warm_set.coming for warm_set in self._warm_sets.values()), timeout=60
            )
            waiting = [container for warm_set in self._warm_sets.values() for container in warm_set.waiting]
            self._warm_sets.clear()
        for container in waiting:
            container.release()

    def _expire_later(self) -> None:
        """Schedule the next removal of old containers."""
        with self._turn:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = threading.Timer(IDLE_S + 1, self._expire)
            self._timer.daemon = True
            self._timer.start()

    def _expire(self) -> None:
        with self._turn:
            dropped = self._drop_old()
        for container in dropped:
            container.release()

    def _drop_old(self) -> list[Container[Any]]:
        by_age = sorted(self._warm_sets.items(), key=lambda item: -item[1].asked_at)
        now = time.monotonic()
        old = [
            kind
            for index, (kind, warm_set) in enumerate(by_age)
            if index >= MOST_KINDS or now - warm_set.asked_at > IDLE_S
        ]
        removed = [kind for kind in old if not self._warm_sets[kind].coming]
        return [container for kind in removed for container in self._warm_sets.pop(kind).waiting]

    def _make(self, kind: Hashable, make: Make, generation: int) -> None:
        container = None
        deferral.wait()
        try:
            container = make()
        except Exception as error:  # after any error, `coming` must be decremented
            log.warning("no warm container: %s", error)
        with self._turn:
            warm_set = self._warm_sets.get(kind)
            if warm_set is not None:
                warm_set.coming -= 1
                if container is not None and generation == self._generation:
                    warm_set.waiting.append(container)
                    container = None
            self._are_none_coming.notify_all()
        if container is not None:
            container.release()


def shared_pool() -> ContainerPool:
    """Return this process's pool."""
    return _pools.setdefault(os.getpid(), ContainerPool())


def close_pool() -> None:
    """Remove this process's warm containers."""
    pool = _pools.get(os.getpid())
    if pool is not None:
        pool.close()
