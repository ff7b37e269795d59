"""Commands and processes in a live sandbox, against the real jail: what a user of the library relies on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import cloche
from cloche.backends import live_process
from cloche.core.events import Event, OutputChunk, Started
from cloche.core.processes import Detached
from cloche.sync import Process
from cloche.testing.fake import FakeBackend
from tests.harness.processes import descendants, held_up, wait_for_word

pytestmark = [pytest.mark.both_users, pytest.mark.usefixtures("settings_of_nobody")]
LONG_S = 60  # far more than anything here takes


@pytest.fixture(scope="module")
def opened() -> Iterator[cloche.Sandbox]:
    """Open one sandbox for all tests that leave nothing in it."""
    with cloche.Sandbox(live=True, timeout=LONG_S, pids=300, memory="1g", cpus=2) as sandbox:
        yield sandbox


LIST = "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"  # every command line inside


def running(sandbox: cloche.Sandbox, word: str) -> bool:
    """Tell whether a process inside has a word in its command line, whoever started it."""
    return word in sandbox.exec(shell=LIST).stdout


def wait_until_gone(sandbox: cloche.Sandbox, word: str) -> None:
    """Wait for the end of a process that was sent SIGKILL: until then it can be seen."""
    deadline = time.monotonic() + LONG_S
    while running(sandbox, word):
        assert time.monotonic() < deadline, word


# exec.


def test_a_command_has_what_it_was_given(opened: cloche.Sandbox) -> None:
    """Words, standard input, folder and variables reach it; both streams, exit code and its name come back."""
    result = opened.exec(
        ["sh", "-c", 'cat; pwd; echo "$1 $X" >&2; exit 3', "sh", "a b"], stdin="in\n", cwd="/tmp", env={"X": "é"}
    )
    assert (result.stdout, result.stderr, result.exit_code) == ("in\n/tmp\n", "a b é\n", 3)
    assert (result.status, result.meta["backend"]) == (cloche.Status.ERROR, "local")
    assert {one.id for one in opened.processes()} >= {result.meta["process"]}
    assert opened.exec(shell="read x; echo $((6 * 7)); pwd").stdout == "42\n/workspace\n"


def test_output_comes_while_a_command_runs(opened: cloche.Sandbox) -> None:
    """Callbacks get what is printed before the command has ended, after word that it has started."""
    events: list[Event] = []

    def take(event: Event) -> None:
        events.append(event)
        if isinstance(event, OutputChunk) and event.text == "ready\n":
            opened.write_file("/tmp/go", "")

    result = opened.exec(shell="echo ready; until [ -e /tmp/go ]; do sleep 0.01; done; echo done", on_event=take)
    assert result.stdout == "ready\ndone\n"
    assert isinstance(events[0], Started)
    assert [event.text for event in events if isinstance(event, OutputChunk)] == ["ready\n", "done\n"]


def test_a_callback_that_raises_ends_its_command(opened: cloche.Sandbox) -> None:
    """What it raises is raised by exec, once the command is dead."""

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        opened.exec(shell="echo; exec sleep 71001", on_output=fail)
    wait_until_gone(opened, "71001")


def test_as_much_goes_in_as_is_promised(opened: cloche.Sandbox) -> None:
    """50 MiB of input, and a megabyte of arguments in any script; one byte more of either is refused."""
    most = 50 << 20
    assert opened.exec(["wc", "-c"], stdin=bytes(most)).stdout == f"{most}\n"
    with pytest.raises(cloche.InvalidRequest, match="stdin"):
        opened.exec(["wc", "-c"], stdin=bytes(most + 1))
    words = ["é" * 65_000] * 8
    result = opened.exec(["sh", "-c", 'printf %s "$@" | wc -c', "sh", *words])
    assert result.stdout == f"{len(''.join(words).encode())}\n"
    with pytest.raises(cloche.InvalidRequest, match="argv"):
        opened.exec(["true", *words, *words[:1]])


def test_a_timeout_ends_the_whole_tree_and_only_that(opened: cloche.Sandbox) -> None:
    """What a command has started dies with it, also in a session of its own; what others have started lives."""
    with opened.start(["sleep", "72001"]) as bystander:
        result = opened.exec(shell="setsid sleep 72002 & sleep 72003 & sleep 72004", timeout="300ms")
        assert (result.status, result.exit_code, result.timed_out) == (cloche.Status.TIMEOUT, -1, True)
        found = opened.exec(shell=LIST).stdout
        assert "72001" in found
        assert not any(word in found for word in ("72002", "72003", "72004"))
        assert bystander.pid in [one.pid for one in opened.processes() if one.exit_code is None]


def test_what_a_command_leaves_behind_lives_on(opened: cloche.Sandbox) -> None:
    """A command ends when its own process does, though a grandchild holds its output; that lives until it is ended."""
    result = opened.exec(shell="sleep 73001 & echo left $!")
    pid = result.stdout.split()[1]
    assert running(opened, "73001")
    assert opened.exec(["kill", pid]).ok


def test_cancelling_exec_kills_its_tree() -> None:
    """A call that is cancelled returns when all that it started is dead."""

    async def scenario() -> None:
        async with cloche.AsyncSandbox(live=True) as sandbox:
            work = asyncio.create_task(sandbox.exec(shell="sleep 74001 & sleep 74002; true"))
            await asyncio.to_thread(wait_for_word, "74002")
            work.cancel()
            with pytest.raises(asyncio.CancelledError):
                await work
            listed = (await sandbox.exec(shell=LIST)).stdout
            assert "74001" not in listed
            assert "74002" not in listed

    asyncio.run(scenario())


def test_fifty_commands_at_once() -> None:
    """Each of fifty commands and runs at once gets its own output, and they share one file system."""

    async def scenario() -> None:
        async with cloche.AsyncSandbox(live=True, pids=200, cpus=2, memory="1g", timeout=LONG_S) as sandbox:
            commands = [sandbox.exec(["sh", "-c", f"echo {n} | tee /tmp/{n}"]) for n in range(45)]
            runs = [sandbox.run(f"open('/tmp/run-{n}', 'w').close(); print({n})") for n in range(5)]
            results = await asyncio.gather(*commands, *runs)
            assert [result.stdout for result in results] == [f"{n}\n" for n in (*range(45), *range(5))]
            assert len(await sandbox.list_dir("/tmp")) == 50

    asyncio.run(scenario())


# start, and what a process can do.


def test_a_process_answers_while_it_runs(opened: cloche.Sandbox) -> None:
    """Lines go in and come out in turns; the end of its input ends it."""
    with opened.start(["cat"]) as process:
        for text in (b"one\n", b"two\n"):
            assert process.write(text)
            assert process.stdout.read() == text
        process.close_stdin()
        assert list(process.stdout) == []
        assert process.wait().ok
        assert not process.write(b"more")


def test_signals_reach_whom_they_are_for(opened: cloche.Sandbox) -> None:
    """A signal by name reaches the process alone, or all that it has started."""
    with opened.start(shell="trap 'echo me; exit 9' TERM; sleep 75001 & echo $!; while :; do wait; done") as process:
        process.stdout.read()
        process.signal("term")
        assert (process.stdout.read_all(100), process.wait().exit_code) == (b"me\n", 9)
        assert running(opened, "75001")
    with opened.start(shell="setsid sleep 75002 & echo; wait") as process:
        process.stdout.read()
        process.signal(signal.SIGKILL, to="tree")
        assert process.wait().exit_code == 137
        wait_until_gone(opened, "75002")
    opened.exec(["pkill", "sleep"])
    with pytest.raises(cloche.InvalidRequest, match="TERMX"):
        process.signal("TERMX")


def test_leaving_its_block_kills_a_process(opened: cloche.Sandbox) -> None:
    """At the end of the block all that it started is dead, though nobody has read its output."""
    with opened.start(shell="sleep 76001 & yes") as process:
        process.stdout.read(1)
    wait_until_gone(opened, "76001")
    assert process.wait().status == cloche.Status.SIGNALED


def test_who_does_not_read_stops_that_stream_alone(opened: cloche.Sandbox) -> None:
    """A process whose output nobody reads waits when a bounded amount is under way; the rest of the sandbox does not.

    All of it comes once it is read.
    """
    total = 8 << 20
    program = (
        f"import sys\nfor n in range({total >> 16}): sys.stdout.write('x' * 65536); open('/tmp/n', 'w').write(str(n))"
    )
    with opened.start(["python3", "-c", program]) as process:
        before = ""
        while (now := opened.exec(shell="sleep 0.2; cat /tmp/n").stdout) != before or not now:
            before = now
        assert int(now) < (2 << 20) >> 16
        assert opened.run("print(1)").stdout == "1\n"
        assert len(process.stdout.read_all(total)) == total
        assert process.wait().ok


def test_wait_takes_what_nobody_has_begun_to_read(opened: cloche.Sandbox) -> None:
    """It keeps head and tail within the limit of output, so that a process that prints much still ends."""
    process = opened.start(shell="echo first; yes | head -c 3000000; echo last; echo bad >&2")
    result = process.wait(LONG_S)
    assert result.truncated
    assert result.stdout.startswith("first\ny\n")
    assert result.stdout.endswith("y\nlast\n")
    assert len(result.stdout_bytes) < opened.limits.output_bytes + 100
    assert result.stderr == "bad\n"
    with pytest.raises(cloche.InvalidRequest, match="wait"):
        process.stdout.read()


def test_waiting_has_a_time_of_its_own(opened: cloche.Sandbox) -> None:
    """A wait that is over raises TimeoutError, and the process goes on to its own time-out."""
    with opened.start(["sleep", "77001"], timeout="400ms") as process:
        with pytest.raises(TimeoutError):
            process.wait("50ms")
        assert process.wait(LONG_S).status == cloche.Status.TIMEOUT


def test_a_process_is_found_again_by_its_id(opened: cloche.Sandbox) -> None:
    """One that was let go is reached by its id, with what it printed meanwhile, and then belongs to who came last."""
    script = "until [ -e /tmp/let-go ]; do sleep 0.01; done; echo before; touch /tmp/said; read x; echo got $x; exit 5"
    process = opened.start(shell=script, keep=True)
    with process:
        pass
    opened.exec(shell="touch /tmp/let-go; until [ -e /tmp/said ]; do sleep 0.01; done")
    with pytest.raises(Detached):
        process.wait()
    again = opened.process(process.id)
    assert (again.id, again.pid) == (process.id, process.pid)
    assert again.stdout.read() == b"before\n"
    other = opened.process(process.id)
    with pytest.raises(Detached, match="another"):
        again.wait()
    other.write("word\n")
    result = other.wait()
    assert (result.stdout, result.exit_code) == ("got word\n", 5)
    assert opened.process(process.id).wait().exit_code == 5
    with pytest.raises(cloche.InvalidRequest, match="no process with id 'nobody'"):
        opened.process("nobody")


def test_a_terminal_is_one(opened: cloche.Sandbox) -> None:
    """A command has a terminal of the size that it was given and is later given; Ctrl-C reaches its foreground."""
    script = (
        "stty -echo; stty size; trap 'stty size' WINCH; trap 'echo int' INT; echo ready; while :; do sleep 0.05; done"
    )
    with opened.terminal(["sh", "-c", script], rows=33, columns=99) as terminal:
        _see(terminal, b"33 99\r\nready\r\n")
        terminal.resize(20, 70)
        _see(terminal, b"20 70\r\n")
        terminal.write(b"\x03")
        _see(terminal, b"int\r\n")
        terminal.signal("KILL")
        assert terminal.wait().exit_code == 137
    with opened.terminal() as shell:
        shell.write("tty && exit 4\n")
        assert shell.wait().exit_code == 4
    with pytest.raises(cloche.InvalidRequest, match="rows"):
        opened.terminal(rows=0)


def _see(process: Process, what: bytes) -> None:
    seen = b""
    while not seen.endswith(what):
        piece = process.stdout.read()
        assert piece, seen
        seen += piece


# Ends that are nobody's wish.


def test_closing_a_sandbox_ends_what_waits() -> None:
    """Whoever waits for a process of a sandbox that is closed hears that; nothing is left."""

    async def scenario() -> None:
        async with cloche.AsyncSandbox(live=True) as sandbox:
            process = await sandbox.start(["sleep", "78001"])
            waiting = asyncio.create_task(process.wait())
            await asyncio.to_thread(wait_for_word, "78001")
        with pytest.raises(cloche.OutcomeUnknown, match="closed"):
            await waiting

    asyncio.run(scenario())
    wait_for_word("78001", is_there=False)


def test_an_init_that_is_late_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where pid 1 says nothing of a command that has to start, or to end, the sandbox is closed."""
    monkeypatch.setattr(live_process, "LATE_S", 0.4)
    monkeypatch.setattr(live_process, "START_S", 0.4)

    async def scenario() -> None:
        for is_starting, match in ((True, "did not answer"), (False, "after its time-out")):
            async with cloche.AsyncSandbox(live=True, warm=False) as sandbox:
                process = await sandbox.start(["sleep", "79001"], timeout="300ms")
                init = [pid for pid in descendants(os.getpid()) if _is_pid_1(pid)]
                with held_up(init, for_s=LONG_S), pytest.raises(cloche.OutcomeUnknown, match=match):
                    await (sandbox.exec(["true"]) if is_starting else process.wait())

    asyncio.run(scenario())


def test_a_paused_init_is_not_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of a command stands still with it, and whoever waits for its end waits as long, and longer no more."""
    monkeypatch.setattr(live_process, "LATE_S", 0.4)

    async def scenario() -> None:
        async with cloche.AsyncSandbox(live=True) as sandbox:
            process = await sandbox.start(["sleep", "79002"], timeout="300ms")
            await sandbox.pause()
            waiting = asyncio.create_task(process.wait())
            await asyncio.wait([waiting], timeout=3)
            assert not waiting.done()
            await sandbox.resume()
            assert (await waiting).status == "timeout"

    asyncio.run(scenario())


def _is_pid_1(pid: int) -> bool:
    try:
        rows = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    return any(row.startswith("NSpid:") and row.split()[-1] == "1" for row in rows)


def test_commands_wait_for_a_turn_in_their_own_sandbox_alone() -> None:
    """More than its processes could be are each done; what goes on for long keeps no other run from starting."""

    async def scenario() -> None:
        async with cloche.AsyncSandbox(pids=16) as sandbox:
            results = await asyncio.gather(*(sandbox.exec(["echo", str(number)]) for number in range(60)))
            assert [result.stdout for result in results] == [f"{number}\n" for number in range(60)]
            going = [asyncio.create_task(sandbox.exec(["sleep", "1000"], timeout=600)) for _ in range(40)]
            assert (await cloche.arun("print(1)")).stdout == "1\n"
            for command in going:
                command.cancel()
            assert (await sandbox.exec(["echo", "over"])).stdout == "over\n"

    asyncio.run(scenario())


@pytest.mark.root  # without a control group only what a guest forks is counted, and init always finds room
def test_a_command_without_room_waits_for_its_turn() -> None:
    """It starts as soon as processes have ended, with what was sent to it; after its time-out it has not started."""

    async def main() -> None:
        async with cloche.AsyncSandbox(pids=16, timeout=LONG_S) as sandbox:
            filling = [await sandbox.start(["sleep", "60"]) for _ in range(10)]
            with contextlib.suppress(TimeoutError):
                while True:
                    filling.append(await asyncio.wait_for(sandbox.start(["sleep", "60"]), 0.5))
            with pytest.raises(cloche.StartFailed, match="has reached its limit on processes"):
                await sandbox.exec(["true"], timeout=0.1)
            waiting = asyncio.create_task(sandbox.exec(["cat"], stdin="sent before", timeout=LONG_S))
            given_up = asyncio.create_task(sandbox.exec(["true"]))
            done, _ = await asyncio.wait([waiting, given_up], timeout=0.3)
            assert not done
            await sandbox.pause()
            with pytest.raises(cloche.InvalidRequest, match="paused"):
                await sandbox.exec(["true"], timeout=LONG_S)
            await sandbox.resume()
            given_up.cancel()
            for one in filling:
                await one.kill()
            assert (await waiting).stdout == "sent before"

    asyncio.run(main())


@pytest.mark.both_users
def test_a_limit_that_a_command_failed_at_is_its_status() -> None:
    """Of processes and of the disk, which are the sandbox's; once there is room again, a failure is an error."""
    forks = """
import os
try:
    while os.fork():
        pass
except OSError:
    raise SystemExit(3)
import time
time.sleep(1000)
"""
    with cloche.Sandbox(pids=16, disk="4m", timeout=20) as sandbox:
        full = sandbox.run("open('big', 'wb').write(bytes(10 << 20))")
        assert (full.status, sandbox.exec(["rm", "big"]).status, sandbox.exec(["false"]).status) == (
            "disk_limit", "ok", "error",
        )  # fmt: skip
        forked = sandbox.run(forks)
        assert forked.exit_code == 3
        assert forked.status == ("pids_limit" if os.geteuid() == 0 else "error")  # which a control group counts
        for one in sandbox.processes():
            sandbox.process(one.id).kill()  # what it has left behind
        until_served(sandbox)


def until_served(sandbox: cloche.Sandbox) -> None:
    """Wait until something can be started again."""
    while True:
        try:
            assert sandbox.exec(["true"]).ok
        except cloche.StartFailed:
            time.sleep(0.05)
        else:
            return


# Rules.


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"level": "process"}, cloche.BackendUnavailable, "level jail or confined"),
        ({"backend": "subprocess"}, cloche.BackendUnavailable, "live=True"),
    ],
)
def test_what_cannot_live_says_so(options: dict[str, Any], error: type[Exception], match: str) -> None:
    """A backend, or a level, that has no live sandboxes is an error with the remedy."""
    with pytest.raises(error, match=match), cloche.Sandbox(live=True, **options):
        pass


def test_rules_hold_for_commands(opened: cloche.Sandbox) -> None:
    """Where bash is not allowed no command runs; a command is one thing; there is one user; nothing is free text."""
    with (
        cloche.Sandbox(live=True, languages=["python"]) as sandbox,
        pytest.raises(cloche.PolicyDenied, match="bash"),
    ):
        sandbox.exec(["true"])
    for wrong, match in [
        ({}, "argv"), ({"argv": ["true"], "shell": "true"}, "argv"), ({"argv": "true"}, "one string"),
        ({"argv": ["true"], "user": "root"}, "users=True"), ({"argv": ["a\0b"]}, "NUL"),
        ({"argv": ["true"], "cwd": ""}, "cwd"), ({"argv": ["true"], "env": {"A=B": ""}}, "A=B"),
    ]:  # fmt: skip
        with pytest.raises(cloche.InvalidRequest, match=match):
            opened.exec(**wrong)  # type: ignore[arg-type]
    with pytest.raises(cloche.SandboxFileError, match="/nowhere"):
        opened.exec(["true"], cwd="/nowhere")
    assert opened.exec(["no-such-program"]).exit_code == 127


def test_a_sandbox_that_does_not_live_says_how_to_have_one() -> None:
    """What only one that lives can do is an error that names the keyword; results need not say what was asked for."""
    with cloche.Sandbox(live=False) as sandbox:
        assert "not_live" not in sandbox.run("1").meta
        with pytest.raises(cloche.InvalidRequest, match="live=True"):
            sandbox.exec(["true"])


def test_a_sandbox_that_cannot_live_says_why(opened: cloche.Sandbox) -> None:
    """Each result says it, and so does a call that only one that lives has; one that lives says nothing of it."""
    fake = FakeBackend([cloche.Result("", "", 0, 0.0)])
    for backend, reason in (("subprocess", "level jail or confined"), (fake, "no live sandboxes")):
        with cloche.Sandbox(backend=backend) as sandbox:
            assert not sandbox.is_live
            why = sandbox.run("1").meta["not_live"]
            assert reason in why
            with pytest.raises(cloche.InvalidRequest, match=re.escape(why)):
                sandbox.exec(["true"])
    assert "not_live" not in opened.run("1").meta


def test_every_kind_of_command_is_recorded(tmp_path: Path) -> None:
    """Runs, commands, processes and terminals leave a start and an end in the log, also those that were let go."""
    with cloche.Sandbox(live=True, audit=str(tmp_path / "log")) as sandbox:
        sandbox.run("1")
        assert "audit" in sandbox.exec(["false"]).meta
        sandbox.start(["sleep", "81001"], keep=True).detach()
        with sandbox.terminal(["true"]) as terminal:
            terminal.wait()
        sandbox.start(["sleep", "81002"])
    events = [json.loads(line) for file in (tmp_path / "log").glob("*.jsonl") for line in file.read_text().splitlines()]
    ends = {(event["what"], event["status"]) for event in events if event["kind"] == "execution"}
    assert ends == {
        ("run", "ok"), ("exec", "error"), ("start", "detached"), ("terminal", "ok"), ("start", "cancelled"),
    }  # fmt: skip
    assert sum(event["kind"] == "start" for event in events) == 5
