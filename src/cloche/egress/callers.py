"""Who uses a sandbox's network from outside: what each is told, and who is asked about a host that no rule names.

Theory of operation: a sandbox has one caller, at the control end of its link. One that is kept has its keeper there,
who is told nothing but that somebody is wanted, and lets callers in by links of their own. A question is put to those
who have said that they decide, and the first final answer counts. While nobody is attached to a sandbox that is kept,
it is put to who stands in for them, whom the keeper starts: the queue of approvals. Nothing is told, and nothing kept,
of a question that nobody would answer.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

from cloche.jail import messages

from .ledger import KEPT_ROWS, Sum

MOST_CALLERS = 128  # of one sandbox
ASK_S = 300.0
MOST_QUESTIONS, MOST_ASKED = 32, 1024  # of the callers: at once, and in all
WANTED_AGAIN_S = 10.0  # after who stands in was started


class Caller:
    """Be one caller, by its end of the link: what it was not told yet, whether it decides, or stands in."""

    def __init__(self, end: int, *, stands_in: bool = False):
        self.end, self.stands_in = end, stands_in
        self.decides = False
        self.untold = Sum()
        os.set_blocking(end, False)  # one who does not read holds up no other sandbox


class Callers:
    """Hold the callers of one sandbox. The first is at the control end: a keeper, where the sandbox `is_kept`."""

    def __init__(self, control: int, *, is_kept: bool):
        self.control, self.is_kept = Caller(control), is_kept
        self.by_end: dict[int, Caller] = {control: self.control}
        self.history = Sum(KEPT_ROWS)  # of one that is kept, for who comes in

    def attached(self) -> list[Caller]:
        """Return those who use the sandbox."""
        return [
            caller
            for caller in self.by_end.values()
            if not (caller.stands_in or (self.is_kept and caller is self.control))
        ]

    def standing_in(self) -> list[Caller]:
        """Return who is asked while nobody is attached."""
        return [caller for caller in self.by_end.values() if caller.stands_in and caller.decides]

    def add(self, message: dict[str, Any]) -> None:
        """Note what was carried in a sandbox that is kept, for all of them and for who comes in."""
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


class Question:
    """Be one question: about which host and port, who has yet to answer, and what was answered."""

    def __init__(self, number: int, host: str, port: int):
        self.number, self.host, self.port = number, host, port
        self.asked: set[int] = set()
        self.answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()


class Questions:
    """Ask the callers of one sandbox, once for each host and port."""

    def __init__(self, callers: Callers):
        self._callers = callers
        self._by_key: dict[str, Question] = {}  # also those that were answered for good
        self._open: dict[int, Question] = {}
        self._last_number = 0
        self._wanted_at, self._is_wanted = -WANTED_AGAIN_S, False

    async def ask(self, host: str, port: int) -> bool:
        """Return what is answered; no where nobody would answer, or does so in time."""
        key = f"{host}:{port}"
        question = self._by_key.get(key)
        if question is None:
            if len(self._by_key) >= MOST_ASKED or len(self._open) >= MOST_QUESTIONS:
                return False
            self._last_number += 1
            question = self._by_key[key] = self._open[self._last_number] = Question(self._last_number, host, port)
            self._put(question)
        try:
            async with asyncio.timeout(ASK_S):
                return await asyncio.shield(question.answer)
        except TimeoutError:
            return False

    def _put(self, question: Question) -> None:
        """Put a question to those who decide; it has ended, for now, where there are none."""
        attached = self._callers.attached()
        whom = [caller for caller in attached if caller.decides] if attached else self._callers.standing_in()
        for one in whom:
            self._tell(one, question)
        if not question.asked and (attached or not self._want()):
            self._end(question, is_allowed=False, is_final=False)

    def _tell(self, caller: Caller, question: Question) -> None:
        if caller.end in question.asked:
            return
        body = {"number": question.number, "host": question.host, "port": question.port}
        if self._callers.tell_one(caller.end, "ask", body):
            question.asked.add(caller.end)

    def _want(self) -> bool:
        """Have the keeper start who stands in, though not often; tell whether it is about to come."""
        if not self._callers.is_kept:
            return False
        now = asyncio.get_running_loop().time()
        if now >= self._wanted_at + WANTED_AGAIN_S:
            self._wanted_at = now
            self._is_wanted = self._callers.tell_one(self._callers.control.end, "wanted", {})
        return self._is_wanted

    def put_to(self, caller: Caller) -> None:
        """Put what is open to somebody who decides from now on."""
        caller.decides = True
        self._is_wanted = self._is_wanted and not caller.stands_in
        for question in list(self._open.values()):
            self._tell(caller, question)

    def lose(self, caller: Caller) -> None:
        """Ask others what somebody has not answered who is gone."""
        self._is_wanted = self._is_wanted and not caller.stands_in
        for question in list(self._open.values()):
            question.asked.discard(caller.end)
            if question.asked or self._is_wanted:
                continue
            if caller.stands_in:
                self._end(question, is_allowed=False, is_final=False)
            else:
                self._put(question)

    def take_answer(self, end: int, number: int, *, is_allowed: bool, is_final: bool) -> None:
        """Take an answer, the first one that is final; where none is, the next connection asks again."""
        question = self._open.get(number)
        if question is None or end not in question.asked:
            return
        question.asked.discard(end)
        if is_final or not question.asked:
            self._end(question, is_allowed=is_allowed, is_final=is_final)

    def _end(self, question: Question, *, is_allowed: bool, is_final: bool) -> None:
        del self._open[question.number]
        if not is_final:
            del self._by_key[f"{question.host}:{question.port}"]
        if not question.answer.done():
            question.answer.set_result(is_allowed and is_final)
        for end in question.asked:
            self._callers.tell_one(end, "answered", {"number": question.number})

    def end(self) -> None:
        """Let nobody wait any more."""
        for question in self._by_key.values():
            question.answer.cancel()
