"""Who says yes, when, and what is remembered."""

import asyncio
import fcntl
import io
import os
import pty
import sys
import termios
import threading
import time
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
    Risk,
    auto,
    callback,
    deny,
)
from cloche.agent.queue import ApprovalQueue
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
        asyncio.run(gate.approve(request))
    except ApprovalDenied:
        return False
    return True


@pytest.mark.parametrize("risk", [Risk.LOW, Risk.MEDIUM])
def test_what_is_not_high_passes_without_being_asked(risk: Risk) -> None:
    """Even where everything is denied."""
    assert passes(Gate(deny), replace(HIGH, risk=risk))


def test_nobody_named_is_a_no_that_says_how_to_name_somebody() -> None:
    """The default denies."""
    with pytest.raises(ApprovalDenied, match=r"there is no approver .* pass approve="):
        asyncio.run(Gate().approve(HIGH))


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
        asyncio.run(Gate(sleeps, patience_s=0.05).approve(HIGH))


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


def said(answer: object) -> Callable[[ApprovalRequest], object]:
    """Return an approver that says anything at all."""

    async def approver(_: ApprovalRequest) -> object:
        return answer

    return approver


@pytest.mark.parametrize("answer", [None, True, "yes", {"is_approved": True}, replace(YES, is_approved=1)])
def test_an_approver_says_yes_with_a_decision_alone(answer: object) -> None:
    """What is none is a no like any other, not an error of another kind."""
    assert not passes(Gate(said(answer)), HIGH)  # type: ignore[arg-type]


def test_only_true_remembers() -> None:
    """Text that says no is no yes, wherever a decision was read from."""
    asks = Asks(*[replace(YES, is_remembered="false")] * 2)  # type: ignore[arg-type]
    gate = Gate(asks)
    assert passes(gate, HIGH)
    assert passes(gate, HIGH)
    assert len(asks.asked) == 2


def test_an_approver_that_was_cancelled_is_a_no() -> None:
    """It does not look as if the call itself had been cancelled."""

    async def cancelled(_: ApprovalRequest) -> Decision:
        raise asyncio.CancelledError

    assert not passes(Gate(cancelled), HIGH)


def test_a_yes_that_comes_too_late_is_a_no() -> None:
    """Even from an approver that does not let itself be cancelled."""

    async def late(_: ApprovalRequest) -> Decision:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return ALWAYS
        return YES

    with pytest.raises(ApprovalDenied, match="time-out"):
        asyncio.run(Gate(late, patience_s=0.05).approve(HIGH))


@pytest.mark.parametrize("patience", [None, float("nan"), float("inf"), 0, -1, "5", True])
def test_a_patience_that_never_ends_is_refused(patience: object, tmp_path: Path) -> None:
    """It must be possible that nobody answers."""
    with pytest.raises(InvalidRequest, match="patience_s"):
        Gate(deny, patience_s=patience)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="patience_s"):
        ApprovalQueue(tmp_path / "approvals.db", patience_s=patience)  # type: ignore[arg-type]


def test_what_cannot_be_asked_is_refused_at_once() -> None:
    """And not at the first call."""
    with pytest.raises(InvalidRequest, match="cannot be asked"):
        Gate("high")  # type: ignore[arg-type]


def test_a_callback_that_never_returns_holds_up_nothing() -> None:
    """Neither other threads of the loop, nor the end of the program."""
    release = threading.Event()

    async def main() -> None:
        gate = Gate(callback(lambda _: release.wait(120)), patience_s=0.3)
        waiting = [asyncio.create_task(gate.approve(HIGH)) for _ in range(40)]
        await asyncio.sleep(0.05)
        await asyncio.wait_for(asyncio.to_thread(int), 30)
        done = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(one, ApprovalDenied) for one in done)

    begun = time.monotonic()
    asyncio.run(main())
    assert time.monotonic() - begun < 60
    release.set()


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, StopIteration, OSError])
def test_whatever_a_callback_raises_is_a_no(error: type[BaseException]) -> None:
    """And ends nothing else, and is not waited for."""

    def fails(_: ApprovalRequest) -> bool:
        raise error

    with pytest.raises(ApprovalDenied, match="the approver failed"):
        asyncio.run(Gate(callback(fails), patience_s=30).approve(HIGH))


def test_a_long_program_is_not_compared() -> None:
    """That would take minutes, in the loop."""
    asks = Asks(YES, YES)
    gate = Gate(asks)
    for step in (7, 11):
        code = "\n".join(f"x{number * step % 1009}" for number in range(100_000))
        begun = time.process_time()
        assert passes(gate, replace(HIGH, arguments={"code": code}))
        assert time.process_time() - begun < 5
    assert "not compared" in asks.asked[1].changes


@pytest.mark.parametrize("number", [0x0D, 0x3164, 0x2800, 0xFE01, 0xE0101, 0x200B, 0x2066])
def test_the_terminal_warns_of_what_cannot_be_seen(number: int) -> None:
    """Some of it is printable by the letter of Unicode."""
    output = io.StringIO()
    hidden = replace(HIGH, arguments={"code": f"print(1) # {chr(number)}"})
    asyncio.run(AskTerminal(answers=io.StringIO("n\n"), output=output)(hidden))
    assert chr(number) not in output.getvalue()
    assert f"careful: what cannot be seen is shown as an escape above: U+{number:04X}" in output.getvalue()


def test_the_terminal_says_when_code_is_longer_than_a_screen() -> None:
    """Its beginning may have left it."""
    output = io.StringIO()
    asyncio.run(
        AskTerminal(answers=io.StringIO("n\n"), output=output)(replace(HIGH, arguments={"code": "evil()" + "\n" * 500}))
    )
    assert "501 lines, 506 characters: scroll up" in output.getvalue()


def test_what_blanks_push_off_the_screen_is_warned_of() -> None:
    """One long line takes as many rows of a terminal as many short ones."""
    output = io.StringIO()
    code = "evil();" + " " * 5000 + "print(1)"
    asyncio.run(AskTerminal(answers=io.StringIO("n\n"), output=output)(replace(HIGH, arguments={"code": code})))
    assert "1 lines, 5015 characters: scroll up" in output.getvalue()


def test_code_cannot_speak_as_the_prompt_does() -> None:
    """Each of its lines has a number; what is said of the rules has none."""
    output = io.StringIO()
    code = "evil()\nrules: network none\n[y: yes, anything else: no]"
    asked = replace(HIGH, arguments={"code": code}, rules={"runs_on": "local", "policy": {"network": "open"}})
    asyncio.run(AskTerminal(answers=io.StringIO("n\n"), output=output)(asked))
    assert [line for line in output.getvalue().splitlines() if line.startswith("rules:")] == ["rules: network open"]


def test_the_terminal_says_that_the_host_has_no_rules() -> None:
    """It does not show those of a sandbox."""
    output = io.StringIO()
    asked = replace(CRITICAL, rules={"runs_on": "the host", "limits": {"timeout_s": 30.0}})
    asyncio.run(AskTerminal(answers=io.StringIO("n\n"), output=output)(asked))
    assert "rules: no sandbox: all of the host's files and network, at most 30 s" in output.getvalue()


def test_what_was_typed_before_the_question_is_no_answer() -> None:
    """Nor does a question that is given up keep the program, or the next answer."""
    controller, terminal = pty.openpty()
    with os.fdopen(terminal, "r") as answers:
        output = io.StringIO()
        ask = AskTerminal(answers=answers, output=output)
        os.write(controller, b"y\ny\n")
        deadline = time.monotonic() + 30
        while int.from_bytes(fcntl.ioctl(terminal, termios.FIONREAD, bytes(4)), sys.byteorder) < 4:
            assert time.monotonic() < deadline, "what was typed does not arrive"
            time.sleep(0.01)
        begun = time.monotonic()
        assert not passes(Gate(ask, patience_s=0.5), HIGH)
        assert time.monotonic() - begun < 30

        async def answered() -> Decision:
            asking = asyncio.create_task(ask(HIGH))
            async with asyncio.timeout(30):
                while output.getvalue().count("anything else: no") < 2:  # noqa: ASYNC110 - a thread prints it
                    await asyncio.sleep(0.01)
            os.write(controller, b"y\n")
            return await asyncio.wait_for(asking, 30)

        assert asyncio.run(answered()).is_approved
    os.close(controller)


def test_loops_share_a_terminal() -> None:
    """Each question waits for its turn, whichever loop it comes from."""
    ask = AskTerminal(answers=io.StringIO("y\n" * 8), output=io.StringIO())
    found: list[bool] = []

    async def several() -> None:
        found.extend(one.is_approved for one in await asyncio.gather(*[ask(HIGH) for _ in range(4)]))

    threads = [in_background(lambda: asyncio.run(several())) for _ in range(2)]
    for thread in threads:
        thread.join()
    assert found == [True] * 8
