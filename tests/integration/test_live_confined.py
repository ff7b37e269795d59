"""Live sandboxes at level `confined`: what they do, what is refused and says so, and what ends with what."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import cloche
from cloche.backends.host import measure_host
from cloche.backends.local.confined_live import why_no_life
from cloche.core.record import replace
from cloche.sync import Process

pytestmark = [pytest.mark.both_users, pytest.mark.usefixtures("settings_of_nobody")]
LONG_S = 120  # far more than anything here takes
TREE = """
import os, subprocess, sys, time
def detached(depth):
    os.setsid()
    if os.fork(): os._exit(0)
    print(os.getpid(), file=open("pids", "a"), flush=True)
    time.sleep(1000)
for _ in range(3):
    if os.fork() == 0: detached(0)
while len(open("pids", "a+").seek(0) or open("pids").read().split()) < 3: time.sleep(0.01)
print(os.getpid(), file=open("pids", "a"), flush=True)
"""


@pytest.fixture(scope="module")
def opened() -> Iterator[cloche.Sandbox]:
    """Open one for all tests that leave nothing in it."""
    with cloche.Sandbox(level="confined", live=True, timeout=LONG_S) as sandbox:
        yield sandbox


def lives(pid: int) -> bool:
    """Tell whether a process is there and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def until(gone: list[int]) -> list[int]:
    """Wait until none of these lives; return those that do after a long while."""
    deadline = time.monotonic() + LONG_S
    while (left := [pid for pid in gone if lives(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def test_commands_runs_files_and_sessions_share_one_workspace(opened: cloche.Sandbox) -> None:
    """A command, a run, a session and the caller see the same files, by relative paths and below /workspace."""
    assert opened.is_live
    result = opened.exec(["sh", "-c", 'cat > in; echo "$1" >&2; exit 3', "sh", "é"], stdin="given")
    assert (result.stderr, result.exit_code) == ("é\n", 3)
    assert str(result.enforcement.level) == "confined"
    opened.write_file("deep/b.txt", b"b")
    assert opened.read_file("/workspace/in") == b"given"
    run = opened.run("print(open('deep/b.txt').read()); open('made.csv', 'w').write('1')", collect=["*.csv"])
    assert (run.stdout, [one.path for one in run.files]) == ("b\n", ["made.csv"])
    with opened.session() as session:
        assert session.run("len(open('in').read())").value == 5
    assert opened.exec(shell="cat b.txt", cwd="/workspace/deep").stdout == "b"
    with pytest.raises(cloche.SandboxFileError):
        opened.read_file("/etc/shadow")


def test_a_terminal_is_the_programs_own(opened: cloche.Sandbox) -> None:
    """A terminal made outside is handed in: it has its size, its signals, and closes with its program."""
    script = "stty -echo; stty size; trap 'echo int' INT; echo ready; while :; do sleep 0.05; done"
    with opened.terminal(["sh", "-c", script], rows=11, columns=33) as terminal:
        _see(terminal, b"11 33\r\nready\r\n")
        terminal.write(b"\x03")
        _see(terminal, b"int\r\n")
        terminal.signal("KILL")
        assert terminal.wait().exit_code == 137


def _see(terminal: Process, wanted: bytes) -> None:
    seen = b""
    while wanted not in seen:
        piece = terminal.stdout.read()
        assert piece, seen
        seen += piece


def test_a_time_out_ends_its_tree_and_nothing_else(opened: cloche.Sandbox) -> None:
    """What a command has started in sessions of their own dies with it; what another one has left lives on."""
    opened.exec(shell="rm -f pids")
    assert opened.run(TREE).ok
    others = [int(word) for word in opened.read_file("pids").split()][:3]
    opened.exec(shell="rm pids")
    late = opened.run(TREE + "time.sleep(1000)", timeout=2)
    assert late.status is cloche.Status.TIMEOUT
    ended = [int(word) for word in opened.read_file("pids").split()]
    assert not until(ended)
    assert [lives(pid) for pid in others] == [True] * 3
    opened.exec(shell="rm pids")


KILLS = """
import os, sys
for pid in map(int, sys.stdin.read().split()):
    try:
        os.kill(pid, 0)
        print("sent")
    except OSError as error:
        print(type(error).__name__)
"""


def test_a_command_ends_what_another_one_has_started() -> None:
    """By its number or its group; reapers, init, those who wait, the caller and another sandbox's stay out of reach."""
    opening = [cloche.Sandbox(level="confined", live=True, timeout=LONG_S) for _ in range(2)]
    with opening[0] as opened, opening[1] as other:
        server = opened.start(["sleep", "1000"])
        group = opened.start(["sh", "-c", "sleep 1000 & wait"])  # the leader of one
        assert opened.exec(shell=f"kill -0 {server.pid} && kill {server.pid} && kill -KILL -{group.pid}").exit_code == 0
        assert (server.wait().exit_code, group.wait().exit_code) == (143, 137)
        sleeper = opened.start(["sleep", "1000"])
        init = parent_of(parent_of(sleeper.pid))
        theirs = other.start(["sleep", "1000"])
        asking = opened.start(["python3", "-c", KILLS])
        deadline = time.monotonic() + LONG_S
        while not (waiting := [pid for pid in guests_of(init) if pid not in (sleeper.pid, asking.pid)]):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        outside = [os.getpid(), theirs.pid, init, *map(parent_of, [sleeper.pid, *waiting]), *waiting]
        asking.write(" ".join(map(str, [sleeper.pid, *outside])))
        asking.close_stdin()
        said = asking.wait().stdout.split()
        assert said == ["sent", *["PermissionError"] * len(outside)]
        assert theirs.pid in [one.pid for one in other.processes()]


def parent_of(pid: int) -> int:
    """Return the parent of a process."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def children_of(pid: int) -> list[int]:
    """Return the children of a process that has one thread."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def guests_of(init: int) -> list[int]:
    """Return who are the children of the reapers of a sandbox."""
    return [guest for reaper in children_of(init) for guest in children_of(reaper)]


@pytest.mark.soak
def test_a_storm_of_signals_between_commands_holds_up_nobody(opened: cloche.Sandbox) -> None:
    """Threads that signal one that ends meanwhile, and askers that are killed while they ask, leave all at work."""
    storm = (
        "import os, sys, threading\npid = int(sys.argv[1])\ndef ask():\n for _ in range(300):\n  try: os.kill(pid, 0)\n"
    )
    storm += "  except OSError: pass\nall = [threading.Thread(target=ask) for _ in range(8)]\n"
    storm += "[one.start() for one in all]\n[one.join() for one in all]\nprint('done')"
    for _ in range(5):
        target = opened.start(["sleep", "1000"])
        asking = [opened.start(["python3", "-c", storm, str(target.pid)]) for _ in range(3)]
        asking.pop().kill()
        target.kill()
        assert [one.wait().stdout for one in asking] == ["done\n"] * 2
        assert opened.exec(["true"]).ok


def test_everything_ends_with_the_sandbox() -> None:
    """Whatever commands have left behind is gone when it is closed."""
    with cloche.Sandbox(level="confined", live=True, timeout=LONG_S) as sandbox:
        assert sandbox.run(TREE).ok
        pids = [int(word) for word in sandbox.read_file("pids").split()][:3]
        assert [lives(pid) for pid in pids] == [True] * 3
    assert not [pid for pid in pids if lives(pid)]


def test_the_largest_tree_ends_where_memory_is_used_up() -> None:
    """By what processes have of their own: forks that share 60 MiB are let live, who fills the limit is ended alone."""
    with cloche.Sandbox(level="confined", live=True, memory="200m", timeout=LONG_S) as sandbox:
        shared = "import os, time\nx = bytearray(60 << 20)\nfor _ in range(6):\n if not os.fork(): time.sleep(1000)\n"
        assert sandbox.run(shared + "time.sleep(0.3)").ok
        hungry = "x = []\nwhile True: x.append(bytearray(1 << 20)); import time; time.sleep(0.005)"
        beside = sandbox.start(["sleep", "1000"])
        assert sandbox.run(hungry).status is cloche.Status.OUT_OF_MEMORY
        assert lives(beside.pid)
        beside.kill()
        assert sandbox.exec(shell="cat /proc/self/oom_score_adj || echo closed").stdout in ("1000\n", "closed\n")


def test_one_with_a_name_is_the_same_for_whoever_comes_in() -> None:
    """A keeper holds it; another client finds files, processes and rules, of its network too, and ends it."""
    network: Any = {"network": "allowlist", "network_allow": ["good.example"]}
    with cloche.Sandbox(name="confined-life", keep="2m", level="confined", timeout=LONG_S, **network) as sandbox:
        sandbox.write_file("kept", "one")
        sandbox.start(["sleep", "1000"], keep=True).detach()
    try:
        with cloche.Sandbox.attach("confined-life") as other:
            assert other.read_file("/workspace/kept") == b"one"
            assert other.exec(["cat", "kept"]).stdout == "one"
            assert str(other.exec(["true"]).enforcement.level) == "confined"
            refused = other.exec(["python3", "-c", "import socket; socket.gethostbyname('other.example')"])
            assert [row["host"] for row in refused.network_refused] == ["other.example"]
            (sleeper,) = [one.pid for one in other.processes() if one.command == "sleep 1000"]
            assert lives(sleeper)
    finally:
        with cloche.Sandbox.attach("confined-life") as other:
            other.kill()
    assert not until([sleeper])


def test_a_folder_of_the_host_is_a_copy(tmp_path: Path) -> None:
    """What is written there reaches the folder by a commit alone; results say that it is a copy, and why."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.txt").write_text("one\n")
    with cloche.Sandbox(level="confined", workspace=folder) as sandbox:
        result = sandbox.exec(shell="echo two >> a.txt; echo new > b.txt")
        assert result.meta["workspace"]["how"] == "copy"
        assert result.meta["workspace"]["why"]
        assert (folder / "a.txt").read_text() == "one\n"
        # Each stops all others while it looks, and may be done before they stand still.
        found = [sandbox.diff() for _ in range(30)]
        assert sandbox.commit(found[-1].id).written == ("a.txt", "b.txt")
    assert (folder / "a.txt").read_text() == "one\ntwo\n"


def test_what_it_lacks_is_an_error_that_says_what_to_do(opened: cloche.Sandbox) -> None:
    """Servers, clones and further users are refused, with what gives them."""
    for ask in (opened.ports, lambda: opened.forward(8000), lambda: opened.connect(8000)):
        with pytest.raises(cloche.BackendUnavailable, match=r"no servers.*pods, that give level jail"):
            ask()
    with pytest.raises(cloche.BackendUnavailable, match=r"checkpoints.*level jail"):
        opened.session(checkpoints=True).__enter__()
    with pytest.raises(cloche.ClocheError, match="user"):
        opened.exec(["true"], user="root")


def test_one_id_needs_scopes() -> None:
    """On a kernel without Landlock's scopes an ordinary user has no such sandbox, and is told why; root has."""
    host = measure_host()
    old = replace(host, landlock_abi=5, owns_ids=False)
    assert "Linux 6.12" in why_no_life(old)
    assert why_no_life(replace(old, landlock_abi=6)) == ""
    assert why_no_life(replace(old, owns_ids=True)) == ""


HANDLER = r"""
import os, shutil, subprocess, sys
PROGRAM = '''
import ctypes, signal, struct
signal.signal(signal.SIGCHLD, lambda *_: None)
action = ctypes.create_string_buffer(152)
ctypes.CDLL(None).sigaction(signal.SIGCHLD, None, action)
print(struct.unpack_from("i", action, 136)[0] & 0x10000000)
'''
for name in ("dash", "other"):
    shutil.copy(os.path.realpath("/proc/self/exe"), name)
    subprocess.run([f"./{name}", "-S", "-c", PROGRAM], env={"PYTHONHOME": sys.base_prefix}, check=True)
"""


def test_no_end_of_a_child_interrupts_the_fork_of_a_shell(opened: cloche.Sandbox) -> None:
    """Where forks wait for a count of the tree, a shell's handler of SIGCHLD restarts calls, and no other."""
    for result in (opened.run(HANDLER), cloche.run(HANDLER, level="confined", timeout=LONG_S)):
        pids = result.enforcement["pids"]
        restarts = 0x10000000 if "seccomp notifies" in pids.mechanism else 0
        assert result.stdout.split() == [str(restarts), "0"], (result.stdout, result.stderr, pids)
