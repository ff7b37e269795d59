"""A process that has hardly any descriptors left."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_room(free: int) -> Iterator[None]:
    """Leave so many descriptors that can still be opened."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
        while True:
            try:
                taken.append(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
            except OSError:
                break
        for _ in range(free):
            os.close(taken.pop())
        yield
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
