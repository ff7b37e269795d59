"""Keep so many processes that move up a tree, from one subreaper to the next, while they are counted from outside.

    python moving.py SLEEPERS SECONDS

Prints as JSON the counts that said they were all, once everybody was there: how many there were, and the `least`.
"""

import json
import os
import select
import signal
import sys
import time

from cloche.jail import procfs
from cloche.jail.syscalls import PR_SET_CHILD_SUBREAPER, prctl

DEPTH = 20
SLEEPERS, SECONDS = int(sys.argv[1]), float(sys.argv[2])
ENDS_AT = time.monotonic() + SECONDS + 20  # inherited by all: none of them may outlast that


def be_level(depth: int, ready: int, go: int) -> None:
    """Be the parent of the next level; the last one has the sleepers, and each ends when that below it has."""
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if depth:
        below = os.fork()
        if below == 0:
            be_level(depth - 1, ready, go)
        os.waitpid(below, 0)
        os._exit(0)
    for _ in range(SLEEPERS):
        if os.fork() == 0:
            time.sleep(max(0.0, ENDS_AT - time.monotonic()))
            os._exit(0)
    os.write(ready, b"r")
    select.select([go], [], [], max(0.0, ENDS_AT - time.monotonic()))
    os._exit(0)


def main() -> None:
    """Let them move while they are counted, again and again."""
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    counts: list[int] = []
    stops_at = time.monotonic() + SECONDS
    while time.monotonic() < stops_at:
        ready, is_ready = os.pipe()
        go, goes = os.pipe()
        top = os.fork()
        if top == 0:
            be_level(DEPTH, is_ready, go)
        os.read(ready, 1)
        os.write(goes, b"g")
        while os.waitpid(top, os.WNOHANG)[0] == 0:
            count, is_whole = procfs.count_tasks_below(os.getpid(), 1000)
            counts += [count] * is_whole
        for pid in procfs.descendants(os.getpid()):
            os.kill(pid, signal.SIGKILL)
        try:
            while True:
                os.wait()
        except ChildProcessError:
            pass
        for fd in (ready, is_ready, go, goes):
            os.close(fd)
    print(json.dumps({"counts": len(counts), "least": min(counts)}))


main()
