"""Runs that surely start warm."""

import threading
import time
from typing import Any

import cloche
from cloche.core.result import Result

PATIENCE_S = 60.0


def run_warm(code: str, **options: Any) -> Result:
    """Run in a sandbox that came from a template; runs that start cold until there is one are repeated."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        result = cloche.run(code, **options)
        if result.meta["start"] != "cold":
            return result
        assert time.monotonic() < deadline, "no run started warm within a minute"
        time.sleep(0.05)


def run_pooled(code: str, **options: Any) -> Result:
    """Run in a jail that was built ahead."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        result = cloche.run(code, **options)
        if result.meta["start"] == "pooled":
            return result
        assert time.monotonic() < deadline, "no run found a jail built ahead within a minute"
        time.sleep(0.05)


def fill_pool(*, settle_s: float = 0.5) -> None:
    """Wait until the containers are there that runs have asked for, and what is forked ahead in them is ready."""
    for thread in threading.enumerate():
        if thread.name == "cloche-container-pool":
            thread.join(PATIENCE_S)
    time.sleep(settle_s)
