"""What runs trusted code where the backend that was chosen is missing, and that nothing else ever falls back (S12)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import cloche

pytestmark = [pytest.mark.usefixtures("settings_of_nobody"), pytest.mark.usefixtures("no_docker")]

REFUSING = Path(__file__).parents[1] / "harness/programs/refusing.py"
RUN = """
import json, sys, cloche
try:
    result = cloche.run(**json.loads(sys.argv[1]))
    report = {"stdout": result.stdout, "level": str(result.enforcement.level), "meta": result.meta}
except cloche.ClocheError as error:
    report = {"error": type(error).__name__, "message": str(error)}
print(json.dumps(report, default=str))
"""
TRUSTED: dict[str, Any] = {"backend": "docker", "fallback": "process", "trusted": True}


@pytest.fixture
def no_docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let there be no daemon."""
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none")


def bare(tmp_path: Path, **keywords: object) -> dict[str, Any]:
    """Call `cloche.run` where the kernel isolates nothing."""
    words = [sys.executable, str(REFUSING), "kernel", sys.executable, "-c", RUN, json.dumps(keywords)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60, cwd=tmp_path)
    report: dict[str, Any] = json.loads(done.stdout or "null") or {"failed": done.stderr}
    return report


@pytest.mark.parametrize(
    "asked",
    [
        {"backend": "docker"},
        {"backend": "docker", "trusted": True},
        {"backend": "docker", "fallback": "process"},
        {"backend": "docker", "fallback": "process", "trusted": False},
    ],
)
def test_nothing_falls_back_by_itself(asked: dict[str, Any]) -> None:
    """It takes the policy's fallback and the caller's word for the code; the error has the remedy."""
    with pytest.raises(cloche.BackendUnavailable, match=r"nobody answers.*systemctl start docker") as caught:
        cloche.run("print(1)", **asked)
    assert ("is for trusted code only" in str(caught.value)) == ("fallback" in asked)


def test_trusted_code_runs_in_the_local_jail_first() -> None:
    """And the result says that it did, in a sandbox and a session too."""
    result = cloche.run("print(1)", **TRUSTED)
    told = result.meta["fallback"]
    assert (result.stdout, result.meta["backend"]) == ("1\n", "local")
    assert result.enforcement.level >= cloche.Level.CONFINED
    assert (told["asked"], told["used"], told["level"]) == ("docker", "local", str(result.enforcement.level))
    assert "nobody answers" in told["reason"]
    with cloche.Sandbox(live=False, **TRUSTED) as sandbox:
        assert sandbox.notes["fallback"] == told
        assert sandbox.run("print(1)").meta["fallback"] == told
        assert sandbox.session().run("1").meta["fallback"] == told


@pytest.mark.parametrize("require", ["gvisor", "vm"])
def test_a_required_level_is_never_traded(require: str) -> None:
    """The local jail is less, so it is no fallback."""
    with pytest.raises(cloche.BackendUnavailable, match=f"level {require} is required, so no weaker level may run"):
        cloche.run("print(1)", require=require, **TRUSTED)


def test_a_name_that_stands_for_a_level_is_never_traded(monkeypatch: pytest.MonkeyPatch) -> None:
    """`gvisor` asks for gVisor: where it is missing, with docker and without, nothing less runs instead."""
    monkeypatch.setenv("CLOCHE_RUNSC", "none")
    with pytest.raises(cloche.BackendUnavailable, match="level gvisor is required, so no weaker backend may run"):
        cloche.run("print(1)", **{**TRUSTED, "backend": "gvisor"})


def test_the_process_comes_last(tmp_path: Path) -> None:
    """Where nothing isolates, trusted code runs as a child process, and the level says so."""
    report = bare(tmp_path, code="print(1)", **TRUSTED)
    assert (report.get("stdout"), report.get("level")) == ("1\n", "process"), report
    assert report["meta"]["fallback"]["level"] == "process"


@pytest.mark.parametrize("backend", ["local", "auto", "docker"])
def test_untrusted_code_runs_nowhere_there(tmp_path: Path, backend: str) -> None:
    """Whatever the policy falls back to."""
    report = bare(tmp_path, code="print(1)", backend=backend, fallback="process")
    assert report.get("error") == "BackendUnavailable", report


@pytest.mark.parametrize("backend", ["local", "auto"])
def test_what_isolates_nothing_is_missing_too(tmp_path: Path, backend: str) -> None:
    """Trusted code falls back from the local backend as from any other."""
    report = bare(tmp_path, code="print(1)", **{**TRUSTED, "backend": backend})
    assert (report.get("stdout"), report.get("level")) == ("1\n", "process"), report


@pytest.mark.parametrize(
    ("asked", "kind", "said"),
    [
        ({"network": "off"}, "PolicyDenied", "network off (argument)"),
        ({"preset": "standard"}, "PolicyDenied", "network off (preset standard (argument))"),
        ({"require": "network"}, "PolicyDenied", "requires the control network"),
        ({"require": "jail"}, "BackendUnavailable", "level jail is required, so no weaker level may run"),
        ({"require": "filesystem"}, "BackendUnavailable", "filesystem is required but would be absent"),
        ({"tier": 3}, "BackendUnavailable", "level jail is required"),
        ({"level": "jail"}, "BackendUnavailable", "level jail is required, so no weaker backend may run"),
    ],
)
def test_what_a_process_does_not_give_is_refused(tmp_path: Path, asked: dict[str, Any], kind: str, said: str) -> None:
    """Trusted code whose policy explicitly asks for more does not run; a network that is off is such a word."""
    report = bare(tmp_path, code="print(1)", **asked, **TRUSTED)
    assert report.get("error") == kind, report
    assert said in report["message"]


@pytest.mark.parametrize(("screen", "refused"), [(None, True), ("block", True), ("warn", False), ("off", True)])
def test_the_screen_reads_what_a_process_is_to_run(tmp_path: Path, screen: str | None, refused: bool) -> None:
    """The strict one unless another one was asked for; never none."""
    report = bare(tmp_path, code="import subprocess; print(1)", screen=screen, **TRUSTED)
    assert (report.get("error") == "PolicyDenied") == refused, report


def test_the_level_process_by_name_is_screened_as_well() -> None:
    """As a fallback it is one, however it was asked for."""
    with pytest.raises(cloche.PolicyDenied, match="subprocess"):
        cloche.run("import subprocess", level="process", **TRUSTED)
    assert cloche.run("print(1)", level="process", **TRUSTED).meta["fallback"]["level"] == "process"


def test_the_command_line_says_that_it_fell_back() -> None:
    """On stderr, in one line; JSON has it in the meta."""
    words = [
        sys.executable,
        "-m",
        "cloche",
        "run",
        "--backend=docker",
        "--fallback=process",
        "--trusted",
        "-c",
        "print(1)",
    ]
    done = subprocess.run(words, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    assert (done.returncode, done.stdout) == (0, "1\n")
    assert "fallback: this ran on backend local at level" in done.stderr
    assert "nobody answers" in done.stderr
    done = subprocess.run([*words, "--json"], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    assert json.loads(done.stdout)["meta"]["fallback"]["asked"] == "docker"
