"""The parts of the benchmark, and the contest that the project itself holds."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bench import peers, sessions
from bench.audit import WARM_UP, measure
from bench.peers import Driver, PeerFailed
from bench.setting import Setting
from bench.targets import TARGETS, held_against
from cloche.audit.verify import verify
from cloche.bench import harness, report
from cloche.bench.burst import burst
from cloche.bench.harness import (
    BenchmarkFailed,
    Case,
    Measurement,
    SkippedCase,
    Times,
    measure_interleaved,
    percentile,
    row,
)
from cloche.bench.report import check_plot
from cloche.bench.scenarios import Cases, Scenario
from cloche.cli.bench import BenchCommand, bench
from cloche.core.errors import BackendUnavailable
from cloche.testing.conformance.subject import leaks
from tests.harness.bench import OURS, ROOT, event, run

NAMES = (
    "plain subprocess", "bubblewrap", "cloche, cold", "cloche, warm", "cloche, on demand", "cloche, pandas preloaded",
    "cloche, session cell", "cloche, fork(1)", "cloche, rollback", "first cloche.run", "first cloche.run, cold",
    "import cloche", "import asyncio", "docker run", "docker run, gVisor", "cloche, docker warm", "cloche, gVisor warm",
    "python -c pass", "cloche --version", "cloche run, a new process", "first cloche.run, whole process",
    "cloche exec", "cloche exec NAME", "cloche exec NAME, wall", "python -c pass, wall",
    "live sandbox, opened", "live sandbox, opened cold", "live sandbox, true", "live sandbox, print(1)",
    "live sandbox, terminal echo", "64 MiB by loopback", "64 MiB by a forwarded port",
    "cloche, warm, in blocks", "cloche, warm, line by line", "a line that waits for its answer",
)  # fmt: skip


@pytest.mark.soak
def test_the_projects_own_contest_is_held_in_a_fresh_environment(tmp_path: Path) -> None:
    """`python -m bench` prints the same tables, and what became of the targets; as root an ordinary user's first."""
    words = ("--rounds", "2", "--runs", "8", "--events", "print", "--json", str(tmp_path / "r.json"))
    done = run("-m", "bench", *words, folder=ROOT)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "r.json").read_text())
    print_one = event(report, "print")
    assert set(print_one["rows"]) >= OURS
    assert print_one["memory"].get("slots", 0) >= 1 or print_one["memory"]["reason"]
    assert done.stdout.count("target: ") >= 3
    if os.geteuid() == 0:
        assert set(event(report["ordinary_user"], "print")["rows"]) >= OURS
        assert done.stdout.index("as an ordinary user") < done.stdout.index("as root")


def test_many_sessions_are_left_out_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report says how much must be free, and how much is."""
    monkeypatch.setattr(sessions, "available_bytes", lambda: 1 << 30)
    setting = Setting(rounds=1, runs=1, image="", sessions=500)
    assert sessions.many_sessions(setting) == {"reason": "8.0 GiB of memory must be free; 1.0 GiB are"}
    assert list(sessions.session_lines({"crowd": sessions.many_sessions(setting)})) == [
        "many sessions at once: left out: 8.0 GiB of memory must be free; 1.0 GiB are"
    ]


def test_what_the_audit_log_adds_is_measured_turn_by_turn(tmp_path: Path) -> None:
    """As many runs with a log as without, and those with it are in the log."""
    took = measure(1, str(tmp_path / "log"))
    assert [len(times) for times in took.values()] == [1, 1]
    assert verify(str(tmp_path / "log")).events == 2 * (WARM_UP + 1)


def test_every_target_is_held_against_its_figures() -> None:
    """Each of them has a line where all took part; those without figures have none."""
    rows = {name: {"p50": 10.0, "p99": 20.0, "over": 5.0, "per_second": 7.0} for name in NAMES}
    names = {target[0] for target in TARGETS}
    events = [{"name": name, "rows": rows, "full_speed": rows, "idle": {"session_mib": 7.0}} for name in names]
    lines = list(held_against({"events": events}))
    assert len(lines) == len(TARGETS)
    assert "target: MiB of PSS of an idle session at most 8.0: 7.00, met" in lines
    assert "target: pandas preloaded p50 / plain p50 at most 0.03: 1.00, missed" in lines
    assert list(held_against({"events": [{"name": "session", "rows": {}, "idle": {"reason": "no"}}]})) == []


def test_what_was_measured_is_kept_when_a_later_event_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its table is printed before the next event begins, and the file holds all that is known."""
    printed: list[str] = []

    def fail(*_: object) -> Cases:
        printed.append(capsys.readouterr().out)
        raise BenchmarkFailed("no")

    one = Scenario(name="one", title="one", reference="a", enter=lambda *_: [contestant("a", [1.0] * 50)])
    events = (one, Scenario(name="other", title="other", enter=fail))
    monkeypatch.setattr(report, "measure", partial(report.measure, events=events))
    command = BenchCommand(rounds=1, runs=1, json_file=str(tmp_path / "r.json"), plot_file=None)
    with pytest.raises(BenchmarkFailed):
        bench(command)
    assert "one, ms" in printed[0]
    assert event(json.loads((tmp_path / "r.json").read_text()), "one")["rows"]["a"]["p50"] == 1.0


def test_what_a_host_does_not_give_is_left_out_and_the_rest_is_measured() -> None:
    """In a plain container: what comes before it in its event too, and what is looked at afterwards says why."""

    def enter(*_: object) -> Cases:
        yield contestant("a", [1.0] * 50)
        look(None)

    def look(_: object) -> dict[str, Any]:
        raise BackendUnavailable("no life here")

    one = Scenario(name="one", title="one", reference="a", enter=enter, also={"idle": look})
    found: dict[str, Any] = {}
    report.measure(Setting(rounds=1, runs=1), found, lambda _: None, events=[one])
    held = event(found, "one")
    assert held["rows"]["a"]["p50"] == 1.0
    assert (held["left_out"], held["idle"]) == ({"the rest of one": "no life here"}, {"reason": "no life here"})


def test_without_a_daemon_dockers_client_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So is what would be held against it, each with the reason; the others take their turns."""
    (tmp_path / "image.name").write_text("image")
    (tmp_path / "docker").write_text("#!/bin/sh\necho Cannot connect to the daemon >&2\nexit 1\n")
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with ExitStack() as stack:
        found = list(peers.containers(Setting(rounds=1, runs=1, image="image", peers_folder=tmp_path), stack))
    reasons = {one.name: one.reason for one in found if isinstance(one, SkippedCase)}
    assert [one.name for one in found if isinstance(one, Case)] == ["plain subprocess"]
    for name in (peers.DOCKER_RUN, peers.DOCKER_RUN_GVISOR):
        assert "Cannot connect to the daemon" in reasons[name]
    assert {peers.DOCKER_COLD, peers.DOCKER_WARM, peers.GVISOR_WARM} < set(reasons)


def test_a_plot_that_cannot_be_drawn_is_refused_first(tmp_path: Path) -> None:
    """A name without a known ending is wrong usage, told before anything is measured."""
    done = run("-m", "cloche", "bench", "--plot", "figure.bmp", folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert ".png or .svg" in done.stderr


def test_a_plot_without_matplotlib_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who lacks it is told what to install."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(BackendUnavailable, match="pip install matplotlib"):
        check_plot("figure.svg")


def test_no_rounds_are_wrong_usage(tmp_path: Path) -> None:
    """There is no median of nothing."""
    assert run("-m", "cloche", "bench", "--rounds", "0", folder=tmp_path).returncode == 2


def contestant(name: str, times: list[float], **options: Any) -> Case:
    """Return a contestant whose turns take what the list says."""
    left = iter(times)
    return Case(name=name, call="", measure=lambda: Measurement(next(left), b"1\n"), **options)


def test_an_optional_contestant_that_fails_is_left_out() -> None:
    """One that stops half-way loses its row and keeps its own words; the others go on."""
    steady, failing = contestant("a", [1.0] * 3), contestant("b", [2.0], is_optional=True)
    times, left_out = measure_interleaved([steady, failing], 3, warm_up=0)
    assert (times["a"].ms, set(times)) == ([1.0, 1.0, 1.0], {"a"})
    assert left_out == {"b": "StopIteration"}


def test_the_reference_goes_before_everybody() -> None:
    """Nobody's turn follows that of another one who is compared, whatever the order of a round."""
    went: list[str] = []

    def entrant(name: str, ms: float) -> Case:
        return Case(name=name, call="", measure=lambda: went.append(name) or Measurement(ms, b"1\n"))

    entrants = [entrant("a", 3.0), entrant("plain", 2.0), entrant("b", 5.0)]
    times, _ = measure_interleaved(entrants, 7, reference="plain", warm_up=1)
    assert went[:3] == ["a", "plain", "b"]
    assert went[3::2] == ["plain"] * 14
    stints = [tuple(went[at : at + 4]) for at in range(4, 20, 2) if at % 4 == 0]
    assert set(stints) <= {("a", "plain", "a", "plain"), ("b", "plain", "b", "plain")}
    assert (len(times["plain"].ms), times["a"].over, times["b"].over) == (14, [1.0] * 7, [3.0] * 7)
    alone, _ = measure_interleaved([entrant("plain", 2.0)], 3, reference="plain")
    assert (alone["plain"].ms, alone["plain"].over) == ([2.0] * 3, [0.0] * 3)


def test_a_wrong_output_is_not_a_time() -> None:
    """Who prints something else has not run the code."""
    wrong = Case(name="a", call="", measure=lambda: Measurement(1.0, b"2\n"))
    with pytest.raises(BenchmarkFailed, match="a printed b'2"):
        measure_interleaved([wrong], 1)


def test_figures_are_ratios_and_differences_to_the_turn_before() -> None:
    """The ratio is that of the medians; the difference is the median of those to the reference's turns just before."""
    found = row(Times(ms=[4.0, 6.0, 50.0], over=[2.0, 3.0, 10.0]), Times(ms=[2.0, 3.0, 40.0]))
    assert (found["p50"], found["ratio"], found["over"], found["p99"]) == (6.0, 2.0, 3.0, 50.0)
    assert percentile([float(n) for n in range(100)], 0.95) == 95


def test_a_burst_does_all_runs_and_raises_what_one_raised() -> None:
    """Threads share the work; an error in one of them is not lost."""
    done: list[int] = []
    assert burst(lambda: done.append(1), 20, 4, 10)[0] == len(done) == 20
    with pytest.raises(ZeroDivisionError):
        burst(lambda: 1 // 0, 20, 4, 10)


def test_a_driver_that_dies_is_quoted() -> None:
    """The last words of a peer's process are the reason that is given."""
    with ExitStack() as stack:
        driver = Driver([sys.executable, "-c", "raise SystemExit('needs a kernel module')"], {}, stack)
        with pytest.raises(PeerFailed, match="needs a kernel module"):
            driver.wait_until_set_up()


def test_a_process_that_stays_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The leak check sees what was not there before."""
    monkeypatch.setattr(harness, "LEAK_TIMEOUT_S", 0.1)
    before = leaks()
    with subprocess.Popen(["sleep", "60"]) as process:
        left = harness.leaks_after(before)
        process.kill()
    assert [line for line in left if f"process {process.pid}" in line]
