"""What attacks on Cloche found open once: each stays as an attempt, or as a claim where the host's own hands tell."""

import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

import cloche
from cloche.backends.local.backend import LocalBackend
from cloche.backends.local.prefork import close_pools
from tests.harness.escape.attempts import BOTH, CONFINED, JAIL, Attempt
from tests.harness.escape.controls import Controls
from tests.harness.escape.runners import level_keywords

pytestmark = pytest.mark.both_users

call = partial(Attempt, family="attack", levels=BOTH)
DEEPER_THAN_RECURSION = 1500
# A folder may be named by a path of 4096 bytes; what lies deeper cannot be looked at by path.
DEEPER_THAN_PATHS = 2100
VALUE_PIPE = """
import os, stat
fd = next(fd for fd in range(3, 1024) if os.path.exists(f"/proc/self/fd/{fd}") and stat.S_ISFIFO(os.fstat(fd).st_mode))
while True:
    os.write(fd, bytes(65536))
"""
SOCKET_BUFFERS = """
import socket
kept = []
for _ in range(500):
    receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    receiver.bind(("127.0.0.1", 0))
    sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    for _ in range(8):
        sender.sendto(bytes(60_000), receiver.getsockname())
    sender.close()
    receiver.setblocking(False)
    kept.append(receiver)
print(sum(_arrived(one) for one in kept) >> 20)
"""
COUNT_ARRIVED = """
def _arrived(receiver):
    total = 0
    try:
        while True:
            total += len(receiver.recv(65536))
    except BlockingIOError:
        return total
"""

# Outside, as root, the attempt is made for a user who has no other process: this machine's own are left as they are.
ANOTHER = "os.getuid() or os.setuid(61_998)\n"

ATTEMPTS = (
    call(
        name="take the host's supply of asynchronous events",
        code="escaped(syscall(206, 1, ctypes.create_string_buffer(8)))",
    ),
    call(
        name="a protocol whose module the host loads on demand",
        code="""
        import socket
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM, 136)  # UDP-Lite; SCTP and DCCP go the same way
        escaped()
        """,
    ),
    call(
        name="change the priority of all of the user's processes",
        levels=(CONFINED,),
        code=ANOTHER + "os.setpriority(os.PRIO_USER, 0, os.getpriority(os.PRIO_PROCESS, 0)); escaped()",
    ),
    call(
        name="change the input priority of all of the user's processes",
        levels=(CONFINED,),
        code=ANOTHER + "escaped(syscall(251, 3, os.getuid(), 2 << 13 | 4))",
    ),
    call(
        name="be told what happens in a folder of the host",
        levels=(CONFINED,),
        code="escaped(syscall(254, syscall(253), T['home'].encode(), 0xFFF))",
    ),
)


def test_contained(attempt: Attempt, where: str, controls: Controls) -> None:
    """What an attack found open stays closed."""
    controls.assert_contained(attempt, where)


@pytest.fixture
def host_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let sandboxes below level jail put their folders where the test can look."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    return tmp_path


@pytest.mark.parametrize("level", BOTH)
@pytest.mark.parametrize("depth", [DEEPER_THAN_RECURSION, DEEPER_THAN_PATHS])
def test_a_deep_tree_neither_stops_the_host_nor_stays(level: str, depth: int, host_folder: Path) -> None:
    """A run may nest folders as deep as it likes: it ends with a result, and nothing of it is left."""
    code = f"import os\nfor _ in range({depth}):\n    os.mkdir('d')\n    os.chdir('d')\nopen('f', 'w').write('x')"
    result = cloche.run(code, **level_keywords(level))
    assert result.status in ("ok", "disk_limit")
    close_pools()  # and with them the folder of the next run
    assert not list(host_folder.iterdir())


@pytest.mark.parametrize("level", BOTH)
@pytest.mark.parametrize("mode", [0o000, 0o300, 0o400, 0o500])
def test_a_closed_folder_neither_stops_the_host_nor_stays(level: str, mode: int, host_folder: Path) -> None:
    """A run that takes its own folders' permissions away ends with a result, and nothing of it is left."""
    closing = f"os.chmod('a/b', {mode})\nos.chmod('a', {mode})"
    code = f"import os\nos.makedirs('a/b')\nopen('a/b/f', 'w').write('x')\n{closing}"
    result = cloche.run(code, **level_keywords(level))
    assert result.status == "ok"
    assert result.files or result.meta["files_skipped"]
    close_pools()  # and with them the folder of the next run
    assert not list(host_folder.iterdir())


def test_what_is_too_deep_to_measure_is_over_the_limit() -> None:
    """Files below a path that is too long to look at do not get past the disk limit."""
    code = (
        "import os, time\nfor _ in range(30):\n    os.mkdir('d' * 200)\n    os.chdir('d' * 200)\n"
        "for n in range(6):\n    open(str(n), 'wb').write(bytes(8 << 20))\ntime.sleep(60)"
    )
    assert cloche.run(code, disk="16m", **level_keywords(CONFINED)).status == "disk_limit"


@pytest.mark.parametrize("level", BOTH)
def test_a_flood_of_values_ends_the_run(level: str) -> None:
    """The pipe of the value is bounded like the others: who floods it is killed, at no cost to the caller."""
    began = time.process_time()
    result = cloche.run(VALUE_PIPE, timeout=60, **level_keywords(level))
    assert result.status == "output_limit"
    assert time.process_time() - began < 2


@pytest.mark.root
def test_buffers_of_sockets_are_limited() -> None:
    """What sockets hold for their readers counts: a sandbox of 64 MiB does not get 180 MiB more of it."""
    result = cloche.run(COUNT_ARRIVED + SOCKET_BUFFERS, memory="64m", cpus=1, **level_keywords(JAIL))
    assert result.status != "ok" or int(result.stdout) < 64


@pytest.mark.parametrize("call_number", [29, 203], ids=["segments that nobody attached", "other processors"])
def test_nothing_goes_around_limits_without_control_groups(call_number: int) -> None:
    """Where no control group counts, what the summing cannot see is refused."""
    code = (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        f"print(libc.syscall({call_number}, 0, 8, ctypes.byref(ctypes.c_ulong(3))), ctypes.get_errno())"
    )
    result = cloche.run(code, backend=LocalBackend(use_cgroups=False), **level_keywords(JAIL))
    assert result.stdout == "-1 1\n"


@pytest.mark.parametrize("piece", ["{a: ", "[", "- ", "? "])
def test_a_checkout_cannot_crash_the_caller(piece: str, tmp_path: Path) -> None:
    """A configuration file nested without end is an error, in a moment; the parser's own recursion would crash."""
    (tmp_path / "cloche.yaml").write_text(piece * 100_000)
    code = "import cloche\ntry:\n    cloche.run('1')\nexcept cloche.InvalidRequest as error:\n    print(error)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=20, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "nested deeper" in done.stdout


def test_a_pair_of_sockets_asks_for_no_module() -> None:
    """Only pairs of local sockets can be made; asking for another family would make the host load its module."""
    code = "import socket\nsocket.socketpair(socket.AF_UNIX)\nsocket.socketpair(socket.AF_INET)"
    outside = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "Operation not supported" in outside.stderr  # the kernel looked for a module, and found one
    assert "Address family not supported" in cloche.run(code).stderr
