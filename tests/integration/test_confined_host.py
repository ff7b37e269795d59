"""A host that refuses user namespaces, made for real in the two ways that hosts do it (see `refusing.py`)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REFUSING = Path(__file__).parents[1] / "harness/programs/refusing.py"
WAYS = ("seccomp", "sysctl")

RUN = """
import json, sys, cloche
try:
    result = cloche.run(**json.loads(sys.argv[1]))
    report = {"stdout": result.stdout, "status": str(result.status), "enforcement": result.enforcement.as_dict()}
except cloche.ClocheError as error:
    report = {"error": type(error).__name__, "message": str(error)}
print(json.dumps(report))
"""


def refused(way: str, *command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a Python command where user namespaces are refused."""
    words = [sys.executable, str(REFUSING), way, sys.executable, *command]
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=60, cwd=cwd)


def run(way: str, cwd: Path, **keywords: object) -> dict[str, Any]:
    """Call `cloche.run` there and return its report."""
    done = refused(way, "-c", RUN, json.dumps(keywords), cwd=cwd)
    report: dict[str, Any] = json.loads(done.stdout or "null") or {"failed": done.stderr}
    return report


@pytest.mark.parametrize("way", WAYS)
def test_user_namespaces_really_are_refused_there(way: str, tmp_path: Path) -> None:
    """The premise: no process there can make one."""
    code = "from cloche.jail.syscalls import clone, unshare; unshare(0x10000000)"
    assert "Error" in refused(way, "-c", code, cwd=tmp_path).stderr


@pytest.mark.parametrize("way", WAYS)
def test_a_plain_run_works_and_says_what_held(way: str, tmp_path: Path) -> None:
    """Code runs at level confined, and the result says so with what is less than at level jail."""
    report = run(way, tmp_path, code="print(6 * 7)")
    assert (report.get("stdout"), report.get("status")) == ("42\n", "ok"), report
    assert report["enforcement"]["level"] == "confined"
    rows = report["enforcement"]["controls"]
    assert (rows["network"]["state"], rows["syscalls"]["state"]) == ("enforced", "enforced")
    assert rows["filesystem"]["state"] == "partial"
    assert rows["filesystem"]["reason"]


@pytest.mark.parametrize("way", WAYS)
def test_requiring_a_jail_is_refused_with_the_remedy(way: str, tmp_path: Path) -> None:
    """Less than what is required is an error that says why and what to do, never a silent fallback."""
    report = run(way, tmp_path, code="print(1)", require="jail")
    assert report.get("error") == "BackendUnavailable", report
    assert "namespaces are refused" in report["message"]
    assert "To fix it:" in report["message"]
    if way == "sysctl":
        assert "user.max_user_namespaces" in report["message"]


@pytest.mark.parametrize("way", WAYS)
def test_the_doctor_reports_confined_with_the_remedy(way: str, tmp_path: Path) -> None:
    """The level is measured, the reason is the kernel's answer, and the exit code is 0: code can run."""
    done = refused(way, "-m", "cloche", "doctor", "--json", cwd=tmp_path)
    data = json.loads(done.stdout)
    assert (done.returncode, data["level"]) == (0, "confined")
    assert "namespaces are refused" in data["reason"]
    assert data["remedy"]
    statuses = {trial["level"]: trial["status"] for trial in data["trials"]}
    assert statuses == {"jail": "refused", "confined": "ok", "process": "ok"}
    features = {feature["name"]: feature for feature in data["features"]}
    assert not features["user namespace"]["works"]
    assert features["user namespace"]["remedy"] == data["remedy"]
    assert features["landlock"]["works"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("attempt", "code"),
    [
        ("read the host's files", "open('/proc/1/status').read()"),
        ("open a socket", "import socket; socket.socket()"),
        ("write outside", "open('/var/tmp/cloche-was-here', 'w')"),
        ("list the host's root", "import os; os.listdir('/')"),
        ("signal the parent's parent", "import os; os.kill(1, 0)"),
    ],
)
def test_what_confined_promises_holds_there(way: str, attempt: str, code: str, tmp_path: Path) -> None:
    """Without namespaces, Landlock and the filter still refuse this."""
    report = run(way, tmp_path, code=f"try:\n    {code}\nexcept OSError as e:\n    print('refused', e.errno)")
    assert report.get("stdout", "").startswith("refused"), f"{attempt}: {report}"


ROOT_OF_NOTHING = f"""
import os, sys
sys.path.insert(0, {str(REFUSING.parent)!r})
import refusing
refusing.enter_namespace("0 0 1", "0 0 1")
os.execvp(sys.executable, [sys.executable, "-c", {RUN!r}, sys.argv[1]])
"""


@pytest.mark.root
@pytest.mark.parametrize(("keywords", "error"), [({}, "BackendUnavailable"), ({"level": "process"}, None)])
def test_no_level_below_confined_is_taken_by_itself(
    keywords: dict[str, str], error: str | None, tmp_path: Path
) -> None:
    """Where root can neither make a jail nor give up its id, code runs at level process by name, or not at all."""
    words = [sys.executable, "-c", ROOT_OF_NOTHING, json.dumps({"code": "print(1)", **keywords})]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60, cwd=tmp_path)
    assert json.loads(done.stdout).get("error") == error, done.stderr


@pytest.mark.parametrize("level", ["confined", "process"])
def test_a_workspace_needs_no_locks(level: str, tmp_path: Path) -> None:
    """Some file systems have none; then nobody takes the folder for one that was left."""
    assert run("locks", tmp_path, code="print(1)", level=level)["stdout"] == "1\n"
