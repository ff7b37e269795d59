"""Cloche inside a plain container, with docker's default profile and no privileges, as root and as an ordinary user."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from cloche.backends.container_profile import FILE
from tests.harness.containers import Daemon, lay_out, run_inside

pytestmark = [pytest.mark.soak, pytest.mark.root]
# Whom nobody else on the machine is: what a user may start at most counts all that they have, in a container or not.
ORDINARY = f"{61_300 + os.getpid() % 3_000}:61234"
USERS = pytest.mark.parametrize("user", ["0:0", ORDINARY], ids=["root", "user"])
# But for those that build a host, or a service with capabilities, of namespaces, which a container may not make.
IN_CONTAINER = "confined and not test_confined_network and not hands_on_none"
# What `cloche doctor` says to do, in docker's words.
REMEDY = (f"--security-opt=seccomp={FILE}", "--security-opt=systempaths=unconfined")
RUN = """
import json, sys, cloche
try:
    result = cloche.run(**json.loads(sys.argv[1]))
    report = {"stdout": result.stdout, "status": result.status, "enforcement": result.enforcement.as_dict()}
except cloche.ClocheError as error:
    report = {"error": type(error).__name__, "message": str(error)}
print(json.dumps(report))
"""
LIVE = """
import cloche
with cloche.Sandbox(live=False) as sandbox:
    sandbox.write_file("in", b"given")
    result = sandbox.run("open('out', 'w').write(open('in').read() + ' back')")
    assert result.ok and str(result.enforcement.level) == "confined", result
    assert sandbox.read_file("out") == b"given back"
    assert sandbox.run("cat out; read x; echo $x", language="bash", stdin="y\\n").stdout == "given backy\\n"
    assert sandbox.run("while True: pass", timeout=0.5).timed_out
    session = sandbox.session()
    session.run("x = 41")
    assert session.run("x + 1").value == 42
print("all of it")
"""


PRIVATE_HOME = """
import os, sys, cloche
os.chmod(os.environ["HOME"], 0o700)
with cloche.Sandbox() as sandbox:
    print(sandbox.is_live, sandbox.exec(["echo", "there"]).stdout.strip())
    try: sandbox.install("six")
    except cloche.BackendUnavailable as error: print("nothing can be installed" in str(error))
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give what is shown to a container."""
    return lay_out(tmp_path_factory.mktemp("project"))


def run(docker: Daemon, project: Path, *options: str, **keywords: object) -> dict[str, Any]:
    """Call `cloche.run` in a container and return its report."""
    image = docker.image("cloche-test:host")
    done = run_inside(docker, project, ["python3", "-c", RUN, json.dumps(keywords)], image=image, options=options)
    report: dict[str, Any] = json.loads(done.stdout or "null") or {"failed": done.stderr}
    return report


@USERS
def test_it_runs_at_confined_and_says_so(docker: Daemon, project: Path, user: str) -> None:
    """With the network refused, and what is less than in a jail named with the reason."""
    report = run(docker, project, f"--user={user}", code="print(6 * 7)")
    assert (report.get("stdout"), report.get("status")) == ("42\n", "ok"), report
    told = report["enforcement"]
    assert (told["level"], told["controls"]["network"]["state"]) == ("confined", "enforced")
    assert told["controls"]["syscalls"]["state"] == "enforced"
    for control in ("filesystem", "memory", "cpu", "disk"):
        assert (told["controls"][control]["state"], bool(told["controls"][control]["reason"])) == ("partial", True)
    assert told["controls"]["identity"]["state"] == ("enforced" if user == "0:0" else "partial")


WARM = """
import json, statistics, subprocess, sys, time, cloche

def seconds(work):
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun

starts = []
run = lambda: starts.append(cloche.run("pass").meta["start"])
plain = lambda: subprocess.run([sys.executable, "-c", "pass"], check=True)
deadline = time.monotonic() + 60
while starts[-3:] != ["pooled"] * 3 and time.monotonic() < deadline:
    run()
    time.sleep(0.2)
starts.clear()
pairs = [(seconds(run), seconds(plain)) for _ in range(40)]
medians = [statistics.median(column) for column in zip(*pairs)]
print(json.dumps({"pooled": starts.count("pooled"), "ratio": medians[0] / medians[1]}))
"""


@USERS
def test_single_runs_start_warm_there(docker: Daemon, project: Path, user: str) -> None:
    """In guests that were built ahead, in less time than an interpreter takes to start."""
    image = docker.image("cloche-test:host")
    done = run_inside(docker, project, ["python3", "-c", WARM], image=image, options=[f"--user={user}"])
    found = json.loads(done.stdout or "null") or {"failed": done.stderr}
    print(found)
    assert found.get("pooled") == 40, found
    assert found["ratio"] < 0.7, found


@USERS
def test_requiring_a_jail_is_refused_there(docker: Daemon, project: Path, user: str) -> None:
    """With why, and with what would help in a container."""
    report = run(docker, project, f"--user={user}", code="print(1)", require="jail")
    assert report.get("error") == "BackendUnavailable", report
    assert "namespaces are refused" in report["message"]
    assert "--security-opt seccomp=FILE --security-opt systempaths=unconfined" in report["message"]
    assert ("--user 1000:1000" in report["message"]) == (user == "0:0")


def test_an_interpreter_in_a_private_folder_is_an_error_with_a_remedy(docker: Daemon, project: Path) -> None:
    """Root of a container cannot let another id into /root: a sentence says what to do, and done it works."""
    make = "chmod 700 /root && python3 -m venv --without-pip /root/venv && {} /root/venv/bin/python -c '{}' '{}'"
    image = docker.image("cloche-test:host")
    for remedy in ("", "chmod o+x /root &&"):
        script = make.format(remedy, RUN, json.dumps({"code": "print(6 * 7)"}))
        report = json.loads(run_inside(docker, project, ["bash", "-c", script], image=image).stdout)
        if remedy:
            assert report.get("stdout") == "42\n", report
        else:
            assert report.get("error") == "BackendUnavailable", report
            assert "To fix it: chmod o+x /root" in report["message"]


def test_a_private_home_closes_no_sandbox_to_root(docker: Daemon, project: Path) -> None:
    """Root keeps packages in a home that guests cannot walk through: sandboxes open, and nothing is added to them."""
    image, words = docker.image("cloche-test:host"), ["python3", "-c", PRIVATE_HOME]
    done = run_inside(docker, project, words, image=image, options=["--env=HOME=/root"])
    assert done.stdout.split("\n")[:2] == ["True there", "True"], done.stdout + done.stderr


@USERS
def test_that_remedy_gives_a_jail(docker: Daemon, project: Path, user: str) -> None:
    """A container that allows user namespaces, and is no more privileged than that, holds jails."""
    report = run(docker, project, f"--user={user}", *REMEDY, code="print(1)", require="jail")
    assert (report.get("stdout"), report["enforcement"]["level"]) == ("1\n", "jail"), report


@USERS
def test_the_doctor_reports_it(docker: Daemon, project: Path, user: str) -> None:
    """By trying: no jail, a confined run, and the walls that it has."""
    image, words = docker.image("cloche-test:host"), ["python3", "-m", "cloche", "doctor", "--json"]
    done = run_inside(docker, project, words, image=image, options=[f"--user={user}"])
    data = json.loads(done.stdout)
    assert (done.returncode, data["level"]) == (0, "confined")
    assert {trial["level"]: trial["status"] for trial in data["trials"]}["jail"] == "refused"
    works = {feature["name"]: feature["works"] for feature in data["features"]}
    assert (works["landlock"], works["seccomp filter"], works["user namespace"]) == (True, True, False)


@USERS
def test_files_and_sessions_work_there(docker: Daemon, project: Path, user: str) -> None:
    """A sandbox keeps its files, a session its state, and a time-out ends what never would."""
    image = docker.image("cloche-test:host")
    done = run_inside(docker, project, ["python3", "-c", LIVE], image=image, options=[f"--user={user}"])
    assert done.stdout == "all of it\n", done.stderr


@pytest.mark.parametrize(
    ("user", "tests"),
    [
        pytest.param("0:0", "test_network.py", id="root-network"),
        pytest.param(ORDINARY, "test_files_reading.py", id="user-reading"),
        pytest.param("0:0", "", id="root", marks=pytest.mark.soak),
        pytest.param(ORDINARY, "", id="user", marks=pytest.mark.soak),
    ],
)
def test_escape_attempts_are_held_there(docker: Daemon, project: Path, user: str, tests: str) -> None:
    """All of those at level confined, played in the container: what works in it outside a sandbox does not inside."""
    words = ["python3", "-m", "pytest", "-p", "no:cacheprovider", "-q", f"tests/escape/{tests}", "-k", IN_CONTAINER]
    image = docker.image("cloche-test:host")
    done = run_inside(docker, project, words, image=image, options=[f"--user={user}"], timeout_s=280)
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "counted of" in done.stdout


NETWORK = """
import socket, urllib.error, urllib.request
print(socket.gethostbyname("good.example"))
for url in ("http://169.254.169.254/", "http://other.example/"):
    try:
        urllib.request.urlopen(url, timeout=60)
    except urllib.error.HTTPError as error:
        print(error.code, error.read().decode().strip())
    except OSError as error:
        print(error)
"""


@USERS
def test_a_network_by_name_is_served_there(docker: Daemon, project: Path, user: str) -> None:
    """Names are answered and connections taken by the egress process, which says what it refuses; nothing else is."""
    options = {"network": "allowlist", "network_allow": ["good.example"]}
    report = run(docker, project, f"--user={user}", code=NETWORK, **options)
    assert report.get("status") == "ok", report
    name, metadata, other = report["stdout"].splitlines()
    assert name == "198.18.1.0"
    assert metadata.startswith("403 169.254.169.254:80 is not allowed; the rules are")
    assert "not known" in other
    assert report["enforcement"]["controls"]["network"]["state"] == "enforced"
