"""macOS and Windows, as far as Linux can be them: `other_system.py` of the harness takes away what is Linux's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.containers import Daemon

PROGRAM = Path(__file__).parents[1] / "harness/programs/other_system.py"
SENTENCES = {
    "darwin": (
        "backend 'local' needs Linux, and this is macOS.",
        "Use backend docker, e2b, daytona or cloche, or a virtual machine with Linux.",
    ),
    "win32": (
        "Cloche needs Linux, with any backend, and this is Windows.",
        "Install Cloche in WSL 2 (wsl --install), which is Linux; everything works there.",
    ),
}
CALLS = """
import asyncio, json, cloche
from cloche import Result, Status
said = []
def note(call):
    try:
        said.append(str(call()))
    except cloche.ClocheError as error:
        said.append([type(error).__name__, str(error)])
note(lambda: cloche.run("print(1)"))
note(lambda: cloche.run("print(1)", backend="local"))
note(lambda: asyncio.run(cloche.arun("print(1)", backend="local")))
note(lambda: cloche.Sandbox(backend="local").__enter__())
note(lambda: cloche.run("print(1)", backend="docker"))
print(json.dumps(said))
"""

IN_DOCKER = """
import sys, cloche
options = {"backend": "docker", "level": "jail", "image": sys.argv[1]}
result = cloche.run("open('a', 'w').write('x'); print(6 * 7)", **options)
print(result.stdout.strip(), [file.path for file in result.files])
with cloche.Sandbox(**options) as sandbox, sandbox.session() as session:
    print(sandbox.exec(["echo", "lives"]).stdout.strip(), session.run("6 * 7").value)
try:
    cloche.run("1", network=["example.com"], **options)
except cloche.StartFailed as error:
    print(error)
"""


def on(system: str, *words: str, daemon: str = "unix:///nowhere") -> subprocess.CompletedProcess[str]:
    """Call the command, or a program, there."""
    environment = {"DOCKER_HOST": daemon, "PATH": "/usr/bin:/bin"}
    return subprocess.run(
        [sys.executable, str(PROGRAM), system, *words], capture_output=True, text=True, check=False, timeout=200,
        env=environment,
    )  # fmt: skip


@pytest.mark.parametrize("system", SENTENCES)
def test_a_run_says_that_it_needs_linux_and_what_works_there(system: str) -> None:
    """`import cloche` works, and every way to run on this machine is one error with the same two sentences."""
    done = on(system, "-c", CALLS)
    assert done.returncode == 0, done.stderr
    *local, docker = json.loads(done.stdout)
    assert local == [["BackendUnavailable", " ".join(SENTENCES[system])]] * 4
    assert docker[0] == "BackendUnavailable"
    assert ("the daemon cannot be reached" in docker[1]) is (system == "darwin")


@pytest.mark.parametrize("system", SENTENCES)
def test_doctor_and_backends_work_there(system: str) -> None:
    """Both say why `local` does not work, and exit as they do where nothing can run."""
    reason, remedy = SENTENCES[system]
    doctor, backends = on(system, "cloche", "doctor", "--json"), on(system, "cloche", "backends", "--json")
    assert (doctor.returncode, backends.returncode) == (1, 0), (doctor.stderr, backends.stderr)
    found = json.loads(doctor.stdout)
    works = ["docker", "e2b", "daytona", "cloche"] if system == "darwin" else []
    assert (found["level"], found["reason"], found["remedy"], found["works"]) == ("none", reason, remedy, works)
    rows = {row["backend"]: row for row in json.loads(backends.stdout)}
    assert (rows["local"]["available"], rows["local"]["reason"], rows["local"]["remedy"]) == (False, reason, remedy)
    assert ("needs Linux" in rows["e2b"]["reason"]) is (system == "win32")


@pytest.mark.soak
@pytest.mark.container
def test_docker_by_url_works_on_macos(docker: Daemon) -> None:
    """Runs, what they write, live sandboxes and sessions do; a network with rules needs Linux, and says so."""
    done = on("darwin", "-c", IN_DOCKER, docker.image("cloche-test:python"), daemon=docker.url)
    assert done.returncode == 0, done.stderr
    run, life, network = done.stdout.splitlines()
    assert (run, life) == ("42 ['a']", "lives 42")
    assert network == "cannot start the egress process: [Errno 38] it needs Linux, and this is macOS"
