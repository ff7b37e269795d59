"""Who says yes, when, and what is remembered."""

import asyncio
import io
import sqlite3
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cloche import ApprovalDenied, InvalidRequest
from cloche.agent.approval import (
    ApprovalEvent,
    ApprovalRequest,
    Asked,
    Decided,
    Decision,
    Gate,
    auto,
    callback,
    deny,
)
from cloche.agent.queue import ApprovalQueue
from cloche.agent.risk import Risk
from cloche.agent.terminal import AskTerminal

HIGH = ApprovalRequest(tool="run_code", risk=Risk.HIGH, arguments={"code": "print(1)"}, rules={"runs_on": "local"})
CRITICAL = replace(HIGH, tool="os.execute", risk=Risk.CRITICAL, arguments={"command": "id", "shell": "sh"})
YES = Decision(is_approved=True, by="test")
ALWAYS = replace(YES, is_remembered=True)


class Asks:
    """Answer with what was prepared, and keep what was asked."""

    def __init__(self, *decisions: Decision) -> None:
        self.decisions, self.asked = list(decisions), list[ApprovalRequest]()

    async def __call__(self, request: ApprovalRequest) -> Decision:
        """Answer."""
        self.asked.append(request)
        return self.decisions.pop(0)


def passes(gate: Gate, request: ApprovalRequest) -> bool:
    """Tell whether a gate lets a call through."""
    try:
        asyncio.run(gate.pass_through(request))
    except ApprovalDenied:
        return False
    return True


@pytest.mark.parametrize("risk", [Risk.LOW, Risk.MEDIUM])
def test_what_is_not_high_passes_without_being_asked(risk: Risk) -> None:
    """Even where everything is denied."""
    assert passes(Gate(deny), replace(HIGH, risk=risk))


def test_nobody_named_is_a_no_that_says_how_to_name_somebody() -> None:
    """The default denies."""
    with pytest.raises(ApprovalDenied, match=r"nobody was named .* pass approve="):
        asyncio.run(Gate().pass_through(HIGH))


def test_a_high_call_is_asked_for_each_time_unless_it_is_remembered() -> None:
    """The same code under the same rules; anything else is another call."""
    asks = Asks(YES, ALWAYS, YES, YES, YES)
    gate = Gate(asks)
    for request in (HIGH, HIGH, HIGH, HIGH):
        assert passes(gate, request)
    assert len(asks.asked) == 2
    assert passes(gate, replace(HIGH, arguments={"code": "print(2)"}))
    assert passes(gate, replace(HIGH, rules={"runs_on": "docker"}))
    assert passes(gate, replace(HIGH, tool="code_exec"))
    assert len(asks.asked) == 5


def test_a_critical_call_is_approved_and_confirmed_every_time_whatever_was_said_before() -> None:
    """Nothing remembers it."""
    asks = Asks(*[ALWAYS] * 4)
    gate = Gate(asks)
    assert passes(gate, CRITICAL)
    assert passes(gate, CRITICAL)
    assert [request.is_confirmation for request in asks.asked] == [False, True, False, True]


def test_a_critical_call_that_is_not_confirmed_is_denied() -> None:
    """One yes is not enough."""
    assert not passes(Gate(Asks(YES, Decision(is_approved=False, by="test"))), CRITICAL)


def test_automatic_approval_ends_below_critical() -> None:
    """`auto` refuses to be made for it, and denies it."""
    assert passes(Gate(auto("high")), HIGH)
    assert not passes(Gate(auto("medium")), HIGH)
    assert not passes(Gate(auto("high")), CRITICAL)
    with pytest.raises(InvalidRequest, match="never approved automatically"):
        auto("critical")
    with pytest.raises(InvalidRequest, match="unknown risk 'huge'; known: low, medium, high, critical"):
        auto("huge")


@pytest.mark.parametrize("answer", [None, 1, "yes", [], object()])
def test_a_callback_says_yes_with_true_alone(answer: object) -> None:
    """What is not True, or a Decision, is a no."""
    assert not passes(Gate(callback(lambda _: answer)), HIGH)  # type: ignore[arg-type, return-value]
    assert passes(Gate(callback(lambda _: True)), HIGH)


def test_an_approver_that_fails_or_takes_too_long_is_a_no() -> None:
    """Fail closed."""

    async def fails(_: ApprovalRequest) -> Decision:
        raise OSError("gone")

    async def sleeps(_: ApprovalRequest) -> Decision:
        await asyncio.sleep(60)
        return YES

    assert not passes(Gate(fails), HIGH)
    with pytest.raises(ApprovalDenied, match=r"time-out: no answer within 0\.05 s"):
        asyncio.run(Gate(sleeps, patience_s=0.05).pass_through(HIGH))


def test_each_approval_is_an_event() -> None:
    """Asked, decided; and a remembered one says so."""
    events: list[ApprovalEvent] = []
    gate = Gate(Asks(ALWAYS), on_event=events.append)
    assert passes(gate, HIGH)
    assert passes(gate, HIGH)
    assert [type(event) for event in events] == [Asked, Decided, Decided]
    assert isinstance(events[-1], Decided)
    assert events[-1].was_remembered


def test_a_request_shows_what_changed_since_the_last_one() -> None:
    """As a diff of the arguments."""
    asks = Asks(YES, YES)
    gate = Gate(asks)
    passes(gate, HIGH)
    passes(gate, replace(HIGH, arguments={"code": "print(2)"}))
    assert asks.asked[0].changes == ""
    assert "-code: print(1)\n+code: print(2)" in asks.asked[1].changes


@pytest.mark.parametrize(
    ("typed", "request_", "expected"),
    [
        ("y\n", HIGH, YES),
        ("a\n", HIGH, ALWAYS),
        ("a\n", CRITICAL, None),
        ("\n", HIGH, None),
        ("", HIGH, None),
        ("yes please\n", HIGH, None),
    ],
)
def test_the_terminal_takes_a_plain_yes(typed: str, request_: ApprovalRequest, expected: Decision | None) -> None:
    """And shows what it is about."""
    output = io.StringIO()
    decision = asyncio.run(AskTerminal(answers=io.StringIO(typed), output=output)(request_))
    assert decision.is_approved == (expected is not None)
    assert decision.is_remembered == (expected is ALWAYS)
    assert request_.tool in output.getvalue()
    assert str(request_.risk) in output.getvalue()


def test_the_terminal_shows_what_would_move_its_cursor() -> None:
    """What is approved must be what is seen."""
    output = io.StringIO()
    hidden = replace(HIGH, arguments={"code": "evil()\r\x1b[2Kprint(1)\u202e"})
    asyncio.run(AskTerminal(answers=io.StringIO("n\n"), output=output)(hidden))
    assert "\x1b[2K" not in output.getvalue()
    assert "\u202e" not in output.getvalue()
    assert "\\x0d\\x1b[2K" in output.getvalue()


def in_background(work: Callable[[], None]) -> threading.Thread:
    """Start a thread."""
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_a_queue_waits_for_who_decides_elsewhere(tmp_path: Path) -> None:
    """Another holder of the same file sees the request as it was asked, and decides."""
    path = tmp_path / "approvals.db"
    asked: list[ApprovalRequest] = []

    def decide() -> None:
        other = ApprovalQueue(path)
        while not (waiting := other.waiting()):
            pass
        asked.append(waiting[0].request)
        other.decide(waiting[0].number, YES)

    thread = in_background(decide)
    decision = asyncio.run(ApprovalQueue(path, patience_s=60)(HIGH))
    thread.join(60)
    assert decision == YES
    assert asked == [HIGH]
    assert ApprovalQueue(path).waiting() == []


def test_a_queue_is_made_while_another_process_writes(tmp_path: Path) -> None:
    """Whoever comes second waits, and finds it."""
    path = tmp_path / "approvals.db"
    ApprovalQueue(path)
    other = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    timer = threading.Timer(0.3, other.execute, ["COMMIT"])
    timer.start()
    try:
        assert ApprovalQueue(path).waiting() == []
    finally:
        timer.join()
        other.close()


def test_a_queue_denies_at_its_deadline_and_takes_no_late_word(tmp_path: Path) -> None:
    """Nor one about what was decided, or was never asked."""
    queue = ApprovalQueue(tmp_path / "approvals.db", patience_s=0.1)
    assert not asyncio.run(queue(HIGH)).is_approved
    for number in (1, 7):
        with pytest.raises(InvalidRequest, match=f"no approval {number} waits"):
            queue.decide(number, YES)


def test_what_nobody_waits_for_any_more_leaves_the_queue(tmp_path: Path) -> None:
    """A gate that lost its patience has its request closed."""
    queue = ApprovalQueue(tmp_path / "approvals.db")
    assert not passes(Gate(queue, patience_s=0.2), HIGH)
    assert queue.waiting() == []


def test_a_file_that_is_no_queue_is_named(tmp_path: Path) -> None:
    """Before anything waits in it."""
    path = tmp_path / "notes.txt"
    path.write_text("not a database, however long this text may be" * 100)
    with pytest.raises(InvalidRequest, match=r"notes\.txt is no queue of approvals"):
        ApprovalQueue(path)
