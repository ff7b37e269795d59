"""Hosts that no rule of a live sandbox names: one client is asked, over the wire or by events, and answers by a call.

A host is asked about only if the settings or their ceilings let the client's key open it. Without an answer in time,
and while too many questions wait, a connection is refused, and the next one to that host is asked about again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from cloche.agent.approval import ApprovalRequest, Decided, Decision, record_decision
from cloche.audit.log import acting
from cloche.core.errors import ClocheError, NotFound
from cloche.core.remote import ANSWER_S, MOST_QUESTIONS
from cloche.execution.sandbox import AsyncSandbox

from .attachments import AskedHost
from .callers import Caller
from .host import SandboxHost
from .problems import Refused
from .uses import Use

Send = Callable[[Mapping[str, Any]], Awaitable[None]]


class Questions:
    """Ask one client by `send`, which raises Refused if it reads nothing. `answer_s` is how long a question waits."""

    def __init__(self, service: SandboxHost, caller: Caller, send: Send, *, answer_s: float = ANSWER_S):
        self._service, self._caller, self._send, self._answer_s = service, caller, send, answer_s
        self._waiting: dict[int, AskedHost] = {}
        self._number, self._is_over = 0, False

    async def decide(self, host: str, port: int) -> bool | None:
        """Return whether the client allows a host and port, None without an answer."""
        if self._is_over or len(self._waiting) >= MOST_QUESTIONS:
            return None
        self._number += 1
        number = self._number
        question = self._waiting[number] = AskedHost(host, port)
        try:
            if not await self._may_be_asked(host, port):
                return False
            if question.answer.done():  # closed meanwhile
                return None
            async with asyncio.timeout(self._answer_s):
                await self._send({"question": number, "host": host, "port": port})
                return await question.answer
        except (TimeoutError, Refused):
            return None
        finally:
            del self._waiting[number]

    async def _may_be_asked(self, host: str, port: int) -> bool:
        """Tell whether the client's key may open a host, by a rule of its own."""
        rule = {"network": "allowlist", "network_allow": [f"{host}:{port}"]}
        try:
            await self._service.allowed_options(self._caller, rule)
        except ClocheError:
            return False
        return True

    def take(self, number: int, *, key_id: str | None) -> AskedHost | None:
        """Return a question that waits for an answer of this key, for the first answer alone.

        A host is asked about if the key that asks may open it. Another key may have fewer permissions.
        """
        question = self._waiting.get(number)
        if question is None or question.is_taken or question.answer.done() or key_id != self._caller.key_id:
            return None
        question.is_taken = True
        return question

    def close(self) -> None:
        """Refuse the waiting connections, and all further ones."""
        self._is_over = True
        for question in self._waiting.values():
            if not question.answer.done():
                question.answer.set_result(None)


def ask_nobody(sandbox: AsyncSandbox) -> None:
    """Have hosts without a rule refused while no client is asked: nobody else may decide for a client of a service."""
    if sandbox.policy.on_network == "ask":
        sandbox.network.ask(_no_answer)


async def _no_answer(_host: str, _port: int) -> None:
    """Give no answer: the connection is refused, and the next one asks again."""


@contextmanager
def asking(use: Use, send: Send) -> Iterator[None]:
    """Ask a client about the hosts of a sandbox during the body. Raises Refused (409) if another one is asked."""
    held = use.held
    if held.questions is not None:
        raise Refused(409, "followed", f"another client takes the questions of sandbox {held.id}")
    questions = Questions(use.service, use.caller, send)
    use.sandbox.network.ask(questions.decide)
    held.questions = questions
    try:
        yield
    finally:
        questions.close()
        held.questions = None


async def answer(use: Use, number: int, *, allow: bool) -> None:
    """Answer a question, once the answer is in the audit log. Raises NotFound, AuditFailed."""
    question = None if use.held.questions is None else use.held.questions.take(number, key_id=use.caller.key_id)
    if question is None:
        raise NotFound(f"question {number} does not wait for an answer of this key, or not any more")
    try:
        await _record(use, question, allow=allow)
    except BaseException:
        allow = False
        raise
    finally:
        if not question.answer.done():
            question.answer.set_result(allow)


async def _record(use: Use, question: AskedHost, *, allow: bool) -> None:
    request = ApprovalRequest.of_host(
        question.host, question.port, policy=use.sandbox.policy, runs_on=use.sandbox.backend, sandbox=use.held.id
    )
    decision = Decided(request=request, decision=Decision(is_approved=allow, by=use.caller.name))
    audit = await use.service.audit()
    with acting(host=question.host, port=question.port):
        await asyncio.to_thread(record_decision, audit, decision)
