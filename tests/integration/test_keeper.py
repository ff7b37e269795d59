"""Sandboxes with a name: who may come back, what ends one, and what is left when somebody is killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import cloche
from cloche.core.errors import BackendUnavailable, InvalidRequest, OutcomeUnknown
from cloche.egress import client
from cloche.keeper import registry
from cloche.keeper.attach import visit
from tests.harness.leaks import Snapshot, wait_for_leftovers
from tests.harness.texts import NAMES_AND_A_LITERAL

pytestmark = pytest.mark.both_users
ROOT = Path(__file__).parents[2]
PATIENCE_S, LATEST_S = 60, 0.5


@pytest.fixture(autouse=True)
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have a place for names of this test's own."""
    folder = tmp_path / "runtime"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    return folder / "cloche"


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """See that nothing of a test's sandboxes is left."""
    before = Snapshot.take()
    yield
    left = wait_for_leftovers(before, patience_s=PATIENCE_S)
    assert not left, "\n".join(left)


def until(what: Callable[[], object]) -> None:
    """Wait until something is so."""
    deadline = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < deadline, "it does not come about"
        time.sleep(0.01)


def is_gone(name: str) -> bool:
    """Tell whether a name is free."""
    return name not in [one.name for one in registry.found()]


def keeper_of(name: str) -> int:
    """Return the process that keeps a sandbox."""
    return int(visit(registry.find(name), "info")["pid"])


@pytest.mark.usefixtures("nothing_left")
def test_who_comes_back_finds_everything_as_it_was() -> None:
    """Files, processes, their unread output, rules and limits; the name is taken until the sandbox is ended."""
    with cloche.Sandbox(name="x", keep="10m", timeout=7, memory="200m") as sandbox:
        enforced = sandbox.exec(["true"]).enforcement
        sandbox.write_file("/home/sandbox/a", "text")
        process = sandbox.start(shell="echo begun; read word; echo $word", keep=True)
        policy = sandbox.policy
        read = sandbox.start(shell="echo once; echo twice >&2; sleep 1000", keep=True)
        assert read.stdout.read(10) == b"once\n"
        read.detach()
    with pytest.raises(InvalidRequest, match="'x' already"), cloche.Sandbox(name="x"):
        pass
    with cloche.Sandbox.attach("x") as first, cloche.Sandbox.attach("x") as second:
        assert (first.limits.timeout_s, first.limits.memory_bytes, first.policy) == (7.0, 200 << 20, policy)
        assert second.exec(["cat", "/home/sandbox/a"]).stdout == "text"
        until(lambda: first.logs(read.id) == (b"", b"twice\n"))
        again = second.process(process.id)
        until(lambda: first.logs(process.id)[0] in (b"begun\n", b""))
        again.write("word\n")
        result = again.wait()
        assert (result.stdout, result.exit_code) == ("begun\nword\n", 0)
        assert first.exec(["true"]).enforcement.as_dict() == enforced.as_dict()
        assert first.run("print(6 * 7)").stdout == "42\n"
        first.kill()
        with pytest.raises((OutcomeUnknown, InvalidRequest)):
            second.exec(["true"])
    with pytest.raises(InvalidRequest, match="no sandbox of yours"):
        cloche.Sandbox.attach("x")


@pytest.mark.usefixtures("nothing_left")
def test_without_keep_it_ends_with_its_block_for_everybody() -> None:
    """A name alone lets others in, and no more."""
    with cloche.Sandbox(name="x") as sandbox, contextlib.ExitStack() as later:
        other = later.enter_context(cloche.Sandbox.attach("x"))
        assert sandbox.exec(["true"]).ok
        until(lambda: other.exec(["true"]).ok)
        later.pop_all()
    assert is_gone("x")
    with pytest.raises((OutcomeUnknown, InvalidRequest)):
        other.exec(["true"])
    other.__exit__(None, None, None)


@pytest.mark.usefixtures("nothing_left")
def test_time_ends_it() -> None:
    """Without a client after `keep`; with one after `lifetime`; and after `idle`, unless a process is there."""
    with cloche.Sandbox(name="keep", keep=0.2) as sandbox:
        sandbox.start(["sleep", "1000"], keep=True)
    with cloche.Sandbox(name="busy", idle=2.0) as busy, cloche.Sandbox(name="life", lifetime=2.0) as life:
        busy.exec(shell="sleep 1000 >/dev/null 2>&1 &")
        running = life.start(["sleep", "1000"])
        with cloche.Sandbox(name="idle", idle=0.2):
            with pytest.raises(OutcomeUnknown):
                running.wait()
            until(lambda: is_gone("idle") and is_gone("keep") and is_gone("life"))
        time.sleep(2.2)
        assert busy.exec(["true"]).ok


@pytest.mark.usefixtures("nothing_left")
def test_init_ends_it_in_time_although_its_keeper_is_stopped() -> None:
    """Everything inside is over; what is left of the keeper goes when it may run again."""
    with cloche.Sandbox(name="x", keep="1h", lifetime=2.0) as sandbox:
        mark = f"1000.{random.randrange(1 << 30)}"
        sandbox.start(["sleep", mark], keep=True)
        keeper = keeper_of("x")
        until(lambda: _runs(mark))
        os.kill(keeper, signal.SIGSTOP)
        try:
            until(lambda: not _runs(mark))
        finally:
            os.kill(keeper, signal.SIGCONT)
        until(lambda: is_gone("x"))


def _runs(word: str) -> bool:
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if word.encode() in Path("/proc", pid, "cmdline").read_bytes().split(b"\0"):
                return True
    return False


@pytest.mark.usefixtures("nothing_left")
def test_a_pause_stops_processes_and_their_clocks() -> None:
    """A command that is paused for longer than its time-out is not ended by it; nothing starts meanwhile."""
    with cloche.Sandbox(name="x", timeout=2.0) as sandbox:
        sandbox.exec(["mkfifo", "go"])
        process = sandbox.start(shell="read word < go; echo $word", timeout=2.0)
        word = f"busy-{os.getpid()}-{time.monotonic_ns()}"  # other lanes run the same beside us
        busy = sandbox.start(shell=f"echo; while :; do :; done # {word}")
        busy.stdout.read(10)
        sandbox.pause()
        with pytest.raises(InvalidRequest, match="paused"):
            sandbox.exec(["true"])
        assert visit(registry.find("x"), "info")["is_paused"]
        until(lambda: set(_states_of(word)) == {"T"})
        time.sleep(2.2)
        sandbox.resume()
        until(lambda: "T" not in _states_of(word))
        sandbox.exec(shell="echo done > go")
        assert process.wait().stdout == "done\n"


def _states_of(word: str) -> list[str]:
    """Return the states of all processes with a word among their arguments."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if word.encode() in (folder / "cmdline").read_bytes():
                found.append((folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[0])
    return found


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("victim", ["keeper", "helper", "init"])
def test_nothing_is_left_when_what_holds_it_is_killed(victim: str) -> None:
    """Whichever of the three dies takes the others with it, what serves its network too, and the name is free."""
    before = set(_helpers_and_inits())  # of warm pools and of what other tests keep for this process
    with cloche.Sandbox(name="x", keep="1h", network_allow=["good.example"]) as sandbox:
        sandbox.start(["sleep", "1000"], keep=True)
        keeper = keeper_of("x")
        [(helper, init)] = set(_helpers_and_inits()) - before
        os.kill({"keeper": keeper, "helper": helper, "init": init}[victim], signal.SIGKILL)
        until(lambda: is_gone("x"))
        with pytest.raises((OutcomeUnknown, InvalidRequest)):
            sandbox.exec(["true"])
    with cloche.Sandbox(name="x") as sandbox:
        assert sandbox.exec(["true"]).ok


def _helpers_and_inits() -> list[tuple[int, int]]:
    return [(one, pid) for one in _below(os.getpid()) for pid in _below(one) if _is_init(pid)]


def _is_init(pid: int) -> bool:
    rows = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(row.split()[1:] for row in rows if row.startswith("NSpid:"))[1:] == ["1"]


def _below(parent: int) -> list[int]:
    found = [one.read_text().split() for one in Path(f"/proc/{parent}/task").glob("*/children")]
    return [int(pid) for pids in found for pid in pids]


def _killed_caller(name: str, keep: str, moment_s: float, host: str = "") -> tuple[list[str], str]:
    """Kill a caller some time after it has begun; return how far it came."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.harness.programs.named_caller", name, keep, host],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    ) as caller:  # fmt: skip
        assert caller.stdout is not None
        assert caller.stderr is not None
        try:
            assert caller.stdout.readline() == "ready\n"
            time.sleep(moment_s)
        finally:
            caller.kill()
        return caller.stdout.read().splitlines(), caller.stderr.read()


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("kills", [6, pytest.param(200, marks=pytest.mark.soak)])
def test_a_caller_that_is_killed_leaves_what_it_wanted_to_keep_and_nothing_else(kills: int) -> None:
    """At any moment: with `keep` it is there with its process, or was never there; without it nothing is left."""
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    moments = [(number % 2, chance.uniform(0, LATEST_S)) for number in range(kills - 2)] + [(0, 2.0), (1, 2.0)]
    for number, (is_kept, moment_s) in enumerate(moments):
        name = f"x{number}"
        said, wrong = _killed_caller(name, "1h" if is_kept else "", moment_s, "good.example" if number & 2 else "")
        assert not wrong
        if not is_kept:
            until(lambda name=name: is_gone(name))  # type: ignore[misc]
            continue
        if len(said) < 2:  # it may have been on its way
            with contextlib.suppress(InvalidRequest, BackendUnavailable), cloche.Sandbox.attach(name) as sandbox:
                assert sandbox.exec(["true"]).ok
                sandbox.kill()
            until(lambda name=name: is_gone(name))  # type: ignore[misc]
            continue
        with cloche.Sandbox.attach(name) as sandbox:
            _, _, started = said[1].partition(" ")
            assert started in [one.id for one in sandbox.processes() if one.status is None]
            sandbox.kill()
        assert is_gone(name)


@pytest.mark.usefixtures("nothing_left")
def test_a_network_is_served_although_who_opened_it_was_killed() -> None:
    """By its rules, also after a pause, and whoever is attached is told what it refused."""
    said, wrong = _killed_caller("x", "1h", 5.0, "good.example")
    assert (len(said), wrong) == (2, "")
    with cloche.Sandbox.attach("x") as sandbox:
        for _ in range(2):
            result = sandbox.run(NAMES_AND_A_LITERAL)
            assert (result.stdout, result.exit_code, result.status) == ("198.18.1.0\n403\n", 3, "denied"), result.stderr
            assert {row["host"] for row in result.meta["network"]} == {"198.51.100.7", "bad.example"}
            sandbox.pause()
            sandbox.resume()
        sandbox.kill()


LOOK_UP_MANY = """
import socket
for number in range(800):
    try:
        socket.gethostbyname(f"{number}.example")
    except OSError:
        pass
"""
LOOK_UP = ["python3", "-c", "import socket, sys; socket.gethostbyname(sys.argv[1])"]
CONNECT = "import socket; s = socket.create_connection((%r, 443)); s.settimeout(60); print(s.recv(1))"


def refused(sandbox: cloche.Sandbox) -> dict[str, int]:
    """Return how often each host was refused since the sandbox was opened."""
    return {row["host"]: row["connections"] for row in sandbox.network.traffic() if not row["is_allowed"]}


@pytest.mark.usefixtures("nothing_left")
def test_all_who_are_attached_share_a_network() -> None:
    """Each is told all that was refused, once, also while nobody was there; what one allows or denies holds for all."""
    with cloche.Sandbox(name="x", keep="1h", network_allow=["good.example"]) as sandbox:
        assert sandbox.exec([*LOOK_UP, "good.example"]).ok
        assert not sandbox.exec([*LOOK_UP, "new.example"]).ok
        sandbox.start([*LOOK_UP, "late.example"], keep=True)
    with cloche.Sandbox.attach("x") as one, cloche.Sandbox.attach("x") as other:
        told = {"new.example": 1, "late.example": 1}
        until(lambda: refused(one) == told)
        assert refused(other) == refused(one) == told
        one.network.allow("new.example")
        until(lambda: other.network.rules.as_wire()["allow"] == ["good.example", "new.example"])
        result = other.exec([*LOOK_UP, "new.example"])
        assert (result.ok, result.meta.get("network")) == (True, None)
        other.network.deny("good.example")
        assert one.exec([*LOOK_UP, "good.example"]).status == "denied"
        assert refused(other) == refused(one) == {**told, "good.example": 1}
    with cloche.Sandbox.attach("x") as again:
        assert again.network.rules.as_wire()["deny"] == ["good.example"]
        assert refused(again) == {**told, "good.example": 1}
        again.kill()


@pytest.mark.usefixtures("nothing_left")
def test_what_was_refused_while_nobody_was_attached_is_kept() -> None:
    """Each of far more hosts than a result lists is told to who comes in next."""
    with cloche.Sandbox(name="x", keep="1h", network_allow=["good.example"]) as sandbox:
        process = sandbox.start(["python3", "-c", LOOK_UP_MANY], keep=True)
    with cloche.Sandbox.attach("x") as sandbox:
        sandbox.process(process.id).wait()
    with cloche.Sandbox.attach("x") as sandbox:
        assert refused(sandbox) == {f"{one}.example": 1 for one in range(800)}
        sandbox.kill()


@pytest.mark.user_soak
@pytest.mark.usefixtures("nothing_left")
def test_rules_that_two_add_at_the_same_moment_hold_both() -> None:
    """Neither has to know of the other's, and all are told of both."""

    async def main() -> None:
        async with cloche.AsyncSandbox(name="x", keep="1h", network_allow=["good.example"]) as one:
            async with cloche.AsyncSandbox.attach("x") as other:
                mine, others = one.network, other.network
                await asyncio.gather(mine.allow("a.example"), others.deny("b.example"), mine.deny("c.example"))
                await asyncio.gather(mine.traffic(), others.traffic())  # which comes after what was told before
                assert mine.rules == others.rules
                wire = mine.rules.as_wire()
                assert wire["allow"] == ["good.example", "a.example"]
                assert sorted(wire["deny"]) == ["b.example", "c.example"]
            await one.kill()

    asyncio.run(main())


@pytest.mark.usefixtures("nothing_left")
def test_whoever_is_attached_is_asked() -> None:
    """Once for a host, and not those who do not decide."""
    asked: list[tuple[str, int]] = []

    def decide(host: str, port: int) -> bool:
        asked.append((host, port))
        return False

    program = CONNECT % "unknown.example"
    with cloche.Sandbox(name="x", keep="1h", network_allow=["good.example"], on_network="ask") as sandbox:
        with cloche.Sandbox.attach("x") as other:
            other.network.ask(decide)
            for _ in range(2):
                assert not sandbox.run(program).ok
            assert asked == [("unknown.example", 443)]
        sandbox.kill()


@pytest.mark.usefixtures("nothing_left")
def test_a_sandbox_whose_network_is_gone_can_be_entered() -> None:
    """Everything but the network goes on, and nobody is told that there was no traffic."""
    with cloche.Sandbox(name="x", keep="1h", network_allow=["good.example"]) as sandbox:
        assert sandbox.exec(["true"]).ok
        assert client._process_of_kept is not None
        client._process_of_kept.process.kill()
        client._process_of_kept.process.wait()
        for there in (sandbox, None):
            with contextlib.ExitStack() as stack:
                using = there or stack.enter_context(cloche.Sandbox.attach("x"))
                assert not using.exec([*LOOK_UP, "good.example"]).ok
                with pytest.raises(OutcomeUnknown, match="egress process of this sandbox is gone"):
                    using.network.traffic()
        sandbox.kill()


@pytest.mark.soak
@pytest.mark.usefixtures("nothing_left")
def test_two_hundred_keepers_are_killed() -> None:
    """Nothing of any is left, and each name is free at once."""
    for number in range(200):
        with cloche.Sandbox(name="x", keep="1h") as sandbox:
            sandbox.start(["sleep", "1000"], keep=True)
            if number % 2:
                sandbox.exec(shell="setsid sleep 1000 >/dev/null 2>&1 &")
            os.kill(keeper_of("x"), signal.SIGKILL)
        until(lambda: is_gone("x"))


@pytest.mark.usefixtures("nothing_left")
def test_clearing_up_removes_what_a_killed_keeper_left(names: Path) -> None:
    """`cloche gc` says what it removed; the living stay."""
    with cloche.Sandbox(name="dead", keep="1h"), cloche.Sandbox(name="x") as living:
        os.kill(keeper_of("dead"), signal.SIGKILL)
        until(lambda: is_gone("dead"))
        done = subprocess.run(
            [sys.executable, "-m", "cloche", "gc", "--json"], capture_output=True, check=True, timeout=PATIENCE_S
        )
        assert json.loads(done.stdout)["keeper"] == [
            f"file {names}/dead{suffix}" for suffix in (".sock", ".json", ".lock")
        ]
        assert living.exec(["true"]).ok


@pytest.mark.usefixtures("nothing_left")
def test_a_keeper_of_another_name_is_asked_nothing(names: Path) -> None:
    """Where the socket of a name is that of another sandbox, nobody attaches, and `kill` does not end that one."""
    with cloche.Sandbox(name="x") as meant, cloche.Sandbox(name="y") as other:
        (names / "x.sock").rename(names / "kept")
        (names / "x.sock").symlink_to(names / "y.sock")
        with pytest.raises(OutcomeUnknown, match="not its keeper"), cloche.Sandbox.attach("x"):
            pass
        with pytest.raises(OutcomeUnknown, match="not its keeper"):
            visit(registry.find("x"), "end")
        (names / "kept").rename(names / "x.sock")
        assert meant.exec(["true"]).ok
        assert other.exec(["true"]).ok


@pytest.mark.root
@pytest.mark.usefixtures("nothing_left")
def test_another_user_is_not_let_in_even_where_the_folder_lets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The keeper looks at who connects; in a folder that others may enter it would be alone with that."""
    folder = tempfile.mkdtemp(dir="/var/tmp")
    try:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        with cloche.Sandbox(name="x") as sandbox:
            for path, mode in ((folder, 0o755), (f"{folder}/cloche", 0o755), (f"{folder}/cloche/x.sock", 0o777)):
                os.chmod(path, mode)
            ours, theirs = (_first_byte(f"{folder}/cloche/x.sock", uid) for uid in (0, 65534))
            os.chmod(f"{folder}/cloche", 0o700)
            assert (ours, theirs) == (0, 1)
            assert sandbox.exec(["true"]).ok
    finally:
        shutil.rmtree(folder)


def _first_byte(path: str, uid: int) -> int:
    """Connect as a user; return 0 where anything is said to them, 1 where the connection is closed."""
    pid = os.fork()
    if pid == 0:
        try:
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            link = socket.socket(socket.AF_UNIX)
            link.connect(path)
            os._exit(0 if link.recv(1) else 1)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.usefixtures("nothing_left")
def test_a_keeper_is_small_and_shares_nothing_with_its_caller() -> None:
    """It has a session of its own, no variable, no descriptor of the caller's, and none of asyncio, json or ctypes."""
    with cloche.Sandbox(name="x") as sandbox, tempfile.TemporaryFile() as file:
        os.set_inheritable(file.fileno(), True)
        assert sandbox.exec(["true"]).ok
        folder = Path(f"/proc/{keeper_of('x')}")
        assert os.getsid(int(folder.name)) == int(folder.name)
        assert (folder / "environ").read_bytes() == b"LANG=C.UTF-8\0"
        held = []
        for descriptor in (folder / "fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # one of the command's, which is just being closed
                held.append(os.readlink(descriptor))
        assert held.count("/dev/null") == 3
        assert {name.partition(":")[0] for name in held} <= {
            "/dev/null", "socket", "pipe", str(registry.find("x").path), f"{registry.find('x').path}/x.lock",
            *[name for name in held if name.endswith("/cloche/ids") or "/packages/growing/" in name],
        }  # fmt: skip
        mapped = (folder / "maps").read_text()
        assert not [name for name in ("_asyncio", "_ctypes", "_ssl") if name in mapped]
        sizes = dict(line.split(":", 1) for line in (folder / "smaps_rollup").read_text().splitlines()[1:])
        assert int(sizes["Pss"].split()[0]) <= 8 << 10  # 3.6 MiB beside others; alone it has the interpreter to itself


@pytest.mark.user_soak
@pytest.mark.usefixtures("nothing_left")
def test_many_clients_at_once_each_get_their_own() -> None:
    """Twenty threads with a connection each, and output of several windows."""
    with cloche.Sandbox(name="x", pids=200, timeout=60, memory="1g") as sandbox:
        assert sandbox.exec(["true"]).ok
        wrong: list[object] = []

        def work(number: int) -> None:
            with cloche.Sandbox.attach("x") as one:
                result = one.exec(shell=f"yes {number} | head -c 300000; echo; cat", stdin=b"in" * 200_000)
                if (
                    not result.ok
                    or result.stdout[:50]
                    != f"{number}\n" * (50 // len(f"{number}\n")) + f"{number}\n"[: 50 % len(f"{number}\n")]
                ):
                    wrong.append((number, result))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong


@pytest.mark.usefixtures("nothing_left")
def test_a_secret_without_a_value_leaves_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its command fails, or asks for a variable of the caller, which no process has that outlives it."""
    monkeypatch.setenv("NOT_FOR_OTHERS", "0123456789abcdef")
    for command, words in (("false", "ended with exit code 1"), ("sh -c 'echo $NOT_FOR_OTHERS'", "fewer than 12")):
        secrets = {"KEY": cloche.Secret(command=command, hosts=["api.example.com"])}
        with pytest.raises(InvalidRequest, match=words):
            cloche.Sandbox(name="x", keep="10m", secrets=secrets).open()
        assert is_gone("x")
