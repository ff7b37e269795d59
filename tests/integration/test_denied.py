"""Status `denied`: a program failed after the policy had blocked something in it, as the kernel or we ourselves saw."""

from __future__ import annotations

from typing import Any

import pytest

import cloche
from tests.harness.containers import Daemon

pytestmark = pytest.mark.usefixtures("settings_of_nobody")

CALLS = """
import ctypes, platform
call = ctypes.CDLL(None, use_errno=True).syscall
def try_it(x86_64, aarch64, *arguments):
    ctypes.set_errno(0)
    assert call(x86_64 if platform.machine() == "x86_64" else aarch64, *arguments) == -1
    assert ctypes.get_errno() == 1, ctypes.get_errno()
"""
CONNECT = "import socket; socket.create_connection(('192.0.2.7', 80), 5)"
BLOCKED = {
    "mount": f"{CALLS}try_it(165, 40, b'none', b'/tmp', b'tmpfs', 0, 0); raise SystemExit(7)",
    "namespaces": f"{CALLS}try_it(272, 97, 0x10000000); raise SystemExit(7)",
    "a clone into namespaces": f"{CALLS}try_it(56, 220, 0x10000011, 0, 0, 0, 0); raise SystemExit(7)",
    "tracing": f"{CALLS}try_it(101, 117, 0, 0, 0, 0); raise SystemExit(7)",
    "a connection": f"try: {CONNECT}\nexcept OSError: raise SystemExit(7)".replace("try: ", "try:\n "),
    "a datagram": "import socket\ntry: socket.socket(2, 2).sendto(b'x', ('192.0.2.7', 53))\nexcept OSError: exit(7)",
    "IPv6": "import socket\ntry: socket.socket(10, 1).connect(('2001:db8::1', 80))\nexcept OSError: exit(7)",
    "a name": "import socket\ntry: socket.getaddrinfo('name.example', 80)\nexcept OSError: exit(7)",
    "in a child": f"import os, sys, subprocess\nsubprocess.run([sys.executable, '-c', {CONNECT!r}])\nexit(7)",
}
HARMLESS = {
    "a plain failure": "raise SystemExit(7)",
    "loopback": "import socket\ns = socket.create_server(('', 0)); socket.create_connection(s.getsockname()); exit(7)",
    "a missing file": "try: open('/none')\nexcept OSError: exit(7)",
    "a port where nobody is": "import socket\ntry: socket.create_connection(('::1', 9))\nexcept OSError: exit(7)",
    "a lock on the host's": "import fcntl, os\ntry: fcntl.flock(os.open('/usr', 0), 2)\nexcept OSError: exit(7)",
}


@pytest.mark.both_users
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("name", BLOCKED)
def test_what_was_blocked_before_a_failure_is_the_status(name: str, warm: bool) -> None:
    """The exit code stays the program's own, and nothing of it is left to the run after."""
    asked: dict[str, Any] = {"level": "jail", "warm": warm, "timeout": 60}
    result = cloche.run(BLOCKED[name], **asked)
    assert (result.status, result.exit_code) == ("denied", 7), result.stderr
    assert result.enforcement.hits["denied"] >= 1
    plain = cloche.run(HARMLESS["a plain failure"], **asked)
    assert (plain.status, plain.exit_code, dict(plain.enforcement.hits)) == ("error", 7, {})


@pytest.mark.both_users
@pytest.mark.parametrize("name", HARMLESS)
def test_a_failure_of_its_own_is_an_error(name: str) -> None:
    """Nothing that a program may do counts, whether it succeeds or not."""
    result = cloche.run(HARMLESS[name], level="jail", timeout=60)
    assert (result.status, result.exit_code, dict(result.enforcement.hits)) == ("error", 7, {}), result.stderr


@pytest.mark.parametrize("level", ["jail", "confined"])
def test_who_does_without_is_well(level: str) -> None:
    """With exit code 0 the status is ok; the calls that were blocked are counted all the same."""
    code = BLOCKED["mount"].replace("raise SystemExit(7)", "")
    result = cloche.run(code, level=level)
    assert (result.status, result.enforcement.hits["denied"]) == ("ok", 1), result.stderr
    assert cloche.run(BLOCKED["mount"], level=level).status == "denied"


def test_a_debugger_that_was_refused_comes_with_advice() -> None:
    """What gdb and strace say then is followed by where they work."""
    code = "import ctypes, os\nif ctypes.CDLL(None, use_errno=True).ptrace(0, 0, 0, 0):\n"
    code += "    exit(f'strace: ptrace: {os.strerror(ctypes.get_errno())}')"
    assert "backends gvisor and microvm" in cloche.run(code).meta["advice"]


@pytest.mark.both_users
def test_a_sandbox_that_lives_counts_the_calls_of_each_command() -> None:
    """Those of its descendants, too; attempts to reach the network are anybody's there, and count for nobody."""
    in_a_child = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {BLOCKED['mount']!r}])\nexit(7)"
    with cloche.Sandbox(live=True, timeout=60) as sandbox:
        for code in (BLOCKED["mount"], BLOCKED["namespaces"], in_a_child):
            result = sandbox.run(code)
            assert (result.status, result.exit_code) == ("denied", 7), result.stderr
            assert result.enforcement.hits["denied"] >= 1
        for code in (HARMLESS["a plain failure"], HARMLESS["a lock on the host's"], BLOCKED["a connection"]):
            assert sandbox.run(code).status == "error"
        assert sandbox.exec(shell="unshare --uts true || exit 7").status == "denied"


def test_a_session_judges_its_cells_by_themselves() -> None:
    """What was blocked in a cell before is not the last one's fault."""
    with cloche.Sandbox(live=False) as sandbox:
        session = sandbox.session()
        session.run(BLOCKED["a connection"])
        assert session.run("import os; os._exit(3)").status == "error"


@pytest.mark.root
@pytest.mark.parametrize("name", ["a connection", "a datagram"])
def test_a_container_tells_of_the_network(docker: Daemon, name: str) -> None:
    """Its first process reads what the kernel counts for the container; of system calls it knows nothing."""
    asked: dict[str, Any] = {"backend": "docker", "image": docker.image("cloche-test:python"), "warm": False}
    with cloche.Sandbox(live=False, **asked) as sandbox:
        result = sandbox.run(BLOCKED[name])
        assert (result.status, result.exit_code) == ("denied", 7), result.stderr
        assert sandbox.run(HARMLESS["loopback"]).status == "error"
