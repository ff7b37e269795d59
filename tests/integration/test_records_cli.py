"""Records on the command line, without a server: what a user types, and what they get."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

Cloche = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def cloche(tmp_path: Path) -> Cloche:
    """Return a function that runs the command line with a database of its own, and checks its exit code."""
    ours = {"CLOCHE_DATABASE": str(tmp_path / "records" / "records.db"), "CLOCHE_AUDIT": "off", "HOME": str(tmp_path)}
    known = {name: value for name, value in os.environ.items() if not name.startswith(("CLOCHE_", "SANDBOX_", "XDG_"))}

    def run(*words: str, code: int = 0, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", "cloche", *words],
            cwd=tmp_path,
            env={**known, **ours, **(env or {})},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == code, done.stderr
        return done

    return run


def test_a_development_environment_is_written_shown_checked_and_set_up(cloche: Cloche, tmp_path: Path) -> None:
    """`cloche devenv`: generate writes and stores a manifest, provision says which manager is missing."""
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "yarn.lock").write_text("")
    generated = json.loads(cloche("devenv", "generate", "shop", "--json").stdout)
    assert generated == json.loads((tmp_path / "shop" / "cloche-devenv.json").read_text())
    assert "yarn install --frozen-lockfile" in cloche("devenv", "show", "shop").stdout
    listed = json.loads(cloche("devenv", "list", "--json").stdout)["items"]
    assert [one["workspacePath"] for one in listed] == [str(tmp_path / "shop")]

    try:
        done = json.loads(cloche("devenv", "provision", "shop", "--name", "test-devenv", "--json", code=1).stdout)
    finally:
        cloche("sandbox", "kill", "test-devenv")
    assert (done["sandbox"], done["steps"][0]["status"]) == ("test-devenv", "error")
    assert "there is no yarn" in done["steps"][0]["error"]

    asks = {**generated, "limits": {"memory": "900g"}}
    (tmp_path / "shop" / "cloche-devenv.json").write_text(json.dumps(asks))
    assert "limits.memory: 900g is more than" in cloche("devenv", "check", "shop").stdout
    (tmp_path / "shop" / "cloche-devenv.json").write_text(json.dumps({**asks, "colour": "red"}))
    assert "unknown field 'colour'" in cloche("devenv", "check", "shop", code=2).stderr


def test_a_bug_is_reproduced(cloche: Cloche, tmp_path: Path) -> None:
    """`cloche repro`, from create to delete: the exit code says failed or error."""
    (tmp_path / "bug.py").write_text("print('seen'); raise SystemExit(3)\n")
    made = cloche("repro", "create", "bug.py", "--title", "wrong \x1b[31m code", "--session", "agent-7").stdout.strip()
    listed = cloche("repro", "list", "--session", "agent-7").stdout
    assert (made in listed, "\x1b" in listed) == (True, False)
    assert "exit code 3, expected 0" in cloche("repro", "run", made, code=1).stdout
    assert json.loads(cloche("repro", "show", made, "--json").stdout)["result"]["stdout"] == "seen\n"
    assert "level jail is required" in cloche("repro", "run", made, "--backend", "subprocess", code=125).stdout

    assert cloche("repro", "delete", made).stdout == f"deleted: {made}\n"
