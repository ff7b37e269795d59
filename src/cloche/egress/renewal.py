"""Values of commands that are fetched anew: when their time is over, or a host has refused one.

Theory of operation: `commands.serve` is at the other end of a link. It is asked by name, runs the command, and answers
with the end of a pipe, which is read here without waiting. The placeholder stays as it is. A host's refusal is an
answer with status 401 to a request that has the value; then a value is fetched at most once in `LEAST_S`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from cloche.core.errors import InvalidRequest
from cloche.core.secrets import MOST_BYTES, check_value
from cloche.jail import messages

from .credentials import Grant, names_in
from .http_answer import AnswerEdit
from .http_request import Headers, RequestHead

LEAST_S = 60.0
UNAUTHORIZED = 401
Take = Callable[[str, str], None]


class Renewals:
    """Fetch the values of one sandbox's commands anew. `take` gets each, and raises InvalidRequest for a wrong one."""

    def __init__(self, link: int, rows: Iterable[Mapping[str, Any]]):
        self._link, self._loop = link, asyncio.get_running_loop()
        self._lives = {row["name"]: row["life_s"] for row in rows if row.get("renews")}
        self._failures: dict[str, str] = {}
        self._asked_at: dict[str, float] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._take: Take = lambda *_: None

    def begin(self, take: Take) -> None:
        """Begin, once the first values are there."""
        self._take = take
        os.set_blocking(self._link, False)
        self._loop.add_reader(self._link, self._receive)
        for name in self._lives:
            self._await_end_of_life(name)

    def close(self) -> None:
        """Let go of who runs the commands."""
        for timer in self._timers.values():
            timer.cancel()
        if self._link >= 0:
            self._loop.remove_reader(self._link)
            os.close(self._link)
            self._link = -1

    def _await_end_of_life(self, name: str) -> None:
        if (timer := self._timers.pop(name, None)) is not None:
            timer.cancel()
        if self._lives[name] is not None:
            self._timers[name] = self._loop.call_later(self._lives[name], self._ask, name)

    def note_refused(self, name: str) -> str:
        """Take note that a host has refused a value, and return what is to be told of it; empty for another secret."""
        if name not in self._lives:
            return ""
        now = self._loop.time()
        if now >= self._asked_at.get(name, now - LEAST_S) + LEAST_S:
            self._ask(name)
        failure = self._failures.get(name)
        if failure is None:
            return f"the value of {name} was refused with status {UNAUTHORIZED}; its command is run again"
        return f"the value of {name} was refused with status {UNAUTHORIZED}, and stays: its command {failure}"

    def _ask(self, name: str) -> None:
        self._asked_at[name] = self._loop.time()
        try:
            messages.send(self._link, "renew", {"name": name})
        except OSError:
            self._failures[name] = "cannot be run again, since the process that would do it has ended"

    def _receive(self) -> None:
        try:
            tag, body, fds = messages.receive(self._link)
        except BlockingIOError:
            return
        except OSError:
            tag, body, fds = "", {}, []
        if not tag:
            self.close()
            return
        name, failure = body["name"], body["why"]
        try:
            if not failure:
                self._take(name, check_value(name, _waiting_in(fds[0])))
        except (InvalidRequest, OSError, IndexError):
            failure = "wrote no value that a secret can have"
        finally:
            for fd in fds:
                os.close(fd)
        self._failures.pop(name, None)
        if failure:
            self._failures[name] = failure
        self._await_end_of_life(name)


def _waiting_in(pipe: int) -> bytes:
    """Return what is in a pipe by now. Raises OSError."""
    os.set_blocking(pipe, False)
    data = b""
    try:
        while len(data) <= MOST_BYTES and (piece := os.read(pipe, MOST_BYTES)):
            data += piece
    except BlockingIOError:
        pass  # somebody still holds its other end
    return data


class WatchedStatus:
    """Pass an answer on to another edit, and call `note` where it refuses the credential of its request."""

    def __init__(self, edit: AnswerEdit, note: Callable[[], None]):
        self._edit, self._note = edit, note
        self.keeps_length, self.feed, self.end = edit.keeps_length, edit.feed, edit.end

    def head(self, status: int, headers: Headers) -> Headers:
        """Return the headers. Raises AnswerRefused."""
        if status == UNAUTHORIZED:
            self._note()
        return self._edit.head(status, headers)


def note_refusal(renewals: Renewals, grants: Sequence[Grant], head: RequestHead, note: Callable[[str], None]) -> None:
    """Take note that a host has refused a request, with values, as it was sent."""
    for name in names_in(head.text, [(grant.name, grant.value) for grant in grants]):
        if told := renewals.note_refused(name):
            note(told)
