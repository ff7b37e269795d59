"""Approvals on the command line: what a human sees, and that their word reaches who waits."""

import asyncio
import io
import json
import re
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cloche import ApprovalDenied, InvalidRequest
from cloche.agent.approval import ApprovalEvent, ApprovalRequest, Decided, Gate, Risk
from cloche.agent.queue import ApprovalQueue, QueueEntry
from cloche.agent.queue_file import default_path
from cloche.agent.terminal import show_request
from cloche.cli.tools import decide, list_approvals, show_approval, watch
from tests.harness.terminals import Terminal

RULES = {
    "runs_on": "local",
    "policy": {"network": "allowlist", "network_allow": ("a.example",), "packages": (), "best_effort": ()},
    "limits": {"timeout_s": 30.0, "memory_bytes": 256 << 20},
}
HIGH = ApprovalRequest(tool="run_code", risk=Risk.HIGH, arguments={"code": "print('one')"}, rules=RULES)
CRITICAL = ApprovalRequest(tool="os.execute", risk=Risk.CRITICAL, arguments={"command": "id", "shell": "sh"})
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture
def queue(tmp_path: Path) -> str:
    """Name a queue that is there."""
    path = str(tmp_path / "approvals.db")
    ApprovalQueue(path)
    return path


def waiting(queue: str) -> QueueEntry:
    """Wait until something waits, and return the oldest."""
    deadline = time.monotonic() + 60
    while not (found := ApprovalQueue(queue).waiting()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found[0]


@contextmanager
def asked(queue: str, *requests: ApprovalRequest, patience_s: float = 60) -> Iterator[list[Any]]:
    """Ask for calls one after the other, as a gate in another thread does, and give what came of each."""
    came: list[Any] = []
    gate = Gate(ApprovalQueue(queue, patience_s=patience_s), patience_s=patience_s)

    def ask() -> None:
        for request in requests:
            try:
                came.append(asyncio.run(gate.approve(request)))
            except ApprovalDenied as error:
                came.append(str(error))

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield came
    finally:
        thread.join(60)


def test_who_decides_sees_the_call_and_its_rules(queue: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In the list, and whole; what is approved and remembered reaches who waits."""
    with asked(queue, HIGH) as came:
        number = waiting(queue).number
        assert list_approvals(queue, is_all=False, as_json=False) == 0
        listed = capsys.readouterr().out
        assert re.search(rf"{number} +run_code +high +local .* waits \d+ s +print\('one'\)", listed)
        assert show_approval(queue, number, as_json=False) == 0
        shown = capsys.readouterr().out
        assert "print('one')" in shown
        assert "rules: network allowlist, to a.example, at most 30 s, 256 MiB of memory" in shown
        assert f"cloche approvals approve {number}, or deny {number}" in shown
        assert "since the last call" not in shown
        assert decide(queue, number, is_approved=True, is_remembered=True, reason="fine") == 0
        assert f"approved {number}: run_code (high); the same call" in capsys.readouterr().out
    (decision,) = came
    assert (decision.is_approved, decision.is_remembered, decision.reason) == (True, True, "fine")
    assert decision.by.endswith("(command line)")


def test_what_changed_since_the_last_call_is_shown_whoever_asked_it(
    queue: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Code and rules, across gates, that is, across processes; and a denial says why to who waits."""
    with asked(queue, HIGH):
        decide(queue, waiting(queue).number, is_approved=True)
    looser = {**RULES, "limits": {"timeout_s": 300.0, "memory_bytes": 256 << 20}}
    changed = ApprovalRequest(tool="run_code", risk=Risk.HIGH, arguments={"code": "print('two')"}, rules=looser)
    with asked(queue, changed) as came:
        entry = waiting(queue)
        show_approval(queue, entry.number, as_json=False)
        decide(queue, entry.number, is_approved=False, reason="not that")
    shown = capsys.readouterr().out
    assert "-code: print('one')" in shown
    assert "+code: print('two')" in shown
    assert "+limits.timeout_s: 300.0" in shown
    assert not {"-policy", "+policy"} & {line.partition(".")[0] for line in shown.splitlines()}
    assert came[0].startswith("run_code was not approved by ")
    assert came[0].endswith("(command line): not that")


def test_a_critical_call_is_asked_for_twice_and_never_remembered(
    queue: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second time it says that it is a confirmation."""
    with asked(queue, CRITICAL) as came:
        first = waiting(queue).number
        with pytest.raises(InvalidRequest, match="only high calls can be remembered"):
            decide(queue, first, is_approved=True, is_remembered=True)
        decide(queue, first, is_approved=True)
        assert "will be asked for once more" in capsys.readouterr().out
        second = waiting(queue).number
        show_approval(queue, second, as_json=False)
        assert "Confirm it once more?" in capsys.readouterr().out
        decide(queue, second, is_approved=True)
    assert second != first
    assert came[0].is_approved


def test_what_nobody_answers_is_a_no_an_event_and_kept(queue: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As expired; a word that comes later is refused."""
    events: list[ApprovalEvent] = []
    gate = Gate(ApprovalQueue(queue, patience_s=0.1), on_event=events.append)
    with pytest.raises(ApprovalDenied, match=r"time-out: no answer within 0\.1 s"):
        asyncio.run(gate.approve(HIGH))
    assert [event.decision.by for event in events if isinstance(event, Decided)] == ["time-out"]
    list_approvals(queue, is_all=False, as_json=False)
    assert capsys.readouterr().out == "nothing waits\n"
    list_approvals(queue, is_all=True, as_json=True)
    (kept,) = json.loads(capsys.readouterr().out)
    assert (kept["state"], kept["decision"], kept["arguments"]) == ("expired", None, {"code": "print('one')"})
    with pytest.raises(InvalidRequest, match="no approval 1 waits"):
        decide(queue, 1, is_approved=True)
    show_approval(queue, 1, as_json=False)
    assert "expired: no answer in time: not run" in capsys.readouterr().out


@pytest.mark.parametrize("do", [show_approval, lambda queue, number, **_: decide(queue, number, is_approved=True)])
def test_a_number_or_a_queue_that_is_not_there_is_named(do: Callable[..., int], queue: str, tmp_path: Path) -> None:
    """And no queue is made by looking for one."""
    with pytest.raises(InvalidRequest, match=r"there is no approval 7 in .*approvals\.db; `cloche approvals list`"):
        do(queue, 7, as_json=False)
    missing = tmp_path / "elsewhere.db"
    with pytest.raises(
        InvalidRequest, match=r"there is no queue .*elsewhere\.db; the process that asks for approvals makes it"
    ):
        do(str(missing), 7, as_json=False)
    assert not missing.exists()
    with closing(sqlite3.connect(missing)) as database, database:
        database.execute("CREATE TABLE approvals (id INTEGER)")
    with pytest.raises(InvalidRequest, match=r"elsewhere\.db cannot be used as a queue of approvals: no such column"):
        do(str(missing), 7, as_json=False)


def test_a_terminal_obeys_nothing_of_what_is_shown(queue: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The code has colours; apart from these no escape of the model's gets through, from wherever it came."""
    evil = "\x1b[2J\x1b]0;owned\x07\x9b1A\u202e"
    hostile = ApprovalRequest(
        tool=f"run{evil}", risk=Risk.HIGH,
        arguments={"code": f"print(1)\n# {evil}\rprint(2)", f"other{evil}": f"[red]{evil}", "language": "python"},
        rules={"runs_on": evil, "policy": {"network": evil}}, changes=f"+{evil}",
    )  # fmt: skip
    output = io.StringIO()
    show_request(hostile, Console(file=output, force_terminal=True, color_system="256", width=100))
    coloured = output.getvalue()
    assert COLOUR.search(coloured)
    plain = COLOUR.sub("", coloured)
    with asked(queue, hostile):
        number = waiting(queue).number
        list_approvals(queue, is_all=False, as_json=False)
        show_approval(queue, number, as_json=False)
        list_approvals(queue, is_all=False, as_json=True)
        decide(queue, number, is_approved=False)
    for text in (plain, capsys.readouterr().out):
        assert not set("\x1b\x07\x9b\r\u202e") & set(text)
    assert "\\x1b[2J" in plain
    assert "[red]" in plain


def test_what_has_ended_is_kept_for_a_while_only(queue: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest of it; what waits is never dropped."""
    monkeypatch.setattr("cloche.agent.queue.MOST_CLOSED", 3)
    with asked(queue, HIGH) as came:
        first = waiting(queue).number
        short = ApprovalQueue(queue, patience_s=0.01)
        for _ in range(6):
            assert not asyncio.run(short(HIGH)).is_approved
        kept = [one.number for one in ApprovalQueue(queue).entries()]
        assert first in kept
        assert len(kept) <= 5
        assert kept[-1] == 7
        decide(queue, first, is_approved=True)
    assert came[0].is_approved


def test_the_usual_queue_is_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the database of records, in a folder made for its owner alone, or where CLOCHE_APPROVALS says."""
    for name in ("CLOCHE_APPROVALS", "CLOCHE_DATABASE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert default_path() == str(tmp_path / "state/cloche/records.db")
    assert list_approvals(None, is_all=False, as_json=False) == 0
    assert (tmp_path / "state/cloche").stat().st_mode & 0o777 == 0o700
    assert Path(default_path()).stat().st_mode & 0o777 == 0o600
    monkeypatch.setenv("CLOCHE_APPROVALS", str(tmp_path / "mine.db"))
    assert default_path() == str(tmp_path / "mine.db")
    with pytest.raises(InvalidRequest, match=r"there is no queue .*mine\.db"):
        list_approvals(None, is_all=False, as_json=False)


def test_a_human_at_a_terminal_is_asked_about_each_call(queue: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they come, with the code in colours; what was asked for twice is a critical one."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    with Terminal("watch", "--queue", queue, verb="approvals") as terminal:
        terminal.see("asking about each call")
        with asked(queue, HIGH, CRITICAL) as came:
            before = terminal.see("[y: yes, a: yes and remember, anything else: no]")
            assert "Approve run_code (high, on local)?" in before
            assert COLOUR.search(terminal.raw.decode("utf-8", "replace").partition("print")[2])
            terminal.type("y\n")
            for asks, answer in (("Approve os.execute", "y\n"), ("Confirm once more os.execute", "n\n")):
                terminal.see(asks)
                terminal.see("anything else: no]")
                terminal.type(answer)
    approved, denied = came
    assert approved.by.endswith("(command line)")
    assert denied.startswith("os.execute was not approved by ")


def test_watching_takes_a_terminal(queue: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says so, and decides nothing."""
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    with pytest.raises(InvalidRequest, match="watch needs a terminal; without one use"):
        watch(queue)


def test_a_tool_that_is_called_on_the_command_line_waits_for_it(tmp_path: Path) -> None:
    """Three processes, one queue: who asks, who looks, who decides."""
    queue = str(tmp_path / "approvals.db")
    cloche = [sys.executable, "-m", "cloche"]
    called = [*cloche, "tools", "call", "run_code", '{"code": "6 * 7"}', "--approve", "queue", "--queue", queue]
    asking = subprocess.Popen(called, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while not Path(queue).exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        number = str(waiting(queue).number)
        done = subprocess.run(
            [*cloche, "approvals", "approve", number, "--queue", queue],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.stdout == f"approved {number}: run_code (high)\n", done.stderr
        out, err = asking.communicate(timeout=60)
        assert (out, asking.returncode) == ("[value]\n42\n", 0)
        assert err == "cloche: approvals wait in the queue: cloche approvals list\n"
    finally:
        with suppress(ProcessLookupError):
            asking.kill()
        asking.wait(60)
