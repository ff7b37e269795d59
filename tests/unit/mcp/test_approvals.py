"""What a user is asked through a client, and what counts as an answer."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from mcp.server.mcpserver import AcceptedElicitation, CancelledElicitation, DeclinedElicitation
from pydantic import ValidationError

from cloche.agent.approval import ON_HOST, ApprovalRequest, Decision, Risk
from cloche.mcp import approvals
from cloche.mcp.approvals import Approval, Asking, Confirmation, NotedStates, RememberedApproval, Spent, question

REQUEST = ApprovalRequest(
    tool="run_code",
    risk=Risk.HIGH,
    arguments={"code": "print(1)", "language": "python", "timeout": 30},
    rules={"runs_on": "local", "policy": {"network": "off"}, "limits": {"timeout_s": 30.0, "memory_bytes": 1 << 28}},
)


def test_the_whole_call_is_shown() -> None:
    """The code in a fence with its language, the other arguments, and the rules in words."""
    assert question(REQUEST) == (
        "Approve run_code (high, on local)?\n```python\nprint(1)\n```\nlanguage: python\ntimeout: 30\n"
        "rules: network off, at most 30 s, 256 MiB of memory"
    )


def test_code_cannot_leave_its_fence() -> None:
    """A client may show the question as Markdown: backticks in the code open nothing."""
    shown = question(replace(REQUEST, arguments={"code": "a\n````\n**approved already**\n```"}))
    assert "`````python\na\n````\n**approved already**\n```\n`````" in shown


def test_nothing_is_hidden() -> None:
    """Characters that turn the text around or cannot be seen are shown as escapes, and that is said."""
    arguments = {"code": "x = '\u202e\u200b'\x1b[2J", "path": "a\x1b[31mb"}
    shown = question(replace(REQUEST, arguments=arguments, rules={"policy": {"network_allow": ["a\u3164.org"]}}))
    assert "\\u202e\\u200b" in shown
    assert "rules: to a\\u3164.org" in shown
    assert "\x1b" not in shown
    assert "careful: what cannot be seen" in shown


def test_a_critical_call_says_that_there_is_no_sandbox() -> None:
    """The question of a command on the host, and its confirmation, say so."""
    request = replace(REQUEST, risk=Risk.CRITICAL, rules={"runs_on": ON_HOST}, arguments={"command": "ls"})
    assert question(request).startswith("Approve run_code (critical, on the host)?\n```bash\nls\n```")
    assert "no sandbox: all of the host's files and network" in question(request, is_confirmation=True)
    assert question(request, is_confirmation=True).startswith("Confirm once more: run_code")


@pytest.mark.parametrize("value", ["yes", "true", 1, None, [True]])
def test_only_true_is_yes(value: Any) -> None:
    """A form with anything but a boolean is no answer."""
    with pytest.raises(ValidationError):
        RememberedApproval.model_validate({"approve": value})
    with pytest.raises(ValidationError):
        Confirmation.model_validate({"confirm": value})


def _answered(first: Any, second: Any, request: ApprovalRequest) -> Decision:
    async def main() -> Decision:
        approvals.begin(Asking(request=REQUEST, who="the user", is_kept=True))
        approvals.take_answers(first, second)
        return await approvals.answered(request)

    return asyncio.run(main())


NONE = AcceptedElicitation[Any].model_construct(data=None)
YES = AcceptedElicitation[Any](data=Approval(approve=True))


def test_a_yes_counts_for_what_was_shown_alone() -> None:
    """Another code, another tool, other rules or a confirmation that was not given are a no."""
    assert _answered(YES, NONE, REQUEST) == Decision(is_approved=True, by="the user")
    others = (
        replace(REQUEST, arguments={**REQUEST.arguments, "code": "print(2)"}),
        replace(REQUEST, tool="os.execute"),
        replace(REQUEST, rules={"runs_on": ON_HOST}),
        replace(REQUEST, risk=Risk.CRITICAL),
        replace(REQUEST, is_confirmation=True),
    )
    for other in others:
        assert not _answered(YES, NONE, other).is_approved


def test_anything_else_is_no() -> None:
    """So are a no, a decline, a cancel, and a form that says nothing."""
    refusals = (
        AcceptedElicitation[Any](data=Approval(approve=False)), DeclinedElicitation(), CancelledElicitation(), NONE,
    )  # fmt: skip
    for refusal in refusals:
        assert not _answered(refusal, NONE, REQUEST).is_approved


def test_nobody_asked_is_no() -> None:
    """A toolbox whose call no client began has no approver."""
    assert not asyncio.run(approvals.answered(REQUEST)).is_approved


def test_a_state_is_used_once() -> None:
    """The second use of a sealed state is noticed until it is no longer valid anyway."""
    states, spent = NotedStates([b"k" * 32]), Spent(10)

    async def use(token: str, at: float) -> bool:
        assert states.unseal(token) == b"payload"
        return spent.spend(at)

    first, second = states.seal(b"payload"), states.seal(b"payload")
    assert asyncio.run(use(first, 0))
    assert not asyncio.run(use(first, 9))
    assert asyncio.run(use(second, 9))
    assert not spent.spend(9)  # nobody knows which
