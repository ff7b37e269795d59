"""A caller that never stops running code, to be killed at any moment. Arguments: how it calls, and a seed."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable

import cloche
from cloche.backends.local.backend import LocalBackend

# Runs of every length: over at once, cut by the time-out, at work in the background when the kill comes.
CODES = (
    "print('short')",
    "open('f', 'wb').write(bytes(1 << 20))",
    "import time; time.sleep(60)",
    "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(60)\ntime.sleep(0.05)",
    "import subprocess; subprocess.Popen(['sleep', '60'], start_new_session=True)",
    "while True: print('x' * 1000)",
)


def _run(level: str, *, use_cgroups: bool) -> None:
    backend = LocalBackend(use_cgroups=use_cgroups)
    cloche.run(random.choice(CODES), backend=backend, level=level, screen="off", timeout=0.3, files={"d/in": b"x"})


def _live(level: str) -> None:
    with cloche.Sandbox(live=False, level=level, timeout=0.3) as sandbox:
        for number in range(3):
            sandbox.write_file(f"in{number}", b"x" * 1000)
            sandbox.run(random.choice(CODES))


WAYS: dict[str, Callable[[], None]] = {
    "run in a jail": lambda: _run("jail", use_cgroups=True),
    "run in a jail, rlimits only": lambda: _run("jail", use_cgroups=False),
    "run confined": lambda: _run("confined", use_cgroups=True),
    "run confined, rlimits only": lambda: _run("confined", use_cgroups=False),
    "run as a process": lambda: _run("process", use_cgroups=True),
    "run as a process, rlimits only": lambda: _run("process", use_cgroups=False),
    "a sandbox in a jail": lambda: _live("jail"),
    "a confined sandbox": lambda: _live("confined"),
}


def main(way: str, seed: str) -> None:
    """Say that we are ready, then call on and on."""
    random.seed(int(seed))
    LocalBackend().capabilities()  # the probe is not what is to be killed
    print("ready", flush=True)
    while True:
        WAYS[way]()


if __name__ == "__main__":
    main(*sys.argv[1:])
