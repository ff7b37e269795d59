"""Records on the command line, without a server: what a shell sees of them."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings_of_nobody: None) -> Run:
    """Return a function that runs `cloche` in a folder of the test's own, with records of its own."""
    monkeypatch.setenv("CLOCHE_DATABASE", str(tmp_path / "records/records.db"))

    def start(*words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "cloche", *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == code, done.stderr
        return done

    return start


# cloche workspace-snapshot


def _workspace(folder: Path) -> Path:
    (folder / "project/src").mkdir(parents=True)
    (folder / "project/src/a.py").write_text("print(1)\n")
    (folder / "project/\x1b[31m").write_text("a name that colours a terminal")
    return folder / "project"


def test_a_workspace_is_recorded_compared_and_restored(run: Run, tmp_path: Path) -> None:
    """Its id is printed alone, for scripts; names are escaped; --json has the documents of the reference."""
    project = _workspace(tmp_path)
    first = run("workspace-snapshot", "create", "--workspace", "project", "--contents").stdout.strip()
    (project / "src/a.py").write_text("print(2)\n")
    (project / "new").touch()
    second: dict[str, Any] = json.loads(
        run("workspace-snapshot", "create", "--workspace", "project", "--session", "agent-7", "--json").stdout
    )
    assert run("workspace-snapshot", "diff", first, second["id"]).stdout == "+ new\nM src/a.py\n"
    assert "\\x1b[31m" in run("workspace-snapshot", "show", first).stdout
    listed = json.loads(run("workspace-snapshot", "list", "--session", "agent-7", "--json").stdout)
    assert [one["id"] for one in listed["items"]] == [second["id"]]
    done = run("workspace-snapshot", "restore", first, "--prune")
    assert done.stdout == "removed new\nrestored src/a.py\n1 removed, 1 restored, 1 unchanged\n"
    assert (project / "src/a.py").read_text() == "print(1)\n"
    assert run("workspace-snapshot", "delete", first).stdout == f"deleted {first}\n"
    assert (
        json.loads(run("workspace-snapshot", "show", first, "--json", code=125).stdout)["error"]["type"] == "NotFound"
    )


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("create", "--workspace", "nowhere"), "nowhere cannot be opened: No such file or directory"),
        (("show", "../../etc/passwd"), "is no id"),
        (("list", "--limit", "0"), "limit: 0 is not between"),
    ],
)
def test_wrong_usage_of_workspace_snapshots_is_said(run: Run, words: tuple[str, ...], told: str) -> None:
    """In one line, with exit code 2."""
    done = run("workspace-snapshot", *words, code=2)
    assert told in done.stderr
    assert done.stderr.count("\n") == 1
