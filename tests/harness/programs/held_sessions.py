"""A caller that holds five sessions with forks and goes on using them, to be killed at any moment."""

from __future__ import annotations

import contextlib
import random
import sys

import cloche


def main(seed: str) -> None:
    """Open everything, say that we are ready, then run, go back and fork on and on."""
    random.seed(int(seed))
    with contextlib.ExitStack() as stack:
        sandboxes = [stack.enter_context(cloche.Sandbox(live=False, memory="128m")) for _ in range(5)]
        sessions = [sandbox.session() for sandbox in sandboxes]
        held = [fork for session in sessions for fork in session.fork(2)]
        print("ready", flush=True)
        while True:
            session = random.choice(sessions)
            session.run("import subprocess; subprocess.run(['true'])")
            random.choice(held).run("x = bytearray(1 << 20)")
            (fork,) = session.fork()
            fork.checkpoint("c")
            fork.rollback("c")
            fork.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
