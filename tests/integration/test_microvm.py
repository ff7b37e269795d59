"""Runs in virtual machines, whole: what goes in and comes out, every limit, every end. Emulated, each boot is long.

One machine, with a result and its enforcement, a limit and the ways out, is part of each test run; an ordinary user has
the first of these. What needs another machine, or seconds, is left to the soak.
"""

from __future__ import annotations

import hashlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import cloche
from cloche.backends.microvm.plan import DISK
from cloche.core.enforcement import Control, State
from cloche.core.errors import StartFailed
from tests.harness.machines import monitors, with_late_ports, with_own_id

pytestmark = pytest.mark.timeout(900)

LONG = "print('up', flush=True)\nwhile True: pass"
CALLER = f"""
import cloche
cloche.run({LONG!r}, backend="microvm", timeout=300, on_output=lambda *_: print("up", flush=True))
"""


@pytest.fixture(scope="module")
def image(microvm_image: Path) -> Iterator[Path]:
    """Have an image, and let Cloche find it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CLOCHE_MICROVM_IMAGE", str(microvm_image))
        patch.setenv("XDG_CACHE_HOME", str(microvm_image.parents[2]))
        yield microvm_image


@pytest.fixture(scope="module")
def sandbox(image: Path) -> Iterator[cloche.Sandbox]:
    """Have one machine for all that needs no other; afterwards it is gone."""
    before = monitors()
    with cloche.Sandbox(live=False, backend="microvm", memory="96m", disk="16m", pids=32, timeout=120) as one:
        yield one
    assert monitors() <= before


def test_a_result_is_whole(sandbox: cloche.Sandbox) -> None:
    """Value, level and what was enforced; what an emulated processor does not promise is said."""
    result = sandbox.run("import sys; print(2); print(3, file=sys.stderr); 40 + 2")
    assert (result.stdout, result.stderr, result.value, result.status) == ("2\n", "3\n", 42, "ok")
    assert result.enforcement.level is cloche.Level.VM
    assert result.meta["backend"] == "microvm"
    calls = result.enforcement[Control.SYSCALLS]
    assert calls.state is (State.PARTIAL if "tcg" in result.meta["engine"] else State.ENFORCED)


@pytest.mark.parametrize(
    ("code", "status", "exit_code"),
    [
        pytest.param("raise SystemExit(7)", "error", 7, marks=pytest.mark.soak),
        pytest.param("1 / 0", "error", 1, marks=pytest.mark.soak),
        pytest.param("import os; os.abort()", "signaled", 134, marks=pytest.mark.soak),
        ("b = bytearray(); \nwhile True: b += bytes(1 << 20)", "out_of_memory", 137),
        pytest.param("import os, time\nwhile os.fork(): pass\ntime.sleep(60)", "pids_limit", 1, marks=pytest.mark.soak),
    ],
)
def test_every_end_has_its_status(sandbox: cloche.Sandbox, code: str, status: str, exit_code: int) -> None:
    """By the program, a signal, or a limit; and the next run finds the machine in order."""
    result = sandbox.run(code)
    assert (result.status, result.exit_code) == (status, exit_code), result.stderr


@pytest.mark.soak
def test_a_full_disk_is_told(image: Path) -> None:
    """It is a file system of its own size, and nothing of the host's."""
    result = cloche.run("open('f', 'wb').write(bytes(64 << 20))", backend="microvm", disk="8m", timeout=120)
    assert (result.status, result.exit_code) == ("disk_limit", 1), result.stderr


@pytest.mark.soak
def test_a_time_out_is_heard(sandbox: cloche.Sandbox) -> None:
    """What was printed until then is kept, and the machine stays usable."""
    started = time.monotonic()
    result = sandbox.run("print('so far', flush=True)\nwhile True: pass", timeout=10)
    assert (result.status, result.stdout) == ("timeout", "so far\n")
    assert time.monotonic() - started < 60
    assert sandbox.run("print(1)").stdout == "1\n"


@pytest.mark.soak
def test_files_go_in_and_out(sandbox: cloche.Sandbox, tmp_path: Path) -> None:
    """What a run makes comes back, what it finds was given, and the workspace lives on; /tmp does not."""
    sandbox.write_file("in/a.txt", b"given")
    result = sandbox.run(
        "open('out.txt', 'w').write(open('in/a.txt').read() * 2 + input()); open('/tmp/x', 'w')", stdin=b"typed"
    )
    assert [file.path for file in result.files] == ["out.txt"]
    result.save(tmp_path)
    assert (tmp_path / "out.txt").read_text() == "givengiventyped"
    assert sandbox.read_file("out.txt", max_bytes=100) == b"givengiventyped"
    assert sandbox.run("import os; print(os.path.exists('/tmp/x'), os.path.exists('out.txt'))").stdout == "False True\n"
    with pytest.raises(cloche.ClocheError):
        sandbox.read_file("nothing", max_bytes=1)


@pytest.mark.soak
def test_output_streams(sandbox: cloche.Sandbox) -> None:
    """It is heard while the program runs."""
    heard: list[float] = []
    sandbox.run(
        "import time\nfor n in range(3): print(n, flush=True); time.sleep(3)",
        on_output=lambda *_: heard.append(time.monotonic()),
    )
    assert len(heard) >= 3
    assert heard[-1] - heard[0] > 1


def test_there_is_no_way_out(sandbox: cloche.Sandbox, image: Path) -> None:
    """No interface but loopback, no root, no disk that could be written; a remount changes nothing outside."""
    digest = hashlib.sha256((image / "root.ext4").read_bytes()).digest()
    code = """
import ctypes, os, socket
print(os.getuid() != 0, [name for _, name in socket.if_nameindex()])
libc = ctypes.CDLL(None, use_errno=True)
print(libc.mount(None, b"/", None, 32, None), libc.unshare(0x10000000))
for path in ("/usr/x", "/dev/vda", "/proc/sys/kernel/core_pattern", "/sys/fs/cgroup/cgroup.procs", "/dev/vport0p1"):
    try:
        open(path, "w")
        print("opened", path)
    except OSError:
        pass
"""
    assert sandbox.run(code).stdout == "True ['lo']\n-1 -1\n"
    assert hashlib.sha256((image / "root.ext4").read_bytes()).digest() == digest


@pytest.mark.soak
def test_a_killed_caller_leaves_no_machine(image: Path) -> None:
    """Killed in the middle of a run, and of a boot, it takes its machine with it."""
    before = monitors()
    for is_up in (False, True):
        caller = subprocess.Popen([sys.executable, "-c", CALLER], stdout=subprocess.PIPE)
        assert caller.stdout is not None
        deadline = time.monotonic() + 60
        while not monitors() - before and time.monotonic() < deadline:
            time.sleep(0.1)
        assert len(monitors() - before) == 1
        if is_up:
            assert caller.stdout.readline() == b"up\n"
        caller.send_signal(signal.SIGKILL)
        caller.wait()
        caller.stdout.close()
        deadline = time.monotonic() + 60
        while monitors() - before and time.monotonic() < deadline:
            time.sleep(0.1)
        assert monitors() <= before


def test_what_machines_lack_is_refused(image: Path) -> None:
    """A network, or less than they are, before anything boots."""
    for options in ({"network": "open"}, {"level": "jail"}):
        with pytest.raises(cloche.ClocheError):
            cloche.run("print(1)", backend="microvm", **options)  # type: ignore[arg-type]


@pytest.mark.soak
def test_ports_that_come_late_are_waited_for(image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel makes them one by one, and knows the host's end of each later still; a busy host makes that long."""
    monkeypatch.setenv("CLOCHE_MICROVM_IMAGE", str(with_late_ports(image, tmp_path, after_s=5)))
    assert cloche.run("print(1)", backend="microvm", timeout=120).stdout == "1\n"


@pytest.mark.soak
def test_a_machine_that_cannot_start_says_why(image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last words reach the caller before it restarts."""
    copy = with_own_id(image, tmp_path)
    (copy / DISK).write_bytes(bytes(1 << 20))
    monkeypatch.setenv("CLOCHE_MICROVM_IMAGE", str(copy))
    with pytest.raises(StartFailed, match="cloche: no root disk"):
        cloche.run("print(1)", backend="microvm", timeout=120)
