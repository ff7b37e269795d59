"""Requests that wait for a lease: in order of arrival for each key, and keys in turns.

Theory of operation: a key with requests has a *turn number*, the lowest of which is served first; after each grant the
key gets the next number, and so goes behind all others. A request without room holds up its own key, and no other one.
So the first requests of all keys are kept in a heap for each size: a decision looks at the first entry of each heap.
Entries that are out of date are recognized when they come to the top.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterator
from heapq import heapify, heappop, heappush

from cloche.core.record import dataclass, field

from .placing import ResourceSize

SPARE_ENTRIES = 1024  # of a heap, that may be out of date


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRequest:
    """Ask for a lease; `id` will be the lease's. Times are those of the caller's one clock, in seconds."""

    id: str
    key: str
    size: ResourceSize
    prefers: tuple[str, ...] = ()
    ttl_s: float
    arrived: float
    wait_s: float


@dataclass(slots=True, kw_only=True)
class _Key:
    requests: OrderedDict[str, LeaseRequest] = field(default_factory=OrderedDict)
    turn: int
    entry: tuple[int, ResourceSize] | None = None  # that was pushed last: turn and size

    @property
    def first(self) -> LeaseRequest:
        return next(iter(self.requests.values()))


class WaitingRequests:
    """The queue of a fleet."""

    def __init__(self) -> None:
        self._keys: dict[str, _Key] = {}
        self._requests: dict[str, LeaseRequest] = {}
        self._sizes: dict[ResourceSize, int] = {}
        self._heaps: dict[ResourceSize, list[tuple[int, str]]] = {}
        self._turn = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request: str) -> bool:
        return request in self._requests

    def __iter__(self) -> Iterator[LeaseRequest]:
        return iter(self._requests.values())

    @property
    def sizes(self) -> list[ResourceSize]:
        """Return the sizes of all requests, each once."""
        return list(self._sizes)

    def get(self, request: str) -> LeaseRequest | None:
        """Return a request that waits."""
        return self._requests.get(request)

    def count(self, key: str) -> int:
        """Return how many requests of a key wait."""
        queue = self._keys.get(key)
        return len(queue.requests) if queue else 0

    def add(self, request: LeaseRequest) -> None:
        """Put a request behind those of its key."""
        queue = self._keys.get(request.key)
        if queue is None:
            queue = self._keys[request.key] = _Key(turn=self._next_turn())
        queue.requests[request.id] = self._requests[request.id] = request
        self._sizes[request.size] = self._sizes.get(request.size, 0) + 1
        self._post(request.key, queue)

    def remove(self, request: LeaseRequest, *, is_served: bool = False) -> None:
        """Take a request out; with `is_served` its key goes behind all others."""
        del self._requests[request.id]
        self._sizes[request.size] -= 1
        if not self._sizes[request.size]:
            del self._sizes[request.size]
        queue = self._keys[request.key]
        del queue.requests[request.id]
        if not queue.requests:
            del self._keys[request.key]
            return
        if is_served:
            queue.turn = self._next_turn()
        self._post(request.key, queue)

    def in_turn(self, without: Container[ResourceSize] = ()) -> list[tuple[int, LeaseRequest]]:
        """Return the next request of each size but `without`, with its key's turn, the lowest turn first."""
        firsts = []
        for size in list(self._heaps):
            entry = None if size in without else self._top(size)
            if entry is not None:
                firsts.append((entry[0], self._keys[entry[1]].first))
        return sorted(firsts, key=lambda first: first[0]) if len(firsts) > 1 else firsts

    def next_of(self, size: ResourceSize) -> tuple[int, LeaseRequest] | None:
        """Return the next request of a size, with its key's turn."""
        entry = self._top(size)
        return None if entry is None else (entry[0], self._keys[entry[1]].first)

    def _next_turn(self) -> int:
        self._turn += 1
        return self._turn

    def _post(self, key: str, queue: _Key) -> None:
        entry = (queue.turn, queue.first.size)
        if queue.entry != entry:
            queue.entry = entry
            heap = self._heaps.setdefault(entry[1], [])
            heappush(heap, (entry[0], key))
            if len(heap) > SPARE_ENTRIES + 2 * len(self._keys):
                self._compact(entry[1])

    def _compact(self, size: ResourceSize) -> None:
        heap = list({entry for entry in self._heaps[size] if self._is_valid(entry, size)})
        heapify(heap)
        self._heaps[size] = heap

    def _is_valid(self, entry: tuple[int, str], size: ResourceSize) -> bool:
        queue = self._keys.get(entry[1])
        return queue is not None and queue.turn == entry[0] and queue.first.size == size

    def _top(self, size: ResourceSize) -> tuple[int, str] | None:
        heap = self._heaps.get(size)
        while heap:
            if self._is_valid(heap[0], size):
                return heap[0]
            heappop(heap)
        self._heaps.pop(size, None)
        return None


class Deadlines:
    """Ids in the order of their times; a time that became later is put back, one that is over is forgotten."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, at: float, name: str) -> None:
        """Note a time."""
        heappush(self._heap, (at, name))

    def due(self, now: float) -> Iterator[str]:
        """Yield and remove the ids whose time has come."""
        while self._heap and self._heap[0][0] <= now:
            yield heappop(self._heap)[1]

    def keep(self, valid: dict[str, float]) -> None:
        """Forget all but these ids, if most entries are of others."""
        if len(self._heap) > SPARE_ENTRIES + 2 * len(valid):
            self._heap = [(at, name) for name, at in valid.items()]
            heapify(self._heap)
