"""What makes sure of things that were let go: bounded, and of one process."""

from __future__ import annotations

import os
import threading
import time

from cloche.backends.garbage_collection import Background


def test_the_wait_is_bounded_however_much_there_is() -> None:
    """Not by so long for each: a process that ends has one end."""
    over, background = threading.Event(), Background("test", 0.3)
    for _ in range(100):
        background.begin(lambda: over.wait(60) and None)
    started = time.monotonic()
    background.wait_for_all()
    assert 0.2 < time.monotonic() - started < 20
    over.set()
    while [thread for thread in threading.enumerate() if thread.name == "test"]:
        assert time.monotonic() - started < 50, "what has been done is not over"
        background.wait_for_all()


def test_a_forked_child_waits_for_nothing_of_its_parent() -> None:
    """Its threads are the parent's, and so is the lock that one of them may have held."""
    over, background = threading.Event(), Background("test", 60)
    background.begin(lambda: over.wait(60) and None)
    with background._turn:
        child = os.fork()
        if child == 0:
            background.wait_for_all()
            os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    over.set()
    background.wait_for_all()
