"""The contest of containers on a real daemon: Cloche's beside `docker run`, on its own runtime and on gVisor."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from bench.peers import DOCKER_COLD, DOCKER_RUN, DOCKER_RUN_GVISOR, DOCKER_WARM, GVISOR_WARM, containers
from bench.setting import Setting
from cloche.bench.harness import Case, SkippedCase, measure_interleaved
from tests.harness.containers import ROOT, Daemon

pytestmark = [pytest.mark.soak, pytest.mark.root]
IMAGE = "cloche-bench:test"


def entered(folder: Path, stack: ExitStack) -> list[Case | SkippedCase]:
    """Return who takes part with a folder of peers."""
    return list(containers(Setting(rounds=1, runs=1, image=IMAGE, peers_folder=folder), stack))


def test_cloche_is_held_against_docker_run(gvisor: Daemon, tmp_path: Path) -> None:
    """All five of them print, the warm ones start warm, and peers that are not installed say so."""
    script, target = ROOT / "scripts" / "bench_image.py", tmp_path / "image.tar"
    subprocess.run([sys.executable, script, IMAGE, target], check=True)
    gvisor.docker("load", "--quiet", "--input", str(target))
    (tmp_path / "image.name").write_text(IMAGE)
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path))
        found = entered(tmp_path, stack)
        present = [one for one in found if isinstance(one, Case)]
        times, failed = measure_interleaved(present, 1, warm_up=1)
    assert failed == {}
    assert set(times) >= {DOCKER_RUN, DOCKER_RUN_GVISOR, DOCKER_COLD, DOCKER_WARM, GVISOR_WARM}
    assert {one.name: "not installed" in one.reason for one in found if isinstance(one, SkippedCase)} == {
        "llm-sandbox, docker": True, "llm-sandbox, docker pool": True,
    }  # fmt: skip


def test_without_an_image_nobody_takes_part(tmp_path: Path) -> None:
    """Each is left out with the reason, and no daemon is asked."""
    with ExitStack() as stack:
        found = entered(tmp_path, stack)
    reasons = {one.name: one.reason for one in found if isinstance(one, SkippedCase)}
    assert {DOCKER_RUN, DOCKER_RUN_GVISOR, DOCKER_COLD, DOCKER_WARM, GVISOR_WARM} <= set(reasons)
    assert "scripts/bench_peers.sh builds one" in reasons[DOCKER_RUN]
