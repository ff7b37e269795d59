"""`auto`, `prefer` and `require` on real daemons: the strongest or the fastest of what is here, and never less."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import cloche
from cloche.core.enforcement import Level
from tests.harness.containers import Daemon, open_daemon

pytestmark = pytest.mark.usefixtures("settings_of_nobody", "cloche_on_path")

REFUSING = Path(__file__).parents[1] / "harness/programs/refusing.py"
RUN = """
import json, sys, cloche
result = cloche.run("print(1)", **json.loads(sys.argv[1]))
print(json.dumps({"level": str(result.enforcement.level), "choice": result.meta["choice"]}))
"""


@pytest.fixture(autouse=True)
def no_gvisor_without_docker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what would be stronger than any of these, and has its own tests."""
    monkeypatch.setenv("CLOCHE_RUNSC", "none")


@pytest.fixture
def image(gvisor: Daemon, monkeypatch: pytest.MonkeyPatch) -> str:
    """Have an image on the daemon that knows runsc, and name it for Python."""
    name = gvisor.image("cloche-test:python")
    monkeypatch.setenv("CLOCHE_IMAGE_PYTHON", name)
    return name


@pytest.fixture
def plain_image(docker: Daemon, monkeypatch: pytest.MonkeyPatch) -> str:
    """The same on a daemon without gVisor."""
    name = docker.image("cloche-test:python")
    monkeypatch.setenv("CLOCHE_IMAGE_PYTHON", name)
    return name


@pytest.fixture
def deaf_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Let something listen where the daemon would, that never answers; give the times at which it was called."""
    calls: list[float] = []
    held: list[socket.socket] = []
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "deaf"))
        listening.listen()
        monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/deaf")

        def serve() -> None:
            while True:
                try:
                    held.append(listening.accept()[0])
                except OSError:
                    return
                calls.append(time.monotonic())

        thread = threading.Thread(target=serve)
        thread.start()
        yield calls
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()
    for one in held:
        one.close()


def command(*words: str) -> subprocess.CompletedProcess[str]:
    """Run the command line."""
    return subprocess.run(["cloche", *words], capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)


def where_namespaces_are_refused(cwd: Path, **keywords: object) -> dict[str, Any]:
    """Run there, and return the level and the choice."""
    words = [sys.executable, str(REFUSING), "seccomp", sys.executable, "-c", RUN, json.dumps(keywords)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60, cwd=cwd)
    report: dict[str, Any] = json.loads(done.stdout or "null") or {"failed": done.stderr}
    return report


@pytest.mark.root
def test_auto_takes_gvisor_where_it_works(
    gvisor: Daemon, image: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is stronger than the jail; the result says what was chosen and that it is what holds."""
    monkeypatch.setenv("CLOCHE_MICROVM_IMAGE", str(tmp_path))
    result = cloche.run("print(open('/proc/version').read())", backend="auto", warm=False)
    assert (result.enforcement.level, result.meta["backend"]) == (Level.GVISOR, "docker")
    choice = result.meta["choice"]
    assert (choice["backend"], choice["prefer"]) == ("gvisor", "strongest")
    assert list(choice["passed_over"]) == ["firecracker", "microvm"]
    assert "cloche images build" in choice["passed_over"]["microvm"]
    assert result.stdout.startswith("Linux version 4.4.0")


@pytest.mark.root
def test_a_required_level_is_found(gvisor: Daemon, image: str) -> None:
    """Who requires gVisor and names no backend gets it from the daemon that has it."""
    result = cloche.run("print(1)", require="gvisor", warm=False)
    assert (result.stdout, result.enforcement.level) == ("1\n", Level.GVISOR)
    assert cloche.Sandbox(live=False, require="gvisor", prefer="fastest").notes["choice"]["backend"] == "gvisor"


@pytest.mark.root
def test_a_required_level_is_never_less(docker: Daemon, plain_image: str) -> None:
    """A daemon without runsc is an error with the remedy, whoever is asked."""
    for asked in ({}, {"backend": "auto"}, {"prefer": "fastest"}, {"backend": "docker"}, {"backend": "gvisor"}):
        with pytest.raises(cloche.BackendUnavailable, match="runsc install"):
            cloche.run("print(1)", require="gvisor", **asked)  # type: ignore[arg-type]


@pytest.mark.root
def test_auto_takes_the_jail_before_an_equal_container(docker: Daemon, plain_image: str) -> None:
    """Of two that are equally strong the faster one; why gVisor is not it stands in the result."""
    result = cloche.run("print(1)", backend="auto")
    assert (result.enforcement.level, result.meta["backend"]) == (Level.JAIL, "local")
    assert "does not know the runtime runsc" in result.meta["choice"]["passed_over"]["gvisor"]


@pytest.mark.root
def test_auto_takes_a_container_where_there_is_no_jail(docker: Daemon, plain_image: str, tmp_path: Path) -> None:
    """Where namespaces are refused, a container is the stronger one; what is merely faster is the local backend."""
    report = where_namespaces_are_refused(tmp_path, backend="auto", warm=False)
    assert (report.get("level"), report["choice"]["backend"]) == ("jail", "docker")
    report = where_namespaces_are_refused(tmp_path, prefer="fastest", warm=False)
    assert (report.get("level"), report["choice"]["backend"]) == ("confined", "local")
    report = where_namespaces_are_refused(tmp_path, prefer="fastest", require="jail", warm=False)
    assert (report.get("level"), report["choice"]["backend"]) == ("jail", "docker")


@pytest.mark.root
def test_dockers_bridge_leaves_its_own_runtime(docker: Daemon, plain_image: str) -> None:
    """The policy decides on who can be chosen."""
    with cloche.Sandbox(live=False, prefer="strongest", network="bridge") as sandbox:
        assert (sandbox.backend, sandbox.policy.level) == ("docker", Level.JAIL)
        assert "has off or allowlist or open only" in sandbox.notes["choice"]["passed_over"]["local"]


@pytest.mark.root
def test_nothing_is_pulled_for_a_choice(gvisor: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon without the image is passed over; where it alone would do, the error says how to fetch it."""
    monkeypatch.setenv("CLOCHE_IMAGE_PYTHON", "no-such-image:here")
    result = cloche.run("print(1)", backend="auto")
    assert (result.stdout, result.meta["backend"]) == ("1\n", "local")
    with pytest.raises(cloche.BackendUnavailable, match="docker pull no-such-image:here"):
        cloche.run("print(1)", require="gvisor")


@pytest.mark.root
def test_the_list_says_what_can_be_used(gvisor: Daemon, image: str) -> None:
    """`cloche backends`: available or not, the level, why not, and what to do."""
    rows = {row["backend"]: row for row in json.loads(command("backends", "--json").stdout)}
    levels = {name: rows[name]["level"] for name in ("auto", "local", "docker", "gvisor", "subprocess")}
    assert levels == {
        "auto": "gvisor",
        "local": "jail",
        "docker": "gvisor",
        "gvisor": "gvisor",
        "subprocess": "process",
    }
    assert rows["auto"]["reason"] == "it would choose gvisor"
    assert (rows["e2b"]["available"], bool(rows["e2b"]["remedy"])) == (False, True)
    shown = command("backends").stdout
    assert "gvisor" in shown
    assert "remedy" in shown


@pytest.mark.root
def test_the_command_line_chooses(gvisor: Daemon, image: str) -> None:
    """`--prefer` and `--require`, as in the library."""
    done = command("run", "--json", "--prefer", "strongest", "-c", "print(1)")
    assert json.loads(done.stdout)["meta"]["choice"]["backend"] == "gvisor"
    done = command("run", "--json", "--prefer", "fastest", "-c", "print(1)")
    assert json.loads(done.stdout)["meta"]["choice"]["backend"] == "local"


def test_a_plain_run_asks_no_daemon(deaf_daemon: list[float]) -> None:
    """Nor does one that prefers the fastest, or requires no more than a jail: not a single connection."""
    for asked in ({}, {"prefer": "fastest"}, {"require": "confined"}, {"backend": "local"}):
        assert cloche.run("print(1)", **asked).stdout == "1\n"  # type: ignore[arg-type]
    assert cloche.get_sandbox().execute("print(1)").stdout == "1\n"
    assert deaf_daemon == []


def test_a_daemon_that_does_not_answer_costs_seconds_once(deaf_daemon: list[float]) -> None:
    """It is looked for within a bound, and not again for the next runs."""
    started = time.monotonic()
    first = cloche.run("print(1)", backend="auto")
    took = time.monotonic() - started
    calls = len(deaf_daemon)
    started = time.monotonic()
    second = cloche.run("print(1)", backend="auto")
    assert (first.stdout, second.stdout, first.meta["backend"]) == ("1\n", "1\n", "local")
    assert (took < 40, time.monotonic() - started < 20, calls > 0, len(deaf_daemon)) == (True, True, True, calls)
    assert "the daemon cannot be reached" in second.meta["choice"]["passed_over"]["gvisor"]


def test_the_loop_runs_on_while_a_daemon_is_looked_for(
    deaf_daemon: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`arun` waits for it beside the event loop."""
    monkeypatch.setattr("cloche.backends.docker.backend.LOOK_S", 12)

    async def scenario() -> float:
        longest, last = 0.0, time.monotonic()
        run = asyncio.create_task(cloche.arun("print(1)", backend="auto"))
        while not run.done():
            await asyncio.sleep(0.01)
            longest, last = max(longest, time.monotonic() - last), time.monotonic()
        await run
        return longest

    assert asyncio.run(scenario()) < 9


def test_without_a_daemon_auto_is_local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the reason and the remedy in the result; `gvisor` by requirement is an error that has them too."""
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none")
    result = cloche.run("print(1)", backend="auto")
    assert result.meta["backend"] == "local"
    assert "systemctl start docker" in result.meta["choice"]["passed_over"]["gvisor"]
    with pytest.raises(cloche.BackendUnavailable, match=r"gvisor: .*nobody answers.*systemctl start docker"):
        cloche.run("print(1)", require="gvisor")


@pytest.mark.root
@pytest.mark.container
def test_a_daemon_that_has_gone_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was there a moment ago counts as little as one that never was."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with open_daemon("runsc") as daemon:
        monkeypatch.setenv("DOCKER_HOST", daemon.url)
        monkeypatch.setenv("CLOCHE_IMAGE_PYTHON", daemon.image("cloche-test:python"))
        assert cloche.Sandbox(live=False, backend="auto").notes["choice"]["backend"] == "gvisor"
        daemon.stop()
        result = cloche.run("print(1)", backend="auto")
        assert (result.stdout, result.meta["backend"]) == ("1\n", "local")
        with pytest.raises(cloche.BackendUnavailable, match="nobody answers"):
            cloche.run("print(1)", require="gvisor")


def test_a_backend_object_is_no_choice() -> None:
    """Who hands one over has chosen."""
    from cloche.testing.fake import FakeBackend

    with pytest.raises(cloche.InvalidRequest, match="prefer is for a choice"):
        cloche.run("print(1)", backend=FakeBackend(), prefer="fastest")
