"""Kill a caller among a hundred runs, with sessions open, in containers or machines: what is left goes with `gc`."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness.containers import Daemon
from tests.harness.leaks import Snapshot, wait_for_leftovers
from tests.harness.machines import monitors

KILLS, LATEST_S, PATIENCE_S = 4, 6.0, 60
ROOT = Path(__file__).parents[2]
IMAGE = "cloche-test:python"

pytestmark = [pytest.mark.soak, pytest.mark.root, pytest.mark.timeout(600)]


def kill_among_runs(keywords: dict[str, object], chance: random.Random) -> None:
    """Start a hundred runs, and kill their caller at some moment after the first has ended."""
    arguments = [json.dumps(keywords), str(chance.randrange(1 << 32))]
    words = [sys.executable, "-m", "tests.harness.programs.killed_among_runs", *arguments]
    caller = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, start_new_session=True)
    assert caller.stdout is not None
    try:
        assert caller.stdout.readline() == b"ready\n"
        time.sleep(chance.uniform(0, LATEST_S))
        assert caller.poll() is None, "the caller ended by itself"
    finally:
        caller.kill()
        caller.stdout.close()
        caller.wait()


def clear_up() -> None:
    """Remove what the dead ones left, as a user does."""
    subprocess.run([sys.executable, "-m", "cloche", "gc"], check=True, capture_output=True)


def check(
    keywords: dict[str, object], is_clean_after: Callable[[Callable[[], object]], bool], kills: int = KILLS
) -> None:
    """Kill some callers, clear up, and look for what is left: with the engine, and on the machine."""
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    before = Snapshot.take()
    for _ in range(kills):
        kill_among_runs(keywords, chance)
    assert is_clean_after(clear_up), f"seed {seed}"
    left = wait_for_leftovers(before, patience_s=PATIENCE_S)
    assert not left, f"seed {seed}:\n" + "\n".join(left)


def sockets() -> set[str]:
    """Return the Unix sockets with a path that could be ours."""
    rows = Path("/proc/net/unix").read_text().splitlines()[1:]
    return {path for path in (row.split()[-1] for row in rows) if path.startswith("/") and "cloche" in path}


def test_containers_of_docker(docker: Daemon) -> None:
    """No container and no volume on the daemon's own runtime."""
    check({"backend": "docker", "image": docker.image(IMAGE), "level": "jail"}, docker.is_clean_after)


def test_containers_of_docker_on_gvisor(gvisor: Daemon) -> None:
    """Nor on gVisor's."""
    asked = {"backend": "gvisor", "image": gvisor.image(IMAGE)}
    check(asked, gvisor.is_clean_after)


@pytest.mark.container
def test_containers_of_gvisor_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a daemon: no process, mount, folder or control group."""
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere")
    monkeypatch.delenv("CLOCHE_RUNSC", raising=False)
    check({"backend": "gvisor"}, lambda clear: clear() is None)


def test_virtual_machines(microvm_image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No monitor and no socket of one."""
    monkeypatch.setenv("CLOCHE_MICROVM_IMAGE", str(microvm_image))
    monkeypatch.setenv("XDG_CACHE_HOME", str(microvm_image.parents[2]))
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere")
    before, paths = monitors(), sockets()

    def is_clean_after(clear: Callable[[], object]) -> bool:
        clear()
        deadline = time.monotonic() + PATIENCE_S
        while monitors() - before and time.monotonic() < deadline:  # who is killed takes a moment to be gone
            time.sleep(0.1)
        return not monitors() - before

    check({"backend": "microvm"}, is_clean_after, kills=1)
    assert not sockets() - paths
