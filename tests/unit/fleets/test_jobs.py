"""`cloche fleet` from outside of a cluster: what it sends to Ray's Jobs API, and what it says when that fails."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from cloche import __version__
from cloche.cli import _fleet_jobs
from cloche.cli.app import root
from cloche.cli.fleet import examined
from cloche.core.fleet_settings import FleetSettings
from cloche.fleets.ray import jobs

TOKEN = "a-token-of-the-cluster"
SHA256 = "c" * 64
UP = {
    "engine": "ray", "leases": 0, "waiting": 0, "granted": 0, "refused": 0, "version": __version__, "nodes": [],
    "service": {"address": "https://10.0.0.7:4711", "certificate": SHA256},
}  # fmt: skip


class Dashboard(HTTPServer):
    """Answer as Ray's dashboard does; `status` and `log` are those of each job, `refuses` the answer to everything."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked = list[tuple[str, str, Any]]()
        self.statuses, self.log = ["PENDING", "RUNNING", "SUCCEEDED"], json.dumps(UP)
        self.refuses: tuple[int, str] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def entrypoint(self) -> str:
        """Return the command of the job."""
        return next(str(body["entrypoint"]) for method, path, body in self.asked if (method, path) == SUBMIT)


SUBMIT = "POST", "/api/jobs/"


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: Dashboard

    def do_POST(self) -> None:
        self._answer("POST")

    def do_GET(self) -> None:
        self._answer("GET")

    def _answer(self, method: str) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.asked.append((method, self.path, json.loads(body) if body else None))
        status, text = self.server.refuses or self._done(method)
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def _done(self, method: str) -> tuple[int, str]:
        server = self.server
        if self.headers["Authorization"] != f"Bearer {TOKEN}":
            return (403, "Forbidden") if "Authorization" in self.headers else (401, "Unauthorized")
        if (method, self.path) == SUBMIT:
            return 200, json.dumps({"job_id": "raysubmit_1", "submission_id": "raysubmit_1"})
        if self.path == "/api/version":
            return 200, json.dumps({"version": "4", "ray_version": "2.60.0"})
        if self.path.endswith("/logs"):
            return 200, json.dumps({"logs": f"Running entrypoint for job raysubmit_1: ...\n{server.log}\n"})
        if self.path.endswith("/stop"):
            return 200, json.dumps({"stopped": True})
        status = server.statuses.pop(0) if len(server.statuses) > 1 else server.statuses[0]
        return 200, json.dumps({"status": status, "message": "of Ray"})

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def dashboard(monkeypatch: pytest.MonkeyPatch) -> Iterator[Dashboard]:
    """Serve; the caller has the token."""
    monkeypatch.setattr(jobs, "LOOK_S", 0.01)
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    with Dashboard() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def fleet(*words: str) -> int:
    """Run `cloche fleet`, and return its exit code."""
    code: int = root.main(["fleet", *words], standalone_mode=False)
    return code


def test_the_doctor_outside_needs_no_ray_and_starts_no_job(
    dashboard: Dashboard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks the dashboard for its version; a token that is refused is named."""
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setenv("CLOCHE_FLEET_ADDRESS", dashboard.url)
    found = examined("ray")
    assert found is not None
    assert (found.version, found.problem) == ("2.60.0", "")
    assert [path for _, path, _ in dashboard.asked] == ["/api/version"]
    monkeypatch.setenv("RAY_AUTH_TOKEN", "another")
    found = examined("ray")
    assert found is not None
    assert "refuses this token" in found.problem


def test_up_prints_an_account_whose_key_the_cluster_never_sees(
    dashboard: Dashboard, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Standard output is a .env; the job has the key's hash, and the settings that are not the defaults."""
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setenv("CLOCHE_FLEET_IDLE", "2h")
    assert fleet("up", "--address", dashboard.url, "--runtime-env-pip", "cloche[node,server]") == 0
    lines = dict(line.split("=", 1) for line in capsys.readouterr().out.splitlines())
    key = lines.pop("CLOCHE_REMOTE_KEY")
    assert lines == {
        "SANDBOX_TYPE": "cloche", "CLOCHE_REMOTE_URL": "https://10.0.0.7:4711", "CLOCHE_REMOTE_CERTIFICATE": SHA256,
    }  # fmt: skip
    assert hashlib.sha256(key.encode()).hexdigest() in shlex.split(dashboard.entrypoint)
    assert "CLOCHE_FLEET_IDLE=7200s" in dashboard.entrypoint
    assert "CLOCHE_FLEET_SHARE" not in dashboard.entrypoint
    sent = json.dumps(dashboard.asked)
    assert key not in sent
    assert '"pip": ["cloche[node,server]"]' in sent


@pytest.mark.parametrize("name", ["address", "certificate"])
def test_an_answer_adds_no_line_to_an_account(
    dashboard: Dashboard, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """A network in between, or a log that another user writes to, gives the caller no settings."""
    service = {**UP["service"], name: f"{UP['service'][name]}\nCLOCHE_TRUSTED=true"}  # type: ignore[dict-item,index]
    dashboard.log = json.dumps({**UP, "service": service})
    assert fleet("up", "--address", dashboard.url) != 0
    printed = capsys.readouterr()
    assert (printed.out, "names no service" in printed.err) == ("", True)


def test_other_commands_are_jobs_as_well(dashboard: Dashboard, capsys: pytest.CaptureFixture[str]) -> None:
    """Each prints what it prints inside."""
    dashboard.log = json.dumps({"node": "node-1"})
    assert fleet("drain", "node", "--address", dashboard.url, "--timeout", "5s") == 0
    assert capsys.readouterr().out == "node-1 takes no lease, and has none\n"
    assert dashboard.entrypoint.endswith("-m cloche fleet drain node --timeout 5s --json")
    assert fleet("top", "--address", dashboard.url) == 2


def test_the_settings_of_a_fleet_are_passed_on() -> None:
    """Those that are not the defaults, as the configuration reads them; the address is where the job is."""
    settings = FleetSettings(address="http://h", share=0.25, reserve_cpu=True, ttl_s=90.0, quota=3, wait_s=7.5)
    variables = _fleet_jobs.variables_of(settings)
    assert variables == {
        "CLOCHE_FLEET_SHARE": "0.25", "CLOCHE_FLEET_RESERVE_CPU": "true", "CLOCHE_FLEET_TTL": "90s",
        "CLOCHE_FLEET_QUOTA": "3", "CLOCHE_FLEET_WAIT": "7.5s",
    }  # fmt: skip


def test_the_cluster_must_have_this_version() -> None:
    """The job's first command says which it has; without Cloche it says so, too."""
    folder = os.path.dirname(sys.executable)
    for version, words in (("0.0.0", [jobs.INSTALLED, __version__, f"{folder}/python"]), (__version__, [])):
        made = jobs.RayJobs(address="http://h", version=version)._entrypoint([], {}).partition("&&")[0]
        environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
        ran = subprocess.run(["sh", "-c", made], env=environment, capture_output=True, text=True, check=False)
        assert (ran.returncode, ran.stderr.split()) == (1 if words else 0, words)


FAILED = {
    "log": ("Traceback\nValueError: of the job", "ValueError: of the job", "The dashboard shows all of its log"),
    "error": ('{"error": {"type": "NotFound", "message": "0 nodes have"}}', "cloche: 0 nodes have", ""),
    "version": (f"{jobs.INSTALLED} 0.0.9 /bin/python", "(/bin/python) has Cloche 0.0.9", "--runtime-env-pip"),
    "missing": (f"{jobs.INSTALLED}  /bin/python", "(/bin/python) has no Cloche", "--runtime-env-pip"),
}


@pytest.mark.parametrize("name", FAILED)
def test_a_job_that_failed_says_why(dashboard: Dashboard, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """By the command's own error, or by the last lines of the job's log."""
    dashboard.log, reason, remedy = FAILED[name]
    dashboard.statuses = ["FAILED"]
    assert fleet("status", "--address", dashboard.url) != 0
    said = capsys.readouterr().err
    assert (reason in said, remedy in said) == (True, True), said


REFUSED = {
    "no token": ({"RAY_AUTH_TOKEN": ""}, None, "asks for a token (401). Set RAY_AUTH_TOKEN"),
    "wrong token": ({"RAY_AUTH_TOKEN": "other"}, None, "refuses this token (403). Set RAY_AUTH_TOKEN"),
    "no Ray": ({}, (200, "<html>"), "is not the Jobs API of Ray: status 200. Give the address"),
    "no such route": ({}, (404, "not found"), "is not the Jobs API of Ray: status 404. Give the address"),
    "trouble": ({}, (500, "Traceback\nno agent"), "answers 500: Traceback no agent"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_dashboard_that_refuses_is_told(
    dashboard: Dashboard, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """With the remedy, and without the token."""
    variables, dashboard.refuses, reason = REFUSED[name]
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    assert fleet("status", "--address", dashboard.url) != 0
    said = capsys.readouterr().err
    assert reason in said
    assert TOKEN not in said


def test_where_nothing_listens_the_port_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """With what a dashboard needs."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        assert fleet("status", "--address", f"http://127.0.0.1:{taken.getsockname()[1]}") != 0
    said = capsys.readouterr().err
    assert "no dashboard of Ray answers at http://127.0.0.1:" in said
    assert "ray[default]" in said


def test_a_job_that_takes_too_long_is_stopped(
    dashboard: Dashboard, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is left to run without its caller."""
    monkeypatch.setattr(_fleet_jobs, "DONE_S", 0.1)
    dashboard.statuses = ["PENDING"]
    assert fleet("status", "--address", dashboard.url) != 0
    assert "is PENDING after 0.1 s, and is stopped" in capsys.readouterr().err
    assert dashboard.asked[-1][:2] == ("POST", "/api/jobs/raysubmit_1/stop")
