"""Ten thousand programs: killed and resumed, or ended at random moments, and the caller's memory over many more."""

from __future__ import annotations

import itertools
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import bench.batch
import cloche
from cloche.backends.docker.backend import DockerBackend
from cloche.testing import FakeBackend
from tests.harness import batches
from tests.harness.containers import open_daemon
from tests.harness.leaks import Snapshot, wait_for_leftovers

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]

MOST_GROWN_MIB = 20


def test_ten_thousand_programs_killed_three_times_have_ten_thousand_results(tmp_path: Path) -> None:
    """One in a hundred crashes, hangs or exhausts memory; each result is right, at its place, and there once."""
    before = Snapshot.take()
    rows = batches.run_killed(tmp_path, 10_000, kills=3)
    assert len(rows) == 10_000
    assert batches.wrong_rows(rows) == []
    assert wait_for_leftovers(before, patience_s=60) == []


def test_whatever_ends_a_batch_no_program_is_run_twice_and_no_result_is_lost(tmp_path: Path) -> None:
    """Ended in turn by each signal, at random moments; what is lost is at most what ran at once, for each kill."""
    seed = random.randrange(1 << 32)
    random_of_this_test = random.Random(seed)
    batches.write_programs(tmp_path / "p.jsonl", 2_000, is_idempotent=False)
    kills = 0
    for number in [signal.SIGKILL, signal.SIGINT, signal.SIGTERM] * 6:
        process = batches.start(tmp_path, "--resume", "--concurrency", "8")
        rows = len(batches.read_rows(tmp_path / "r.jsonl")) if (tmp_path / "r.jsonl").exists() else 0
        batches.wait_for_rows(process, tmp_path / "r.jsonl", rows + random_of_this_test.randrange(100))
        process.send_signal(number)
        process.communicate(timeout=120)
        kills += number == signal.SIGKILL
    batches.run(tmp_path, "--resume")
    rows_at_end = batches.read_rows(tmp_path / "r.jsonl")
    lost = [row for row in rows_at_end if row.get("error") == "lost"]
    assert len(rows_at_end) == 2_000, seed
    assert len(lost) <= 8 * kills, seed
    assert [row for row in batches.wrong_rows(rows_at_end) if row not in lost] == [], seed
    done = batches.run(tmp_path, "--resume", "--retry-lost")
    assert done.returncode == 0, (seed, done.stderr)
    assert batches.wrong_rows(batches.read_rows(tmp_path / "r.jsonl")) == [], seed


@pytest.mark.root
@pytest.mark.container
def test_a_daemon_that_goes_away_stops_the_batch_which_goes_on_later(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its programs are lost or have not begun; what had ended is kept, and no program runs twice."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CLOCHE_RUNSC", "none")
    words = ("--backend", "docker", "--image", "cloche-test:python", "--resume")
    batches.write_programs(tmp_path / "p.jsonl", 49, is_idempotent=False)
    with open_daemon() as daemon:
        monkeypatch.setenv("DOCKER_HOST", daemon.url)
        daemon.image("cloche-test:python")
        process = batches.start(tmp_path, *words)
        batches.wait_for_rows(process, tmp_path / "r.jsonl", 20)
        daemon.stop()
        _, told = process.communicate(timeout=120)
        assert (process.returncode, "--resume" in told) == (125, True)
        daemon.start()
        daemon.wait_until_ready()
        done = batches.run(tmp_path, *words)
        rows = batches.read_rows(tmp_path / "r.jsonl")
        lost = [row for row in rows if row.get("error") == "lost"]
        assert (len(rows), done.returncode) == (49, 1 if lost else 0)
        assert [row for row in batches.wrong_rows(rows) if row not in lost] == []
        assert len(lost) < 20
        DockerBackend().drain()


def test_the_callers_memory_is_flat_over_a_hundred_thousand_programs() -> None:
    """Of a backend that answers at once, and over ten thousand real ones."""

    def programs() -> Iterator[dict[str, object]]:
        yield from ({"code": "print(1)", "id": number} for number in range(100_000))

    backend = FakeBackend(itertools.repeat(lambda _: cloche.Result("1\n", "", 0, 0.0)))
    first = 0.0
    for number, result in enumerate(cloche.map(programs(), backend=backend), 1):
        assert result.meta["program"]["id"] == number - 1
        backend.requests.clear()
        backend.sandboxes.clear()
        if number == 10_000:
            first = bench.batch.resident_mib()
    assert bench.batch.resident_mib() - first <= MOST_GROWN_MIB
    assert bench.batch.memory(10_000)["grown_mib"] <= MOST_GROWN_MIB
