"""gVisor without docker: the same request, no daemon, and nothing left behind however the caller ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import cloche
from cloche.backends.gvisor.backend import RunscBackend
from cloche.backends.host import measure_host
from cloche.core.enforcement import Control, Level, State
from cloche.execution.registry import capabilities_of
from tests.harness.environments import make_environment, run_there
from tests.harness.leaks import Snapshot, wait_for_leftovers, what_stays
from tests.harness.texts import NAMES_AND_A_LITERAL

pytestmark = pytest.mark.usefixtures("settings_of_nobody", "gvisor_alone")
KERNEL = "print(open('/proc/version').read())"
LONG = "import time; print('up', flush=True); time.sleep(600)"
CALLER = f"""
import cloche
cloche.run({LONG!r}, backend="gvisor", timeout=600, on_output=lambda *_: print("up", flush=True))
"""
# As much as leaves the first process with a piece in hand that the stopped caller's pipe has no room for.
STOPS_ITSELF = """
import cloche, os, signal
code = "import time; print('u', flush=True); time.sleep(0.5); print('x' * 100_000, flush=True)"
stop = iter([lambda: os.kill(os.getpid(), signal.SIGSTOP)])
on_output = lambda *_: next(stop, lambda: None)()
result = cloche.run(code, backend="gvisor", warm=False, timeout=2, on_output=on_output)
print(result.status, result.exit_code)
"""


@pytest.mark.parametrize(
    "asked",
    [
        {"backend": "gvisor"},
        {"require": "gvisor"},
        {"backend": "auto"},
        {"backend": "gvisor", "fallback": "process", "trusted": True},
    ],
)
def test_gvisor_needs_no_daemon(asked: dict[str, Any]) -> None:
    """Named, required or chosen: the level says so, and the kernel that a program sees is gVisor's."""
    result = cloche.run(KERNEL, warm=False, **asked)
    assert "fallback" not in result.meta
    assert (result.enforcement.level, result.meta["level"], result.meta["backend"]) == (
        Level.GVISOR,
        "gvisor",
        "gvisor",
    )
    assert result.stdout.startswith("Linux version 4.4.0"), result
    assert result.stdout.strip() != Path("/proc/version").read_text().strip()


def test_the_same_request_as_anywhere(tmp_path: Path) -> None:
    """Files go in and come out, standard input, arguments, environment, the value, an exit code."""
    code = (
        "import os; open('out.txt', 'w').write(open('in.txt').read().upper()); print(input(), os.environ['A']); 6 * 7"
    )
    result = cloche.run(code, backend="gvisor", files={"in.txt": b"abc"}, stdin=b"hello", env={"A": "b"}, warm=False)
    assert (result.status, result.stdout, result.value) == ("ok", "hello b\n", 42), result
    assert [record.path for record in result.files] == ["out.txt"]
    result.save(tmp_path)
    assert (tmp_path / "out.txt").read_text() == "ABC"
    assert cloche.run("raise SystemExit(3)", backend="gvisor", warm=False).exit_code == 3


@pytest.mark.soak  # for its length
def test_a_workspace_lives_for_several_runs() -> None:
    """Every run is a new kernel in the same workspace."""
    with cloche.Sandbox(live=False, backend="gvisor") as sandbox:
        sandbox.write_file("a.txt", b"1")
        assert sandbox.run("open('b.txt', 'w').write(open('a.txt').read() + '2'); open('/tmp/c', 'w')").ok
        assert sandbox.read_file("b.txt", max_bytes=100) == b"12"
        assert sandbox.run("import os; print(os.path.exists('/tmp/c'), sorted(os.listdir()))", timeout=30).stdout == (
            "False ['a.txt', 'b.txt', 'cloche-main.py']\n"
        )


def test_a_workspace_outlives_a_container_that_died(tmp_path: Path) -> None:
    """One that ran out of memory takes nothing with it but itself."""
    with cloche.Sandbox(live=False, backend="gvisor", memory="64m", disk="16m") as sandbox:
        sandbox.write_file("kept.txt", b"kept")
        result = sandbox.run("data = [b'x' * (1 << 20) * 8 for _ in range(200)]")
        assert result.status == "out_of_memory", result
        assert sandbox.read_file("kept.txt", max_bytes=100) == b"kept"


def test_a_time_out_ends_it_with_its_output() -> None:
    """What was said before is there."""
    code = "print('before', flush=True)\nimport time; time.sleep(100)"
    result = cloche.run(code, backend="gvisor", timeout=10, warm=False)
    assert (result.timed_out, result.stdout) == (True, "before\n")


@pytest.mark.soak  # for its length
def test_output_streams() -> None:
    """It comes while the program runs."""
    seen: list[tuple[float, bytes]] = []
    code = "import time\nfor n in range(3): print(n, flush=True); time.sleep(2)"
    cloche.run(code, backend="gvisor", warm=False, on_output=lambda _, data: seen.append((time.monotonic(), data)))
    assert b"".join(data for _, data in seen) == b"0\n1\n2\n"
    assert seen[-1][0] - seen[0][0] > 0.3


@pytest.mark.soak  # for its length
def test_a_second_run_is_warm() -> None:
    """A container waits for it."""
    RunscBackend().drain()
    try:
        cloche.run("print(1)", backend="gvisor")
        deadline = time.monotonic() + 60
        while cloche.run("print(1)", backend="gvisor").meta["start"] != "pooled":
            assert time.monotonic() < deadline
            time.sleep(0.5)
    finally:
        RunscBackend().drain()


def test_an_end_in_time_is_no_time_out_for_a_caller_that_was_stopped() -> None:
    """Also where the first process could not attend to it: it waited for the caller to read what there was."""
    caller = subprocess.Popen([sys.executable, "-c", STOPS_ITSELF], stdout=subprocess.PIPE, text=True)
    _, state = os.waitpid(caller.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(state)
    time.sleep(2.5)  # longer than the program's time
    caller.send_signal(signal.SIGCONT)
    assert caller.communicate()[0] == "ok 0\n"


def test_who_kills_everything_has_a_status() -> None:
    """Our first process can be reached by the guest: then its run has ended, by a signal."""
    result = cloche.run("import os, time; os.kill(1, 9); time.sleep(5)", backend="gvisor", warm=False)
    assert (result.status, result.exit_code) == ("signaled", 137), result


@pytest.mark.soak  # for its length
def test_a_fork_bomb_ends_at_its_limit() -> None:
    """GVisor's own threads have room besides, however many the guest makes."""
    result = cloche.run("for i in $(seq 200); do sleep 2 & done; exit 7", language="bash", backend="gvisor", warm=False)
    assert result.status in ("pids_limit", "error"), result


@pytest.mark.soak
@pytest.mark.parametrize("at_s", [0.0, 0.2, 0.5])
def test_a_caller_that_is_killed_before_its_first_run_leaves_nothing(at_s: float) -> None:
    """While it tries whether gVisor works: no process, mount, control group or folder."""
    before = Snapshot.take()
    caller = subprocess.Popen([sys.executable, "-c", CALLER], stdout=subprocess.PIPE)
    assert caller.stdout is not None
    time.sleep(at_s)
    caller.kill()
    caller.wait()
    caller.stdout.close()
    assert not wait_for_leftovers(before, patience_s=10)


def test_a_killed_shim_leaves_no_process() -> None:
    """Its namespaces die with it, and the caller says what it does not know, at once."""
    before = Snapshot.take()
    shims: list[int] = []

    def kill_it(*_: object) -> None:
        for shim in shims_of(os.getpid()):
            shims.append(shim)
            os.kill(shim, signal.SIGKILL)

    started = time.monotonic()
    with pytest.raises(cloche.OutcomeUnknown):
        cloche.run(LONG, backend="gvisor", timeout=60, warm=False, on_output=kill_it)
    assert shims
    assert time.monotonic() - started < 50
    RunscBackend().drain()
    assert not wait_for_leftovers(before, patience_s=10)


def shims_of(caller: int) -> list[int]:
    """Return the shims of a caller."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes()
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if b"jail.container_shim" in words and parent == caller:
            found.append(int(entry.name))
    return found


def left_by_a_killed_caller() -> tuple[int, Snapshot, list[str]]:
    """Kill a caller and its shim together; return its number, what was there before, and what has stayed."""
    before = Snapshot.take()
    caller = subprocess.Popen([sys.executable, "-c", CALLER], stdout=subprocess.PIPE)
    assert caller.stdout is not None
    assert caller.stdout.readline() == b"up\n"
    caller.send_signal(signal.SIGSTOP)
    for shim in shims_of(caller.pid):
        os.kill(shim, signal.SIGKILL)
    caller.kill()
    caller.wait()
    caller.stdout.close()
    left, deadline = what_stays(before, for_s=2), time.monotonic() + 60
    while any(f"/cloche-{caller.pid}-" not in line for line in left) and time.monotonic() < deadline:
        left = what_stays(before, for_s=2)  # the dead take a moment to be gone, and others come and go
    return caller.pid, before, left


@pytest.mark.root
@pytest.mark.parametrize(
    "words", [["gc"], pytest.param(["run", "-c", "print(1)", "--backend", "gvisor"], marks=pytest.mark.soak)]
)
def test_what_nobody_could_remove_goes_later(words: list[str]) -> None:
    """Of a caller and a shim killed together, empty control groups stay, until `gc` or the next start of gVisor.

    Somebody else on the machine may start it first, hardly ever thrice in turn.
    """
    has_groups = bool(measure_host().cgroup_version)
    for _ in range(3):
        caller, before, left = left_by_a_killed_caller()
        assert [line for line in left if not line.startswith("cgroup: ")] == []
        assert all(f"/cloche-{caller}-" in line for line in left)
        done = subprocess.run([sys.executable, "-m", "cloche", *words], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert not wait_for_leftovers(before, patience_s=10)
        is_seen = f"gvisor: removed control group cloche-{caller}-" in done.stdout if words == ["gc"] else left
        if is_seen or not has_groups:
            return
    pytest.fail("nothing stayed that could go")


def test_what_stops_in_the_middle_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A runsc that takes nothing of what it is sent, and never ends, does not stop its caller."""
    fake = tmp_path / "runsc"
    fake.write_text('#!/bin/sh\n[ "$1" != --version ] || { echo runsc version 9; exit; }\nexec sleep 600\n')
    fake.chmod(0o755)
    monkeypatch.setenv("CLOCHE_RUNSC", str(fake))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("cloche.backends.gvisor.backend.PROBE_S", 0.5)
    before = Snapshot.take()
    with pytest.raises(cloche.BackendUnavailable, match="did not read its input"):
        cloche.run("print(1)", backend="gvisor")
    RunscBackend().drain()
    assert not wait_for_leftovers(before, patience_s=10)


def test_what_is_no_gvisor_is_not_trusted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A program that calls itself runsc is tried, and what came of it is the reason; nothing less runs."""
    fake = tmp_path / "runsc"
    fake.write_text("#!/bin/sh\necho runsc version 9\n")
    fake.chmod(0o755)
    monkeypatch.setenv("CLOCHE_RUNSC", str(fake))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = Snapshot.take()
    with pytest.raises(cloche.BackendUnavailable, match="no container runs on it"):
        cloche.run("print(1)", backend="gvisor")
    found = capabilities_of("gvisor")
    assert not found.available
    assert "apt-get install runsc" in found.remedy
    assert not wait_for_leftovers(before, patience_s=10)


def test_a_program_may_wait_for_several_files() -> None:
    """By `select`, which gVisor knows by another name than its callers."""
    code = "import os, select; r, w = os.pipe(); os.write(w, b'x'); select.select([r], [], [], 5)[0] == [r]"
    assert cloche.run(code, backend="gvisor").value is True


def test_a_network_by_name_is_served_from_outside() -> None:
    """Allowed names have addresses, all else is refused with the reason, in a run and in a live sandbox."""
    rules: dict[str, Any] = {"network": "allowlist", "network_allow": ["good.example"]}
    result = cloche.run(NAMES_AND_A_LITERAL, backend="gvisor", **rules)
    assert result.stdout.split("\n", 2)[:2] == ["198.18.1.0", "403"], result.stderr
    assert [row["host"] for row in result.network_refused] == ["198.51.100.7", "bad.example"]
    assert (result.status, result.enforcement.hits["network"]) == ("denied", 2)
    assert "host's kernel" in result.enforcement[Control.NETWORK].mechanism
    assert "only system calls on sockets reach the host's kernel" in result.enforcement[Control.SYSCALLS].mechanism
    assert result.enforcement[Control.IDENTITY].state is State.PARTIAL
    with cloche.Sandbox(backend="gvisor", **rules) as sandbox:
        sandbox.network.allow("new.example")
        assert sandbox.exec(["getent", "ahostsv4", "new.example"]).stdout.startswith("198.18.1.")


def test_a_bridge_is_dockers() -> None:
    """Its own bridge is no network of anybody else's."""
    with pytest.raises(cloche.InvalidRequest, match="network 'bridge' is docker's own"):
        cloche.run("print(1)", backend="gvisor", network="bridge")


def test_an_image_is_dockers() -> None:
    """Who names one does not get the host's own toolchains instead."""
    with pytest.raises(cloche.BackendUnavailable, match="nobody answers"):
        cloche.run("print(1)", backend="gvisor", image="python:3.12")


def test_an_environment_below_tmp_is_shown(tmp_path: Path) -> None:
    """Also where a container has a shim of its own; and the answer that gVisor works is one for this interpreter."""
    python = make_environment(tmp_path / "mine")
    run = "cloche.run('import inner; inner.WORD', backend='gvisor')"
    assert run_there(python, f"import cloche, json\nprint(json.dumps({run}.value))") == "within"
