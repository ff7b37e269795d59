"""The callers of a sandbox's network: the messages for each, and the decisions about hosts without a rule.

Theory of operation: a sandbox has one caller, at the control end of its link. For a sandbox that is kept, that caller
is its keeper: it gets no traffic, only the request for a caller that can decide, and connects callers by links of their
own. A question goes to the callers that offered to decide, and the first final answer counts. While none of the callers
of a kept sandbox decides, the keeper starts a stand-in, the queue of approvals, which gets the question. Without a
caller or stand-in that could answer, the question is neither sent nor stored. A connection waits for a time; then it is
refused, and the question stays open: once it is answered, the next connection has the answer.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from typing import Any

from cloche.jail import messages

from .ledger import KEPT_ROWS, Sum

MOST_CALLERS = 128  # of one sandbox
ASK_S, LATE_S = 300.0, 5.0  # until a connection is refused; and while another question has no answer for that long
QUEUE_S = 120.0  # in place of the first for who stands in, whom nobody may be looking at
MOST_QUESTIONS, MOST_ASKED, MOST_PER_S = 32, 1024, 64  # of the callers: at once, in all with an answer, in one second
WANTED_AGAIN_S = 10.0  # after who stands in was started
# What a refusal says beside the rule. Nothing where nobody can be asked: to ask is not what would help.
NOBODY, REFUSED = "", "the user was asked, and refused it"
TOO_MANY = "the user is not asked, since there are too many questions already"
WILL_ASK = "the user is asked when a program connects"
NOT_YET = "the user was asked, and has not answered yet (cloche approvals); do something else first, and then try again"


class EgressCaller:
    """Hold one caller, by its end of the link: its unsent messages, whether it decides, whether it is a stand-in."""

    def __init__(self, end: int, *, stands_in: bool = False):
        self.end, self.stands_in = end, stands_in
        self.decides = False
        self.untold = Sum()
        os.set_blocking(end, False)  # one who does not read holds up no other sandbox


class Callers:
    """Hold the callers of one sandbox. The first is at the control end: a keeper, where the sandbox `is_kept`."""

    def __init__(self, control: int, *, is_kept: bool):
        self.control, self.is_kept = EgressCaller(control), is_kept
        self.by_end: dict[int, EgressCaller] = {control: self.control}
        self.history = Sum(KEPT_ROWS)  # of one that is kept, for who comes in

    def attached(self) -> list[EgressCaller]:
        """Return those who use the sandbox."""
        return [
            caller
            for caller in self.by_end.values()
            if not (caller.stands_in or (self.is_kept and caller is self.control))
        ]

    def standing_in(self) -> list[EgressCaller]:
        """Return the stand-ins that decide while no caller is attached."""
        return [caller for caller in self.by_end.values() if caller.stands_in and caller.decides]

    def add(self, message: dict[str, Any]) -> None:
        """Note the traffic of a kept sandbox, for all callers and for later ones."""
        self.history.add(message)
        for caller in self.attached():
            caller.untold.add(message)

    def tell(self, tag: str, body: dict[str, Any], *, but: int = -1) -> None:
        """Tell all who are attached, but one."""
        for caller in self.attached():
            if caller.end != but:
                self.tell_one(caller.end, tag, body)

    def tell_one(self, end: int, tag: str, body: dict[str, Any]) -> bool:
        """Tell one; return whether there was room for it."""
        try:
            messages.send(end, tag, body)
        except OSError:
            return False  # it is gone, or does not listen: it asks for a report when it wants one
        return True


class HostQuestion:
    """Hold one question: its host and port, the callers that have yet to answer, and the answer.

    The answer is None for a yes, else what a refusal says beside the rule.
    """

    def __init__(self, number: int, host: str, port: int):
        self.number, self.host, self.port = number, host, port
        self.asked: set[int] = set()
        self.answer: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self.began_at = asyncio.get_running_loop().time()


class Questions:
    """Ask the callers of one sandbox, once for each host and port."""

    def __init__(self, callers: Callers):
        self._callers = callers
        self._by_key: dict[str, HostQuestion] = {}  # also those that were answered for good
        self._open: dict[int, HostQuestion] = {}
        self._last_number = 0
        self._wanted_at, self._is_wanted = -WANTED_AGAIN_S, False
        self._lately: deque[float] = deque()  # when questions began

    async def ask(self, host: str, port: int) -> str | None:
        """Return None for a yes, else why there is none: also if no caller can decide, or none has by now."""
        key = f"{host}:{port}"
        question = self._by_key.get(key)
        if question is None:
            if len(self._by_key) >= MOST_ASKED or len(self._open) >= MOST_QUESTIONS or not self._may_ask_now():
                return TOO_MANY
            self._last_number += 1
            question = self._by_key[key] = self._open[self._last_number] = HostQuestion(self._last_number, host, port)
            self._put(question)
        try:
            async with asyncio.timeout(self._patience_s(question)):
                return await asyncio.shield(question.answer)
        except TimeoutError:
            return NOT_YET

    def state(self, host: str, port: int) -> str:
        """Return what a connection would be told by now, without asking: "" where it was approved."""
        question = self._by_key.get(f"{host}:{port}")
        if question is None:
            return WILL_ASK
        return NOT_YET if not question.answer.done() else question.answer.result() or ""

    def _patience_s(self, question: HostQuestion) -> float:
        """Return how long a connection waits: not long where another question waits for an answer in vain."""
        now = asyncio.get_running_loop().time()
        decides = any(caller.decides for caller in self._callers.attached())
        patience_s = ASK_S if decides else QUEUE_S
        if any(now - one.began_at >= patience_s for one in self._open.values()):
            patience_s = LATE_S
        return max(0.0, question.began_at + patience_s - now)

    def _may_ask_now(self) -> bool:
        """Count a question that a caller gets; no if there were too many in this second, as a refused guest goes on."""
        if not any(caller.decides for caller in self._callers.by_end.values()):
            return True
        now = asyncio.get_running_loop().time()
        while self._lately and self._lately[0] <= now - 1:
            self._lately.popleft()
        if len(self._lately) >= MOST_PER_S:
            return False
        self._lately.append(now)
        return True

    def _put(self, question: HostQuestion) -> None:
        """Send a question to the callers that decide, else to the stand-in; without any it has ended, for now."""
        attached = [caller for caller in self._callers.attached() if caller.decides]
        for one in attached or self._callers.standing_in():
            self._tell(one, question)
        if not question.asked and not self._want():
            self._end(question, NOBODY, is_final=False)

    def _tell(self, caller: EgressCaller, question: HostQuestion) -> None:
        if caller.end in question.asked:
            return
        body = {"number": question.number, "host": question.host, "port": question.port}
        if self._callers.tell_one(caller.end, "ask", body):
            question.asked.add(caller.end)

    def _want(self) -> bool:
        """Have the keeper start a stand-in, though not often; tell whether one is about to come."""
        if not self._callers.is_kept:
            return False
        now = asyncio.get_running_loop().time()
        if now >= self._wanted_at + WANTED_AGAIN_S:
            self._wanted_at = now
            self._is_wanted = self._callers.tell_one(self._callers.control.end, "wanted", {})
        return self._is_wanted

    def put_to(self, caller: EgressCaller) -> None:
        """Send the open questions to a caller that decides from now on."""
        caller.decides = True
        self._is_wanted = self._is_wanted and not caller.stands_in
        for question in list(self._open.values()):
            self._tell(caller, question)

    def lose(self, caller: EgressCaller) -> None:
        """Send the unanswered questions of a lost caller to others."""
        self._is_wanted = self._is_wanted and not caller.stands_in
        for question in list(self._open.values()):
            question.asked.discard(caller.end)
            if question.asked or self._is_wanted:
                continue
            if caller.stands_in:
                self._end(question, NOBODY, is_final=False)
            else:
                self._put(question)

    def take_answer(
        self, end: int, number: int, *, is_allowed: bool, is_final: bool, is_once: bool = False, why: str = ""
    ) -> None:
        """Take an answer, the first one that is final; where none is, the next connection asks again.

        A yes that `is_once` is for the connections that wait. `why` is told to the guest with a no.
        """
        question = self._open.get(number)
        if question is None or end not in question.asked:
            return
        question.asked.discard(end)
        if is_final or not question.asked:
            no = (why or REFUSED) if is_final else NOBODY
            self._end(question, None if is_allowed and is_final else no, is_final=is_final and not is_once)

    def _end(self, question: HostQuestion, answer: str | None, *, is_final: bool) -> None:
        del self._open[question.number]
        if not is_final:
            del self._by_key[f"{question.host}:{question.port}"]
        if not question.answer.done():
            question.answer.set_result(answer)
        for end in question.asked:
            self._callers.tell_one(end, "answered", {"number": question.number})

    def end(self) -> None:
        """Release all waiting connections."""
        for question in self._by_key.values():
            question.answer.cancel()
