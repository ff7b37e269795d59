"""The gate looks twice at what failed, and says in its last lines what came of it."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
FAILS_ONCE = """
from pathlib import Path
def test_passes(): pass
def test_fails_once():
    seen = Path(__file__).with_name("seen")
    was_there = seen.exists()
    seen.touch()
    assert was_there
"""
LEAVES = 'import subprocess\ndef test_leaves():\n    subprocess.Popen(["sleep", "60"])\n'
STOPS = (signal.SIGINT, signal.SIGTERM)
DIES = "import os\ndef test_dies(): os._exit(3)\ndef test_is_never_run(): pass\n"
SERVER = """
import pytest
@pytest.fixture(scope="session")
def server():
    with open("started", "a") as file:
        file.write("once ")
    yield "open"
    assert open("asked").read() == "asked asked "
"""
ASKS = 'def test_asks(server):\n    assert server == "open"\n    open("asked", "a").write("asked ")\n'
MIXED = """
import pytest
@pytest.fixture(scope="session")
def docker_daemon(): return "open"
def test_needs_nothing(): pass
def test_needs_an_engine(docker_daemon): pass
"""
WORDS = ("-m", "pytest", "-p", "no:cacheprovider", "-p", "tests.conftest", "-c", "/dev/null", "--rootdir", ".")


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return scripts/gate.py, at work in a folder of its own."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    gate = importlib.import_module("gate")
    monkeypatch.setattr(gate, "ROOT", tmp_path)
    monkeypatch.setattr(gate, "WORK", tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    for name in [name for name in os.environ if name.startswith(("PYTEST_XDIST", "TESTED_BESIDE"))]:
        monkeypatch.delenv(name)
    return gate


def judged(gate: ModuleType, folder: Path, **texts: str) -> int:
    """Judge modules of tests."""
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(text)
    command = [sys.executable, str(ROOT / "scripts" / "adopt.py"), sys.executable, *WORDS]
    place = gate.Place("some", command, [f"{name}.py" for name in texts], folder, at_most=1)
    before = [signal.getsignal(number) for number in STOPS]
    try:
        return int(gate.judge(gate.jobs_of([place]), 1))
    finally:
        for number, handler in zip(STOPS, before, strict=True):
            signal.signal(number, handler)


def test_what_passes_alone_is_named_last_and_fails_nothing(
    gate: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A failure by chance is printed under "passed at the second look"."""
    assert judged(gate, tmp_path, test_it=FAILS_ONCE) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[-3:] == ["2 passed, 0 failed", "passed at the second look:", "  some: test_it.py::test_fails_once"]


@pytest.mark.parametrize(
    ("text", "last"),
    [
        ("def test_fails(): assert False\n", "0 passed, 1 failed"),
        pytest.param(LEAVES, "1 passed, 1 failed", marks=pytest.mark.soak),
    ],
    ids=["one", "left behind"],
)
def test_what_fails_twice_fails_the_gate(
    gate: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str], text: str, last: str
) -> None:
    """So does what is left behind, without a second look."""
    assert judged(gate, tmp_path, test_it=text) == 1
    out = capfd.readouterr().out
    assert out.splitlines()[-1] == last
    assert ("a second look" in out) == (last == "0 passed, 1 failed")


def test_more_failures_than_chance_would_have_get_no_second_look(gate: ModuleType) -> None:
    """So many have one cause."""
    account = gate.Account(failed={("some", f"test_{n}"): "" for n in range(gate.SECOND_LOOKS + 1)})
    assert gate.look_again(account, []) == []


def test_a_worker_that_dies_fails_its_file_alone(
    gate: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The next files are given to another worker; one without tests holds up nobody."""
    others = {"test_none": "", "test_other": "def test_passes(): pass"}
    assert judged(gate, tmp_path, test_dies=DIES, **others) == 1
    out = capfd.readouterr().out
    assert out.splitlines()[-2:] == ["FAILED some: test_dies.py", "1 passed, 1 failed"]
    assert "ended with code 3 in test_dies.py::test_dies" in out


def test_what_is_open_for_a_session_is_opened_once_for_all_files(gate: ModuleType, tmp_path: Path) -> None:
    """What a folder's conftest.py defines is found by each file, and ends after the last."""
    (tmp_path / "conftest.py").write_text(SERVER)
    assert judged(gate, tmp_path, test_one=ASKS, test_other=ASKS) == 0
    assert (tmp_path / "started").read_text() == "once "


def test_the_longest_begins_and_an_engines_files_count_together(gate: ModuleType, tmp_path: Path) -> None:
    """Those of one daemon run one after the other, so they begin before a file that takes longer than each."""
    place = gate.Place("some", (), (), tmp_path)
    rows = [("short", 1, ""), ("one", 4, "docker"), ("long", 5, ""), ("two", 3, "docker")]
    jobs = [gate.Job(place, [name], seconds, engine) for name, seconds, engine in rows]
    assert [job.tests[0] for job in gate.Gate(jobs, 2).waiting] == ["one", "two", "long", "short"]


def test_the_tests_of_a_file_that_need_an_engine_are_a_part_of_their_own(
    gate: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The rest waits for no engine. The parts are known the next time, and each test runs once."""
    for _ in range(2):
        assert judged(gate, tmp_path, test_mixed=MIXED) == 0
        assert capfd.readouterr().out.splitlines()[-1] == "2 passed, 0 failed"
        place = gate.Place("some", (), ["test_mixed.py"], tmp_path)
        assert [(job.tests, job.engine) for job in gate.jobs_of([place])] == [
            (["test_mixed.py"], ""), (["test_mixed.py"], "docker"),
        ]  # fmt: skip
