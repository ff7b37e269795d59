"""Live sandboxes in virtual machines: what is a machine's own. The rest is as in a container of docker's."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

import cloche
from cloche.sync import Sandbox
from tests.escape.test_first_process import ALLOWED, END, HEAD, SIGNALS, all_that_is_refused
from tests.harness.machines import monitors
from tests.integration import test_docker_live as docker
from tests.integration.test_microvm import image

__all__ = ["image"]
pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("settings_of_nobody")]

SMALL = {"backend": "microvm", "memory": "96m", "disk": "16m", "pids": 64, "timeout": 120}
OF_NO_BYTES = ["read memory", "write memory"]  # which a kernel allows before it looks at whose memory it is
CALLS = f"""
import cloche
with cloche.Sandbox(live=True, **{SMALL!r}) as sandbox:
    sandbox.exec(["true"])
    print("up", flush=True)
    sandbox.exec(["sleep", "1000"])
"""


@pytest.fixture(scope="module")
def sandbox(image: Path) -> Iterator[Sandbox]:
    """Have one machine for all that needs no other; afterwards it is gone."""
    before = monitors()
    with Sandbox(live=True, **SMALL) as opened:
        yield opened
    assert monitors() <= before


@pytest.mark.soak
def test_one_machine_holds_many_processes(sandbox: Sandbox) -> None:
    """A terminal and a port are as in any container; a command ends with its tree, and the largest for memory."""
    docker.check_terminal_and_port(sandbox)
    docker.check_ends_with_its_tree(sandbox, timeout_s=10)  # its processor is emulated
    docker.check_memory(sandbox)
    result = sandbox.run("1")
    assert (result.enforcement.level, result.meta["backend"]) == (cloche.Level.VM, "microvm")
    assert len(result.meta["writable"]) == 9


def test_the_first_process_is_out_of_reach(sandbox: Sandbox) -> None:
    """It has the guest's id, and what would limit, slow down or read it is refused; what is allowed does no harm."""
    assert sandbox.run(docker.REACHES).value == []
    assert sandbox.run(all_that_is_refused()).stdout == f"{OF_NO_BYTES}\n"
    for code in ALLOWED.values():
        result = sandbox.run(f"{HEAD}{dedent(code).format(signals=SIGNALS)}{END}")
        assert (result.status, result.exit_code) == ("error", 3), result.stderr
    assert sandbox.exec(["echo", "well"]).stdout == "well\n"


@pytest.mark.soak
def test_programs_call_functions_of_the_caller(image: Path) -> None:
    """As in a container of docker's."""
    docker.check_functions_of_the_caller(**SMALL)


@pytest.mark.soak
def test_files_and_interpreters_live_beside_commands(sandbox: Sandbox) -> None:
    """Every folder that it names can be written to; sessions share the files, and have no forks."""
    docker.check_files(sandbox)
    docker.check_sessions(sandbox)


@pytest.mark.soak
def test_a_folder_of_the_host_is_copied_and_committed(image: Path, tmp_path: Path) -> None:
    """As in a container of docker's."""
    docker.check_folder_of_the_host(tmp_path, **SMALL)


def test_what_it_has_not_is_refused(image: Path) -> None:
    """Several users and names, before anything boots."""
    before = monitors()
    with pytest.raises(cloche.BackendUnavailable, match="has one user"), Sandbox(live=True, users=True, **SMALL):
        pass
    with pytest.raises(cloche.BackendUnavailable, match="no sandboxes with names"), Sandbox(name="one", **SMALL):
        pass
    assert monitors() <= before


@pytest.mark.soak
def test_a_machine_that_is_gone_is_said_to_be(image: Path) -> None:
    """Who waits for a process is told at once, and so is who asks for another one."""
    before = monitors()
    with Sandbox(live=True, **SMALL) as sandbox:
        process = sandbox.start(["cat"])
        (monitor,) = monitors() - before
        subprocess.run(["kill", "-9", str(monitor)], check=True)
        with pytest.raises(cloche.OutcomeUnknown):
            process.wait()
        with pytest.raises(cloche.OutcomeUnknown):
            sandbox.exec(["true"])


@pytest.mark.soak
def test_a_machine_goes_with_its_caller(image: Path) -> None:
    """Nothing is left of a caller that is killed."""
    before = monitors()
    with subprocess.Popen([sys.executable, "-c", CALLS], stdout=subprocess.PIPE) as caller:
        assert caller.stdout is not None
        assert caller.stdout.readline() == b"up\n"
        assert len(monitors() - before) == 1
        caller.kill()
    deadline = time.monotonic() + 60
    while monitors() - before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert monitors() <= before


@pytest.mark.soak
def test_who_waits_for_a_boot_no_longer_ends_it(image: Path) -> None:
    """The machine is killed at once, not when it is up; the next call boots another one."""
    before = monitors()

    async def give_up() -> float:
        async with cloche.AsyncSandbox(live=True, **SMALL) as sandbox:
            waiting = asyncio.ensure_future(sandbox.exec(["true"]))
            while not monitors() - before:  # noqa: ASYNC110 - a process of another's is waited for
                await asyncio.sleep(0.01)
            started = time.monotonic()
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            took = time.monotonic() - started
            assert (await sandbox.exec(["true"])).ok
            return took

    assert asyncio.run(give_up()) < 3
    assert monitors() <= before
