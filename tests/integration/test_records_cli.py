"""Records on the command line, without a server: what a user types, and what they get."""

import json
import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from cloche.cli.app import root

Cloche = Callable[..., Result]


@pytest.fixture
def cloche(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cloche:
    """Return a function that runs the command line with a database of its own, and checks its exit code.

    In this process: a new one would import the database's library for each command.
    """
    for name in [name for name in os.environ if name.startswith(("CLOCHE_", "SANDBOX_", "XDG_"))]:
        monkeypatch.delenv(name)
    ours = {"CLOCHE_DATABASE": str(tmp_path / "records" / "records.db"), "CLOCHE_AUDIT": "off", "HOME": str(tmp_path)}
    for name, value in ours.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)

    def run(*words: str, code: int = 0, env: Mapping[str, str] | None = None) -> Result:
        done = CliRunner().invoke(root, words, env=env, prog_name="cloche")
        assert done.exit_code == code, done.stderr
        return done

    return run


def test_an_environment_is_recorded_compared_and_set_again(cloche: Cloche, tmp_path: Path) -> None:
    """`cloche snapshot`, from create to delete: nothing of a secret, nothing of a stranger's that a terminal obeys."""
    folder = tmp_path / "project"
    folder.joinpath(".git", "objects").mkdir(parents=True)
    folder.joinpath(".git", "HEAD").write_text("ref: refs/heads/\x1b[31mred\n")
    folder.joinpath("requirements.txt").write_text("rich==13.9.3\n")
    asked = ("snapshot", "create", "--workspace", "project", "--session", "s", "--env", "A", "--env", "B_TOKEN")
    one = cloche(*asked, env={"A": "it's $HOME\nagain", "B_TOKEN": "hush-hush"}).stdout.strip()
    folder.joinpath("requirements.txt").write_text("rich==13.9.4\n")
    two = json.loads(cloche(*asked, "--json", env={"A": "2", "B_TOKEN": "other"}).stdout)["id"]

    listed = cloche("snapshot", "list", "--session", "s").stdout
    assert listed.index(two) < listed.index(one)
    assert "\x1b" not in listed
    shown = cloche("snapshot", "show", one).stdout
    assert {"env B_TOKEN=***", "env A=it's $HOME\\nagain", "branch: \\x1b[31mred", "git ?? requirements.txt"} <= set(
        shown.splitlines()
    )
    assert cloche("snapshot", "compare", one, two).stdout.splitlines() == [
        "M A: it's $HOME\\nagain -> 2",
        "M B_TOKEN: *** -> ***",
        "M python rich: 13.9.3 -> 13.9.4",
    ]
    log = {"CLOCHE_AUDIT": str(tmp_path / "log")}
    assert cloche("snapshot", "replicate", one, env=log).stderr == "cloche: to be filled in: B_TOKEN\n"
    event = json.loads(cloche("audit", "show", "--json", env=log).stdout)
    assert (event["kind"], event["snapshot"], event["path"]) == ("replicate", one, str(folder))
    script = folder / ".cloche-env-replication.sh"
    done = subprocess.run(
        ["sh", "-c", f'. {script}; printf %s "$A"'], capture_output=True, text=True, check=True, env={}
    )
    assert done.stdout == "it's $HOME\nagain"
    assert "exists already" in cloche("snapshot", "replicate", one, code=125).stderr
    told = json.loads(cloche("snapshot", "replicate", one, "--overwrite", "--json").stdout)
    assert told == {"path": script.name, "variables": 1, "placeholders": ["B_TOKEN"], "skipped": []}
    everything = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"hush-hush" not in everything

    assert cloche("snapshot", "delete", one, "--yes").stdout == f"deleted {one}\n"
    assert "there is no snapshot" in cloche("snapshot", "show", one, code=125).stderr
    assert "is not an id" in cloche("snapshot", "show", "../x", code=2).stderr


# cloche workspace-snapshot


def _workspace(folder: Path) -> Path:
    (folder / "project/src").mkdir(parents=True)
    (folder / "project/src/a.py").write_text("print(1)\n")
    (folder / "project/\x1b[31m").write_text("a name that colours a terminal")
    return folder / "project"


def test_a_workspace_is_recorded_compared_and_restored(cloche: Cloche, tmp_path: Path) -> None:
    """Its id is printed alone, for scripts; names are escaped; --json has the documents of the reference."""
    project = _workspace(tmp_path)
    first = cloche("workspace-snapshot", "create", "--workspace", "project", "--contents").stdout.strip()
    (project / "src/a.py").write_text("print(2)\n")
    (project / "new").touch()
    second: dict[str, Any] = json.loads(
        cloche("workspace-snapshot", "create", "--workspace", "project", "--session", "agent-7", "--json").stdout
    )
    assert cloche("workspace-snapshot", "diff", first, second["id"]).stdout == "+ new\nM src/a.py\n"
    assert "\\x1b[31m" in cloche("workspace-snapshot", "show", first).stdout
    listed = json.loads(cloche("workspace-snapshot", "list", "--session", "agent-7", "--json").stdout)
    assert [one["id"] for one in listed["items"]] == [second["id"]]
    log = {"CLOCHE_AUDIT": str(tmp_path / "log")}
    done = cloche("workspace-snapshot", "restore", first, "--prune", "--yes", env=log)
    event = json.loads(cloche("audit", "show", "--json", env=log).stdout)
    assert (event["kind"], event["snapshot"], event["path"]) == ("restore", first, str(project))
    assert done.stdout == "removed new\nrestored src/a.py\n1 removed, 1 restored, 1 unchanged\n"
    assert (project / "src/a.py").read_text() == "print(1)\n"
    assert cloche("workspace-snapshot", "delete", first, "--yes").stdout == f"deleted {first}\n"
    assert (
        json.loads(cloche("workspace-snapshot", "show", first, "--json", code=125).stdout)["error"]["type"]
        == "NotFound"
    )


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("create", "--workspace", "nowhere"), "nowhere cannot be opened: No such file or directory"),
        (("show", "../../etc/passwd"), "is not an id"),
        (("list", "--limit", "0"), "limit: 0 is not between"),
    ],
)
def test_wrong_usage_of_workspace_snapshots_is_said(cloche: Cloche, words: tuple[str, ...], told: str) -> None:
    """In one line, with exit code 2."""
    done = cloche("workspace-snapshot", *words, code=2)
    assert told in done.stderr
    assert done.stderr.count("\n") == 1


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
        cloche("sandbox", "kill", "--yes", "test-devenv")
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

    assert cloche("repro", "delete", made, "--yes").stdout == f"deleted: {made}\n"
