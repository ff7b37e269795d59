"""The egress process as its caller has it: whatever the caller's own state is, and at whatever moment it ends.

No guest and no connection is needed here: a report says that it is there and serves.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import h11
import pytest

import cloche
from cloche.core.network import NetworkRules
from cloche.egress import client
from cloche.egress.windows import SharedNetwork

SOURCE = Path(cloche.__file__).parents[1]
RULES = NetworkRules.parse(mode="allowlist", allow=["good.example"])
REPORTS = """
import asyncio, json, os, sys
from cloche.core.network import NetworkRules
from cloche.egress import client
def reports():
    network = client.open_network(NetworkRules.parse(mode="allowlist", allow=["b\\u00fccher.example"]))
    try:
        return not asyncio.run(network.report(ends=True)).is_lost
    finally:
        network.close()
with open(sys.argv[1], "w") as answer:
    os.dup2(answer.fileno(), 9)
"""


def answer_of(tmp_path: Path, program: str, paths: tuple[Path, ...] = (SOURCE, Path(h11.__file__).parents[1])) -> Any:
    """Run a program in an interpreter that knows the standard library and these paths; return what it says."""
    told = tmp_path / "answer"
    head = f"import sys; sys.path += {[str(path) for path in paths]!r}\n{REPORTS}"
    said = "with open(9, 'w') as answer:\n    json.dump(found, answer)\n"
    words = [sys.executable, "-I", "-S", "-c", head + program + said, str(told)]
    subprocess.run(words, check=True, timeout=60)
    return json.loads(told.read_text())


def test_a_caller_without_standard_streams(tmp_path: Path) -> None:
    """Descriptors 0 to 2 are given to whatever is opened next, which is then the link to the egress process."""
    assert answer_of(tmp_path, "for fd in range(3): os.close(fd)\nfound = reports()\n") is True


def test_a_caller_with_limits_of_its_own(tmp_path: Path) -> None:
    """Limits below those that the egress process sets itself stay as they are."""
    limits = "{resource.RLIMIT_AS: 2 << 30, resource.RLIMIT_FSIZE: 1 << 16, resource.RLIMIT_NOFILE: 64}"
    program = f"""
import resource
for kind, most in {limits}.items():
    resource.setrlimit(kind, (most, most))
found = reports()
"""
    assert answer_of(tmp_path, program) is True


def test_what_lies_beside_the_parser_is_no_module_of_the_standard_library(tmp_path: Path) -> None:
    """A file named like a module of the standard library, in a folder of packages, is not what the process loads."""
    (tmp_path / "h11").symlink_to(Path(h11.__file__).parent)
    for name in ("asyncio", "json", "dataclasses", "ipaddress"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'loaded')!r}, 'w').close()\n")
    assert answer_of(tmp_path, "found = reports()\n", (SOURCE, tmp_path)) is True
    assert not (tmp_path / "loaded").exists()


def test_a_caller_without_the_parser(tmp_path: Path) -> None:
    """Where h11 is not installed, that is what the error says."""
    program = """
try:
    found = reports()
except OSError as error:
    found = str(error)
"""
    assert "h11" in answer_of(tmp_path, program, (SOURCE,))


def test_a_network_ends_although_a_fork_has_copies_of_it(tmp_path: Path) -> None:
    """Closing it counts, also while a child lives that was forked meanwhile; what that child closes does not."""
    program = """
import select, signal, time
network, other = (client.open_network(NetworkRules.parse(mode="open")) for _ in range(2))
links = [os.dup(one.jail_end) for one in (network, other)]
child = os.fork()
if not child:
    other.close()
    time.sleep(60)
    os._exit(0)
network.close()
is_ended = bool(select.select(links[:1], [], [], 20)[0])
found = [is_ended, bool(select.select(links[1:], [], [], 0)[0])]
os.kill(child, signal.SIGKILL)
"""
    assert answer_of(tmp_path, program) == [True, False]


def kill_egress(number: int) -> None:
    """Send the egress process a signal, if it is there."""
    pid = client.process_id()
    if pid is not None:
        os.kill(pid, number)


def test_a_network_is_opened_whenever_the_process_was_killed() -> None:
    """One that is found dead, or found to be dying, is not what a new sandbox has."""

    async def main() -> None:
        for _ in range(20):
            client.open_network(RULES).close()
            kill_egress(signal.SIGKILL)
            client.open_network(RULES).close()  # while it dies, or by another one
        while client.process_id():
            network = client.open_network(RULES)
            is_lost = (await network.report(ends=True)).is_lost
            network.close()
            if not is_lost:
                return

    asyncio.run(asyncio.wait_for(main(), 60))


def test_who_waits_for_a_report_is_told_when_the_network_is_closed() -> None:
    """Closing a sandbox ends the waits for what its network carried."""

    async def main() -> None:
        client.open_network(RULES).close()
        kill_egress(signal.SIGSTOP)
        try:
            shared = SharedNetwork(client.open_network(RULES), RULES)
            waiting = asyncio.create_task(shared.close_window(shared.open_window()))
            await asyncio.sleep(0)
            shared.close()
            async with asyncio.timeout(5):
                assert (await waiting).is_lost
        finally:
            kill_egress(signal.SIGCONT)

    asyncio.run(main())


@pytest.mark.container
def test_a_session_that_ends_leaves_no_descriptor_to_the_loop() -> None:
    """The loop still watches what is opened after a session whose container went with it."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        options: dict[str, Any] = {"backend": "gvisor", "network": "allowlist", "network_allow": ["good.example"]}
        async with cloche.AsyncSandbox(live=False, **options) as sandbox:
            first, _ = await sandbox.session(), await sandbox.session()
            await first.close()
            for _ in range(40):
                reader, writer = os.pipe()
                readable = asyncio.Event()
                loop.add_reader(reader, readable.set)
                os.write(writer, b".")
                async with asyncio.timeout(10):
                    await readable.wait()

    asyncio.run(main())
