"""`cloche batch run`: one result for each program, in order, however often the batch is ended."""

from __future__ import annotations

import gzip
import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.harness import batches

SLEEPS = "import time; print('begun', flush=True); time.sleep(60)"


def write(folder: Path, *rows: object) -> Path:
    """Write p.jsonl: text as it is, other values as JSON."""
    path = folder / "p.jsonl"
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


def test_a_thousand_programs_killed_three_times_have_a_thousand_results(tmp_path: Path) -> None:
    """One in a hundred crashes, hangs or exhausts memory; each result is right, at its place, and there once."""
    rows = batches.run_killed(tmp_path, 1000, kills=3)
    assert len(rows) == 1000
    assert batches.wrong_rows(rows) == []


def test_each_row_has_its_result(tmp_path: Path) -> None:
    """Wrong rows have one, too; the summary counts, and the exit code says that not all is well."""
    write(
        tmp_path,
        {"code": "print(input())", "stdin": "typed", "id": "a"},
        "no json",
        "",
        {"argv": ["cat", "f"], "files": {"f": {"base64": "/wA="}}},
        {"code": "exit 4", "language": "bash", "timeout": "9s"},
        {"code": "x", "language": "cobol"},
        {"code": "\ud800", "id": "\ud800"},
    )
    done = batches.run(tmp_path, "--json", "--env", "A=b")
    rows = batches.read_rows(tmp_path / "r.jsonl")
    assert [row["line"] for row in rows] == [1, 2, 4, 5, 6, 7]
    assert [row.get("status") for row in rows[:5]] == ["ok", "invalid", "ok", "error", "invalid"]
    assert (rows[0]["stdout"], rows[2]["stdout"], rows[3]["exit_code"]) == ("typed\n", "\ufffd\0", 4)
    assert "cobol" in rows[4]["message"]
    assert json.loads(done.stdout)["rows"] == 6
    assert done.returncode == 1
    assert batches.run(tmp_path).returncode == 2  # the results exist
    again = batches.run(tmp_path, "--resume", "--json")
    assert (again.returncode, json.loads(again.stdout)["statuses"]) == (1, json.loads(done.stdout)["statuses"])


def test_a_program_that_began_is_lost_and_not_run_twice(tmp_path: Path) -> None:
    """After kill -9, a program that may have run has no status; --retry-lost runs it again; an idempotent one runs."""
    write(tmp_path, {"code": "print(1)"}, {"code": SLEEPS}, {"code": SLEEPS, "idempotent": True}, {"code": "print(4)"})
    process = batches.start(tmp_path, "--concurrency", "2")
    journal = tmp_path / "r.jsonl.batch"
    while not (journal.exists() and b'{"start": 1}' in journal.read_bytes()):
        time.sleep(0.01)
    batches.wait_for_rows(process, tmp_path / "r.jsonl", 1)
    refused = batches.run(tmp_path, "--resume")
    assert (refused.returncode, "another batch" in refused.stderr) == (2, True)
    process.kill()
    process.communicate()
    done = batches.run(tmp_path, "--resume", "--timeout", "1s")
    rows = batches.read_rows(tmp_path / "r.jsonl")
    assert [row.get("status") for row in rows] == ["ok", None, "timeout", "ok"]
    assert rows[1]["error"] == "lost"
    assert (done.returncode, "--retry-lost" in done.stderr) == (1, True)
    assert batches.run(tmp_path, "--resume", "--retry-lost", "--timeout", "1s").returncode == 0
    rows = batches.read_rows(tmp_path / "r.jsonl")
    assert [row.get("status") for row in rows] == ["ok", "timeout", "timeout", "ok"]
    write(tmp_path, {"code": "print(2)"})
    other = batches.run(tmp_path, "--resume")
    assert (other.returncode, "another input" in other.stderr) == (2, True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_batch_lets_programs_end_and_says_how_to_go_on(tmp_path: Path, number: signal.Signals) -> None:
    """What runs may end, and its result is stored; the printed command completes the batch."""
    write(tmp_path, *({"code": f"import time; time.sleep(0.5); print({index})"} for index in range(40)))
    process = batches.start(tmp_path, "--concurrency", "2")
    batches.wait_for_rows(process, tmp_path / "r.jsonl", 3)
    process.send_signal(number)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert "cloche batch run p.jsonl --out r.jsonl --concurrency 2 --resume" in told
    before = len(batches.read_rows(tmp_path / "r.jsonl"))
    assert 3 <= before < 40
    done = batches.run(tmp_path, "--resume", "--concurrency", "20")
    assert done.returncode == 0
    assert [row["stdout"] for row in batches.read_rows(tmp_path / "r.jsonl")] == [f"{index}\n" for index in range(40)]


def test_a_second_signal_ends_the_programs(tmp_path: Path) -> None:
    """They are lost then, since they may have run."""
    write(tmp_path, {"code": SLEEPS})
    process = batches.start(tmp_path)
    journal = tmp_path / "r.jsonl.batch"
    while not (journal.exists() and b'{"start": 0}' in journal.read_bytes()):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    assert "1 program may still end" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    process.communicate(timeout=60)
    assert time.monotonic() - began < 8  # and not after the ten seconds that one signal leaves
    assert process.returncode == 130
    batches.run(tmp_path, "--resume")
    assert [row["error"] for row in batches.read_rows(tmp_path / "r.jsonl")] == ["lost"]


def test_the_input_may_be_compressed_or_a_stream(tmp_path: Path) -> None:
    """Both are resumed by the same bytes; what cannot be read is an error before anything is made."""
    path = write(tmp_path, {"code": "print(1)"})
    path.write_bytes(gzip.compress(path.read_bytes()))
    assert batches.run(tmp_path).returncode == 0
    command = [sys.executable, "-m", "cloche", "batch", "run", "-", "--out", "s.jsonl", "--quiet"]
    for words in ([], ["--resume"]):
        done = subprocess.run([*command, *words], cwd=tmp_path, input=path.read_bytes(), timeout=120, check=False)
        assert done.returncode == 0
    assert batches.read_rows(tmp_path / "s.jsonl")[0]["stdout"] == "1\n"
    path.write_bytes(path.read_bytes()[:-9])
    broken = subprocess.run(
        [sys.executable, "-m", "cloche", "batch", "run", "p.jsonl", "--out", "t.jsonl"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (broken.returncode, "cannot read the programs" in broken.stderr) == (2, True)
    assert not (tmp_path / "t.jsonl").exists()


def test_a_full_disk_is_an_error_that_loses_nothing(tmp_path: Path) -> None:
    """The bound on a file's size stands for it; the batch goes on from what is there."""
    write(tmp_path, *({"code": f"print('x' * 50000, {index})", "id": index} for index in range(60)))
    script = "ulimit -f 2000; trap '' XFSZ; exec \"$@\""
    command = [sys.executable, "-m", "cloche", "batch", "run", "p.jsonl", "--out", "r.jsonl", "--concurrency", "1"]
    done = subprocess.run(
        ["bash", "-c", script, "bash", *command], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 125
    assert "cannot write" in done.stderr
    assert "--resume" in done.stderr
    batches.run(tmp_path, "--resume")
    rows = batches.read_rows(tmp_path / "r.jsonl")
    assert [(row["id"], row.get("status")) for row in rows] == [(index, "ok") for index in range(60)]


def test_progress_is_drawn_on_a_terminal_and_said_in_lines_elsewhere(tmp_path: Path) -> None:
    """With the rate and the time left; --quiet shows none."""
    write(tmp_path, *({"code": "import time; time.sleep(0.3)"} for _ in range(8)))
    main, side = pty.openpty()
    command = [sys.executable, "-m", "cloche", "batch", "run", "p.jsonl", "--out", "r.jsonl", "--concurrency", "1"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=side) as process:
        os.close(side)
        drawn = b""
        try:
            while piece := os.read(main, 65536):
                drawn += piece
        except OSError:
            pass  # EIO: the other side is closed
        os.close(main)
        assert process.wait(60) == 0
    assert b"of 8 programs" in drawn
    assert b"left" in drawn
    (tmp_path / "r.jsonl").unlink()
    (tmp_path / "r.jsonl.batch").unlink()
    done = batches.run(tmp_path, "--quiet", "--concurrency", "4")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "words",
    [
        ["--retry-lost"],
        ["--concurrency", "0"],
        ["--retries", "-1"],
        ["--backend", "nope"],
        ["--memory", "x"],
        ["--language", "cobol"],
        ["--file", "nowhere"],
        ["--file", "p.jsonl:../p"],
        ["--env", "=a"],
        ["--toolchain", "/nowhere"],
        ["--out", "-"],
    ],
)
def test_a_wrong_option_makes_no_file(tmp_path: Path, words: list[str]) -> None:
    """It is exit code 2, and nothing is left."""
    write(tmp_path, {"code": "1"})
    assert batches.run(tmp_path, *words).returncode == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p.jsonl"]
