"""The benchmark as a whole measures, compares and reports; how fast anything is, no test says."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from bench.peers import PEERS
from bench.tables import show_report
from tests.harness.bench import OURS, ROOT, event, run
from tests.harness.texts import commands, matches

# Half a minute: every test run holds the project's own contest, in test_bench_parts.py.
pytestmark = pytest.mark.soak


@pytest.fixture(scope="module")
def whole_report(tmp_path_factory: pytest.TempPathFactory) -> tuple[Mapping[str, Any], str, Path]:
    """Return one tiny contest of `cloche bench`: the report, what was printed, and the folder with the files."""
    folder = tmp_path_factory.mktemp("bench")
    words = ("--rounds", "2", "--runs", "8", "--json", "r.json", "--plot", "r.svg")
    done = run("-m", "cloche", "bench", *words, folder=folder)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "r.json").read_text()), done.stdout, folder


@pytest.fixture(scope="module")
def project_report(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """Return the report of one tiny contest of the project's own, with all there is."""
    folder = tmp_path_factory.mktemp("bench")
    asked = {"rounds": 2, "runs": 8, "sessions": 3, "paths": [], "peers_folder": str(folder / "nothing"),
             "events": ("pandas", "import", "first", "session", "data", "peers", "peer cells")}  # fmt: skip
    done = run(str(ROOT / "bench/contest.py"), json.dumps(asked), folder=folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def printed_of(report: Mapping[str, Any], capsys: pytest.CaptureFixture[str]) -> str:
    """Return what is printed of a report."""
    show_report(dict(report))
    return capsys.readouterr().out


def test_everyone_takes_turns_with_a_plain_subprocess(whole_report: tuple[Mapping[str, Any], str, Path]) -> None:
    """Cloche is measured cold, warm and in an open sandbox, each with its ratio and all its times.

    A plain one comes before each.
    """
    rows = event(whole_report[0], "print")["rows"]
    assert set(rows) >= {"plain subprocess", *OURS}
    assert all({"p50", "p95", "p99", "ratio", "over", "call"} <= set(one) for one in rows.values())
    turns = {name: len(one["ms"]) for name, one in rows.items()}
    assert turns == dict.fromkeys(rows, 2) | {"plain subprocess": 2 * (len(rows) - 1)}
    assert rows["plain subprocess"]["ratio"] == 1
    assert rows["cloche, cold"]["starts"] == {"cold": 2}
    assert "cold" not in rows["cloche, warm"]["starts"]


def test_full_speed_memory_and_leaks_are_reported(whole_report: tuple[Mapping[str, Any], str, Path]) -> None:
    """Four threads do as many runs as asked; memory has figures or a reason; nothing is left behind."""
    report, printed, _ = whole_report
    speeds = event(report, "print")["full_speed"]
    assert {name: speed["runs"] for name, speed in speeds.items()} == {"plain subprocess": 8, "cloche, warm": 8}
    memory = event(report, "print")["memory"]
    assert memory.get("slots", 0) >= 1 or memory["reason"]
    assert report["leaks"] == []
    assert "left behind by Cloche: no processes" in printed


def test_importing_is_measured_over_an_empty_interpreter(
    project_report: Mapping[str, Any],
) -> None:
    """Each import is a whole process, alternated with one that imports nothing."""
    imports = event(project_report, "import")
    assert imports["reference"] == "interpreter, nothing imported"
    assert {"import cloche", "import asyncio"} < set(imports["rows"])


def test_preloaded_pandas_prints_what_a_plain_one_prints(
    project_report: Mapping[str, Any],
) -> None:
    """Where pandas is installed it takes part, and a run with it preloaded never starts cold."""
    rows = event(project_report, "pandas")["rows"]
    assert set(rows) == {"plain subprocess", "cloche, cold", "cloche, pandas preloaded"}
    assert "cold" not in rows["cloche, pandas preloaded"]["starts"]


def test_a_live_session_takes_turns_with_a_plain_subprocess(
    project_report: Mapping[str, Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A cell and the opening are rows; what a session costs that waits, and many of them, have figures or a reason."""
    report, printed = project_report, printed_of(project_report, capsys)
    session = event(report, "session")
    assert set(session["rows"]) == {"plain subprocess", "cloche, session cell", "cloche, session opened"}
    assert session["idle"].get("session_mib", 0) > 0 or session["idle"]["reason"]
    assert session["crowd"].get("sessions") == 3 or session["crowd"]["reason"]
    assert "memory of an idle session: " in printed
    assert "many sessions at once: " in printed


def test_a_session_with_data_is_gone_back_in_and_forked(project_report: Mapping[str, Any]) -> None:
    """With 500 MB in memory it is rolled back, forked and remembered, or left out for want of memory."""
    data = event(project_report, "data")
    large = {"cloche, rollback", "cloche, fork(1)", "cloche, checkpoint"}
    assert large < set(data["rows"]) or "of memory must be free" in data["left_out"]["cloche, rollback"]
    assert "cloche, session shows a DataFrame" in data["rows"]


def test_the_first_run_of_a_process_is_measured_warm_and_cold(
    project_report: Mapping[str, Any],
) -> None:
    """Each is timed in a new process, from before the import."""
    assert {"first cloche.run", "first cloche.run, cold"} < set(event(project_report, "first")["rows"])


def test_a_peer_that_is_not_there_is_left_out_by_name(
    project_report: Mapping[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Every peer is either a row or one line with a reason, and the others are measured all the same."""
    report, printed = project_report, printed_of(project_report, capsys)
    found = event(report, "peers")
    assert {peer.name for peer in PEERS} == set(found["left_out"]) - {"bubblewrap"}
    assert all("cannot run here: " in found["left_out"][peer.name] for peer in PEERS)
    assert "left out: sandlock: cannot run here: not installed" in printed
    assert "cloche, warm" in found["rows"]
    cells = event(report, "peer cells")
    assert set(cells["left_out"]) == {"kern, warm kernel cell"}
    assert "cloche, session cell" in cells["rows"]


def test_the_tables_show_what_the_report_holds(
    whole_report: tuple[Mapping[str, Any], str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """A report that was read back prints the same tables."""
    report, printed, _ = whole_report
    assert printed_of(report, capsys) == printed
    for name in OURS:
        assert re.search(rf"^ {name} +2 +\d+\.\d\d ", printed, re.MULTILINE), printed


def test_the_document_shows_what_is_printed(whole_report: tuple[Mapping[str, Any], str, Path]) -> None:
    """What docs/cli.md says of two rounds is true."""
    (expected,) = [says for command, says in commands(ROOT / "docs/cli.md") if command == "cloche bench --rounds 2"]
    assert matches(expected, whole_report[1])


def test_the_plot_is_small_and_its_text_is_text(whole_report: tuple[Mapping[str, Any], str, Path]) -> None:
    """The picture fits into a repository and can be searched."""
    picture = (whole_report[2] / "r.svg").read_text()
    assert len(picture) < 200_000
    assert "cloche, open sandbox" in picture
