"""The gate looks twice at what failed, and says in its last lines what came of it."""

from __future__ import annotations

import importlib.util
import os
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
MANY = 'import pytest\n@pytest.mark.parametrize("n", range(11))\ndef test_fails(n): assert False\n'
WORDS = ("-m", "pytest", "-p", "no:cacheprovider", "-p", "tests.conftest", "-c", "/dev/null", "--rootdir", ".")


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return scripts/gate.py, at work in a folder of its own."""
    spec = importlib.util.spec_from_file_location("gate", ROOT / "scripts" / "gate.py")
    assert spec is not None
    assert spec.loader is not None
    gate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(gate)
    monkeypatch.setattr(gate, "ROOT", tmp_path)
    monkeypatch.setattr(gate, "WORK", tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    for name in [name for name in os.environ if name.startswith(("PYTEST_XDIST", "TESTED_BESIDE"))]:
        monkeypatch.delenv(name)
    return gate


def judged(gate: ModuleType, folder: Path, text: str) -> int:
    """Judge one module of tests."""
    (folder / "test_it.py").write_text(text)
    command = [sys.executable, str(ROOT / "scripts" / "adopt.py"), sys.executable, *WORDS]
    return int(gate.judge([gate.Lane("some", command, folder, ["test_it.py"])]))


def test_what_passes_alone_is_named_last_and_fails_nothing(
    gate: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A failure by chance is printed under "passed at the second look"."""
    assert judged(gate, tmp_path, FAILS_ONCE) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[-3:] == ["2 passed, 0 failed", "passed at the second look:", "  some: test_it.py::test_fails_once"]


@pytest.mark.parametrize(
    ("text", "last"),
    [
        ("def test_fails(): assert False\n", "0 passed, 1 failed"),
        (MANY, "0 passed, 11 failed"),
        pytest.param(LEAVES, "1 passed, 1 failed", marks=pytest.mark.soak),
    ],
    ids=["one", "many", "left behind"],
)
def test_what_fails_twice_fails_the_gate(
    gate: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str], text: str, last: str
) -> None:
    """So do more failures than chance would have, without a second look, and what is left behind."""
    assert judged(gate, tmp_path, text) == 1
    out = capfd.readouterr().out
    assert out.splitlines()[-1] == last
    assert ("a second look, alone" in out) == (last == "0 passed, 1 failed")
