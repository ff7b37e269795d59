"""Call a function from several threads. The benchmark of peers loads this file in interpreters without Cloche."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


def burst(call: Callable[[], object], runs: int, threads: int, limit_s: float) -> tuple[int, float]:
    """Call from several threads until `runs` are done or the time is up; return runs and seconds."""
    lock = threading.Lock()
    remaining, finished, errors = runs, 0, list[BaseException]()
    started = time.perf_counter()

    def work() -> None:
        nonlocal remaining, finished
        while time.perf_counter() - started < limit_s and not errors:
            with lock:
                if remaining <= 0:
                    return
                remaining -= 1
            try:
                call()
            except BaseException as error:
                errors.append(error)
                return
            with lock:
                finished += 1

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    elapsed = time.perf_counter() - started
    if errors:
        raise errors[0]
    return finished, elapsed
