"""Commit in a child that is killed: at every step (FOLDER FILES EVERY), or at random times (FOLDER FILES random TIMES).

After each kill the folder is recovered, by a child that is killed in its turn at each of its steps for every EVERYth
one, and must then be exactly the old tree or the new one, without stage or journal.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from cloche.workspace.recover import recover
from tests.harness.workspaces import Tree, content_of, everything, interrupted_at, left_in, make_old, write


def in_child(act: Callable[[], object]) -> int:
    """Do something in a child; return the signal that ended it, 0 for none."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            act()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return os.WTERMSIG(status)
    if os.waitstatus_to_exitcode(status):
        raise SystemExit("a child has failed")
    return 0


def recovered(host: Path, state: Path, killed_at: int = -1) -> bool:
    """Recover in a child that is killed at one of its steps; tell whether it was."""
    step, _ = interrupted_at(killed_at, lambda: os.kill(os.getpid(), signal.SIGKILL))

    def act() -> None:
        at = os.open(host, os.O_RDONLY)
        recover(at, os.fspath(state), step=step)

    return in_child(act) != 0


def made(place: Path, files: int) -> tuple[Path, Path]:
    """Make a host's folder and a state folder anew."""
    for above, folders, _ in os.walk(place):
        for name in folders:
            os.chmod(os.path.join(above, name), 0o700)
    shutil.rmtree(place, ignore_errors=True)
    host = place / "host"
    host.mkdir(parents=True)
    make_old(host, files)
    return host, place / "state"


def judge(host: Path, state: Path, old: Tree, new: Tree, about: str) -> str:
    """Tell which tree there is; end the program where it is neither."""
    now = content_of(host)
    name = "old" if now == old else "new" if now == new else ""
    if not name or left_in(state):
        differs = sorted(path for path in {**now, **old} if now.get(path) != old.get(path))
        raise SystemExit(f"{about}: neither old nor new, or a journal is left: {differs} {left_in(state)}")
    return name


def at_every_step(place: Path, files: int, every: int, old: Tree, new: Tree) -> Counter[str]:
    """Kill at each step there is."""
    found: Counter[str] = Counter()
    number = 0
    while True:
        host, state = made(place, files)
        step, _ = interrupted_at(number, lambda: os.kill(os.getpid(), signal.SIGKILL))
        if not in_child(lambda h=host, s=state, t=step: write(h, s, everything(files), step=t)):  # type: ignore[misc]
            return found
        again = 0
        while number % every == 0 and recovered(host, state, again):
            again += 1
            found["recovery"] += 1
        recovered(host, state)
        found[judge(host, state, old, new, f"killed at {number}")] += 1
        number += 1


def at_random_times(place: Path, files: int, times: int, old: Tree, new: Tree) -> Counter[str]:
    """Kill from outside, at any moment of a commit."""
    found: Counter[str] = Counter()
    host, state = made(place, files)
    began = time.monotonic()
    in_child(lambda: write(host, state, everything(files)))
    longest_s = time.monotonic() - began
    seed = random.SystemRandom().randrange(1 << 32)
    chance = random.Random(seed)
    while found["killed"] < times:
        host, state = made(place, files)
        child = os.fork()
        if child == 0:
            try:
                write(host, state, everything(files))
            finally:
                os._exit(0)
        time.sleep(chance.uniform(0, longest_s))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        found["killed" if os.WIFSIGNALED(status) else "ended before"] += 1
        recovered(host, state)
        found[judge(host, state, old, new, f"seed {seed}, kill {found['killed']}")] += 1
    return found


def main() -> None:
    """Do what the arguments say, and print how often each was found."""
    place, files, how = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    host, state = made(place / "reference", files)
    old = content_of(host)
    write(host, state, everything(files))
    new = content_of(host)
    if how == "random":
        found = at_random_times(place / "work", files, int(sys.argv[4]), old, new)
    else:
        found = at_every_step(place / "work", files, int(how), old, new)
    print(dict(found))


if __name__ == "__main__":
    main()
