"""Live sandboxes on gVisor without docker: what differs there. The rest is as in a container of docker's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import cloche
from cloche.sync import Sandbox
from tests.integration import test_docker_live as docker

pytestmark = pytest.mark.usefixtures("settings_of_nobody", "gvisor_alone")


@pytest.fixture
def sandbox(gvisor_alone: None) -> Iterator[Sandbox]:
    """Open a live sandbox on gVisor."""
    with Sandbox(backend="gvisor", live=True) as opened:
        yield opened


@pytest.mark.timeout(120)
def test_one_container_holds_many_processes(sandbox: Sandbox) -> None:
    """All of it is on gVisor's own kernel, and shows the toolchains of this host."""
    docker.check_many_at_once(sandbox)
    docker.check_files(sandbox)
    docker.check_sessions(sandbox)
    docker.check_terminal_and_port(sandbox)
    result = sandbox.run("open('/proc/version').read()")
    assert (result.value[:19], result.meta["backend"]) == ("Linux version 4.4.0", "gvisor")


@pytest.mark.timeout(120)
def test_each_command_ends_with_its_tree(sandbox: Sandbox) -> None:
    """Its kernel hands marks on as Linux does, and says how much memory is used."""
    docker.check_ends_with_its_tree(sandbox)
    docker.check_memory(sandbox)


@pytest.mark.timeout(120)
def test_programs_call_functions_of_the_caller(gvisor_alone: None) -> None:
    """As in a container of docker's."""
    docker.check_functions_of_the_caller("gvisor")


@pytest.mark.timeout(120)
def test_a_folder_of_the_host_is_copied_and_committed(gvisor_alone: None, tmp_path: Path) -> None:
    """As in a container of docker's."""
    docker.check_folder_of_the_host(tmp_path, backend="gvisor")


def test_who_kills_the_first_process_ends_the_sandbox(sandbox: Sandbox) -> None:
    """It has the guest's id there, and no signal is too strong for it: that is the end, and is said."""
    assert sandbox.run("import os, time; os.kill(1, 9); time.sleep(60)").status == "signaled"
    with pytest.raises(cloche.OutcomeUnknown):
        sandbox.exec(["true"])
